"""Dropout on cuda, each form of mask and bias with its gradients: on a GPU or the emulated one.

`test_dropout.py` has what holds of every backend; `draws.draw_cuda` drops probabilities of random calls, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cases import ALL, DEVICE, Case
from conftest import Runner
from dropout_masks import dropped_case, drops_as_the_whole
from torch import Tensor

from flash_dmattn.masks import PreparedMask, padding_mask

pytestmark = pytest.mark.parametrize("backend", ("cuda",), indirect=True)

BASE = Case(
    seqlen_q=200,
    seqlen_k=264,
    num_heads=4,
    head_dim=64,
    dtype=torch.bfloat16,
    dropout_p=0.3,
    dlse=True,
)
FULL, ENTRIES, HEADS, PER_KEY, PER_QUERY = (
    ("B", "Hq", "Lq", "Lk"),
    ("1", "Hq", "Lq", "Lk"),
    ("B", "1", "Lq", "Lk"),
    ("B", "Hk", "1", "Lk"),
    ("B", "Hq", "Lq", "1"),
)
BITS = {"mask": ("B", "1", "Lq", "Lk"), "mask_kind": "empty_tiles"}
CASES = {
    "plain": BASE,
    "causal": BASE.with_(is_causal=True),
    "window": BASE.with_(window_size=(70, 20)),
    "narrower heads": BASE.with_(head_dim=40, head_dim_v=48),
    "stored dbias": BASE.with_(bias=FULL),
    "stored dbias, bits": BASE.with_(bias=FULL, **BITS),
    "stored dbias, causal": BASE.with_(bias=FULL, is_causal=True),
    "dbias that entries share": BASE.with_(bias=ENTRIES),
    "dbias that entries share, bits": BASE.with_(bias=ENTRIES, **BITS),
    "dbias that heads share": BASE.with_(bias=HEADS, is_causal=True),
    "bias without its gradient": BASE.with_(bias=ENTRIES, needs_grad=("q", "k", "v")),
    "its gradient alone": BASE.with_(bias=ENTRIES, needs_grad=("bias",), dlse=False),
    "bias per key": BASE.with_(bias=PER_KEY),
    "bias per key, bits": BASE.with_(bias=PER_KEY, **BITS),
    "bias per query": BASE.with_(bias=PER_QUERY, is_causal=True),
    "bits": BASE.with_(**BITS),
    "padding": BASE.with_(mask=("B", "1", "1", "Lk")),
    "sink": BASE.with_(sink="normal", needs_grad=(*ALL, "sink")),
    "large scores": BASE.with_(logits=30.0),
    "all is dropped": BASE.with_(dropout_p=1.0, bias=FULL),
    "nearly all is dropped": BASE.with_(dropout_p=0.97),
}


@pytest.mark.parametrize("name", CASES)
def test_every_form(backend: Runner, name: str) -> None:
    backend.check(CASES[name])


def lengths(scores: Tensor) -> PreparedMask:
    return PreparedMask.from_mask(padding_mask(torch.tensor([264, 100], device=DEVICE), 264), seqlen_q=200)


def in_order(scores: Tensor) -> PreparedMask:
    return PreparedMask.from_topk(scores, 60, is_causal=True, seqlen_q=200, reorder=True)


@pytest.mark.parametrize("bias", (None, PER_KEY, ENTRIES), ids=("none", "per key", "per score"))
@pytest.mark.parametrize("make", (lengths, in_order))
def test_interval_masks(backend: Runner, make: Callable[[Tensor], PreparedMask], bias: tuple[str, ...] | None) -> None:
    """Which probabilities are dropped goes by keys, not by their places in the order of a mask."""
    scores = torch.randn(2, 2, 1, 264, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    prepared = make(scores)
    case = BASE.with_(bias=bias, mask=("B", "Hk", "Lq", "Lk"))
    inputs = replace(case.build(), mask=prepared.dense().expand(2, 2, -1, -1).contiguous())
    call = replace(inputs, mask=prepared)  # type: ignore[arg-type]
    backend.check(case, inputs, call)


@pytest.mark.parametrize("name, sizes", (("out", (300, 40)), ("dv", (40, 300))))
def test_a_part_of_a_call_drops_what_the_whole_call_drops_there(
    backend: Runner, name: str, sizes: tuple[int, int]
) -> None:
    assert drops_as_the_whole("cuda", dropped_case(*sizes, num_heads_k=4), name, torch.bfloat16)
