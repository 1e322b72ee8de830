"""Products of a `Projected`: scores of a few entries of the batch in a workspace, and their gradients from ds there.

Score (i, j) is `x[i] . rows[j - i + L - 1]`, so each row of a product of vectors and distances has to move by one place
against the row before it. Here addresses move it: the vectors of a tile are STEP apart, so that its rows begin on
multiples of STEP elements. Every access to memory then is a vector of STEP elements, also the copies to shared memory
that run ahead of the products. No instruction shifts a value.

Rows of the workspace have a multiple of 16 elements, so that vectors end with the row, and TMA reads them. Scores
behind the last key are written and never read; ds is 0 there. All sums have a fixed order, which does not depend on the
number of entries in the workspace.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_dmattn.problem import allows_tf32, device_arch
from flash_dmattn.reference.positions import pitch_of

from .gpus import shared_bytes
from .kernel_launch import ceil_div, launch, next_power_of_2
from .pieces import add_product, product_of_rows, split
from .precision import MOST_FEW_ROWS, select_precision

_STEP = 4
_TURNED = 64  # rows and columns of a tile that is transposed
_FEW_VECTORS = 1024  # up to so many, tiles of 128 that are _STEP apart would mostly be distances without a score


@triton.jit
def load_rows(x, at, is_row, stride, terms, BLOCK_P: tl.constexpr):
    """Load rows of `terms` elements; 0 where `is_row` is False, and behind the last term."""
    p = tl.arange(0, BLOCK_P)
    return tl.load(
        x + at.to(tl.int64)[:, None] * stride + p[None, :], mask=is_row[:, None] & (p < terms)[None, :], other=0.0
    )


@triton.jit
def vectors_of(length, others, STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the pair of entry and head of a program, its vectors, the distance of column 0, and its steps.

    Column c of the tile at step s is distance `first + s * BLOCK_N + c`, and its row m is position
    `s * BLOCK_N + c - STEP * (BLOCK_M - 1 - m)` of the other side.
    """
    program = tl.program_id(0)
    blocks = tl.cdiv(tl.cdiv(length, STEP), BLOCK_M)
    start = program // blocks % STEP + STEP * (program % blocks * BLOCK_M)
    i = start + STEP * tl.arange(0, BLOCK_M)
    beyond = start + STEP * (BLOCK_M - 1) - (length - 1)  # of the last row, behind the last vector
    begin = tl.maximum(beyond, 0) // BLOCK_N
    end = tl.cdiv(others + STEP * (BLOCK_M - 1), BLOCK_N)
    return program // (blocks * STEP), i, -beyond, begin, end


@triton.jit
def project_kernel(
    x, rows, work, x_strides, length, others, heads, row_heads, terms, vectors, scale,
    STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, PRECISION: tl.constexpr,
    MOST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write work[pair, i, j] = scale * x[i] . rows[j - i + length - 1]; MOST bounds it, where it is not 0."""
    scale = tl.cast(scale, tl.float32)
    pair, i, first, begin, end = vectors_of(length, others, STEP, BLOCK_M, BLOCK_N)
    h = pair % heads
    head_x = x + (pair // heads).to(tl.int64) * x_strides[0] + h.to(tl.int64) * x_strides[2]
    x_tile = split(load_rows(head_x, i, i < length, x_strides[1], terms, BLOCK_P), PRECISION)
    count = length + others - 1
    head_rows = rows + (h // (heads // row_heads)).to(tl.int64) * count * terms
    pitch = vectors * STEP  # so the compiler sees where vectors begin
    line = work + (pair.to(tl.int64) * length + i)[:, None] * pitch
    back = STEP * (BLOCK_M - 1 - tl.arange(0, BLOCK_M))
    for step in tl.range(begin, end, num_stages=STAGES):
        column = step * BLOCK_N + tl.arange(0, BLOCK_N)
        distance = first + column
        tile = load_rows(head_rows, distance, (distance >= 0) & (distance < count), terms, terms, BLOCK_P)
        made = product_of_rows(x_tile, split(tile, PRECISION), PRECISION) * scale
        if MOST != 0:
            made = tl.minimum(tl.maximum(made, -MOST), MOST)
        j = column[None, :] - back[:, None]
        tl.store(line + j, made.to(work.dtype.element_ty), mask=(i < length)[:, None] & (j >= 0) & (j < pitch))


@triton.jit
def project_queries_kernel(
    ds, rows, dx, length, others, heads, row_heads, terms, vectors, scale,
    STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Write dx[entry, i, head] = scale * sum over j of ds[pair, i, j] rows[j - i + length - 1]; dx is contiguous."""
    scale = tl.cast(scale, tl.float32)
    pair, i, first, begin, end = vectors_of(length, others, STEP, BLOCK_M, BLOCK_N)
    h = pair % heads
    count = length + others - 1
    head_rows = rows + (h // (heads // row_heads)).to(tl.int64) * count * terms
    pitch = vectors * STEP
    line = ds + (pair.to(tl.int64) * length + i)[:, None] * pitch
    back = STEP * (BLOCK_M - 1 - tl.arange(0, BLOCK_M))
    acc = tl.zeros([BLOCK_M, BLOCK_P], tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        column = step * BLOCK_N + tl.arange(0, BLOCK_N)
        distance = first + column
        tile = load_rows(head_rows, distance, (distance >= 0) & (distance < count), terms, terms, BLOCK_P)
        j = column[None, :] - back[:, None]
        scores = tl.load(line + j, mask=(i < length)[:, None] & (j >= 0) & (j < pitch), other=0.0)
        acc = add_product(acc, scores, split(tile, PRECISION), PRECISION)
    p = tl.arange(0, BLOCK_P)
    at = (((pair // heads).to(tl.int64) * length + i) * heads + h)[:, None] * terms + p[None, :]
    tl.store(dx + at, (acc * scale).to(dx.dtype.element_ty), mask=(i < length)[:, None] & (p < terms)[None, :])


@triton.jit
def project_table_kernel(
    ds, x, sums, x_strides, entries, length, others, heads, terms, vectors,
    STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Add to sums[residue, head, distance], fp32: ds[entry, head, i, j] x[entry, i, head] of vectors of one residue.

    A program goes on with the sums that are there, entry by entry and vector by vector, so bits do not depend on how
    many entries a launch has. Programs of the longest diagonals come first.
    """
    program = tl.program_id(0)
    residue = program % STEP
    h = program // STEP % heads
    rank = program // (STEP * heads)
    count = length + others - 1
    before = tl.cdiv(length - 1 - residue, BLOCK_N)  # blocks of distances before the one of key and query `residue`
    first = length - 1 - residue - BLOCK_N * before
    blocks = tl.cdiv(count - first, BLOCK_N)
    if (rank < blocks) & (residue < length):
        pitch = vectors * STEP
        block = blocks // 2 + tl.where(rank % 2 == 1, -((rank + 1) // 2), rank // 2)
        base = BLOCK_N * (block - before)  # vector m, at i = residue + STEP * m, has columns from base + STEP * m on
        low = tl.maximum(-(base + BLOCK_N - 1), 0) // STEP
        high = tl.minimum(tl.cdiv(length - residue, STEP), tl.cdiv(tl.maximum(others - base, 0), STEP))
        tiles = tl.cdiv(tl.maximum(high - low, 0), BLOCK_M)
        distance = first + BLOCK_N * block + tl.arange(0, BLOCK_N)
        p = tl.arange(0, BLOCK_P)
        place = sums + ((residue * heads + h).to(tl.int64) * count + distance)[:, None] * terms + p[None, :]
        is_distance = ((distance >= 0) & (distance < count))[:, None] & (p < terms)[None, :]
        acc = tl.load(place, mask=is_distance, other=0.0)
        for turn in tl.range(0, entries * tiles, num_stages=STAGES):
            entry = (turn // tiles).to(tl.int64)
            m = low + turn % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
            i = residue + STEP * m
            j = (base + STEP * m)[:, None] + tl.arange(0, BLOCK_N)[None, :]
            line = ds + ((entry * heads + h) * length + i)[:, None] * pitch
            scores = tl.load(line + j, mask=(m < high)[:, None] & (j >= 0) & (j < pitch), other=0.0)
            x_tile = load_rows(
                x + entry * x_strides[0] + h.to(tl.int64) * x_strides[2], i, m < high, x_strides[1], terms, BLOCK_P
            )
            acc = add_product(acc, tl.trans(scores), split(x_tile, PRECISION), PRECISION)
        tl.store(place, acc, mask=is_distance)


@triton.jit
def turn_kernel(
    x, y, length, others, group, x_pitch, y_pitch,
    ADDS: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write y[pair, j, i] = x[pair // group, i, j], or add it; rows of y end with zeros. MOST bounds sums, if not 0."""
    program = tl.program_id(0)
    blocks_i, blocks_j = tl.cdiv(y_pitch, BLOCK), tl.cdiv(others, BLOCK)
    pair = program // (blocks_i * blocks_j)
    i = program // blocks_j % blocks_i * BLOCK + tl.arange(0, BLOCK)
    j = program % blocks_j * BLOCK + tl.arange(0, BLOCK)
    # Up to the pitch, so that the compiler sees whole vectors; others of x are behind the last row of y.
    read = x + ((pair // group).to(tl.int64) * length + i)[:, None] * x_pitch + j[None, :]
    turned = tl.trans(tl.load(read, mask=(i < length)[:, None] & (j < x_pitch)[None, :], other=0.0))
    place = y + (pair.to(tl.int64) * others + j)[:, None] * y_pitch + i[None, :]
    is_place = (j < others)[:, None] & (i < y_pitch)[None, :]
    if ADDS:
        turned = turned.to(tl.float32) + tl.load(place, mask=is_place, other=0.0).to(tl.float32)
        if MOST != 0:
            turned = tl.minimum(tl.maximum(turned, -MOST), MOST)
    tl.store(place, turned.to(y.dtype.element_ty), mask=is_place)


class Workspace:
    """The tensors of one call by name, for a few entries of the batch at a time: each is made once, at its first use.

    Args:
        entries: the most entries of the batch that are computed at once.
        heads, dtype, device: of the bias.
    """

    def __init__(self, entries: int, heads: int, dtype: torch.dtype, device: torch.device) -> None:
        self.entries, self.heads, self.dtype, self.device = entries, heads, dtype, device
        self._made: dict[str, Tensor] = {}

    def rows(self, name: str, entries: int, length: int, others: int, zeros: bool = False) -> Tensor:
        """Return a tensor (entries, heads, length, others), whose rows have a larger pitch and may end with zeros."""
        if name not in self._made:
            size = (self.entries, self.heads, length, pitch_of(others))
            self._made[name] = torch.empty(size, dtype=self.dtype, device=self.device)
            if zeros:
                self._made[name][..., others:].zero_()
        return self._made[name][:entries, ..., :others]

    def has(self, name: str, x: Tensor) -> bool:
        """Return whether x begins where the tensor of this name does."""
        return name in self._made and self._made[name].data_ptr() == x.data_ptr()


class Products:
    """The products of one call: the methods of `flash_dmattn.reference.positions.Products`, in a workspace.

    Args:
        rows: (Ht, L + M - 1, P), of `rows_of_call`.
        scale: of the scores.
        by_keys: whether keys are the side that has vectors.
        entries: the most entries of the batch that are computed at once.
        shape: (heads, L, M) of the scores, vectors first.
    """

    def __init__(self, rows: Tensor, scale: float, by_keys: bool, entries: int, shape: tuple[int, int, int]) -> None:
        self.rows, self.scale, self.by_keys, self.shape = rows.contiguous(), scale, by_keys, shape
        self.work = Workspace(entries, shape[0], rows.dtype, rows.device)
        self.sums: Tensor | None = None
        terms = rows.shape[2]
        block_p = max(16, next_power_of_2(terms))
        is_wide = rows.dtype.itemsize == 4
        block_m = 64 if is_wide or block_p > 128 or shape[1] <= _FEW_VECTORS else 128
        block_m = 32 if is_wide and block_p > 128 else block_m
        block_n = 32 if is_wide or block_p > 128 else 64
        arch = device_arch(rows.device)
        stages = 3 if shared_bytes(arch) > 128 * 1024 else 2
        few_rows = shape[1] <= MOST_FEW_ROWS
        precision = select_precision(rows.dtype, arch, terms, few_rows, allows_tf32(rows.dtype))
        most = torch.finfo(rows.dtype).max if rows.dtype == torch.float16 else 0.0
        self.num_warps = 8 if block_m * block_p >= 128 * 128 or (is_wide and block_p > 64) else 4
        self.tile, self.rest = (_STEP, block_m, block_n, block_p, precision), (most, stages)

    def scores(self, x: Tensor) -> Tensor:
        """Return the scores of some entries, x (entries, L, H, P): (entries, H, Lq, Lk) with rows of unit stride."""
        _, length, others = self.shape
        work = self._scores_by_vectors(x)
        return _turn(work, self.work.rows("turned", x.shape[0], others, length)) if self.by_keys else work

    def add_scores(self, x: Tensor, total: Tensor) -> None:
        """Add the scores of keys to those of queries, which may have more heads, in their workspace."""
        _turn(self._scores_by_vectors(x), total, adds=True, most=self.rest[0])

    def _scores_by_vectors(self, x: Tensor) -> Tensor:
        """Return the scores of some entries, (entries, H, L, M)."""
        _, length, others = self.shape
        x = _unit_rows(x)
        work = self.work.rows("scores", x.shape[0], length, others)
        numbers = (*self._numbers(), work.stride(2) // _STEP, self.scale)
        self._launch(project_kernel, x.shape[0], (x, self.rows, work), (x.stride()[:3], *numbers), self.rest)
        return work

    def place(self, entries: int) -> Tensor:
        """Return where a backward pass may store the gradient of the scores of so many entries."""
        _, length, others = self.shape
        lengths = (others, length) if self.by_keys else (length, others)
        return self.work.rows("ds", entries, *lengths, zeros=True)

    def gradients(self, ds: Tensor, x: Tensor, needs_x: bool, needs_rows: bool) -> Tensor | None:
        """Return the gradient of x, contiguous, from the gradient of its scores; None where it is not needed.

        The gradient of the rows is added to sums. Entries come after the entries of the call before.
        """
        work, dx = self._by_vectors(ds), None
        vectors = work.stride(2) // _STEP
        if needs_x:
            dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            tensors = (work, self.rows, dx)
            self._launch(
                project_queries_kernel, x.shape[0], tensors, (*self._numbers(), vectors, self.scale), self.rest[1:]
            )
        if needs_rows:
            self._add_rows_gradient(work, _unit_rows(x), vectors)
        return dx

    def _add_rows_gradient(self, work: Tensor, x: Tensor, vectors: int) -> None:
        heads, length, others = self.shape
        count, terms = self.rows.shape[1:]
        if self.sums is None:
            self.sums = torch.zeros(_STEP, heads, count, terms, dtype=torch.float32, device=x.device)
        step, _, block_n, block_p, precision = self.tile
        distances = 2 * block_n
        constants = (step, block_n, distances, block_p, precision, self.rest[1])
        programs = step * heads * ceil_div(count + distances - 1, distances)
        numbers = (x.stride()[:3], x.shape[0], length, others, heads, terms, vectors)
        launch(project_table_kernel, programs, (work, x, self.sums), numbers, constants, num_warps=8)

    def rows_gradient(self) -> Tensor:
        """Return the gradient of the rows that `gradients` has added, (heads, L + M - 1, P) in fp32."""
        assert self.sums is not None
        return self.sums.sum(0) * self.scale

    def _by_vectors(self, ds: Tensor) -> Tensor:
        """Return ds with vectors as rows, and rows of a multiple of `_STEP` elements, which end with zeros."""
        entries = ds.shape[0]
        _, length, others = self.shape
        if self.by_keys:
            return _turn(ds, self.work.rows("scores", entries, length, others))  # which have been read
        if self.work.has("ds", ds) or (ds.is_contiguous() and others % _STEP == 0 and ds.dtype == self.rows.dtype):
            return ds
        return self.place(entries).copy_(ds)

    def _numbers(self) -> tuple[int, ...]:
        heads, length, others = self.shape
        return length, others, heads, self.rows.shape[0], self.rows.shape[2]

    def _launch(
        self,
        kernel: object,
        entries: int,
        tensors: tuple[Tensor, ...],
        numbers: tuple[object, ...],
        rest: tuple[object, ...],
    ) -> None:
        heads, length, _ = self.shape
        blocks = ceil_div(ceil_div(length, _STEP), self.tile[1])
        launch(kernel, entries * heads * _STEP * blocks, tensors, numbers, (*self.tile, *rest), self.num_warps)


def _turn(x: Tensor, y: Tensor, adds: bool = False, most: float = 0.0) -> Tensor:
    """Write the transposed x (entries, H, L, M) to the rows of a workspace, y (entries, heads, M, L); or add it."""
    entries, heads, length, others = x.shape
    pitch = x.stride(2)
    if x.stride() != (heads * length * pitch, length * pitch, pitch, 1):
        x, pitch = x.contiguous(), others
    group, y_pitch = y.shape[1] // heads, y.stride(2)
    programs = entries * y.shape[1] * ceil_div(y_pitch, _TURNED) * ceil_div(others, _TURNED)
    constants = (adds, most, _TURNED)
    launch(turn_kernel, programs, (x, y), (length, others, group, pitch, y_pitch), constants, num_warps=4)
    return y


def _unit_rows(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()
