"""NeMo on flash_dmattn: Conformer's attention with relative positions. Padding is a mask here, not a score of -1e4."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..masks.split import Empty
from .heads_first import attend
from .patch import Patch

__all__ = ["disable", "enable"]

NAME = "nemo.collections.asr.parts.submodules.multi_head_attention:RelPositionMultiHeadAttention.forward"


def _make(originals: dict[str, Any], empty: Empty) -> dict[str, Any]:
    # NeMo's context, which turns autocast to float16 off where NeMo requires it.
    autocast = originals[NAME].__globals__["avoid_float16_autocast_context"]

    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        pos_emb: Tensor,
        cache: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend with the scores ((q + u) k + (q + v) r) / sqrt(D), r from positions; mask is True for hidden keys."""
        key, value, query, cache = self.update_cache(key=key, value=value, query=query, cache=cache)
        if torch.is_autocast_enabled(query.device.type):
            query, key, value = query.float(), key.float(), value.float()
        with autocast():
            q, k, v = self.forward_qkv(query, key, value)  # (B, H, L, D)
            positions = self.linear_pos(pos_emb).unflatten(-1, (self.h, self.d_k)).transpose(1, 2)
            moved = self.rel_shift((q + self.pos_bias_v[:, None]) @ positions.transpose(-2, -1))
            out = attend(
                q + self.pos_bias_u[:, None],
                k,
                v,
                [moved[..., : k.shape[-2]] / math.sqrt(self.d_k)],
                masks=[] if mask is None else [~mask[:, None]],
                dropout_p=self.dropout_rate if self.training else 0.0,
            )
            out = self.linear_out(out.transpose(1, 2).flatten(2))
        return out if cache is None else (out, cache)

    return {NAME: forward}


_patch = Patch("nemo", _make)
enable, disable = _patch.enable, _patch.disable
