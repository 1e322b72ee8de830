"""Protenix on flash_dmattn: both of its `_attention`, for tokens and windows of atoms, and for triangles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..masks.split import Empty
from .heads_first import attend
from .patch import Patch

__all__ = ["disable", "enable"]

NAME = "protenix.model.modules.primitives:_attention"
TRIANGLE = "protenix.model.triangular.layers:_attention"  # of `triangle_attention="torch"`


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

    def triangle(query: Tensor, key: Tensor, value: Tensor, biases: list[Tensor]) -> Tensor:
        # The first one is a mask, inf * (mask - 1); the other one is for pairs.
        return attend(query, key, value, biases[1:], masks=biases[:1], scale=1.0, empty=empty, rest="none")

    return {NAME: attention, TRIANGLE: triangle}


_patch = Patch("protenix", _make)
enable, disable = _patch.enable, _patch.disable
