"""Forward mode: chunks of eager, kernels in the interpreter, the pairs of backends, and what is refused.

`test_derived.py` has every way of torch to ask for tangents, through every form of a call.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tangent_calls
import torch
from cases import DEVICE, Case
from conftest import needs_triton
from dispatched import bytes_made
from draws import Drawn, draw_small
from forked import interpret
from out_of_tree import KernelPair, registered
from test_random import small_chunks
from torch import Tensor

import flash_dmattn
from flash_dmattn.backends.eager import BACKEND as EAGER
from flash_dmattn.dispatch import selection
from flash_dmattn.dispatch.registry import BACKENDS


@pytest.mark.parametrize("first", range(0, 200, 100))
def test_random_calls_in_chunks(first: int) -> None:
    for number in range(first, first + 100):
        call = tangent_calls.dense_call(number, draw_small(number), DEVICE)
        with small_chunks(number):
            tangent_calls.assert_accurate(call.run("eager"), call)


@needs_triton
@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves")
@pytest.mark.parametrize("first", (0, 1000))
def test_random_calls_on_triton(first: int) -> None:
    assert "30 passed, 0 failed" in interpret("run_calls.py", "interpreter", "tangents", str(first), "30")


LOSSES = (("out", "lse", "tout", "tlse"), ("tlse",), ("tout",), ("out", "tlse"), ("lse", "tout"))


def gradients_of_tangents(
    call: tangent_calls.TangentCall, backend: str, of: tuple[str, ...] = LOSSES[0]
) -> list[Tensor]:
    """The gradients of a loss of some of out, lse and their tangents, of all inputs and of their tangents."""
    leaves = {n: x.detach().requires_grad_() for n, x in call.tensors.items()}
    tangents = {n: x.detach().requires_grad_() for n, x in call.tangents.items()}
    results = replace(call, tensors=leaves, tangents=tangents).run(backend)
    is_empty = results["lse"] == -torch.inf
    total = sum(results[n].masked_fill(is_empty, 0.0).sin().sum() for n in of if "lse" in n)
    total = total + sum(results[n].cos().sum() for n in of if "out" in n)
    actual = torch.autograd.grad(total, [*leaves.values(), *tangents.values()], materialize_grads=True)
    return [x.nan_to_num(0.0) for x in actual]  # a sink of -inf has no gradient of its own


@pytest.mark.parametrize("number", range(40))
def test_gradients_of_tangents_in_chunks(number: int) -> None:
    case = draw_small(number).case.with_(dtype=torch.float64, bias_dtype=None, sink_dtype=None, logits=1.0)
    call = tangent_calls.dense_call(number, Drawn(case.with_(bias_kind="normal", data="centred")), "cpu")
    of = LOSSES[number % len(LOSSES)]
    with small_chunks(number):
        actual = gradients_of_tangents(call, "eager", of)
    torch.testing.assert_close(actual, gradients_of_tangents(call, "reference", of), rtol=1e-8, atol=1e-10)


def test_no_matrix_of_scores_exists() -> None:
    """Eager has only chunks in memory, also for the gradients of tangents."""
    q, k, v, t = (torch.randn(1, 512, 1, 4, requires_grad=True) for _ in range(4))
    flash_dmattn.backends.eager.set_chunk_bytes(2**17)

    def run() -> None:
        out, tout = torch.func.jvp(lambda q: flash_dmattn.attention(q, k, v, backend="eager"), (q,), (t,))
        (out.sum() + tout.square().sum()).backward()

    try:
        assert 0 < max(bytes_made(run)) <= 2**17
    finally:
        flash_dmattn.backends.eager.set_chunk_bytes(EAGER_BYTES)


EAGER_BYTES = flash_dmattn.backends.eager.chunked.DEFAULT_CHUNK_BYTES


@pytest.mark.parametrize(
    "backend, head_dim, named",
    [("auto", 64, "triton"), ("cuda", 64, "triton"), ("sdpa", 64, "triton"), ("flex", 64, "triton"),
     ("triton", 256, "triton"), ("triton", 512, "eager"), ("eager", 64, "eager"), ("reference", 64, "reference")],
)  # fmt: skip
def test_explain_names_the_backend_of_tangents(backend: Any, head_dim: int, named: str) -> None:
    q = torch.empty(2, 4096, 8, head_dim, dtype=torch.bfloat16, device="meta")
    explained = flash_dmattn.explain(q, q, q, backend=backend, device="sm_90")
    assert explained.tangents == explained.to_dict()["tangents"] == named
    assert ("in forward mode (torch.func.jvp): " + named in str(explained)) == (named != explained.forward)
    with flash_dmattn.config(disabled=("triton",)):
        if backend != "triton":
            assert flash_dmattn.explain(q, q, q, backend=backend, device="sm_90").tangents != "triton"


def test_a_loss_with_tangents_names_who_differentiates_them() -> None:
    """A backend that only computes tangents is refused by name; auto takes eager for the gradients."""
    x = Case(dtype=torch.float64).build("cpu")
    q = x.q.clone().requires_grad_()

    def total(backend: str) -> Tensor:
        call = lambda q: flash_dmattn.attention(q, x.k, x.v, backend=backend)
        return torch.func.jvp(call, (q,), (x.q,))[1].sin().sum()

    (expected,) = torch.autograd.grad(total("reference"), q)
    ours = KernelPair("ours", plan_tangents=EAGER.plan_tangents)
    with registered(ours, before="sdpa"):
        assert flash_dmattn.explain(q, x.k, x.v).tangents == "ours"
        torch.testing.assert_close(torch.autograd.grad(total("auto"), q)[0], expected)
        with pytest.raises(NotImplementedError, match=r"'ours', which computed the tangents, .*backend=\"eager\""):
            total("ours").backward()
    with registered(KernelPair("alone"), before="sdpa"):
        torch.testing.assert_close(torch.autograd.grad(total("alone"), q)[0], expected)
        problem = flash_dmattn.explain(q, x.k, x.v).problem
        assert selection.select_tangents(problem, BACKENDS["alone"]).name == "eager"


@pytest.mark.parametrize("needs_grad", [False, True])
def test_compiled_calls(needs_grad: bool) -> None:
    """Under no_grad it is one graph; else torch does not trace the call, and runs it as it is."""
    torch._dynamo.reset()
    q, k, v, t = (torch.randn(1, 8, 2, 16, dtype=torch.float64, requires_grad=needs_grad) for _ in range(4))

    def moved(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        call = lambda q, v: flash_dmattn.attention(q, k, v, is_causal=True, backend="eager")
        return torch.func.jvp(call, (q, v), (t, v))

    compiled = torch.compile(moved, backend="aot_eager", fullgraph=not needs_grad)
    with torch.set_grad_enabled(needs_grad):
        actual = [compiled(q, k, v, t), moved(q, k, v, t)]
    torch.testing.assert_close(*actual)
    if needs_grad:
        gradients = [torch.autograd.grad((out * tout.detach()).sum(), (q, k, v)) for out, tout in actual]
        torch.testing.assert_close(*gradients)
