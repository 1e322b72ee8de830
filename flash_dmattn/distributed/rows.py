"""The calls of one rank over one group of heads, once the keys and values of that group are there. Nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends.protocol import Backend
from ..dispatch.plan import backward_pass, forward_pass
from ..gradients import empty_gradient, with_dbias
from ..operators import describe_operands
from ..problem import AttentionProblem, Flags, MaskView, NeedsGrad, TensorSpec, unpacked_spec
from ..problem.inputs import Inputs, Saved
from .exchange import sum_dtype
from .slices import HeadGroup, Slice


def slice_problem(rank: AttentionProblem, part: Slice, heads: HeadGroup, held: int) -> AttentionProblem:
    """Describe one slice and one group of heads of a rank's rows, whose tensors of keys have `held` of them."""
    left, right = part.window
    causal = right == 0
    num_heads_k = max(1, rank.num_heads_k // heads.number)
    return rank._replace(
        seqlen_q=part.seqlen_q,
        seqlen_k=part.seqlen_k,
        num_heads=rank.num_heads // heads.number,
        num_heads_k=num_heads_k,
        # The strides of all keys of the group that have arrived: a slice of them is a view.
        k_strides=unpacked_spec((rank.batch, held, num_heads_k, rank.head_dim)).strides,
        v_strides=unpacked_spec((rank.batch, held, num_heads_k, rank.head_dim_v)).strides,
        mask=_cut_spec(rank.mask, part, heads),
        bias=_cut_spec(rank.bias, part, heads),
        is_causal=causal,
        window_size=(left, -1 if causal else right),
        flags=rank.flags._replace(left=left, right=right),
    )


def _cut_spec(spec: TensorSpec | None, part: Slice, heads: HeadGroup) -> TensorSpec | None:
    if spec is None:
        return None
    b, h, i, j = spec.shape
    own = heads.of(h)
    shape = (b, own.stop - own.start, part.seqlen_q if i > 1 else i, part.seqlen_k if j > 1 else j)
    return spec._replace(shape=shape)


NUMBER_OF_TENSORS = {"none": 0, "dense": 1, "tiles": 4, "keys": 3, "intervals": 6}


def views_of(forms: Sequence[str], tensors: Sequence[Tensor]) -> list[MaskView]:
    """Return the masks of a rank's slices, from their forms and all their tensors in a row."""
    views, place = [], 0
    for form in forms:
        number = NUMBER_OF_TENSORS[form]
        views.append(MaskView(form, tuple(tensors[place : place + number])))  # type: ignore[arg-type]
        place += number
    return views


def view_of_heads(view: MaskView, heads: HeadGroup) -> MaskView:
    """Return the part of a mask that a group of heads reads; it may have one head, or a head for each of k or q."""
    if heads.number == 1 or not view.tensors or view.tensors[0].shape[1] == 1:
        return view
    # Kernels read prepared masks as contiguous tensors.
    parts = [x[:, heads.of(x.shape[1])] for x in view.tensors]
    return MaskView(view.form, tuple(parts if view.form == "dense" else [x.contiguous() for x in parts]))


class RankRows(NamedTuple):
    """All that the calls of a rank share.

    Attributes:
        parts: its slices; `places`, where the keys of each are in k and v; `views`, its mask.
        q: (B, Lq / W, Hq, D).
        bias: 4-D, with the rank's rows or one, all keys or one; None without.
        sink: (Hq,), or None.
        flags: of all its rows over all keys.
    """

    parts: tuple[Slice, ...]
    places: tuple[slice, ...]
    views: list[MaskView]
    q: Tensor
    bias: Tensor | None
    sink: Tensor | None
    flags: Flags
    needs_grad: NeedsGrad

    def forward(self, backend: Backend, heads: HeadGroup, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        """Fill out (B, Lq / W, Hq, Dv) and lse (B, Hq, Lq / W) of a group of heads.

        Args:
            k, v: (B, keys that the rank holds, heads of the group, ·), in global order.
        """
        query_heads = heads.of(self.q.shape[2])
        slices = zip(self.parts, self.places, self.views)
        # The largest first: while it is computed the host gets the others ready.
        for part, keys, view in sorted(slices, key=lambda one: -one[0].seqlen_q * one[0].seqlen_k):
            problem, inputs = self._slice(part, heads, view, k, v, keys)
            out[:, part.rows, query_heads], lse[:, query_heads, part.rows] = forward_pass(backend, problem)(inputs)

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
        """Add this group's gradients of q, bias and sink to `sums`; return the gradients of its k and v.

        Returns:
            dk and dv, as k and v, as far as they are needed: sums over this rank's rows, made in fp32 (fp64 for fp64)
            and rounded once to the dtype of the exchange.
        """
        query_heads = heads.of(self.q.shape[2])
        dk, dv = (
            KeySum(x, len(self.parts), exchange_dtype) if needed else None
            for x, needed in zip((k, v), self.needs_grad[1:])
        )
        for part, keys, view in zip(self.parts, self.places, self.views):
            problem, inputs = self._slice(part, heads, view, k, v, keys)
            rest: dict[str, Tensor] = {}
            group_dbias = None if sums.bias is None else heads.cut(sums.bias)
            place = None if group_dbias is None else _cleared_around(group_dbias, part)
            if place is not None and backend.stores_dbias:
                rest["dbias_out"] = place
            # out and lse lie as every backend has written them.
            saved = Saved(
                inputs, out[:, part.rows, query_heads].contiguous(), lse[:, query_heads, part.rows].contiguous()
            )
            dlse_rows = None if dlse is None else dlse[:, query_heads, part.rows]
            gradients = backward_pass(backend, problem)(saved, dout[:, part.rows, query_heads], dlse_rows, **rest)
            if place is not None:
                gradients = with_dbias(gradients, place)
            dq, dk_part, dv_part, dbias, *dsink = gradients
            if dq is not None and sums.q is not None:
                sums.q[:, part.rows, query_heads] = dq
            if dk is not None and dk_part is not None:
                dk.add(keys, dk_part)
            if dv is not None and dv_part is not None:
                dv.add(keys, dv_part)
            if dbias is not None and group_dbias is not None and place is None:
                if group_dbias.shape[2] == 1:  # one row for all queries, which each slice has a term of
                    group_dbias[..., part.keys if group_dbias.shape[3] > 1 else slice(None)] += dbias
                else:
                    group_dbias[:, :, part.rows] = dbias
            if dsink and dsink[0] is not None and sums.sink is not None:
                sums.sink[query_heads] += dsink[0]
        return [x.total() for x in (dk, dv) if x is not None]

    def _slice(
        self, part: Slice, heads: HeadGroup, view: MaskView, k: Tensor, v: Tensor, keys: slice
    ) -> tuple[AttentionProblem, Inputs]:
        """Return the call of one slice and one group of heads."""
        query_heads = heads.of(self.q.shape[2])
        inputs = Inputs(
            self.q[:, part.rows, query_heads],
            k[:, keys],
            v[:, keys],
            view_of_heads(view, heads),
            None if self.bias is None else heads.cut(part.cut(self.bias)),
            None if self.sink is None else self.sink[query_heads],
        )
        left, right = part.window
        return describe_operands(inputs, self.flags._replace(left=left, right=right), self.needs_grad), inputs


class KeySum:
    """The gradient of all keys or values that a rank holds, summed slice by slice."""

    def __init__(self, like: Tensor, number: int, dtype: torch.dtype) -> None:
        """Start without a term.

        Args:
            like: these keys or values.
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
            self._sum = self._padded(self._largest)
            self._sum[:, keys] += gradient

    def total(self) -> Tensor:
        """Return the sum over all slices."""
        if self._sum is None:
            assert self._largest is not None
            return self._padded(self._largest)
        return self._sum.to(self._dtype)

    def _padded(self, term: tuple[slice, Tensor]) -> Tensor:
        keys, gradient = term
        if gradient.shape[1] == self._like.shape[1]:
            return gradient
        padded = torch.zeros_like(self._like)
        padded[:, keys] = gradient
        return padded


class Sums(NamedTuple):
    """The gradients that stay with a rank, filled slice by slice; None where not needed.

    The gradients of a bias without rows of its own, and of a sink, are sums over slices: their dtype is fp32 at least.
    """

    q: Tensor | None
    bias: Tensor | None
    sink: Tensor | None

    @classmethod
    def of(cls, rows: RankRows) -> Sums:
        """Allocate the gradients that the call needs, zero where slices add to them."""
        needs, dbias = rows.needs_grad, None
        if needs.bias and rows.bias is not None:
            dbias = empty_gradient(rows.bias) if rows.bias.shape[2] > 1 else rows.bias.new_zeros(rows.bias.shape)
        return cls(
            empty_gradient(rows.q) if needs.q else None,
            dbias,
            rows.sink.new_zeros(rows.sink.shape) if needs.sink and rows.sink is not None else None,
        )


def _cleared_around(dbias: Tensor, part: Slice) -> Tensor | None:
    """Return the place of a slice in the gradient of the bias, after zeroing the keys that the slice does not have.

    None where the bias has not both rows and keys of its own.
    """
    if dbias.shape[2] == 1 or dbias.shape[3] == 1:
        return None
    rows = dbias[:, :, part.rows]
    rows[..., : part.start] = 0
    rows[..., part.stop :] = 0
    return rows[..., part.keys]
