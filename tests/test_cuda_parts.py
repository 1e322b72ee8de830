"""Masks and biases that a part of the batch shares, on cuda: part by part. On a GPU or the emulated one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from accuracy import error
from cases import DEVICE, Case
from conftest import Runner
from leading_calls import LeadingCall, assert_accurate, over_batches, results

import flash_dmattn
from flash_dmattn import masks
from flash_dmattn.backends.cuda import passes
from flash_dmattn.reference import formula
from flash_dmattn.reference.yardstick import FLOOR, RATIO

pytestmark = pytest.mark.parametrize("backend", ("cuda",), indirect=True)

BATCH = (2, 3)
SHARING = ((2, 1), (1, 3), (1, 1), (2, 3))
MASKS = ((1, 40, 72), (4, 40, 72), (2, 1, 72))  # behind the leading dims
BIASES = ((1, 40, 72), (4, 40, 72), (4, 1, 72), (2, 40, 1))
CALL = LeadingCall(BATCH, seqlen_q=40, seqlen_k=72, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def where_it_runs(backend: Runner) -> None:
    """Skip where the backend does not work, or refuses plain calls."""
    case = Case(seqlen_q=40, seqlen_k=72, dtype=torch.bfloat16)
    refusal = backend.refusal(case, case.build())
    if refusal is not None:
        pytest.skip(refusal)


def attention(q: Any, k: Any, v: Any, mask: Any, bias: Any, **flags: Any) -> Any:
    return flash_dmattn.attention(q, k, v, mask, bias, return_lse=True, backend="cuda", **flags)


def built(call: LeadingCall) -> dict[str, Any]:
    return {name: None if x is None else x.to(DEVICE) for name, x in call.build().items()}


def assert_accurate_but_for_dbias(call: LeadingCall, inputs: dict[str, Any]) -> None:
    """out, lse, dq, dk and dv with a bias without a gradient."""
    fixed = {**inputs, "bias": None}

    def beside_bias(function: Callable[..., Any], dtype: torch.dtype) -> list[Any]:
        there = {n: x.to(dtype) if x is not None and x.is_floating_point() else x for n, x in fixed.items()}
        bias = inputs["bias"].to(dtype)
        return results(lambda q, k, v, mask, _, **flags: function(q, k, v, mask, bias, **flags), call, there)

    exact, near = (beside_bias(over_batches(formula.attention), dtype) for dtype in (torch.float64, call.dtype))
    for x, right, plain in zip(beside_bias(attention, call.dtype), exact, near, strict=True):
        assert x is None or error(x, right) <= RATIO * error(plain, right) + FLOOR


@pytest.mark.parametrize("bias_dims", SHARING, ids=str)
@pytest.mark.parametrize("mask_dims", SHARING, ids=str)
def test_every_sharing(backend: Runner, mask_dims: tuple[int, ...], bias_dims: tuple[int, ...]) -> None:
    """Where several parts share an entry of the bias its gradient is refused, and all else is right."""
    is_cut = mask_dims in ((2, 1), (1, 3))
    is_refused = bias_dims == (1, 3) or (bias_dims == (1, 1) and is_cut)
    for number, (mask, bias) in enumerate(itertools.product(MASKS, BIASES)):
        call = replace(CALL, mask=(*mask_dims, *mask), bias=(*bias_dims, *bias), seed=number)
        inputs = built(call)
        if not is_refused:
            assert_accurate(results(attention, call, inputs), call, inputs)
            continue
        assert_accurate_but_for_dbias(call, inputs)
        with pytest.raises(flash_dmattn.BackendUnsupportedError, match="and several parts of the batch share it"):
            results(attention, call, inputs)


@pytest.mark.parametrize("batch", ((2, 2, 3), (5, 1, 2)), ids=str)
def test_more_leading_dims_and_no_other_tensor(backend: Runner, batch: tuple[int, ...]) -> None:
    for mask, bias in (((*batch[:2], 1), None), (None, (batch[0], 1, 1)), ((*batch[:2], 1), (batch[0], 1, 1))):
        call = replace(
            CALL,
            batch=batch,
            mask=None if mask is None else (*mask, 1, 1, 72),
            bias=None if bias is None else (*bias, 4, 40, 72),
            is_causal=True,
        )
        inputs = built(call)
        if bias is None:
            assert_accurate(results(attention, call, inputs), call, inputs)
        else:
            assert_accurate_but_for_dbias(call, inputs)


def test_prepared_masks(backend: Runner) -> None:
    """Tiles and intervals have entries as a bool mask has."""
    for shape in ((2, 1, 1, 40, 72), (2, 1, 1, 1, 72)):
        call = replace(CALL, mask=shape, bias=(2, 3, 4, 40, 72))
        inputs = built(call)
        mask = masks.PreparedMask.from_mask(inputs["mask"], seqlen_q=40, seqlen_k=72)
        assert_accurate(results(attention, call, inputs, mask), call, inputs)


def test_each_part_is_a_call_of_its_entries(backend: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each example of a pair representation is a part: there are as many as examples, not as many as rows."""
    call = replace(CALL, batch=(2, 5), mask=(2, 5, 1, 1, 72), bias=(2, 1, 4, 40, 72))
    inputs, seen = built(call), []
    kernels = passes.kernels()
    attend = lambda q, *rest: (seen.append(q.shape[0]), kernels.attend(q, *rest))[1]
    monkeypatch.setattr(passes, "kernels", lambda: kernels._replace(attend=attend))
    assert_accurate(results(attention, call, inputs), call, inputs)
    assert seen == [5, 5]
    tensors = (inputs["q"], inputs["k"], inputs["v"], inputs["mask"], inputs["bias"])
    verdict = next(v for v in flash_dmattn.explain(*tensors, backend="cuda").verdicts if v.backend == "cuda")
    assert "computes the batch in 2 parts, one after the other: a part of it shares bias" in verdict.notes


def test_refused(backend: Runner) -> None:
    inputs = built(replace(CALL, bias=(2, 1, 4, 40, 72)))
    sink = torch.zeros(4, device=DEVICE, requires_grad=True)
    message = "this backend takes 1 or all where the gradient of a sink is needed, a sum over the batch"
    with pytest.raises(flash_dmattn.BackendUnsupportedError, match=message):
        attention(inputs["q"], inputs["k"], inputs["v"], None, inputs["bias"], sink=sink)


def test_parts_drop_what_one_call_drops(backend: Runner) -> None:
    random = torch.Generator().manual_seed(0)
    shapes = ((*BATCH, 40, 4, 64), (*BATCH, 72, 2, 64), (*BATCH, 72, 2, 64), (2, 1, 4, 40, 72))
    *leaves, bias = (torch.randn(shape, generator=random).to(DEVICE, torch.bfloat16) for shape in shapes)
    made, leaves = [], [x.requires_grad_() for x in leaves]
    for each in (bias, bias.expand(*BATCH, -1, -1, -1).contiguous()):
        torch.manual_seed(1)
        out, _ = attention(*leaves, None, each, dropout_p=0.4, deterministic=True)
        made.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    assert all(torch.equal(x, y) for x, y in zip(*made, strict=True))


def test_repeats_and_a_fixed_order(backend: Runner) -> None:
    call = replace(CALL, bias=(2, 1, 4, 40, 72), mask=(2, 3, 1, 1, 72))
    inputs = built(call)
    runs = [results(lambda *t, **f: attention(*t, deterministic=True, **f), call, inputs) for _ in range(2)]
    assert_accurate(runs[0], call, inputs)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
