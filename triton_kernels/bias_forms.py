"""The forms of a bias: how a kernel loads a tile of it, adds it to scores, and computes its gradient.

Kernels take the code of a form as BIAS, and the code of a gradient as DBIAS, and only pass them on. A new form needs a
code, and a branch in `form_of` and in `add_bias`. It needs one in `flat_blocks` if it has flat blocks, and in
`add_gradient` if `backward_keys_kernel` computes its gradient. `extent` has the numbers that a form needs in addition
to strides.

AXIS is the axis of the keys: 1 in a tile of (queries, keys), 0 in one of (keys, queries).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from flash_dmattn.problem import Flags, bias_class

from .sequences import NO_SEQUENCES, scores_from
from .tile_ops import BAND, TREE, entry_of, load_rows_of_heads, load_vector, shared_head

# The form of a bias: none, one value per query, one per key, or one per score. DISTANCES and CLAMPED: one per distance,
# and past the values 0, or the first or last value. BANDED: one per query and distance, else 0. Forms up to ROW_BIAS
# add nothing to scores, because a value of a whole row only shifts its lse.
NO_BIAS: tl.constexpr = tl.constexpr(0)
ROW_BIAS: tl.constexpr = tl.constexpr(1)
KEY_BIAS: tl.constexpr = tl.constexpr(2)
TILE_BIAS: tl.constexpr = tl.constexpr(3)
DISTANCES: tl.constexpr = tl.constexpr(4)
CLAMPED: tl.constexpr = tl.constexpr(5)
BANDED: tl.constexpr = tl.constexpr(6)

_BY_CLASS = {"query": ROW_BIAS.value, "key": KEY_BIAS.value, "score": TILE_BIAS.value}
BY_DISTANCE = (DISTANCES.value, CLAMPED.value, BANDED.value)

# The gradient of a bias that `add_gradient` computes: none, sums over the queries of each key, or ds of every head.
# ENDS: the sums of ds at or past either end of the values of a clamped bias by distance. BY_QUERY: ds of the distances
# that a bias has values for. P_SUM is no gradient of a bias: the sum over queries of p times minus delta, without a
# product with dout.
NO_DBIAS: tl.constexpr = tl.constexpr(0)
KEY_SUM: tl.constexpr = tl.constexpr(1)
STORE: tl.constexpr = tl.constexpr(2)
ENDS: tl.constexpr = tl.constexpr(3)
BY_QUERY: tl.constexpr = tl.constexpr(4)
P_SUM: tl.constexpr = tl.constexpr(5)


class Distances(NamedTuple):
    """The index of distance 0 among the values of a bias by distance, and the number of values."""

    zero: int
    number: int


class Flat(NamedTuple):
    """Flat blocks of a run: the first `before` ones have value `first`, those after the next `near` blocks `last`."""

    before: int
    near: int
    first: float
    last: float


def form_of(bias: Tensor | None, flags: Flags) -> tuple[int, Distances | None]:
    """Return the code of a bias, and the `extent` of its form."""
    if bias is None:
        return NO_BIAS.value, None
    if not flags.outside:
        return _BY_CLASS[bias_class(bias.shape, bias.stride())], None
    kind = BANDED if bias.shape[2] > 1 else CLAMPED if flags.outside == "clamp" else DISTANCES
    return kind.value, Distances(flags.zero, bias.shape[3])


def has_flat_blocks(kind: int, mask_kind: int) -> bool:
    """Return whether loops treat flat blocks separately, whose scores all get one value; loops over lists do not."""
    return kind in BY_DISTANCE and mask_kind in (BAND.value, TREE.value)


@triton.jit
def bias_from(bias, strides, at, layout, SEQUENCES: tl.constexpr, BIAS: tl.constexpr, TMA: tl.constexpr):
    """Move the pointer of a bias to the first element of a sequence; 0 if there is no bias.

    A descriptor is unchanged, and is loaded from `bias_row` on.
    """
    if BIAS == NO_BIAS:  # not None, which Triton 3.5 returns from no function
        return 0
    elif SEQUENCES != NO_SEQUENCES and not TMA:
        return scores_from(bias, strides, layout.bias_rows, layout.bias_keys, at.first_q, at.first_k)
    else:
        return bias


@triton.jit
def load_bias(
    bias,
    strides,
    b,
    h,
    first,
    first_key,
    rows,
    keys,
    shape,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TMA: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Load the (queries, keys) tile of a bias of one value per score, in its own dtype; zero outside its edges."""
    if TMA:
        b_b, h_b = entry_of(b, strides), h // strides.group
        place = [(b_b * strides.batch).to(tl.int32), h_b * strides.head, first, first_key]
        return bias.load(place).reshape(BLOCK_M, BLOCK_N)
    else:
        base = shared_head(bias, strides, b, h)
        if WIDE:
            pointers = base + rows.to(tl.int64)[:, None] * strides.row + keys.to(tl.int64)[None, :] * strides.key
        else:
            pointers = base + (rows * strides.row)[:, None] + (keys * strides.key)[None, :]
        inside = (rows < shape.seqlen_q)[:, None] & (keys < shape.seqlen_k)[None, :]
        return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def row_values(bias, strides, b, h, rows, shape, BIAS: tl.constexpr):
    """Load the values of rows of a bias of one value per query; 0 for other biases."""
    if BIAS == ROW_BIAS:
        return load_vector(shared_head(bias, strides, b, h), rows, shape.seqlen_q, strides.row)
    else:
        return 0.0


@triton.jit
def bias_vector(bias, strides, b, h, keys, shape, BIAS: tl.constexpr, AXIS: tl.constexpr):
    """Prepare a bias for `add_bias`: (pointer to its head, values of keys, the same for all tiles, if AXIS is 0)."""
    if BIAS > ROW_BIAS and BIAS != TILE_BIAS:
        head = shared_head(bias, strides, b, h)
        if BIAS == KEY_BIAS and AXIS == 0:
            return head, load_vector(head, keys, shape.seqlen_k, strides.key)
        else:
            return head, 0.0
    else:
        return 0, 0.0


@triton.jit
def add_bias(
    x, factor, bias, head, vector, window, strides, b, h, first, first_key, rows, keys, shape, extent,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BIAS: tl.constexpr, AXIS: tl.constexpr,
    TMA: tl.constexpr, WIDE: tl.constexpr, GROUPED: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """Compute a tile of scores from the result of `scaled`: x * factor plus the bias.

    The sum is rounded once, in the same way in every kernel. With a bias of 1e9 the rounding error is up to 32, and p =
    exp(s - lse) is right only because both passes have the same s.

    `vector` is from `bias_vector`, `window` from `values_of_tile`. With GROUPED the rows belong to several heads. With
    GATHERED the keys of the tile are not consecutive.
    """
    if BIAS == TILE_BIAS:
        if GROUPED:
            tile = load_rows_of_heads(bias, strides, b, h, rows, keys, shape)
        else:
            tile = load_bias(bias, strides, b, h, first, first_key, rows, keys, shape, BLOCK_M, BLOCK_N, TMA, WIDE)
        if AXIS == 0:
            tile = tl.trans(tile)
        return tl.fma(x, factor, tile.to(tl.float32))
    elif BIAS == KEY_BIAS:
        if AXIS == 1:
            vector = load_vector(head, keys, shape.seqlen_k, strides.key)
        return tl.fma(x, factor, tl.expand_dims(vector, 1 - AXIS))
    elif BIAS == DISTANCES or BIAS == CLAMPED:
        if GATHERED:
            values = values_at(head, strides, places_of(rows, keys, shape, extent, AXIS), extent, BIAS)
        else:
            values = spread(window, BLOCK_M, BLOCK_N, AXIS)
        return tl.fma(x, factor, values)
    elif BIAS == BANDED:
        line = rows.to(tl.int64) * strides.row
        at, inside = in_values(line, strides.key, rows, keys, shape, extent, AXIS)
        return tl.fma(x, factor, tl.load(head + at, mask=inside, other=0.0).to(tl.float32))
    else:
        return x * factor


@triton.jit
def in_values(line, step, rows, keys, shape, extent, AXIS: tl.constexpr):
    """Return the addresses of the values of a tile with a bias per query and distance, and which scores have a value.

    `line` is the address of the first value of each query, `step` the stride of the values.
    """
    places = places_of(rows, keys, shape, extent, AXIS)
    inside = (places >= 0) & (places < extent.number)
    inside &= tl.expand_dims(rows < shape.seqlen_q, AXIS) & tl.expand_dims(keys < shape.seqlen_k, 1 - AXIS)
    return tl.expand_dims(line, AXIS) + places * step, inside


@triton.jit
def spread(window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, AXIS: tl.constexpr):
    """Expand a window of values to a tile: every score gets the value of its distance.

    The gather goes through shared memory and has the layout of the scores. Loading a tile would need another layout,
    registers for its addresses, and shared memory of the size of the tile.
    """
    steps = tl.expand_dims(tl.arange(0, BLOCK_N), 1 - AXIS) - tl.expand_dims(tl.arange(0, BLOCK_M), AXIS)
    places = tl.reshape(steps + (BLOCK_M - 1), (BLOCK_M * BLOCK_N,))
    return tl.reshape(tl.gather(window, places, 0), steps.shape)


@triton.jit
def values_at(head, strides, places, extent, BIAS: tl.constexpr):
    """Load the values of a bias by distance at indices; an index beyond an end gets the value of the end, or 0."""
    inside = tl.minimum(tl.maximum(places, 0), extent.number - 1)
    values = tl.load(head + inside * strides.key).to(tl.float32)
    if BIAS == DISTANCES:
        values = tl.where(inside == places, values, 0.0)
    return values


@triton.jit
def values_of_tile(
    head, strides, first, first_key, shape, extent,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BIAS: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """Load the values of a bias by distance for a tile: value t is for key - query = t - (BLOCK_M - 1) from its corner.

    They are loaded before the products of the tile, to have arrived when `add_bias` needs them. Zero for other biases.
    """
    if (BIAS == DISTANCES or BIAS == CLAMPED) and not GATHERED:
        corner = extent.zero + first_key - first - (shape.seqlen_k - shape.seqlen_q)
        places = corner - (BLOCK_M - 1) + tl.arange(0, triton.next_power_of_2(BLOCK_M + BLOCK_N))
        return values_at(head, strides, places, extent, BIAS)
    else:
        return 0


@triton.jit
def flat_blocks(
    head, strides, first, start, inside, shape, extent,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BIAS: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """Find the flat blocks of a run, whose distances are beyond an end of the values of a bias, which is then constant.

    Returns `Flat`. The run has `inside` blocks from block `start` on. They are blocks of keys, and `first` is the first
    query of the tile; with AXIS 0 it is the other way round.

    Loops over flat blocks subtract the value from the maximum or lse of a row, so its sum with a score is never
    rounded. A pass with other blocks rounds that sum. With a large value the two would differ, so then no block is
    flat.
    """
    before_values, beyond_values = 0.0, 0.0
    if BIAS == CLAMPED:
        last = tl.load(head + (extent.number - 1) * strides.key)
        before_values, beyond_values = tl.load(head).to(tl.float32), last.to(tl.float32)
    zero = extent.zero - (shape.seqlen_k - shape.seqlen_q)
    if AXIS == 1:
        low = first - zero - (BLOCK_N - 1)
        high = first - zero + extent.number + (BLOCK_M - 1)
        BLOCK: tl.constexpr = BLOCK_N
    else:
        low = first + zero - extent.number - (BLOCK_M - 2)
        high = first + zero + BLOCK_N
        BLOCK: tl.constexpr = BLOCK_M
    if BIAS == CLAMPED:  # a distance at an end has the value of the clamped ones
        low += 1
        high -= 1
    begin = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(low, 0), BLOCK), start), start + inside)
    end = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(high, 0), BLOCK), begin), start + inside)
    if BIAS == CLAMPED:
        great = is_great(before_values) | is_great(beyond_values)
        begin = tl.where(great, start, begin)
        end = tl.where(great, start + inside, end)
    before, near = (begin - start).to(tl.int32), (end - begin).to(tl.int32)
    if AXIS == 1:
        return Flat(before, near, before_values, beyond_values)
    else:  # with AXIS 0, later blocks have smaller distances
        return Flat(before, near, beyond_values, before_values)


@triton.jit
def is_great(value):
    """Return whether the sum of a finite value and a score may be rounded by more than 1e-5."""
    return (tl.abs(value) > 256.0) & (tl.abs(value) < float("inf"))


@triton.jit
def block_of_run(step, flat, IS_FLAT: tl.constexpr):
    """Return the block of a run at a step of a loop over its flat blocks, or over all others."""
    if IS_FLAT:
        return tl.where(step < flat.before, step, step + flat.near)
    else:
        return step + flat.before


@triton.jit
def flat_value(step, flat):
    """Return the value that all scores of a flat block get."""
    return tl.where(step < flat.before, flat.first, flat.last)


@triton.jit
def places_of(rows, keys, shape, extent, AXIS: tl.constexpr):
    """Return the index of each score of a tile among the values of a bias by distance."""
    steps = tl.expand_dims(keys, 1 - AXIS) - tl.expand_dims(rows, AXIS)
    return steps + (extent.zero - (shape.seqlen_k - shape.seqlen_q))


@triton.jit
def store_tile(
    dbias, tile, b, h, first, first_key, keys, shape, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr
):
    """Store the (queries, keys) tile of a contiguous (B, Hq, Lq, Lk) gradient."""
    if TMA:
        tile = tile.to(dbias.dtype).reshape(1, 1, BLOCK_M, BLOCK_N)
        dbias.store([b.to(tl.int32), h, first, first_key], tile)
    else:
        rows = first + tl.arange(0, BLOCK_M)
        place = ((b * shape.num_heads + h) * shape.seqlen_q + rows)[:, None] * shape.seqlen_k + keys[None, :]
        inside = (rows < shape.seqlen_q)[:, None] & (keys < shape.seqlen_k)[None, :]
        tl.store(dbias + place, tile.to(dbias.dtype.element_ty), mask=inside)


@triton.jit
def store_rows(dbias, tile, b, h, first_q, rows, keys, shape, layout):
    """Store the tile of one sequence: dbias is (S, Hq, max_q, max_k), or (1, Hq, Tq, max_k) with packed queries."""
    first = (b * (1 - layout.bias_rows) * shape.num_heads + h) * layout.dbias_rows + first_q * layout.bias_rows
    place = (first + rows)[:, None] * layout.dbias_keys + keys[None, :]
    inside = (rows < shape.seqlen_q)[:, None] & (keys < shape.seqlen_k)[None, :]
    tl.store(dbias + place, tile.to(dbias.dtype.element_ty), mask=inside)


@triton.jit
def add_gradient(
    sums, last_sums, dbias, ds, flat, step, at, b, h, first, first_key, rows, keys, shape, layout, extent,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DBIAS: tl.constexpr, TMA: tl.constexpr,
    SEQUENCES: tl.constexpr, IS_FLAT: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """Store ds of a (keys, queries) tile in the gradient of a bias, or add it to two sums of each key.

    With KEY_SUM `sums` has all scores of a key. With ENDS it has the scores at the first value or before it, and
    `last_sums` the scores at the last value or beyond it.
    """
    if DBIAS == KEY_SUM:
        sums += tl.sum(ds, 1)
    elif DBIAS == ENDS and IS_FLAT:
        end = tl.sum(ds, 1)
        last_sums += tl.where(step < flat.before, end, 0.0)
        sums += tl.where(step < flat.before, 0.0, end)
    elif DBIAS == ENDS:
        least = extent.zero + first_key - first - (shape.seqlen_k - shape.seqlen_q) - (BLOCK_M - 1)
        if GATHERED or least <= 0:
            place = places_of(rows, keys, shape, extent, 0)
            sums += tl.sum(tl.where(place <= 0, ds, 0.0), 1)
        if GATHERED or least + (BLOCK_M - 1) + (BLOCK_N - 1) >= extent.number - 1:
            place = places_of(rows, keys, shape, extent, 0)
            last_sums += tl.sum(tl.where((place > 0) & (place >= extent.number - 1), ds, 0.0), 1)
    elif DBIAS == BY_QUERY and not IS_FLAT:
        line = ((b * shape.num_heads + h) * shape.seqlen_q + rows) * extent.number
        place, has_value = in_values(line, 1, rows, keys, shape, extent, 0)
        tl.store(dbias + place, ds.to(dbias.dtype.element_ty), mask=has_value)
    elif DBIAS == STORE and SEQUENCES == NO_SEQUENCES:
        store_tile(dbias, tl.trans(ds), b, h, first, first_key, keys, shape, BLOCK_M, BLOCK_N, TMA)
    elif DBIAS == STORE:
        store_rows(dbias, tl.trans(ds), b, h, at.first_q, rows, keys, shape, layout)
    return sums, last_sums
