"""The decoder whose training step is timed: plain PyTorch, but for the attention that each layer is given."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cases import Case
from .systems import Attend


class Layer(nn.Module):
    """Attention with a learned bias for each key, and a gated MLP, each after a norm and with a residual connection."""

    def __init__(self, case: Case, generator: torch.Generator) -> None:
        super().__init__()
        width = case.heads * case.head_dim
        width_k, mlp = case.heads_k * case.head_dim, 11 * width // 4
        self.head_dim = case.head_dim
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width_k, bias=False)
        self.v_proj = nn.Linear(width, width_k, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * mlp, bias=False)
        self.down = nn.Linear(mlp, width, bias=False)
        shape = case.shape_of(case.bias or "")
        self.bias = nn.Parameter(torch.randn(shape, generator=generator, device=generator.device))

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """x (B, L, width) after the layer."""
        normed = self.attention_norm(x)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(normed).unflatten(-1, (-1, self.head_dim)) for project in projections)
        x = x + self.o_proj(attend(q, k, v, self.bias).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """A decoder of the sizes of a case, bf16 with biases in fp32, and a batch of tokens to train it on.

    Width heads * D, MLP of 11/4 of it, vocabulary of 16 times it; no positions besides causality. Every layer has the
    mask that the rule of the case makes of its own bias, once: it stays what it is while the step is timed. Each system
    makes it in its own form, for which it gets the biases.

    Args:
        case: of group "model".
        device: where.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__()
        assert case.layers is not None and case.bias == "bkj"
        generator = torch.Generator(device).manual_seed(0)
        width = case.heads * case.head_dim
        with torch.device(device):
            self.embedding = nn.Embedding(16 * width, width)
            self.layers = nn.ModuleList(Layer(case, generator) for _ in range(case.layers))
            self.norm = nn.RMSNorm(width)
            self.head = nn.Linear(width, 16 * width, bias=False)
        self._initialise(generator)
        for name, parameter in self.named_parameters():
            if name not in self.bias_names:
                parameter.data = parameter.data.to(torch.bfloat16)
        size = (case.batch, case.seqlen + 1)
        self.tokens = torch.randint(16 * width, size, generator=generator, device=device)

    @property
    def bias_names(self) -> list[str]:
        """The names of the parameters that are added to the scores."""
        return [f"layers.{index}.bias" for index in range(len(self.layers))]

    @property
    def biases(self) -> list[nn.Parameter]:
        """The parameters of these names."""
        return [self.get_parameter(name) for name in self.bias_names]

    def forward(self, attends: Sequence[Attend]) -> Tensor:
        """Compute the mean cross-entropy of the next token, in at least fp32; `attends` has one for each layer."""
        x = self.embedding(self.tokens[:, :-1])
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, attend)
        logits = self.head(self.norm(x)).flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, self.tokens[:, 1:].flatten())

    def _initialise(self, generator: torch.Generator) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # The residual path sums two branches a layer: each starts small, so that the sum starts near unit size.
                branch = name.endswith(("o_proj.weight", "down.weight"))
                std = 0.02 / (2 * len(self.layers)) ** 0.5 if branch else 0.02
                nn.init.normal_(parameter, std=std, generator=generator)


def without_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Return q + k + v, which replaces attention to time the rest of a step; q, k and v still get gradients."""
    return q + (k + v).repeat_interleave(q.shape[2] // k.shape[2], 2)
