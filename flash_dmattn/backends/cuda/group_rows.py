"""Decoding: the query heads of a group as rows of one tile, so that their keys are read once."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...problem import AttentionProblem, Flags, MaskView, heads_as_rows, make_band


class GroupRows(NamedTuple):
    """A call of one query as one of a query for each head of a group, whose heads are those of keys; all views.

    Attributes:
        q, k, v, out: (B, G, Hk, D), (B, keys, Hk, D), (B, keys, Hk, Dv), (B, G, Hk, Dv), for groups of G heads and the
            keys that the band leaves.
        lse: (B, Hk, G).
        mask: of the form "none" or "dense".
        bias: 4-D, or None.
        flags: without a band, for all keys that are left are seen.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    mask: MaskView
    bias: Tensor | None
    flags: Flags


def has_group_rows(p: AttentionProblem) -> bool:
    """Whether a class of calls may be computed so; a prepared mask has its one row, and then it is not."""
    return p.seqlen_q == 1 and p.num_heads > p.num_heads_k and p.sink is None and p.dropout_p == 0


def group_rows(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: MaskView, bias: Tensor | None, flags: Flags
) -> GroupRows | None:
    """The call in this form; None where it is not served so.

    Args:
        q, k, v: of a call without sink and dropout.
        out, lse: contiguous, to be written.
        mask, bias, flags: of the call.
    """
    heads, heads_k = q.shape[2], k.shape[2]
    if q.shape[1] != 1 or heads == heads_k or mask.form not in ("none", "dense"):
        return None
    first, stop = keys_in_sight(k.shape[1], flags.window)
    if first >= stop:
        return None

    def rows(x: Tensor) -> Tensor:
        """Of a mask or a bias, for the keys that are left."""
        return heads_as_rows(x[..., first:stop] if x.shape[3] > 1 else x, heads, heads_k)

    return GroupRows(
        *as_rows(q, k, v, out, lse, first, stop),
        mask if mask.dense is None else MaskView("dense", (rows(mask.dense),)),
        None if bias is None else rows(bias),
        flags._replace(left=-1, right=-1, one_mask_row=False),
    )


def keys_in_sight(seqlen_k: int, window: tuple[int, int]) -> tuple[int, int]:
    """The first key that one query sees, and the one behind the last."""
    band = make_band(1, seqlen_k, window)
    return (0, seqlen_k) if band is None else (max(0, band.low), min(seqlen_k, band.high + 1))


def as_rows(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, first: int, stop: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, out and lse of `GroupRows`, of the keys from `first` to `stop`."""
    batch, _, heads, dim = q.shape
    heads_k, dim_v = k.shape[2], out.shape[3]
    group = heads // heads_k
    of_batch, _, of_head, of_value = q.stride()
    return (
        q.as_strided((batch, group, heads_k, dim), (of_batch, of_head, group * of_head, of_value)),
        k[:, first:stop],
        v[:, first:stop],
        out.as_strided((batch, group, heads_k, dim_v), (heads * dim_v, dim_v, group * dim_v, 1)),
        lse.view(batch, heads_k, group),
    )
