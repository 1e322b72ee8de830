"""openfold3 on flash_dmattn: all calls of its `_attention`, for triangles, pairs, MSA and diffusion."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..masks.split import Empty
from .heads_first import attend
from .patch import Patch

__all__ = ["disable", "enable"]

NAME = "openfold3.core.model.primitives.attention:_attention"


def _make(originals: dict[str, Any], empty: Empty) -> dict[str, Any]:
    def attention(
        query: Tensor, key: Tensor, value: Tensor, biases: list[Tensor], use_high_precision: bool = False
    ) -> Tensor:
        if query.dim() < 4:  # global attention: keys have no heads
            out: Tensor = originals[NAME](query, key, value, biases, use_high_precision)
            return out
        dtype = torch.promote_types(query.dtype, torch.float32) if use_high_precision else query.dtype
        # The first one is a mask, inf * (mask - 1); the others are for pairs.
        return attend(query, key, value, biases[1:], masks=biases[:1], scale=1.0, empty=empty, rest="none", dtype=dtype)

    return {NAME: attention}


_patch = Patch("openfold", _make)
enable, disable = _patch.enable, _patch.disable
