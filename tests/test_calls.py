"""Every backend against the formula in fp64, on a table of calls: each form, flag, length and subset of gradients.

Random calls (test_random.py) combine these. Here a failure has a name, and each backend meets each call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from accuracy import GRADIENTS, assert_accurate, run
from cases import ALL, DEVICE, Case, Inputs
from conftest import BACKENDS, Runner
from draws import BF16, FORMS, FP16, FP32, FP64

import flash_dmattn
from flash_dmattn.masks import PreparedMask

FULL, ROWS, KEYS = ("B", "Hq", "Lq", "Lk"), ("1", "Hk", "Lq", "1"), ("B", "1", "1", "Lk")
SHARED = ("1", "Hq", "Lq", "Lk")
KINDS = ("random", "empty_rows", "empty_tiles", "none_allowed", "all_allowed")
MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "full": {"mask": FULL},
    "per key": {"mask": KEYS, "is_causal": True},
    "empty rows": {"mask": ("1", "Hk", "Lq", "Lk"), "mask_kind": "empty_rows"},
    "empty tiles": {"mask": ("B", "Hk", "Lq", "Lk"), "mask_kind": "empty_tiles"},
    "none allowed": {"mask": ("1", "1", "Lq", "Lk"), "mask_kind": "none_allowed"},
}
LENGTHS = ((9, 9), (5, 21), (21, 5), (1, 13), (13, 1))
WINDOWS = ((-1, -1), (0, 0), (3, -1), (-1, 2), (4, 1), (100, 100), (0, 5), (2**40, 0), (1, 2**31 - 1), (2**31 - 1, 3))
HEAD_DIMS = ((8, 8), (24, 24), (64, 64), (96, 96), (128, 64), (192, 128), (16, 40), (512, 512), (320, 64), (64, 320))
DTYPES = (FP32, BF16, FP16) + ((FP64,) if DEVICE == "cpu" else ())


def forms() -> Iterator[tuple[str, Case]]:
    """Each form of a mask and of a bias, and its gradient with two kinds of masks and a gradient of lse."""
    kinds, masks = itertools.cycle(KINDS), itertools.cycle(MASKS)
    for form in FORMS:
        name = "-".join(form)
        kind = next(kinds)
        yield f"mask {name}, {kind}", Case(mask=form, mask_kind=kind, needs_grad=())
        yield f"bias {name}", Case(bias=form, needs_grad=())
        for mask in (next(masks), next(masks)):
            yield f"dbias {name}, mask {mask}", Case(bias=form, **MASKS[mask])
        yield f"dbias {name}, dlse", Case(bias=form, dlse=True, mask=("B", "1", "Lq", "Lk"), mask_kind="empty_rows")
    for letters in (("Lq", "Lk"), ("1", "Lk"), ("Lq", "1"), ("Hk", "Lq", "Lk"), ("Hq", "1", "Lk")):
        yield f"fewer dims {'-'.join(letters)}", Case(mask=letters, bias=letters, needs_grad=())
    for heads in ((4, 4), (8, 2), (6, 1), (12, 4)):
        for name in ("none", "causal", "empty tiles"):
            yield (
                f"heads {heads}, {name}",
                Case(num_heads=heads[0], num_heads_k=heads[1], bias=("B", "Hk", "Lq", "Lk"), **MASKS[name]),
            )


def flags() -> Iterator[tuple[str, Case]]:
    """Each flag and each subset of gradients."""
    for window, (seqlen_q, seqlen_k) in itertools.product(WINDOWS, LENGTHS):
        sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "window_size": window}
        yield f"window {window} of {seqlen_q} x {seqlen_k}", Case(**sizes, bias=("1", "1", "Lq", "Lk"))
        yield f"causal window {window} of {seqlen_q} x {seqlen_k}", Case(**sizes, is_causal=True, needs_grad=())
    for softcap, bias in itertools.product((0.5, 30.0), (None, SHARED)):
        yield f"softcap {softcap}, {bias}", Case(softcap=softcap, bias=bias, logits=5.0, is_causal=True, dlse=True)
    for scale in (0.0, 1.0, 0.3, -0.3, 0.01):
        yield f"scale {scale}", Case(softmax_scale=scale, bias=("B", "1", "Lq", "Lk"))
    for needs, dlse in itertools.product(
        (s for n in range(1, 5) for s in itertools.combinations(ALL, n)), (True, False)
    ):
        case = Case(needs_grad=needs, dlse=dlse, bias=("1", "Hk", "1", "Lk"), mask=FULL, is_causal=True)
        yield f"{'-'.join(needs)}, dlse {dlse}", case


def numbers() -> Iterator[tuple[str, Case]]:
    """Head dims, dtypes, and values that are large or infinite."""
    for dims in HEAD_DIMS:
        yield (
            f"head dims {dims}",
            Case(head_dim=dims[0], head_dim_v=dims[1], bias=("B", "Hq", "1", "Lk"), is_causal=True),
        )
    shapes = itertools.cycle((("1", "Hk", "1", "Lk"), FULL, ("1", "Hk", "Lq", "Lk"), ("B", "Hq", "Lq", "1"), FULL))
    for dtype, bias_dtype in itertools.product(DTYPES, (FP64, FP32, BF16, FP16)):
        case = Case(dtype=dtype, bias_dtype=bias_dtype, mask=("B", "1", "Lq", "Lk"), seqlen_k=40, dlse=True)
        yield f"{dtype}, bias {bias_dtype}", case.with_(bias=next(shapes))
        yield f"{dtype}, bias {bias_dtype}, causal", case.with_(bias=next(shapes), is_causal=True, needs_grad=())
    for kind, mask in itertools.product(("inf", "min", "huge"), (None, ("B", "Hk", "Lq", "Lk"))):
        case = Case(bias=SHARED, bias_kind=kind, mask=mask, dlse=True)
        yield f"bias {kind}, mask {mask}", case
        # 1e4 times a normal value is beyond float16
        for dtype in (FP32, BF16) if kind == "huge" else (FP32, BF16, FP16):
            yield f"bias {kind}, {dtype}, mask {mask}", case.with_(bias_dtype=dtype, needs_grad=(), dlse=False)
    yield "rows of -inf", Case(bias=("B", "Hq", "Lq", "1"), bias_kind="inf", dlse=True)
    for logits, seqlen_k in itertools.product((1e2, 1e3, 1e4), (31, 64, 65)):
        case = Case(logits=logits, seqlen_k=seqlen_k, bias=FULL, needs_grad=())
        if case.dtype == FP16:
            case = case.with_(logits=min(logits, 2e3))  # plain PyTorch's products are float16, and 1e4 overflows
        yield f"logits {logits} of {seqlen_k} keys", case


def lengths() -> Iterator[tuple[str, Case]]:
    """Lengths around the edges of tiles, and sizes of 0."""
    for seqlen_q, seqlen_k, is_causal in itertools.product((1, 2, 63, 65), (1, 2, 63, 65), (False, True)):
        case = Case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, is_causal=is_causal, bias=("1", "Hk", "1", "Lk"), dlse=True)
        yield f"{seqlen_q} x {seqlen_k}, causal {is_causal}", case
    for size, is_causal in itertools.product(("batch", "seqlen_q", "seqlen_k"), (False, True)):
        for mask, bias in ((None, None), (FULL, FULL), (("1", "1", "1", "Lk"), ("1", "Hq", "Lq", "1"))):
            yield (
                f"no {size}, causal {is_causal}, {mask}",
                Case(is_causal=is_causal, mask=mask, bias=bias, dlse=True, **{size: 0}),
            )


CALLS = dict(itertools.chain(forms(), flags(), numbers(), lengths()))


def check(backend: Runner, case: Case, inputs: Inputs | None = None, call: Inputs | None = None) -> None:
    """Compare with fp64; where nothing is allowed, results are exactly 0. `call`: the tensors in another form."""
    results = backend.check(case, inputs, call)
    empty = (results["lse"] == -torch.inf).transpose(1, 2)
    for name in ("out", "dq"):
        assert results[name] is None or not results[name][empty].any(), name
    if empty.all():
        assert not any(results[name] is not None and results[name].any() for name in GRADIENTS)


# Flex traces each of them for seconds: a third has each form, with one gradient or another.
TAKEN = [(backend, name) for backend in BACKENDS for i, name in enumerate(CALLS) if backend != "flex" or i % 3 == 0]


@pytest.mark.parametrize(("backend", "name"), TAKEN, indirect=["backend"])
def test_call(backend: Runner, name: str) -> None:
    check(backend, CALLS[name])


@pytest.mark.parametrize("name", CALLS)
def test_the_reference_computes_the_formula(name: str) -> None:
    case = CALLS[name]
    inputs = case.build("cpu")
    results = run(partial(flash_dmattn.attention, return_lse=True, backend="reference"), case, inputs)
    assert_accurate(results, case, inputs)


# Everything that a call may have, two by two.
IN_INFERENCE = {
    "causal": Case(is_causal=True, softcap=2.0),
    "window": Case(window_size=(3, 1), bias=ROWS),
    "mask": Case(mask=FULL, mask_kind="empty_rows", bias=KEYS),
    "mask of one row": Case(mask=KEYS, bias=FULL),
    "bias in other bits": Case(bias=SHARED, bias_dtype=BF16, softmax_scale=-0.3),
    "one query": Case(seqlen_q=1, num_heads=6, mask=("B", "Hk", "1", "Lk"), bias=KEYS),
    "sink": Case(sink="normal", mask=FULL, is_causal=True),
    "dropout": Case(dropout_p=0.4, bias=FULL),
    "16 bits": Case(dtype=BF16, mask=("B", "1", "Lq", "Lk"), bias=ROWS),
}


@pytest.mark.parametrize(
    ("backend", "name", "prepares"),
    [
        (backend, name, prepares)
        for backend in BACKENDS
        for name, case in IN_INFERENCE.items()
        for prepares in {False, case.mask is not None}
        if backend != "flex" or name in ("window", "mask")  # flex traces a call anew inside and outside
    ],
    indirect=["backend"],
)
def test_inference_mode(backend: Runner, name: str, prepares: bool) -> None:
    """Tensors and prepared masks that are made inside and outside give the same bits; training goes on."""
    case = IN_INFERENCE[name]

    def made() -> Inputs:
        inputs, lengths = case.build(), {"seqlen_q": case.seqlen_q, "seqlen_k": case.seqlen_k}
        if not prepares:
            return inputs
        return replace(inputs, mask=PreparedMask.from_mask(inputs.mask, is_causal=case.is_causal, **lengths))

    outside, forward = made(), case.with_(needs_grad=())
    wanted = backend(forward, outside)
    with torch.inference_mode():
        inside = made()
        results = [backend(forward, inputs) for inputs in (inside, outside, inside)]
    for each in (*results, backend(forward, inside)):
        assert torch.equal(each["out"], wanted["out"]) and torch.equal(each["lse"], wanted["lse"])
    assert_accurate(wanted, forward, case.build())
    if backend.refusal(case, outside) is None:
        assert_accurate(backend(case, outside), case, case.build())
