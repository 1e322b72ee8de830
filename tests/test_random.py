"""Seeded random configurations of every backend against fp64; a failure prints the one line that rebuilds it."""

from __future__ import annotations

import os

import pytest
import torch
from accuracy import assert_accurate
from cases import ALL, DEVICE, Case
from conftest import Runner
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from layouts import LAYOUTS, rearranged

# Per push on a CPU; on a GPU a case costs microseconds and more of them are worth their time.
EXAMPLES = {"eager": 2000, "flex": 200, "triton": 300, "cuda": 500}
SHARDS = 10  # so that pytest-xdist can share them out

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
