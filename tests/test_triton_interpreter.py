"""The Triton kernels in Triton's interpreter: calls in fp32 and fp16, in processes of their own."""

from __future__ import annotations

import fp32_cases
import pytest
from cases import DEVICE
from conftest import needs_triton
from forked import interpret
from predecessor_cases import CALLS

CASES = 40

pytestmark = [
    needs_triton,
    pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves"),
]


def run_calls(features: str, first: int, count: int) -> None:
    assert f"{count} passed, 0 failed" in interpret("run_calls.py", "interpreter", features, str(first), str(count))


@pytest.mark.parametrize("first", range(0, 4000, 1000))
def test_random_calls(first: int) -> None:
    run_calls("dense", first, CASES)


@pytest.mark.parametrize("first", (0, 1000))
def test_short_rows(first: int) -> None:
    run_calls("short", first, 20)


def test_wide_heads() -> None:
    run_calls("wide", 0, 18)


def test_dropout_bit_for_bit() -> None:
    assert "51 passed, 0 failed" in interpret("interpreted_dropout.py")


def test_interval_masks() -> None:
    run_calls("intervals", 0, 20)


BY_HAND = {  # how many calls a word of `interpreted_triton.py` stands for
    "walks": 5,
    "wide heads": 26,
    "bugs": sum(1 + (case.mask is not None) for case in CALLS.values()),
    "empty rows": 3,
    "wide windows": 15,
    "freed": 20,
    "few keys": 39,
    "relative": 31,
    "forward mode": 5,
    "great": 85,
    "odd": 14,
}
LINES = {"scores": 4, "softcap": 3, "bands": 7, "masks": 2, "parts": 12, "sinks": 4, "dropout": 9}


@pytest.mark.parametrize("what", BY_HAND)
def test_calls_written_by_hand(what: str) -> None:
    assert f"{BY_HAND[what]} passed, 0 failed" in interpret("interpreted_triton.py", what)


@pytest.mark.parametrize("name", LINES)
def test_lines_that_random_calls_may_miss(name: str) -> None:
    assert f"{LINES[name]} passed, 0 failed" in interpret("interpreted_triton.py", "lines", name)


@pytest.mark.parametrize(
    "name", ("bias per score", "bias per key", "bias per query", "key mask", "three dims", "order of keys")
)
def test_entries_that_a_part_of_the_batch_shares(name: str) -> None:
    assert "2 passed, 0 failed" in interpret("interpreted_triton.py", "leading", name)


@pytest.mark.parametrize("how", (("fp16x3", "made"), ("fp16x3", "stored"), ("bf16x3", "made")), ids=" ".join)
def test_fp32_on_pieces_keeps_its_accuracy(how: tuple[str, str]) -> None:
    """With products as tensor cores add them: one sum over all tiles, or a piece too few, is further off."""
    number = {
        "fp16x3 made": len(fp32_cases.CASES) + 2,  # small rows; NaN and inf
        "fp16x3 stored": len(fp32_cases.STORED) + 1,
        "bf16x3 made": len(fp32_cases.TWO_OF_BFLOAT16) + 1,
    }[" ".join(how)]
    assert f"{number} passed, 0 failed" in interpret("interpreted_triton.py", "fp32", *how)


@pytest.mark.parametrize("what", ("strides", "entries"))
def test_offsets_beyond_int32(what: str) -> None:
    interpret("interpreted_far.py", what)


@pytest.mark.parametrize("first", (0, 1000))
def test_sequences(first: int) -> None:
    run_calls("sequences", first, 26)
