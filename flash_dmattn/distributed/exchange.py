"""The keys that each rank needs, and the collectives that send tensors between ranks, and gradients back.

The collectives only copy. Sums are computed here, in the order of ranks, so that they are bitwise reproducible. Three
operators send other tensors than keys: a mask or a bias that is sharded by keys, the gradient of a replicated tensor,
and heads that are traded for positions. A fourth sends the dropout key of the first rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..definition import define
from .documents import NO_SPANS, Spans, bounds_text
from .group import Members, agree_within, process_group
from .layout import Interval, SequenceLayout, from_flat
from .slices import HeadGroup, Slice, plan

# Ranks send only the keys that other ranks need if these have at most this fraction of the bytes of an all_gather. With
# equal bytes an all_gather is faster, and half is a clear margin.
CLEAR_SHARE = 0.5

# Positions as runs [start, stop), ascending, with gaps between them.
Runs = tuple[Interval, ...]

# torch renamed it after 2.12, and warns of the old name.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


class Moves(NamedTuple):
    """Positions that one rank sends and receives, in the whole sequence of keys.

    Attributes:
        local: the positions of its local tensor.
        held: the positions of the received tensor, in this order.
        sends: for each rank the positions that it needs from this one; for this rank the ones that it has itself, which
            are not sent.
        receives: for each rank the positions that this one needs from it, itself included.
        pieces: `held` in order, as (rank that has them, start, stop); rank -1 for positions that this one does not
            need.
    """

    rank: int
    local: Runs
    held: Runs
    sends: tuple[Runs, ...]
    receives: tuple[Runs, ...]
    pieces: tuple[tuple[int, int, int], ...]

    @property
    def sent(self) -> int:
        """Number of positions that it sends to other ranks, counted for each of them."""
        return sum(length_of(runs) for rank, runs in enumerate(self.sends) if rank != self.rank)

    @property
    def received(self) -> int:
        """Number of positions that it receives from other ranks."""
        return sum(length_of(runs) for rank, runs in enumerate(self.receives) if rank != self.rank)


def length_of(runs: Runs) -> int:
    return sum(stop - start for start, stop in runs)


def place_in(runs: Runs, position: int) -> int:
    """Return the number of positions of the runs before one of them."""
    place = 0
    for start, stop in runs:
        if start <= position < stop:
            return place + position - start
        place += stop - start
    raise ValueError(f"position is {position}; it needs to be in {runs}")


def places_in(held: Runs, parts: tuple[Slice, ...]) -> tuple[slice, ...]:
    """Return the index of the keys of each slice in the received tensors."""
    starts = [place_in(held, part.start) if part.seqlen_k else 0 for part in parts]
    return tuple(slice(start, start + part.seqlen_k) for start, part in zip(starts, parts))


def runs_read(
    layout: SequenceLayout, rank: int, seqlen_k: int, window: tuple[int, int], spans: Spans = NO_SPANS
) -> Runs:
    """Return the keys that the slices of a rank need; arguments as for `plan`."""
    runs: list[Interval] = []
    for start, stop in sorted((part.start, part.stop) for part in plan(layout, rank, seqlen_k, window, spans)):
        if start == stop:
            continue
        if runs and start <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(stop, runs[-1][1]))
        else:
            runs.append((start, stop))
    return tuple(runs)


def common(first: Runs, second: Runs) -> Runs:
    """Return the positions that are in both."""
    runs, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, stop = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < stop:
            runs.append((start, stop))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return tuple(runs)


@lru_cache(maxsize=256)
def plan_moves(
    layout: tuple[int, ...],
    layout_k: tuple[int, ...],
    rank: int,
    window: tuple[int, int],
    all_held: bool = False,
    spans: Spans = NO_SPANS,
) -> Moves:
    """Return the moves of a rank; with `all_held` its received tensor has all keys, needed or not.

    Layouts are `SequenceLayout.flat`, and the window has causality folded in.
    """
    rows, keys = from_flat(layout), from_flat(layout_k)
    reads = [runs_read(rows, r, keys.length, window, spans) for r in range(rows.world_size)]
    local, held = keys.runs(rank), ((0, keys.length),) if all_held else reads[rank]
    sends = tuple(common(local, runs) for runs in reads)
    receives = tuple(common(keys.runs(r), reads[rank]) for r in range(keys.world_size))
    return Moves(rank, local, held, sends, receives, _pieces(held, receives))


def _pieces(held: Runs, receives: tuple[Runs, ...]) -> tuple[tuple[int, int, int], ...]:
    arriving = sorted((start, stop, rank) for rank, runs in enumerate(receives) for start, stop in runs)
    pieces = []
    for first, last in held:
        place = first
        for start, stop, rank in arriving:
            if first <= start < last:
                pieces += [(-1, place, start)] * (start > place) + [(rank, start, stop)]
                place = stop
        pieces += [(-1, place, last)] * (last > place)
    return tuple(pieces)


def share_moved(
    layout: SequenceLayout, layout_k: SequenceLayout, window: tuple[int, int], spans: Spans = NO_SPANS
) -> float:
    """Return the most positions that a rank sends or receives if only needed keys are sent; an all_gather is 1."""
    # The last row needs the first key, or no key is sent.
    if (window[0] < 0 and not spans.kind) or layout.world_size == 1:
        return 1.0
    return _share_moved(layout.flat, layout_k.flat, window, spans)


@lru_cache(maxsize=256)
def _share_moved(layout: tuple[int, ...], layout_k: tuple[int, ...], window: tuple[int, int], spans: Spans) -> float:
    rows, keys = from_flat(layout), from_flat(layout_k)
    ranks = range(rows.world_size)
    reads = [runs_read(rows, rank, keys.length, window, spans) for rank in ranks]
    kept = [length_of(common(keys.runs(rank), reads[rank])) for rank in ranks]
    # Between two neighbouring edges the owner and the number of ranks that need a key are constant.
    owner_from = {start: rank for rank in ranks for start, _ in keys.runs(rank)}
    change = {place: 0 for place in (*owner_from, keys.length)}
    for start, stop in [run for runs in reads for run in runs]:
        change[start] = change.get(start, 0) + 1
        change[stop] = change.get(stop, 0) - 1
    places = sorted(change)
    sent, owner, readers = [-n for n in kept], 0, 0
    for at, place in enumerate(places[:-1]):
        owner, readers = owner_from.get(place, owner), readers + change[place]
        sent[owner] += readers * (places[at + 1] - place)
    received = [length_of(runs) - n for runs, n in zip(reads, kept)]
    return max(*sent, *received) / ((len(ranks) - 1) * keys.local_length)


class Pending(NamedTuple):
    """A running collective; it keeps its buffers alive until `wait`, because the network uses them."""

    work: Any
    sent: Tensor
    received: Tensor
    unpack: Callable[[Tensor], list[Tensor]]

    def wait(self) -> list[Tensor]:
        self.work.wait()
        return self.unpack(self.received)


def gather(tensors: Sequence[Tensor], dim: int, layout: SequenceLayout, group: str) -> Pending:
    """Send this rank's rows, along `dim`, to every rank, and return the tensors of the whole sequence in global order.

    The tensors have one dtype, and equal shapes on every rank.
    """
    shapes = [x.shape for x in tensors]
    sent = _joined(tensors)
    received = sent.new_empty((layout.world_size, sent.numel()))
    work = _all_gather(_bytes(received), _bytes(sent), process_group(group), True)

    def unpack(received: Tensor) -> list[Tensor]:
        numbers = [shape.numel() for shape in shapes]
        ranks = [row.split(numbers) for row in received.unbind()]
        return [layout.unshard([pieces[i].view(shape) for pieces in ranks], dim) for i, shape in enumerate(shapes)]

    return Pending(work, sent, received, unpack)


def scatter(tensors: Sequence[Tensor], dim: int, layout: SequenceLayout, rank: int, group: str) -> Pending:
    """Send gradients of the result of `gather` to the ranks that own the rows, and return the sums for own rows.

    The sums over all ranks are in fp32, fp64 for fp64.
    """
    runs = [run for intervals in layout.intervals for run in intervals]
    sent = _joined([x.narrow(dim, start, stop - start) for start, stop in runs for x in tensors])
    received = torch.empty_like(sent).view(layout.world_size, -1)
    work = dist.all_to_all_single(_bytes(received), _bytes(sent), group=process_group(group), async_op=True)
    number = len(tensors)
    shapes = [_resized(x, dim, stop - start) for start, stop in layout.runs(rank) for x in tensors]

    def unpack(received: Tensor) -> list[Tensor]:
        pieces = summed(received.unbind()).split([shape.numel() for shape in shapes])
        parts = [x.view(shape) for x, shape in zip(pieces, shapes)]
        return [torch.cat(parts[i::number], dim) for i in range(number)]

    return Pending(work, sent, received, unpack)


def fetch(tensors: Sequence[Tensor], dim: int, moves: Moves, group: str) -> Pending:
    """Send this rank's rows, along `dim`, to the ranks that need them, and return the tensor of `held` positions.

    Positions that it does not need are zero. The tensors have one dtype, and equal shapes on every rank.
    """

    def assemble(ranks: list[list[Tensor]]) -> list[Tensor]:
        arrived = [iter(pieces) for pieces in ranks]
        parts: list[list[Tensor]] = [[] for _ in tensors]
        for rank, start, stop in moves.pieces:  # each rank sends in this order
            for pieces, x in zip(parts, tensors):
                pieces.append(x.new_zeros(_resized(x, dim, stop - start)) if rank < 0 else next(arrived[rank]))
        return [
            torch.cat(pieces, dim) if pieces else x.new_empty(_resized(x, dim, 0)) for pieces, x in zip(parts, tensors)
        ]

    return _exchange(tensors, dim, moves, False, group, assemble)


def give_back(tensors: Sequence[Tensor], dim: int, moves: Moves, group: str) -> Pending:
    """Send gradients of the result of `fetch` to the ranks that own the rows, and return sums as `scatter` does."""

    def add(ranks: list[list[Tensor]]) -> list[Tensor]:
        rows, dtype = length_of(moves.local), sum_dtype(tensors[0].dtype)
        total = [x.new_zeros(_resized(x, dim, rows), dtype=dtype) for x in tensors]
        for runs, arrived in zip(moves.sends, ranks):
            pieces = iter(arrived)
            for start, stop in runs:
                place = place_in(moves.local, start)
                for x in total:
                    x.narrow(dim, place, stop - start).add_(next(pieces))
        return total

    return _exchange(tensors, dim, moves, True, group, add)


def _exchange(
    tensors: Sequence[Tensor], dim: int, moves: Moves, back: bool, group: str, finish: Callable[..., list[Tensor]]
) -> Pending:
    """Send runs of the tensors along `dim` to each rank, and receive runs of each; `back` is the reverse.

    `finish` gets a list of the runs of each rank, in the order of runs and then of tensors. Own runs are not sent.
    """
    present, sends, receives, rank = moves.local, moves.sends, moves.receives, moves.rank
    if back:
        present, sends, receives = moves.held, receives, sends
    outgoing = [
        [x.narrow(dim, place_in(present, start), stop - start) for start, stop in runs for x in tensors]
        for runs in sends
    ]
    shapes = [[_resized(x, dim, stop - start) for start, stop in runs for x in tensors] for runs in receives]
    not_sent, outgoing[rank], shapes[rank] = outgoing[rank], [], []
    like = tensors[0]
    sizes_sent = [like.itemsize * sum(x.numel() for x in pieces) for pieces in outgoing]
    sizes_received = [like.itemsize * sum(shape.numel() for shape in each) for each in shapes]
    sent = _joined([like.new_empty(0), *(x for pieces in outgoing for x in pieces)])
    received = like.new_empty(sum(sizes_received) // like.itemsize)
    work = dist.all_to_all_single(
        _bytes(received),
        _bytes(sent),
        output_split_sizes=sizes_received,
        input_split_sizes=sizes_sent,
        group=process_group(group),
        async_op=True,
    )

    def unpack(received: Tensor) -> list[Tensor]:
        pieces = iter(received.split([shape.numel() for each in shapes for shape in each]))
        ranks = [[next(pieces).view(shape) for shape in each] for each in shapes]
        ranks[rank] = not_sent
        return finish(ranks)

    return Pending(work, sent, received, unpack)


ROUTE = (
    "str group, int rank, int[] layout, int[] layout_k, int[] bounds, str kind, int left, int right, "
    "bool sends_parts, int number"
)


class Route(NamedTuple):
    """Which keys are sent between which ranks: arguments of operators, in the order of `ROUTE`.

    Layouts are `SequenceLayout.flat`. The window of the whole call has causality folded in. `bounds` and `kind`
    are `Spans`. `sends_parts` is whether ranks send only keys that are needed; else every rank gets all keys.
    `number` counts the calls, to identify backward passes; it is 0 in a compiled graph.
    """

    group: str
    rank: int
    layout: tuple[int, ...]
    layout_k: tuple[int, ...]
    bounds: tuple[int, ...]
    kind: Any
    left: int
    right: int
    sends_parts: bool
    number: int

    @classmethod
    def of(cls, group: str, rank: int, *rest: Any) -> Route:
        """Make it from the arguments of an operator, which are lists instead of tuples."""
        numbers: list[Any] = [*map(tuple, rest[:3]), *rest[3:]]
        return cls(group, rank, *numbers)

    @property
    def parts(self) -> tuple[Slice, ...]:
        return plan(from_flat(self.layout), self.rank, self.layout_k[0], (self.left, self.right), self.spans)

    @property
    def spans(self) -> Spans:
        return Spans(self.bounds, self.kind)

    @property
    def held(self) -> Runs:
        """The keys that this rank has after the exchange."""
        return self.moves().held if self.sends_parts else ((0, self.layout_k[0]),)

    def moves(self, all_held: bool = False) -> Moves:
        """Return the keys that ranks send each other if they send only needed ones."""
        window = (self.left, self.right)
        return plan_moves(self.layout, self.layout_k, self.rank, window, all_held, self.spans)

    def compare(self, direction: str, **values: object) -> None:
        """Compare an operator with the operators of the other ranks: tensors and numbers, and then the route."""
        route = {**self._asdict(), "bounds": bounds_text(self.bounds)}
        del route["rank"]
        agree_within(self.group, direction, self.number, {**values, **route})

    def bring(self, tensors: Sequence[Tensor], dim: int, all_held: bool = False) -> Pending:
        """Send the rows of this rank along `dim`, and return the keys that it needs, `held`, or all keys."""
        if self.sends_parts:
            return fetch(tensors, dim, self.moves(all_held), self.group)
        return gather(tensors, dim, from_flat(self.layout_k), self.group)

    def send_back(self, gradients: Sequence[Tensor], dim: int, all_held: bool = False) -> Pending:
        """Send gradients of the result of `bring`, and return the sums for the rows of this rank."""
        if self.sends_parts:
            return give_back(gradients, dim, self.moves(all_held), self.group)
        return scatter(gradients, dim, from_flat(self.layout_k), self.rank, self.group)


def trade(tensors: Sequence[Tensor], group: str) -> list[Tensor]:
    """Send x[i] of each tensor to rank i, and return what this rank receives from each, (W, ...).

    Tensors of one dtype are sent together.
    """
    received: list[Tensor] = list(tensors)
    for dtype in dict.fromkeys(x.dtype for x in tensors):
        places = [i for i, x in enumerate(tensors) if x.dtype == dtype]
        sizes = [tensors[i][0].numel() for i in places]
        sent = tensors[places[0]].new_empty(len(tensors[0]), sum(sizes))
        for i, piece in zip(places, sent.split(sizes, 1)):
            piece.unflatten(1, tensors[i].shape[1:]).copy_(tensors[i])
        arrived = torch.empty_like(sent)
        dist.all_to_all_single(_bytes(arrived), _bytes(sent), group=process_group(group))
        for i, piece in zip(places, arrived.split(sizes, 1)):
            received[i] = piece.unflatten(1, tensors[i].shape[1:])
    return received


def summed(tensors: Sequence[Tensor]) -> Tensor:
    """Add tensors one after the other, in fp32, or fp64 for fp64."""
    first, *others = tensors
    total = first.to(sum_dtype(first.dtype), copy=True)
    for x in others:
        total += x
    return total


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of a dtype are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


def _resized(x: Tensor, dim: int, size: int) -> torch.Size:
    return torch.Size((*x.shape[:dim], size, *x.shape[dim + 1 :]))


def _bytes(x: Tensor) -> Tensor:
    # Not every transport supports every dtype.
    return x.view(-1).view(torch.uint8)


def _move_keys(x: Tensor, back: bool, *numbers: Any) -> Tensor:
    route, dim = Route.of(*numbers), x.dim() - 1
    if back or route.number == 0:  # else the call was compared
        route.compare("backward" if back else "forward", gathered=x)
    if back:
        return route.send_back((x,), dim, all_held=True).wait()[0].to(x.dtype)
    (keys,) = route.bring((x.view(torch.uint8) if x.dtype == torch.bool else x,), dim, all_held=True).wait()
    return keys.view(torch.bool) if x.dtype == torch.bool else keys


def _move_keys_fake(x: Tensor, back: bool, *numbers: Any) -> Tensor:
    layout_k = from_flat(Route.of(*numbers).layout_k)
    return x.new_empty((*x.shape[:-1], layout_k.local_length if back else layout_k.length))


def _sum(x: Tensor, group: str, size: int, number: int) -> Tensor:
    agree_within(group, "backward", number, {"bias or sink with a summed gradient": x})
    sent = x.contiguous()
    received = sent.new_empty((size, *sent.shape))
    _all_gather(_bytes(received), _bytes(sent), process_group(group), False)
    return summed(received.unbind())


def _share(x: Tensor, dropout_p: float, group: str, number: int) -> Tensor:
    if number == 0:  # else the call was compared
        agree_within(group, "forward", number, {"dropout key": x, "dropout_p": dropout_p})
    shared = x.clone()
    dist.broadcast(_bytes(shared), group=process_group(group), group_src=0)
    return shared


def _trade(tensors: Sequence[Tensor], group: str, direction: str, number: int, to_heads: bool, *where: Any) -> Any:
    names, layout, layout_k = where
    if direction == "backward" or number == 0:  # else the call was compared
        named = dict(zip(names.split(), tensors))
        agree_within(group, direction, number, {"traded": names, **named, "layout": layout, "layout_k": layout_k})
    layouts = _layouts(names, layout, layout_k)
    if to_heads:
        sent = [x.unflatten(2, (where.world_size, -1)).movedim(2, 0) for x, where in zip(tensors, layouts)]
        return [where.unshard(x.unbind(), 1) for x, where in zip(trade(sent, group), layouts)]
    sent = [
        torch.stack([where.shard(x, 1, rank) for rank in range(where.world_size)]) for x, where in zip(tensors, layouts)
    ]
    return [torch.cat(x.unbind(), 2) for x in trade(sent, group)]


def _layouts(names: str, layout: list[int], layout_k: list[int]) -> list[SequenceLayout]:
    return [from_flat(tuple(layout_k if name in ("k", "v") else layout)) for name in names.split()]


def _trade_fake(tensors: Sequence[Tensor], group: str, direction: str, number: int, to_heads: bool, *where: Any) -> Any:
    traded = []
    for x, layout in zip(tensors, _layouts(*where)):
        batch, _, heads, dim = x.shape
        size = layout.world_size
        length, heads = (layout.length, heads // size) if to_heads else (layout.local_length, heads * size)
        traded.append(x.new_empty(batch, length, heads, dim))
    return traded


_TRADE = (
    "(Tensor[] tensors, str group, str direction, int number, bool to_heads, str names, int[] layout, int[] layout_k)"
    " -> Tensor[]"
)
_keys_op = define("move_keys", f"(Tensor x, bool back, {ROUTE}) -> Tensor", _move_keys, _move_keys_fake)
_SUM = "(Tensor x, str group, int size, int number) -> Tensor"
_sum_op = define("sum_over_ranks", _SUM, _sum, lambda x, *_: x.new_empty(x.shape))
_SHARE = "(Tensor x, float dropout_p, str group, int number) -> Tensor"
_share_op = define("share_dropout_key", _SHARE, _share, lambda x, *_: torch.empty_like(x))
_trade_op = define("trade_heads", _TRADE, _trade, _trade_fake)


class _Exchange(torch.autograd.Function):
    """Run one function on up to three tensors, and another one on the gradients of its results.

    The number of arguments is fixed, because Dynamo counts them to find out that `forward` has no context.
    """

    @staticmethod
    def forward(
        there: Callable[..., Any], back: Callable[..., Any], x: Tensor, y: Tensor | None, z: Tensor | None
    ) -> Any:
        return there(*[tensor for tensor in (x, y, z) if tensor is not None])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.back = inputs[1]
        # A gradient of None becomes zeros, because the other ranks wait for this one. But an unused lse must not cost a
        # dlse of zeros.
        ctx.set_materialize_grads(not isinstance(output, tuple) or len(output) == 1)
        if isinstance(output, tuple):  # a tensor without a gradient stays without one
            needs_grad = ctx.needs_input_grad[2:]
            ctx.mark_non_differentiable(*[x for x, needed in zip(output, needs_grad) if not needed])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return None, None, *ctx.back(*gradients), *(None,) * (3 - len(gradients))


def _exchanged(tensors: Sequence[Tensor], there: Callable[..., Any], back: Callable[..., Any]) -> Any:
    return _Exchange.apply(there, back, *tensors, *(None,) * (3 - len(tensors)))


def gather_keys(x: Tensor, route: Route) -> Tensor:
    """Return a mask or bias (..., Lk / W), sharded as the keys are, with all keys in global order; differentiable.

    Keys that no slice of this rank needs may be zero. The gradient is the sum over all ranks for own keys.
    """
    keys: Tensor = _exchanged(
        [x], lambda x: _keys_op(x, False, *route), lambda gradient: (_keys_op(gradient, True, *route),)
    )
    return keys


def sum_gradient(x: Tensor, members: Members, number: int) -> Tensor:
    """Return the same values; the gradient is summed over the ranks, bitwise equal on each, in the call `number`."""
    same: Tensor = _exchanged(
        [x], lambda x: x.view_as(x), lambda gradient: (_sum_op(gradient, members.name, members.size, number),)
    )
    return same


def share_key(key: Tensor, dropout_p: float, groups: Sequence[Members], number: int) -> Tensor:
    """Return the dropout key of the first rank, sent over each dim of a mesh; it stays on the device."""
    for members in groups:
        key = _share_op(key, dropout_p, members.name, number)
    return key


class HeadTrade(NamedTuple):
    """How the ranks of a group trade their positions of all heads for all positions of their heads, and back.

    `num_heads_k` is of the whole call; several ranks have the same key-value head if there are more ranks than heads.
    """

    members: Members
    layout: SequenceLayout
    layout_k: SequenceLayout
    num_heads_k: int
    number: int

    @property
    def heads(self) -> HeadGroup:
        return HeadGroup(self.members.rank, self.members.size)

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Trade q, k and v of this rank's rows for q, k and v of its heads; differentiable."""
        repeats = self.members.size // self.num_heads_k
        keys = [x if repeats <= 1 else x.repeat_interleave(repeats, 2) for x in (k, v)]
        return self._trade([q, *keys], "q k v", to_heads=True)

    def to_rows(self, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Trade out and lse of this rank's heads for out and lse of its rows; differentiable."""
        if lse is None:
            return self._trade([out], "out", to_heads=False)[0], None
        rows, columns = self._trade([out, lse.transpose(1, 2)[..., None]], "out lse", to_heads=False)
        return rows, columns.squeeze(-1).transpose(1, 2)

    def _trade(
        self, tensors: Sequence[Tensor], names: str, *, to_heads: bool, direction: str = "forward"
    ) -> tuple[Tensor, ...]:
        """Trade (B, L / W, H, D) of this rank's rows for (B, L, H / W, D) of its heads, or back.

        Each direction is the gradient of the other. `names` are the names of the tensors in the call.
        """
        group, flats = self.members.name, (list(self.layout.flat), list(self.layout_k.flat))

        def there(*tensors: Tensor) -> tuple[Tensor, ...]:
            return tuple(_trade_op(tensors, group, direction, self.number, to_heads, names, *flats))

        def back(*gradients: Tensor | None) -> tuple[Tensor | None, ...]:
            needed = {name: x for name, x in zip(names.split(), gradients) if x is not None}
            traded = self._trade([*needed.values()], " ".join(needed), to_heads=not to_heads, direction="backward")
            by_name = dict(zip(needed, traded))
            return tuple([by_name.get(name) for name in names.split()])

        return cast("tuple[Tensor, ...]", _exchanged(tensors, there, back))
