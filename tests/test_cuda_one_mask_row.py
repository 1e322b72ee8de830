"""Masks with one row for all queries, such as padding: with them cuda has work tiles of more rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import emulated_cuda
import pytest
import torch
from cases import DEVICE, Case, Inputs
from conftest import Runner
from out_of_tree import replaced, rules_without
from torch import Tensor
from torch.autograd import profiler as autograd_profiler
from torch.utils.flop_counter import FlopCounterMode

import flash_dmattn
from benchmarks import dispatch
from flash_dmattn.backends.cuda import passes
from flash_dmattn.backends.cuda import rules as cuda_rules
from flash_dmattn.backends.cuda.operands import Kernels
from flash_dmattn.backends.protocol import Availability
from flash_dmattn.dispatch.registry import BACKENDS
from flash_dmattn.masks import PreparedMask, padding_mask
from flash_dmattn.masks.prepared import operators

FULL = ("1", "Hq", "Lq", "Lk")
BIASES = {"no bias": None, "per key": ("1", "Hk", "1", "Lk"), "per score": FULL, "of entries": ("B", "Hq", "Lq", "Lk")}
FORMS = ("bool", "expanded", "prepared", "tiles")
BASE = Case(batch=3, seqlen_k=304, num_heads_k=4, mask=("B", "1", "1", "Lk"), dtype=torch.bfloat16, dlse=True)


def padded(case: Case) -> Inputs:
    """Its tensors; of the keys an entry sees none, whole tiles and some, or all."""
    lengths = torch.tensor([0, 140, case.seqlen_k], device=DEVICE)
    return replace(case.build(), mask=padding_mask(lengths[-case.batch :], case.seqlen_k))


def in_form(mask: Tensor, case: Case, form: str) -> Any:
    """The mask as a call has it."""
    if form == "bool":
        return mask
    if form == "expanded":
        return mask.expand(-1, -1, case.seqlen_q, -1)
    band = {"is_causal": case.is_causal, "window_size": case.window_size}
    return PreparedMask.from_mask(mask, seqlen_q=case.seqlen_q, as_tiles=form == "tiles", **band)


def attention(*arguments: Any, **flags: Any) -> Any:
    return flash_dmattn.attention(*arguments, return_lse=True, backend="cuda", **flags)


def check(backend: Runner, case: Case, inputs: Inputs, form: str = "bool") -> None:
    assert inputs.mask is not None
    backend.check(case, inputs, replace(inputs, mask=in_form(inputs.mask, case, form)))


# One, two and three tiles of 64 rows in the last of 192; 256 and more of a head dim of 32.
@pytest.mark.parametrize("seqlen_q", (129, 300, 385, 577))
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("head_dim", (32, 64))
@pytest.mark.parametrize("backend", ("cuda",), indirect=True)
def test_padding(backend: Runner, head_dim: int, bias: str, seqlen_q: int) -> None:
    case = BASE.with_(head_dim=head_dim, seqlen_q=seqlen_q, bias=BIASES[bias])
    check(backend, case, padded(case))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", ("no bias", "per score"))
@pytest.mark.parametrize("heads", ("1", "Hk", "Hq"))
@pytest.mark.parametrize("head_dim", (32, 64))
@pytest.mark.parametrize("backend", ("cuda",), indirect=True)
def test_any_keys(backend: Runner, head_dim: int, heads: str, bias: str, form: str) -> None:
    """Keys that lie scattered, of each head, of groups; few are seen, and tiles without one."""
    case = BASE.with_(head_dim=head_dim, seqlen_q=200 if head_dim == 32 else 300, seqlen_k=488, num_heads_k=2)
    case = case.with_(mask=("B", heads, "1", "Lk"), bias=BIASES[bias], needs_grad=(), dlse=False)
    inputs = case.build()
    assert inputs.mask is not None
    inputs.mask[..., 128:256] = False
    inputs.mask[1:, ..., 304:] = False
    inputs.mask[2] = True
    check(backend, case, inputs, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("band", ({"is_causal": True}, {"window_size": (70, 20)}), ids=str)
@pytest.mark.parametrize("backend", ("cuda",), indirect=True)
def test_beside_a_band(backend: Runner, band: dict[str, Any], form: str) -> None:
    """Then each row of tiles has a list of its own."""
    case = BASE.with_(head_dim=32, seqlen_q=300, needs_grad=(), dlse=False, **band)
    check(backend, case, padded(case), form)


@pytest.mark.parametrize("bias", ("no bias", "per score"))
@pytest.mark.parametrize("backend", ("cuda",), indirect=True)
def test_rows_of_their_own(backend: Runner, bias: str) -> None:
    """Some rows of tiles list tiles that others do not: work tiles are the tiles of the mask."""
    case = BASE.with_(
        head_dim=32, seqlen_q=300, mask=("B", "1", "Lq", "Lk"), bias=BIASES[bias], needs_grad=(), dlse=False
    )
    inputs = case.build()
    assert inputs.mask is not None
    inputs.mask[:, :, :128, :128] = False
    inputs.mask[:, :, 128:, 128:] = False
    check(backend, case, inputs)


@pytest.mark.parametrize("backend", ("cuda",), indirect=True)
def test_a_sink_a_softcap_and_splits_of_keys(backend: Runner) -> None:
    for changes in ({"sink": "normal"}, {"softcap": 3.0}, {"batch": 1, "num_heads": 2, "num_heads_k": 2}):
        case = BASE.with_(head_dim=64, seqlen_q=300, seqlen_k=1100, needs_grad=("q", "k", "v"), **changes)
        check(backend, case, padded(case))


@pytest.mark.parametrize("bias", ("no bias", "per score"))
@pytest.mark.parametrize("backend", ("cuda",), indirect=True)
def test_the_same_bits_as_work_tiles_of_a_tile_of_the_mask(
    backend: Runner, bias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At head dim 64 both walk 128 keys a step, in the same order, where no keys are split."""
    case = BASE.with_(head_dim=64, seqlen_q=300, bias=BIASES[bias], needs_grad=(), dlse=False)
    inputs = padded(case)
    check(backend, case, inputs)
    monkeypatch.setattr(passes, "NUM_KV_SPLITS", 1)
    assert inputs.mask is not None
    mask = in_form(inputs.mask, case, "prepared" if bias == "no bias" else "tiles")
    masks = mask, replace(mask, one_row=False)
    one, each = (attention(inputs.q, inputs.k, inputs.v, mask, inputs.bias) for mask in masks)
    for x, y in zip(one, each, strict=True):
        assert torch.equal(x, y)


def launches_of(call: Callable[[], object]) -> int:
    """Count the kernels and memsets of a call, as the GPU or the emulated one gets them."""
    if DEVICE == "cpu":
        before = emulated_cuda.launches()
        call()
        return emulated_cuda.launches() - before
    call()  # allocates, and finds what is decided once
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        autograd_profiler._is_profiler_enabled = False  # else operators are called, for the profiler to show
        call()
        torch.cuda.synchronize()
    return len([event for event in profile.events() or () if event.device_type == torch.autograd.DeviceType.CUDA])


@pytest.mark.parametrize("is_causal", (False, True))
@pytest.mark.parametrize("bias", ("no bias", "per key", "per query"))
@pytest.mark.parametrize("heads", ("1", "Hk"))
@pytest.mark.parametrize("order_from", (1, 2**20))
@pytest.mark.parametrize("backend", ("cuda",), indirect=True)
def test_two_launches_give_the_bits_of_a_prepared_mask(
    backend: Runner, order_from: int, heads: str, bias: str, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the mask, which also gathers what the call reads in the order of the mask, and one of the kernel."""
    monkeypatch.setattr(operators, "ORDER_FROM", order_from)
    biases = {**BIASES, "per query": ("B", "Hk", "Lq", "1")}
    case = Case(batch=2, seqlen_q=300, seqlen_k=600, num_heads_k=2, head_dim=64, dtype=torch.bfloat16, dlse=True)
    case = case.with_(mask=("B", heads, "1", "Lk"), bias=biases[bias], is_causal=is_causal)
    inputs = case.build()
    assert inputs.mask is not None
    inputs.mask[0, ..., 100:] = False
    check(backend, case, inputs)
    prepared = PreparedMask.from_mask(inputs.mask, seqlen_q=300, is_causal=is_causal, reorder=order_from == 1)
    assert prepared.is_reordered == (order_from == 1)
    tensors = inputs.q, inputs.k, inputs.v
    made = attention(*tensors, inputs.mask, inputs.bias, is_causal=is_causal)
    for x, y in zip(made, attention(*tensors, prepared, inputs.bias), strict=True):
        assert torch.equal(x, y)
    # Without lse, which torch rounds to fp32 where the call has a bias.
    run = partial(flash_dmattn.attention, *tensors, bias=inputs.bias, backend="cuda")
    assert launches_of(lambda: run(mask=inputs.mask, is_causal=is_causal)) == 2
    if order_from == 1:  # keys in their order and counters of 0, and the kernel
        assert launches_of(lambda: run(mask=prepared)) == 2
    with FlopCounterMode(display=False):
        watched = attention(*tensors, inputs.mask, inputs.bias, is_causal=is_causal)
    assert all(torch.equal(x, y) for x, y in zip(made, watched, strict=True))


# Launches of a forward pass and of a step; the same in an order of keys; operations of torch. The latter allocate
# results, gradients, and sums of a bias per key, and view the sums.
COUNTS = {
    "plain": ((1, 4), (1, 4), (2, 5)),
    "bias per key": ((1, 4), (1, 4), (2, 7)),
    "mask of keys": ((2, 5), (2, 6), (2, 5)),
    "mask of keys, bias per key": ((2, 5), (2, 6), (2, 7)),
    "prepared keys": ((1, 4), (2, 6), (2, 5)),
    "prepared keys, bias per key": ((1, 4), (2, 6), (2, 7)),
    "lists of blocks": ((2, 6), (2, 6), (2, 5)),
    "padding": ((2, 5), (2, 6), (2, 5)),
}


@pytest.mark.parametrize("in_order", (False, True))
def test_how_often_a_call_asks_torch_and_the_gpu(in_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask is one launch. In an order of keys each pass has one launch; for a bool mask that is the same."""
    if DEVICE == "cuda" or not BACKENDS["cuda"].probe().usable:
        pytest.skip("no emulated extension is here, which counts launches")
    monkeypatch.setattr(operators, "ORDER_FROM", 1 if in_order else 2**30)
    forms = dispatch.forms(torch.device("cpu"), 512)
    count = lambda: emulated_cuda.launches(leaves_out=True)
    emulated_cuda.configure(num_sms=132)
    count()
    try:
        with flash_dmattn.config(backend="cuda"):
            for name, (*launches, operations) in COUNTS.items():
                call = forms[name][:2]
                traces = [dispatch.trace(each(*call), count) for each in (dispatch.forward_of, dispatch.step_of)]
                assert tuple(each.launches for each in traces) == launches[in_order], name
                assert tuple(each.operations for each in traces) == operations, name
    finally:
        emulated_cuda.launches()
        emulated_cuda.configure()


@pytest.mark.parametrize("backend", ("cuda",), indirect=True)
def test_keys_that_the_packer_cannot_read(backend: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that start between 16 bytes, in every call or in one; heads first; parts of a batch: the pass gathers."""
    monkeypatch.setattr(operators, "ORDER_FROM", 1)
    case = Case(batch=2, seqlen_q=130, seqlen_k=600, num_heads_k=2, head_dim=64, dtype=torch.bfloat16, needs_grad=())
    case = case.with_(mask=("B", "Hk", "1", "Lk"), bias=BIASES["per key"])
    inputs = case.build()
    wanted = attention(inputs.q, inputs.k, inputs.v, inputs.mask, inputs.bias)
    frame = torch.empty(inputs.k.numel() + 8, dtype=case.dtype, device=DEVICE)
    for start in (0, 1, 8):
        k = frame[start : start + inputs.k.numel()].view(inputs.k.shape).copy_(inputs.k)
        rows = torch.empty(*inputs.v.shape[:3], 68, dtype=case.dtype, device=DEVICE)[..., :64].copy_(inputs.v)
        for v in (inputs.v, rows):
            actual = attention(inputs.q, k, v, inputs.mask, inputs.bias)
            assert all(torch.equal(x, y) for x, y in zip(actual, wanted, strict=True)), start
    check(backend, case, inputs)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether the forward kernel hears that its mask has one row, call by call; on CPU tensors, it computes nothing."""
    if DEVICE == "cuda":
        pytest.skip("a GPU runs the kernels themselves")
    heard: list[bool] = []
    kernels = Kernels(lambda *arguments: heard.append(arguments[-6]), *[None] * 3)  # five arguments follow
    monkeypatch.setattr(passes, "kernels", lambda: kernels)
    monkeypatch.setattr(cuda_rules, "installed_instances", lambda: None)
    with replaced("cuda", probe=lambda: Availability(True), rules=rules_without("cuda", "device")):
        yield heard


def test_what_the_kernel_is_told(told: list[bool]) -> None:
    """Only where no band makes the rows differ; also through the operator, which a mode sees."""
    q, k = (torch.randn(2, n, 4, 64, dtype=torch.bfloat16) for n in (300, 260))
    rows = torch.rand(2, 1, 300, 260) < 0.5
    keys = rows[:, :, :1]
    prepared = PreparedMask.from_mask(keys, seqlen_q=300)
    masks = {
        "one row": (keys, True),
        "expanded": (keys.expand(-1, 4, 300, -1), True),
        "prepared": (prepared, True),
        "moved": (prepared.to("cpu").expand_batch((2,)), True),
        "tiles": (PreparedMask.from_mask(keys, seqlen_q=300, as_tiles=True), True),
        "each its row": (rows, False),
        "prepared rows": (PreparedMask.from_mask(rows), False),
        "found": (PreparedMask.from_mask(keys.expand(-1, -1, 300, -1).contiguous(), find_intervals=True), False),
    }
    bands: tuple[dict[str, Any], ...] = ({}, {"window_size": (300, 300)}, {"is_causal": True}, {"window_size": (50, 3)})
    for name, (mask, expected) in masks.items():
        for band in bands if isinstance(mask, Tensor) else bands[:1]:
            for watch in (nullcontext(), FlopCounterMode(display=False)):
                told.clear()
                with torch.no_grad(), watch:
                    attention(q, k, k, mask, **band)
                assert told == [expected and band in bands[:2]], (name, band, watch)
    told.clear()
    attention(q, k, k, PreparedMask.from_mask(keys, seqlen_q=300, is_causal=True))
    assert told == [False]
