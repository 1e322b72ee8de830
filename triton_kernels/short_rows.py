"""Calls of so few keys that a tile holds whole rows: the device functions that their kernels share.

Such a row needs no running maximum, and its delta = rowsum(p * dp) needs no out. A program owns one tile of the bias
and walks the heads and entries that read it, so that the tile stays in registers.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .tile_ops import BAND, DENSE, DENSE_ROW, LOG2E, NO_BIAS, TILES, bits_of, in_band, load_bias, reader_of, shared_head


class Walk(NamedTuple):
    """Programs of a kernel: `owners_b` x `owners_h` heads of a bias, `tiles` each, and `chunk` heads at a time.

    `repeat` entries of the batch in a row read one of the bias.
    """

    owners_b: int
    owners_h: int
    tiles: int
    chunk: int
    repeat: int


@triton.jit
def walk_of(walk, shape, program):
    """What a program walks: its owner's entry and slot, the tile, members from begin to end, and of an entry the first
    head and their number.

    Owners come first, so that programs that run side by side read the same entries.
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
    """The entry and the head that are the given member of a walk."""
    b = reader_of(owner_b, member // members_h, walk.repeat, walk.owners_b)
    return b.to(tl.int64), first_head + member % members_h


@triton.jit
def base_scores(
    bias, strides, b, h, first, first_key, rows, keys, shape,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """What every head of a walk adds to its products, in base 2: the bias, and -inf outside the band or the tensors."""
    base = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if BIAS != NO_BIAS:
        tile = load_bias(bias, strides, b, h, first, first_key, rows, keys, shape, BLOCK_M, BLOCK_N, False, WIDE)
        base = tile.to(tl.float32) * LOG2E
    return tl.where(in_band(rows[:, None], keys[None, :], shape, LEFT, RIGHT), base, float("-inf"))


@triton.jit
def load_dense(mask, access, b, h, rows, keys, shape, MASK: tl.constexpr, WIDE: tl.constexpr):
    """The bools of one head, (queries or 1, keys); of other masks nothing.

    A walk loads those of its next head before it computes one: unlike operands of products, which Triton copies ahead,
    they would be waited for.
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
    MASK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Scores of one head, -inf where its mask leaves them out."""
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
