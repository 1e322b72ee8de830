"""The byte-level language model of the demo, with dynamic-mask or full attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from flash_dmattn.nn import DynamicMaskAttention, KVCache

VOCABULARY = 256


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; about 1.0 million parameters as they stand."""

    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_heads_k: int = 2
    mlp_size: int = 512
    keep_window_size: int | None = 64
    local_window_size: int = 0
    backend: str = "auto"


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm and beside a residual path."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.attention_norm = nn.RMSNorm(width)
        self.attention = DynamicMaskAttention(
            width,
            config.num_heads,
            config.num_heads_k,
            keep_window_size=config.keep_window_size,
            local_window_size=config.local_window_size,
            backend=config.backend,
        )
        self.mlp_norm = nn.RMSNorm(width)
        self.gate_up = nn.Linear(width, 2 * config.mlp_size, bias=False)
        self.down = nn.Linear(config.mlp_size, width, bias=False)

    def forward(self, x: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cache=cache)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class ByteLanguageModel(nn.Module):
    """A decoder over bytes whose output weights are its embedding.

    Args:
        config: sizes; ``keep_window_size=None`` gives full attention.

    >>> model = ByteLanguageModel(ModelConfig(num_layers=1))
    >>> model(torch.zeros(2, 5, dtype=torch.long)).shape
    torch.Size([2, 5, 256])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size)
        self.apply(self._initialise)

    def forward(self, tokens: torch.Tensor, caches: list[KVCache] | None = None) -> torch.Tensor:
        """Logits (B, L, 256) of the byte after each of the tokens (B, L); with caches, one per block, it decodes."""
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            x = block(x, caches[index] if caches is not None else None)
        return F.linear(self.norm(x), self.embedding.weight)

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy, in nats per byte, of each byte of the windows (B, L + 1) given those before it."""
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())

    @torch.no_grad()
    def generate(
        self, prompt: bytes, count: int, temperature: float = 0.7, generator: torch.Generator | None = None
    ) -> bytes:
        """Continue a prompt by count bytes, one at a time, from the KV cache; temperature 0 takes the likeliest."""
        device = self.embedding.weight.device
        caches = [KVCache(len(prompt) + count) for _ in self.blocks]
        tokens = torch.tensor([list(prompt)], device=device)
        written = bytearray()
        for _ in range(count):
            logits = self(tokens, caches)[0, -1].float().cpu()
            if temperature > 0:
                chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            else:
                chosen = logits.argmax(-1, keepdim=True)
            written.append(int(chosen))
            tokens = chosen.view(1, 1).to(device)
        return bytes(written)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Block):
            # The residual path sums 2 * num_layers branches: each starts small, so that the sum starts near unit size.
            for branch in (module.attention.o_proj, module.down):
                nn.init.normal_(branch.weight, std=0.02 / (2 * self.config.num_layers) ** 0.5)
