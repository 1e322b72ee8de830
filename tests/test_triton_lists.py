"""Attention over lists on the Triton kernels, in Triton's interpreter, beside autograd of the dense formula."""

from __future__ import annotations

import pytest
from cases import DEVICE
from conftest import needs_triton
from forked import interpret

pytestmark = [
    needs_triton,
    pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves"),
]


@pytest.mark.parametrize("first", (0, 1000))
def test_random_calls(first: int) -> None:
    assert "24 passed, 0 failed" in interpret("interpreted_lists.py", "random", str(first), "24")


EDGES = {"sizes": 15, "wide heads": 8, "rounded out": 5, "shares": 4, "best keys": 12}  # calls of each kind


@pytest.mark.parametrize("kind", EDGES)
def test_edges(kind: str) -> None:
    assert f"{EDGES[kind]} passed, 0 failed" in interpret("interpreted_lists.py", kind)
