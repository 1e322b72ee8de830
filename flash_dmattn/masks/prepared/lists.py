"""Makes the tensors of a `ListMask`, from the index of a selector or from the best of its scores."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...definition import define, is_transformed, map_each
from ...problem import Band, SequenceSpec
from ...reference.lists import gather_entries
from ...sequences.layout import token_places
from .. import topk
from . import operators

# Elements of a chunk of rows; each needs about 25 bytes of work space.
CHUNK_ELEMENTS = topk.CHUNK_ELEMENTS


def seen_blocks(
    block_size: tuple[int, int], lengths: tuple[int, int], band: Band | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the first and the last block of keys that queries of each list may see, both int64 (lists,)."""
    (block_q, block_k), (seqlen_q, seqlen_k) = block_size, lengths
    first = torch.arange(-(-seqlen_q // block_q), device=device) * block_q
    last = (first + block_q - 1).clamp(max=seqlen_q - 1)
    low, high = torch.zeros_like(first), torch.full_like(first, seqlen_k - 1)
    if band is not None:
        low, high = (first + band.low).clamp(min=0), (last + band.high).clamp(max=seqlen_k - 1)
    return low // block_k, torch.div(high, block_k, rounding_mode="floor")


class SeenKeys(NamedTuple):
    """The keys that each query may see with sequences; all (1 or S, rows), int64 except for `is_used`.

    Attributes:
        sequence: the sequence of the row; an arbitrary one for a row of no sequence.
        is_used: whether the row is a query of a sequence.
        first: the first key of that sequence among the rows of k; 0 if keys are not packed.
        low, high: the first and the last key that it may see, as positions in the sequence; `high` is -1 if it may see
            no key.
    """

    sequence: Tensor
    is_used: Tensor
    first: Tensor
    low: Tensor
    high: Tensor


def keys_seen(bounds: Tensor, spec: SequenceSpec, window: tuple[int, int]) -> SeenKeys:
    """Find the keys that queries may see.

    Args:
        bounds: int32 (S, 4), of the sequences.
        spec: their layout.
        window: of the mask, with causality folded in.
    """
    shape = (1 if spec.packs_queries else spec.number, spec.rows_q)
    if spec.number == 0 or spec.rows_q == 0:
        nobody = bounds.new_zeros(shape, dtype=torch.int64)
        return SeenKeys(nobody, nobody > 0, nobody, nobody, nobody - 1)
    sequence, place, is_used = token_places(bounds, *shape, spec.packs_queries)
    _, seqlen_q, first, seqlen_k = bounds[sequence].long().unbind(1)
    diagonal, (left, right) = place + seqlen_k - seqlen_q, window
    low = torch.zeros_like(place) if left < 0 else (diagonal - left).clamp(min=0)
    high = seqlen_k - 1 if right < 0 else torch.minimum(diagonal + right, seqlen_k - 1)
    high = torch.where(is_used, high, -1).clamp(min=-1)
    return SeenKeys(*(x.view(shape) for x in (sequence, is_used, first, low, high)))


def ordered(index: Tensor, blocks: int, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the keys, count and slots of a `ListMask`, by one sort of key and slot together, in chunks of rows.

    Args:
        index: integers (Bm, Hm, R, K). Entries that are no block, or hidden from all queries of the list, are left out.
        blocks: the number of blocks of keys.
        low, high: the first and the last block that queries of each list may see, (R,) or (Bm, 1, R).
    """
    # The loop depends on sizes, on which a compiler would specialise the graph, and writes into tensors, which vmap
    # refuses. Both get one operator.
    run = _ORDERED if torch.compiler.is_compiling() or is_transformed() else _ordered
    tensors: tuple[Tensor, Tensor, Tensor] = run(index, blocks, low, high)
    return tensors


def _ordered(index: Tensor, blocks: int, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, number, places = index.shape
    keys = torch.empty(index.shape, dtype=torch.int32, device=index.device)
    slots, count = torch.empty_like(keys), keys.new_empty(index.shape[:3])
    # Key and slot are packed in one integer; a sort of int32 takes half the time of int64.
    narrow = torch.int32 if (blocks + 1) * max(places, 1) < 2**31 else torch.int64
    slot = torch.arange(places, dtype=narrow, device=index.device)
    step = max(1, CHUNK_ELEMENTS // max(1, batch * heads * places))
    for start in range(0, number, step):
        rows = slice(start, min(start + step, number))
        part = index[:, :, rows].long()
        seen = (part >= low[..., rows, None]) & (part <= high[..., rows, None]) & (part >= 0) & (part < blocks)
        part = torch.where(seen, part, blocks).to(narrow)
        packed = (part * places + slot).sort(-1).values
        key = torch.div(packed, max(places, 1), rounding_mode="floor")
        again = torch.zeros_like(key, dtype=torch.bool)
        again[..., 1:] = key[..., 1:] == key[..., :-1]
        left = ~again & (key < blocks)
        # Entries that count move to the front, in their order; the rest go to an extra column, which is cut off.
        place = torch.where(left, left.cumsum(-1) - 1, places)
        for made, values in ((keys, key), (slots, packed - key * places)):
            moved = made.new_full((*key.shape[:3], places + 1), -1)
            made[:, :, rows] = moved.scatter_(-1, place, values.to(torch.int32))[..., :places]
        count[:, :, rows] = left.sum(-1, dtype=torch.int32)
    return keys, count, slots


def _ordered_fake(index: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    keys = index.new_empty(index.shape, dtype=torch.int32)
    return keys, keys.new_empty(index.shape[:3]), torch.empty_like(keys)


_ORDERED = define(
    "order_lists",
    "(Tensor index, SymInt blocks, Tensor low, Tensor high) -> (Tensor keys, Tensor count, Tensor slots)",
    _ordered,
    _ordered_fake,
)
map_each("order_lists", _ORDERED)


def best(
    scores: Tensor | topk.ScoresByRows,
    allowed: Tensor | None,
    low: Tensor,
    high: Tensor,
    sizes: tuple[int, int, int, int],
    k: int,
    local: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys, count and slots of the k best blocks of each list, as `topk_mask` chooses them; no row is sorted.

    Args:
        scores: (B or 1, H or 1, lists or 1, blocks); or `IndexScores`, which are computed in chunks of lists.
        allowed: bool (B or 1, H or 1, lists or 1, blocks or 1), or None.
        low, high: as in `ordered`, (lists,).
        sizes: (batch, heads, lists, blocks) of the result.
        k: the number of chosen blocks.
        local: a list also gets the last `local` blocks that its queries may see.
    """
    if isinstance(scores, Tensor):
        tensors, relu, scale = [scores], False, None
    else:
        tensors, relu, scale = [scores.q, scores.k, scores.weights], scores.relu, scores.scale
    run = _BEST if torch.compiler.is_compiling() or is_transformed() else _best
    keys, count = run([x.detach() for x in tensors], relu, scale, allowed, low, high, *sizes, k, local)
    return keys, count, keys.new_empty(*sizes[:3], 0)


def _best(
    tensors: list[Tensor],
    relu: bool,
    scale: float | None,
    allowed: Tensor | None,
    low: Tensor,
    high: Tensor,
    batch: int,
    heads: int,
    number: int,
    blocks: int,
    k: int,
    local: int,
) -> tuple[Tensor, Tensor]:
    """Compute `best`; `tensors` are [scores], or q, k and weights of `IndexScores`."""
    rows_of: Any = _rows if len(tensors) == 1 else partial(topk.weighted_products, relu=relu, scale=scale)
    keys, count = _best_fake(tensors, relu, scale, allowed, low, high, batch, heads, number, blocks, k, local)
    columns = torch.arange(blocks, device=keys.device)
    step = max(1, CHUNK_ELEMENTS // max(1, batch * heads * blocks))
    for start in range(0, number, step):
        rows = slice(start, min(start + step, number))
        visible = (columns >= low[rows, None]) & (columns <= high[rows, None])
        if allowed is not None:
            visible = visible & _rows(allowed, rows)
        scores = topk.sort_keys(rows_of(*tensors, rows=rows), visible)
        made = operators.packer_for(scores).list_best(scores, high[rows], k, local, keys.shape[3])
        keys[:, :, rows], count[:, :, rows] = made
    return keys, count


def _rows(tensor: Tensor, rows: slice) -> Tensor:
    return tensor if tensor.shape[2] == 1 else tensor[:, :, rows]


def _best_fake(tensors: list[Tensor], *others: Any) -> tuple[Tensor, Tensor]:
    batch, heads, number, blocks, k, local = others[5:]
    keys = tensors[0].new_empty(batch, heads, number, min(k + local, blocks), dtype=torch.int32)
    return keys, keys.new_empty(batch, heads, number)


_BEST = define(
    "list_best",
    "(Tensor[] scores, bool relu, float? scale, Tensor? allowed, Tensor low, Tensor high, SymInt batch, SymInt heads, "
    "SymInt number, SymInt blocks, SymInt k, SymInt local) -> (Tensor keys, Tensor count)",
    _best,
    _best_fake,
)
map_each("list_best", _BEST)


class _Take(torch.autograd.Function):
    """Gather scores by an index; the gradient is summed in a fixed order, without atomic adds."""

    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor, index: Tensor) -> Tensor:
        if scores.shape[3] == 0:
            shape = torch.broadcast_shapes(scores.shape[:3], index.shape[:3])
            return scores.new_zeros(shape + index.shape[3:])
        return gather_entries(scores, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        scores, index = inputs
        ctx.save_for_backward(index)
        ctx.shape = scores.shape

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Put.apply(gradient, *ctx.saved_tensors, ctx.shape), None


class _Put(torch.autograd.Function):
    """Scatter values by an index without repeats in a row, and sum over broadcast dims: the gradient of `_Take`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, index: Tensor, shape: tuple[int, ...]) -> Tensor:
        number = shape[3]
        sums = values.new_zeros(shape, dtype=torch.promote_types(values.dtype, torch.float32))
        step = max(1, CHUNK_ELEMENTS // max(1, values.shape[0] * values.shape[1] * number))
        for rows in topk.row_chunks(values.shape[2], step):
            place = index[:, :, rows].long()
            place = torch.where(place < 0, number, place).expand(values[:, :, rows].shape)
            row = values.new_zeros((*place.shape[:3], number + 1)).scatter_(3, place, values[:, :, rows])[..., :number]
            part = sums if shape[2] == 1 else sums[:, :, rows]
            part += row.to(sums.dtype).sum_to_size(part.shape)
        return sums.to(values.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _Take.apply(gradient, *ctx.saved_tensors), None, None


def take(scores: Tensor, index: Tensor) -> Tensor:
    """Gather scores (B, H, 1 or rows, N) by an index (Bm, Hm, rows, K) without repeats in a row; 0 where it is -1."""
    taken: Tensor = _Take.apply(scores, index)
    return taken
