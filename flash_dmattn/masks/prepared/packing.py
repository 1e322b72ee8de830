"""Packing in plain PyTorch, on any device: bits, tile classes, tile lists and key sets; the oracle of the kernels.

`triton_kernels/mask_pack.py` offers `pack_mask`, `list_tiles` and `key_set` with these signatures and these results,
bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...problem import Band
from ..arguments import pad

TILE = 128
WORD = 32
TILE_WORDS = TILE // WORD
EMPTY, PARTIAL, FULL = 0, 1, 2

# Elements packed at once: as many bytes of dense rows, and twice that in temporaries.
CHUNK_ELEMENTS = 1 << 24

# Multiplied by this, eight bools that are read as one little-endian integer have their bits in order in the top byte.
# Byte k is moved by 56 - 7k bits. No two of the 64 partial products meet, so nothing is carried.
GATHER_EIGHT = 0x0102040810204080


# Tiles in the order in which kernels walk them: row_lists, col_lists (see `TileMask`).
TileLists = tuple[torch.Tensor, torch.Tensor]

# The keys that a mask without query dim keeps: kept, count, prefix (see `KeyMask`).
KeySet = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def tiles(length: int) -> int:
    """Count the tiles that cover a length."""
    return -(-length // TILE)


def pack_words(rows: torch.Tensor) -> torch.Tensor:
    """Pack bool rows (..., Lk) as bits: int32 (..., 4 * ceil(Lk / 128)), bit j % 32 of word j // 32; padding is 0."""
    padded = pad(rows, (0, -rows.size(-1) % TILE)).contiguous()
    # A contiguous tensor may still start between two words, or have odd strides where a size is 1.
    if padded.storage_offset() % 8 or any(stride % 8 for stride in padded.stride()[:-1]):
        padded = padded.clone(memory_format=torch.contiguous_format)
    eights = padded.view(torch.int64) * GATHER_EIGHT >> 56
    return eights.to(torch.uint8).view(torch.int32)


def unpack_words(words: torch.Tensor, seqlen_k: int) -> torch.Tensor:
    """Undo `pack_words`: bool (..., seqlen_k)."""
    eights = words.view(torch.uint8)[..., None] >> torch.arange(8, dtype=torch.uint8, device=words.device)
    return (eights.flatten(-2)[..., :seqlen_k] & 1).bool()


def pack_tree(tree: torch.Tensor) -> torch.Tensor:
    """Pack bool trees (S or 1, n, n) as bits: int32 (S or 1, n, ceil(n / 32)), in the order of `pack_words`."""
    # `pack_words` asks where tensors start in memory, which torch.compile cannot trace.
    words = pad(tree, (0, -tree.shape[2] % WORD)).unflatten(2, (-1, WORD)).long()
    shifts = torch.arange(WORD, device=tree.device)
    return (words << shifts).sum(3).to(torch.int32)  # where bit 31 is set, the lower half of an int64


def unpack_tree(bits: torch.Tensor) -> torch.Tensor:
    """Undo `pack_tree`: bool (S or 1, n, n)."""
    return unpack_words(bits, bits.shape[1])


def band_words(start: int, stop: int, seqlen_k: int, band: Band | None, device: torch.device) -> torch.Tensor:
    """Return the bits that a band leaves of all-True rows `start` to `stop`: int32 (stop - start, words)."""
    first = torch.arange(0, tiles(seqlen_k) * TILE, WORD, device=device)
    rows = torch.arange(start, stop, device=device)[:, None]
    if band is None:
        low, high = torch.zeros_like(rows), torch.full_like(rows, seqlen_k)
    else:
        low, high = rows + band.low, (rows + (band.high + 1)).clamp(max=seqlen_k)
    ones_below = [1 << (limit - first).clamp(0, WORD) for limit in (low, torch.maximum(low, high))]
    return (ones_below[1] - ones_below[0]).to(torch.int32)


def pack_rows(
    words_of: Callable[[int, int], torch.Tensor],
    shape: tuple[int, int, int, int],
    band: Band | None,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make bits (Bm, Hm, Lq, words) and classes of a mask that is known by rows, with the band folded in.

    `words_of(start, stop)` returns what `pack_words` makes of these rows. It is called for chunks of rows, so that
    little beside the result is allocated.
    """
    batch, num_heads, seqlen_q, seqlen_k = shape
    bits = torch.empty(batch, num_heads, seqlen_q, tiles(seqlen_k) * TILE_WORDS, dtype=torch.int32, device=device)
    step = max(1, CHUNK_ELEMENTS // max(1, batch * num_heads * seqlen_k))
    # A compiler would bind the sizes by the number of chunks.
    starts = (0,) if torch.compiler.is_compiling() else range(0, seqlen_q if bits.numel() else 0, step)
    for start in starts:
        stop = seqlen_q if torch.compiler.is_compiling() else min(start + step, seqlen_q)
        words = words_of(start, stop)
        bits[:, :, start:stop] = words if band is None else words & band_words(start, stop, seqlen_k, band, device)
    return bits, classify(bits)


def pack_mask(mask: torch.Tensor, band: Band | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Make bits and classes of a bool mask (Bm, Hm, Lq, Lk) of any strides, with the band folded in."""
    batch, num_heads, seqlen_q, seqlen_k = mask.shape
    shape = (batch, num_heads, seqlen_q, seqlen_k)
    return pack_rows(lambda start, stop: pack_words(mask[:, :, start:stop]), shape, band, mask.device)


def classify(bits: torch.Tensor) -> torch.Tensor:
    """Classify every tile of packed rows (..., Lq, words): uint8 (..., Tq, Tk). Missing rows forbid nothing."""
    tiles_k = bits.size(-1) // TILE_WORDS
    missing = -bits.size(-2) % TILE
    seen = (bits != 0).unflatten(-1, (tiles_k, TILE_WORDS)).any(-1)
    full = (bits == -1).unflatten(-1, (tiles_k, TILE_WORDS)).all(-1)
    tiles_q = tiles(bits.size(-2))
    seen = pad(seen, (0, 0, 0, missing), value=False).unflatten(-2, (tiles_q, TILE)).any(-2)
    full = pad(full, (0, 0, 0, missing), value=True).unflatten(-2, (tiles_q, TILE)).all(-2)
    return seen.to(torch.uint8) + full


def list_tiles(classes: torch.Tensor) -> TileLists:
    """List the tiles of a class table uint8 (Bm, Hm, Tq, Tk), along its rows and along its columns."""
    return list_rows(classes), list_rows(classes.transpose(-1, -2))


def list_rows(classes: torch.Tensor) -> torch.Tensor:
    """List the tiles along the rows (..., tiles) of a class table: int32 (..., 2 + tiles)."""
    order = (FULL - classes).argsort(dim=-1, stable=True).to(torch.int32)
    counts = [(classes == kind).sum(-1, keepdim=True, dtype=torch.int32) for kind in (FULL, PARTIAL)]
    return torch.cat([*counts, order], dim=-1).contiguous()


def key_set(mask: torch.Tensor) -> KeySet:
    """Return (kept, count, prefix) of a bool mask (Bm, Hm, 1, Lk), any strides."""
    flags = mask[:, :, 0].contiguous()  # what follows keeps the strides it is given
    seqlen_k = flags.size(-1)
    prefix = pad(flags.cumsum(-1, dtype=torch.int32), (1, 0))
    count = prefix[..., -1].clone(memory_format=torch.contiguous_format)  # of one head it would be a view
    order = flags.logical_not().to(torch.uint8).argsort(dim=-1, stable=True).to(torch.int32)
    kept = order.masked_fill_(torch.arange(seqlen_k, device=mask.device) >= count[..., None], seqlen_k)
    return kept, count, prefix


def count_bits(bits: torch.Tensor) -> torch.Tensor:
    """Count the bits that are set in all words together: int64 scalar tensor."""
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for x in bits.flatten().split(max(1, CHUNK_ELEMENTS // 4)):
        # Pairs, nibbles, bytes, then all four bytes at once: Warren, "Hacker's Delight", 2002, section 5-1.
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        total += (x * 0x01010101 >> 24).sum(dtype=torch.int64)
    return total
