"""diffusers on flash_dmattn: calls with a mask in the dispatcher's default backend, "native"."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..masks.split import Empty
from .heads_first import attend
from .patch import Patch

__all__ = ["disable", "enable"]

NAME = "diffusers.models.attention_dispatch:_AttentionBackendRegistry._backends[native]"


def _make(originals: dict[str, Any], empty: Empty) -> dict[str, Any]:
    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> Any:
        """Attend; tensors are (B, L, H, D), the mask is (B, Lk) or as in F.scaled_dot_product_attention."""
        if attn_mask is None or is_causal or return_lse or _parallel_config is not None:
            return originals[NAME](
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse, _parallel_config
            )
        if attn_mask.dim() == 2 and attn_mask.shape == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None]
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return attend(q, k, v, masks=[attn_mask], scale=scale, dropout_p=dropout_p, empty=empty).transpose(1, 2)

    return {NAME: attention}


_patch = Patch("diffusers", _make)
enable, disable = _patch.enable, _patch.disable
