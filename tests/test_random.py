"""Seeded random configurations of every backend against fp64; a failure prints the one line that rebuilds it.

Two generators. Backends that compile nothing for a call take any size at a millisecond each. Kernels are compiled for
nearly every configuration, seconds each, so theirs are fewer, at sizes around the edges of their tiles.
"""

from __future__ import annotations

import itertools
import os
import random
from contextlib import nullcontext

import pytest
import torch
from accuracy import assert_accurate
from cases import ALL, DEVICE, NAMES, Case
from conftest import Runner
from cuda_forms import (
    ALL_INSTANCES,
    BIAS_FORMS,
    bias_form,
    described,
    instance_of,
)
from descriptors import descriptors_wherever_they_serve
from draws import (
    CUDA_EDGES,
    CUDA_FORMS,
    DRAWS,
    FORMS,
    HEAD_DIMS,
    TILE_EDGES,
    Drawn,
    draw_cuda,
    draw_triton,
    placed,
    with_dropout,
)
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from layouts import LAYOUTS, offset, rearranged
from torch import Tensor

from flash_dmattn.backends.cuda import rules as cuda_rules
from flash_dmattn.backends.cuda.backend import BACKEND as CUDA
from flash_dmattn.problem import AttentionProblem, NeedsGrad, TensorSpec

EXAMPLES = {"eager": 1200, "flex": 120}
SHARDS = 6  # so that pytest-xdist can share them out
KERNEL_EXAMPLES = int(os.environ.get("FLASH_DMATTN_EXAMPLES", 200))

LETTERS = st.tuples(
    st.sampled_from(("1", "B")),
    st.sampled_from(("1", "Hk", "Hq")),
    st.sampled_from(("1", "Lq")),
    st.sampled_from(("1", "Lk")),
)
LENGTHS = st.one_of(st.integers(1, 40), st.sampled_from((0, 1, 31, 32, 33, 63, 64, 65, 100)))
DTYPES = (torch.float32, torch.bfloat16, torch.float16) + ((torch.float64,) if DEVICE == "cpu" else ())
SIDES = st.one_of(st.just(-1), st.integers(0, 50))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any valid call of a size that the fp64 formula answers in a millisecond."""
    num_heads_k = draw(st.integers(1, 3))
    case = Case(
        batch=draw(st.integers(1, 3)),
        seqlen_q=draw(LENGTHS),
        seqlen_k=draw(LENGTHS),
        num_heads=num_heads_k * draw(st.integers(1, 4)),
        num_heads_k=num_heads_k,
        head_dim=draw(st.sampled_from((8, 16, 24, 32, 64))),
        head_dim_v=draw(st.sampled_from((0, 0, 8, 16, 48))),
        dtype=draw(st.sampled_from(DTYPES)),
        bias_dtype=draw(st.sampled_from((None, None, torch.float32, torch.bfloat16))),
        mask=draw(st.none() | LETTERS),
        mask_kind=draw(
            st.sampled_from(("random", "random", "empty_rows", "empty_tiles", "none_allowed", "all_allowed"))
        ),
        bias=draw(st.none() | LETTERS | LETTERS),
        bias_kind=draw(st.sampled_from(("normal", "normal", "inf", "min"))),
        is_causal=draw(st.booleans()),
        softmax_scale=draw(st.sampled_from((None, None, 0.0, 0.7, -0.2))),
        softcap=draw(st.sampled_from((0.0, 0.0, 0.0, 5.0))),
        window_size=draw(st.none() | st.none() | st.tuples(SIDES, SIDES)),
        needs_grad=draw(st.sampled_from((ALL, ALL, (), ("bias",), ("q",), ("k", "bias"), ("v",), ("q", "k", "v")))),
        dlse=draw(st.booleans()),
        logits=draw(st.sampled_from((1.0, 1.0, 30.0))),
        seed=draw(st.integers(0, 2**16)),
    )
    case = with_dropout(case, random.Random(f"dropout {case.seed}"))
    sink = draw(st.sampled_from((None, "normal", "inf", "huge")))
    if sink is None:
        return case
    needs_grad = draw(st.sampled_from((case.needs_grad, (*case.needs_grad, "sink"), ("sink",))))
    sink_dtype = draw(st.sampled_from((None, None, torch.float32, torch.bfloat16)))
    return case.with_(sink=sink, sink_dtype=sink_dtype, needs_grad=needs_grad)


@pytest.mark.parametrize("backend", EXAMPLES, indirect=True)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_configurations(backend: Runner, shard: int) -> None:
    refused: list[str] = []

    # A failing case is small already, and to make it smaller compiles kernels on a GPU for minutes.
    phases = [phase for phase in Phase if DEVICE == "cpu" or phase is not Phase.shrink]

    @seed(shard)
    @settings(
        phases=phases, max_examples=int(os.environ.get("FLASH_DMATTN_EXAMPLES", EXAMPLES[backend.name])) // SHARDS
    )
    @given(case=cases(), layout=st.sampled_from((None, *LAYOUTS)))
    def check(case: Case, layout: str | None) -> None:
        inputs = case.build()
        reason = backend.refusal(case, inputs)
        if reason is not None:
            refused.append(reason)
            return
        moved = inputs if layout is None else rearranged(inputs, LAYOUTS[layout])
        assert_accurate(backend(case, moved), case, inputs)

    check()
    if backend.name == "eager":
        assert not refused, "eager serves every valid call"


@pytest.mark.parametrize("backend", DRAWS, indirect=True)
@pytest.mark.parametrize("number", range(KERNEL_EXAMPLES) if DEVICE == "cuda" else range(1))
def test_random_configurations_of_kernels(backend: Runner, number: int) -> None:
    drawn = DRAWS[backend.name](number)
    case = drawn.case
    print(f"{case.repro()} {drawn[1:]}")  # pytest shows it beside whatever fails
    inputs = case.build()
    given = placed(drawn, case, inputs)
    with descriptors_wherever_they_serve() if drawn.descriptors else nullcontext():
        results = backend(case, given)
    assert_accurate(results, case, inputs)


def test_the_kernels_meet_every_form() -> None:
    """In the cases that 200 numbers stand for, forward and backward."""
    drawn = [draw_triton(number) for number in range(200)]
    cases = [x.case for x in drawn]
    for prepared in (False, True):
        assert {x.case.mask for x in drawn if x.prepared is prepared} == {None, *FORMS}
    assert {case.bias for case in cases if "bias" in case.needs_grad} == {None, *FORMS}
    assert {(x.layout, x.descriptors) for x in drawn} == set(itertools.product((None, *LAYOUTS), (False, True)))
    assert {case.head_dim for case in cases} == set(HEAD_DIMS)
    assert {case.seqlen_q for case in cases} == {case.seqlen_k for case in cases} == set(TILE_EDGES)


@pytest.fixture
def every_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """All instances of cuda count as built, whatever this checkout has."""
    monkeypatch.setattr(cuda_rules, "installed_instances", lambda: None)


@pytest.mark.usefixtures("every_unit")
def test_cuda_meets_every_form() -> None:
    """In the cases that 200 numbers stand for; no rule of its forward pass refuses one of them."""
    drawn = [draw_cuda(number) for number in range(200)]
    cases = [x.case for x in drawn]
    assert not [r for x in drawn for r in CUDA.broken_rules(described(x.case, x.prepared), ("forward",))]
    for prepared in (False, True):
        assert {x.case.mask for x in drawn if x.prepared is prepared} == {None, *CUDA_FORMS}
    assert {case.bias for case in cases} == {None, *FORMS}
    assert {case.bias_dtype for case in cases} == {None, torch.float32, torch.float16, torch.bfloat16}
    assert {x.layout for x in drawn} == {None, *LAYOUTS} and {x.offset for x in drawn} == set(range(8))
    assert {case.seqlen_q for case in cases} == {case.seqlen_k for case in cases} == set(TILE_EDGES + CUDA_EDGES)


def laid_out(drawn: Drawn) -> tuple[AttentionProblem, Tensor | None]:
    """The description of a drawn call of cuda, gradients included, its bias as it lies in memory, and the bias."""
    case, bias = drawn.case, None
    problem = described(case, drawn.prepared)._replace(
        needs_grad=NeedsGrad(*(name in case.needs_grad for name in NAMES))
    )
    if case.bias is not None:
        bias = torch.empty(case.sizes(case.bias), dtype=case.bias_dtype or case.dtype, device="meta")
        bias = offset(bias, drawn.offset) if drawn.layout is None else LAYOUTS[drawn.layout](bias)
        problem = problem._replace(bias=TensorSpec(bias.shape, bias.stride(), bias.dtype))
    return problem, bias


@pytest.mark.usefixtures("every_unit")
def test_cuda_runs_every_kernel() -> None:
    """In the cases that 1100 numbers stand for."""
    kernels, differentiated = set(), set()
    refused = with_gradients = 0
    for x in map(draw_cuda, range(1100)):
        case, (problem, bias) = x.case, laid_out(x)
        kernels.add((instance_of(case), bias_form(bias, case.dtype), case.mask is not None))
        if any(problem.needs_grad):
            with_gradients += 1
            if CUDA.broken_rules(problem, ("backward",)):
                refused += 1
                continue
            instance = instance_of(case)
            form = bias_form(bias, case.dtype) if bias is None or 1 in bias.shape[2:] else "tile"
            stored = form == "tile" and problem.needs_grad.bias
            differentiated.add((instance, "stored tile" if stored else form, case.mask is not None))
    assert kernels == set(itertools.product(ALL_INSTANCES, BIAS_FORMS, (False, True)))
    forms = ("none", "vector", "tile", "stored tile")
    assert differentiated == set(itertools.product(ALL_INSTANCES, forms, (False, True)))
    assert with_gradients > 500 and refused < with_gradients / 2
