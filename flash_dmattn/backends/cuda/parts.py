"""Calls whose mask or bias a part of the batch shares, computed part by part.

The kernels read one entry of a mask or a bias for the whole batch, or one for each of its entries. Consecutive entries
of the batch that read it so are a part: beside a batch of (B1, B2), each of the B1 runs of B2 entries, whether a bias
has entries (B1, 1) or (1, B2). See `Flags` for which entry an entry reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...operators import empty_gradient, with_dbias
from ...problem import AttentionProblem, Flags, Gradients, MaskView, NeedsGrad
from ..protocol import Direction

Triple = tuple[Tensor | None, Tensor | None, Tensor | None]  # of q, k and v


class Part(NamedTuple):
    """Entries of the batch, and those of the mask and of the bias that they read."""

    batch: slice
    mask: slice
    bias: slice

    def shared(self, mask: MaskView, bias: Tensor | None) -> tuple[MaskView, Tensor | None]:
        """The mask, of any form, and the bias of the part."""
        of_mask = MaskView(mask.form, tuple(x[self.mask] for x in mask.tensors))
        return of_mask, None if bias is None else bias[self.bias]


def part_size(p: AttentionProblem) -> int:
    """How many entries of the batch are computed at once: all of them, but where some share a mask or a bias."""
    if not p.partly_shared:
        return p.batch
    of_mask, of_bias = (1 if spec is None else spec.shape[0] for spec in (p.mask, p.bias))
    return _size(p.batch, (of_mask, p.flags.mask_repeat), (of_bias, p.flags.bias_repeat))


def parts_of(batch: int, mask: MaskView, bias: Tensor | None, flags: Flags) -> list[Part]:
    """The parts of a call; none where it is computed at once."""
    of_mask = (mask.tensors[0].shape[0] if mask.tensors else 1, flags.mask_repeat)
    of_bias = (1 if bias is None else bias.shape[0], flags.bias_repeat)
    size = _size(batch, of_mask, of_bias)
    if size == batch:
        return []
    return [
        Part(slice(first, first + size), *(_read(*of, first, size, batch) for of in (of_mask, of_bias)))
        for first in range(0, batch, size)
    ]


def refuses_entries(p: AttentionProblem, direction: Direction) -> str:
    """Why a pass cannot be computed in parts; empty where it can."""
    if p.dropout_p > 0:
        return "this backend takes 1 or all beside dropout, which goes by the number of an entry"
    if direction == "forward":
        return ""
    if p.needs_grad.sink:
        return "this backend takes 1 or all where the gradient of a sink is needed, a sum over the batch"
    if p.needs_grad.bias and p.bias is not None and not _is_of_one_part(p):
        return (
            "this backend takes 1 or all where the gradient of bias is needed, and several parts of the batch share it"
        )
    return ""


def part_notes(p: AttentionProblem) -> tuple[str, ...]:
    """What `explain` says of a call that is computed in parts."""
    if not p.partly_shared:
        return ()
    number, shared = p.batch // part_size(p), " and ".join(p.partly_shared)
    return (f"computes the batch in {number} parts, one after the other: a part of it shares {shared}",)


def _is_of_one_part(p: AttentionProblem) -> bool:
    """Whether every entry of the bias is read by one part of the batch alone."""
    assert p.bias is not None
    entries, repeat = p.bias.shape[0], p.flags.bias_repeat
    return entries == p.batch or (entries * repeat == p.batch and repeat == part_size(p))


def _size(batch: int, *shared: tuple[int, int]) -> int:
    """Consecutive entries of the batch that share an entry of each tensor, or have one each: (its entries, repeat)."""
    runs = (batch if entries in (1, batch) else repeat if repeat > 1 else entries for entries, repeat in shared)
    return math.gcd(*runs)


def _read(entries: int, repeat: int, first: int, size: int, batch: int) -> slice:
    """What a part from entry `first` on reads of a mask or a bias of so many entries."""
    if entries == 1:
        return slice(0, 1)
    if entries == batch:
        return slice(first, first + size)
    at = first // repeat % entries
    return slice(at, at + (1 if repeat > 1 else size))


def attend_in_parts(
    parts: list[Part],
    attend: Callable[..., None],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: MaskView,
    bias: Tensor | None,
    flags: Flags,
    sink: Tensor | None,
) -> None:
    """Write out and lse of each part by `attend`, which is given the same, of the part."""
    own = flags._replace(mask_repeat=1, bias_repeat=1)
    for part in parts:
        rows = part.batch
        attend(q[rows], k[rows], v[rows], out[rows], lse[rows], *part.shared(mask, bias), own, sink)


def new_gradients(q: Tensor, k: Tensor, v: Tensor, needs_grad: NeedsGrad) -> Triple:
    """Memory for dq, dk and dv, None for what is not needed."""
    dq, dk, dv = (empty_gradient(x) if needed else None for x, needed in zip((q, k, v), needs_grad[:3], strict=True))
    return dq, dk, dv


def differentiate_in_parts(
    parts: list[Part],
    differentiate: Callable[..., Gradients],
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskView,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    flags: Flags,
    needs_grad: NeedsGrad,
    sink: Tensor | None,
    dbias_out: Tensor | None,
) -> Gradients:
    """The gradients of a call of which `refuses_entries` holds nothing against.

    `differentiate` is given the same, of a part; `dbias_out`, where the gradient of its bias may be written; and
    `of_part`, where those of q, k and v have to be.
    """
    dq, dk, dv = new_gradients(q, k, v, needs_grad)
    dbias = None
    if bias is not None and needs_grad.bias:
        dbias = torch.empty_like(bias, memory_format=torch.contiguous_format) if dbias_out is None else dbias_out
    own = flags._replace(mask_repeat=1, bias_repeat=1)
    for part in parts:
        rows, place = part.batch, None if dbias is None else dbias[part.bias]
        of_part = tuple(None if x is None else x[rows] for x in (dq, dk, dv))
        arriving = (dout[rows], None if dlse is None else dlse[rows])
        results = (out[rows], lse[rows], own, needs_grad, sink)
        of_call = (*arriving, q[rows], k[rows], v[rows], *part.shared(mask, bias), *results)
        found = differentiate(*of_call, dbias_out=place, of_part=of_part)
        if place is not None:
            with_dbias(found, place)
    return (dq, dk, dv, dbias) if sink is None else (dq, dk, dv, dbias, None)
