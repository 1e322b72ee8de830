"""The flex backend beyond what all backends share: sums in fp32, its rules, its notes, and where it works."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from accuracy import assert_accurate, run
from cases import Case
from flex_fixture import ROUNDED, ROUNDS_GRADIENTS, eager_flex
from torch.autograd import forward_ad

import flash_dmattn
from flash_dmattn.backends.flex import backend as flex
from flash_dmattn.backends.flex.call import graph_module
from flash_dmattn.problem import AttentionProblem, NeedsGrad, TensorSpec
from flash_dmattn.reference import formula


def problem_of(case: Case) -> AttentionProblem:
    """The description of a case without gradients."""
    x = case.build("cpu")
    return flash_dmattn.explain(x.q, x.k, x.v, x.mask, x.bias, **case.flags()).problem


@pytest.mark.skipif(ROUNDS_GRADIENTS, reason=ROUNDED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dbias_in_16_bits_is_summed_in_fp32(dtype: torch.dtype) -> None:
    """600 rows meet in one number: a sum in 16 bits would have many times the error that the rule allows."""
    case = Case(seqlen_q=300, seqlen_k=40, dtype=dtype, mask=("1", "1", "Lq", "Lk"), bias=("1", "Hk", "1", "Lk"))
    inputs = case.build("cpu")
    with eager_flex():
        results = run(partial(flash_dmattn.attention, return_lse=True, backend="flex"), case, inputs)
    assert_accurate(results, case, inputs)


@pytest.mark.parametrize("shape", [("1", "1", "1", "1"), ("B", "Hk", "Lq", "1")], ids="-".join)
def test_out_does_not_depend_on_a_bias_of_one_number_per_query(shape: tuple[str, ...]) -> None:
    x = Case(bias=shape).build("cpu")
    bias = x.bias.requires_grad_()
    with eager_flex():
        out = flash_dmattn.attention(x.q, x.k, x.v, None, bias, backend="flex")
    (dbias,) = torch.autograd.grad(out.square().sum(), bias)
    assert dbias.shape == bias.shape and not dbias.any()


def test_spans_at_the_limit_are_accepted() -> None:
    limit = TensorSpec((1, 1, 1, (1 << 31) - 1), (0, 0, 0, 1), torch.bool)
    expanded = TensorSpec((64, 64, 1 << 20, 1 << 20), (0, 0, 0, 1), torch.bool)
    for spec in (limit, expanded):
        problem = problem_of(Case())._replace(mask=spec, bias=spec)
        assert all(rule.holds(problem) for rule in flex.RULES)


@pytest.mark.parametrize("without_gradients", (torch.no_grad, torch.inference_mode))
def test_inputs_that_require_gradients_where_none_is_recorded(
    without_gradients: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hint of `cpu_backward` recommends this; FlexAttention itself would refuse such inputs."""
    monkeypatch.setattr(graph_module(), "compiler", "eager")
    x = Case(dtype=torch.float32, bias=("1", "Hk", "1", "Lk")).build("cpu")
    q, k, v, bias = (tensor.requires_grad_() for _, tensor in x.floats())
    with without_gradients():
        out = flash_dmattn.attention(q, k, v, None, bias, backend="flex")
    assert not out.requires_grad
    torch.testing.assert_close(out, formula.attention(q, k, v, None, bias)[0].detach())


def test_notes_list_the_copies() -> None:
    x = Case(bias=("1", "Hk", "1", "Lk"), bias_dtype=torch.bfloat16).build("cpu")
    problem = flash_dmattn.explain(x.q, x.k, x.v, None, x.bias.requires_grad_()).problem
    notes = flex.notes(problem._replace(device="cuda"))
    assert any("copies bias to float32" in note for note in notes) and any("atomics" in note for note in notes)
    assert flex.notes(problem._replace(bias=None, needs_grad=NeedsGrad())) == ()


def test_forward_mode_runs_elsewhere() -> None:
    """FlexAttention would drop the tangent, also of a dual call whose own gradients it could make."""
    q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
    actual, expected = (
        torch.func.jvp(lambda q, k, v, b=backend: flash_dmattn.attention(q, k, v, backend=b), (q, k, v), (k, v, q))
        for backend in ("flex", "reference")
    )
    torch.testing.assert_close(actual, expected)
    q.requires_grad_()
    gradients = []
    for backend in ("flex", "reference"):
        moved = torch.func.jvp(lambda q, b=backend: flash_dmattn.attention(q, k, v, backend=b), (q,), (k,))
        with eager_flex(), forward_ad.dual_level():
            out = flash_dmattn.attention(forward_ad.make_dual(q, k), k, v, backend=backend)
            primal, tangent = forward_ad.unpack_dual(out)
        dq = torch.autograd.grad(primal.square().sum(), q)
        gradients.append((*torch.autograd.grad(moved, q, (v, q)), *dq, tangent))
    torch.testing.assert_close(*gradients)
    assert flash_dmattn.explain(q.detach(), k, v, backend="flex").tangents == "eager"


def test_transforms_are_refused_in_words() -> None:
    q = torch.randn(2, 1, 8, 2, 16)
    with pytest.raises(NotImplementedError, match=r"compiles FlexAttention, and torch.compile does not run inside"):
        torch.vmap(lambda q: flash_dmattn.attention(q, q, q, backend="flex"))(q)


@pytest.mark.parametrize("capability, usable", [("AVX2", True), ("AVX512", True), ("NO AVX", False), ("SVE256", False)])
def test_flex_works_where_its_cpu_kernel_compiles(
    capability: str, usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU without AVX2 has no compiled FlexAttention: the probe says so before Inductor does."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    availability = flex._load()
    assert availability.usable is usable
    assert usable or f"torch serves this CPU as {capability}" in availability.reason


def test_flex_says_what_it_cannot_compile_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiler, and a Python that torch.compile refuses, are told before the first call fails."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "no-such-compiler")
        patch.setattr("sysconfig.get_path", lambda name: "/nowhere")
        lacking = flex._load()
        assert not lacking.usable and "with no-such-compiler and Python.h, which are not here" in lacking.reason
        patch.setattr(torch.cuda, "is_available", lambda: True)
        assert flex._load().usable

    def compile_refuses(**_: object) -> None:
        raise RuntimeError("torch.compile is not supported on Python 3.14+")

    monkeypatch.setattr(torch, "compile", compile_refuses)
    refused = flex._load()
    assert not refused.usable and refused.reason == "torch.compile is not supported on Python 3.14+"


def test_warn_only_determinism_warns_where_a_named_backend_has_no_order() -> None:
    q, bias = torch.randn(1, 8, 2, 16), torch.zeros(1, 2, 8, 8, requires_grad=True)
    with eager_flex():
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            with pytest.warns(UserWarning, match="backend 'flex' adds sums of this call in any order") as caught:
                flash_dmattn.attention(q, q, q, bias=bias, backend="flex").sum().backward()
            assert caught[0].filename == __file__
            explained = flash_dmattn.explain(q, q, q, bias=bias, backend="flex")
            assert explained.error is None and not explained.problem.deterministic
            assert flash_dmattn.explain(q, q, q, bias=bias).problem.deterministic
            with pytest.raises(flash_dmattn.BackendUnsupportedError, match="adds it up with atomics"):
                flash_dmattn.attention(q, q, q, bias=bias, backend="flex", deterministic=True)
            torch.use_deterministic_algorithms(True)
            with pytest.raises(flash_dmattn.BackendUnsupportedError, match="adds it up with atomics"):
                flash_dmattn.attention(q, q, q, bias=bias, backend="flex")
        finally:
            torch.use_deterministic_algorithms(False)
