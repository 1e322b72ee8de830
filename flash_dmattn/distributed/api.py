"""`context_parallel_attention`: one call whose sequence is shared among the ranks of a group."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ..dispatch.settings import BackendChoice
from .group import Group
from .layout import SequenceLayout
from .mask import ShardedMask


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | ShardedMask | None = None,
    bias: Tensor | None = None,
    *,
    group: Group,
    layout: SequenceLayout,
    layout_k: SequenceLayout | None = None,
    strategy: Literal["auto", "gather", "ulysses"] = "auto",
    reduce_bias_grad: bool = False,
    exchange_dtype: torch.dtype | None = None,
    head_groups: int | None = None,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    window_size: tuple[int, int] | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    backend: BackendChoice = "auto",
    sink: Tensor | None = None,
    **refused: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention whose sequence is shared among ranks (skeleton)."""
    raise NotImplementedError
