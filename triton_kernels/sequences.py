"""Addresses of the entries of a batch, or of its sequences: device functions at the start of attention kernels."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .tile_ops import BAND, DENSE, TILE, TILES, TREE, Shape, load_tile

# The layout of sequences in memory: see `Layout` of `flash_dmattn.problem`.
NO_SEQUENCES: tl.constexpr = tl.constexpr(0)
PACKED: tl.constexpr = tl.constexpr(1)
PADDED: tl.constexpr = tl.constexpr(2)
PAGED: tl.constexpr = tl.constexpr(3)
PAGED_PACKED: tl.constexpr = tl.constexpr(4)

NOWHERE: tl.constexpr = tl.constexpr(2**30)  # a row after all


class SequenceLayout(NamedTuple):
    """The memory layout of the sequences of a call; `Shape` has upper bounds of their lengths.

    `rows_q` and `rows_k` count the rows of packed tokens, or the slots of one sequence. `mask_rows` is 1 where the rows
    of the mask are packed queries, else 0; `mask_keys`, `bias_rows` and `bias_keys` likewise. A row of the table of
    pages has `table_row` entries. Sequences of at most `few_keys` keys compute delta from p and dp, as calls with
    FEW_KEYS do. For sequences of at most `one_pass_keys` keys, -1 for none, the kernel of dk and dv computes dq. A head
    of the gradient of a bias has `dbias_rows` rows of `dbias_keys` values.
    """

    number: int
    rows_q: int
    rows_k: int
    mask_rows: int
    mask_keys: int
    bias_rows: int
    bias_keys: int
    pages: int
    table_row: int
    few_keys: int
    one_pass_keys: int
    dbias_rows: int
    dbias_keys: int


class Place(NamedTuple):
    """The address of an entry of the batch, or of a sequence; `b` is its number, int64.

    Its rows begin at row `first_q` of entry `b_q` of q, and at row `first_k` of entry `b_k` of k. Counted over all
    entries these are rows `row_q` and `row_k`. An entry of q has `entry_rows` rows, and all together have `all_rows`.
    If a descriptor loads the bias, its first query has row `bias_row`. With `few`, kernels compute delta from p and dp,
    because the sequence has so few keys.
    """

    b: int
    b_q: int
    b_k: int
    first_q: int
    first_k: int
    row_q: int
    row_k: int
    entry_rows: int
    all_rows: int
    bias_row: int
    few: bool


@triton.jit
def tiles_of_rows(rows, most, number, SEARCH: tl.constexpr, BLOCK: tl.constexpr):
    """Return an upper bound on the number of tiles of rows of all sequences: the tiles that `sequence_at` numbers."""
    if SEARCH:
        return rows // BLOCK + number
    else:
        return tl.maximum(tl.cdiv(most, BLOCK), 1) * number


@triton.jit
def sequence_at(tile, bounds, most, number, SEARCH: tl.constexpr, COLUMN: tl.constexpr, BLOCK: tl.constexpr):
    """Find the sequence of a tile of rows, and the number of the tile in that sequence, which may be after its last.

    Without SEARCH each sequence has tiles for `most` rows. With SEARCH, for lengths that differ much, tiles are
    numbered along the packed tokens. The tiles of sequence s begin at number first // BLOCK + s, so that two sequences
    never have the same number. COLUMN of the bounds has the first row of each sequence: 0 for queries, 2 for keys.
    """
    if SEARCH:
        low = 0
        high = number
        while high - low > 1:
            middle = (low + high) // 2
            is_later = tl.load(bounds + middle * 4 + COLUMN) // BLOCK + middle > tile
            low = tl.where(is_later, low, middle)
            high = tl.where(is_later, middle, high)
        place = tile - (tl.load(bounds + low * 4 + COLUMN) // BLOCK + low)
        # Tiles before the first sequence get a number beyond every sequence, so that callers skip them.
        return low, tl.where(place < 0, NOWHERE // BLOCK, place)
    else:
        tiles_each = tl.maximum(tl.cdiv(most, BLOCK), 1)
        return tile // tiles_each, tile % tiles_each


@triton.jit
def shape_of(shape, seqlen_q, seqlen_k):
    """Make the shape of one sequence of a call."""
    return Shape(
        shape.batch,
        seqlen_q,
        seqlen_k,
        shape.num_heads,
        shape.group,
        shape.head_dim,
        shape.head_dim_v,
        shape.left,
        shape.right,
    )


@triton.jit
def tiles_of_queries(most, layout, SEQUENCES: tl.constexpr, SEARCH: tl.constexpr, BLOCK: tl.constexpr):
    """Return the number of query tiles of a head: for `most` rows of an entry, or as `tiles_of_rows` counts them."""
    if SEQUENCES == NO_SEQUENCES:
        return tl.cdiv(most, BLOCK)
    else:
        return tiles_of_rows(layout.rows_q, most, layout.number, SEARCH, BLOCK)


@triton.jit
def entry_of_tile(
    tile, head, bounds, most, shape, layout, SEQUENCES: tl.constexpr, SEARCH: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the entry, the tile of its queries, which may be after the last, and the head that a program computes.

    `tile` is one of `tiles_of_queries`. Without sequences `head` counts the heads of all entries.
    """
    if SEQUENCES == NO_SEQUENCES:
        return head // shape.num_heads, tile, head % shape.num_heads
    else:
        entry, tile = sequence_at(tile, bounds, most, layout.number, SEARCH, 0, BLOCK)
        return entry, tile, head


@triton.jit
def bounds_of(entry, bounds, shape, SEQUENCES: tl.constexpr):
    """Return the first query and the first key of an entry, or of a sequence, in its rows, and its shape."""
    if SEQUENCES == NO_SEQUENCES:
        return 0, 0, shape
    else:
        at = bounds + entry * 4
        return tl.load(at), tl.load(at + 2), shape_of(shape, tl.load(at + 1), tl.load(at + 3))


@triton.jit
def place_of(entry, first_q, first_k, shape, layout, SEQUENCES: tl.constexpr):
    """Return the `Place` of an entry, or of a sequence; called when tiles after the last one have returned."""
    b = entry.to(tl.int64)
    if SEQUENCES == NO_SEQUENCES:
        row_q, row_k, all_rows = b * shape.seqlen_q, b * shape.seqlen_k, shape.batch * shape.seqlen_q
        return Place(b, b, b, 0, 0, row_q, row_k, shape.seqlen_q, all_rows, 0, False)
    else:
        PACKS_Q: tl.constexpr = SEQUENCES == PACKED or SEQUENCES == PAGED_PACKED
        b_q = tl.zeros_like(b) if PACKS_Q else b
        b_k = tl.zeros_like(b) if SEQUENCES == PACKED else b
        row_q, row_k = b_q * layout.rows_q + first_q, b_k * layout.rows_k + first_k
        all_rows = layout.rows_q * (1 if PACKS_Q else layout.number)
        few = shape.seqlen_k <= layout.few_keys
        bias_row = layout.bias_rows * first_q
        return Place(b, b_q, b_k, first_q, first_k, row_q, row_k, layout.rows_q, all_rows, bias_row, few)


@triton.jit
def rows_from(x, strides, first, SEQUENCES: tl.constexpr):
    """Move the pointer of a tensor of queries or of keys to the first row of a sequence in an entry."""
    if SEQUENCES == NO_SEQUENCES:
        return x
    else:
        return x + first.to(tl.int64) * strides.row


@triton.jit
def scores_from(x, strides, rows_packed, keys_packed, first_q, first_k):
    """Move the pointer of a mask or a bias to the first element of a sequence."""
    return x + first_q.to(tl.int64) * rows_packed * strides.row + first_k.to(tl.int64) * keys_packed * strides.key


@triton.jit
def mask_from(data, index, strides, at, first_place, layout, SEQUENCES: tl.constexpr, MASK: tl.constexpr):
    """Move the pointers of a mask to the start of a sequence.

    Bits have a row for each query of all sequences, so they begin at the first query. Lists are numbered as in
    `SequenceTileMask`: `first_place` is the first row of the sequence along the axis of the lists. Pointers that a mask
    does not have are zeros.
    """
    if MASK == BAND:  # not None, which Triton 3.5 returns from no function
        return 0, 0
    elif SEQUENCES != NO_SEQUENCES and MASK == DENSE:
        return scores_from(data, strides, layout.mask_rows, layout.mask_keys, at.first_q, at.first_k), 0
    elif SEQUENCES != NO_SEQUENCES and MASK == TILES:
        data += at.row_q * strides.row
        index += (first_place // TILE + at.b) * strides.list_row
        return data, index
    elif MASK == DENSE or MASK == TREE:
        return data, 0
    else:
        return data, index


@triton.jit
def pages_from(table, at, layout, SEQUENCES: tl.constexpr):
    """Move the pointer of the table of pages to the row of a sequence; 0 if there are no pages."""
    if SEQUENCES == PAGED or SEQUENCES == PAGED_PACKED:
        return table + at.b * layout.table_row
    else:
        return 0


@triton.jit
def load_pages(
    x,
    table,
    layout,
    strides,
    h,
    first,
    keys,
    num_keys,
    dims,
    num_dims,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHECK_DIMS: tl.constexpr,
):
    """Load the rows of BLOCK keys from `first` on from pages, x (pages, PAGE, H, D); zero after the last key."""
    is_key = keys < num_keys
    if PAGE % BLOCK == 0:
        page = tl.load(table + first // PAGE)
    else:
        page = tl.load(table + keys // PAGE, mask=is_key, other=0)
    page = tl.minimum(tl.maximum(page, 0), layout.pages - 1).to(tl.int64)  # a wrong table must not go out of bounds
    rows = page * strides.batch + (keys % PAGE).to(tl.int64) * strides.row + h.to(tl.int64) * strides.head
    inside = is_key[:, None]
    if CHECK_DIMS:
        inside = inside & (dims < num_dims)[None, :]
    return tl.load(x + rows[:, None] + dims[None, :], mask=inside, other=0.0)


@triton.jit
def load_keys(
    x, table, layout, strides, b, h, place, keys, num_keys, dims, num_dims,
    SEQUENCES: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr,
    WIDE: tl.constexpr, CHECK_KEYS: tl.constexpr, PAD: tl.constexpr, column=0,
):  # fmt: skip
    """Load the rows of a block of keys, from pages or from a tensor."""
    if SEQUENCES == PAGED or SEQUENCES == PAGED_PACKED:
        return load_pages(x, table, layout, strides, h, place, keys, num_keys, dims, num_dims, PAGE, BLOCK_N, PAD)
    else:
        return load_tile(
            x, strides, b, h, place, keys, num_keys, dims, num_dims,
            BLOCK_N, BLOCK_D, TMA, WIDE, CHECK_KEYS, PAD, column,
        )  # fmt: skip
