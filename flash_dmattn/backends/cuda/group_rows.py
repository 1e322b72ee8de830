"""Short calls: the query heads of a group become rows of one tile, so that keys are loaded once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...problem import AttentionProblem, MaskChoice, TensorSpec, heads_as_rows, make_band, tensor_spec
from ...problem.inputs import Inputs
from ..mask_choice import prepared_form, view_of
from .operands import Attend


def has_group_rows(p: AttentionProblem) -> bool:
    """Return whether heads become rows: in calls of one query, unless a prepared mask was packed for that query.

    Keys before the window are left out then, which moves the others to other blocks: not in the invariant mode.
    """
    if p.seqlen_q != 1 or p.num_heads == p.num_heads_k or p.sink is not None or p.dropout_p > 0:
        return False
    if p.relative is not None:
        return False
    first, stop = keys_in_sight(p.seqlen_k, p.window)
    if p.flags.invariant and first > 0:
        return False
    return p.mask_form in ("none", "dense") and first < stop


def keys_in_sight(seqlen_k: int, window: tuple[int, int]) -> tuple[int, int]:
    """Return the first key that the one query attends to, and the key after the last."""
    band = make_band(1, seqlen_k, window)
    return (0, seqlen_k) if band is None else (max(0, band.low), min(seqlen_k, band.high + 1))


def plan_group_rows(p: AttentionProblem, plan: Callable[[AttentionProblem], Attend]) -> Attend:
    """Plan a call of one query as one with G queries on the key-value heads, one for each head of a group, by views."""
    first, stop = keys_in_sight(p.seqlen_k, p.window)
    heads, heads_k = p.num_heads, p.num_heads_k

    def scores(x: Tensor) -> Tensor:
        """View a mask or a bias, for the visible keys."""
        return heads_as_rows(x[..., first:stop] if x.shape[3] > 1 else x, heads, heads_k)

    def spec(x: TensorSpec | None) -> TensorSpec | None:
        if x is None:
            return None
        return tensor_spec(scores(torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device="meta")))

    batch, _, head, value = p.q_strides
    rows = p._replace(
        seqlen_q=heads // heads_k,
        seqlen_k=stop - first,
        num_heads=heads_k,
        q_strides=(batch, head, heads // heads_k * head, value),
        mask=spec(p.mask),
        bias=spec(p.bias),
        is_causal=False,
        window_size=(-1, -1),
        flags=p.flags._replace(left=-1, right=-1, one_mask_row=False),  # every query attends to all of the sliced keys
    )
    choice = MaskChoice() if p.mask_form == "none" else prepared_form(rows, gathers=False)
    attend = plan(rows._replace(mask_form=choice.form))

    def run(x: Inputs, out: Tensor, lse: Tensor, *largest: Tensor) -> None:
        q, k, v, out, lse = as_rows(x.q, x.k, x.v, out, lse, first, stop)
        mask = x.mask
        if mask.dense is not None:
            mask = view_of(rows, choice, scores(mask.dense))
        bias = None if x.bias is None else scores(x.bias)
        attend(Inputs(q, k, v, mask, bias), out, lse, *(each.view(lse.shape) for each in largest))

    return run


def as_rows(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, first: int, stop: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """View a call of one query as a call of G queries on the key-value heads, for the keys from `first` to `stop`.

    Returns:
        q (B, G, Hk, D), k (B, keys, Hk, D), v (B, keys, Hk, Dv), out (B, G, Hk, Dv), lse (B, Hk, G).
    """
    batch, _, heads, dim = q.shape
    heads_k, dim_v = k.shape[2], out.shape[3]
    group = heads // heads_k
    batch_stride, _, head_stride, value_stride = q.stride()
    return (
        q.as_strided((batch, group, heads_k, dim), (batch_stride, head_stride, group * head_stride, value_stride)),
        k[:, first:stop],
        v[:, first:stop],
        out.as_strided((batch, group, heads_k, dim_v), (heads * dim_v, dim_v, group * dim_v, 1)),
        lse.view(batch, heads_k, group),
    )


# More than 64 queries fill a tile without the other heads of the group. More than 32 fill the rows of a consumer
# warpgroup: the only gain then is that keys are loaded less often, which matters for long sequences.
_MOST_QUERIES, _FULL_QUERIES, MANY_KEYS = 64, 32, 1024
# The kernel's limit: the 64 rows of a consumer warpgroup are whole queries.
_MOST_SHIFT = 6
# The least number of visible values of k and v. Below it they stay in L2, where loading them for each head is faster
# than more KV splits. Tests set this and MANY_KEYS to 0.
LEAST_KEYS = 1 << 24


def group_shift(p: AttentionProblem) -> int:
    """Return s if 2^s heads of a group become rows of a tile, for each query; else 0."""
    group = p.num_heads // max(1, p.num_heads_k)
    plain = p.mask_form == "none" and p.bias_tensor is None and p.sink is None and p.dropout_p == 0
    if not (plain and 1 < p.seqlen_q <= _MOST_QUERIES and group > 1):
        return 0
    band = make_band(p.seqlen_q, p.seqlen_k, p.window)
    seen = p.seqlen_k if band is None else min(p.seqlen_k, band.high - band.low + p.seqlen_q)
    is_small = p.batch * p.num_heads_k * seen * (p.head_dim + p.head_dim_v) < LEAST_KEYS
    if is_small or (p.seqlen_q > _FULL_QUERIES and seen < MANY_KEYS):
        return 0
    group = int(group)  # the symbol of a compiler has no bits
    return min((group & -group).bit_length() - 1, _MOST_SHIFT)  # the power of two in the group
