"""Packed, padded and paged sequences on cuda, each form of bias with its gradient: on a GPU or the emulated one.

Random calls reach a bias of one value per score rarely; `mutants/faults.py` plants its faults of sequences here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from accuracy import Results
from cases import DEVICE
from conftest import Runner
from sequence_calls import SequenceCall, assert_accurate, run, spoiled
from sequence_cases import SequenceCase
from torch import Tensor

import flash_dmattn
from flash_dmattn import Sequences
from flash_dmattn.backends.cuda import passes

pytestmark = pytest.mark.parametrize("backend", ("cuda",), indirect=True)

HEADS, HEADS_K, HEAD_DIM = 4, 2, 64
LENGTHS = ((130, 130), (0, 40), (64, 200), (129, 0), (1, 65), (40, 33))  # queries and keys of each sequence
MOST_Q, MOST_K = 136, 200
BASE = SequenceCase(LENGTHS, most=(MOST_Q, MOST_K))
BIASES: dict[str, tuple[str, ...] | None] = {
    "none": None,
    "packed rows": ("Hq", "Tq", "Lk"),
    "packed keys": ("Hq", "1", "Tk"),
    "packed keys of groups": ("Hk", "1", "Tk"),
    "packed queries": ("1", "Tq", "1"),
    "of each sequence": ("B", "Hq", "Lq", "Lk"),
    "shared by sequences": ("1", "Hq", "Lq", "Lk"),
    "shared by heads": ("B", "1", "Lq", "Lk"),
    "shared by all": ("1", "1", "Lq", "Lk"),
    "keys by position": ("1", "Hq", "1", "Lk"),
    "queries by position": ("B", "1", "Lq", "1"),
}


def made(
    bias: tuple[str, ...] | None = None, padded: bool = False, page_size: int | None = None, **flags: Any
) -> SequenceCall:
    """A call of `LENGTHS` with a sink, and gradients of everything, or keys in pages that lie in any order."""
    if page_size is None:
        return BASE.with_(bias=bias, layout="padded" if padded else "packed").build(**flags)
    return BASE.with_(bias=bias, layout="paged" if padded else "paged_packed", page_size=page_size).build(**flags)


def attend(call: SequenceCall, backend: str = "cuda") -> Results:
    """out and lse, of k and v where they lie: `run` would copy them."""
    tensors = (call.q, call.k, call.v, call.mask, call.bias)
    flags = {"sink": call.sink, "sequences": call.sequences, "return_lse": True, "backend": backend, **call.flags}
    out, lse = flash_dmattn.attention(*tensors, **flags)
    return {"out": out, "lse": lse}


def check(call: SequenceCall) -> None:
    """Every result of the call against fp64, with NaN in all rows of no sequence."""
    assert_accurate(run(spoiled(call), "cuda"), call)


@pytest.mark.parametrize("form", BIASES)
def test_every_bias(backend: Runner, form: str) -> None:
    check(made(BIASES[form], is_causal=form in ("none", "packed rows", "shared by sequences")))


@pytest.mark.parametrize("form", ("none", "of each sequence", "shared by all", "queries by position"))
def test_padded_entries(backend: Runner, form: str) -> None:
    check(made(BIASES[form], padded=True, window_size=(20, 20)))  # shorter than the sequence of few keys


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


def test_a_forward_pass_repeats(backend: Runner) -> None:
    first, second = (run(replace(made(), needs_grad=()), "cuda") for _ in range(2))
    assert torch.equal(first["out"], second["out"]) and torch.equal(first["lse"], second["lse"])


# Few gaps share all warps; of many each warp takes several: two SMs of an emulated GPU fill gaps, 131 of an H100.
GAPS = {"few": (1, 700), "many": (5000 if DEVICE == "cuda" else 45, 3)}


@pytest.mark.parametrize(("number", "tail"), GAPS.values(), ids=GAPS)
def test_rows_of_no_sequence_are_written(
    backend: Runner, number: int, tail: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def filled_with_nan(*sizes: Any, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        return torch.full(sizes[0] if len(sizes) == 1 else sizes, torch.nan, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "empty", filled_with_nan)
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, torch.nan))
    starts = torch.arange(number + 1, device=DEVICE) * 3  # two used rows of three
    rows = number * 3 + tail
    used = (torch.arange(rows, device=DEVICE) < number * 3) & (torch.arange(rows, device=DEVICE) % 3 < 2)
    two = torch.full((number,), 2, device=DEVICE)
    q, k, v = (
        torch.randn(rows, heads, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for heads in (HEADS, HEADS_K, HEADS_K)
    )
    sequences = Sequences.packed(starts, max_seqlen_q=3, max_seqlen_k=3, seqlens_q=two, seqlens_k=two)
    out, lse = flash_dmattn.attention(q, k, v, sequences=sequences, return_lse=True, backend="cuda")
    gradients = torch.autograd.grad(out.sum() + lse[:, used].sum(), (q, k, v))
    assert bool((lse[:, ~used] == -torch.inf).all()) and bool(lse[:, used].isfinite().all())
    for x in (out, *gradients):
        assert bool((x[~used] == 0).all()) and bool(x[used].isfinite().all())


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
    call = made(page_size=64, is_causal=True)
    table = torch.tensor([[10**9, -7, 3, 2**31 - 1, -(2**31), 0]] * len(LENGTHS), dtype=torch.int32, device=DEVICE)
    sequences = Sequences.paged(table, torch.full((len(LENGTHS),), 10**6, device=DEVICE), max_seqlen_k=MOST_K)
    q = torch.randn(len(LENGTHS), MOST_Q, HEADS, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    out = flash_dmattn.attention(q, call.k, call.v, sequences=sequences, backend="cuda")
    torch.cuda.synchronize()
    assert out.isfinite().all()


def test_explain_says_what_cuda_takes(backend: Runner) -> None:
    def notes(k: Tensor) -> tuple[str, ...]:
        told = flash_dmattn.explain(call.q, k, call.v, sequences=call.sequences, backend="cuda")
        assert told.forward == "cuda"
        return next(verdict.notes for verdict in told.verdicts if verdict.backend == "cuda")

    call = made()
    assert not any("copies" in note for note in notes(call.k))
    call = made(padded=True)
    actual = [note for note in notes(torch.cat((call.k, call.k), 1)[:, : call.k.shape[1]]) if "copies" in note]
    assert len(actual) == 1 and actual[0].startswith("copies k, of strides")


# Keys in pages


def check_pages(call: SequenceCall) -> None:
    """Both results of the call against fp64, with NaN in all slots of no key."""
    assert_accurate(attend(spoiled(call)), call)


@pytest.mark.parametrize("page_size", (16, 32, 64, 128, 256))
def test_every_size_of_a_page(backend: Runner, page_size: int) -> None:
    check_pages(made(page_size=page_size, is_causal=True))
    check_pages(made(page_size=page_size, padded=True, window_size=(100, 30)))


@pytest.mark.parametrize("form", ("none", "packed rows", "of each sequence", "keys by position"))
def test_every_bias_beside_pages(backend: Runner, form: str) -> None:
    check_pages(made(BIASES[form], page_size=32, is_causal=form == "packed rows"))


def interleaved(x: Tensor, other: Tensor) -> Tensor:
    """Lay the pages of x before the pages of another tensor, in turn in one pool."""
    return torch.stack((x, other), 1)[:, 0]


def by_heads(x: Tensor, other: Tensor) -> Tensor:
    """x as it lies in pages whose heads have their rows side by side."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def shifted(x: Tensor, other: Tensor) -> Tensor:
    """x as it lies one element behind 16 bytes, which TMA does not read."""
    return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)


@pytest.mark.parametrize("place", (interleaved, by_heads, shifted))
def test_pools_lie_anyhow(backend: Runner, place: Any) -> None:
    call = spoiled(made(page_size=32, is_causal=True))
    wanted, v = made(page_size=32, is_causal=True), place(call.v, call.k)
    for k in (place(call.k, call.v), call.k):  # pages of k may lie apart as those of v do, or otherwise
        assert_accurate(attend(replace(call, k=k, v=v)), wanted)


def with_table(call: SequenceCall, table: Tensor) -> SequenceCall:
    """The call with another table of pages."""
    x = call.sequences
    queries = {"cu_seqlens_q": x.cu_seqlens_q, "max_seqlen_q": MOST_Q, "max_seqlen_k": MOST_K}
    return replace(call, sequences=Sequences.paged(table, x.seqlens_k, **queries))


def test_tables_and_pages_lie_anyhow(backend: Runner) -> None:
    """Rows of a table have a stride, and shuffled pages change no bit."""
    call = made(page_size=32, is_causal=True)
    table, wanted = call.sequences.block_table, attend(call)
    assert table is not None
    wide = torch.cat((table, torch.full_like(table, -1)), 1)[:, : table.shape[1]]
    moved = torch.randperm(len(call.k), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    shuffled = replace(with_table(call, torch.argsort(moved)[table.long()]), k=call.k[moved], v=call.v[moved])
    for tensors in (with_table(call, wide), shuffled):
        actual = attend(tensors)
        assert all(torch.equal(actual[name], wanted[name]) for name in actual)


@pytest.mark.parametrize("pages, columns", ((0, 3), (4, 0)))
def test_no_page_is_no_key(backend: Runner, pages: int, columns: int) -> None:
    q = torch.randn(2, 5, HEADS, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    k = torch.randn(pages, 16, HEADS_K, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    table = torch.zeros(2, columns, dtype=torch.int32, device=DEVICE)
    none = Sequences.paged(table, torch.zeros(2, dtype=torch.int32, device=DEVICE))
    out, lse = flash_dmattn.attention(q, k, k, sequences=none, backend="cuda", return_lse=True)
    assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize(
    "page_size, place, said",
    (
        (48, None, "pages have 48 keys; the kernels take 16, 32, 64 or a multiple of 128"),
        (32, "columns", "TMA reads pages whose stride is a multiple of the stride of rows"),
        (32, "apart", "TMA reads pages whose stride is a multiple of the stride of rows"),
    ),
)
def test_pages_that_are_refused(backend: Runner, page_size: int, place: str | None, said: str) -> None:
    call = made(page_size=page_size)
    if place == "columns":
        call = replace(call, v=call.v.transpose(1, 3).contiguous().transpose(1, 3))
    if place == "apart":
        rows = call.k.flatten(1)
        spread = torch.cat((rows, rows.new_zeros(len(rows), 8)), 1)[:, : rows.shape[1]]
        call = replace(call, k=spread.unflatten(1, call.k.shape[1:]))
    with pytest.raises(flash_dmattn.BackendUnsupportedError, match=said):
        attend(call)
    told = flash_dmattn.explain(call.q, call.k, call.v, sequences=call.sequences)
    assert told.forward != "cuda" and said in str(told)
