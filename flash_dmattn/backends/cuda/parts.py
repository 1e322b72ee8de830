"""Computes calls in which only some entries of the batch have the same mask or bias, part by part.

With batch dims (B1, B2), a bias may have batch dims (B1, 1) or (1, B2). The kernels support one entry of a mask or a
bias for all entries of the batch, or one for each. So each of the B1 runs of B2 entries, a part, is computed as a
separate call, in which one of these holds. `Flags` tells which entry of the mask or bias is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...gradients import empty_gradient
from ...problem import AttentionProblem, Gradients, MaskView, TensorSpec
from ...problem.inputs import Inputs, Saved
from ...reference.dropout import key_of_part
from ..protocol import Backward, Direction
from .operands import Attend

Triple = tuple[Tensor | None, Tensor | None, Tensor | None]  # of q, k and v


class Differentiate(Protocol):
    """A backward pass that may write dq, dk and dv into tensors that its caller has allocated."""

    def __call__(
        self,
        saved: Saved,
        dout: Tensor,
        dlse: Tensor | None,
        *,
        dbias_out: Tensor | None = None,
        into: Triple | None = None,
    ) -> Gradients: ...


class Part(NamedTuple):
    """A run of entries of the batch, and its entries of mask and bias."""

    batch: slice
    mask: slice
    bias: slice

    def inputs(self, x: Inputs) -> Inputs:
        mask = MaskView(x.mask.form, tuple(tensor[self.mask] for tensor in x.mask.tensors))
        q, k, v = x.q[self.batch], x.k[self.batch], x.v[self.batch]
        dropout = None if x.dropout is None else key_of_part(x.dropout, entry=self.batch.start)
        return Inputs(q, k, v, mask, None if x.bias is None else x.bias[self.bias], x.sink, dropout=dropout)


def part_size(p: AttentionProblem) -> int:
    """Return the number of entries of a part: the whole batch, unless only some of them have the same mask or bias."""
    if not p.partly_shared:
        return p.batch
    return _size(p.batch, *_shared(p))


def _shared(p: AttentionProblem) -> tuple[tuple[int, int], tuple[int, int]]:
    entries = [1 if spec is None else spec.shape[0] for spec in (p.mask, p.bias)]
    return (entries[0], p.flags.mask_repeat), (entries[1], p.flags.bias_repeat)


def _split(p: AttentionProblem) -> tuple[AttentionProblem, list[Part]]:
    size, shared = part_size(p), _shared(p)
    parts = [
        Part(slice(first, first + size), *(_read(*one, first, size, p.batch) for one in shared))
        for first in range(0, p.batch, size)
    ]

    def spec(x: TensorSpec | None, entries: slice) -> TensorSpec | None:
        return None if x is None else x._replace(shape=(entries.stop - entries.start, *x.shape[1:]))

    flags = p.flags._replace(mask_repeat=1, bias_repeat=1)
    mask, bias = spec(p.mask, parts[0].mask), spec(p.bias, parts[0].bias)
    return p._replace(batch=size, mask=mask, bias=bias, flags=flags), parts


def refuses_entries(p: AttentionProblem, direction: Direction) -> str:
    if p.relative is not None:
        return "this backend takes 1 or all with a bias by distance"
    if direction == "forward":
        return ""
    if p.needs_grad.sink:
        return "this backend takes 1 or all where the gradient of a sink is needed, a sum over the batch"
    if not p.needs_grad.bias or p.bias is None:
        return ""
    entries, repeat = p.bias.shape[0], p.flags.bias_repeat
    if entries == p.batch or (entries * repeat == p.batch and repeat == part_size(p)):
        return ""  # each entry of the bias is used by one part of the batch
    return "this backend takes 1 or all where the gradient of bias is needed, and several parts of the batch share it"


def part_notes(p: AttentionProblem) -> tuple[str, ...]:
    if not p.partly_shared:
        return ()
    number, shared = p.batch // part_size(p), " and ".join(p.partly_shared)
    return (f"computes the batch in {number} parts, one after the other: a part of it shares {shared}",)


def _size(batch: int, *shared: tuple[int, int]) -> int:
    """Return the length of the longest runs with one entry of each tensor for all, or one for each entry.

    `shared` has the entries and the repeat of each tensor.
    """
    runs = (batch if entries in (1, batch) else repeat if repeat > 1 else entries for entries, repeat in shared)
    return math.gcd(*runs)


def _read(entries: int, repeat: int, first: int, size: int, batch: int) -> slice:
    """Return the entries of a mask or a bias for the part of the batch from entry `first` on."""
    if entries == 1:
        return slice(0, 1)
    if entries == batch:
        return slice(first, first + size)
    at = first // repeat % entries
    return slice(at, at + (1 if repeat > 1 else size))


def attend_in_parts(p: AttentionProblem, plan: Callable[[AttentionProblem], Attend]) -> Attend:
    problem, parts = _split(p)
    attend = plan(problem)

    def run(x: Inputs, out: Tensor, lse: Tensor) -> None:
        for part in parts:
            attend(part.inputs(x), out[part.batch], lse[part.batch])

    return run


def differentiate_in_parts(p: AttentionProblem, plan: Callable[[AttentionProblem], Differentiate]) -> Backward:
    problem, parts = _split(p)
    differentiate = plan(problem)

    def run(saved: Saved, dout: Tensor, dlse: Tensor | None, *, dbias_out: Tensor | None = None) -> Gradients:
        x, out, lse = saved
        dq, dk, dv = (empty_gradient(t) if needed else None for t, needed in zip(x[:3], p.needs_grad[:3], strict=True))
        dbias = None
        if x.bias is not None and p.needs_grad.bias:
            dbias = torch.empty_like(x.bias, memory_format=torch.contiguous_format) if dbias_out is None else dbias_out
        for part in parts:
            rows, place = part.batch, None if dbias is None else dbias[part.bias]
            first, second, third = (None if t is None else t[rows] for t in (dq, dk, dv))
            part_saved = Saved(part.inputs(x), out[rows], lse[rows])
            dlse_rows = None if dlse is None else dlse[rows]
            differentiate(part_saved, dout[rows], dlse_rows, dbias_out=place, into=(first, second, third))
        return dq, dk, dv, dbias, None

    return run
