"""Keys in pages on cuda: every size and place of a page, on a GPU or the emulated one."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from accuracy import Results
from cases import DEVICE
from conftest import Runner
from sequence_calls import SequenceCall, assert_accurate, spoiled
from torch import Tensor

import flash_dmattn
from flash_dmattn import Sequences

pytestmark = pytest.mark.parametrize("backend", ("cuda",), indirect=True)

HEADS, HEADS_K, HEAD_DIM = 4, 2, 64
LENGTHS = ((130, 150), (0, 40), (64, 257), (129, 0), (1, 65))  # queries and keys of each sequence
MOST_Q, MOST_K = 136, 264
TOKENS_Q = sum(pair[0] for pair in LENGTHS) + 5
BIASES: dict[str, tuple[int, ...] | None] = {
    "none": None,
    "packed rows": (HEADS, TOKENS_Q, MOST_K),
    "of each sequence": (len(LENGTHS), HEADS, MOST_Q, MOST_K),
    "keys by position": (1, HEADS, 1, MOST_K),
}


def made(page_size: int, bias: tuple[int, ...] | None = None, packed: bool = True, **flags: Any) -> SequenceCall:
    """A call of `LENGTHS`, whose pages lie in any order, with a sink."""
    rng = torch.Generator().manual_seed(page_size)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=rng).to(DEVICE, dtype)

    number, columns = len(LENGTHS), -(-MOST_K // page_size) + 1
    pages = number * columns + 2
    table = torch.randperm(pages, generator=rng)[: number * columns].view(number, columns).int().to(DEVICE)
    lengths_q = [n if packed else MOST_Q for n, _ in LENGTHS]
    edges = [0, *accumulate(lengths_q)]
    seqlens_k = torch.tensor([n for _, n in LENGTHS], device=DEVICE)
    cu = {"cu_seqlens_q": torch.tensor(edges, device=DEVICE), "max_seqlen_q": MOST_Q} if packed else {}
    sequences = Sequences.paged(table, seqlens_k, max_seqlen_k=MOST_K, **cu)
    rows = (TOKENS_Q,) if packed else (number, MOST_Q)
    standard = {"is_causal": False, "window_size": None, "softcap": 0.0, "softmax_scale": None, "dropout_p": 0.0}
    return SequenceCall(
        q=normal(*rows, HEADS, HEAD_DIM),
        k=normal(pages, page_size, HEADS_K, HEAD_DIM),
        v=normal(pages, page_size, HEADS_K, HEAD_DIM),
        mask=None,
        bias=None if bias is None else normal(*bias),
        sink=normal(HEADS, dtype=torch.float32),
        sequences=sequences,
        lengths=tuple(
            (first if packed else 0, n, 0, m) for first, n, (_, m) in zip(edges, lengths_q, LENGTHS, strict=False)
        ),
        flags=standard | flags,
        dout=normal(*rows, HEADS, HEAD_DIM),
        dlse=None,
        needs_grad=(),
        told=f"made({page_size}, {bias}, {packed}, {flags})",
    )


def attend(call: SequenceCall, backend: str = "cuda") -> Results:
    """out and lse, of k and v where they lie: `run` would copy them."""
    attention = flash_dmattn.attention
    given = (call.q, call.k, call.v, call.mask, call.bias)
    out, lse = attention(
        *given, sink=call.sink, sequences=call.sequences, return_lse=True, backend=backend, **call.flags
    )
    return {"out": out, "lse": lse}


def check(call: SequenceCall) -> None:
    """Every result of the call against fp64, with NaN in all slots of no key."""
    assert_accurate(attend(spoiled(call)), call)


@pytest.mark.parametrize("page_size", (16, 32, 64, 128, 256))
def test_every_size_of_a_page(backend: Runner, page_size: int) -> None:
    check(made(page_size, is_causal=True))
    check(made(page_size, packed=False, window_size=(100, 30)))


@pytest.mark.parametrize("form", BIASES)
def test_every_bias(backend: Runner, form: str) -> None:
    check(made(32, BIASES[form], is_causal=form == "packed rows"))


def interleaved(x: Tensor, beside: Tensor) -> Tensor:
    """x as its pages lie in front of those of another in one pool."""
    return torch.stack((x, beside), 1)[:, 0]


def by_heads(x: Tensor, beside: Tensor) -> Tensor:
    """x as it lies in pages whose heads have their rows side by side."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def shifted(x: Tensor, beside: Tensor) -> Tensor:
    """x as it lies one element behind 16 bytes, which TMA does not read."""
    return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)


@pytest.mark.parametrize("place", (interleaved, by_heads, shifted))
def test_pools_lie_anyhow(backend: Runner, place: Any) -> None:
    call = spoiled(made(32, is_causal=True))
    given = replace(call, k=place(call.k, call.v), v=place(call.v, call.k))
    assert_accurate(attend(given), made(32, is_causal=True))


def test_rows_of_a_table_lie_anyhow(backend: Runner) -> None:
    call = made(64)
    table = call.sequences.block_table
    assert table is not None
    wide = torch.cat((table, torch.full_like(table, -1)), 1)[:, : table.shape[1]]
    given = Sequences.paged(
        wide,
        call.sequences.seqlens_k,
        cu_seqlens_q=call.sequences.cu_seqlens_q,
        max_seqlen_q=MOST_Q,
        max_seqlen_k=MOST_K,
    )
    found, wanted = (attend(replace(call, sequences=s)) for s in (given, call.sequences))
    assert all(torch.equal(found[name], wanted[name]) for name in found)


def test_shuffled_pages_change_no_bit(backend: Runner) -> None:
    call = made(32, is_causal=True)
    table = call.sequences.block_table
    assert table is not None
    moved = torch.randperm(len(call.k), generator=torch.Generator().manual_seed(1))
    places = torch.argsort(moved).to(DEVICE)
    given = Sequences.paged(
        places[table.long()],
        call.sequences.seqlens_k,
        cu_seqlens_q=call.sequences.cu_seqlens_q,
        max_seqlen_q=MOST_Q,
        max_seqlen_k=MOST_K,
    )
    shuffled = replace(call, sequences=given, k=call.k[moved.to(DEVICE)], v=call.v[moved.to(DEVICE)])
    found, wanted = attend(shuffled), attend(call)
    assert all(torch.equal(found[name], wanted[name]) for name in found)


@pytest.mark.parametrize("pages, columns", ((0, 3), (4, 0)))
def test_no_page_is_no_key(backend: Runner, pages: int, columns: int) -> None:
    q = torch.randn(2, 5, HEADS, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    k = torch.randn(pages, 16, HEADS_K, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    table = torch.zeros(2, columns, dtype=torch.int32, device=DEVICE)
    none = Sequences.paged(table, torch.zeros(2, dtype=torch.int32, device=DEVICE))
    out, lse = flash_dmattn.attention(q, k, k, sequences=none, backend="cuda", return_lse=True)
    assert not out.any() and (lse == -torch.inf).all()


def test_wrong_tables_stay_inside(backend: Runner) -> None:
    """On a GPU nobody looks at them; results are of what is there."""
    if DEVICE == "cpu":
        pytest.skip("on a CPU they are refused")
    call = made(64, is_causal=True)
    wrong = torch.tensor([[10**9, -7, 3, 2**31 - 1, -(2**31), 0]] * len(LENGTHS), dtype=torch.int32, device=DEVICE)
    sequences = Sequences.paged(wrong, torch.full((len(LENGTHS),), 10**6, device=DEVICE), max_seqlen_k=MOST_K)
    q = torch.randn(len(LENGTHS), MOST_Q, HEADS, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    out = flash_dmattn.attention(q, call.k, call.v, sequences=sequences, backend="cuda")
    torch.cuda.synchronize()
    assert out.isfinite().all()


@pytest.mark.parametrize(
    "page_size, place, said",
    (
        (48, None, "pages have 48 keys; the kernels take 16, 32, 64 or a multiple of 128"),
        (32, "columns", "TMA reads pages whose stride is a multiple of the stride of rows"),
        (32, "apart", "TMA reads pages whose stride is a multiple of the stride of rows"),
    ),
)
def test_pages_that_are_refused(backend: Runner, page_size: int, place: str | None, said: str) -> None:
    call = made(page_size)
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
