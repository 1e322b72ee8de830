"""dbias of cuda stored into a larger tensor, on a GPU or the emulated one: the bits of one alone, and no others."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accuracy import assert_accurate
from cases import DEVICE, Case, Inputs
from conftest import Runner
from cuda_forms import differentiated
from distributed_calls import ParallelCase
from layouts import offset, transposed
from test_cuda_backward import BASE, FULL, HEAD_DIMS, MASKS
from test_distributed_slices import simulated
from torch import Tensor

from flash_dmattn.backends.cuda import passes
from flash_dmattn.dispatch.plan import backward_pass
from flash_dmattn.dispatch.registry import BACKENDS
from flash_dmattn.operators import describe_operands
from flash_dmattn.problem import MaskView
from flash_dmattn.problem import inputs as attention
from flash_dmattn.reference import formula

pytestmark = pytest.mark.parametrize("backend", ("cuda",), indirect=True)

AROUND = -12352.0  # what lies in the larger tensor beside dbias, which has no such number
SMALL = BASE.with_(batch=2, num_heads=4, num_heads_k=2, bias=FULL)


def place_in_frame(shape: tuple[int, ...], like: Tensor) -> tuple[Tensor, Tensor]:
    """A larger tensor and the place in it, with NaN there; rows of the place start on 16 bytes."""
    batch, heads, rows, keys = shape
    frame = like.new_full((batch + 1, heads + 3, rows + 5, 8 + -(-keys // 8) * 8 + 16), AROUND)
    place = frame[1:, 1:-2, 3:-2, 8 : 8 + keys]
    assert place.shape == shape and not place.is_contiguous()
    return frame, place.fill_(torch.nan)


def built(backend: Runner, case: Case, form: str = "none") -> tuple[Case, Inputs]:
    """A case with a mask of that form, or a skip with the reasons for which cuda refuses it."""
    changes, leave_out = MASKS[form]
    case = case.with_(**changes)
    inputs = case.build()
    if leave_out is not None:
        leave_out(inputs.mask)
    backend.attention(case, inputs)  # or a skip
    if backend.choice(case, inputs) != "cuda":
        pytest.skip("the backward kernels of this case are not built")
    return case, inputs


def dbias_of(case: Case, x: Inputs, out: Tensor, lse: Tensor, **arguments: Tensor) -> Tensor:
    view = MaskView() if x.mask is None else MaskView("dense", (x.mask,))
    dlse = None if x.dlse is None else x.dlse.masked_fill(lse == -torch.inf, 0.0)
    inputs = attention.Inputs(x.q, x.k, x.v, view, x.bias)
    problem = differentiated(case)
    problem = describe_operands(inputs, problem.flags, problem.needs_grad)
    dbias = backward_pass(BACKENDS["cuda"], problem)(attention.Saved(inputs, out, lse), x.dout, dlse, **arguments)[3]
    assert dbias is not None
    return dbias


def check(case: Case, x: Inputs, frame: Tensor, place: Tensor) -> Tensor:
    """dbias in that place: accurate, and bit for bit what it is alone; nothing else of the frame is written."""
    out, lse = formula.attention(x.q, x.k, x.v, x.mask, x.bias, **case.flags())
    around = torch.ones_like(frame, dtype=torch.bool)
    offset_in_frame = place.storage_offset() - frame.storage_offset()
    around.as_strided(place.shape, place.stride(), offset_in_frame).fill_(False)
    before = frame.clone()
    actual = dbias_of(case, x, out, lse, dbias_out=place)
    assert actual is place
    assert torch.equal(frame[around], before[around]), "what lies beside dbias was written"
    assert_accurate({"dbias": actual}, case, x)
    assert torch.equal(actual, dbias_of(case, x, out, lse))
    return actual


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Strides of each dbias that kernels were told to store."""
    strides: list[tuple[int, ...]] = []
    kernels = passes.kernels()

    def differentiate(*arguments: Any) -> None:
        if arguments[13] is not None:
            strides.append(arguments[13].stride())
        kernels.differentiate(*arguments)

    monkeypatch.setattr(passes, "kernels", lambda: kernels._replace(differentiate=differentiate))
    return strides


@pytest.mark.parametrize("form", MASKS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_mask(backend: Runner, head_dim: int, form: str, stored: list[tuple[int, ...]]) -> None:
    case, inputs = built(backend, SMALL.with_(head_dim=head_dim), form)
    assert inputs.bias is not None
    frame, place = place_in_frame(inputs.bias.shape, inputs.bias)
    check(case, inputs, frame, place)
    assert stored[0] == place.stride()


@pytest.mark.parametrize(
    "changes",
    (
        {"seqlen_q": 330, "seqlen_k": 136, "is_causal": True},  # rows before the first key have none
        {"window_size": (70, 9)},
        {"seqlen_q": 100, "seqlen_k": 520, "window_size": (-1, 40)},
        {"batch": 1, "seqlen_k": 264, "window_size": (0, 64)},
        {"batch": 1, "num_heads": 1, "num_heads_k": 1, "is_causal": True},
        {"seqlen_q": 2, "seqlen_k": 264, "window_size": (100, 0)},
        {"seqlen_k": 520},  # two tiles of keys at a time, on a GPU of few multiprocessors
    ),
    ids=str,
)
def test_every_band(backend: Runner, changes: dict[str, Any], stored: list[tuple[int, ...]]) -> None:
    case, inputs = built(backend, SMALL.with_(**changes))
    assert inputs.bias is not None
    frame, place = place_in_frame(inputs.bias.shape, inputs.bias)
    check(case, inputs, frame, place)
    assert stored[0] == place.stride()


def test_other_dims_behind_each_other(backend: Runner, stored: list[tuple[int, ...]]) -> None:
    """Entries nearest to each other, and rows farthest; a stride of a dim of size 1 is never taken."""
    case, inputs = built(backend, SMALL.with_(is_causal=True))
    assert inputs.bias is not None
    batch, heads, rows, keys = inputs.bias.shape
    frame = inputs.bias.new_full((rows, heads, batch, keys + 8), AROUND)
    check(case, inputs, frame, frame.permute(2, 1, 0, 3)[..., :keys])
    case, inputs = built(backend, SMALL.with_(batch=1, is_causal=True))
    frame = frame[:, :, :1].clone()
    place = frame.as_strided((1, heads, rows, keys), (3, *frame.permute(2, 1, 0, 3).stride()[1:]))
    check(case, inputs, frame, place)
    assert [len({*strides}) for strides in stored[::2]] == [4, 4] and stored[2][0] == 3


@pytest.mark.parametrize("strides", ((8, 2**31 + 64, 448, 1), (8, 448, 2**23, 1)), ids=("heads", "rows"))
@pytest.mark.parametrize("form", ("causal", "empty tiles"))
def test_offsets_that_32_bits_do_not_hold(
    backend: Runner, form: str, strides: tuple[int, ...], tmp_path: Path, stored: list[tuple[int, ...]]
) -> None:
    case, inputs = built(backend, SMALL.with_(batch=1, num_heads=2, seqlen_q=520, seqlen_k=384), form)
    assert inputs.bias is not None
    number = sum((size - 1) * stride for size, stride in zip((2, 520, 448), strides[1:])) + 1
    if DEVICE == "cuda":
        if torch.cuda.mem_get_info()[0] < 12e9:
            pytest.skip("needs 12 GB of GPU memory")
        buffer = torch.zeros(number, dtype=case.dtype, device=DEVICE)
    else:  # a file with holes, whose pages are there when they are written
        buffer = torch.from_file(str(tmp_path / "buffer"), shared=True, size=number, dtype=case.dtype)
    wider = buffer.as_strided((1, 2, 520, 448), strides)
    out, lse = formula.attention(inputs.q, inputs.k, inputs.v, inputs.mask, inputs.bias, **case.flags())
    actual = dbias_of(case, inputs, out, lse, dbias_out=wider[..., :384].fill_(torch.nan))
    assert stored == [strides] and number > 2**31
    assert torch.equal(actual, dbias_of(case, inputs, out, lse))
    assert not wider[..., 384:].any()


@pytest.mark.parametrize(
    "changes",
    (
        {"bias": ("1", "Hq", "Lq", "Lk")},
        {"bias": ("B", "Hk", "Lq", "Lk")},
        {"softcap": 2.0},
        {"bias": ("B", "Hq", "1", "Lk")},
        {"bias": ("B", "Hq", "Lq", "1")},
        {"seqlen_q": 1},
    ),
    ids=str,
)
def test_a_gradient_of_other_kernels_is_copied(
    backend: Runner, changes: dict[str, Any], stored: list[tuple[int, ...]]
) -> None:
    case, inputs = built(backend, SMALL.with_(**changes))
    assert inputs.bias is not None
    frame, place = place_in_frame(inputs.bias.shape, inputs.bias)
    check(case, inputs, frame, place)
    assert place.stride() not in stored


@pytest.mark.parametrize("layout", ("between 16 bytes", "transposed", "rows between 16 bytes"))
def test_places_that_kernels_cannot_write_are_copied_to(
    backend: Runner, layout: str, stored: list[tuple[int, ...]]
) -> None:
    case, inputs = built(backend, SMALL.with_(is_causal=True))
    assert inputs.bias is not None
    nothing = torch.full_like(inputs.bias, AROUND)
    if layout == "between 16 bytes":
        frame = place = offset(nothing, 4)
    elif layout == "transposed":
        frame = place = transposed(nothing)
    else:
        frame = torch.full((*inputs.bias.shape[:3], 268), AROUND, dtype=inputs.bias.dtype, device=inputs.bias.device)
        place = frame[..., :264]
    check(case, inputs, frame, place)
    assert all(strides == nothing.stride() for strides in stored)
    assert place.data_ptr() % 16 or place.stride() not in stored


def test_what_the_operator_refuses(backend: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the backend did not ask whether it may."""
    monkeypatch.setattr(passes, "stores_into", lambda *_: True)

    def refusal(place: Tensor | None = None, **changes: Any) -> str:
        case, x = built(backend, SMALL.with_(**changes))
        assert x.bias is not None
        out, lse = formula.attention(x.q, x.k, x.v, x.mask, x.bias, **case.flags())
        with pytest.raises(RuntimeError) as raised:
            dbias_of(case, x, out, lse, dbias_out=place_in_frame(x.bias.shape, x.bias)[1] if place is None else place)
        return str(raised.value)

    own_bias = built(backend, SMALL)[1].bias
    assert own_bias is not None
    for shape in (("1", "Hq", "Lq", "Lk"), ("B", "Hk", "Lq", "Lk")):
        assert "dbias needs to be contiguous" in refusal(bias=shape)
    assert "dbias has one place for all of dim 1" in refusal(own_bias[:, :1].expand(own_bias.shape))
    assert "dbias does not start on 16 bytes" in refusal(offset(own_bias, 1))
    assert "dbias has no unit stride in its last dim" in refusal(transposed(own_bias))


def test_rows_of_keys_that_are_no_whole_pieces(backend: Runner) -> None:
    """They are stored in rows of whole pieces, and copied."""
    case, x = built(backend, SMALL)
    assert x.bias is not None and x.mask is None
    case, x = case.with_(seqlen_k=260), replace(x, k=x.k[:, :260], v=x.v[:, :260], bias=x.bias[..., :260])
    assert x.bias is not None
    check(case, x, *place_in_frame(x.bias.shape, x.bias))


@pytest.mark.parametrize("groups", (1, 2))
@pytest.mark.parametrize("window", (None, (100, -1)), ids=str)
def test_slices_of_ranks_store_into_the_gradient_of_all_keys(
    backend: Runner, window: tuple[int, int] | None, groups: int, stored: list[tuple[int, ...]]
) -> None:
    built(backend, SMALL)
    case = ParallelCase(seqlen_q=640, seqlen_k=640, batch=1, head_dim=64, dtype=torch.bfloat16, device=DEVICE)
    case = case.with_(bias="full", is_causal=True, window_size=window, groups=groups)
    cuda = BACKENDS["cuda"]
    actual = simulated(case, 2, cuda)
    assert len(stored) == 3 * groups and all(strides[1:] == (320 * 640, 640, 1) for strides in stored)
    wanted = simulated(case, 2, dataclasses.replace(cuda, stores_dbias=False))
    assert torch.equal(actual["dbias"], wanted["dbias"]) and len({*stored[3 * groups :]}) > 1
