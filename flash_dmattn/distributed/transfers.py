"""Operators that move one tensor between ranks, and their gradients.

Masks and biases that are sharded by keys are made whole, gradients of tensors that ranks share are summed, and heads
are traded for positions: the strategy "ulysses", and the inner dim of a mesh of two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..definition import define
from .exchange import ROUTE, Route, sum_over, trade
from .group import Members, agree_within
from .layout import SequenceLayout, from_flat
from .slices import HeadGroup

Strategy = Literal["auto", "gather", "ulysses"]
STRATEGIES = ("auto", "gather", "ulysses")


def _move_keys(x: Tensor, back: bool, *numbers: Any) -> Tensor:
    route, dim = Route.of(*numbers), x.dim() - 1
    if back or route.number == 0:  # else the call was compared
        route.compare("backward" if back else "forward", **{"mask or bias of keys": x})
    if back:
        return route.send_back((x,), dim, all_held=True).wait()[0]
    (keys,) = route.bring((x.view(torch.uint8) if x.dtype == torch.bool else x,), dim, all_held=True).wait()
    return keys.view(torch.bool) if x.dtype == torch.bool else keys


def _move_keys_fake(x: Tensor, back: bool, *numbers: Any) -> Tensor:
    layout_k = from_flat(Route.of(*numbers).layout_k)
    return x.new_empty((*x.shape[:-1], layout_k.local_length if back else layout_k.length))


def _sum(x: Tensor, group: str, size: int, number: int) -> Tensor:
    agree_within(group, "backward", number, {"bias or sink with a summed gradient": x})
    return sum_over(x, size, group)


def _sum_fake(x: Tensor, group: str, size: int, number: int) -> Tensor:
    return x.new_empty(x.shape)


def _trade(x: Tensor, group: str, layout: list[int], to_heads: bool, direction: str, name: str, number: int) -> Tensor:
    where = from_flat(tuple(layout))
    if direction == "backward" or number == 0:  # else the call was compared
        agree_within(group, direction, number, {"traded": name, name: x, "layout": layout})
    if to_heads:
        received = trade(torch.stack(x.chunk(where.world_size, 2)), group)
        return where.unshard(list(received.unbind()), 1)
    sent = torch.stack([where.shard(x, 1, rank) for rank in range(where.world_size)])
    return torch.cat(list(trade(sent, group).unbind()), 2)


def _trade_fake(x: Tensor, group: str, layout: list[int], to_heads: bool, *others: Any) -> Tensor:
    batch, _, heads, dim = x.shape
    where = from_flat(tuple(layout))
    size = where.world_size
    if to_heads:
        return x.new_empty(batch, layout[0], heads // size, dim)
    return x.new_empty(batch, where.local_length, heads * size, dim)


_TRADE = "(Tensor x, str group, int[] layout, bool to_heads, str direction, str name, int number) -> Tensor"
_keys_op = define("move_keys", f"(Tensor x, bool back, {ROUTE}) -> Tensor", _move_keys, _move_keys_fake)
_sum_op = define("sum_over_ranks", "(Tensor x, str group, int size, int number) -> Tensor", _sum, _sum_fake)
_trade_op = define("trade_heads", _TRADE, _trade, _trade_fake)


class _Exchange(torch.autograd.Function):
    """Run one function on a tensor, and another one on its gradient."""

    @staticmethod
    def forward(x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        return there(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, ctx.back = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


def _exchanged(x: Tensor, there: Callable[[Tensor], Any], back: Callable[[Tensor], Any]) -> Tensor:
    result: Tensor = _Exchange.apply(x, there, back)
    return result


def gather_keys(x: Tensor, route: Route) -> Tensor:
    """Return a mask or bias (..., Lk / W), sharded as the keys are, with all keys in global order; differentiable.

    Keys that no slice of this rank reads may be zero. The gradient is the sum of what all ranks send for own keys.
    """
    return _exchanged(x, lambda x: _keys_op(x, False, *route), lambda gradient: _keys_op(gradient, True, *route))


def sum_gradient(x: Tensor, members: Members, number: int) -> Tensor:
    """Return the same values; the gradient is summed over the ranks, the same bits on each, in the call `number`."""
    return _exchanged(x, lambda x: x.view_as(x), lambda gradient: _sum_op(gradient, members.name, members.size, number))


def _traded(
    x: Tensor, group: str, layout: tuple[int, ...], name: str, number: int, to_heads: bool, direction: str = "forward"
) -> Tensor:
    """Trade (B, L / W, H, D) of this rank's rows for (B, L, H / W, D) of its heads, or back.

    Each way is the gradient of the other. `name` is the tensor's name in the call.
    """
    return _exchanged(
        x,
        lambda x: _trade_op(x, group, list(layout), to_heads, direction, name, number),
        lambda gradient: _traded(gradient, group, layout, name, number, not to_heads, "backward"),
    )


class HeadTrade(NamedTuple):
    """How the ranks of a group trade their positions of all heads for all positions of their heads, and back.

    Attributes:
        members: the group.
        layout, layout_k: which queries and keys of the group each rank has.
        num_heads_k: of the whole call. Ranks share key-value heads that are fewer than they.
        number: of the call, 0 in a compiled graph.
    """

    members: Members
    layout: SequenceLayout
    layout_k: SequenceLayout
    num_heads_k: int
    number: int

    @property
    def heads(self) -> HeadGroup:
        """The heads of this rank."""
        return HeadGroup(self.members.rank, self.members.size)

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Trade q, k and v of this rank's rows for q, k and v of its heads; differentiable."""
        traded = self._trade(q, "q", self.layout, to_heads=True)
        repeats = self.members.size // self.num_heads_k
        keys = [x if repeats <= 1 else x.repeat_interleave(repeats, 2) for x in (k, v)]
        k, v = (self._trade(x, name, self.layout_k, to_heads=True) for name, x in zip("kv", keys))
        return traded, k, v

    def to_rows(self, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Trade out and lse of this rank's heads for out and lse of its rows; differentiable."""
        own = self._trade(out, "out", self.layout, to_heads=False)
        if lse is None:
            return own, None
        columns = self._trade(lse.transpose(1, 2)[..., None], "lse", self.layout, to_heads=False)
        return own, columns.squeeze(-1).transpose(1, 2)

    def _trade(self, x: Tensor, name: str, layout: SequenceLayout, *, to_heads: bool) -> Tensor:
        return _traded(x, self.members.name, layout.flat, name, self.number, to_heads)


def choose_strategy(
    asked: str, num_heads: int, num_heads_k: int, size: int, has_rows: bool, share: float
) -> tuple[str, str]:
    """Return "gather" or "ulysses" for a group of `size` ranks, called W in the reason that is returned with it.

    Args:
        has_rows: whether a mask or bias has rows of its own for each rank.
        share: the share of all keys that gather would move.
    """
    if asked not in STRATEGIES:
        raise ValueError(f"strategy is {asked!r}; it needs to be one of {', '.join(map(repr, STRATEGIES))}")
    if asked == "ulysses":
        if has_rows:
            raise ValueError(
                "strategy is 'ulysses', and a mask or bias has rows of this rank, which would have to move with the "
                "queries; strategy='gather' leaves them where they are"
            )
        check_heads(num_heads, num_heads_k, size)
    if asked != "auto":
        return asked, "it was asked for"
    if has_rows:
        return "gather", "a mask or bias has rows of this rank, which stay where they are"
    if not _heads_divide(num_heads, num_heads_k, size):
        return "gather", "the ranks do not divide the heads, as ulysses needs"
    # Gather moves 1.5 W / (G + 1) times the bytes of Ulysses, or a share of that.
    even = (num_heads // num_heads_k + 1) / 1.5
    if size * share > even:
        return "ulysses", "it sends less than gather: W > (Hq / Hk + 1) / 1.5"
    if size > even:
        return "gather", "ranks read so few keys of others that it sends less than ulysses"
    return "gather", "ulysses would send no less: W <= (Hq / Hk + 1) / 1.5"


def _heads_divide(num_heads: int, num_heads_k: int, size: int) -> bool:
    return num_heads % size == 0 and (num_heads_k % size == 0 or size % num_heads_k == 0)


def check_heads(num_heads: int, num_heads_k: int, size: int) -> None:
    """Refuse heads that `size` ranks cannot trade for positions."""
    if not _heads_divide(num_heads, num_heads_k, size):
        raise ValueError(
            f"q has {num_heads} heads on {num_heads_k} key-value heads, and {size} ranks trade them; it needs heads of "
            "q that are a multiple of the ranks, and key-value heads that divide them or are divided by them: "
            "strategy='gather' over one dim needs nothing of the kind"
        )
