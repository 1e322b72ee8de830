"""Boltz on flash_dmattn: triangle attention, and both versions of `AttentionPairBias`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..masks.split import Empty
from .heads_first import attend
from .patch import Patch

__all__ = ["disable", "enable"]

TRIANGLE = "boltz.model.layers.triangular_attention.primitives:_attention"
PAIRS_1 = "boltz.model.layers.attention:AttentionPairBias.forward"
PAIRS_2 = "boltz.model.layers.attentionv2:AttentionPairBias.forward"


def _has_keys_only(bias: Tensor) -> bool:
    return bias.dim() >= 3 and bias.shape[-3:-1] == (1, 1)


def _make(originals: dict[str, Any], empty: Empty) -> dict[str, Any]:
    def triangle(query: Tensor, key: Tensor, value: Tensor, biases: list[Tensor]) -> Tensor:
        masks = [x for x in biases if _has_keys_only(x)]  # inf * (mask - 1)
        pairs = [x for x in biases if not _has_keys_only(x)]
        return attend(query, key, value, pairs, masks=masks, scale=1.0, empty=empty, rest="none")

    def pairs(module: Any, s: Tensor, keys: Tensor, bias: Tensor, mask: Tensor, multiplicity: int) -> Tensor:
        """Attend from s (B * multiplicity, L, C) with a bias (B, H, L, Lk) and a 0/1 mask (B * multiplicity, Lk)."""

        def heads(x: Tensor) -> Tensor:  # samples of a structure have the same pairs: (B, multiplicity, H, L, D)
            return x.unflatten(-1, (module.num_heads, -1)).unflatten(0, (-1, multiplicity)).transpose(-3, -2)

        hidden = ((mask.float() - 1) * module.inf)[:, None, None]
        if hidden.shape[0] == s.shape[0]:
            hidden = hidden.unflatten(0, (-1, multiplicity))
        q, k, v = heads(module.proj_q(s)), heads(module.proj_k(keys)), heads(module.proj_v(keys))
        dtype = torch.float32
        out = attend(q, k, v, [bias[:, None]], masks=[hidden], empty=empty, rest="none", dtype=dtype)
        out = out.transpose(-3, -2).flatten(0, 1).flatten(-2)
        result: Tensor = module.proj_o(module.proj_g(s).sigmoid() * out)
        return result

    def forward_1(
        self: Any,
        s: Tensor,
        z: Tensor,
        mask: Tensor,
        multiplicity: int = 1,
        to_keys: Callable[[Tensor], Tensor] | None = None,
        model_cache: dict[str, Tensor] | None = None,
    ) -> Tensor:
        s = keys = self.norm_s(s) if self.initial_norm else s
        if to_keys is not None:
            keys, mask = to_keys(s), to_keys(mask[..., None])[..., 0]
        bias = None if model_cache is None else model_cache.get("z")
        if bias is None:
            bias = self.proj_z(z)
            if model_cache is not None:
                model_cache["z"] = bias
        return pairs(self, s, keys, bias, mask, multiplicity)

    def forward_2(self: Any, s: Tensor, z: Tensor, mask: Tensor, k_in: Tensor, multiplicity: int = 1) -> Tensor:
        return pairs(self, s, k_in, self.proj_z(z), mask, multiplicity)

    return {TRIANGLE: triangle, PAIRS_1: forward_1, PAIRS_2: forward_2}


_patch = Patch("boltz", _make)
enable, disable = _patch.enable, _patch.disable
