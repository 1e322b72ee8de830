"""Calls in fp32 keep the accuracy of fp32 on every backend; and the rule of accuracy sees where one does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from accuracy import Results, assert_accurate, oracle, yardstick
from cases import Case, Inputs
from conftest import Runner
from fp32_cases import CASES, FULL, PLAIN, SHARED, assert_right
from out_of_tree import KernelPair, registered
from torch import Tensor

import flash_dmattn


@pytest.mark.parametrize("name", CASES)
def test_fp32_keeps_its_accuracy(backend: Runner, name: str) -> None:
    case, inputs = CASES[name], CASES[name].build()
    assert_right(backend(case, inputs), case, inputs, backend.name)


# A score of 1000 and a few steps of 1/4, which bfloat16 and float16 round away.
STEPS = PLAIN.with_(head_dim=32, bias=FULL, bias_dtype=torch.float32, dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("shape", (FULL, SHARED, ("B", "1", "1", "Lk")), ids=str)
def test_a_bias_in_fp32_beside_16_bits_keeps_its_digits(
    backend: Runner, shape: tuple[str, ...], dtype: torch.dtype
) -> None:
    case = STEPS.with_(dtype=dtype, bias=shape, batch=2, logits=0.01)
    inputs = case.build()
    assert inputs.bias is not None
    steps = 1000 + torch.randint(0, 8, inputs.bias.shape, generator=torch.Generator().manual_seed(0)) / 4
    inputs = replace(inputs, bias=steps.to(inputs.bias))
    results = backend(case, inputs)
    dbias = results["dbias"]
    assert dbias is not None and dbias.dtype == torch.float32
    assert_accurate(results, case, inputs)
    rounded = replace(inputs, bias=steps.to(dtype).to(inputs.bias))
    with pytest.raises(AssertionError, match="out: error"):
        assert_accurate(oracle_in(case, rounded, like=results), case, inputs)


def oracle_in(case: Case, inputs: Inputs, like: Results) -> Results:
    """The results in fp64, in the dtypes that a call returns."""
    exact = oracle(case, inputs)
    return {name: None if x is None else exact[name].to(x) for name, x in like.items()}  # type: ignore[union-attr]


def in_pieces(x: Tensor, dtype: torch.dtype, number: int) -> Tensor:
    """The sum of so many pieces of a tensor in fp32: what products of these pieces know of it."""
    left, known = x.double(), torch.zeros_like(x, dtype=torch.float64)
    for _ in range(number):
        piece = left.to(dtype).double()
        left, known = left - piece, known + piece
    return known


@pytest.mark.parametrize("name", ("q", "k", "v", "dout"))
def test_the_rule_sees_one_tensor_in_two_pieces(name: str) -> None:
    """Two pieces of bfloat16 have 16 bits, three have all 24; products of three pieces are as good as fp32."""
    case = PLAIN.with_(seqlen_q=130, seqlen_k=140, head_dim=64, bias=SHARED)
    inputs = case.build()
    for number in (2, 3):
        cut = replace(inputs.to(torch.float64), **{name: in_pieces(getattr(inputs, name), torch.bfloat16, number)})
        results = {n: None if x is None else x.float() for n, x in oracle(case, cut).items()}
        if number == 3:
            assert_accurate(results, case, inputs)
        else:
            with pytest.raises(AssertionError, match=": error"):
                assert_accurate(results, case, inputs)


def test_the_rule_sees_one_row_of_small_values() -> None:
    """A row without a share in the norm is wrong by a thousandth."""
    case = CASES["rows 1e-6"]
    inputs = case.build()
    results = yardstick(case, inputs)
    assert_accurate(results, case, inputs)
    dq = results["dq"]
    assert dq is not None
    rows = dq.norm(dim=-1, keepdim=True)
    assert rows.min() < 1e-5 * rows.max()
    with pytest.raises(AssertionError, match="dq: error of a row"):
        assert_accurate({**results, "dq": torch.where(rows == rows.min(), dq * 1.001, dq)}, case, inputs)


@pytest.fixture
def precision() -> Iterator[None]:
    """Torch's setting as it was, after the test."""
    before = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("compiled", (False, True))
@pytest.mark.parametrize("setting", ("ieee", "tf32"))
def test_both_passes_multiply_as_torch_says_at_the_call(setting: str, compiled: bool, precision: None) -> None:
    """Else the backward pass would compute p of other scores than those of lse; 16 bits never ask."""
    planned: list[bool] = []

    def watched(plan: Any) -> Any:
        return lambda problem: planned.append(problem.flags.allows_tf32) or plan(problem)

    ours = KernelPair("ours").backend
    ours = replace(ours, plan_forward=watched(ours.plan_forward), plan_backward=watched(ours.plan_backward))
    call = partial(flash_dmattn.attention, backend="ours")
    with registered(ours):
        attend = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
        for dtype in (torch.float32, torch.float16):
            x = torch.randn(1, 5, 2, 8, dtype=dtype, requires_grad=True)
            planned.clear()
            torch.backends.cuda.matmul.fp32_precision = setting
            out = attend(x, x, x)
            torch.backends.cuda.matmul.fp32_precision = "ieee" if setting == "tf32" else "tf32"
            out.sum().backward()
            assert set(planned) == {setting == "tf32" and dtype == torch.float32} and len(planned) >= 2


def test_a_changed_setting_compiles_anew(precision: None) -> None:
    """Then another backend may lead, too."""
    names = [argument.name for argument in torch.ops.flash_dmattn.attention_forward.default._schema.arguments]
    seen: list[bool] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nodes = [node for node in graph.graph.nodes if "attention_forward" in str(node.target)]
        seen.extend(node.args[names.index("allows_tf32")] for node in nodes)
        return graph

    compiled = torch.compile(partial(flash_dmattn.attention, backend="eager"), backend=keep, fullgraph=True)
    x = torch.randn(1, 5, 2, 8)
    for setting in ("ieee", "tf32", "ieee"):
        torch.backends.cuda.matmul.fp32_precision = setting
        compiled(x, x, x)
    assert seen == [False, True]  # the first graph serves again
