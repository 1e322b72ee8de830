"""Biases and masks that ranks share: those sharded by keys made whole, and gradients summed over ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..definition import define
from .agreement import agree_within
from .exchange import Gathering, Returning, sum_over
from .fetching import Fetching, GivingBack
from .group import Members
from .layout import from_flat
from .reading import Moves, moves_of

_NUMBERS = "str group, int rank, int[] layout, int[] layout_k, int left, int right, bool sends_parts, int number"


class Numbers(NamedTuple):
    """What the operators of keys receive beside a tensor, in the order of their schema; as those of attention have it.

    With `sends_parts` a rank gets what its slices read, and zeros elsewhere. `number` is 0 in a compiled
    graph.
    """

    group: str
    rank: int
    layout: tuple[int, ...]
    layout_k: tuple[int, ...]
    left: int
    right: int
    sends_parts: bool
    number: int

    @property
    def moves(self) -> Moves:
        """Which keys ranks send each other, where they send parts."""
        return moves_of(tuple(self.layout), tuple(self.layout_k), self.rank, (self.left, self.right), whole=True)

    def compare(self, direction: str, x: Tensor) -> None:
        """Compare the operator with the operators of the other ranks."""
        values = self._asdict()
        del values["rank"]
        agree_within(self.group, direction, self.number, {"mask or bias of keys": x, **values})


def _gather_keys(x: Tensor, *numbers: Any) -> Tensor:
    n, dim = Numbers(*numbers), x.dim() - 1
    if n.number == 0:  # else the call was compared
        n.compare("forward", x)
    given = (x.view(torch.uint8) if x.dtype == torch.bool else x,)
    coming: Fetching | Gathering
    if n.sends_parts:
        coming = Fetching(given, dim, n.moves, n.group)
    else:
        coming = Gathering(given, dim, from_flat(tuple(n.layout_k)), n.group)
    (whole,) = coming.wait()
    return whole.view(torch.bool) if x.dtype == torch.bool else whole


def _gather_keys_fake(x: Tensor, *numbers: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], Numbers(*numbers).layout_k[0]))


def _return_keys(x: Tensor, *numbers: Any) -> Tensor:
    n, dim = Numbers(*numbers), x.dim() - 1
    n.compare("backward", x)
    leaving: GivingBack | Returning
    if n.sends_parts:
        leaving = GivingBack((x,), dim, n.moves, n.group)
    else:
        leaving = Returning((x,), dim, from_flat(tuple(n.layout_k)), n.rank, n.group)
    (own,) = leaving.wait()
    return own


def _return_keys_fake(x: Tensor, *numbers: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], from_flat(tuple(Numbers(*numbers).layout_k)).local_length))


def _sum(x: Tensor, group: str, size: int, number: int) -> Tensor:
    agree_within(group, "backward", number, {"bias or sink with a summed gradient": x})
    return sum_over(x, size, group)


def _sum_fake(x: Tensor, group: str, size: int, number: int) -> Tensor:
    return x.new_empty(x.shape)


_gather_op = define("gather_keys", f"(Tensor x, {_NUMBERS}) -> Tensor", _gather_keys, _gather_keys_fake)
_return_op = define("return_keys", f"(Tensor x, {_NUMBERS}) -> Tensor", _return_keys, _return_keys_fake)
_sum_op = define("sum_over_ranks", "(Tensor x, str group, int size, int number) -> Tensor", _sum, _sum_fake)


class _GatherKeys(torch.autograd.Function):
    """The whole of what is sharded by keys; backward sums what all ranks have sent for the keys of this one."""

    @staticmethod
    def forward(x: Tensor, numbers: Numbers) -> Tensor:
        whole: Tensor = _gather_op(x, *numbers)
        return whole

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.numbers = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        own: Tensor = _return_op(gradient, *ctx.numbers)
        return own, None


class _SumGradient(torch.autograd.Function):
    """What it is given; backward sums the gradients of all ranks."""

    @staticmethod
    def forward(x: Tensor, members: Members, number: int) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.members, ctx.number = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        total: Tensor = _sum_op(gradient, ctx.members.name, ctx.members.size, ctx.number)
        return total, None, None


def gather_keys(x: Tensor, numbers: Numbers) -> Tensor:
    """A mask or bias (..., Lk / W), sharded as the keys are, with all keys in global order; differentiable."""
    whole: Tensor = _GatherKeys.apply(x, numbers)
    return whole


def sum_gradient(x: Tensor, members: Members, number: int) -> Tensor:
    """Return the same values; the gradient is summed over the ranks, the same bits on each, in the call `number`."""
    same: Tensor = _SumGradient.apply(x, members, number)
    return same
