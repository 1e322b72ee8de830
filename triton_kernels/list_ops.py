"""Device functions of attention over lists: each query, or block of queries, has a list of its keys or blocks of keys.

A row of lists has QUERIES queries of one key-value head. Its entries are blocks of KEYS_EACH keys, in ascending order,
each once. A place is one key of one entry: place // KEYS_EACH is the entry.

The rows of a tile, its members, are the queries of a row of lists, each for all heads of the group. So keys are loaded
once for a group. Member n has query n // GROUP and head n % GROUP. The members are split over PARTS programs.

Slots are columns of the values, which are in the order of the caller's entries.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .bias_forms import KEY_BIAS, NO_BIAS
from .tile_ops import LOG2E, entry_of, in_band, shared_head, split_lse

# How many values there are: none, one for each entry, one also for each query head, one also for each query of a row of
# lists.
NO_VALUES: tl.constexpr = tl.constexpr(0)
OF_ENTRIES: tl.constexpr = tl.constexpr(1)
OF_HEADS: tl.constexpr = tl.constexpr(2)
OF_QUERIES: tl.constexpr = tl.constexpr(3)


class Lists(NamedTuple):
    """Offsets of the lists of an owner, a key-value head of an entry of the batch: `batch` and `head` count rows.

    A head has `rows` rows of `most` entries. `repeat` and `entries` are as in `BiasStrides`.
    """

    batch: int
    head: int
    rows: int
    most: int
    repeat: int
    entries: int


@triton.jit
def row_of_lists(b, h_k, row, lists):
    """Return the index of a row among the rows of all lists."""
    return entry_of(b, lists) * lists.batch + h_k.to(tl.int64) * lists.head + row


@triton.jit
def members_of(
    part, row, h_k, shape, BLOCK_M: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr
):  # fmt: skip
    """Return query and head of each member of a part, and whether there is such a member."""
    member = part * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = row * QUERIES + member // GROUP
    if QUERIES == 1 and GROUP % BLOCK_M == 0:
        row_ok = tl.full([BLOCK_M], True, tl.int1)  # so that loads have no mask
    else:
        row_ok = (member < GROUP * QUERIES) & (rows < shape.seqlen_q)
    return rows, h_k * GROUP + member % GROUP, row_ok


@triton.jit
def load_members(
    x, strides, b, rows, h, row_ok, dims, num_dims, PAD: tl.constexpr
):  # fmt: skip
    """Load the rows of members of a (B, H, L, D) tensor; zero where there is none."""
    at = x + b * strides.batch + h.to(tl.int64) * strides.head + rows.to(tl.int64) * strides.row
    inside = row_ok[:, None]
    if PAD:
        inside = inside & (dims < num_dims)[None, :]
    return tl.load(at[:, None] + dims[None, :], mask=inside, other=0.0)


@triton.jit
def load_keys(
    head, stride, keys, key_ok, dims, num_dims, PAD: tl.constexpr, WIDE: tl.constexpr, KEYS_EACH: tl.constexpr
):  # fmt: skip
    """Load the rows of keys of one head.

    Keys of a block that are hidden are zero, so that NaN in them reaches no product. Single keys are all visible.
    """
    if WIDE:
        at = keys.to(tl.int64) * stride
    else:
        at = keys * stride
    at = head + at[:, None] + dims[None, :]
    if KEYS_EACH == 1:  # a mask for each row would cost a third of all instructions of a forward pass
        if PAD:
            return tl.load(at, mask=(dims < num_dims)[None, :], other=0.0)
        else:
            return tl.load(at)
    else:
        inside = key_ok[:, None]
        if PAD:
            inside = inside & (dims < num_dims)[None, :]
        return tl.load(at, mask=inside, other=0.0)


@triton.jit
def keys_at(
    entries, start, end, row, shape,
    BLOCK_N: tl.constexpr, QUERIES: tl.constexpr, KEYS_EACH: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Return the entries of BLOCK_N places from `start` on, their keys, and whether there is a key.

    A place beyond the end has the last single key again, so that loads need no mask. Lists of single keys for one query
    are within its band. For blocks of keys and one query the result includes the band, otherwise `members_see` applies
    it. The entry is one number if one entry has all BLOCK_N places.
    """
    place = start + tl.arange(0, BLOCK_N)
    if KEYS_EACH == 1:
        entry = tl.minimum(place, end - 1)
        keys = tl.load(entries + entry)
    elif KEYS_EACH >= BLOCK_N:
        entry = start // KEYS_EACH
        keys = tl.load(entries + entry) * KEYS_EACH + start % KEYS_EACH + tl.arange(0, BLOCK_N)
    else:
        entry = place // KEYS_EACH
        keys = tl.load(entries + entry, mask=place < end, other=0) * KEYS_EACH + place % KEYS_EACH
    key_ok = place < end
    if KEYS_EACH > 1:
        if QUERIES == 1 and (LEFT or RIGHT):
            key_ok = key_ok & in_band(row, keys, shape, LEFT, RIGHT)
        else:
            key_ok = key_ok & (keys < shape.seqlen_k)
    return entry, keys, key_ok


@triton.jit
def members_see(
    s, rows, keys, key_ok, shape, QUERIES: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr
):  # fmt: skip
    """Set scores of members to -inf where there is no key, or the band hides it."""
    allowed = key_ok[None, :]
    if QUERIES > 1 and (LEFT or RIGHT):
        allowed = allowed & in_band(rows[:, None], keys[None, :], shape, LEFT, RIGHT)
    return tl.where(allowed, s, float("-inf"))


@triton.jit
def dot_rows(x, x_rest, y, y_rest, REST: tl.constexpr, PRECISION: tl.constexpr):
    """Multiply rows of two matrices whose columns are in two parts, the second REST wide."""
    s = tl.dot(x, tl.trans(y), input_precision=PRECISION)
    if REST > 0:
        s = tl.dot(x_rest, tl.trans(y_rest), s, input_precision=PRECISION)
    return s


@triton.jit
def slots_at(
    slots, entry, key_ok, SLOTS: tl.constexpr, BLOCK_N: tl.constexpr, KEYS_EACH: tl.constexpr
):  # fmt: skip
    """Return the slots of entries; without SLOTS an entry is its own slot."""
    if not SLOTS:
        return entry
    elif KEYS_EACH == 1 or KEYS_EACH >= BLOCK_N:
        return tl.load(slots + entry)
    else:
        return tl.load(slots + entry, mask=key_ok, other=0)


@triton.jit
def values_of(values, strides, b, h_k, row, rows, h, GROUP: tl.constexpr, VALUES: tl.constexpr):
    """Return the address of the first value of a row of lists, or of each of its members."""
    if VALUES == NO_VALUES:
        return 0
    elif VALUES == OF_ENTRIES:
        return shared_head(values, strides, b, h_k * GROUP) + row.to(tl.int64) * strides.row
    elif VALUES == OF_HEADS:
        return shared_head(values, strides, b, h) + row.to(tl.int64) * strides.row
    else:
        return shared_head(values, strides, b, h) + rows.to(tl.int64) * strides.row


@triton.jit
def add_values(
    x, factor, head, stride, slot, key_ok, row_ok, VALUES: tl.constexpr, BLOCK_N: tl.constexpr, KEYS_EACH: tl.constexpr
):  # fmt: skip
    """Compute scores from the result of `scaled`: x * factor plus the values of a step's entries, rounded once."""
    if VALUES == OF_ENTRIES:
        if KEYS_EACH == 1:
            return tl.fma(x, factor, tl.load(head + slot * stride).to(tl.float32)[None, :])
        elif KEYS_EACH >= BLOCK_N:
            return tl.fma(x, factor, tl.load(head + slot * stride).to(tl.float32))
        else:
            return tl.fma(x, factor, tl.load(head + slot * stride, mask=key_ok, other=0.0).to(tl.float32)[None, :])
    elif KEYS_EACH >= BLOCK_N:
        return tl.fma(x, factor, tl.load(head + slot * stride, mask=row_ok, other=0.0).to(tl.float32)[:, None])
    else:
        at = head[:, None] + (slot * stride)[None, :]
        return tl.fma(x, factor, tl.load(at, mask=row_ok[:, None] & key_ok[None, :], other=0.0).to(tl.float32))


@triton.jit
def bias_of_keys(bias, strides, b, h_k, h, GROUP: tl.constexpr, BIAS: tl.constexpr):
    """Return the address of a bias per key: one for all members with KEY_BIAS, otherwise one for each member."""
    if BIAS == NO_BIAS:
        return 0
    elif BIAS == KEY_BIAS:
        return shared_head(bias, strides, b, h_k * GROUP)
    else:
        return shared_head(bias, strides, b, h)


@triton.jit
def add_key_bias(x, factor, head, stride, keys, key_ok, row_ok, BIAS: tl.constexpr):
    """Compute scores as `add_values` does, with a bias per key. With a factor of 1 it adds to scores."""
    if BIAS == NO_BIAS:
        return x * factor
    elif BIAS == KEY_BIAS:
        values = tl.load(head + keys.to(tl.int64) * stride, mask=key_ok, other=0.0).to(tl.float32)
        return tl.fma(x, factor, values[None, :])
    else:
        at = head[:, None] + (keys.to(tl.int64) * stride)[None, :]
        return tl.fma(x, factor, tl.load(at, mask=row_ok[:, None] & key_ok[None, :], other=0.0).to(tl.float32))


@triton.jit
def lse_of_rows(natural, BIASED: tl.constexpr):
    """Turn lse of rows into the two numbers that `exponents_of_rows` takes.

    An empty row has -inf, and gets +inf, so that p = exp(s - lse) is 0 and not NaN.
    """
    great, small = split_lse(natural)
    if not BIASED:
        great = great * LOG2E
    return tl.where(great == float("-inf"), float("inf"), great), small * -LOG2E


@triton.jit
def popcount(x):
    """Count the bits of int32. A shift of a negative number brings ones, which the masks remove."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + ((x >> 4) & 0x0FFFFFFF)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24) & 63


@triton.jit
def places_in_rows(words, before, offsets, owner, keys, key_ok, local, shape, WORDS: tl.constexpr):
    """Return the row of dk and dv for each key of the `local`-th row of lists of a chunk.

    All rows of a key are consecutive. A key has WORDS words of 32 bits, one bit for each row of lists of the chunk.
    `before` counts the bits of earlier words, `offsets` the rows of earlier keys.
    """
    key = owner.to(tl.int64) * shape.seqlen_k + keys
    at = key * WORDS + local // 32
    word = tl.load(words + at, mask=key_ok, other=0)
    place = tl.load(offsets + key, mask=key_ok, other=0) + tl.load(before + at, mask=key_ok, other=0)
    return (place + popcount(word & ((1 << (local % 32)) - 1))).to(tl.int64)


@triton.jit
def store_row(at, row, dims, key_ok, num_dims, PAD: tl.constexpr):
    """Store some columns of rows, in the dtype of the rows."""
    inside = key_ok[:, None]
    if PAD:
        inside = inside & (dims < num_dims)[None, :]
    tl.store(at[:, None] + dims[None, :], row.to(at.dtype.scalar.element_ty), mask=inside)


@triton.jit
def store_value_gradients(
    at, sums, carried, slots, slot, start, end, key_ok, row_ok, AXIS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KEYS_EACH: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Store the gradients of a step's values.

    `sums` has a gradient for each place, over all members (AXIS 0), or for each member and place (AXIS 1). If an entry
    spans several steps, `carried` has the sum of the steps so far, which each step stores.
    """
    if KEYS_EACH >= BLOCK_N:
        carried = tl.where(start % KEYS_EACH == 0, 0.0, carried) + tl.sum(sums, AXIS)
        if AXIS == 0:
            tl.store(at + slot, carried.to(at.dtype.scalar.element_ty))
        else:
            tl.store(at + slot, carried.to(at.dtype.scalar.element_ty), mask=row_ok)
    else:
        if KEYS_EACH > 1:
            EACH: tl.constexpr = BLOCK_N // KEYS_EACH
            entry = start // KEYS_EACH + tl.arange(0, EACH)
            key_ok = entry * KEYS_EACH < end
            slot = slots_at(slots, entry, key_ok, SLOTS, EACH, 1)
            if AXIS == 0:
                sums = tl.sum(tl.reshape(sums, (EACH, KEYS_EACH)), 1)
            else:
                sums = tl.sum(tl.reshape(sums, (BLOCK_M, EACH, KEYS_EACH)), 2)
        if AXIS == 0:
            tl.store(at + slot, sums.to(at.dtype.scalar.element_ty), mask=key_ok)
        else:
            inside = row_ok[:, None] & key_ok[None, :]
            tl.store(at[:, None] + slot[None, :], sums.to(at.dtype.scalar.element_ty), mask=inside)
    return carried
