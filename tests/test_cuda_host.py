"""The decisions and copies of the cuda backend around its kernels, without a GPU: no test launches a kernel.

Results are the subject of the tests that run on a GPU or the emulated one.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import ALL, NAMES, Case, Inputs
from layouts import offset
from out_of_tree import replaced
from torch import Tensor

from flash_dmattn.backends.cuda import operands as readers
from flash_dmattn.backends.cuda import passes
from flash_dmattn.backends.cuda.operands import Kernels
from flash_dmattn.backends.mask_choice import follows_order
from flash_dmattn.backends.protocol import Availability
from flash_dmattn.dispatch import packers
from flash_dmattn.dispatch.plan import backward_pass
from flash_dmattn.dispatch.registry import BACKENDS
from flash_dmattn.masks import PreparedMask
from flash_dmattn.masks.prepared import operators as preparation
from flash_dmattn.masks.prepared import packing
from flash_dmattn.operators import describe_operands
from flash_dmattn.problem import AttentionProblem, Band, Flags, MaskView, NeedsGrad, causal_window
from flash_dmattn.problem import inputs as attention

BASE = Case(seqlen_q=150, seqlen_k=264, head_dim=64, num_heads=4, num_heads_k=2, dtype=torch.bfloat16, dlse=True)


def can_copy(x: Tensor) -> bool:
    """Whether TMA can read rows of x."""
    walks = [stride for size, stride in zip(x.shape[:3], x.stride()[:3]) if size > 1 and stride > 0]
    aligned = x.data_ptr() % 16 == 0 and all(stride * x.element_size() % 16 == 0 for stride in walks)
    return aligned and x.stride(3) == 1


def operands(case: Case, x: Inputs, mask: MaskView, bias: Tensor | None) -> tuple[attention.Inputs, AttentionProblem]:
    tensors = attention.Inputs(x.q, x.k, x.v, mask, bias, x.sink)
    needs_grad = NeedsGrad(*(name in case.needs_grad and (name != "bias" or bias is not None) for name in NAMES))
    needs_grad = needs_grad._replace(sink=x.sink is not None and "sink" in case.needs_grad)
    window = causal_window(case.is_causal, case.window_size or (-1, -1))
    return tensors, describe_operands(tensors, Flags(*window, 0.125, 0.0, False), needs_grad)


PER_KEY, PER_QUERY, PER_SCORE = ("1", "Hk", "1", "Lk"), ("B", "Hk", "Lq", "1"), ("B", "Hq", "Lq", "Lk")
EVERY_NEED = (*((name,) for name in NAMES), ("sink",), ("k", "bias"), (*ALL, "sink"))


@pytest.mark.parametrize("needs_grad", EVERY_NEED, ids="-".join)
@pytest.mark.parametrize("bias", (None, PER_KEY, PER_QUERY, PER_SCORE), ids=("none", "per key", "per query", "scores"))
def test_kernels_are_asked_for_what_is_needed_alone(
    bias: tuple[str, ...] | None, needs_grad: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """delta gives dsink and dbias of one value per query: if only these are needed, no other kernel, and no mask."""
    case = BASE.with_(bias=bias, sink="normal", mask=("1", "Hk", "Lq", "Lk"), needs_grad=needs_grad)
    inputs = case.build("cpu")
    assert inputs.mask is not None
    calls: list[tuple[Any, ...]] = []
    kernels = Kernels(None, lambda *arguments: calls.append(arguments), None, None)  # type: ignore[arg-type]
    monkeypatch.setattr(passes, "kernels", lambda: kernels)
    mask = PreparedMask.from_mask(inputs.mask).view
    tensors, problem = operands(case, inputs, mask, inputs.bias)
    out, lse = torch.zeros_like(inputs.dout), torch.zeros(case.batch, case.num_heads, case.seqlen_q)
    backward_pass(BACKENDS["cuda"], problem)(attention.Saved(tensors, out, lse), inputs.dout, inputs.dlse)
    takes_delta = "sink" in needs_grad or ("bias" in needs_grad and bias == PER_QUERY)
    kernel_bias = bias if "bias" in needs_grad and bias != PER_QUERY else None
    if not (takes_delta or kernel_bias or {"q", "k", "v"} & {*needs_grad}):
        assert not calls
        return
    ((*_, dq, dk, dv, dbias, sums, delta),) = (call[:16] for call in calls)
    assert [x is not None for x in (dq, dk, dv)] == [name in needs_grad for name in "qkv"]
    assert (dbias is not None, sums is not None, delta is not None) == (
        kernel_bias == PER_SCORE,
        kernel_bias == PER_KEY,
        takes_delta,
    )
    assert bool(calls[0][5]) == (kernel_bias is not None or bool({"q", "k", "v"} & {*needs_grad}))


@pytest.mark.parametrize("start", (1, 4, 8))
@pytest.mark.parametrize("seqlen_k", (264, 263))
def test_a_bias_that_starts_between_16_bytes_is_copied(start: int, seqlen_k: int) -> None:
    frame = torch.full((1, 4, 150, 272), torch.nan, dtype=BASE.dtype)
    shared = offset(frame, start)[..., :seqlen_k].copy_(torch.randn(1, 4, 150, seqlen_k))
    expanded = shared.expand(2, -1, -1, -1)
    copy = readers.readable(expanded)
    assert can_copy(copy) and copy.stride(0) == 0 and torch.equal(copy, expanded)
    assert (copy.data_ptr() == shared.data_ptr()) == (start == 8)


@pytest.mark.parametrize(("seqlen_k", "looks_at_strides"), ((264, False), (263, True)))
def test_a_class_whose_strides_fit_looks_at_addresses_alone(seqlen_k: int, looks_at_strides: bool) -> None:
    q, k = torch.randn(2, 150, 4, 64, dtype=BASE.dtype), torch.randn(2, seqlen_k, 4, 64, dtype=BASE.dtype)
    bias = torch.randn(2, 4, 150, seqlen_k, dtype=BASE.dtype)
    problem = describe_operands(attention.Inputs(q, k, k, bias=bias), Flags(-1, -1, 0.1, 0.0, False))
    assert (readers.bias_reader(problem) is readers.readable) == looks_at_strides


@pytest.mark.parametrize("seqlen_k", (49, 264))
@pytest.mark.parametrize("heads", ("1", "Hk"))
def test_a_bias_takes_delta_that_start_anywhere_is_copied_where_it_is_small(heads: str, seqlen_k: int) -> None:
    """TMA reads rows that start on 16 bytes, and nothing else of the memory round the bias."""
    case = BASE.with_(batch=8, seqlen_k=seqlen_k, bias=("1", heads, "Lq", "Lk"))
    inputs = case.build("cpu")
    assert inputs.bias is not None
    frame = torch.full((*inputs.bias.shape[:3], seqlen_k | 1), torch.nan, dtype=case.dtype)
    shared = frame[..., :seqlen_k].copy_(inputs.bias)

    def read_bias(bias: Tensor, q: Tensor, v: Tensor) -> Tensor:
        flags = Flags(-1, -1, 0.125, 0.0, False)
        ready = readers.forward_bias(describe_operands(attention.Inputs(q, v, v, bias=bias), flags))
        return bias if ready is None else ready(bias)

    for bias in (shared, shared.expand(8, -1, -1, -1), inputs.bias.mT.contiguous().mT):
        read = read_bias(bias, inputs.q, inputs.v)
        assert can_copy(read) and torch.equal(read, bias) and (read.shape[0] == 1 or read.stride(0) == 0)
    # It is not copied for few entries of few columns, if nothing shares it, or if q has another dtype.
    assert read_bias(shared, inputs.q[:2, ..., :8], inputs.v[:2, ..., :8]) is shared
    assert read_bias(shared, inputs.q[:1], inputs.v[:1]) is shared
    assert read_bias(shared, inputs.q.half(), inputs.v.half()) is shared


def test_an_order_of_few_places() -> None:
    """Kernels see as many keys as there are places; other keys get zeros."""
    order = torch.stack([torch.randperm(300)[:128] for _ in range(2)])[None].int()
    dk, dv, sums = torch.full((2, 300, 2, 8), torch.nan), None, torch.zeros(2, 4, 300)
    places = passes._Reordered(order, dk, dv, sums)
    own, by_place, none, by_head = places.results
    assert none is None and own is not None and by_place is not None and by_head is not None
    assert torch.equal(own, torch.arange(128, dtype=torch.int32).expand_as(order))
    by_place.normal_()
    by_head.normal_()
    wanted = torch.zeros_like(dk), torch.zeros_like(sums)
    for head in range(4):
        keys = order[0, head // 2].long()
        wanted[0][:, keys, head // 2] = by_place[:, :, head // 2]
        wanted[1][:, head, keys] = by_head[:, head]
    places.move()
    assert torch.equal(dk, wanted[0]) and torch.equal(sums, wanted[1])


def test_which_calls_follow_the_order_of_an_interval_mask() -> None:
    """Not those with a bias, or a gradient of one, per score, nor with a mask for each head of a group."""
    inputs = BASE.build("cpu")

    def follows(mask_heads: int, bias: Tensor | None, needs_grad: tuple[str, ...]) -> bool:
        scores = torch.randn(1, mask_heads, 1, BASE.seqlen_k)
        view = PreparedMask.from_topk(scores, 20, is_causal=True, seqlen_q=BASE.seqlen_q, reorder=True).view
        return follows_order(operands(BASE.with_(needs_grad=needs_grad), inputs, view, bias)[1], view)

    per_key = torch.randn(2, 4, 1, BASE.seqlen_k)
    expanded = per_key.expand(-1, -1, BASE.seqlen_q, -1)
    without = ("q", "k", "v")
    assert [follows(heads, None, ALL) for heads in (1, 2, 4)] == [True, True, False]
    assert follows(1, per_key, ALL) and follows(1, torch.randn(2, 4, BASE.seqlen_q, 1), ALL)
    assert follows(1, expanded, without) and not follows(1, expanded, ALL)
    assert not follows(1, expanded.contiguous(), without)


# Who packs a mask


@pytest.mark.parametrize(
    ("is_cuda", "arch", "disabled", "usable", "packs"),
    (
        (True, "sm_90", (), True, True),
        (True, "sm_90", ("triton",), True, True),
        (True, "sm_90", ("cuda",), True, False),
        (True, "sm_90", (), False, False),
        (True, "sm_80", (), True, False),
        (True, "gfx942", (), True, False),
        (False, "cpu", (), True, False),
    ),
)
def test_the_extension_packs_where_it_works(
    is_cuda: bool,
    arch: str,
    disabled: tuple[str, ...],
    usable: bool,
    packs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packers, "device_arch", lambda device: arch)
    monkeypatch.setattr(packers, "disabled", lambda: disabled)
    with replaced("cuda", probe=lambda: Availability(usable)):
        assert packers.packs_by_extension(SimpleNamespace(is_cuda=is_cuda, device="cuda:0")) == packs


@pytest.mark.parametrize("shape", ((2, 1, 150, 300), (1, 2, 150, 1)), ids=str)
@pytest.mark.parametrize("is_causal", (False, True))
def test_its_operator_receives_the_whole_mask_and_the_band(
    shape: tuple[int, ...], is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = torch.rand(shape) < 0.4
    wanted = preparation._prepare_mask(mask, 150, 300, -1, 0 if is_causal else -1, "tiles", False)

    def pack(dense: Tensor, low: int, high: int, has_band: bool) -> list[Tensor]:
        assert dense.shape == (*shape[:2], 150, 300)
        bits, classes = packing.pack_mask(dense, Band(low, high) if has_band else None)
        return [bits, classes, *packing.list_tiles(classes)]

    monkeypatch.setattr(packers, "packs_by_extension", lambda tensor: True)
    names = ("pack_mask", "key_mask", "listed_tiles", "interval_tiles", "topk_intervals", "key_order")
    extension = SimpleNamespace(**{f"cuda_{name}": SimpleNamespace(default=pack) for name in names})
    monkeypatch.setattr(packers, "_extension_packer", lambda: packers.around_extension(extension))
    actual = preparation._prepare_mask(mask, 150, 300, -1, 0 if is_causal else -1, "tiles", False)
    assert all(torch.equal(x, y) for x, y in zip(actual, wanted, strict=True))
