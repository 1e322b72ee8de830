"""Calls with random trees of new tokens: the calls of `sequence_calls.py`, with trees in the place of masks."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from cases import DEVICE
from sequence_calls import SequenceCall
from sequence_calls import draw as draw_call
from torch import Tensor

from flash_dmattn.masks import PreparedMask

LENGTHS = (0, 1, 2, 5, 17, 33)
# The draws for kernels.
ON_GPU: dict[str, Any] = {
    "dtypes": (torch.bfloat16, torch.float16, torch.float32),
    "lengths": (0, 1, 3, 16, 33, 70),
    "lengths_k": (0, 1, 31, 128, 129, 300, 1000),
    "head_dims": (16, 64, 128),
}


def ancestors(rng: random.Random, tokens: int) -> Tensor:
    """Draw what a draft sees: each token itself and its ancestors; some have no parent but the text before."""
    sees = torch.eye(tokens, dtype=torch.bool)
    for token in range(tokens):
        parent = rng.choice((-1, token - 1, token - 1, rng.randrange(token + 1) - 1))
        if parent >= 0:
            sees[token] |= sees[parent]
    return sees


def trees(rng: random.Random, generator: torch.Generator, number: int, tokens: int) -> Tensor:
    """bool (number, tokens, tokens): drafts, chains, and masks that are no trees, with rows that see none."""
    kind = rng.choice(("draft", "draft", "chain", "any"))
    if kind == "draft":
        return (
            torch.stack([ancestors(rng, tokens) for _ in range(number)])
            if number
            else torch.zeros(0, tokens, tokens) > 0
        )
    if kind == "chain":
        return torch.ones(number, tokens, tokens, dtype=torch.bool).tril()
    return torch.rand(number, tokens, tokens, generator=generator) < rng.choice((0.1, 0.5, 0.9))


def draw(number: int, layout: str | None = None, **inputs: Any) -> SequenceCall:
    inputs = {"lengths": LENGTHS, **inputs}
    call, rng = draw_call(number, layout, **inputs), random.Random(f"tree {number}")
    tokens = call.sequences.max_seqlen_q
    if tokens is None:
        tokens = call.q.shape[1]
    made = trees(rng, torch.Generator().manual_seed(number), rng.choice((1, call.sequences.number)), tokens)
    window = rng.choice((None, None, (3, -1), (40, -1)))
    bias = call.bias
    if bias is not None and rng.random() < 0.5:
        bias = None
    needs = tuple(name for name in call.needs_grad if name != "bias" or bias is not None)
    flags = {**call.flags, "is_causal": False, "window_size": window}
    mask: Any = PreparedMask.from_tree(made.to(DEVICE))
    told = f"tree of {call.told}"
    return replace(call, mask=mask, bias=bias, needs_grad=needs, flags=flags, told=told)


def as_chain(call: SequenceCall) -> tuple[SequenceCall, SequenceCall]:
    """The call with a chain as its tree, and the causal one that it stands for."""
    tokens = call.mask.shape[1]  # type: ignore[union-attr]
    chain: Any = PreparedMask.from_tree(torch.ones(1, tokens, tokens, dtype=torch.bool, device=DEVICE).tril())
    left = (call.flags["window_size"] or (-1, -1))[0]
    causal = replace(call, mask=None, flags={**call.flags, "window_size": (left, -1), "is_causal": True})
    return replace(call, mask=chain), causal
