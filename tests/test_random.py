"""Seeded random configurations of every backend against fp64; a failure prints the one line that rebuilds it.

Two generators. Backends that compile nothing for a call take any size at a millisecond each. Kernels are compiled for
nearly every configuration, seconds each, so theirs are fewer, at sizes around the edges of their tiles.
"""

from __future__ import annotations

import itertools
import os
import random
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from accuracy import assert_accurate
from cases import ALL, DEVICE, Case
from conftest import Runner
from descriptors import descriptors_wherever_they_serve
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from layouts import LAYOUTS, rearranged

from flash_dmattn.masks import prepare_mask

EXAMPLES = {"eager": 2000, "flex": 200}
SHARDS = 10  # so that pytest-xdist can share them out
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
    return Case(
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
        need=draw(st.sampled_from((ALL, ALL, (), ("bias",), ("q",), ("k", "bias"), ("v",), ("q", "k", "v")))),
        dlse=draw(st.booleans()),
        logits=draw(st.sampled_from((1.0, 1.0, 30.0))),
        seed=draw(st.integers(0, 2**16)),
    )


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


FORMS = tuple(itertools.product(("1", "B"), ("1", "Hk", "Hq"), ("1", "Lq"), ("1", "Lk")))
# A step of a kernel takes 32 to 128 of them, and a tile of a prepared mask 128; from 512 on programs share a row.
TILE_EDGES = (1, 63, 64, 65, 127, 128, 129, 130, 200, 257, 300) * 2 + (5, 600, 1100)
HEAD_DIMS = (8, 16, 24, 32, 40, 64, 72, 96, 128, 160, 192, 256, 20, 33, 100) + (64, 128) * 4


class Drawn(NamedTuple):
    """A call of a kernel: its layout, whether its mask is prepared beforehand, and whether it may use descriptors."""

    case: Case
    layout: str | None
    prepared: bool
    descriptors: bool


def draw(number: int) -> Drawn:
    """The call of a number; 72 of them go through all forms of mask and bias."""
    rng = random.Random(number)
    num_heads_k = rng.choice((1, 2, 3))
    dtype = rng.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32))
    # Without tensor cores the products of a large tile take long to compile.
    dims = [d for d in HEAD_DIMS if d <= 64 or dtype != torch.float32]
    head_dim = rng.choice(dims)
    case = Case(
        batch=rng.choice((1, 2, 3)),
        seqlen_q=rng.choice(TILE_EDGES),
        seqlen_k=rng.choice(TILE_EDGES),
        num_heads=num_heads_k * rng.choice((1, 1, 2, 3)),
        num_heads_k=num_heads_k,
        head_dim=head_dim,
        head_dim_v=rng.choice((head_dim, head_dim, rng.choice(dims))),
        dtype=dtype,
        bias_dtype=rng.choice((None, None, torch.float32, torch.bfloat16)),
        mask=FORMS[number // 2 % len(FORMS)] if rng.random() < 0.8 else None,
        mask_kind=rng.choice(("random", "random", "empty_rows", "empty_tiles", "none_allowed", "all_allowed")),
        bias=FORMS[number // 3 % len(FORMS)] if rng.random() < 0.8 else None,
        bias_kind=rng.choice(("normal", "normal", "inf")),
        is_causal=rng.random() < 0.4,
        softmax_scale=rng.choice((None, None, None, 0.0, 0.7, -0.2)),
        softcap=rng.choice((0.0, 0.0, 0.0, 5.0)),
        window_size=rng.choice((None, None, (-1, 2), (20, -1), (90, 40), (3, 0))),
        need=rng.choice((ALL, ALL, ALL, (), ("bias",), ("q",), ("k", "bias"), ("v",), ("q", "k", "v"))),
        dlse=rng.random() < 0.5,
        logits=rng.choice((1.0, 1.0, 30.0)),
        seed=number,
    )
    layout = rng.choice((None, None, None, *("nan_margins",) * 4, *LAYOUTS))
    return Drawn(case, layout, number % 2 == 1, rng.random() < 0.5)


@pytest.mark.parametrize("backend", ("triton", "cuda"), indirect=True)
@pytest.mark.parametrize("number", range(KERNEL_EXAMPLES) if DEVICE == "cuda" else range(1))
def test_random_configurations_of_kernels(backend: Runner, number: int) -> None:
    case, layout, prepared, descriptors = drawn = draw(number)
    print(f"{case.repro()} {drawn[1:]}")  # pytest shows it beside whatever fails
    inputs = case.build()
    given = inputs if layout is None else rearranged(inputs, LAYOUTS[layout])
    if prepared and given.mask is not None:
        band = {"is_causal": case.is_causal, "window_size": case.window_size}
        mask = prepare_mask(given.mask, seqlen_q=case.seqlen_q, seqlen_k=case.seqlen_k, **band)
        given = replace(given, mask=mask)
    with descriptors_wherever_they_serve() if descriptors and backend.name == "triton" else nullcontext():
        results = backend(case, given)
    assert_accurate(results, case, inputs)


def test_the_kernels_meet_every_form() -> None:
    """In the cases that 200 numbers stand for, forward and backward."""
    drawn = [draw(number) for number in range(200)]
    cases = [x.case for x in drawn]
    for prepared in (False, True):
        assert {x.case.mask for x in drawn if x.prepared is prepared} == {None, *FORMS}
    assert {case.bias for case in cases if "bias" in case.need} == {None, *FORMS}
    assert {(x.layout, x.descriptors) for x in drawn} == set(itertools.product((None, *LAYOUTS), (False, True)))
    assert {case.head_dim for case in cases} == set(HEAD_DIMS)
    assert {case.seqlen_q for case in cases} == {case.seqlen_k for case in cases} == set(TILE_EDGES)
