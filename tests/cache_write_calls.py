"""Writes to caches drawn at random, and what has to come of them, token by token."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from cases import DEVICE
from layouts import LAYOUTS as STRIDES
from torch import Tensor

from flash_dmattn import Sequences
from flash_dmattn.problem import RANKS, Layout
from flash_dmattn.sequences.cache_writes import CacheWrite, Writer

LENGTHS = (0, 1, 2, 5, 17, 33)
DTYPES = (torch.float32, torch.float16)


class WriteCall(NamedTuple):
    """One write as a writer receives it, and the sequences that a caller has, None where no caller could."""

    write: CacheWrite
    sequences: Sequences | None
    told: str


def draw(number: int, is_wrong: bool = False, dtypes: tuple[torch.dtype, ...] = DTYPES) -> WriteCall:
    """The write of a number; where it is wrong, of tables that a call on a CPU refuses."""
    rng, torch_rng = random.Random(number), torch.Generator().manual_seed(number)
    layout: Layout = rng.choice(("packed", "padded", "paged", "paged_packed"))
    packs_tokens, packs_keys = (rank == 3 for rank in RANKS[layout])
    count, dtype = rng.choice((0, 1, 2, 3, 9)), rng.choice(dtypes)
    heads, dims = rng.choice((1, 2, 3)), (rng.choice((1, 8, 20)), rng.choice((1, 8, 20)))
    spare, page_size = rng.choice((0, 3)), rng.choice((1, 4, 16))
    tokens = [rng.choice(LENGTHS) for _ in range(count)]
    if layout == "paged":  # the only one that has no numbers of used queries
        tokens = tokens[:1] * count
    keys = [n + rng.choice((0, 1, 30)) for n in tokens]
    most_keys = max(keys, default=0) + spare
    # Gaps between packed tokens and packed keys, and spare rows behind padded ones, where the layout knows them.
    slots = [n + (spare if layout == "packed" else 0) for n in tokens]
    firsts = [sum(slots[:s]) if packs_tokens else 0 for s in range(count + 1)]
    firsts_k = [sum(keys[:s]) + s * spare if packs_keys else 0 for s in range(count + 1)]
    rows = firsts[-1] + spare if packs_tokens else max(tokens, default=0) + (spare if layout == "padded" else 0)
    pages_each = -(-most_keys // page_size)
    pages = count * pages_each + rng.choice((0, 2))
    table = torch.randperm(pages, generator=torch_rng)[: count * pages_each].view(count, pages_each).int()
    entries, entry_rows = (1, firsts_k[-1]) if packs_keys else (count, most_keys)
    if layout.startswith("paged"):
        entries, entry_rows = pages, page_size

    def integers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=rng.choice((torch.int32, torch.int64)), device=DEVICE)

    sequences = None
    if is_wrong:
        tokens = [min(n + rng.choice((0, 9)), slots[s] if packs_tokens else rows) for s, n in enumerate(tokens)]
        keys = [min(n, rng.choice((0, 3, 40))) for n in keys]
        table = table + torch.randint(-3, 4, table.shape, generator=torch_rng).int() * rng.choice((1, 10**8))
    elif layout == "packed":
        used = {"seqlens_q": integers(tokens), "seqlens_k": integers(keys)}
        sequences = Sequences.packed(integers(firsts), integers(firsts_k), **used)
    elif layout == "padded":
        sequences = Sequences.padded(integers(keys), integers(tokens))
    else:
        given = {"cu_seqlens_q": integers(firsts)} if packs_tokens else {}
        sequences = Sequences.paged(table.to(DEVICE), integers(keys), **given)
    bounds = [(firsts[s], tokens[s], firsts_k[s], keys[s]) for s in range(count)]

    def values(shape: tuple[int, ...]) -> Tensor:
        x = torch.randn(shape, generator=torch_rng).to(DEVICE, dtype)
        return STRIDES[rng.choice(tuple(STRIDES))](x) if x.numel() else x

    new = (1, rows) if packs_tokens else (count, rows)
    caches: list[Tensor | None] = [values((entries, entry_rows, heads, d)) for d in dims]
    for x in caches:
        assert x is not None
        x.masked_fill_(torch.rand(x.shape, generator=torch_rng).to(DEVICE) < 0.3, torch.nan)
    k, v = (values((*new, heads, d)) for d in dims)
    if rng.random() < 0.15:  # a cache of one kind
        caches, v = [caches[0], None], None
    in_pages = table.to(DEVICE) if layout.startswith("paged") else None
    of_device = torch.tensor(bounds, dtype=torch.int32, device=DEVICE).view(count, 4)
    return WriteCall(CacheWrite(*caches, k, v, of_device, in_pages, layout), sequences, f"draw({number}, {is_wrong})")


def targets(write: CacheWrite) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """The tokens, (entry, row) of k, that go to each (entry, row) of the caches: one each, unless tables are wrong."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    pages, page_size = write.k_cache.shape[:2]
    for s, (first, tokens, first_k, keys) in enumerate(write.bounds.tolist()):
        for i in range(tokens):
            key = keys - tokens + i
            if key < 0:
                continue
            place = (0, first_k + key) if write.packs_keys else (s, key)
            if write.block_table is not None:
                page = int(write.block_table[s, key // page_size])
                place = (min(max(page, 0), pages - 1), key % page_size)
            found.setdefault(place, []).append((0, first + i) if write.packs_tokens else (s, i))
    return found


def assert_written(call: WriteCall, writer: Writer) -> None:
    """Every value of the caches is what it was, or that of a token that goes there; so is all memory around them."""
    write = call.write
    pairs = [pair for pair in ((write.k_cache, write.k), (write.v_cache, write.v)) if pair[0] is not None]
    before = [_storage(cache).clone() for cache, _ in pairs]
    wanted = targets(write)
    writer(write)
    for (cache, new), old in zip(pairs, before, strict=True):
        same = old.as_strided(cache.shape, cache.stride(), cache.storage_offset())
        for (entry, row), tokens in wanted.items():
            found = cache[entry, row]
            # Value by value: where wrong tables send two tokens to one place, a GPU writes them there side by side.
            of_a_token = torch.stack([found == new[token] for token in tokens]).any(0)
            assert of_a_token.all(), f"{call.told}: {entry, row} has another"
            same[entry, row] = found
        # Bits, since what nobody writes is NaN in part.
        assert torch.equal(_bits(_storage(cache)), _bits(old)), f"{call.told}: written where nothing goes"


def _storage(x: Tensor) -> Tensor:
    """All memory of a tensor, as a vector."""
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def _bits(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
