"""Device functions that the attention kernels share: which tiles a program visits, and what a tile holds."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
# The least number of fp32, where running maxima begin: not at -inf, because -inf - -inf is NaN in a row without keys.
LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)
# Its exponential is 0, in base 2 and in base e.
LEAST_EXPONENT: tl.constexpr = tl.constexpr(-1000.0)

# How a kernel reads a mask. BAND: there is none but the band. TILES: lists of 128 x 128 tiles, and bits. KEYS: the
# positions of the kept keys. DENSE: a bool tensor as it is. DENSE_ROW, for short rows: a bool tensor with one row for
# all queries. BOUNDS, for short rows: the interval of queries that see each key. TREE, with sequences: bits of new
# tokens.
BAND: tl.constexpr = tl.constexpr(0)
TILES: tl.constexpr = tl.constexpr(1)
KEYS: tl.constexpr = tl.constexpr(2)
DENSE: tl.constexpr = tl.constexpr(3)
DENSE_ROW: tl.constexpr = tl.constexpr(4)
BOUNDS: tl.constexpr = tl.constexpr(5)
TREE: tl.constexpr = tl.constexpr(6)

# A softcap is False, True, or this: tanh to the last bits of fp32, which cost eight operations a score.
EXACT_CAP: tl.constexpr = tl.constexpr(2)

# The loops of a walk, in their order. NEAR: where a bias has flat blocks (`flat_blocks`), the others that need no mask
# check. INSIDE: the rest that need none. EDGE: blocks that need one.
NEAR: tl.constexpr = tl.constexpr(-1)
INSIDE: tl.constexpr = tl.constexpr(0)
EDGE: tl.constexpr = tl.constexpr(1)

TILE: tl.constexpr = tl.constexpr(128)  # queries and keys of a tile of a packed mask


class Shape(NamedTuple):
    """Sizes of a call and its band; `left` or `right` of -1 leaves that side unlimited."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    group: int
    head_dim: int
    head_dim_v: int
    left: int
    right: int


class Strides(NamedTuple):
    """Strides of a (B, L, H, D) tensor whose last stride is 1."""

    batch: int
    row: int
    head: int


class BiasStrides(NamedTuple):
    """Strides of a bias, or of a bool mask, which is read the same way; 0 where a dim is broadcast.

    For a tensor descriptor they are steps: 1 where a dim is not broadcast. `group` query heads share one head of the
    tensor. It has `entries` entries, and `repeat` consecutive entries of the batch share one: see `entry_of`.
    """

    batch: int
    head: int
    row: int
    key: int
    group: int
    repeat: int
    entries: int


class MaskStrides(NamedTuple):
    """Strides of the two tensors of a mask, bits and lists, or kept and prefix; 0 where a dim is broadcast.

    `group`, `repeat` and `entries` are as in `BiasStrides`.
    """

    batch: int
    head: int
    row: int
    list_batch: int
    list_head: int
    list_row: int
    group: int
    repeat: int
    entries: int


def cap_of(softcap: float, dtype: torch.dtype) -> bool | int:
    """Return the form of the softcap of a call, as kernels take it."""
    return EXACT_CAP.value if softcap > 0 and dtype == torch.float32 else softcap > 0


@triton.jit
def entry_of(b, strides):
    """Return the entry of a mask or a bias that entry b of the batch reads."""
    return b // strides.repeat % strides.entries


@triton.jit
def reader_of(entry, number, repeat, entries):
    """Return the `number`-th entry of the batch that reads an entry of a mask or a bias: the inverse of `entry_of`."""
    return (number // repeat * entries + entry) * repeat + number % repeat


@triton.jit
def load_tile(
    x,
    strides,
    b,
    h,
    first,
    rows,
    num_rows,
    dims,
    num_dims,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TMA: tl.constexpr,
    WIDE: tl.constexpr,
    CHECK_ROWS: tl.constexpr,
    CHECK_DIMS: tl.constexpr,
    column=0,
):
    """Load rows of one head of a (B, L, H, D) tensor as a (BLOCK, BLOCK_D) tile; zero outside its edges.

    With TMA, x is a descriptor of (B, H, L, D), and the tile begins at row `first` and at `column`. Else it has rows
    `rows` and columns `dims`.
    """
    if TMA:
        return x.load([b.to(tl.int32), h, first, column]).reshape(BLOCK, BLOCK_D)
    else:
        base = x + b * strides.batch + h.to(tl.int64) * strides.head
        if WIDE:
            pointers = base + rows.to(tl.int64)[:, None] * strides.row + dims[None, :]
        else:
            pointers = base + (rows * strides.row)[:, None] + dims[None, :]
        if CHECK_ROWS and CHECK_DIMS:
            return tl.load(pointers, mask=(rows < num_rows)[:, None] & (dims < num_dims)[None, :], other=0.0)
        elif CHECK_ROWS:
            return tl.load(pointers, mask=(rows < num_rows)[:, None], other=0.0)
        elif CHECK_DIMS:
            return tl.load(pointers, mask=(dims < num_dims)[None, :], other=0.0)
        else:
            return tl.load(pointers)


@triton.jit
def load_bools(head, strides, rows, keys, shape):
    """Load the (queries, keys) tile of one head of a bool mask; False outside its edges."""
    at = rows.to(tl.int64) * strides.row + keys.to(tl.int64) * strides.key
    return tl.load(head + at, mask=(rows < shape.seqlen_q) & (keys < shape.seqlen_k), other=0) != 0


@triton.jit
def load_rows_of_heads(x, strides, b, h, rows, keys, shape):
    """Load the (rows, keys) tile of a bias or a mask whose rows are queries of several heads; zero outside it."""
    head = entry_of(b, strides) * strides.batch + (h // strides.group).to(tl.int64) * strides.head
    at = head + rows.to(tl.int64) * strides.row
    inside = (rows < shape.seqlen_q)[:, None] & (keys < shape.seqlen_k)[None, :]
    return tl.load(x + at[:, None] + keys.to(tl.int64)[None, :] * strides.key, mask=inside, other=0)


@triton.jit
def load_vector(base, index, length, stride):
    """Load values of a strided vector in fp32; zero after its end."""
    return tl.load(base + index.to(tl.int64) * stride, mask=index < length, other=0.0).to(tl.float32)


@triton.jit
def shared_head(bias, strides, b, h):
    """Return the first element of the head of a bias, or of a bool mask, that query head h of entry b reads."""
    return bias + entry_of(b, strides) * strides.batch + (h // strides.group).to(tl.int64) * strides.head


@triton.jit
def soft_cap(x, SOFTCAP: tl.constexpr):
    """Compute tanh(x), and its derivative 1 - tanh(x)^2 without cancellation.

    With EXACT_CAP small numbers keep all bits of fp32. Else their error is 2^-24, which 16-bit results do not show.
    """
    e = tl.math.exp2(tl.abs(x) * (-2.0 * LOG2E))  # exp(-2 |x|), which cannot overflow
    t = (1.0 - e) / (1.0 + e)
    slope = 4.0 * e / ((1.0 + e) * (1.0 + e))
    t = tl.where(x < 0, -t, t)
    if SOFTCAP == EXACT_CAP:
        # tanh(x) / x - 1 over z = x^2, of least relative error below |x| = 0.625 (Moshier, Cephes: tanhf).
        z = x * x
        odd = (((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z
        t = tl.where(z < 0.390625, x + x * z * (odd - 3.33332819422e-1), t)
    return t, slope


@triton.jit
def renormalize(p, total, axis: tl.constexpr):
    """Divide p by the sums of its rows."""
    return p / tl.expand_dims(tl.where(total > 0.0, total, 1.0), axis)


@triton.jit
def join_sink(great, small, logits):
    """Add the sinks of rows to their lse from `log_sums`, and return also the share that the keys keep of each row.

    Sinks are natural logarithms; -inf stands for none.
    """
    joint = tl.maximum(great + small, logits)
    joint_or_0 = tl.where(joint == float("-inf"), 0.0, joint)  # -inf - -inf is NaN
    own = (great - joint_or_0) + small
    others = logits - joint_or_0
    top = tl.maximum(own, others)
    top = tl.where(top == float("-inf"), 0.0, top)
    keys = tl.math.exp2((own - top) * LOG2E)
    total = keys + tl.math.exp2((others - top) * LOG2E)
    total = tl.where(total == 0.0, 1.0, total)
    return joint, top + tl.math.log2(total) * LN2, keys / total


@triton.jit
def unit_of(great):
    """Return the unit of what is added to a number: `join_lse` in csrc/sm90/operands.h does the same."""
    is_great = (tl.abs(great) > 2147483648.0) & (tl.abs(great) < float("inf"))
    return tl.where(is_great, tl.abs(great) * (1.0 / 2147483648.0), 1.0)


@triton.jit
def store_lse(lse, great, small, stored):
    """Store lse of rows, which is great + small, in fp32, or in fp64 where there is a bias.

    fp64 holds both numbers up to 2^31. The steps of fp32 beyond are larger than any logarithm of a sum, which is stored
    in the bits below them: rounded to fp32, lse is `great`.
    """
    if lse.dtype.scalar.element_ty == tl.float64:
        wide = great.to(tl.float64) + small.to(tl.float64) * unit_of(great).to(tl.float64)
        tl.store(lse, wide, mask=stored)
    else:
        tl.store(lse, great + small, mask=stored)


@triton.jit
def split_lse(lse):
    """Return the two numbers of an lse that `store_lse` has stored: score - lse is (score - great) - small."""
    great = lse.to(tl.float32)
    if lse.dtype == tl.float64:
        small = (lse - great.to(tl.float64)) / unit_of(great).to(tl.float64)
        return great, tl.where(tl.abs(great) < float("inf"), small, 0.0).to(tl.float32)
    else:
        return great, tl.zeros(lse.shape, tl.float32)


@triton.jit
def lse_less(lse, values):
    """Return lse of rows less a bias of one value per query, in fp32; inf where the row sees no key.

    A row that sees a bias of NaN or inf has an lse of NaN. One of another lse sees no key: its lse is its sink.
    """
    less = lse - values
    if lse.dtype == tl.float64:
        less = less / unit_of(values).to(tl.float64)
    return tl.where((values < float("inf")) | (lse != lse), less.to(tl.float32), float("inf"))


@triton.jit
def load_low_delta(low_delta, delta, at, row_ok):
    """Load `low_rows` of `exponents_of_rows`, and delta: pairs of 64 bits, or delta where the former is unknown.

    A kernel that needs no delta has None for it.
    """
    if low_delta is not None:
        pairs = tl.load(low_delta + at, mask=row_ok, other=0)
        low_rows = pairs.to(tl.int32).to(tl.float32, bitcast=True)
        return low_rows, (pairs >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    elif delta is not None:
        return tl.zeros(at.shape, tl.float32), tl.load(delta + at, mask=row_ok, other=0.0)
    else:
        return tl.zeros(at.shape, tl.float32), tl.zeros(at.shape, tl.float32)


@triton.jit
def band_of_queries(first, last, shape, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Find the keys [lo, hi) that some query of first..last sees, and [lo_full, hi_full) that all of them see."""
    shift = shape.seqlen_k - shape.seqlen_q
    lo = 0
    lo_full = 0
    hi = shape.seqlen_k
    hi_full = shape.seqlen_k
    if LEFT:
        lo = tl.minimum(shape.seqlen_k, tl.maximum(0, first + shift - shape.left))
        lo_full = tl.minimum(shape.seqlen_k, tl.maximum(0, last + shift - shape.left))
    if RIGHT:
        hi = tl.maximum(0, tl.minimum(shape.seqlen_k, last + shift + shape.right + 1))
        hi_full = tl.maximum(0, tl.minimum(shape.seqlen_k, first + shift + shape.right + 1))
    return tl.minimum(lo, hi), lo_full, hi_full, hi


@triton.jit
def band_of_keys(first, last, shape, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Find the queries [lo, hi) that see some key of first..last, and [lo_full, hi_full) that see all of them."""
    shift = shape.seqlen_k - shape.seqlen_q
    lo = 0
    lo_full = 0
    hi = shape.seqlen_q
    hi_full = shape.seqlen_q
    if RIGHT:
        lo = tl.maximum(0, first - shift - shape.right)
        lo_full = tl.maximum(0, last - shift - shape.right)
    if LEFT:
        hi = tl.maximum(0, tl.minimum(shape.seqlen_q, last - shift + shape.left + 1))
        hi_full = tl.maximum(0, tl.minimum(shape.seqlen_q, first - shift + shape.left + 1))
    return tl.minimum(lo, hi), lo_full, hi_full, hi


@triton.jit
def blocks_of(lo, lo_full, hi_full, hi, BLOCK: tl.constexpr):
    """Round a band to blocks: [start, full) and [end, stop) touch an edge of it, [full, end) lie inside."""
    start = lo // BLOCK
    stop = tl.maximum(tl.cdiv(hi, BLOCK), start)
    full = tl.minimum(tl.maximum(tl.cdiv(lo_full, BLOCK), start), stop)
    end = tl.minimum(tl.maximum(hi_full // BLOCK, full), stop)
    return start, full, end, stop


@triton.jit
def mask_head(data, index, strides, b, h, MASK: tl.constexpr):
    """Move data and index of a mask to the head that query head h reads; zeros where there is no mask."""
    if MASK == BAND:
        return 0, 0
    elif MASK == DENSE:
        return shared_head(data, strides, b, h), 0
    elif MASK == TREE:
        return data + entry_of(b, strides) * strides.batch, 0
    else:
        h_m = (h // strides.group).to(tl.int64)
        b_m = entry_of(b, strides)
        data += b_m * strides.batch + h_m * strides.head
        return data, index + b_m * strides.list_batch + h_m * strides.list_head


@triton.jit
def class_at(classes, strides, b, h, tile, first_key):
    """Return where the class of the tile of a mask is that has `first_key` in row `tile` of tiles.

    A list is two counts and then the tiles of one row. A row of classes has as many values as tiles.
    """
    h_m = (h // strides.group).to(tl.int64)
    line = entry_of(b, strides) * strides.list_batch + h_m * strides.list_head + tile * strides.list_row
    return classes + line // strides.list_row * (strides.list_row - 2) + first_key // TILE


@triton.jit
def keys_of_queries(
    first, last, index, strides, shape, MASK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    """List the blocks of keys that queries first..last visit: (walk, start, inside, before, after), for `block_at`.

    `inside` blocks need no mask check; the `before` + `after` blocks at the edges do. With MASK == KEYS blocks are
    blocks of places in `kept`.
    """
    if MASK == TILES:
        row = index + (first // TILE).to(tl.int64) * strides.list_row
        return row, 0, tl.load(row) * (TILE // BLOCK), tl.load(row + 1) * (TILE // BLOCK), 0
    else:
        lo, lo_full, hi_full, hi = band_of_queries(first, last, shape, LEFT, RIGHT)
        if MASK == KEYS:
            lo, lo_full = tl.load(index + lo), tl.load(index + lo_full)
            hi_full, hi = tl.load(index + hi_full), tl.load(index + hi)
        start, full, end, stop = blocks_of(lo, lo_full, hi_full, hi, BLOCK)
        if MASK == DENSE:  # every block needs a mask check
            return index, start, 0, 0, stop - start
        else:
            return index, full, end - full, full - start, stop - end


@triton.jit
def queries_of_keys(
    first,
    last,
    tile,
    is_full_block,
    index,
    strides,
    shape,
    MASK: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List the blocks of queries that see keys first..last, in the form of `keys_of_queries`.

    `tile` is the column of tiles that these keys are in. Without `is_full_block` the block of keys reaches beyond the
    last key, so every block of queries needs a mask check.
    """
    if MASK == TILES:
        column = index + tile.to(tl.int64) * strides.list_row
        return column, 0, tl.load(column) * (TILE // BLOCK), tl.load(column + 1) * (TILE // BLOCK), 0
    else:
        lo, lo_full, hi_full, hi = band_of_keys(first, last, shape, LEFT, RIGHT)
        lo_full = tl.where(is_full_block, lo_full, shape.seqlen_q)
        start, full, end, stop = blocks_of(lo, lo_full, hi_full, hi, BLOCK)
        if MASK == DENSE:
            return index, start, 0, 0, stop - start
        else:
            return index, full, end - full, full - start, stop - end


@triton.jit
def block_at(step, walk, start, inside, before, EDGE: tl.constexpr, MASK: tl.constexpr, BLOCK: tl.constexpr):
    """Return the first place of the block that a walk visits at a step of its inside blocks, or of its EDGE blocks.

    A list is read in the loop itself. Triton's pipeline then prefetches the entry before the tile, at the price of half
    of its stages; carrying the entry from step to step by hand is slower.
    """
    if MASK == TILES:
        SPLIT: tl.constexpr = TILE // BLOCK
        place = step
        if EDGE:
            place += inside
        block = tl.load(walk + 2 + place // SPLIT) * SPLIT + place % SPLIT
    elif EDGE:
        block = start + tl.where(step < before, step - before, inside + step - before)
    else:
        block = start + step
    return tl.multiple_of(block * BLOCK, BLOCK)


@triton.jit
def blocks_in_order(phase: tl.constexpr, low, high, start, inside, before, after):
    """Return the blocks [begin, end) of a phase of an ascending walk that are in [low, high).

    The walk is from `keys_of_queries`. NEAR has the blocks at its left edge, INSIDE the blocks without a mask check,
    EDGE the rest; for a sorted list of tiles, EDGE has the places of the list.
    """
    begin, end = start - before, start
    if phase == INSIDE:
        begin, end = start, start + inside
    if phase == EDGE:
        begin, end = start + inside, start + inside + after
    return tl.minimum(tl.maximum(begin, low), end), tl.maximum(tl.minimum(end, high), begin)


@triton.jit
def places_before(walk, count, tile):
    """Return how many of the first `count` entries of a sorted list of tiles are less than a tile."""
    low = 0
    high = count
    while low < high:
        middle = (low + high) // 2
        is_less = tl.load(walk + 2 + middle) < tile
        low = tl.where(is_less, middle + 1, low)
        high = tl.where(is_less, high, middle)
    return low


@triton.jit
def in_band(rows, keys, shape, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Return whether keys are inside the tensors and the band of rows; the two broadcast against each other."""
    shift = shape.seqlen_k - shape.seqlen_q
    allowed = (keys < shape.seqlen_k) & (rows < shape.seqlen_q)
    if LEFT:
        allowed = allowed & (keys >= rows + (shift - shape.left))
    if RIGHT:
        allowed = allowed & (keys <= rows + (shift + shape.right))
    return allowed


@triton.jit
def in_bounds(data, keys, rows):
    """Return whether rows are in the intervals of keys: 64 bits each, the first row in the low half, the end above."""
    bounds = tl.load(data + keys)
    return (rows >= bounds.to(tl.int32)) & (rows < (bounds >> 32).to(tl.int32))


@triton.jit
def bits_of(
    data, first_key, rows, seqlen_q, stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, AXIS: tl.constexpr
):  # fmt: skip
    """Unpack a tile of a packed mask, bit j % 32 of word j // 32, with keys on AXIS; `first_key` is a multiple of 32.

    For an interval mask `data` has the bounds of keys, int64, in the place of words.
    """
    if data.dtype.element_ty == tl.int64:
        keys = first_key + tl.arange(0, BLOCK_N)
        return in_bounds(data, tl.expand_dims(keys, 1 - AXIS), tl.expand_dims(rows, AXIS))
    else:
        # A shift and a reshape spread each word over 32 scores. Loading a word per score instead would take six times
        # as long as the rest of the kernel.
        at = data + tl.expand_dims(rows.to(tl.int64), AXIS) * stride
        at += tl.expand_dims(first_key // 32 + tl.arange(0, BLOCK_N // 32), 1 - AXIS)
        words = tl.expand_dims(tl.load(at, mask=tl.expand_dims(rows < seqlen_q, AXIS), other=0), AXIS + 1)
        bits = (words >> tl.expand_dims(tl.arange(0, 32)[None, :], 2 - AXIS)) & 1
        return tl.reshape(bits.to(tl.int8), (BLOCK_M, BLOCK_N) if AXIS == 1 else (BLOCK_N, BLOCK_M)) != 0
