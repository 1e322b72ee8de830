"""Validation of a context-parallel call, and what every rank has to know of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..masks import PreparedMask
from ..problem import AttentionProblem, NeedsGrad, Shape4, TensorSpec, as_scores, check_flag, dtype_name, unpacked_spec
from ..sequences.nested import is_nested
from ..validation import describe
from .agreement import Shared
from .exchange import sum_dtype
from .group import Members
from .layout import SequenceLayout
from .mask import ShardedMask
from .reading import CLEAR_SHARE, length_of, runs_read, share_moved
from .strategy import strategy_of


class ParallelCall(NamedTuple):
    """One call as its rank has it, checked.

    Attributes:
        problem: the rank's rows over all keys, as one ordinary call; strides of k and v are of no account.
        members, layout, layout_k: of the group, of queries and of keys.
        mask: None, 4-D bool, or sharded by rows and prepared.
        bias: None or 4-D.
        mask_needs_keys, bias_needs_keys: whether each has one row for all queries, sharded by keys.
        strategy: "gather" or "ulysses"; and why, in words.
        head_groups: of the former, how many groups of key-value heads are gathered one after the other.
        sends_parts: of the former, whether ranks send each other the keys that are read; else all get all of them.
        number: which of the calls over its groups it is, by which ranks know each other's backward passes; 0 in a
            compiled graph.
    """

    problem: AttentionProblem
    members: Members
    layout: SequenceLayout
    layout_k: SequenceLayout
    mask: Tensor | ShardedMask | None
    bias: Tensor | None
    mask_needs_keys: bool
    bias_needs_keys: bool
    strategy: str
    why: str
    head_groups: int
    sends_parts: bool
    number: int

    def keys_held(self, rank: int) -> int:
        """How many keys a rank has while it computes."""
        if not self.sends_parts:
            return self.layout_k.length
        return length_of(runs_read(self.layout, rank, self.layout_k.length, self.problem.window))

    @property
    def has_rows(self) -> bool:
        """Whether a mask or a bias has values of its own for the rank's rows."""
        bias, mask = self.bias, self.mask
        of_mask = isinstance(mask, ShardedMask) or (mask is not None and mask.shape[2] > 1)
        return of_mask or (bias is not None and bias.shape[2] > 1)


def describe_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | ShardedMask | None,
    bias: Tensor | None,
    sink: Tensor | None,
    members: Members,
    layout: SequenceLayout,
    layout_k: SequenceLayout | None,
    strategy: str,
    groups: int | None,
    is_causal: bool,
    softmax_scale: float | None,
    softcap: float,
    window_size: tuple[int, int] | None,
    deterministic: bool | None,
    return_lse: bool,
) -> ParallelCall:
    """Validate what one rank was given.

    Raises:
        TypeError, ValueError: as `attention`, of the rank's rows over all keys; and what does not fit the layouts.
    """
    if is_nested(q):
        raise ValueError("q is a nested tensor; context parallelism shares one sequence: pad it, or mask its documents")
    layout_k = check_layouts(q, k, v, members, layout, layout_k)
    mask_needs_keys, whole_mask = _whole_keys(mask, layout_k)
    bias_needs_keys, whole_bias = _whole_keys(bias, layout_k)
    if isinstance(mask, ShardedMask):
        is_causal, window_size = _band_of(mask, is_causal, window_size, members, layout, layout_k)
        shape = (mask.batch, mask.heads, layout.local_length, layout_k.length)
        whole_mask = torch.empty((1, 1, 1, 1), dtype=torch.bool, device=mask.device).expand(shape)
    elif isinstance(mask, PreparedMask):
        raise TypeError(
            f"mask is a {type(mask).__name__}, of whole rows; context parallelism needs one of "
            "flash_dmattn.distributed.prepare_mask, or a bool tensor of this rank's rows"
        )
    numbers = (is_causal, softmax_scale, softcap, window_size, deterministic, return_lse, False)
    whole_k, whole_v = (_standing_for(x, layout_k.length, 1) for x in (k, v))
    problem, _, _ = describe(q, whole_k, whole_v, whole_mask, whole_bias, *numbers, sink=sink)
    if torch.is_grad_enabled():
        needs = (x is not None and x.requires_grad for x in (q, k, v, bias, sink))
        problem = problem._replace(needs_grad=NeedsGrad(*needs))
    call = ParallelCall(
        problem,
        members,
        layout,
        layout_k,
        as_scores(mask) if isinstance(mask, Tensor) else mask,
        None if bias is None else as_scores(bias),
        mask_needs_keys,
        bias_needs_keys,
        strategy,
        "",
        1,
        False,
        0,
    )
    call = call._replace(problem=_as_read(call))
    p = call.problem
    share = share_moved(layout, layout_k, p.window)
    share = share if share <= CLEAR_SHARE else 1.0
    strategy, why = strategy_of(strategy, p.num_heads, p.num_heads_k, members.size, call.has_rows, share)
    call = call._replace(strategy=strategy, why=why, sends_parts=strategy == "gather" and share < 1)
    return call._replace(head_groups=_head_groups(call, groups))


def _as_read(call: ParallelCall) -> AttentionProblem:
    """The problem with mask and bias as slices read them, where that is not as they were given."""
    problem, mask, bias = call.problem, call.mask, call.bias
    if isinstance(mask, ShardedMask):
        form = mask.masks[0].form
        rows = 1 if form == "keys" else problem.seqlen_q
        problem = problem._replace(mask=unpacked_spec((mask.batch, mask.heads, rows, problem.seqlen_k)), mask_form=form)
    elif call.mask_needs_keys and problem.mask is not None:
        problem = problem._replace(mask=_contiguous_spec(problem.mask.shape, torch.bool))
    if problem.bias is not None and bias is not None and bias.shape[2] == 1:
        dtype = sum_dtype(bias.dtype) if problem.needs_grad.bias else bias.dtype
        whole = _contiguous_spec(problem.bias.shape, dtype) if call.bias_needs_keys else problem.bias
        problem = problem._replace(bias=whole._replace(dtype=dtype))
    return problem


def check_layouts(
    q: Tensor, k: Tensor, v: Tensor, members: Members, layout: SequenceLayout, layout_k: SequenceLayout | None
) -> SequenceLayout:
    """The layout of keys; `describe` names what is no tensor of four dims."""
    if not all(isinstance(x, Tensor) and x.dim() == 4 for x in (q, k, v)):
        return layout
    if layout_k is None:
        if k.shape[1] != q.shape[1]:
            raise ValueError(
                f"k has {k.shape[1]} rows and q has {q.shape[1]}; layout_k needs to be the layout of the keys, not None"
            )
        layout_k = layout
    if not isinstance(layout_k, SequenceLayout):
        raise TypeError(f"layout_k is a {type(layout_k).__name__}; it needs to be a SequenceLayout")
    if layout_k.world_size != members.size:
        raise ValueError(f"layout_k is for {layout_k.world_size} ranks; it needs the {members.size} of the group")
    for name, x, of in (("q", q, layout), ("k", k, layout_k), ("v", v, layout_k)):
        if x.shape[1] != of.local_length:
            raise ValueError(
                f"{name} has {x.shape[1]} rows; it needs the {of.local_length} that each of {members.size} ranks has "
                f"of {of.length}: layout.shard({name}, 1, rank) takes them"
            )
    return layout_k


def _contiguous_spec(shape: Shape4, dtype: torch.dtype) -> TensorSpec:
    return unpacked_spec(shape)._replace(dtype=dtype)


def _standing_for(x: Tensor, length: int, dim: int) -> Tensor:
    """A tensor of the whole length along a dim in the place of a part of it, without memory."""
    if not isinstance(x, Tensor) or x.dim() != 4:
        return x
    shape = list(x.shape)
    shape[dim] = length
    return x.detach().new_empty((1, 1, 1, 1)).expand(shape)


def _whole_keys(x: Any, layout_k: SequenceLayout) -> tuple[bool, Tensor | None]:
    """Whether a mask or bias is sharded by keys, and what stands for it whole; it has one row for all queries then."""
    if not isinstance(x, Tensor) or not 2 <= x.dim() <= 4:
        return False, x
    b, h, i, j = as_scores(x).shape
    if i == 1 and j == layout_k.local_length and 1 < j < layout_k.length:
        return True, x.detach().new_empty((1, 1, 1, 1)).expand(b, h, i, layout_k.length)
    return False, x


def _band_of(
    mask: ShardedMask,
    is_causal: bool,
    window_size: tuple[int, int] | None,
    members: Members,
    layout: SequenceLayout,
    layout_k: SequenceLayout,
) -> tuple[bool, tuple[int, int]]:
    if (mask.layout, mask.layout_k) != (layout, layout_k):
        raise ValueError(f"mask was prepared for other layouts, {mask}; it needs those of the call")
    if mask.rank != members.rank:
        raise ValueError(f"mask was prepared for rank {mask.rank}; this is rank {members.rank}")
    if check_flag("is_causal", is_causal) not in (False, mask.is_causal) or window_size not in (None, mask.window_size):
        raise ValueError(
            f"is_causal is {is_causal} and window_size is {window_size}, but mask was prepared with "
            f"is_causal={mask.is_causal}, window_size={mask.window_size}; a prepared mask brings its own limits"
        )
    return mask.is_causal, mask.window_size


def _head_groups(call: ParallelCall, groups: int | None) -> int:
    if groups is None:
        return 1  # the fastest from 16384 to 65536 tokens (docs/scale.md)
    p, bias = call.problem, call.bias
    if isinstance(groups, bool) or not isinstance(groups, int):
        raise TypeError(f"head_groups is {groups!r}; it needs to be an int or None")
    if groups < 1 or p.num_heads_k % groups:
        raise ValueError(f"head_groups is {groups}; it needs to divide the {p.num_heads_k} key-value heads")
    if groups > 1 and bias is not None and bias.shape[1] == 1 and bias.shape[2] > 1 and p.needs_grad.bias:
        raise ValueError(
            f"head_groups is {groups}, and bias of shape {tuple(bias.shape)} has one gradient for all heads, "
            "which one call has to sum; it needs to be 1"
        )
    return groups


def shared_of(call: ParallelCall, **more: object) -> Shared:
    """What has to be the same on every rank, in words."""
    p = call.problem
    mask, bias = call.mask, call.bias
    of_mask = None if mask is None else f"{tuple(mask.shape)}" if isinstance(mask, Tensor) else "prepared"
    needed = [name for name, needed in zip(NeedsGrad._fields, p.needs_grad, strict=True) if needed]
    values = {
        "device": p.device,
        "q": f"{dtype_name(p.dtype)} {(p.batch, p.seqlen_q, p.num_heads, p.head_dim)}",
        "k": (p.batch, call.layout_k.local_length, p.num_heads_k, p.head_dim),
        "v": (p.batch, call.layout_k.local_length, p.num_heads_k, p.head_dim_v),
        "mask": of_mask,
        "bias": None if bias is None else f"{dtype_name(bias.dtype)} {tuple(bias.shape)}",
        "sink": None if p.sink is None else dtype_name(p.sink),
        "layout": call.layout,
        "layout_k": call.layout_k,
        "strategy": call.strategy,
        "head_groups": call.head_groups,
        "keys sent": "those that are read" if call.sends_parts else "all",
        "is_causal": p.is_causal,
        "window_size": p.window_size,
        "softmax_scale": p.softmax_scale,
        "softcap": p.softcap,
        "deterministic": p.deterministic,
        "return_lse": p.return_lse,
        "requires_grad": ", ".join(needed) or "nothing",
        **more,
    }
    return tuple((name, str(value)) for name, value in values.items())
