"""Triton's interpreter in this process: the Triton kernels run on CPU tensors, on outputs that tell what was written.

The first import of this module decides it, because Triton decides at its own import whether it interprets. So programs
that import it are processes of their own; an access far out of bounds ends one by a segmentation fault. Kernels
write into NaN, between margins of NaN.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"
os.environ.pop("FLASH_DMATTN_TEST_DTYPE", None)  # bf16 products are wrong here
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from out_of_tree import replace_backend, rules_without  # noqa: E402
from quick_interpreter import make_quick  # noqa: E402
from torch import Tensor  # noqa: E402
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle  # noqa: E402

from flash_dmattn.backends.triton import passes  # noqa: E402
from flash_dmattn.dispatch.registry import choices_changed  # noqa: E402
from flash_dmattn.triton_kernels import (  # noqa: E402
    launch,
    plan,
    plan_backward,
    plan_forward,
    plan_sequences,
    plan_slots,
    tile_table,
)
from flash_dmattn.triton_kernels.plan import Call  # noqa: E402
from flash_dmattn.triton_kernels.tile_table import Tile  # noqa: E402

make_quick()
EVERY_DTYPE = (torch.float32, torch.float16)
# The interpreter takes the same time for a step of any size, and a few steps show every edge.
TILES = (Tile(16, 32, 4, 1), Tile(16, 32, 4, 1), Tile(32, 32, 4, 1), Tile(16, 64, 4, 1))
# More SMs than programs: loops over blocks are shared among programs.
NUM_SMS = (1, 64)
# At 0, a key mask whose programs need no parts does without them.
PARTS_BYTES = (plan_backward.MAX_PARTS_BYTES, plan_backward.MAX_PARTS_BYTES, 0)
# Bytes for pairs: of all heads at once, of a few, of some lines of one.
SPACES = (2**29, 400_000, 100_000)
FEW_PAIRS = (0, passes.FEW_PAIRS)

WIDE_TABLE = tile_table._wide_table

MARGIN = 64
_allocated: list[tuple[Tensor, int]] = []


def admit_cpu() -> None:
    """Lift the rule on the device, which the interpreter does not need."""
    replace_backend("triton", rules=rules_without("triton", "device"))


def guard_outputs() -> None:
    """Have the backend allocate NaN between margins of NaN; modules and compilers of torch do not work then."""
    torch.empty, torch.empty_like = guarded_empty, lambda x: guarded_empty(x.shape, dtype=x.dtype)


def set_up(
    tile: Tile = TILES[0],
    num_sms: int = 1,
    parts_bytes: int = plan_backward.MAX_PARTS_BYTES,
    few_pairs: int = 0,
    arch: str = "cpu",
) -> None:
    """Make the plans of the next calls with these tiles, and as on a GPU of so many SMs.

    Args:
        tile: of all kernels.
        num_sms: of the GPU.
        parts_bytes: as `plan_backward.MAX_PARTS_BYTES`.
        few_pairs: as `passes.FEW_PAIRS`; at 0 every bool mask is packed.
        arch: "sm_90" loads tiles by descriptors, where these pay.
    """

    def call(*arguments: Any) -> Call:
        made = Call(*arguments)
        made.num_sms, made.arch = num_sms, arch
        return made

    tile_table._FP32 = tile_table._SMALL = {256: tile}
    tile_table._wide_table = WIDE_TABLE if arch == "sm_90" else lambda *_: {512: tile}
    plan_backward.MAX_PARTS_BYTES = parts_bytes
    launch.Call = call
    plan_sequences.chunks_of = lambda members, programs, _, slots: plan_slots.chunks_of(
        members, programs, num_sms, slots
    )
    launch.plans.clear()
    _allocated.clear()
    if few_pairs != passes.FEW_PAIRS:
        passes.FEW_PAIRS = few_pairs
        choices_changed()


def guarded_empty(*shape: Any, dtype: torch.dtype = torch.float32, device: object = None) -> Tensor:
    """`torch.empty`, of NaN and between margins of NaN: unwritten elements and writes outside of an output show."""
    sizes = torch.Size(shape if isinstance(shape[0], int) else shape[0])
    if not dtype.is_floating_point:
        return torch.full(sizes, 77, dtype=dtype)
    room = torch.full((sizes.numel() + 2 * MARGIN,), torch.nan, dtype=dtype)
    _allocated.append((room, sizes.numel()))
    return room[MARGIN : MARGIN + sizes.numel()].view(sizes)


def assert_margins() -> None:
    """No kernel wrote outside of the tensors allocated since `set_up`."""
    for room, size in _allocated:
        assert bool(room[:MARGIN].isnan().all()), "written before an output"
        assert bool(room[MARGIN + size :].isnan().all()), "written behind an output"
    _allocated.clear()


def dot_of_tensor_cores(self: Any, a: Any, b: Any, d: Any, *_: Any) -> TensorHandle:
    """Multiply as tensor cores are known to: 16 products at a time are added to a sum, which is then cut to fp32.

    The model is that of published tests of V100 to B200: the sum of 16 is exact, and cut toward zero.
    """
    x, y, total = (t.data.astype(np.float64) for t in (a, b, d))
    for first in range(0, x.shape[-1], 16):
        exact = total + x[..., first : first + 16] @ y[..., first : first + 16, :]
        rounded = exact.astype(np.float32)
        with np.errstate(invalid="ignore"):
            cut = np.where(np.abs(rounded) > np.abs(exact), np.nextafter(rounded, np.float32(0.0)), rounded)
        total = cut.astype(np.float64)
    return TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)


@contextmanager
def on_tensor_cores(precision: str, tile: Tile, stored: bool = False) -> Iterator[None]:
    """Have calls in fp32 multiply with a precision of `precision.py`, on tiles of this size, pieces maybe stored."""
    pieces = {kernel: {256: tile} for kernel in tile_table._PIECES_STORED}
    with (
        mock.patch.object(plan, "select_precision", lambda *_: precision),
        mock.patch.object(tile_table, "_PIECES", pieces),
        mock.patch.object(tile_table, "_PIECES_STORED", pieces),
        mock.patch.object(plan_forward, "LEAST_TO_PACK_FORWARD", 1),
        mock.patch.object(plan_forward, "LEAST_TO_PACK", 1),
        mock.patch.object(plan_backward, "LEAST_TO_PACK", 1),
        mock.patch.object(plan, "LEAST_PAIRS_TO_PACK", 1 if stored else 2**62),
        mock.patch.object(InterpreterBuilder, "create_dot", dot_of_tensor_cores),
    ):
        yield
