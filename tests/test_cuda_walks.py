"""How long the CUDA backward kernels' walks are on the mean, by which a kernel is chosen."""

from __future__ import annotations

import ctypes

import pytest
from compiled_header import compiled

SOURCE = """
#include "api/backward_schedule.h"
extern "C" int64_t mean(int64_t seqlen_q, int64_t seqlen_k, int64_t high) {
  return flash_dmattn::mean_walk(seqlen_q, seqlen_k, high);
}
"""


@pytest.mark.parametrize("lengths", ((1, 1), (7, 7), (40, 100), (100, 40), (64, 1), (1, 64), (33, 32)), ids=str)
def test_mean_walk_is_that_of_a_loop(lengths: tuple[int, int]) -> None:
    library = compiled(SOURCE)
    library.mean.argtypes, library.mean.restype = (ctypes.c_int64,) * 3, ctypes.c_int64
    seqlen_q, seqlen_k = lengths
    for high in range(-seqlen_q - 2, seqlen_k + 3):
        pairs = sum(j - i <= high for i in range(seqlen_q) for j in range(seqlen_k))
        assert library.mean(seqlen_q, seqlen_k, high) == pairs // seqlen_k, high
