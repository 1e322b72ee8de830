"""The sums of a bias gradient in slots: among how many programs its heads are shared, and how the slots are added."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from .kernel_launch import Launch, by_name
from .sum_slots import sum_slots_kernel

# Programs for each SM: some waves of those that it holds, so that the last is a small part of the time. Where each has
# a slot, more of them store more than they spread work.
PROGRAMS_PER_SM = 8
PROGRAMS_WITH_SLOTS = 4
# Slots take no more memory than this, unless the bias itself does.
MAX_SLOT_BYTES = 64 * 2**20
_VALUES, _SLOTS = 64, 32  # of a step of the kernel that adds


def chunks_of(members: int, programs: int, num_sms: int, slots: int | None = None) -> tuple[int, int]:
    """How many of the `members` of a walk each program takes, and how many programs then share it.

    Args:
        members: heads of batch entries that are walked one after the other.
        programs: of the launch, if none shared its walk.
        num_sms: of the GPU.
        slots: for how many sums there is room; None: programs store none.
    """
    wanted = max(1, (PROGRAMS_PER_SM if slots is None else PROGRAMS_WITH_SLOTS) * num_sms // programs)
    chunk = triton.cdiv(members, min(wanted, members, slots or members))
    return chunk, triton.cdiv(members, chunk)


def most_slots(size: int) -> int:
    """Slots of a gradient of so many values that MAX_SLOT_BYTES hold; at least one."""
    return max(1, MAX_SLOT_BYTES // (4 * size))


def empty_slots(slots: int, dbias: Tensor, empty: Callable[..., Tensor] = torch.empty) -> Tensor:
    """Room for the sums, fp32 (slots, *dbias.shape); the gradient itself, where there is one slot."""
    return dbias if slots == 1 else empty((slots, *dbias.shape), dtype=torch.float32, device=dbias.device)


def plan_sum(slots: int, bias: Tensor) -> Callable[[Tensor, Tensor], None]:
    """How slots become the gradient of a bias: run(sums, dbias)."""
    if slots == 1:
        return lambda sums, dbias: None
    size = bias.numel()
    rest = by_name(sum_slots_kernel, {}, size=size, count=slots, SLOTS=_SLOTS, BLOCK=_VALUES)
    return Launch(sum_slots_kernel, triton.cdiv(size, _VALUES), rest, {"num_warps": 4})
