"""Decoding: the query heads of a group as rows of one tile, so that their keys are read once."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...problem import AttentionProblem, Band, MaskView


class GroupRows(NamedTuple):
    """A call of one query as one of a query for each head of a group, whose heads are those of keys; all views.

    Attributes:
        q, k, v, out: (B, G, Hk, D), (B, keys, Hk, D), (B, keys, Hk, Dv), (B, G, Hk, Dv), for groups of G heads and the
            keys that the band leaves.
        lse: (B, Hk, G).
        mask: of the form "none" or "dense".
        bias: 4-D, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    mask: MaskView
    bias: Tensor | None


def has_group_rows(p: AttentionProblem) -> bool:
    """Whether a class of calls may be computed so; a prepared mask has its one row, and then it is not."""
    return p.seqlen_q == 1 and p.num_heads > p.num_heads_k and p.sink is None and p.dropout_p == 0


def group_rows(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: MaskView, bias: Tensor | None, band: Band | None
) -> GroupRows | None:
    """The call in this form; None where it is not served so.

    Args:
        q, k, v: of a call without sink and dropout.
        out, lse: contiguous, to be written.
        mask, bias: of the call.
        band: of the call, as `make_band` has it.
    """
    heads, heads_k = q.shape[2], k.shape[2]
    if q.shape[1] != 1 or heads == heads_k or mask.form not in ("none", "dense"):
        return None
    group = heads // heads_k
    first, stop = 0, k.shape[1]
    if band is not None:
        first, stop = max(0, band[0]), min(stop, band[1] + 1)
        if first >= stop:
            return None

    def rows(x: Tensor) -> Tensor:
        """Of a mask or a bias (B, heads, 1, keys): a row for each head of a group, or one row for all."""
        if x.shape[3] > 1:
            x = x[..., first:stop]
        return x.unflatten(1, (heads_k, group))[:, :, :, 0] if x.shape[1] == heads else x

    return GroupRows(
        q[:, 0].unflatten(1, (heads_k, group)).transpose(1, 2),
        k[:, first:stop],
        v[:, first:stop],
        out.view(out.shape[0], heads_k, group, out.shape[3]).transpose(1, 2),
        lse.view(lse.shape[0], heads_k, group),
        mask if mask.dense is None else MaskView("dense", (rows(mask.dense),)),
        None if bias is None else rows(bias),
    )
