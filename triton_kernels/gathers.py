"""Biases by position: the bias of a few entries of the batch in a workspace, and the gradient of its values from ds.

`flash_dmattn.reference.gathers` has the definition. The gradient is a sum over all pairs with the same place. Place
`COLUMNS * u + v` is row u and column v of a matrix. The matrix is a product: one factor has the one-hot row of u of
each pair, the other the one-hot row of v times ds. Tensor cores compute it, and every product of two numbers is exact.

All sums have a fixed order, which does not depend on the number of entries in the workspace.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from flash_dmattn.reference.gathers import Places, entries_of
from flash_dmattn.reference.positions import PITCH

from .kernel_launch import ceil_div, launch, next_power_of_2
from .positions import Workspace

_ROWS = 8  # queries of a program of the gradient
_PAIRS = 128  # of a step of it
_COLUMNS = 16
# The interpreter has no products of bfloat16. Products of the same numbers in fp32 have the same result.
_BFLOAT16 = tl.float32 if knobs.runtime.interpret else tl.bfloat16
_PIECES = {
    torch.float16: (tl.float16, tl.float16, 1),
    torch.bfloat16: (tl.bfloat16, _BFLOAT16, 1),
    torch.float32: (tl.bfloat16, _BFLOAT16, 3),
}
_MOST_BINS = 1024  # places of a program of the gradient, whose sums are in registers


@triton.jit
def place_of(queries, keys, i, j, is_query, is_key, first, size, clamps):
    """Return the place of pairs in the table, and whether they have one."""
    place = tl.load(keys + j, mask=is_key, other=0) - tl.load(queries + i, mask=is_query, other=0)
    has_value = is_query & is_key & ((clamps != 0) | ((place >= 0) & (place < size)))
    place = tl.minimum(tl.maximum(place, 0), size - 1)
    return place.to(tl.int32) + first, has_value


@triton.jit
def gather_kernel(
    table, queries, keys, work, query_strides, key_strides, table_strides, length, others, heads, vectors,
    sizes, clamps,
    TERMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Write work[entry, h, i, j] = sum over terms of table[entry, h, place of (i, j)], terms in their order."""
    program = tl.program_id(0)
    blocks_n = tl.cdiv(others, BLOCK_N)
    blocks_m = tl.cdiv(length, BLOCK_M)
    entry = (program // (blocks_n * blocks_m)).to(tl.int64)
    i = (program // blocks_n % blocks_m * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    j = (program % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    is_query, is_key = i < length, j < others
    pitch = vectors * VECTOR
    own_table = table + entry * table_strides[0]
    for h in tl.range(0, heads):
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        first = 0
        for term in tl.static_range(TERMS):
            place, has_value = place_of(
                queries + term * query_strides[0] + entry * query_strides[1],
                keys + term * key_strides[0] + entry * key_strides[1],
                i, j, is_query, is_key, first, sizes[term], clamps[term],
            )  # fmt: skip
            total += tl.load(own_table + h * table_strides[1] + place, mask=has_value, other=0.0)
            first += sizes[term]
        line = work + ((entry * heads + h) * length + i) * pitch
        tl.store(line + j, total.to(work.dtype.element_ty), mask=is_query & is_key)


@triton.jit
def add_gradient_kernel(
    ds, queries, keys, sums, ds_strides, query_strides, key_strides, sums_stride, entries, length, others, heads, bins,
    sizes, clamps,
    TERMS: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, U: tl.constexpr, V: tl.constexpr, OWN: tl.constexpr,
    PIECE: tl.constexpr, FACTOR: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Add to sums[entry or 0, block of queries, h, place]: ds[entry, h, i, j] of the pairs of this place.

    A program goes on with the sums that are there, entry by entry, so bits do not depend on how many entries a launch
    has. OWN tells whether each entry has sums of its own. ds in fp32 is the sum of three pieces in bfloat16.
    """
    program = tl.program_id(0)
    blocks_m = tl.cdiv(length, ROWS)
    start = program % bins * (U * V)
    block = program // bins % blocks_m
    h = program // (bins * blocks_m) % heads
    own = (program // (bins * blocks_m * heads)).to(tl.int64)
    u, v = tl.arange(0, U), tl.arange(0, V)
    place = sums + own * sums_stride + ((block * heads + h).to(tl.int64) * bins) * (U * V) + start
    place = place + u[:, None] * V + v[None, :]
    acc = tl.load(place)
    row = block * ROWS
    number = tl.minimum(length - row, ROWS) * others
    steps = tl.cdiv(number, PAIRS)
    for turn in tl.range(0, entries * steps):
        entry = own + (turn // steps).to(tl.int64)
        pair = turn % steps * PAIRS + tl.arange(0, PAIRS)
        is_pair = pair < number
        i, j = row + pair // others, pair % others
        line = ds + entry * ds_strides[0] + h.to(tl.int64) * ds_strides[1]
        gradient = tl.load(line + i.to(tl.int64) * ds_strides[2] + j * ds_strides[3], mask=is_pair, other=0.0)
        # In fp32 a chain of products from zero, which is then added: tensor cores cut a running sum at each step.
        sum_of_turn = acc if PIECES == 1 else tl.zeros_like(acc)
        first = 0
        for term in tl.static_range(TERMS):
            at, has_value = place_of(
                queries + term * query_strides[0] + entry * query_strides[1],
                keys + term * key_strides[0] + entry * key_strides[1],
                i, j, is_pair, is_pair, first, sizes[term], clamps[term],
            )  # fmt: skip
            at = tl.where(has_value, at - start, -1)
            is_row, is_column = at[None, :] // V == u[:, None], at[:, None] % V == v[None, :]
            left = tl.where((at >= 0)[None, :] & is_row, 1.0, 0.0).to(FACTOR)
            rest = gradient
            for _ in tl.static_range(PIECES):
                piece = rest.to(PIECE)
                sum_of_turn = tl.dot(left, tl.where(is_column, piece.to(FACTOR)[:, None], 0.0), sum_of_turn)
                rest -= piece.to(rest.dtype)
            first += sizes[term]
        acc = sum_of_turn if PIECES == 1 else acc + sum_of_turn
    tl.store(place, acc)


class Gathers:
    """The bias by position of one call: the methods of `flash_dmattn.reference.gathers.Gathers`, in a workspace.

    Args:
        table: (1 or B, heads, n) in fp32, of `join`.
        places: of the call.
        dtype: of the bias.
        entries: the most entries of the batch that are computed at once.
    """

    def __init__(self, table: Tensor, places: Places, dtype: torch.dtype, entries: int) -> None:
        self.table, self.places = table, places
        most = entries if max(table.shape[0], places.batch) > 1 else 1
        self.work = Workspace(most, table.shape[1], dtype, table.device)
        self.bins = min(_MOST_BINS, max(_COLUMNS * 16, next_power_of_2(table.shape[2])))
        self.sums: Tensor | None = None

    @property
    def _lengths(self) -> tuple[int, int]:
        return self.places.queries.shape[2], self.places.keys.shape[2]

    def scores(self, span: slice) -> Tensor:
        """Return the bias of some entries, (entries, heads, Lq, Lk), or (1, ...) if they share it."""
        work = self.work.rows("bias", span.stop - span.start, *self._lengths)
        table, places = entries_of(self.table, span), self.places
        part = places.of(span)
        entries, heads, length, others = work.shape
        strides = (_strides(part.queries), _strides(part.keys), (_stride(table), table.stride(1)))
        block_m, block_n = 32, 64
        programs = entries * ceil_div(length, block_m) * ceil_div(others, block_n)
        numbers = (*strides, length, others, heads, work.stride(2) // PITCH, *_settings(places))
        tensors, constants = (table, part.queries, part.keys, work), (len(places.sizes), block_m, block_n, PITCH)
        launch(gather_kernel, programs, tensors, numbers, constants, num_warps=4)
        return work

    def place(self, entries: int) -> Tensor:
        """Return where a backward pass may store the gradient of the bias of so many entries."""
        return self.work.rows("ds", entries, *self._lengths)

    def add_gradient(self, ds: Tensor, span: slice) -> None:
        """Add the gradient of the table from the gradient of the bias of some entries, which follow those before."""
        (length, others), (batch, heads, number) = self._lengths, self.table.shape
        blocks, bins = ceil_div(length, _ROWS), ceil_div(number, self.bins)
        if self.sums is None:
            size = (batch, blocks, heads, bins * self.bins)
            self.sums = torch.zeros(size, dtype=torch.float32, device=ds.device)
        sums, part, has_own = entries_of(self.sums, span), self.places.of(span), batch > 1
        # One program goes on from entry to entry, where these share their sums.
        in_turn, side_by_side = (1, ds.shape[0]) if has_own else (ds.shape[0], 1)
        strides = (ds.stride(), _strides(part.queries), _strides(part.keys), _stride(sums))
        numbers = (*strides, in_turn, length, others, heads, bins, *_settings(self.places))
        pieces = _PIECES[ds.dtype]
        constants = (len(part.sizes), _ROWS, _PAIRS, self.bins // _COLUMNS, _COLUMNS, has_own, *pieces)
        programs = bins * blocks * heads * side_by_side
        launch(add_gradient_kernel, programs, (ds, part.queries, part.keys, sums), numbers, constants, num_warps=4)

    def table_gradient(self) -> Tensor:
        """Return the gradient of the table that `add_gradient` has added, in fp32."""
        assert self.sums is not None
        return self.sums.sum(1)[..., : self.table.shape[2]]


def _stride(x: Tensor) -> int:
    """Return the stride of entries, 0 where all share one."""
    return 0 if x.shape[0] == 1 else x.stride(0)


def _strides(positions: Tensor) -> tuple[int, int]:
    """Return the strides of terms and of entries."""
    return positions.stride(0), 0 if positions.shape[1] == 1 else positions.stride(1)


def _settings(places: Places) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return places.sizes, tuple(map(int, places.clamps))
