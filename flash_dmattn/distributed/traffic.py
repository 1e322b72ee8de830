"""How many bytes a rank of a context-parallel call sends and receives, counted from shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from ..problem import as_scores
from .call import ParallelCall
from .exchange import sum_dtype
from .reading import moves_of
from .request import Request


class Transfer(NamedTuple):
    """What some collectives of a pass move.

    Attributes:
        what: moves.
        how: the collective, "all_gather" or "all_to_all".
        sent, received: bytes that this rank sends to others, and receives from them.
    """

    what: str
    how: str
    sent: int
    received: int


class Traffic(NamedTuple):
    """The transfers of both passes in order, and about how many bytes what they bring takes at once."""

    forward: tuple[Transfer, ...]
    backward: tuple[Transfer, ...]
    transient: int


def traffic_of(request: Request, call: ParallelCall, sink: Tensor | None) -> Traffic:
    """The traffic of a call.

    Args:
        request: what was asked for.
        call, sink: as it was described.
    """
    needed = any(call.problem.needs_grad)
    keys = Keys.of(call)
    forward = [keys.brought(f"{name}, sharded by keys", each) for name, each in _sharded(call)]
    backward: list[Transfer] = []
    transient = 0
    if call.strategy == "gather":
        p = call.problem
        each = p.batch * p.num_heads_k * (p.head_dim + p.head_dim_v) * p.dtype.itemsize
        forward.append(keys.brought("keys and values", each))
        backward.append(keys.brought("keys and values again", each))
        backward += _gradients_of_keys(request, call, keys)
        # Forward what arrives and its order; backward besides these gradients of two slices, their sum, and its parts.
        transient = (6 if needed else 2) * each * call.keys_held(call.members.rank) // call.head_groups
    if call.strategy == "ulysses" or request.both is not None:
        there, back = _traded(request, call)
        forward = [there[0], *forward, there[1]]
        backward = [back[0], *backward, *back[1:]]
        transient += 2 * sum(transfer.sent + transfer.received for transfer in there)
    backward += _summed(request, call, sink, keys)
    return Traffic(tuple(forward), tuple(backward) if needed else (), transient)


class Keys(NamedTuple):
    """How many positions of keys a rank sends, and receives; `parts` where that is what ranks read."""

    sent: int
    received: int
    parts: bool

    @classmethod
    def of(cls, call: ParallelCall) -> Keys:
        """Those of a call."""
        if call.sends_parts:
            rank, window = call.members.rank, call.problem.window
            moves = moves_of(call.layout.flat, call.layout_k.flat, rank, window)
            return cls(moves.sent, moves.received, True)
        others = (call.members.size - 1) * call.layout_k.local_length
        return cls(others, others, False)

    def brought(self, what: str, each: int) -> Transfer:
        """The transfer of `each` bytes a position to the ranks that read it."""
        return Transfer(what, "all_to_all" if self.parts else "all_gather", each * self.sent, each * self.received)

    def returned(self, what: str, each: int) -> Transfer:
        """The transfer of `each` bytes a position back to the rank that has it."""
        return Transfer(what, "all_to_all", each * self.received, each * self.sent)


def _all_gather(what: str, own: int, size: int) -> Transfer:
    """Every rank receives what each other one has, `own` bytes."""
    return Transfer(what, "all_gather", (size - 1) * own, (size - 1) * own)


def _all_to_all(what: str, whole: int, size: int) -> Transfer:
    """Every rank keeps its part of `whole` bytes and sends the others theirs."""
    moved = whole // size * (size - 1)
    return Transfer(what, "all_to_all", moved, moved)


def _sharded(call: ParallelCall) -> Iterator[tuple[str, int]]:
    """The mask and the bias that are gathered, and their bytes a position."""
    if call.mask_needs_keys and isinstance(call.mask, Tensor):
        yield "mask", call.mask.shape[:3].numel()
    if call.bias_needs_keys and call.bias is not None:
        dtype = sum_dtype(call.bias.dtype) if call.problem.needs_grad.bias else call.bias.dtype
        yield "bias", call.bias.shape[:3].numel() * dtype.itemsize


def _gradients_of_keys(request: Request, call: ParallelCall, keys: Keys) -> Iterator[Transfer]:
    p = call.problem
    dims = p.head_dim * p.needs_grad.k + p.head_dim_v * p.needs_grad.v
    if dims:
        names = [name for name, needed in (("dk", p.needs_grad.k), ("dv", p.needs_grad.v)) if needed]
        exchanged = (request.ours.exchange_dtype or p.dtype).itemsize
        yield keys.returned(" and ".join(names), p.batch * p.num_heads_k * dims * exchanged)


def _traded(request: Request, call: ParallelCall) -> tuple[list[Transfer], list[Transfer]]:
    """What heads and positions are traded for: q, k, v and out, and their gradients."""
    q, k = request.given[:2]
    p, size = call.problem, request.groups[0].size
    rows_q, rows_k = q.shape[0] * q.shape[1], k.shape[0] * k.shape[1]
    heads_q, heads_k = q.shape[2], k.shape[2] * max(1, size // k.shape[2])  # ranks share heads that are fewer
    values = (rows_q * heads_q * p.head_dim, rows_k * heads_k * p.head_dim, rows_k * heads_k * p.head_dim_v)
    itemsize = p.dtype.itemsize
    out = rows_q * heads_q * (p.head_dim_v * itemsize + p.return_lse * sum_dtype(p.dtype).itemsize)
    named = [(f"d{name}", n) for name, n, needed in zip("qkv", values, p.needs_grad, strict=False) if needed]
    there = [
        _all_to_all("q, k and v, for heads", sum(values) * itemsize, size),
        _all_to_all("out and lse, for rows" if p.return_lse else "out, for rows", out, size),
    ]
    back = [_all_to_all("dout and dlse, for heads" if p.return_lse else "dout, for heads", out, size)]
    if named:
        names = ", ".join(name for name, _ in named)
        back.append(_all_to_all(f"{names}, for rows", sum(n for _, n in named) * itemsize, size))
    return there, back


def _summed(request: Request, call: ParallelCall, sink: Tensor | None, keys: Keys) -> Iterator[Transfer]:
    """Gradients of what ranks share."""
    needs, outer = call.problem.needs_grad, call.members.size
    terms = [("dbias", call.bias, request.given.bias, needs.bias), ("dsink", sink, request.given.sink, needs.sink)]
    for name, own, given, needed in terms:
        if own is None or given is None or not needed or (name == "dbias" and own.shape[2] > 1):
            continue
        itemsize = sum_dtype(own.dtype).itemsize
        if name == "dbias" and call.bias_needs_keys:
            yield keys.returned("dbias, sharded by keys", own.shape[:3].numel() * itemsize)
        elif request.ours.reduce_bias_grad:
            yield _all_gather(f"{name}, summed", own.numel() * itemsize, outer)
        if request.ours.reduce_bias_grad and request.both is not None:
            # All heads of it: a rank's gradient is zero for those that it does not compute.
            whole = as_scores(given) if name == "dbias" else given
            yield _all_gather(f"{name}, summed over heads", whole.numel() * itemsize, request.both.inner.size)
