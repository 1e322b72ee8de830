"""The gradient of a shared bias in slots: how many programs share its heads, and how their slots are added."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from .kernel_launch import Launch, by_name
from .sum_slots import sum_slots_kernel

# Programs for each SM: several waves, so that the last, incomplete wave is a small part of the time. With slots fewer,
# because each further program stores one more slot.
PROGRAMS_PER_SM = 8
PROGRAMS_WITH_SLOTS = 4
# Slots take no more memory than this, unless the bias itself does.
MAX_SLOT_BYTES = 64 * 2**20
_VALUES, _SLOTS = 64, 32  # values of a program, and slots of one step, of the kernel that adds


def chunks_of(members: int, programs: int, num_sms: int, slots: int | None = None) -> tuple[int, int]:
    """Return how many `members` of a walk each program takes, and how many programs share it; None: without slots."""
    wanted = max(1, (PROGRAMS_PER_SM if slots is None else PROGRAMS_WITH_SLOTS) * num_sms // programs)
    chunk = triton.cdiv(members, min(wanted, members, slots or members))
    return chunk, triton.cdiv(members, chunk)


def most_slots(size: int) -> int:
    """Return how many slots of `size` values fit in MAX_SLOT_BYTES; at least one."""
    return max(1, MAX_SLOT_BYTES // (4 * size))


def empty_slots(slots: int, dbias: Tensor, empty: Callable[..., Tensor] = torch.empty) -> Tensor:
    """Allocate the sums, fp32 (slots, *dbias.shape); with one slot return the gradient itself."""
    return dbias if slots == 1 else empty((slots, *dbias.shape), dtype=torch.float32, device=dbias.device)


def plan_sum(slots: int, bias: Tensor) -> Callable[[Tensor, Tensor], None]:
    """Plan how slots become the gradient of a bias: run(sums, dbias)."""
    if slots == 1:
        return lambda sums, dbias: None
    size = bias.numel()
    rest = by_name(sum_slots_kernel, {}, size=size, count=slots, SLOTS=_SLOTS, BLOCK=_VALUES)
    return Launch(sum_slots_kernel, triton.cdiv(size, _VALUES), rest, {"num_warps": 4})
