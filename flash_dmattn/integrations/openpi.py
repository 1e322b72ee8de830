"""openpi and lerobot on flash_dmattn: Gemma's `eager_attention_forward`, which their layers call by name."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..masks.split import Empty
from .heads_first import attend
from .patch import Patch

__all__ = ["disable", "enable"]

NAME = "transformers.models.gemma.modeling_gemma:eager_attention_forward"


def _make(originals: dict[str, Any], empty: Empty) -> dict[str, Any]:
    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float,
        dropout: float = 0.0,
        **others: Any,
    ) -> tuple[Tensor, None]:
        masks = [] if attention_mask is None else [attention_mask]
        dropout_p = dropout if module.training else 0.0
        # Masks are 0 or the lowest number, so the split leaves no bias. rest="auto" would wait for the GPU.
        out = attend(query, key, value, masks=masks, scale=scaling, dropout_p=dropout_p, empty=empty, rest="none")
        return out.transpose(1, 2).contiguous(), None

    return {NAME: attention}


_patch = Patch("openpi", _make)
enable, disable = _patch.enable, _patch.disable
