"""Calls with sequences: pads each sequence to whole tiles, runs a dense call, and moves results back to the tokens.

No tile has rows of two sequences. Otherwise NaN would spread from one sequence to another, because kernels multiply
masked values by 0, and NaN times 0 is NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...definition import define, is_of_transform, outside_of_transforms
from ...problem import AttentionProblem, MaskView, Packing, SequenceSpec
from ...problem.inputs import Inputs
from ...sequences.layout import token_places
from .blocks import BLOCK, Blocks, Places, band, list_shapes, mask_classes, tile_edges, tile_lists, tile_sums
from .call import attend, nothing, ready


def attend_sequences(problem: AttentionProblem, x: Inputs) -> tuple[Tensor, ...]:
    spec, sequences = problem.sequences, x.sequences
    assert spec is not None and sequences is not None
    if spec.number == 0 or spec.rows_q == 0:
        results = nothing(problem, x)
        return results if problem.flags.max_scores else results[: 1 + problem.return_lse]
    if spec.rows_k == 0:  # a row that no sequence has
        k, v = (torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, 1)) for rows in (x.k, x.v))
        x = x._replace(k=k, v=v)
    x = ready(problem, x)
    # A mask or a bias without elements belongs to a call without a pair.
    mask, bias = (None if tensor is None or tensor.numel() == 0 else tensor for tensor in (x.mask.dense, x.bias))
    queries, keys, blocks = sequence_blocks(problem, sequences.bounds, mask)
    mask_packing: Packing | None = None
    bias_packing: Packing | None = None
    if mask is not None:
        mask, mask_packing = as_rows(mask, problem.flags.mask_packing, queries, keys)
    if bias is not None:
        bias, bias_packing = as_rows(bias, problem.flags.bias_packing, queries, keys)
    if mask_packing is None and bias_packing is None:
        blocks = blocks._replace(places=None)
    rows = x._replace(
        q=_in_rows(x.q, queries),
        k=_in_rows(x.k, keys),
        v=_in_rows(x.v, keys),
        mask=MaskView() if mask is None else MaskView("dense", (mask,)),
        bias=bias,
    )
    results = attend(problem, rows, blocks, (mask_packing, bias_packing))
    out = move_rows(results[0], 1, queries.row, queries.token).view(*x.q.shape[:3], x.v.shape[3])
    if bias is None and x.bias is not None:
        out = out + x.bias.sum().to(out.dtype)  # so that it has a gradient
    numbers = [move_rows(each, 2, queries.row, queries.token, -torch.inf) for each in results[1:]]
    if x.q.shape[0] > 1:
        numbers = [each[0].unflatten(1, x.q.shape[:2]).transpose(0, 1).contiguous() for each in numbers]
    return out, *numbers


def _in_rows(x: Tensor, side: SequenceRows) -> Tensor:
    """Copy q, k or v (entries, tokens, H, D) into the order of the rows, (1, rows, H, D), each head contiguous."""
    # Always with 4 dims: Inductor's CPU kernel fails on a view of a computed tensor with fewer dims (torch 2.13).
    return move_rows(x.flatten(0, 1)[None].transpose(1, 2), 2, side.token, side.row).transpose(1, 2)


class SideSize(NamedTuple):
    """Bounds on the queries or keys of a call; Python numbers, because they are sizes of tensors.

    Attributes:
        entries, tokens: the first sizes of the tensor.
        is_packed: whether it is one row of tokens.
        most: a bound on the tokens of a sequence, at least 1.
        tiles: a bound on the tiles of all sequences.
    """

    entries: int
    tokens: int
    is_packed: bool | int
    most: int
    tiles: int

    @property
    def rows(self) -> int:
        return self.tiles * BLOCK


def side_sizes(spec: SequenceSpec) -> tuple[SideSize, SideSize]:
    """Bound the queries and the keys of a call; a side without tokens counts as 1 token."""
    sides = ((spec.rows_q, spec.max_seqlen_q, spec.packs_queries), (spec.rows_k, spec.max_seqlen_k, spec.packs_keys))
    queries, keys = (_side_size(spec.number, *side) for side in sides)
    return queries, keys


def _side_size(number: int, tokens: int, bound: int, is_packed: bool) -> SideSize:
    tokens = 1 if tokens == 0 else tokens
    most = min(tokens, 1 if bound == 0 else bound)
    tiles = number * ((most + BLOCK - 1) // BLOCK)
    if is_packed:
        # Each sequence has at most one partial tile.
        tiles = min(tiles, tokens // BLOCK + number)
    return SideSize(1 if is_packed else number, tokens, is_packed, most, tiles)


class SequenceRows(NamedTuple):
    """Queries or keys in rows of tiles: int32.

    Attributes:
        token: (rows,), the index of the token in each row; -1 for an empty row.
        row: (tokens,), the row of each token; -1 for a token that no sequence has.
        sequence, place: (rows,), the sequence of each row, and the position of its token in it. An empty row has the
            position of another token of its sequence, because kernels add masked gradients there, which are 0, or NaN
            if that sequence has NaN.
    """

    token: Tensor
    row: Tensor
    sequence: Tensor
    place: Tensor


class SequenceBlocks(NamedTuple):
    """The rows of padded sequences, and the lists, limits and `Places` of a call on these rows."""

    queries: SequenceRows
    keys: SequenceRows
    blocks: Blocks


# The rows and lists of calls without a mask are cached with the bounds, which `Sequences` cache. All layers of a model
# then use the same tensors, and save them for the backward pass once.
_kept = WeakTensorKeyDictionary()


def sequence_blocks(problem: AttentionProblem, bounds: Tensor, mask: Tensor | None) -> SequenceBlocks:
    """Make the padded rows of a call with at least one sequence, and its lists and limits, without synchronisation."""
    assert problem.sequences is not None
    sides, window = side_sizes(problem.sequences), problem.window
    numbers: list[Any] = [problem.flags.mask_packing, *map(list, sides), *window, problem.num_heads]
    if torch.compiler.is_compiling():
        return _named(_SEQUENCES(bounds, mask, *numbers))
    if mask is not None or is_of_transform(bounds):
        return _named(_sequence_tensors(bounds, mask, *numbers))
    kept = _kept.setdefault(bounds, {})
    blocks: SequenceBlocks | None = kept.get((sides, window))
    if blocks is None:
        with outside_of_transforms():
            blocks = kept[sides, window] = _named(_sequence_tensors(bounds, None, *numbers))
    return blocks


def _named(x: list[Tensor]) -> SequenceBlocks:
    queries, keys = SequenceRows(*x[:4]), SequenceRows(*x[4:8])
    places = Places(queries.sequence, queries.place, x[8], keys.place)
    return SequenceBlocks(queries, keys, Blocks(tuple(x[11:]), x[9], x[10], places))


def _sequence_tensors(
    bounds: Tensor,
    mask: Tensor | None,
    packing: Packing,
    size_q: list[int],
    size_k: list[int],
    left: int,
    right: int,
    num_heads: int,
) -> list[Tensor]:
    queries, _ = _sequence_rows(bounds[:, :2], SideSize(*size_q))
    keys, first_row_k = _sequence_rows(bounds[:, 2:], SideSize(*size_k))
    some, every = _band_classes(bounds, queries, keys, left, right)
    if mask is not None:
        mask_some, mask_every = _mask_classes(mask, packing, queries, keys)
        some, every = some & mask_some, every & mask_every
    token = (bounds[:, 0][queries.sequence] + queries.place).clamp(max=len(queries.row) - 1)
    limits = _limits(bounds, queries, first_row_k, left, right)
    return [*queries, *keys, token, *limits, *tile_lists(some, every, num_heads)]


def _sequences_fake(
    bounds: Tensor, mask: Tensor | None, packing: Packing, size_q: list[int], size_k: list[int], *numbers: int
) -> list[Tensor]:
    queries, keys = SideSize(*size_q), SideSize(*size_k)
    heads = 1 if mask is None or mask.shape[1] == 1 else numbers[-1]
    shapes: list[tuple[int, ...]] = []
    for side in (queries, keys):
        shapes += [(side.rows,), (side.entries * side.tokens,), (side.rows,), (side.rows,)]
    shapes += [(queries.rows,)] * 3 + list_shapes(1, heads, queries.tiles, keys.tiles)
    return [torch.empty(shape, dtype=torch.int32, device=bounds.device) for shape in shapes]


_SEQUENCES = define(
    "flex_sequences",
    "(Tensor bounds, Tensor? mask, str packing, SymInt[] size_q, SymInt[] size_k, SymInt left, SymInt right, "
    "SymInt num_heads) -> Tensor[]",
    _sequence_tensors,
    _sequences_fake,
)


def _sequence_rows(bounds: Tensor, size: SideSize) -> tuple[SequenceRows, Tensor]:
    """Make the padded rows of the queries or the keys; also return the first row of each sequence, int32 (S,).

    `bounds` are the first token and the number of tokens of each sequence, int32 (S, 2).
    """
    tiles = (bounds[:, 1] + (BLOCK - 1)) // BLOCK
    ends = tiles.cumsum(0, dtype=torch.int32)
    first_tile = ends - tiles
    tile = torch.arange(size.tiles, device=bounds.device, dtype=torch.int32)
    number = torch.searchsorted(ends, tile, right=True, out_int32=True)
    is_used = (number < len(ends))[:, None]  # tiles are left over if sequences are shorter than the bound
    number = number.clamp(max=len(ends) - 1)
    local = (tile - first_tile[number])[:, None].masked_fill(~is_used, 0)
    number = number[:, None]
    place = local * BLOCK + torch.arange(BLOCK, device=bounds.device, dtype=torch.int32)
    length = bounds[:, 1][number]
    first = bounds[:, 0][number] if size.is_packed else number * size.tokens
    token = (first + place).masked_fill(~(is_used & (place < length)), -1)
    tokens = token_places(bounds, size.entries, size.tokens, bool(size.is_packed))
    row = (first_tile[tokens.sequence] * BLOCK + tokens.place).masked_fill(~tokens.is_used, -1)
    place = place % length.clamp(1, size.most)
    side = SequenceRows(token.flatten(), row.to(torch.int32), number.expand(-1, BLOCK).flatten(), place.flatten())
    return side, first_tile * BLOCK


def _limits(bounds: Tensor, queries: SequenceRows, first_row_k: Tensor, left: int, right: int) -> tuple[Tensor, Tensor]:
    """Return the first and the last row of keys for each row of queries: int32, 1 and 0 for an empty row."""
    seqlen_q, seqlen_k = bounds[:, 1], bounds[:, 3]
    sequence_of_row = queries.sequence
    middle = queries.place + (seqlen_k - seqlen_q)[sequence_of_row]
    last = seqlen_k[sequence_of_row] - 1
    lower = torch.zeros_like(middle) if left < 0 else (middle - left).clamp(min=0)
    upper = last if right < 0 else torch.minimum(last, middle + right)
    first, is_empty = first_row_k[sequence_of_row], queries.token < 0
    return (first + lower).masked_fill(is_empty, 1), (first + upper).masked_fill(is_empty, 0)


def _band_classes(
    bounds: Tensor, queries: SequenceRows, keys: SequenceRows, left: int, right: int
) -> tuple[Tensor, Tensor]:
    """Return which tiles have a pair in the band of a sequence, and which have no other: (1, 1, rows, columns)."""
    # A tile belongs to the sequence of its first row, which has a token unless the tile is unused.
    own_q, own_k = queries.sequence[::BLOCK], keys.sequence[::BLOCK]
    first_row, first_key = queries.place[::BLOCK], keys.place[::BLOCK]
    last_row = torch.minimum(first_row + (BLOCK - 1), bounds[:, 1][own_q] - 1)
    last_key = torch.minimum(first_key + (BLOCK - 1), bounds[:, 3][own_k] - 1)
    is_full = (last_row - first_row == BLOCK - 1)[:, None] & (last_key - first_key == BLOCK - 1)
    is_used = (queries.token[::BLOCK] >= 0)[:, None] & (keys.token[::BLOCK] >= 0)
    offset = (bounds[:, 3] - bounds[:, 1])[own_q]
    rows = ((first_row + offset)[:, None], (last_row + offset)[:, None])
    some, every = band(None if left < 0 else -left, None if right < 0 else right, rows, (first_key, last_key))
    some = some & is_used & (own_q[:, None] == own_k)
    return some[None, None], (some & every & is_full)[None, None]


def _mask_classes(mask: Tensor, packing: Packing, queries: SequenceRows, keys: SequenceRows) -> tuple[Tensor, Tensor]:
    """Classify the tiles of a mask as `mask_classes` does; partial tiles, or tiles of two sequences, get any class."""
    x, read = as_rows(mask, packing, queries, keys)
    local_q, local_k = (side.place[::BLOCK] // BLOCK for side in (queries, keys))
    if read == "queries":
        is_empty = queries.token[:, None] < 0
        rows = tile_sums(x, 3)[0].index_select(1, queries.token.clamp(min=0)).masked_fill(is_empty, 0)
        count = rows.unflatten(1, (-1, BLOCK)).sum(2, dtype=torch.int32)[None, ..., local_k]
        return count > 0, count == BLOCK * BLOCK
    some, every = mask_classes(x, *(tile_edges(n, mask.device) for n in x.shape[2:]))
    if read == "none":
        sequence_of_tile = queries.sequence[::BLOCK]
        entry = sequence_of_tile if x.shape[0] > 1 else torch.zeros_like(sequence_of_tile)
        at = (entry[:, None], slice(None), local_q[:, None], local_k)
        some, every = (classes[at].permute(2, 0, 1)[None] for classes in (some, every))
    return some, every


def move_rows(x: Tensor, dim: int, there: Tensor, back: Tensor, fill: float = 0.0) -> Tensor:
    """Gather the rows `there` of a dim, `fill` for -1; the gradient gathers the rows `back` of its input, 0 for -1.

    Rows are never summed, so that values in rows of no sequence have no effect, NaN included.
    """
    if x.requires_grad and torch.is_grad_enabled():
        result: Tensor = _MoveRows.apply(x, dim, there, back, fill)
        return result
    return _read_rows(x, dim, there, fill)


class _MoveRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, there: Tensor, back: Tensor, fill: float) -> Tensor:
        ctx.save_for_backward(back)
        ctx.dim = dim
        return _read_rows(x, dim, there, fill)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        return _read_rows(gradient, ctx.dim, back, 0.0), None, None, None, None


def _read_rows(x: Tensor, dim: int, which: Tensor, fill: float) -> Tensor:
    is_none = (which < 0).view([-1] + [1] * (x.dim() - dim - 1))
    # Dynamo of torch 2.11 loses the gradient of a Function that writes in place in forward; a graph fuses the copy.
    write = Tensor.masked_fill if torch.compiler.is_compiling() else Tensor.masked_fill_
    return write(x.index_select(dim, which.clamp(min=0)), is_none, fill)


def as_rows(x: Tensor, packing: Packing, queries: SequenceRows, keys: SequenceRows) -> tuple[Tensor, Packing | None]:
    """Copy a mask or a bias into the order of the rows, and return the packing by which it is still indexed.

    A tensor with a value per score is not copied, but indexed through `Places`: see `graph.Shared`. Other tensors are
    copied into the order of the rows, and the second result is None.
    """
    b, _, i, j = x.shape
    if i > 1 and j > 1:
        return x, packing
    if packing == "keys":
        return move_rows(x, 3, keys.token, keys.row), None
    if packing == "queries":
        return (move_rows(x, 2, queries.token, queries.row) if i > 1 else x), None
    if i == j == 1 and b == 1:
        return x, None
    side, dim = (keys, 3) if j > 1 else (queries, 2)
    by_sequence = x.flatten(2)  # (S or 1, H, places or 1)
    sequence = side.sequence if b > 1 else torch.zeros_like(side.sequence)
    place = side.place if i > 1 or j > 1 else torch.zeros_like(side.place)
    return by_sequence[sequence, :, place].t()[None].unsqueeze(5 - dim), None
