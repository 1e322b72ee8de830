"""Packed and padded sequences on cuda, each form of bias with its gradient: on a GPU or the emulated one.

Random calls reach a bias of one value per score rarely; `mutants/csrc.py` plants its faults of sequences here.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from cases import DEVICE
from conftest import Runner
from sequence_calls import LEAVES, SequenceCall, assert_accurate, run, spoiled
from torch import Tensor

import flash_dmattn
from flash_dmattn import Sequences
from flash_dmattn.backends.cuda import passes

pytestmark = pytest.mark.parametrize("backend", ("cuda",), indirect=True)

HEADS, HEADS_K, HEAD_DIM = 4, 2, 64
LENGTHS = ((130, 130), (0, 40), (64, 200), (129, 0), (1, 65), (40, 33))  # queries and keys of each sequence
MOST_Q, MOST_K = 136, 200
TOKENS_Q, TOKENS_K = (sum(pair[side] for pair in LENGTHS) + 5 for side in (0, 1))
BIASES: dict[str, tuple[int, ...] | None] = {
    "none": None,
    "packed rows": (HEADS, TOKENS_Q, MOST_K),
    "packed keys": (HEADS, 1, TOKENS_K),
    "packed keys of groups": (HEADS_K, 1, TOKENS_K),
    "packed queries": (1, TOKENS_Q, 1),
    "of each sequence": (len(LENGTHS), HEADS, MOST_Q, MOST_K),
    "shared by sequences": (1, HEADS, MOST_Q, MOST_K),
    "shared by heads": (len(LENGTHS), 1, MOST_Q, MOST_K),
    "shared by all": (1, 1, MOST_Q, MOST_K),
    "keys by position": (1, HEADS, 1, MOST_K),
    "queries by position": (len(LENGTHS), 1, MOST_Q, 1),
}


def made(bias: tuple[int, ...] | None = None, padded: bool = False, **flags: Any) -> SequenceCall:
    """A call of `LENGTHS`, with gradients of everything and a sink."""
    rng = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=rng).to(DEVICE, dtype)

    used = [[pair[side] for pair in LENGTHS] for side in (0, 1)]
    edges = [[0, *accumulate(lengths)] for lengths in used]
    tables = [torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in (*edges, *used)]
    if padded:
        sequences = Sequences.padded(tables[3], tables[2])
        rows_q, rows_k = (len(LENGTHS), MOST_Q), (len(LENGTHS), MOST_K)
        firsts = [[0] * len(LENGTHS)] * 2
    else:
        sequences = Sequences.packed(tables[0], tables[1], max_seqlen_q=MOST_Q, max_seqlen_k=MOST_K)
        rows_q, rows_k, firsts = (TOKENS_Q,), (TOKENS_K,), edges
    lse_shape = (len(LENGTHS), HEADS, MOST_Q) if padded else (HEADS, TOKENS_Q)
    standard = {"is_causal": False, "window_size": None, "softcap": 0.0, "softmax_scale": None, "dropout_p": 0.0}
    return SequenceCall(
        q=normal(*rows_q, HEADS, HEAD_DIM),
        k=normal(*rows_k, HEADS_K, HEAD_DIM),
        v=normal(*rows_k, HEADS_K, HEAD_DIM),
        mask=None,
        bias=None if bias is None else normal(*bias),
        sink=normal(HEADS, dtype=torch.float32),
        sequences=sequences,
        lengths=tuple((first_q, n, first_k, m) for first_q, first_k, (n, m) in zip(*firsts, LENGTHS, strict=False)),
        flags=standard | flags,
        dout=normal(*rows_q, HEADS, HEAD_DIM),
        dlse=normal(*lse_shape, dtype=torch.float32),
        needs_grad=tuple(name for name in LEAVES if name != "bias" or bias is not None),
        told=f"made({bias}, {padded}, {flags})",
    )


def check(call: SequenceCall) -> None:
    """Every result of the call against fp64, with NaN in all rows of no sequence."""
    assert_accurate(run(spoiled(call), "cuda"), call)


@pytest.mark.parametrize("form", BIASES)
def test_every_bias(backend: Runner, form: str) -> None:
    check(made(BIASES[form], is_causal=form in ("none", "packed rows", "shared by sequences")))


@pytest.mark.parametrize("form", ("none", "of each sequence", "shared by all", "queries by position"))
def test_padded_entries(backend: Runner, form: str) -> None:
    check(made(BIASES[form], padded=True, window_size=(64, 20)))


@pytest.mark.parametrize("form", ("packed rows", "of each sequence", "shared by sequences", "shared by all"))
@pytest.mark.parametrize("flags", ({}, {"is_causal": True}, {"window_size": (40, 20)}), ids=str)
def test_every_number_of_dbias_is_written(
    backend: Runner, form: str, flags: dict[str, Any], unwritten_is_nan: None
) -> None:
    """Beyond a band, behind the keys of a sequence, and in rows of no sequence, too."""
    check(made(BIASES[form], padded=form == "of each sequence" and bool(flags), **flags))


@pytest.mark.parametrize("chunks", (1, 2, 5))
def test_chunks_of_a_shared_gradient(backend: Runner, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "NUM_DBIAS_CHUNKS", chunks)
    check(made(BIASES["shared by all"]))


@pytest.mark.parametrize("form", ("of each sequence", "shared by sequences"))
def test_a_bias_may_have_anything_behind_a_sequence(backend: Runner, form: str) -> None:
    """NaN in rows behind its last query and columns behind its last key."""
    call = made(BIASES[form])
    assert call.bias is not None
    bias = call.bias.clone()
    for s in range(len(bias)):
        most_q, most_k = (
            max(pair[side] for pair in (LENGTHS if len(bias) == 1 else LENGTHS[s : s + 1])) for side in (0, 1)
        )
        bias[s, :, most_q:], bias[s, :, :, most_k:] = torch.nan, torch.nan
    assert_accurate(run(replace(call, bias=bias), "cuda"), call)


def test_entries_that_do_not_follow_each_other(backend: Runner) -> None:
    """As slices of longer slots are."""
    call = made(padded=True)
    longer = torch.cat((call.k, torch.full_like(call.k, torch.nan)), 1)
    check(replace(call, k=longer[:, : call.k.shape[1]]))


def test_some_gradients(backend: Runner) -> None:
    whole = run(made(BIASES["packed rows"]), "cuda")
    for needs in (("q",), ("k",), ("v", "sink"), ("bias",), ("sink",)):
        found = run(replace(made(BIASES["packed rows"]), needs_grad=needs), "cuda")
        for name in needs:
            x, y = found[f"d{name}"], whole[f"d{name}"]
            assert x is not None and y is not None
            torch.testing.assert_close(x, y, rtol=2**-7, atol=2**-7)


def test_a_forward_pass_repeats(backend: Runner) -> None:
    first, second = (run(replace(made(), needs_grad=()), "cuda") for _ in range(2))
    assert torch.equal(first["out"], second["out"]) and torch.equal(first["lse"], second["lse"])


def test_wrong_tables_stay_inside(backend: Runner) -> None:
    """On a GPU nobody looks at them; results are of what is there."""
    if DEVICE == "cpu":
        pytest.skip("on a CPU they are refused")
    call = made()
    wrong = torch.tensor([0, 900, -5, 10**9, 3, 7, 2], device=DEVICE)
    sequences = Sequences.packed(wrong, wrong, max_seqlen_q=MOST_Q, max_seqlen_k=MOST_K)
    results = run(replace(call, sequences=sequences), "cuda")
    torch.cuda.synchronize()
    assert all(x is None or x.isfinite().all() or name == "lse" for name, x in results.items())


def test_explain_says_what_cuda_takes(backend: Runner) -> None:
    def notes(k: Tensor) -> tuple[str, ...]:
        told = flash_dmattn.explain(call.q, k, call.v, sequences=call.sequences, backend="cuda")
        assert told.forward == "cuda"
        return next(verdict.notes for verdict in told.verdicts if verdict.backend == "cuda")

    call = made()
    assert not any("copies" in note for note in notes(call.k))
    call = made(padded=True)
    found = [note for note in notes(torch.cat((call.k, call.k), 1)[:, : call.k.shape[1]]) if "copies" in note]
    assert len(found) == 1 and found[0].startswith("copies k, of strides")
