"""Host decisions about the work of CUDA kernels: the order of work tiles, and the mean length of walks."""

from __future__ import annotations

import ctypes
import functools
import heapq
import random

import pytest
from compiled_header import compiled

NUM_SMS = 132  # of an H200
SOURCE = """
#include <algorithm>
#define __device__
#define __forceinline__ inline
using std::min;
#include "sections.h"
#include "sm90/sections.h"
using namespace flash_dmattn;
extern "C" int order(int64_t pairs, int64_t rows, int64_t most, int64_t together, int shrink, int64_t num_sms,
                     int* at) {
  const Sections sections = sections_of(pairs, rows, most, together, shrink != 0, num_sms);
  for (int index = 0; index < pairs * rows; ++index) {
    const Place place = place_of(sections, index);
    at[2 * index] = place.pair;
    at[2 * index + 1] = place.row;
  }
  return sections.width;
}
"""


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = compiled(SOURCE)
    library.order.argtypes = (*(ctypes.c_int64,) * 4, ctypes.c_int, ctypes.c_int64, ctypes.POINTER(ctypes.c_int))
    return library


def order(pairs: int, rows: int, most: int, together: int = 1, *, shrink: bool) -> tuple[int, list[tuple[int, int]]]:
    """The width of a section, and (pair, row) of each work tile."""
    tiles = (ctypes.c_int * (2 * pairs * rows))()
    width = _library().order(pairs, rows, most, together, shrink, NUM_SMS, tiles)
    return width, list(zip(tiles[::2], tiles[1::2], strict=True))


def overlong(lengths: list[float]) -> float:
    """When the last SM is done, over the mean, where each takes the next tile as soon as it is free."""
    busy = [0.0] * NUM_SMS
    for length in lengths:
        heapq.heapreplace(busy, busy[0] + length)
    return max(busy) / (sum(lengths) / NUM_SMS)


def test_every_tile_is_taken_once() -> None:
    rng = random.Random(0)
    for _ in range(300):
        together = rng.choice((1, 1, 2, 3, 8))
        pairs, rows = together * rng.randint(1, 20), rng.choice((1, 2, 3, 8, 33, 150))
        most, shrink = rng.choice((0, 1, 2, 5, 16, 100)), rng.random() < 0.7
        width, places = order(pairs, rows, most, together, shrink=shrink)
        assert sorted(places) == [(pair, row) for pair in range(pairs) for row in range(rows)]
        assert width == pairs or width % together == 0
        assert width <= max(most, together, NUM_SMS // rows if shrink else 0)


def test_sections_follow_each_other_where_all_rows_are_alike() -> None:
    width, places = order(7, 3, 2, shrink=False)
    pairs = ((0, 1), (2, 3), (4, 5), (6,))
    assert width == 2 and places == [(pair, row) for some in pairs for row in range(3) for pair in some]


def test_late_rows_of_the_last_sections_come_last() -> None:
    width, places = order(100, 200, 10, shrink=True)
    assert width == 10
    early, late = places[: 70 * 200 + 30 * 100], places[70 * 200 + 30 * 100 :]
    assert all(pair < 70 or row < 100 for pair, row in early)
    assert late == [(pair, row) for row in range(100, 200) for pair in range(70, 100)]


# Causal calls: (batch, heads) pairs, rows of work tiles, pairs that fit in L2, pairs that stay together, steps of a row
# less than the one before, and steps that a tile costs besides.
CAUSAL = {
    "forward, 4 x 8 heads of 4k, head dim 256": (32, 32, 6, 1, 2, 2),
    "forward, 4 x 16 heads of 4k, head dim 128": (64, 32, 12, 1, 1, 1),
    "forward, 2 x 8 heads of 8k, head dim 256": (16, 64, 3, 1, 2, 2),
    "forward, 16 heads of 16k, head dim 128": (16, 128, 3, 1, 1, 1),
    "backward, 4 x 16 heads of 4k": (64, 32, 6, 1, 2, 3),
    "backward, 16 heads of 8k": (16, 64, 3, 1, 2, 3),
    "backward, 4 x 8 groups of 4 heads of 4k": (32, 32, 1, 1, 8, 3),
    "backward, 3 x 12 heads of 3000": (36, 24, 8, 1, 2, 3),
    "backward, 16 x 16 heads of 1k": (256, 8, 24, 1, 2, 3),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_no_sm_waits_long_for_the_last_tile(name: str) -> None:
    pairs, rows, most, together, step, more = CAUSAL[name]
    _, places = order(pairs, rows, most, together, shrink=True)
    assert overlong([step * (rows - row) + more for _, row in places]) < 1.04


WALKS = """
#include "api/backward_schedule.h"
extern "C" int64_t mean(int64_t seqlen_q, int64_t seqlen_k, int64_t high) {
  return flash_dmattn::mean_walk(seqlen_q, seqlen_k, high);
}
"""


@pytest.mark.parametrize("lengths", ((1, 1), (7, 7), (40, 100), (100, 40), (64, 1), (1, 64), (33, 32)), ids=str)
def test_mean_walk_is_that_of_a_loop(lengths: tuple[int, int]) -> None:
    library = compiled(WALKS)
    library.mean.argtypes, library.mean.restype = (ctypes.c_int64,) * 3, ctypes.c_int64
    seqlen_q, seqlen_k = lengths
    for high in range(-seqlen_q - 2, seqlen_k + 3):
        pairs = sum(j - i <= high for i in range(seqlen_q) for j in range(seqlen_k))
        assert library.mean(seqlen_q, seqlen_k, high) == pairs // seqlen_k, high
