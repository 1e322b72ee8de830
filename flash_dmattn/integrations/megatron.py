"""Megatron-LM's sparse attention (DSA) on flash_dmattn: a module of kernels, with `dsa_kernel_backend="dmattn"`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api import attention
from ..masks import PreparedMask
from ..masks.split import Empty
from .patch import Patch

__all__ = ["disable", "enable", "run_fused_absorbed_sparse_attention"]

KERNELS = "megatron.core.transformer.experimental_attention_variant.dsa_kernels"


def run_fused_absorbed_sparse_attention(
    query: Tensor,
    key: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    v_channels: int,
    topk_length: Tensor | None = None,
) -> Tensor | None:
    """Attend from each query to its listed keys; Megatron calls this function by name.

    No causal mask is applied, because Megatron's lists have no later keys.

    Args:
        query: (Lq, B, H, D).
        key: (Lk, B, 1, D); its first `v_channels` channels are the values.
        topk_indices: (B, Lq, K), -1 for no key.
        softmax_scale: of the scores.
        v_channels: the number of channels of a value.
        topk_length: (B, Lq), the number of entries that count in each list.

    Returns:
        (Lq, B, H, v_channels); None for other shapes, for which Megatron uses its fallback.
    """
    if query.dim() != 4 or key.dim() != 4 or key.shape[2] != 1 or topk_indices.dim() != 3:
        return None
    if topk_length is not None:
        places = torch.arange(topk_indices.shape[-1], device=topk_indices.device)
        topk_indices = topk_indices.masked_fill(places >= topk_length[..., None], -1)
    lists = PreparedMask.from_lists(topk_indices[:, None].int(), seqlen_k=key.shape[0])
    q, k = query.transpose(0, 1), key.transpose(0, 1)
    out = attention(q, k, k[..., :v_channels], lists, softmax_scale=softmax_scale)
    assert isinstance(out, Tensor)
    return out.transpose(0, 1).contiguous()


def _make(originals: dict[str, Any], empty: Empty) -> dict[str, Any]:
    return {f"{KERNELS}:_BACKEND_MODULE_NAME_BY_BACKEND[dmattn]": __name__}


_patch = Patch("megatron", _make)
enable, disable = _patch.enable, _patch.disable
