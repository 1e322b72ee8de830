"""The calls of one rank over one group of heads, once the keys and values of that group are whole. Nothing is sent."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends.protocol import Backend
from ..dispatch.plan import backward_pass, forward_pass
from ..gradients import empty_gradient, with_dbias
from ..problem import AttentionProblem, MaskView
from ..problem.inputs import Inputs, Saved
from .exchange import sum_dtype
from .mask import cut
from .problems import HeadGroup, slice_problem, view_of_heads
from .slices import Slice


class RankRows(NamedTuple):
    """What a rank's calls share.

    Attributes:
        problem: of its rows over all keys.
        parts: its slices; in `places` where the keys of each are in k and v, and in `views` its mask.
        q: (B, Lq / W, Hq, D).
        bias: 4-D, with the rank's rows or one, all keys or one; None without.
        sink: (Hq,), or None.
    """

    problem: AttentionProblem
    parts: tuple[Slice, ...]
    places: tuple[slice, ...]
    views: list[MaskView]
    q: Tensor
    bias: Tensor | None
    sink: Tensor | None

    def forward(self, backend: Backend, heads: HeadGroup, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        """Fill out (B, Lq / W, Hq, Dv) and lse (B, Hq, Lq / W) of a group of heads.

        Args:
            k, v: (B, keys that the rank holds, heads of the group, ·), in global order.
        """
        of_q = heads.of(self.problem.num_heads)
        slices = zip(self.parts, self.places, self.views)
        # The largest first: while it is computed the host gets the others ready.
        for part, keys, view in sorted(slices, key=lambda one: -one[0].seqlen_q * one[0].seqlen_k):
            problem, inputs = self._slice(part, heads, view, k, v, keys)
            out[:, part.rows, of_q], lse[:, of_q, part.rows] = forward_pass(backend, problem)(inputs)

    def backward(
        self,
        backend: Backend,
        heads: HeadGroup,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        sums: Sums,
        exchange_dtype: torch.dtype,
    ) -> list[Tensor]:
        """Add this group's gradients of q, bias and sink to `sums`; return those of its k and v.

        Returns:
            Of dk, dv, as k and v, those that are needed: sums over this rank's rows, made in fp32
            (fp64 for fp64) and rounded once to the dtype of the exchange.
        """
        of_q = heads.of(self.problem.num_heads)
        needs = self.problem.needs_grad
        dk, dv = (
            KeySum(x, len(self.parts), exchange_dtype) if needed else None for x, needed in zip((k, v), needs[1:])
        )
        for part, keys, view in zip(self.parts, self.places, self.views):
            problem, inputs = self._slice(part, heads, view, k, v, keys)
            rest: dict[str, Tensor] = {}
            whole_dbias = None if sums.bias is None else _of_group(sums.bias, heads)
            place = None if whole_dbias is None else _cleared_around(whole_dbias, part)
            if place is not None and backend.stores_dbias:
                rest["dbias_out"] = place
            # out and lse lie as every backend has written them.
            saved = Saved(inputs, out[:, part.rows, of_q].contiguous(), lse[:, of_q, part.rows].contiguous())
            dlse_rows = None if dlse is None else dlse[:, of_q, part.rows]
            gradients = backward_pass(backend, problem)(saved, dout[:, part.rows, of_q], dlse_rows, **rest)
            if place is not None:
                gradients = with_dbias(gradients, place)
            dq, dk_part, dv_part, dbias, *dsink = gradients
            if dq is not None and sums.q is not None:
                sums.q[:, part.rows, of_q] = dq
            if dk is not None and dk_part is not None:
                dk.add(keys, dk_part)
            if dv is not None and dv_part is not None:
                dv.add(keys, dv_part)
            if dbias is not None and whole_dbias is not None and place is None:
                _take_dbias(whole_dbias, part, dbias)
            if dsink and dsink[0] is not None and sums.sink is not None:
                sums.sink[of_q] += dsink[0]
        return [x.total() for x in (dk, dv) if x is not None]

    def _slice(
        self, part: Slice, heads: HeadGroup, view: MaskView, k: Tensor, v: Tensor, keys: slice
    ) -> tuple[AttentionProblem, Inputs]:
        """The call of one slice and one group of heads."""
        of_q = heads.of(self.problem.num_heads)
        mask, sink = view_of_heads(view, heads), None if self.sink is None else self.sink[of_q]
        problem = slice_problem(self.problem, part, heads, k.shape[1], mask)
        q, k, v = self.q[:, part.rows, of_q], k[:, keys], v[:, keys]
        strides: dict[str, Any] = {"q_strides": q.stride(), "k_strides": k.stride(), "v_strides": v.stride()}
        return problem._replace(**strides), Inputs(q, k, v, mask, self._bias(part, heads), sink)

    def _bias(self, part: Slice, heads: HeadGroup) -> Tensor | None:
        return None if self.bias is None else _of_group(cut(self.bias, part), heads)


class KeySum:
    """The gradient of all keys or values that a rank holds, summed slice by slice."""

    def __init__(self, like: Tensor, number: int, dtype: torch.dtype) -> None:
        """Nothing yet.

        Args:
            like: those keys or values.
            number: of slices.
            dtype: of the sum, in the end.
        """
        self._like, self._dtype = like, dtype
        self._largest: tuple[slice, Tensor] | None = None
        # Two terms are added in fp32 and rounded once by one addition, so they need no sum of a wider dtype.
        self._is_narrow = number <= 2 and dtype == like.dtype
        self._sum: Tensor | None = None

    def add(self, keys: slice, gradient: Tensor) -> None:
        """Add the gradient of the keys of one slice, which are there; it may be written to."""
        if not self._is_narrow:
            if self._sum is None:
                self._sum = torch.zeros_like(self._like, dtype=sum_dtype(self._like.dtype))
            self._sum[:, keys] += gradient
        elif self._largest is None:
            self._largest = (keys, gradient)
        else:
            first = self._largest
            (keys, gradient), self._largest = sorted((first, (keys, gradient)), key=lambda term: term[1].shape[1])
            self._sum = self._whole(self._largest)
            self._sum[:, keys] += gradient

    def total(self) -> Tensor:
        """The sum over all slices."""
        if self._sum is None:
            assert self._largest is not None
            return self._whole(self._largest)
        return self._sum.to(self._dtype)

    def _whole(self, term: tuple[slice, Tensor]) -> Tensor:
        keys, gradient = term
        if gradient.shape[1] == self._like.shape[1]:
            return gradient
        whole = torch.zeros_like(self._like)
        whole[:, keys] = gradient
        return whole


class Sums(NamedTuple):
    """The gradients that stay with a rank, filled slice by slice; None where not needed.

    Those of a bias without rows of its own, and of a sink, are sums over slices: their dtype is fp32 at least then.
    """

    q: Tensor | None
    bias: Tensor | None
    sink: Tensor | None

    @classmethod
    def of(cls, rows: RankRows) -> Sums:
        """Those that the call needs, zero where slices add to them."""
        needs, dbias = rows.problem.needs_grad, None
        if needs.bias and rows.bias is not None:
            dbias = empty_gradient(rows.bias) if rows.bias.shape[2] > 1 else rows.bias.new_zeros(rows.bias.shape)
        return cls(
            empty_gradient(rows.q) if needs.q else None,
            dbias,
            rows.sink.new_zeros(rows.sink.shape) if needs.sink and rows.sink is not None else None,
        )


def _cleared_around(whole: Tensor, part: Slice) -> Tensor | None:
    """The place of the gradient of one slice in that of the bias, with zeros at the keys that the slice does not have.

    None where the bias has not both rows and keys of its own.
    """
    if whole.shape[2] == 1 or whole.shape[3] == 1:
        return None
    rows = whole[:, :, part.rows]
    rows[..., : part.start] = 0
    rows[..., part.stop :] = 0
    return rows[..., part.keys]


def _take_dbias(whole: Tensor, part: Slice, dbias: Tensor) -> None:
    """Put the gradient of one slice into that of a bias without rows, or without keys, of its own."""
    if whole.shape[2] == 1:  # one row for all queries, which each slice has a term of
        whole[..., part.keys if whole.shape[3] > 1 else slice(None)] += dbias
    else:
        whole[:, :, part.rows] = dbias


def _of_group(x: Tensor, heads: HeadGroup) -> Tensor:
    return x if x.shape[1] == 1 else x[:, heads.of(x.shape[1])]
