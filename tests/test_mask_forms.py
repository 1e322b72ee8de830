"""Prepared masks in a call: what the dense mask gives, on every backend; packed once; errors; explain."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from accuracy import assert_accurate, run
from conftest import refusal_of
from dispatched import Dispatched
from draws import INTERVAL_SIZES, draw_intervals
from flex_fixture import eager_flex
from out_of_tree import KernelPair, registered, replaced
from torch import Tensor

import flash_dmattn
from flash_dmattn import masks
from flash_dmattn.backends.mask_choice import prepared_form
from flash_dmattn.dispatch import selection
from flash_dmattn.explanation import explain_description, explain_problem
from flash_dmattn.masks import PreparedMask
from flash_dmattn.problem import MaskChoice

# Operators are defined once per process.
PREPARED = KernelPair("reads_prepared_masks", mask_forms=frozenset({"tiles", "intervals"}))
DENSE = KernelPair("reads_dense_masks")
B, LQ, LK, HQ, HK, D = 2, 140, 150, 4, 2, 8
Leaves = list[Tensor]


def leaves(dtype: torch.dtype = torch.float64, seqlen_q: int = LQ) -> Leaves:
    torch.manual_seed(0)
    shapes = (B, seqlen_q, HQ, D), (B, LK, HK, D), (B, LK, HK, D), (1, HK, 1, LK)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def random_mask(*shape: int) -> Tensor:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4
    mask[..., ::3, : shape[-1] // 2] = False
    return mask


def results(inputs: Leaves, mask: Tensor | PreparedMask | None, **flags: Any) -> list[Tensor]:
    """out, lse and the four gradients."""
    q, k, v, bias = inputs
    out, lse = flash_dmattn.attention(q, k, v, mask, bias, return_lse=True, **flags)
    total = out.sin().sum() + lse.masked_fill(lse == -torch.inf, 0.0).cos().sum()
    return [out, lse, *torch.autograd.grad(total, inputs)]


def assert_same(actual: list[Tensor], expected: list[Tensor], rtol: float = 1e-9, atol: float = 1e-11) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


FORMS = {
    "full": random_mask(B, HQ, LQ, LK),
    "key-value heads": random_mask(1, HK, LQ, LK),
    "queries and keys": random_mask(LQ, LK),
    "one key for all": random_mask(B, 1, LQ, 1),
    "expanded heads": random_mask(B, 1, LQ, LK).expand(-1, HQ, -1, -1),
    "per key": random_mask(B, 1, 1, LK),
    "per key and head": random_mask(B, HQ, 1, LK),
    "expanded queries": random_mask(1, HK, 1, LK).expand(B, -1, LQ, -1),
    "one for all": torch.ones(1, 1, dtype=torch.bool),
    "none allowed": torch.zeros(1, HQ, LQ, LK, dtype=torch.bool),
}


@pytest.fixture(autouse=True)
def as_in_a_new_process(untouched_settings: None) -> Iterator[None]:
    """Register PREPARED and DENSE, as if they had never run."""
    for ours in (PREPARED, DENSE):
        ours.count, ours.received = Counter(), []
    with registered(PREPARED, DENSE):
        yield


BANDS: list[dict[str, Any]] = [{}, {"is_causal": True}, {"window_size": (20, 3)}, {"window_size": (2**40, 0)}]
BACKENDS = (
    "eager",
    "reference",
    PREPARED.backend.name,
    (PREPARED.backend.name, "eager"),
    ("eager", PREPARED.backend.name),
)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_prepared_mask_gives_what_the_dense_mask_gives(form: str, band: dict[str, Any], backend: Any) -> None:
    prepared = PreparedMask.from_mask(FORMS[form], seqlen_q=LQ, seqlen_k=LK, **band)
    expected = results(leaves(), FORMS[form], backend="reference", **band)
    assert_same(results(leaves(), prepared, backend=backend), expected)
    assert_same(results(leaves(), prepared, backend=backend, **band), expected)


@pytest.mark.parametrize("backend", (*BACKENDS[1:], "flex"), ids=str)
@pytest.mark.parametrize("number", range(8))
def test_interval_masks_give_what_the_dense_mask_gives(number: int, backend: Any) -> None:
    drawn, mask = draw_intervals(number, INTERVAL_SIZES["interpreter"])
    case = drawn.case.with_(sink=None, needs_grad=tuple(name for name in drawn.case.needs_grad if name != "sink"))
    inputs = case.build("cpu")
    attention = partial(flash_dmattn.attention, return_lse=True, backend=backend)
    with eager_flex() if backend == "flex" else nullcontext():
        actual = run(attention, case, replace(inputs, mask=mask))
    assert_accurate(actual, case, replace(inputs, mask=mask.unpacked()))


TOPK = torch.randn(1, HK, 1, LK, generator=torch.Generator().manual_seed(2))


def test_a_graph_of_any_length_makes_an_interval_mask() -> None:
    """Whether an order pays is decided by sizes, which are symbols here."""
    torch._dynamo.reset()

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        mask = PreparedMask.from_topk(bias, 20, is_causal=True, mask=bias > -1)
        return flash_dmattn.attention(q, k, v, mask, bias)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (130, 200, 33):
        q, k, v = torch.randn(3, 2, length, 4, 16).unbind()
        arguments = q, k, v, torch.randn(2, 4, 1, length)
        assert_same([compiled(*arguments)], [call(*arguments)], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("mask_heads", "batch", "seqlen_q", "per_score", "gathers", "wanted"),
    [
        (1, 1, 15, False, True, MaskChoice("keys")),
        (1, 1, 15, True, True, MaskChoice("keys")),
        (1, 1, 15, False, False, MaskChoice("intervals")),
        (1, 1, 16, False, True, MaskChoice("intervals")),
        (1, 1, 16, True, True, MaskChoice("tiles")),
        (1, 8, 2047, False, False, MaskChoice("intervals")),
        (1, 8, 2048, False, False, MaskChoice("intervals", True)),
        (2, 8, 2048, False, True, MaskChoice("intervals", True)),
        (4, 8, 2048, False, False, MaskChoice("intervals")),  # heads of a group cannot share a copy of k and v
        (2, 1, 2048, False, True, MaskChoice("keys")),  # few heads, which a gathering kernel serves better
        (2, 1, 2048, False, False, MaskChoice("intervals", True)),
    ],
)
def test_form_of_a_mask_of_one_row(
    mask_heads: int, batch: int, seqlen_q: int, per_score: bool, gathers: bool, wanted: MaskChoice
) -> None:
    bias = (1, 1, seqlen_q, LK) if per_score else None
    sizes = {"q": (batch, seqlen_q, 4, 16), "kv_heads": 2, "seqlen_k": LK}
    problem = explain_problem(**sizes, mask=(1, mask_heads, 1, LK), bias=bias).problem
    assert prepared_form(problem, gathers) == wanted


def test_one_query_and_none() -> None:
    for seqlen_q in (0, 1):
        arguments = leaves(seqlen_q=seqlen_q)
        for prepared, dense in (
            # It is stored as tiles, even with one row.
            (PreparedMask.from_mask_mod(lambda b, h, i, j: i >= i - j, seqlen_q, LK, is_causal=True), None),
            (
                PreparedMask.from_mask(random_mask(B, 1, 1, LK), seqlen_q=seqlen_q, is_causal=True),
                random_mask(B, 1, 1, LK),
            ),
        ):
            expected = results(arguments, dense, is_causal=True, backend="reference")
            for backend in ("eager", PREPARED.backend.name):
                assert_same(results(arguments, prepared, backend=backend), expected)


# The views that backends receive, and how often a mask is packed


@pytest.mark.parametrize(
    ("backend", "form", "prepared", "received"),
    [
        (PREPARED.backend.name, "full", False, ["tiles", "tiles"]),
        (PREPARED.backend.name, "per key", False, ["intervals", "intervals"]),
        (PREPARED.backend.name, "expanded queries", False, ["intervals", "intervals"]),
        (PREPARED.backend.name, "full", True, ["tiles", "tiles"]),
        (PREPARED.backend.name, "per key", True, ["intervals", "intervals"]),
        (PREPARED.backend.name, "top-k", True, ["intervals", "intervals"]),
        ((PREPARED.backend.name, DENSE.backend.name), "top-k", True, ["tiles", "dense"]),
        (DENSE.backend.name, "full", False, ["dense", "dense"]),
        (DENSE.backend.name, "full", True, ["dense", "dense"]),
        ((PREPARED.backend.name, DENSE.backend.name), "full", False, ["tiles", "dense"]),
        ((DENSE.backend.name, PREPARED.backend.name), "full", True, ["tiles", "dense"]),
    ],
)
def test_what_a_forward_and_its_backward_receive(backend: Any, form: str, prepared: bool, received: list[str]) -> None:
    if form == "top-k":
        mask: Any = PreparedMask.from_topk(TOPK, 20, is_causal=True, seqlen_q=LQ, reorder=True)
    else:
        mask = PreparedMask.from_mask(FORMS[form], seqlen_q=LQ) if prepared else FORMS[form]
    passes: list[str] = []  # of the operators of passes, and their backends

    def show(operator: Any, arguments: Any, result: Any) -> None:
        if "attention_" in operator.name():
            passes.append(arguments[-2])

    with Dispatched(show) as seen:
        results(leaves(), mask, backend=backend)
    assert PREPARED.received + DENSE.received == received
    assert tuple(passes) == ((backend, backend) if isinstance(backend, str) else backend)
    packed = ["prepare_mask"] if "dense" not in received and not prepared else []  # once for both passes
    assert seen.names == [*packed, "attention_forward", "attention_backward"]


@pytest.mark.parametrize("needs_grad", (False, True))
def test_a_pass_may_read_a_bool_mask_as_it_is(needs_grad: bool) -> None:
    """A call whose other pass reads tiles packs its mask once, for both."""
    backend = PREPARED.backend.name
    q, k, v, bias = (x.detach().requires_grad_(needs_grad) for x in leaves())
    with replaced(backend, reads_dense=lambda problem, direction: direction == "forward"):
        for mask in (FORMS["full"], None, PreparedMask.from_mask(FORMS["full"])):
            flash_dmattn.attention(q, k, v, mask, bias, backend=backend)
    assert PREPARED.received == ["tiles" if needs_grad else "dense", "none", "tiles"]


def test_backend_of_plain_functions_receives_dense_masks() -> None:
    ours = KernelPair("ours")  # says nothing of the forms it reads
    prepared = PreparedMask.from_mask(FORMS["key-value heads"], is_causal=True)
    with registered(ours):
        actual = results(leaves(), prepared, backend="ours")
    assert ours.ran == ["forward", "backward"]
    assert_same(actual, results(leaves(), FORMS["key-value heads"], is_causal=True, backend="reference"))


@pytest.mark.parametrize("form", FORMS)
def test_unpacked_masks_are_as_the_problem_says(form: str) -> None:
    prepared = PreparedMask.from_mask(FORMS[form], seqlen_q=LQ, seqlen_k=LK, is_causal=True)
    q, k, v, bias = leaves()
    problem = flash_dmattn.explain(q, k, v, prepared, bias).problem
    unpacked = prepared.unpacked()
    assert problem.mask == (tuple(unpacked.shape), unpacked.stride(), torch.bool)
    has_rows = FORMS[form].shape[-2] == LQ and FORMS[form].stride(-2) > 0
    assert problem.mask_form == prepared.form == ("tiles" if has_rows else "intervals")
    assert problem.mask.span() == unpacked.numel()
    assert torch.equal(unpacked & masks.causal_mask(LQ, LK), prepared.dense())


# Errors


def prepared_for(seqlen_q: int = LQ, seqlen_k: int = LK, **band: Any) -> PreparedMask:
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    return PreparedMask.from_mask(mask, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **band)


FITTING = prepared_for()


@pytest.mark.parametrize("function", [flash_dmattn.attention, flash_dmattn.explain])
@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (
            PreparedMask.from_topk(TOPK, 3, is_causal=True),
            "mask was prepared for seqlen_q 150; it needs that of the call",
        ),
        (PreparedMask.from_topk(TOPK[..., 1:], 3, seqlen_q=LQ), "mask was prepared for seqlen_k 149; it needs that of"),
        (prepared_for(seqlen_q=LQ - 1), "mask was prepared for seqlen_q 139; it needs that of the call, 140"),
        (prepared_for(seqlen_k=1), "mask was prepared for seqlen_k 1; it needs that of the call, 150"),
        (PreparedMask.from_mask(torch.ones(1, LK, dtype=torch.bool), seqlen_q=7), "mask was prepared for seqlen_q 7"),
        (PreparedMask.from_mask(random_mask(3, 1, LQ, LK)), "mask has shape (3, 1, 140, 150), read as"),
        (PreparedMask.from_mask(random_mask(1, 3, 1, LK), seqlen_q=LQ), "mask has shape (1, 3, 140, 150), read as"),
        (
            PreparedMask.from_mask(torch.ones(LQ, LK, dtype=torch.bool, device="meta")),
            "mask is on meta; it needs to be on the device of q, cpu",
        ),
    ],
)
def test_mask_of_another_call_is_refused(function: Callable[..., Any], mask: PreparedMask, text: str) -> None:
    q, k, v, bias = leaves()
    good = lambda: flash_dmattn.attention(q, k, v, FITTING, bias)
    assert text in str(refusal_of(lambda: function(q, k, v, mask, bias), good, ValueError))


def test_neither_tensor_nor_prepared_mask() -> None:
    with pytest.raises(TypeError, match=r"mask is a tuple; it needs to be a bool torch.Tensor.*or a prepared mask"):
        flash_dmattn.attention(*leaves()[:3], prepared_for().tensors)


KEYS = PreparedMask.from_mask(torch.ones(1, LK, dtype=torch.bool), seqlen_q=LQ, window_size=(5, 0))


@pytest.mark.parametrize(
    ("mask", "flags", "text"),
    [
        (prepared_for(), {"is_causal": True}, "is_causal is True, but mask was prepared with is_causal=False"),
        (prepared_for(is_causal=True), {"window_size": (4, -1)}, "window_size is (4, -1), but mask was prepared with"),
        (prepared_for(is_causal=True), {"window_size": (-1, 2)}, "window_size is (-1, 2), but"),
        (prepared_for(window_size=(4, 4)), {"window_size": (4, 5)}, "window_size=(4, 4)"),
        (prepared_for(window_size=(4, 4)), {"is_causal": True, "window_size": (4, 4)}, "is_causal is True, but"),
        (KEYS, {"window_size": (6, 0)}, "pass is_causal and window_size to PreparedMask.from_mask"),
    ],
)
def test_other_limits_than_the_mask_has_are_refused(mask: PreparedMask, flags: dict[str, Any], text: str) -> None:
    q, k, v, _ = leaves()
    good = lambda: flash_dmattn.attention(q, k, v, mask)
    assert text in str(refusal_of(lambda: flash_dmattn.attention(q, k, v, mask, **flags), good, ValueError))
    error = refusal_of(lambda: flash_dmattn.attention(q, k, v, mask, is_causal=1), good, TypeError)
    assert "is_causal is 1" in str(error)


@pytest.mark.parametrize(
    ("mask", "flags"),
    [
        (prepared_for(is_causal=True), {"window_size": (-1, 0)}),
        (prepared_for(window_size=(7, 0)), {"is_causal": True}),
        (prepared_for(window_size=(7, 0)), {"is_causal": True, "window_size": (7, 3)}),
        (prepared_for(is_causal=True, window_size=(7, 3)), {"window_size": (7, -1)}),
        (KEYS, {"is_causal": True}),
    ],
)
def test_the_same_limits_in_other_words(mask: PreparedMask, flags: dict[str, Any]) -> None:
    q, k, v, _ = leaves()
    for backend in ("eager", PREPARED.backend.name):
        actual = flash_dmattn.attention(q, k, v, mask, backend=backend, **flags)
        assert_same([actual], [flash_dmattn.attention(q, k, v, mask.dense(), backend="reference")])


# explain


def test_explain_says_prepared_and_what_is_unpacked() -> None:
    q, k, v, bias = leaves()
    prepared = PreparedMask.from_mask(FORMS["full"], is_causal=True)
    explanation = flash_dmattn.explain(q, k, v, prepared, bias)
    assert f", prepared mask ({B}, {HQ}, {LQ}, {LK}), bias " in str(explanation.problem)
    assert ", causal, " in str(explanation.problem)
    notes = {verdict.backend: verdict.notes for verdict in explanation.verdicts}
    unpacks = f"unpacks the prepared mask to a dense bool tensor of {FORMS['full'].numel() / 2**20:.1f} MB"
    for backend in ("reference", DENSE.backend.name):
        assert notes[backend] == (unpacks,)
    assert notes["eager"] == notes[PREPARED.backend.name] == ()
    dense = flash_dmattn.explain(q, k, v, FORMS["full"], bias)
    assert dense.problem.mask_form == "dense" and "prepared mask" not in str(dense)
    assert flash_dmattn.explain(q, k, v).problem.mask_form == "none"
    with flash_dmattn.config(record=(decisions := [])):
        flash_dmattn.attention(q, k, v, prepared, bias)
    assert decisions[0].problem == explanation.problem


@pytest.mark.parametrize("bias", [None, (1, 4, 1, 16384), (1, 16, 16384, 16384)], ids=str)
@pytest.mark.parametrize(("seqlen_q", "unpacked"), [(16384, "1024.0"), (1, "0.1")])
def test_explain_of_an_interval_mask_on_a_gpu(seqlen_q: int, unpacked: str, bias: tuple[int, ...] | None) -> None:
    """A call with an interval mask of key-value heads, as `explain` describes it."""
    if bias is not None:
        bias = (*bias[:2], min(bias[2], seqlen_q), bias[3])
    shape = {"mask": (1, 4, seqlen_q, 16384), "seqlen_k": 16384, "kv_heads": 4, "device": "sm_90", "bias": bias}
    problem = explain_problem((1, seqlen_q, 16, 64), mask_prepared=True, **shape).problem
    verdicts = explain_description(problem._replace(mask_form="intervals"), "auto").verdicts
    notes = {verdict.backend: verdict.notes[:1] for verdict in verdicts if not verdict.reasons}
    assert notes["reference"] == (f"unpacks the prepared mask to a dense bool tensor of {unpacked} MB",)
    assert notes["eager"] == ()
    for backend in {"cuda", "triton"} & notes.keys():
        follows = bias is None or bias[2] == 1
        assert follows == notes[backend][0].startswith("in a mask's order of keys, if it has one, copies k and v")
        assert follows != notes[backend][0].startswith("takes keys in their own order: a bias of one value per query")


@pytest.mark.parametrize("form", ["full", "one key for all", "per key", "per key and head"])
def test_prepared_mask_described_by_its_shape(form: str) -> None:
    q, k, v, _ = (x.detach() for x in leaves())
    arguments = FORMS[form]
    described = explain_problem(
        (B, LQ, HQ, D),
        kv_heads=HK,
        seqlen_k=LK,
        dtype="fp64",
        device="cpu",
        mask=tuple(arguments.shape),
        mask_prepared=True,
        is_causal=True,
    )
    real = flash_dmattn.explain(q, k, v, PreparedMask.from_mask(arguments, seqlen_q=LQ, seqlen_k=LK, is_causal=True))
    assert described.problem == real.problem
    assert str(described) == str(real)


def test_fallback_counts_no_unpacked_mask() -> None:
    def workspace(**flags: Any) -> float:
        with (
            flash_dmattn.config(disabled=("cuda", "triton", "flex")),
            pytest.warns(flash_dmattn.FallbackWarning) as told,
        ):
            shape = {"mask": (1, 1, 4096, 4096), "dtype": "fp64"}
            selection._warned.clear()
            described = explain_problem((1, 4096, 2, 64), device="sm_80", **shape, **flags)
            selection.report_fallback(described.problem)
        return float(re.search(r"up to ([\d.]+) MB", str(told[0].message))[1])

    assert workspace(mask_prepared=True) == workspace()
