"""The layers of the dynamic-mask language model."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .... import attention
from ....nn import DynamicMaskAttention
from ..attention_function import show_observers
from .configuration import DynamicMaskConfig
from .keys import Keys


class DynamicMaskSelfAttention(DynamicMaskAttention):
    """`DynamicMaskAttention` on a cache of transformers.

    The cache holds k and v alone, so that every kind of it serves: scores are made of the cached values, at each step.
    """

    calls_flash_dmattn = True  # whatever the configuration names: `check` lists it

    def __init__(self, config: DynamicMaskConfig, layer: int) -> None:
        super().__init__(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            keep_window_size=config.keep_window_size,
            local_window_size=config.local_window_size,
            rope_theta=config.rope_theta,
            qk_norm=config.qk_norm,
            backend=config.attention_backend,
        )
        self.layer = layer

    def forward(self, x: Tensor, angles: Tensor, keys: Keys) -> Tensor:  # type: ignore[override]
        """Attend from x (B, L, hidden_size) to all keys, those in the cache included."""
        q, k, v = self.project(x, angles)
        k, v = keys.append(k, v, self.layer)
        call = self.attention_call(q, k, v, self.key_scores(v), keys.padding, keys.query_index)
        show_observers(self, call)
        out = attention(**call)
        assert isinstance(out, Tensor)
        return self.o_proj(out.flatten(2))


class DynamicMaskMLP(nn.Module):
    """(silu(x Wg) * x Wu) Wd, the gated feed-forward layer (Shazeer, "GLU Variants Improve Transformer", 2020)."""

    def __init__(self, config: DynamicMaskConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DynamicMaskDecoderLayer(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: DynamicMaskConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DynamicMaskSelfAttention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = DynamicMaskMLP(config)

    def forward(self, x: Tensor, angles: Tensor, keys: Keys) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, keys)
        return x + self.mlp(self.post_attention_layernorm(x))
