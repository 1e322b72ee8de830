"""Seeded random configurations of every backend against fp64; a failure prints the one line that rebuilds it.

Backends that compile nothing for a call take any size at a millisecond each. Kernels are compiled for nearly every
configuration, seconds each, so theirs are fewer, at sizes around the edges of their tiles.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
from accuracy import assert_accurate
from cases import DEVICE
from conftest import Runner
from cuda_forms import (
    ALL_INSTANCES,
    BACKWARD_FLOAT_FORMS,
    BACKWARD_FORMS,
    BIAS_FORMS,
    FLOAT_FORMS,
    bias_form,
    describe_on_meta,
    described,
    has_floats,
    instance_of,
)
from descriptors import descriptors_wherever_they_serve
from draws import (
    CUDA_EDGES,
    CUDA_FORMS,
    DRAWS,
    FORMS,
    HEAD_DIMS,
    INTERVAL_SIZES,
    TILE_EDGES,
    Drawn,
    draw_cuda,
    draw_intervals,
    draw_small,
    draw_triton,
    placed,
)
from layouts import LAYOUTS

from flash_dmattn.backends import eager as eager_backend
from flash_dmattn.backends.cuda import rules as cuda_rules
from flash_dmattn.backends.cuda.backend import BACKEND as CUDA
from flash_dmattn.reference import chunks

EXAMPLES = {"eager": 600, "flex": 120}
SHARDS = 6  # so that pytest-xdist can share them out
KERNEL_EXAMPLES = int(os.environ.get("FLASH_DMATTN_EXAMPLES", 200))


def check(backend: Runner, drawn: Drawn) -> None:
    """Every result of a call as fp64 has it; pytest shows the line that rebuilds a failing call."""
    print(f"{drawn.case.repro()} {drawn[1:]}")
    inputs = drawn.case.build()
    with ExitStack() as ways:
        if drawn.descriptors:
            ways.enter_context(descriptors_wherever_they_serve())
        if backend.name == "eager":
            ways.enter_context(small_chunks(drawn.case.seed))
        backend.check(drawn.case, inputs, placed(drawn, inputs))


@contextmanager
def small_chunks(number: int) -> Iterator[None]:
    """Chunks of some size, and for every other number keys gathered wherever a mask leaves some out."""
    eager_backend.set_chunk_bytes((chunks.DEFAULT_CHUNK_BYTES, 24_000, 100_000)[number % 3])
    always = {"FEW_SCORES": 0, "GOOD_SCORES": 0} if number % 2 else {}
    try:
        with mock.patch.multiple(chunks, **always) if always else nullcontext():
            yield
    finally:
        eager_backend.set_chunk_bytes(chunks.DEFAULT_CHUNK_BYTES)


@pytest.mark.parametrize("backend", EXAMPLES, indirect=True)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_configurations(backend: Runner, shard: int) -> None:
    for number in range(shard, int(os.environ.get("FLASH_DMATTN_EXAMPLES", EXAMPLES[backend.name])), SHARDS):
        drawn = DRAWS[backend.name](number)
        reason = backend.refusal(drawn.case, drawn.case.build())
        if reason is None:
            check(backend, drawn)
        assert reason is None or backend.name != "eager", "eager serves every valid call"


@pytest.mark.parametrize("backend", ("triton", "cuda"), indirect=True)
@pytest.mark.parametrize("number", range(KERNEL_EXAMPLES) if DEVICE == "cuda" else range(1))
def test_random_configurations_of_kernels(backend: Runner, number: int) -> None:
    check(backend, DRAWS[backend.name](number))


def test_random_interval_masks_of_eager(eager: Runner) -> None:
    for number in range(int(os.environ.get("FLASH_DMATTN_EXAMPLES", 60))):
        drawn, mask = draw_intervals(number, INTERVAL_SIZES["interpreter"])
        print(f"{drawn.case.repro()} {mask}")
        inputs = drawn.case.build()
        dense = replace(inputs, mask=mask.unpacked().to(DEVICE))
        with small_chunks(number):
            results = eager(drawn.case, replace(inputs, mask=mask.to(DEVICE)))
        assert_accurate(results, drawn.case, dense)


def test_small_calls_meet_every_form() -> None:
    """In the cases that these numbers stand for, with and without a gradient of the bias."""
    drawn = [draw_small(number) for number in range(EXAMPLES["eager"])]
    cases = [x.case for x in drawn]
    assert {case.mask for case in cases} == {case.bias for case in cases} == {None, *FORMS}
    assert {case.bias for case in cases if "bias" in case.needs_grad} == {None, *FORMS}
    assert {case.bias_kind for case in cases} == {"normal", "inf", "min"}
    assert {(x.layout, x.prepared) for x in drawn} == set(itertools.product((None, *LAYOUTS), (False, True)))
    assert {0, 1, 32, 33, 100} <= {case.seqlen_q for case in cases} & {case.seqlen_k for case in cases}


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


@pytest.mark.usefixtures("every_unit")
def test_cuda_runs_every_kernel() -> None:
    """In the cases that 1100 numbers stand for."""
    kernels, differentiated = set(), set()
    refused = with_gradients = 0
    for x in map(draw_cuda, range(1100)):
        case, (problem, bias) = x.case, describe_on_meta(x)
        kernels.add((instance_of(case), bias_form(bias, case), case.mask is not None))
        if any(problem.needs_grad):
            with_gradients += 1
            if CUDA.broken_rules(problem, ("backward",)):
                refused += 1
                continue
            instance = instance_of(case)
            tile = "float tile" if has_floats(problem) else "tile"
            form = bias_form(bias, case) if bias is None or 1 in bias.shape[2:] else tile
            stored = form == tile and problem.needs_grad.bias
            differentiated.add((instance, f"stored {tile}" if stored else form, case.mask is not None))
    flags, is_float = (False, True), lambda each: "float" in each[1]
    assert {each for each in kernels if not is_float(each)} == set(itertools.product(ALL_INSTANCES, BIAS_FORMS, flags))
    others = {each for each in differentiated if not is_float(each)}
    assert others == set(itertools.product(ALL_INSTANCES, BACKWARD_FORMS, flags))
    # In one dtype or the other.
    for reached, forms in ((kernels, FLOAT_FORMS), (differentiated, BACKWARD_FLOAT_FORMS)):
        floats = {(dims[:2], *rest) for dims, *rest in filter(is_float, reached)}
        assert floats == set(itertools.product(cuda_rules.INSTANCES[:2], forms, flags))
    assert with_gradients > 500 and refused < with_gradients / 2
