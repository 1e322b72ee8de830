"""Device functions of the short-row kernels, for calls with whole rows in one tile.

A whole row needs no running maximum, and its delta = rowsum(p * dp) needs no out. A program owns one tile of the bias
and loops over the heads that use it, of all batch entries; this loop is a walk. So the tile stays in registers.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .bias_forms import ROW_BIAS, load_bias
from .tile_ops import BAND, DENSE, DENSE_ROW, TILES, bits_of, in_band, reader_of, shared_head


class Walk(NamedTuple):
    """How the work is split over programs: `owners_b` x `owners_h` heads of the bias, `tiles` tiles of each, in chunks.

    A program visits a chunk of `chunk` heads. `repeat` consecutive entries of the batch use one entry of the bias.
    """

    owners_b: int
    owners_h: int
    tiles: int
    chunk: int
    repeat: int


@triton.jit
def walk_of(walk, shape, program):
    """Return the work of a program: (entry of its owner, slot, tile, begin, end, first head, heads of an entry).

    Its heads are the members `begin` to `end`. Owners come first in the order of programs, so that programs that run at
    the same time load the same entries.
    """
    owners = walk.owners_b * walk.owners_h
    owner = program % owners
    tile = program // owners % walk.tiles
    members_h = shape.num_heads // walk.owners_h
    members = shape.batch // walk.owners_b * members_h
    begin = program // owners // walk.tiles * walk.chunk
    return (
        owner // walk.owners_h,
        program // owners // walk.tiles * owners + owner,
        tile,
        begin,
        tl.minimum(begin + walk.chunk, members),
        owner % walk.owners_h * members_h,
        members_h,
    )


@triton.jit
def head_of(member, owner_b, first_head, members_h, walk):
    """Return the entry and the head of a member of a walk."""
    b = reader_of(owner_b, member // members_h, walk.repeat, walk.owners_b)
    return b.to(tl.int64), first_head + member % members_h


@triton.jit
def base_scores(
    bias, strides, b, h, first, first_key, rows, keys, shape,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BIAS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Make the tile that is added to the scores of a walk: the bias, and -inf outside the tensors."""
    base = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if BIAS > ROW_BIAS:
        tile = load_bias(bias, strides, b, h, first, first_key, rows, keys, shape, BLOCK_M, BLOCK_N, False, WIDE)
        base = tile.to(tl.float32)
    return tl.where(in_band(rows[:, None], keys[None, :], shape, False, False), base, float("-inf"))


@triton.jit
def load_dense(mask, access, b, h, rows, keys, shape, MASK: tl.constexpr, WIDE: tl.constexpr):
    """Load the bools of one head, (queries or 1, keys); masks in other forms have none.

    The bools of the next head are loaded before the current one is computed, because Triton prefetches only operands of
    products.
    """
    if MASK == DENSE or MASK == DENSE_ROW:
        head = shared_head(mask, access, b, h)
        if WIDE:
            rows, keys = rows.to(tl.int64), keys.to(tl.int64)
        at = (keys * access.key)[None, :]
        inside = (keys < shape.seqlen_k)[None, :]
        if MASK == DENSE:
            at += (rows * access.row)[:, None]
            inside &= (rows < shape.seqlen_q)[:, None]
        return tl.load(head + at, mask=inside, other=0)
    else:
        return tl.zeros([1, 1], tl.int1)


@triton.jit
def masked(
    s, dense, mask, stop, access, b, h, first_key, rows, keys, shape,
    MASK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Set scores of one head to -inf where its mask or the band hides them: a sum with -inf would keep NaN and inf."""
    if LEFT or RIGHT:
        s = tl.where(in_band(rows[:, None], keys[None, :], shape, LEFT, RIGHT), s, float("-inf"))
    if MASK == DENSE or MASK == DENSE_ROW:
        s = tl.where(dense, s, float("-inf"))
    elif MASK != BAND:
        head = shared_head(mask, access, b, h)
        if MASK == TILES:
            allowed = bits_of(head, first_key, rows, shape.seqlen_q, access.row, BLOCK_M, BLOCK_N, 1)
        else:
            inside = keys < shape.seqlen_k
            start = tl.load(head + keys, mask=inside, other=0)
            end = tl.load(shared_head(stop, access, b, h) + keys, mask=inside, other=0)
            allowed = (rows[:, None] >= start[None, :]) & (rows[:, None] < end[None, :])
        s = tl.where(allowed, s, float("-inf"))
    return s
