"""Biases and masks that ranks share: those sharded by keys made whole, and gradients summed over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..definition import define
from .exchange import Gathering, Returning, sum_over
from .group import Members
from .layout import SequenceLayout, from_flat


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


def _sum(x: Tensor, group: str, size: int) -> Tensor:
    return sum_over(x, size, group)


def _sum_fake(x: Tensor, group: str, size: int) -> Tensor:
    return x.new_empty(x.shape)


_gather_op = define("gather_keys", "(Tensor x, str group, int[] layout) -> Tensor", _gather_keys, _gather_keys_fake)
_return_op = define(
    "return_keys", "(Tensor x, str group, int rank, int[] layout) -> Tensor", _return_keys, _return_keys_fake
)
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


def sum_gradient(x: Tensor, members: Members) -> Tensor:
    """The same values; its gradient is the sum over the ranks, the same bits on each."""
    same: Tensor = _SumGradient.apply(x, members)
    return same
