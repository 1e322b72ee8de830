"""Protenix on flash_dmattn: all calls of its `_attention`, for tokens, triangles and windows of atoms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..masks.split import Empty
from .heads_first import attend
from .patch import Patch

__all__ = ["disable", "enable"]

NAME = "protenix.model.modules.primitives:_attention"


def _make(originals: dict[str, Any], empty: Empty) -> dict[str, Any]:
    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_bias: Tensor | None = None,
        use_efficient_implementation: bool = True,
        inplace_safe: bool = False,
    ) -> Tensor:
        if q.dim() < 3:
            out: Tensor = originals[NAME](q, k, v, attn_bias, use_efficient_implementation, inplace_safe)
            return out
        masks = [] if attn_bias is None else [attn_bias]
        dtype = torch.promote_types(q.dtype, torch.float32)
        # The tensor also has the bias of pairs, so the split always leaves a bias.
        return attend(q, k, v, masks=masks, scale=1.0, empty=empty, rest="keep", dtype=dtype)

    return {NAME: attention}


_patch = Patch("protenix", _make)
enable, disable = _patch.enable, _patch.disable
