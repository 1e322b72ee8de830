"""Trees of new tokens: values on every backend that has them, chains, the mask itself, and every refusal."""

from __future__ import annotations

import importlib.util
import io
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import DEVICE
from conftest import Runner
from forked import interpret
from sequence_calls import assert_accurate, run
from tree_calls import ON_GPU, as_chain, draw

import flash_dmattn
from flash_dmattn import Sequences, attention
from flash_dmattn.masks import PreparedMask
from flash_dmattn.masks.prepared.storage import TreeMask

EXAMPLES = int(os.environ.get("FLASH_DMATTN_EXAMPLES", 120))


def draw_options(backend: Runner) -> dict[str, Any]:
    return ON_GPU if backend.name == "triton" else {}


@pytest.mark.parametrize("part", range(3))
def test_random_calls_beside_one_dense_call(serving: Runner, part: int) -> None:
    for number in range(part, EXAMPLES, 3):
        call = draw(number, **draw_options(serving))
        assert_accurate(run(call, serving.name), call)


def test_the_reference_reads_trees() -> None:
    for number in range(40):
        call = draw(number, dtypes=(torch.float64,))
        assert_accurate(run(call, "reference"), call)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_random_calls_of_the_kernels() -> None:
    assert "24 passed, 0 failed" in interpret("run_calls.py", "interpreter", "trees", "0", "24")


def test_a_chain_is_causal_bit_for_bit(serving: Runner) -> None:
    for number in range(40):
        call = draw(number, **draw_options(serving))
        if serving.name == "triton":
            call = replace(call, needs_grad=())  # gradients of chains go by tiles, of causality by a band
        chain, causal = (run(each, serving.name) for each in as_chain(call))
        for name, x in causal.items():
            assert x is None or torch.equal(x, chain[name]), (number, name)


@pytest.mark.parametrize("tokens", (0, 1, 31, 32, 33, 65))
def test_bits(tokens: int) -> None:
    tree = torch.rand(3, tokens, tokens) < 0.5
    prepared = PreparedMask.from_tree(tree.transpose(1, 2).contiguous().transpose(1, 2))
    assert prepared.bits.dtype == torch.int32 and prepared.bits.shape == (3, tokens, -(-tokens // 32))
    for i in range(tokens):
        for t in range(tokens):
            assert bool(prepared.bits[1, i, t // 32] >> t % 32 & 1) == bool(tree[1, i, t])
    assert torch.equal(prepared.unpacked(), tree)
    file = io.BytesIO()
    torch.save(prepared, file)
    file.seek(0)
    for copied in (torch.load(file), pickle.loads(pickle.dumps(prepared)), prepared.to("cpu")):
        assert type(copied) is TreeMask and torch.equal(copied.bits, prepared.bits)


def test_explain_tells_of_trees() -> None:
    pool, q = torch.zeros(3, 4, 2, 16, dtype=torch.bfloat16), torch.zeros(1, 3, 2, 16, dtype=torch.bfloat16)
    cache = Sequences.paged(torch.zeros(1, 2, dtype=torch.int32), torch.tensor([5]))
    explanation = flash_dmattn.explain(q, pool, pool, PreparedMask.from_tree(torch.ones(1, 3, 3) > 0), sequences=cache)
    assert "tree (1, 1, 3, 3)" in str(explanation) and explanation.problem.features == {
        *("mask", "sequences", "paged", "tree")
    }
    refused = {v.backend: [r.code for r in v.reasons] for v in explanation.verdicts}
    assert all("tree" in refused[name] for name in ("cuda", "flex")) and explanation.forward == "eager"
    assert all("tree" not in refused[name] for name in ("triton", "eager", "reference"))
    assert not any("unpacks" in note for v in explanation.verdicts for note in v.notes)
    padded = Sequences.padded(seqlens_k=torch.tensor([5]))
    x = torch.zeros(1, 5, 2, 16, requires_grad=True)
    explanation = flash_dmattn.explain(x, x, x, PreparedMask.from_tree(torch.ones(1, 5, 5) > 0), sequences=padded)
    verdict = next(v for v in explanation.verdicts if v.backend == "triton")
    assert [r.code for r in verdict.reasons] == ["device"]


Q, POOL = torch.zeros(2, 3, 2, 8), torch.zeros(4, 4, 2, 8)
PAGES = Sequences.paged(torch.tensor([[0, 1], [2, 3]]), torch.tensor([8, 4]))
TREE = PreparedMask.from_tree(torch.ones(2, 3, 3) > 0)
CU = torch.tensor([0, 3, 6])

from_tree = PreparedMask.from_tree
# The error that each call raises.
BAD: dict[str, Callable[[], Any]] = {
    "TypeError: tree is a list; it needs to be a bool torch.Tensor": lambda: from_tree([[True]]),
    "TypeError: tree has dtype torch.float32; it needs to be": lambda: from_tree(torch.ones(1, 2, 2)),
    "ValueError: tree has shape (2, 2); it needs to be (sequences or 1, new tokens, new tokens)": lambda: from_tree(
        torch.ones(2, 2) > 0
    ),
    "ValueError: tree has shape (1, 2, 3); it needs to be": lambda: from_tree(torch.ones(1, 2, 3) > 0),
    "ValueError: mask is a tree, of the new tokens of sequences; it needs sequences= with it": lambda: attention(
        Q, Q, Q, TREE
    ),
    "ValueError: mask is a tree of 3 new tokens; it needs max_seqlen_q of them, 2": lambda: attention(
        Q[:, :2], POOL, POOL, TREE, sequences=PAGES
    ),
    "ValueError: mask is a tree of 5 sequences; it needs 1 or 2": lambda: attention(
        Q, POOL, POOL, from_tree(torch.ones(5, 3, 3) > 0), sequences=PAGES
    ),
    "ValueError: mask is a tree of 3 new tokens; it needs max_seqlen_q, which the sequences do not name": lambda: (
        attention(
            Q.flatten(0, 1),
            POOL,
            POOL,
            TREE,
            sequences=Sequences.paged(PAGES.block_table, PAGES.seqlens_k, cu_seqlens_q=CU),
        )
    ),
    "ValueError: mask is on meta; it needs to be on the device of q, cpu": lambda: attention(
        Q, POOL, POOL, TREE.to("meta"), sequences=PAGES
    ),
    "ValueError: is_causal is True, but mask is a tree, which says itself what of the new tokens is seen": lambda: (
        attention(Q, POOL, POOL, TREE, is_causal=True, sequences=PAGES)
    ),
    "ValueError: window_size is (3, 0), but mask is a tree": lambda: attention(
        Q, POOL, POOL, TREE, window_size=(3, 0), sequences=PAGES
    ),
    (
        "TypeError: mask is a PreparedMask of the form 'tiles'; with sequences it needs to be a bool torch.Tensor, "
        "or a prepared mask of PreparedMask.from_mask(mask, sequences=...) or PreparedMask.from_tree"
    ): lambda: attention(Q, POOL, POOL, PreparedMask.from_mask(torch.ones(3, 8) > 0), sequences=PAGES),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused_by_name(message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        BAD[message]()
    assert f"{caught.typename}: {caught.value}".startswith(message)
