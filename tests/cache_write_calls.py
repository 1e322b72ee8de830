"""Writes to caches drawn at random, and what has to come of them, token by token."""

from __future__ import annotations

import random
from typing import NamedTuple

import sequence_calls
import torch
from cases import DEVICE
from layouts import LAYOUTS as STRIDES
from torch import Tensor

from flash_dmattn import Sequences
from flash_dmattn.sequences.cache_writes import CacheWrite, Writer

LENGTHS = (0, 1, 2, 5, 17, 33)
DTYPES = (torch.float32, torch.float16)


class WriteCall(NamedTuple):
    """One write as a writer receives it, and the sequences of a caller."""

    write: CacheWrite
    sequences: Sequences
    told: str


def draw(number: int, is_wrong: bool = False, dtypes: tuple[torch.dtype, ...] = DTYPES) -> WriteCall:
    """The write of a number, to the keys of a call of `sequence_calls`; wrong ones have tables that a CPU refuses."""
    rng, torch_rng = random.Random(number), torch.Generator().manual_seed(number)
    layout, longest = rng.choice(("packed", "padded", "paged", "paged_packed")), rng.choice(LENGTHS)
    # Keys count the new tokens, which may be 7 more where the layout does not know how many of a slot are used.
    fewest = longest + 7 * layout.startswith("paged")
    lengths_k = LENGTHS if is_wrong else (fewest, fewest + 1, fewest + 30)
    lengths = tuple(n for n in LENGTHS if n <= longest)
    call = sequence_calls.draw(number, layout, lengths, dtypes, (1, 8, 20), lengths_k, is_loose=is_wrong)
    table = call.sequences.block_table
    if table is not None:
        table = table.int().contiguous()
        if is_wrong:
            table = table + torch.randint(-3, 4, table.shape, generator=torch_rng).to(table) * rng.choice((1, 10**8))

    def laid(x: Tensor, is_packed: bool) -> Tensor:
        x = x[None] if is_packed else x
        return STRIDES[rng.choice(tuple(STRIDES))](x) if x.numel() else x

    def random_like(x: Tensor) -> Tensor:
        return torch.randn(*call.q.shape[:-2], *x.shape[-2:], generator=torch_rng).to(x)

    keys = [
        x.masked_fill(torch.rand(x.shape, generator=torch_rng).to(DEVICE) < 0.3, torch.nan) for x in (call.k, call.v)
    ]
    k_cache, v_cache = (laid(x, call.packs_keys) for x in keys)
    k, v = (laid(random_like(x), call.packs_queries) for x in keys)
    bounds = torch.tensor(call.lengths, dtype=torch.int32, device=DEVICE).view(-1, 4)
    tensors = (k_cache, v_cache, k, v) if rng.random() > 0.15 else (k_cache, None, k, None)  # a cache of one kind
    return WriteCall(CacheWrite(*tensors, bounds, table, layout), call.sequences, f"draw({number}, {is_wrong})")


def targets(write: CacheWrite) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """The tokens, (entry, row) of k, that go to each (entry, row) of the caches: one each, unless tables are wrong."""
    places: dict[tuple[int, int], list[tuple[int, int]]] = {}
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
            places.setdefault(place, []).append((0, first + i) if write.packs_tokens else (s, i))
    return places


def assert_written(call: WriteCall, writer: Writer) -> None:
    """Every value of the caches is as before, or the value of a token that goes there; so is all memory around them."""
    write = call.write
    pairs = [pair for pair in ((write.k_cache, write.k), (write.v_cache, write.v)) if pair[0] is not None]
    before = [_storage(cache).clone() for cache, _ in pairs]
    wanted = targets(write)
    writer(write)
    for (cache, new), old in zip(pairs, before, strict=True):
        same = old.as_strided(cache.shape, cache.stride(), cache.storage_offset())
        for (entry, row), tokens in wanted.items():
            now = cache[entry, row]
            # Value by value: where wrong tables send two tokens to one place, a GPU writes them there side by side.
            is_token = torch.stack([now == new[token] for token in tokens]).any(0)
            assert is_token.all(), f"{call.told}: {entry, row} has another"
            same[entry, row] = now
        # Bits, since what nobody writes is NaN in part.
        assert torch.equal(_bits(_storage(cache)), _bits(old)), f"{call.told}: written where nothing goes"


def _storage(x: Tensor) -> Tensor:
    """All memory of a tensor, as a vector."""
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def _bits(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
