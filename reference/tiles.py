"""The operands and results of one chunk: its rows, its keys, its scores, and its part of the gradient of bias."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import formula
from .blocks import Block, grouped_own
from .chunks import Chunks, Span
from .distances import ChunkBias, Distances, dense, distance_sums
from .lists import ListValues, blocks_of, spread, sum_blocks
from .masks import ListReader, run_of

_LOG2_E = math.log2(math.e)


def multiply(a: Tensor, b: Tensor, into: Tensor, scale: float = 1.0, *, keep: bool = False) -> Tensor:
    """Replace into by scale * a @ b; with keep add that to into."""
    # In place, because autocast, which would round a and b, does not apply to in-place operations. Operands in half
    # precision were cast to fp32, because elementwise passes over the scores bound this path, on a GPU too, and not
    # products.
    return into.baddbmm_(a, b, beta=float(keep), alpha=scale)


def exponential(x: Tensor) -> Tensor:
    """Replace x by exp(x)."""
    # On a CPU torch.exp leaves its vector path for every -inf: 1.4 ns per element if 30 % are -inf. exp2 does not. It
    # takes 0.3 ns with the multiplication, whose rounding error is one bit of x.
    return x.mul_(_LOG2_E).exp2_()


def softmax_backward(dp: Tensor, p: Tensor, delta: Tensor | None) -> Tensor:
    """Replace dp by p * (dp - delta). If delta is None, p has whole rows, and delta = rowsum(p * dp)."""
    if delta is not None:
        return dp.sub_(delta).mul_(p)
    # One pass for the sum and one for the result. If p is nearly 1 at one key, dp - delta cancels, and only a delta
    # computed from the same p and dp is as accurate as plain PyTorch.
    return torch.ops.aten._softmax_backward_data.out(dp, p, -1, p.dtype, grad_input=dp)


class Rows:
    """The rows of blocks of a (B, Lq, Hq, X) tensor, as (pairs, G * rows, X) matrices in the softmax's dtype."""

    def __init__(self, x: Tensor, chunks: Chunks) -> None:
        batch, rows, _, width = x.shape
        self._x = x.view(batch, rows, chunks.num_heads_k, chunks.group, width).permute(0, 2, 3, 1, 4)
        self._dtype = chunks.dtype

    def _view(self, block: Block) -> Tensor:
        return self._x if block.is_whole else self._x[block.batch, block.heads, :, block.rows]

    def get(self, block: Block) -> Tensor:
        x = self._view(block)
        batch, heads, group, rows, width = x.shape
        return x.to(self._dtype).reshape(batch * heads, group * rows, width)

    def put(self, block: Block, rows: Tensor) -> None:
        view = self._view(block)
        view.copy_(rows.view(view.shape))


class Keys:
    """The keys of blocks of a (B, Lk, Hk, X) tensor, as (pairs, keys, X) matrices in the softmax's dtype."""

    def __init__(self, x: Tensor, chunks: Chunks) -> None:
        self._x = x.transpose(1, 2)
        self._dtype = chunks.dtype
        self._hold = chunks.extent.keys >= chunks.seqlen_k  # if a chunk has all keys, cast them once for all rows
        self._held: tuple[slice, slice] | None = None

    def get(self, block: Block, keys: slice | Tensor) -> Tensor:
        if isinstance(keys, Tensor):
            # Along the keys of the layout that most calls have, (B, Lk, Hk, X), whole rows of heads are copied.
            rows = self._x.transpose(1, 2)[block.batch, :, block.heads].index_select(1, keys)
            return self._matrix(rows.transpose(1, 2))
        if block.is_whole and keys.stop - keys.start == self._x.shape[2]:
            return self._matrix(self._x)
        if not self._hold:
            return self._matrix(self._x[block.batch, block.heads, keys])
        if self._held != block[:2]:
            self._held, self._matrices = block[:2], self._matrix(self._x[block.batch, block.heads])
        return self._matrices[:, keys]

    def _matrix(self, x: Tensor) -> Tensor:
        return x.to(self._dtype).flatten(0, 1)


class KeySums:
    """The sums over queries of one (batch, heads) part: a row for each key, in the softmax's dtype.

    Args:
        gradient: (B, Lk, Hk, X), into which the sums are written in the end.
    """

    def __init__(self, gradient: Tensor, batch: slice, heads: slice, dtype: torch.dtype) -> None:
        self._view = gradient.transpose(1, 2)[batch, heads]
        entries, num_heads, seqlen_k, width = self._view.shape
        self._sums = gradient.new_zeros((entries * num_heads, seqlen_k, width), dtype=dtype)

    def add_product(self, keys: slice | Tensor, a: Tensor, b: Tensor, scale: float) -> None:
        """Add scale * a @ b to the rows of these keys."""
        if isinstance(keys, slice):
            multiply(a, b, self._sums[:, keys], scale, keep=True)
        else:
            sums = self._sums.index_select(1, keys)
            self._sums.index_copy_(1, keys, multiply(a, b, sums, scale, keep=True))

    def put(self) -> None:
        """Write the sums into the gradient."""
        self._view.copy_(self._sums.view(self._view.shape))


class BiasReader:
    """A bias, sliced block by block."""

    def __init__(self, bias: Tensor, chunks: Chunks, repeat: int) -> None:
        self._bias = grouped_own(bias, chunks.num_heads_k, chunks.num_heads)
        self._repeat = repeat

    def part(self, block: Block, keys: slice | Tensor) -> Tensor:
        """Return the bias of a chunk, (batch, heads, G, rows, keys); a dim is 1 where all agree."""
        return block.pick(self._bias, keys, self._repeat)


class DistanceReader(BiasReader):
    """A bias by distance, expanded block by block."""

    def __init__(self, bias: Distances, chunks: Chunks, repeat: int) -> None:
        self._bias = formula.grouped(bias.values, chunks.num_heads_k, chunks.num_heads)
        self._distances, self._chunks, self._repeat = bias, chunks, repeat

    def part(self, block: Block, keys: slice | Tensor) -> Tensor:
        run = run_of(keys)
        values = block.pick(self._bias, slice(0, self._bias.shape[4]), self._repeat)
        own = moved(self._distances, self._chunks, block, run)._replace(values=values.flatten(0, 1))
        part = dense(own, block.rows.stop - block.rows.start, run.stop - run.start).unflatten(0, values.shape[:2])
        return part if isinstance(keys, slice) else part.index_select(4, keys - run.start)


class ListValuesReader(BiasReader):
    """The values of entries of lists, expanded block by block."""

    def __init__(self, bias: ListValues, chunks: Chunks, repeat: int) -> None:
        self._bias = formula.grouped(bias.values, chunks.num_heads_k, chunks.num_heads)
        self._lists = ListReader(bias.lists, chunks.num_heads_k, chunks.num_heads, bias.repeat)
        self._repeat = repeat
        # There is one row of values for each list, or one for each query.
        self._block_q = 1 if bias.values.shape[2] == chunks.seqlen_q else bias.lists.block_q

    def part(self, block: Block, keys: slice | Tensor) -> Tensor:
        slots = self._lists.slots(block, keys)
        own = block._replace(rows=blocks_of(block.rows, self._block_q))
        values = own.pick(self._bias, slice(0, self._bias.shape[4]), self._repeat)
        if values.shape[4] == 0:
            return values.new_zeros(slots.shape)
        values = spread(values, 3, self._block_q, block.rows.start, block.rows.stop)
        return torch.take_along_dim(values, slots.clamp(min=0).long(), 4)


def bias_reader(bias: ChunkBias, chunks: Chunks, repeat: int) -> BiasReader:
    if isinstance(bias, ListValues):
        return ListValuesReader(bias, chunks, repeat)
    if isinstance(bias, Tensor):
        return BiasReader(bias, chunks, repeat)
    return DistanceReader(bias, chunks, repeat)


def moved(bias: Distances, chunks: Chunks, block: Block, run: slice) -> Distances:
    """Return the bias of the scores of a block and a run of keys."""
    sizes = (block.rows.stop - block.rows.start, run.stop - run.start)
    return bias.moved(block.rows.start, run.start, *sizes, (chunks.seqlen_q, chunks.seqlen_k))


class Scores:
    """The scores of one chunk after another, in one buffer; -inf where the mask or the band forbids them."""

    def __init__(
        self,
        chunks: Chunks,
        bias: ChunkBias | None,
        softmax_scale: float,
        softcap: float,
        keep_slope: bool = False,
        bias_repeat: int = 1,
    ) -> None:
        self._chunks = chunks
        self._bias = None if bias is None else bias_reader(bias, chunks, bias_repeat)
        self._scale, self._softcap, self._keep_slope = softmax_scale, softcap, keep_slope
        self.slope: Tensor | None = None  # of the softcap at the scores last computed

    def compute(self, block: Block, span: Span, q_block: Tensor, k_block: Tensor) -> Tensor:
        """Return the (pairs, G * rows, keys) scores; they stay valid until the next call."""
        keys, mask = span.keys, self._chunks.mask
        allowed = mask.part(block, keys) if mask is not None and span.is_masked else None
        shape = (*q_block.shape[:2], k_block.shape[1])
        s = self._chunks.buffer(0, shape)
        if self._softcap == 0:
            # Bias and mask are written first and the product is added to them, which saves a pass over the scores.
            added = self._add_to_be(s, block, keys, allowed)
            multiply(q_block, k_block.mT, s, self._scale, keep=added)
        else:
            multiply(q_block, k_block.mT, s, self._scale / self._softcap).tanh_()
            if self._keep_slope:
                self.slope = self._chunks.buffer(2, shape)
                torch.mul(s, s, out=self.slope).neg_().add_(1.0)
            s.mul_(self._softcap)
            addend = self._chunks.buffer(1, shape)
            if self._add_to_be(addend, block, keys, allowed):
                s.add_(addend)
        # Write -inf where the mask forbids a score, even if its key holds inf or NaN. On a CPU -inf was added to these
        # scores, and they are -inf now unless their product was inf or NaN. Then the sum over s is NaN; this sum takes
        # a tenth of the time of masked_fill_.
        if allowed is not None and not (_adds_mask(s.device) and not s.sum().isnan()):
            block.by_group(s, self._chunks.group).masked_fill_(~allowed, -math.inf)
        for columns, outside in self._chunks.band_edges(block, keys):
            block.by_group(s, self._chunks.group)[..., columns].masked_fill_(outside, -math.inf)
        return s

    def _add_to_be(self, s: Tensor, block: Block, keys: slice | Tensor, allowed: Tensor | None) -> bool:
        """Write the tensor that is added to the products into s: the bias, and on a CPU -inf where the mask forbids.

        Return False, with s unwritten, if there is no such tensor.
        """
        s = block.by_group(s, self._chunks.group)
        bias = None if self._bias is None else self._bias.part(block, keys)
        if allowed is not None and _adds_mask(s.device):
            _merge_by_minimum(s, allowed, bias)
            return True
        if bias is not None:
            s.copy_(bias)
        return bias is not None


def _adds_mask(device: torch.device) -> bool:
    return device.type == "cpu"


def _merge_by_minimum(s: Tensor, mask: Tensor, bias: Tensor | None) -> None:
    # On a CPU masked_fill_ and torch.where branch on every element, 1.1 ns for a random mask. The minimum of the bias
    # and +inf or -inf has the same result, and its vector code takes 0.2 ns. The mask often has one head for all, so it
    # is converted to floats in its shape.
    limit = mask.to(s.dtype).sub_(0.5).mul_(math.inf)
    if bias is None:
        s.copy_(limit.clamp_(max=0.0))
    else:
        s.copy_(bias)
        torch.minimum(s, limit, out=s)


class BiasGradient:
    """The gradient of a bias, summed chunk by chunk in the shape of the bias.

    Args:
        bias: (Bb, Hb, Lq or 1, Lk or 1).
        per_row: (B, Hq, Lq), the gradient of a bias of one value per query; None for zeros.
        chunks: of the call.
        repeat: of the bias.
        by_score: whether a bias of one value per query also sums the gradients of scores, instead of `per_row`.
    """

    def __init__(
        self, bias: Tensor, per_row: Tensor | None, chunks: Chunks, repeat: int, by_score: bool = False
    ) -> None:
        own = formula.grouped(bias, chunks.num_heads_k, chunks.num_heads).shape
        full = (chunks.batch, chunks.num_heads_k, chunks.group, chunks.seqlen_q, chunks.seqlen_k)
        self._shape, self._dtype, self._group, self._repeat = bias.shape, bias.dtype, chunks.group, repeat
        self._written_once = own == full
        # A bias of one value per query only shifts lse, so its gradient is one number per row.
        self.needs_scores = by_score or own[4] != 1
        # Zeroing a gradient that chunks overwrite entirely would take a tenth of the backward pass.
        overwritten = self.needs_scores and self._written_once and chunks.skip_nothing()
        create = bias.new_empty if overwritten else bias.new_zeros
        self._sum = create(own, dtype=bias.dtype if self._written_once else chunks.dtype)
        if not self.needs_scores and per_row is not None:
            entry_sums = formula.sum_entries(per_row.unflatten(1, full[1:3]).unsqueeze(4), own[0], repeat)
            self._sum += entry_sums.sum_to_size(own)

    def add(self, block: Block, keys: slice | Tensor, ds: Tensor) -> None:
        if not self.needs_scores:
            return
        ds = block.by_group(ds, self._group)
        if isinstance(keys, Tensor) and self._sum.shape[4] > 1:
            rows = block.pick(self._sum, slice(0, self._sum.shape[4]), self._repeat)
            sums = rows.index_select(4, keys)
            rows.index_copy_(4, keys, sums.add_(ds.sum_to_size(sums.shape)))
            return
        place = block.pick(self._sum, keys, self._repeat)
        if self._written_once:
            place.copy_(ds)
        else:
            place.add_(ds.sum_to_size(place.shape))

    def result(self) -> Tensor:
        """Return the gradient in bias's shape and dtype."""
        return self._sum.view(self._shape).to(self._dtype)


class DistanceGradient(BiasGradient):
    """The gradient of a bias by distance, summed chunk by chunk in the shape of its values."""

    def __init__(self, bias: Distances, chunks: Chunks, repeat: int) -> None:
        values = bias.values
        self._shape, self._dtype, self._group, self._repeat = values.shape, values.dtype, chunks.group, repeat
        self._bias, self._chunks, self.needs_scores = bias, chunks, True
        own = formula.grouped(values, chunks.num_heads_k, chunks.num_heads).shape
        self._sum = values.new_zeros(own, dtype=chunks.dtype)

    def add(self, block: Block, keys: slice | Tensor, ds: Tensor) -> None:
        run = run_of(keys)
        total = block.pick(self._sum, slice(0, self._sum.shape[4]), self._repeat)
        ds = block.by_group(ds, self._group)
        ds = ds.sum_to_size((*total.shape[:3], *ds.shape[3:]))
        total += distance_sums(
            _in_run(ds, keys, run), moved(self._bias, self._chunks, block, run)._replace(values=total)
        )


class ListValuesGradient(BiasGradient):
    """The gradient of the values of entries of lists, summed chunk by chunk in their shape."""

    def __init__(self, bias: ListValues, chunks: Chunks, repeat: int) -> None:
        values = bias.values
        self._shape, self._dtype, self._group, self._repeat = values.shape, values.dtype, chunks.group, repeat
        self.needs_scores = True
        self._lists = ListReader(bias.lists, chunks.num_heads_k, chunks.num_heads, bias.repeat)
        self._block_q = 1 if values.shape[2] == chunks.seqlen_q else bias.lists.block_q
        self._block_k = bias.lists.block_k
        own = formula.grouped(values, chunks.num_heads_k, chunks.num_heads).shape
        self._sum = values.new_zeros(own, dtype=chunks.dtype)

    def add(self, block: Block, keys: slice | Tensor, ds: Tensor) -> None:
        own = block._replace(rows=blocks_of(block.rows, self._block_q))
        total = own.pick(self._sum, slice(0, self._sum.shape[4]), self._repeat)
        if total.shape[4] == 0:
            return
        run, step = run_of(keys), self._block_k
        slots = self._lists.block_slots(block, run)
        ds = _in_run(block.by_group(ds, self._group), keys, run)
        # If lists and values have one head for several, their gradients are added before the scatter.
        shared = [1 if a == b == 1 else n for a, b, n in zip(slots.shape[:3], total.shape[:3], ds.shape, strict=False)]
        ds = ds.sum_to_size((*shared, *ds.shape[3:]))
        ds = sum_blocks(ds, 4, step, run.start)
        # One more column is for pairs without an entry. Every other element is written once, so that the order does not
        # matter.
        moved = ds.new_zeros((*ds.shape[:4], total.shape[4] + 1))
        place = torch.where(slots < 0, total.shape[4], slots).long().expand(ds.shape)
        moved = moved.scatter_(4, place, ds)[..., :-1]
        moved = sum_blocks(moved, 3, self._block_q, block.rows.start)
        total += moved.sum_to_size(total.shape)


def _in_run(ds: Tensor, keys: slice | Tensor, run: slice) -> Tensor:
    """Return the gradient of the scores of a run of keys, 0 for keys that a chunk does not have."""
    if isinstance(keys, slice):
        return ds
    return ds.new_zeros((*ds.shape[:4], run.stop - run.start)).index_copy_(4, keys - run.start, ds)
