"""Times decoding from pages and writing to them on a GPU, with the floor of the bytes: `python -m benchmarks.serving`.

64 sequences of 512 to 32768 keys, 32 heads on 8, head dim 128, bf16. The run compares the outputs of three sequences
with fp64. Exit status 1 if an error is more than 1.5 times plain PyTorch's, or a call of ours fails. FlashInfer decodes
the same pages; if it cannot, its row says why.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_dmattn import BackendChoice, Sequences, append_to_cache, attention
from flash_dmattn.masks import PreparedMask
from flash_dmattn.reference import formula
from flash_dmattn.sequences.cache_writes import OPERATOR

from .timing import Runner, measure

HEADS, HEADS_K, DIM = 32, 8, 128
LENGTHS = tuple(int(512 * 2 ** (6 * i / 63)) // 16 * 16 for i in range(64))
DRAFT = 16
TB_PER_S = 4.3  # what an H200 reads and writes at most


class Row(NamedTuple):
    """A line of the table: what runs, the bytes that it has to move, and what checks its output, if anything does.

    A peer may be missing or fail.
    """

    name: str
    run: Callable[[], object]
    bytes: int
    check: Callable[[], bool] | None = None
    is_peer: bool = False


class Pool:
    """The keys of all sequences in shuffled pages."""

    def __init__(self, page_size: int, device: str) -> None:
        random = torch.Generator(device).manual_seed(0)
        counts = [-(-n // page_size) for n in LENGTHS]
        pages = sum(counts)
        shape = (pages, page_size, HEADS_K, DIM)
        self.k, self.v = (torch.randn(shape, generator=random, device=device, dtype=torch.bfloat16) for _ in "kv")
        order = torch.randperm(pages, generator=random, device=device, dtype=torch.int32)
        self.table = torch.zeros(len(LENGTHS), max(counts), dtype=torch.int32, device=device)
        for s, own in enumerate(order.split(counts)):
            self.table[s, : len(own)] = own
        self.lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
        self.sequences = Sequences.paged(self.table, self.lengths, max_seqlen_k=max(LENGTHS))
        self.order, self.counts, self.page_size = order, counts, page_size
        self.random, self.device = random, device
        self.bytes = 2 * sum(LENGTHS) * HEADS_K * DIM * self.k.element_size()

    def normal(self, *shape: int) -> Tensor:
        """Return random values in bf16."""
        return torch.randn(shape, generator=self.random, device=self.device, dtype=torch.bfloat16)

    def is_accurate(self, q: Tensor, run: Callable[[], Tensor], sees: Tensor) -> bool:
        """Return whether the outputs of three sequences equal fp64's; `sees` (L, L): which new tokens a query sees."""
        out = run()
        for s in (0, 31, 63):
            keys = [
                x[self.table[s, : self.counts[s]].long()].flatten(0, 1)[None, : LENGTHS[s]] for x in (self.k, self.v)
            ]
            mask = torch.ones(q.shape[1], LENGTHS[s], dtype=torch.bool, device=q.device)
            mask[:, LENGTHS[s] - q.shape[1] :] = sees
            one = (q[s : s + 1], *keys)
            exact = formula.attention(*(x.double() for x in one), mask[None, None])[0]
            plain = attention(one[0], one[1], one[2], mask, backend="eager")
            assert isinstance(plain, Tensor)
            off, allowed = ((x.double() - exact).norm() / exact.norm() for x in (out[s : s + 1], plain))
            if not off <= 1.5 * allowed + 1e-5:
                print(f"sequence {s}: {off:.2e} from fp64, plain PyTorch {allowed:.2e}")
                return False
        return True


def decoding_rows(page_size: int, device: str, backend: BackendChoice) -> Iterator[Row]:
    """One query of each sequence, and drafts of 16 as trees, as chains, and as a mask of all keys."""
    pool = Pool(page_size, device)
    sees = torch.eye(DRAFT, dtype=torch.bool, device=device)
    for token in range(1, DRAFT):
        sees[token] |= sees[(token - 1) // 2]  # a binary tree
    chain = torch.ones_like(sees).tril()
    dense_tree = torch.ones(len(LENGTHS), 1, DRAFT, max(LENGTHS), dtype=torch.bool, device=device)
    for s, n in enumerate(LENGTHS):
        dense_tree[s, :, :, n - DRAFT : n] = sees
    q1, q16 = pool.normal(len(LENGTHS), 1, HEADS, DIM), pool.normal(len(LENGTHS), DRAFT, HEADS, DIM)
    tree = PreparedMask.from_tree(sees[None])

    def call(q: Tensor, mask: Any = None, is_causal: bool = False) -> Callable[[], Tensor]:
        def run() -> Tensor:
            return attention(q, pool.k, pool.v, mask, is_causal=is_causal, sequences=pool.sequences, backend=backend)

        return run

    calls = (
        ("1 query", call(q1), q1, sees[:1, :1], 0),
        ("16 queries, tree", call(q16, tree), q16, sees, 0),
        ("16 queries, causal", call(q16, is_causal=True), q16, chain, 0),
        ("16 queries, the tree as a bool mask", call(q16, dense_tree), q16, sees, DRAFT * sum(LENGTHS)),
    )
    for name, run, q, sees_new, mask_bytes in calls:
        check = partial(pool.is_accurate, q, run, sees_new)
        yield Row(f"{name}, pages of {page_size}", run, pool.bytes + 4 * q.numel() + mask_bytes, check)
    peer = flashinfer_run(pool, q1)
    check = partial(pool.is_accurate, q1, peer, sees[:1, :1])
    yield Row(f"1 query, pages of {page_size}, FlashInfer", peer, pool.bytes + 4 * q1.numel(), check, is_peer=True)


def flashinfer_run(pool: Pool, q: Tensor) -> Callable[[], Tensor]:
    """FlashInfer's decoding of the same pages, planned beforehand; where that fails, a call that raises what it did."""
    try:
        return _planned(importlib.import_module("flashinfer"), pool, q)
    except Exception as error:  # a missing library, or one that cannot build its kernels: it raises whatever it likes
        reason = error

    def refused() -> Tensor:
        raise reason

    return refused


def _planned(flashinfer: ModuleType, pool: Pool, q: Tensor) -> Callable[[], Tensor]:
    workspace = torch.empty(1 << 28, dtype=torch.uint8, device=pool.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    edges = torch.tensor([0, *pool.counts], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(pool.device)
    last = torch.tensor([(n - 1) % pool.page_size + 1 for n in LENGTHS], dtype=torch.int32, device=pool.device)
    wrapper.plan(
        edges, pool.order, last, HEADS, HEADS_K, DIM, pool.page_size, q_data_type=q.dtype, kv_data_type=q.dtype
    )
    queries = q[:, 0].contiguous()
    return lambda: wrapper.run(queries, (pool.k, pool.v))[:, None]


def append_rows(device: str) -> Iterator[Row]:
    """Yield a token of each of 64 sequences, and 2048 of each of 4: as it is called, and its kernel alone."""
    for count, tokens in ((64, 1), (4, 2048)):
        pages = torch.randperm(count * 64, device=device, dtype=torch.int32).view(count, 64)
        caches = [torch.zeros(count * 64, 64, HEADS_K, DIM, dtype=torch.bfloat16, device=device) for _ in "kv"]
        k, v = (torch.randn(count, tokens, HEADS_K, DIM, device=device).bfloat16() for _ in "kv")
        lengths = torch.randint(tokens, 4097, (count,), device=device)
        sequences = Sequences.paged(pages, lengths)
        _, view = sequences.describe_with_view(k, *caches)

        place = lengths[:, None] - tokens + torch.arange(tokens, device=device)
        at = (pages.long().gather(1, place // 64), place % 64)
        size = 2 * 2 * k.numel() * k.element_size()
        name = f"append {count} x {tokens}"
        check = partial(_has_all, caches, (k, v), at)
        yield Row(name, partial(append_to_cache, caches[0], caches[1], k, v, sequences), size, check)
        arguments = (*caches, k, v, view.bounds, view.block_table, sequences.layout)
        yield Row(f"{name}, the kernel", partial(OPERATOR, *arguments), size, check)


def _has_all(caches: list[Tensor], new: tuple[Tensor, ...], at: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(cache[at], x) for cache, x in zip(caches, new, strict=True))


def run_rows(rows: list[Row], device: torch.device, rep_ms: float) -> bool:
    """Time some rows side by side, check their outputs, and print them; return whether all are right."""
    good = True
    runners = [Runner(row.run) for row in rows]
    measure(runners, device, rep_ms=rep_ms, least=5, most=200)
    for row, runner in zip(rows, runners, strict=True):
        if runner.error is not None:
            good &= row.is_peer
            print(f"| {row.name} | {type(runner.error).__name__}: {str(runner.error)[:200]} | | | | |", flush=True)
            continue
        right = row.check is None or row.check()
        good &= right
        ms, floor = runner.summary()["ms"], row.bytes / TB_PER_S / 1e9
        verdict = "" if row.check is None else "yes" if right else "NO"
        print(f"| {row.name} | {ms:.4f} | {floor:.4f} | {ms / floor:.2f} | {runner.how} | {verdict} |", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--rep-ms", type=float, default=200, help="about how long each row is timed")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU")
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16; floor at {TB_PER_S} TB/s")
    print("\n| call | ms | floor | over floor | timed by | right |\n| --- | --- | --- | --- | --- | --- |")
    good = True
    # Graphs are not captured on the stream that is there by default.
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        for page_size in (64, 16):
            good &= run_rows(list(decoding_rows(page_size, "cuda", args.backend)), device, args.rep_ms)
        for pair in (0, 2):
            good &= run_rows(list(append_rows("cuda"))[pair : pair + 2], device, args.rep_ms)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
