"""Rows of the invariant mode on cuda, whose bits nothing around them changes. On a GPU or the emulated one."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from cases import DEVICE
from conftest import Runner
from invariant_rows import draw

pytestmark = pytest.mark.parametrize("backend", ("cuda",), indirect=True)

# One to six key blocks of 128, which one block of threads walks in the mode, or several without it.
LENGTHS = (2, 31, 64, 130, 256, 300, 513, 700)


@pytest.mark.parametrize("number", range(200))
def test_rows_have_equal_bits_in_many_surroundings(number: int, backend: Runner) -> None:
    if "FLASH_DMATTN_EMULATED" in os.environ:
        import emulated_cuda

        emulated_cuda.configure(random.Random(number).choice(emulated_cuda.NUM_SMS), number)
    drawn: Any = draw(number, DEVICE, "cuda", LENGTHS)
    assert not any(drawn.counts.values()), str(drawn)
