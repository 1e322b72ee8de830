"""Offsets beyond 2^31 in the attention kernels, interpreted: `python interpreted_far.py strides|entries`.

A process of its own, as `interpreted_triton.py` is. The tensors are virtual: their memory is mapped and never reserved,
and a call touches a few pages. An offset that overflows wraps in the interpreter as it does on a GPU, and then the
kernel reads or writes elsewhere. The same call on small contiguous tensors says what has to come out, bit for bit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from layouts import unbacked  # noqa: E402
from quick_interpreter import make_quick  # noqa: E402
from torch import Tensor  # noqa: E402
from triton.runtime.interpreter import interpreter_builder  # noqa: E402

from flash_dmattn.masks.prepared.operators import prepared_view  # noqa: E402
from flash_dmattn.problem import Flags, MaskChoice, MaskForm, MaskView, NeedsGrad  # noqa: E402
from flash_dmattn.problem.inputs import Inputs, Saved  # noqa: E402
from flash_dmattn.triton_kernels import launch, short_calls, tile_table  # noqa: E402
from flash_dmattn.triton_kernels.kernel_launch import Launch  # noqa: E402

BEYOND = 2**31 + 2**12
Results = list[Tensor | None]


def virtual(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A strided tensor in memory that is backed where it is touched."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return unbacked(elements, dtype).as_strided(tuple(shape), tuple(strides))


def far(x: Tensor, dim: int) -> Tensor:
    """The same values, the last along `dim` beyond 2^31 elements; by a stride that itself has 32 bits."""
    steps = x.shape[dim] - 1
    if steps < 2:  # the offset is a stride, or nothing
        return x
    strides = list(x.contiguous().stride())
    strides[dim] = BEYOND // steps + 1
    return virtual(x.shape, strides, x.dtype).copy_(x)


def results(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskView, bias: Tensor | None, dout: Tensor, dlse: Tensor, flags: Flags
) -> Results:
    out = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1])
    x = Inputs(q, k, v, mask, bias)
    launch.forward(x, out, lse, flags=flags)
    needs_grad = NeedsGrad(True, True, True, bias is not None)
    return [out, lse, *launch.backward(Saved(x, out, lse), dout, dlse, flags, needs_grad)]


def assert_equal(actual: Results, expected: Results, what: object) -> None:
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv", "dbias"), actual, expected, strict=True):
        assert (x is None) == (y is None), (what, name)
        assert x is None or y is None or torch.equal(x, y), (what, name)


def mask_of(
    form: str, batch: int, num_heads: int, seqlen_q: int, seqlen_k: int, prepares: MaskForm = "keys"
) -> MaskView:
    """A random mask as it is, or prepared with some tiles empty."""
    if form == "none":
        return MaskView()
    shape = (batch, num_heads, 1 if form in ("keys", "intervals") else seqlen_q, seqlen_k)
    mask = torch.rand(shape) < 0.6
    mask[..., :128, 128:256] = False
    if form == "dense":
        return MaskView("dense", (mask,))
    view = prepared_view(mask, seqlen_q, seqlen_k, (-1, -1), MaskChoice(prepares))
    assert view.form == form
    return view


# (batch, queries, keys, heads), the shape of the bias, and the mask; three of each, for two steps along every dim.
WALKED: tuple[tuple[tuple[int, ...], tuple[int, ...] | None, str], ...] = (
    ((3, 20, 40, 3), (3, 3, 20, 40), "none"),
    ((3, 20, 40, 3), (3, 1, 20, 40), "tiles"),
    ((3, 20, 40, 3), (1, 3, 20, 40), "keys"),
    ((3, 20, 40, 3), (3, 3, 1, 40), "keys"),
    ((3, 20, 40, 3), (3, 3, 20, 1), "none"),
    ((1, 260, 270, 1), (1, 1, 260, 270), "tiles"),  # three rows and columns of tiles
)
# Short rows, whose kernels read bool masks and the intervals of keys themselves.
SHORT: tuple[tuple[tuple[int, ...], tuple[int, ...] | None, str], ...] = (
    ((3, 20, 40, 3), (1, 3, 20, 40), "dense"),
    ((3, 20, 40, 3), (3, 3, 20, 40), "tiles"),
    ((3, 20, 40, 3), (3, 1, 1, 40), "intervals"),
)


def check_strides() -> None:
    """Every dim of every input far, a dim of each of them at a time."""
    for is_short, calls in ((False, WALKED), (True, SHORT)):
        for (batch, seqlen_q, seqlen_k, heads), shape, form in calls:
            dtype = torch.float16 if is_short else torch.float32
            q, dout = (torch.randn(batch, seqlen_q, heads, 16, dtype=dtype) for _ in range(2))
            k, v = (torch.randn(batch, seqlen_k, heads, 16, dtype=dtype) for _ in range(2))
            bias, dlse = shape and torch.randn(shape, dtype=dtype), torch.randn(batch, heads, seqlen_q)
            mask = mask_of(form, batch, heads, seqlen_q, seqlen_k, "intervals" if is_short else "keys")
            flags = Flags(-1, -1, 0.25, 0.0, False)
            expected = results(q, k, v, mask, bias, dout, dlse, flags)
            moves = moves_short if is_short else moves_walked
            for dim in range(4):
                rows = [far(x, dim) if dim < 3 else x for x in (q, k, v, dout)]
                tensors = [far(x, dim) if moves(form, shape, i, dim, x) else x for i, x in enumerate(mask.tensors)]
                moved = mask._replace(tensors=tuple(tensors))
                far_dlse = far(dlse, dim) if dim < 3 else dlse
                actual = results(*rows[:3], moved, bias is not None and far(bias, dim), rows[3], far_dlse, flags)
                assert_equal(actual, expected, (shape, form, dim))


def moves_walked(form: str, shape: object, number: int, dim: int, x: Tensor) -> bool:
    """Whether a dim of a tensor of a mask may be far; the kernel of a shared bias finds classes by strides of lists."""
    keep = (1, 2, 3) if form == "tiles" and shape == (3, 1, 20, 40) else (1,)
    return number not in keep and dim < x.dim() - 1


def moves_short(form: str, shape: object, number: int, dim: int, x: Tensor) -> bool:
    """The same of short rows: keys of an interval and words of a row lie side by side, its two bounds move together."""
    return number < (2 if form == "intervals" else 1) and dim < {"dense": 4, "tiles": 3, "intervals": 2}[form]


def check_entries() -> None:
    """The last of so many batch entries that every tensor of rows and every dbias of scores has more than 2^31."""
    batch, heads, heads_k, length, dim = 2**21 + 8, 8, 4, 16, 16
    empty = torch.empty

    def virtual_empty(*shape: Any, dtype: torch.dtype = torch.float32, device: object = None) -> Tensor:
        sizes = torch.Size(shape if isinstance(shape[0], int) else shape[0])
        return virtual(sizes, empty(sizes, device="meta").stride(), dtype)

    def last_entry(run: Launch, *tensors: Tensor | None) -> None:
        programs = run.grid[0]
        set_dim, set_index = interpreter_builder.set_grid_dim, interpreter_builder.set_grid_idx
        skipped = programs - programs // batch
        with mock.patch.multiple(
            interpreter_builder,
            set_grid_dim=lambda x, y, z: set_dim(programs, y, z),
            set_grid_idx=lambda x, y, z: set_index(skipped + x, y, z),
        ):
            run.kernel[(programs // batch,)](*tensors, *run.rest)

    dtypes = short_calls.DTYPES
    for shape, form, mask_heads, is_short in (
        ((batch, heads, length, length), "tiles", heads_k, False),
        ((batch, heads_k, length, length), "none", 1, False),
        (None, "keys", heads, False),
        ((batch, heads, length, length), "none", 1, True),
    ):
        short_calls.DTYPES, heads_k = dtypes if is_short else (), heads if is_short else heads_k
        launch.plans.clear()
        torch.manual_seed(0)
        q, dout = (torch.randn(1, length, heads, dim).half() for _ in range(2))
        k, v = (torch.randn(1, length, heads_k, dim).half() for _ in range(2))
        bias, dlse = shape and torch.randn(1, *shape[1:]).half(), torch.randn(1, heads, length)
        mask, flags = mask_of(form, 1, mask_heads, length, length), Flags(-1, -1, 0.25, 0.0, False)
        expected = results(q, k, v, mask, bias, dout, dlse, flags)
        with mock.patch.object(torch, "empty", virtual_empty), mock.patch.object(Launch, "__call__", last_entry):
            many = []
            for x in (q, k, v, dout, dlse, *(() if bias is None else (bias,))):
                many.append(torch.empty((batch, *x.shape[1:]), dtype=x.dtype))
                many[-1][-1:] = x
            actual = results(*many[:3], mask, many[5] if shape else None, *many[3:5], flags)
        assert_equal([x if x is None else x[-1:] for x in actual], expected, (shape, form))


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    make_quick()
    tile_table._FP32 = tile_table._SMALL = {256: tile_table.Tile(64, 64, 4, 1)}
    {"strides": check_strides, "entries": check_entries}[sys.argv[1]]()
