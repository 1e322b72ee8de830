"""Biases and masks that ranks share: those sharded by keys made whole, and gradients summed over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..definition import define
from .exchange import Gathering, Returning, sum_over
from .fetching import Fetching, GivingBack
from .group import Members
from .layout import SequenceLayout, from_flat
from .reading import moves_of


def _gather_keys(x: Tensor, group: str, layout: list[int]) -> Tensor:
    as_bytes = x.view(torch.uint8) if x.dtype == torch.bool else x
    (whole,) = Gathering((as_bytes,), x.dim() - 1, from_flat(tuple(layout)), group).wait()
    return whole.view(torch.bool) if x.dtype == torch.bool else whole


def _gather_keys_fake(x: Tensor, group: str, layout: list[int]) -> Tensor:
    return x.new_empty((*x.shape[:-1], layout[0]))


def _return_keys(x: Tensor, group: str, rank: int, layout: list[int]) -> Tensor:
    (own,) = Returning((x,), x.dim() - 1, from_flat(tuple(layout)), rank, group).wait()
    return own


def _return_keys_fake(x: Tensor, group: str, rank: int, layout: list[int]) -> Tensor:
    return x.new_empty((*x.shape[:-1], from_flat(tuple(layout)).local_length))


_READING = "str group, int rank, int[] layout, int[] layout_k, int left, int right"


def _fetch_keys(
    x: Tensor, group: str, rank: int, layout: list[int], layout_k: list[int], left: int, right: int
) -> Tensor:
    as_bytes = x.view(torch.uint8) if x.dtype == torch.bool else x
    moves = moves_of(tuple(layout), tuple(layout_k), rank, (left, right), whole=True)
    (whole,) = Fetching((as_bytes,), x.dim() - 1, moves, group).wait()
    return whole.view(torch.bool) if x.dtype == torch.bool else whole


def _fetch_keys_fake(x: Tensor, group: str, rank: int, layout: list[int], layout_k: list[int], *window: int) -> Tensor:
    return _gather_keys_fake(x, group, layout_k)


def _give_back_keys(
    x: Tensor, group: str, rank: int, layout: list[int], layout_k: list[int], left: int, right: int
) -> Tensor:
    moves = moves_of(tuple(layout), tuple(layout_k), rank, (left, right), whole=True)
    (own,) = GivingBack((x,), x.dim() - 1, moves, group).wait()
    return own


def _give_back_keys_fake(
    x: Tensor, group: str, rank: int, layout: list[int], layout_k: list[int], *window: int
) -> Tensor:
    return _return_keys_fake(x, group, rank, layout_k)


def _sum(x: Tensor, group: str, size: int) -> Tensor:
    return sum_over(x, size, group)


def _sum_fake(x: Tensor, group: str, size: int) -> Tensor:
    return x.new_empty(x.shape)


_gather_op = define("gather_keys", "(Tensor x, str group, int[] layout) -> Tensor", _gather_keys, _gather_keys_fake)
_return_op = define(
    "return_keys", "(Tensor x, str group, int rank, int[] layout) -> Tensor", _return_keys, _return_keys_fake
)
_fetch_op = define("fetch_keys", f"(Tensor x, {_READING}) -> Tensor", _fetch_keys, _fetch_keys_fake)
_give_back_op = define("give_back_keys", f"(Tensor x, {_READING}) -> Tensor", _give_back_keys, _give_back_keys_fake)
_sum_op = define("sum_over_ranks", "(Tensor x, str group, int size) -> Tensor", _sum, _sum_fake)


class _GatherKeys(torch.autograd.Function):
    """The whole of what is sharded by keys; backward sums what all ranks have sent for the keys of this one."""

    @staticmethod
    def forward(x: Tensor, members: Members, layout: tuple[int, ...]) -> Tensor:
        whole: Tensor = _gather_op(x, members.name, list(layout))
        return whole

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.members, ctx.layout = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        own: Tensor = _return_op(gradient, ctx.members.name, ctx.members.rank, list(ctx.layout))
        return own, None, None


class _FetchKeys(torch.autograd.Function):
    """The same with what this rank reads alone, zero elsewhere; backward sums what the ranks that read them send."""

    @staticmethod
    def forward(
        x: Tensor, members: Members, layout: tuple[int, ...], layout_k: tuple[int, ...], window: tuple[int, int]
    ) -> Tensor:
        whole: Tensor = _fetch_op(x, members.name, members.rank, list(layout), list(layout_k), *window)
        return whole

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.members, ctx.layout, ctx.layout_k, ctx.window = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        over = (ctx.members.name, ctx.members.rank, list(ctx.layout), list(ctx.layout_k), *ctx.window)
        own: Tensor = _give_back_op(gradient, *over)
        return own, None, None, None, None


class _SumGradient(torch.autograd.Function):
    """What it is given; backward sums the gradients of all ranks."""

    @staticmethod
    def forward(x: Tensor, members: Members) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.members = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total: Tensor = _sum_op(gradient, ctx.members.name, ctx.members.size)
        return total, None


def gather_keys(x: Tensor, members: Members, layout: SequenceLayout) -> Tensor:
    """A mask or bias (..., Lk / W), sharded as the keys are, with all keys in global order; differentiable."""
    whole: Tensor = _GatherKeys.apply(x, members, layout.flat)
    return whole


def fetch_keys(
    x: Tensor, members: Members, layout: SequenceLayout, layout_k: SequenceLayout, window: tuple[int, int]
) -> Tensor:
    """The same with the keys that this rank reads, by the plan of its slices, and zero elsewhere; differentiable."""
    whole: Tensor = _FetchKeys.apply(x, members, layout.flat, layout_k.flat, window)
    return whole


def sum_gradient(x: Tensor, members: Members) -> Tensor:
    """The same values; its gradient is the sum over the ranks, the same bits on each."""
    same: Tensor = _SumGradient.apply(x, members)
    return same
