"""The operators that prepare masks, and the choice of the packer: PyTorch, or a faster one for the device.

A compiled graph contains these operators, not the loops inside, which would take a minute to compile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...definition import LIBRARY, define, map_each, unless_watched
from ...problem import Band, Layout, MaskChoice, MaskView, SequenceSpec, collapse, hint, make_band
from ...reference.lists import spread, table
from ..topk import list_best, score_keys, topk_intervals
from . import intervals, packing
from .intervals import IntervalTiles, KeyIntervals, MaskIntervals
from .packing import TILE, TILE_WORDS, KeySet, MaskPacking, TileLists, row_counts, tile_count, tiles

# Below this number of queries a call is bound by loads of k and v, so gathering single keys is free; from it on,
# gathering costs five times as much as tiles.
FEW_QUERIES = 16
# From this number of queries on, over all heads of a key, a copy of k and v is at most a tenth of a forward pass. H200,
# bf16: the copy moves 8 * D bytes per key at 3 TB/s, and each query needs 4 * D FLOP per key, 6e-15 s * D.
ORDER_FROM = 4096

TwoTensors = tuple[Tensor, Tensor]
ThreeTensors = tuple[Tensor, Tensor, Tensor]


def _pack_tiles(mask: Tensor, band: Band | None) -> list[Tensor]:
    bits, classes = packing.pack_mask(mask, band)
    return [bits, classes, *packing.list_tiles(classes)]


def list_intervals(start: Tensor, stop: Tensor, order: Tensor, seqlen_q: int) -> IntervalTiles:
    """Implement `Packer.interval_tiles` in PyTorch, except for the lists, which the fastest packer makes."""
    bounds = intervals.interval_bounds(start, stop, order)
    return bounds, *packer_for(bounds).list_tiles(intervals.interval_classes(bounds, seqlen_q))


def row_intervals(
    mask: Tensor, seqlen_q: int, band: Band | None, reorder: bool, *operands: Tensor | None
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Implement `Packer.row_intervals` by two functions of the fastest packer of the device."""
    fastest = packer_for(mask)
    start, stop, order = fastest.key_intervals(mask, seqlen_q, band, reorder)
    return (start, stop, order, *fastest.interval_tiles(start, stop, order, seqlen_q)), ()


def tiles_of_lists(
    keys: Tensor, block_size: tuple[int, int], lengths: tuple[int, int], band: Band | None
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Implement `Packer.tiles_of_lists` in PyTorch, except for the lists, which the fastest packer makes."""
    (seqlen_q, seqlen_k), number = lengths, keys.shape[:2]
    everything = torch.ones(1, 1, 1, seqlen_k, dtype=torch.bool, device=keys.device)
    start, stop, order = intervals.key_intervals(everything, seqlen_q, band, reorder=False)
    bounds = intervals.interval_bounds(start, stop, order)
    classes = intervals.interval_classes(bounds, seqlen_q)
    listed = table(keys, keys[..., :0], 0, -(-seqlen_k // block_size[1])) >= 0
    for dim in (2, 3):
        listed = spread(listed, dim, block_size[dim - 2] // TILE, 0, classes.shape[dim])
    classes = torch.where(listed, classes, 0)
    start, stop, order, bounds = (x.expand(*number, *x.shape[2:]).contiguous() for x in (start, stop, order, bounds))
    return (start, stop, order, bounds, *packer_for(classes).list_tiles(classes)), ()


class Packer(NamedTuple):
    """The functions that prepare a mask, by default in plain PyTorch. All packers return the same bits.

    `pack_tiles` makes the tensors of a `TileMask` from a bool mask of any strides, `interval_tiles` the bounds and
    lists of an `IntervalMask`. `row_intervals` makes all tensors of an `IntervalMask` from a mask with one row. It may
    also make `MaskView.fresh`, if it gets k, v, and a bias with one value per key or None.

    `tiles_of_lists` makes all tensors of an `IntervalMask`, and perhaps `MaskView.fresh`. Its arguments are the keys of
    a `ListMask` whose blocks are whole tiles, the block size, (Lq, Lk) and the band. Tile lists have only listed tiles.
    Bounds and intervals describe only the band, not the lists. Kernels that walk tile lists compute the right result,
    because they use bounds only inside partial tiles. Code that uses the intervals would ignore the lists.

    The other functions are described under their names in `packing`, `intervals` and `topk`.
    """

    pack_tiles: Callable[[Tensor, Band | None], list[Tensor]] = _pack_tiles
    list_tiles: Callable[[Tensor], TileLists] = packing.list_tiles
    key_set: Callable[[Tensor], KeySet] = packing.key_set
    score_keys: Callable[[Tensor, Tensor | None], Tensor] = score_keys
    key_intervals: Callable[[Tensor, int, Band | None, bool], KeyIntervals] = intervals.key_intervals
    row_intervals: Callable[..., tuple[Sequence[Tensor], Sequence[Tensor]]] = row_intervals
    tiles_of_lists: Callable[
        [Tensor, tuple[int, int], tuple[int, int], Band | None], tuple[Sequence[Tensor], Sequence[Tensor]]
    ] = tiles_of_lists
    mask_intervals: Callable[[Tensor, Tensor, int], MaskIntervals] = intervals.mask_intervals
    interval_tiles: Callable[[Tensor, Tensor, Tensor, int], IntervalTiles] = list_intervals
    topk_intervals: Callable[[Tensor, int, int, int], TwoTensors] = topk_intervals
    key_order: Callable[[Tensor, Tensor, int], Tensor] = intervals.key_order
    first_places: Callable[[Tensor, Tensor, Tensor, int], ThreeTensors] = intervals.first_places
    list_best: Callable[[Tensor, Tensor, int, int, int], TwoTensors] = list_best
    pack_sequences: Callable[[Tensor, Tensor, MaskPacking, SequenceSpec, tuple[int, int]], list[Tensor]] = (
        packing.pack_sequences
    )


PYTORCH = Packer()
_find_faster: Callable[[Tensor], Packer | None] = lambda tensor: None


def register(find_faster: Callable[[Tensor], Packer | None]) -> None:
    """Set the function that returns the packer for a tensor, or None for PyTorch."""
    global _find_faster
    _find_faster = find_faster


def packer_for(tensor: Tensor) -> Packer:
    """Return the fastest packer of the device of a tensor."""
    return _find_faster(tensor) or PYTORCH


def one_row_form(seqlen_q: int, reorder: bool | None = None) -> MaskChoice:
    """Choose the form of a mask with one row, prepared before its calls, by their number of queries only."""
    seqlen_q = hint(seqlen_q)  # a hint may be wrong, but every form is right for any number of queries
    if seqlen_q < FEW_QUERIES:
        return MaskChoice("keys")
    return MaskChoice("intervals", bool(seqlen_q >= ORDER_FROM) if reorder is None else reorder)


def prepared_view(mask: Tensor, seqlen_q: int, seqlen_k: int, window: tuple[int, int], one_row: MaskChoice) -> MaskView:
    """Prepare a bool mask (Bm, Hm, Lq or 1, Lk or 1): as `one_row` if it has one row for all queries, else as tiles.

    An expanded dim (stride 0) counts as size 1. No two tensors of the result overlap in memory.
    """
    # Collapsed before the operator: its result may depend on sizes, but not on strides, which compilers change.
    mask = collapse(mask)
    form = one_row.form if mask.size(2) == 1 else "tiles"
    return MaskView(form, tuple(_run_prepare(mask, seqlen_q, seqlen_k, *window, form, one_row.reorder)))


def plan_prepare(seqlen_q: int, seqlen_k: int, window: tuple[int, int], choice: MaskChoice) -> Callable[..., MaskView]:
    """Return a function from a bool mask to its `MaskView`, for masks of equal shape and strides.

    It does the same as `prepared_view`, without the operator, so masks must not be watched (see `is_watched`). Band
    and packer are computed once. Masks with more than one row need the form "tiles". The arguments are the mask, and
    k, v and bias for `Packer.row_intervals`.
    """
    band, fastest, is_whole = make_band(seqlen_q, seqlen_k, window), None, False
    form, reorder = choice

    def run(mask: Tensor, *operands: Tensor | None) -> MaskView:
        nonlocal fastest, is_whole
        if fastest is None:
            fastest, is_whole = packer_for(mask), _whole(collapse(mask), seqlen_q, seqlen_k, form) is mask
        if not is_whole:
            mask = _whole(collapse(mask), seqlen_q, seqlen_k, form)
        if form == "intervals":  # `_prepare`, inlined for speed
            tensors, fresh = fastest.row_intervals(mask, seqlen_q, band, reorder, *operands)
        else:
            tensors, fresh = _prepare(fastest, mask, seqlen_q, band, form, reorder)
        return MaskView(form, tuple(tensors), fresh)

    return run


def _whole(mask: Tensor, seqlen_q: int, seqlen_k: int, form: str) -> Tensor:
    """Expand a mask to all keys, and for tiles to all queries."""
    rows = seqlen_q if form == "tiles" else 1
    return mask if mask.shape[2:] == (rows, seqlen_k) else mask.expand(-1, -1, rows, seqlen_k)


def _prepare(
    packer: Packer, mask: Tensor, seqlen_q: int, band: Band | None, form: str, reorder: bool
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    if form == "intervals":
        return packer.row_intervals(mask, seqlen_q, band, reorder)
    return packer.key_set(mask) if form == "keys" else packer.pack_tiles(mask, band), ()


def _prepare_mask(
    mask: Tensor, seqlen_q: int, seqlen_k: int, left: int, right: int, form: str, reorder: bool
) -> list[Tensor]:
    band = make_band(seqlen_q, seqlen_k, (left, right))
    tensors, _ = _prepare(packer_for(mask), _whole(mask, seqlen_q, seqlen_k, form), seqlen_q, band, form, reorder)
    return list(tensors)


def _prepare_fake(
    mask: Tensor, seqlen_q: int, seqlen_k: int, left: int, right: int, form: str, reorder: bool
) -> list[Tensor]:
    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty((*mask.shape[:2], *shape), dtype=dtype, device=mask.device)

    rows, columns = tiles(seqlen_q), tiles(seqlen_k)
    if form == "keys":
        return [empty(seqlen_k), empty(), empty(seqlen_k + 1)]
    if form == "intervals":
        start, stop = empty(seqlen_k), empty(seqlen_k)
        return [start, stop, *_interval_walk_fake(start, stop, seqlen_q, reorder, seqlen_k)]
    classes = empty(rows, columns, dtype=torch.uint8)
    return [empty(seqlen_q, columns * TILE_WORDS), classes, empty(rows, 2 + columns), empty(columns, 2 + rows)]


def _map_entries(name: str, operator: Callable[..., Any]) -> None:
    """Register a rule of `torch.vmap` for an operator of tensors (Bm, ...): one call with the entries of all calls."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        moved = [
            x if not isinstance(x, Tensor) else x[None] if dim is None else x.movedim(dim, 0)
            for x, dim in zip(arguments, in_dims, strict=True)
        ]
        # Scores and mask may each have one entry for the whole batch.
        (batch,) = torch.broadcast_shapes(*(x.shape[1:2] for x in moved if isinstance(x, Tensor)))
        entries = (info.batch_size, batch)
        folded = [x.expand(*entries, *x.shape[2:]).flatten(0, 1) if isinstance(x, Tensor) else x for x in moved]
        made = operator(*folded)
        if isinstance(made, Tensor):
            return made.view(*entries, *made.shape[1:]), 0
        kind = type(made)
        return kind(x.view(*entries, *x.shape[1:]) for x in made), kind([0] * len(made))

    torch.library.register_vmap(f"flash_dmattn::{name}", rule, lib=LIBRARY)


_PREPARE = define(
    "prepare_mask",
    "(Tensor mask, SymInt seqlen_q, SymInt seqlen_k, int left, int right, str form, bool reorder) -> Tensor[]",
    _prepare_mask,
    _prepare_fake,
)
_run_prepare = unless_watched(_PREPARE, _prepare_mask)
_map_entries("prepare_mask", _PREPARE)


def pack_for_sequences(
    mask: Tensor, bounds: Tensor, mask_packing: MaskPacking, spec: SequenceSpec, window: tuple[int, int]
) -> list[Tensor]:
    """Pack a mask for sequences by the operator, with the arguments and the result of `pack_sequences`."""
    # Collapsed before the operator: its result may depend on sizes, but not on strides, which compilers change.
    sizes = (spec.layout, spec.rows_q, spec.rows_k, spec.max_seqlen_q, spec.max_seqlen_k)
    tensors: list[Tensor] = _PACK_FOR_SEQUENCES(collapse(mask), bounds, mask_packing, *sizes, *window)
    return tensors


def _read_spec(bounds: Tensor, layout: Layout, *sizes: int) -> tuple[SequenceSpec, tuple[int, int]]:
    """Return the spec and the window from the last arguments of the operator."""
    rows_q, rows_k, max_seqlen_q, max_seqlen_k, left, right = sizes
    return SequenceSpec(layout, bounds.shape[0], rows_q, rows_k, max_seqlen_q, max_seqlen_k), (left, right)


def _pack_for_sequences(mask: Tensor, bounds: Tensor, mask_packing: MaskPacking, *sizes: Any) -> list[Tensor]:
    spec, window = _read_spec(bounds, *sizes)
    return packer_for(mask).pack_sequences(mask, bounds, mask_packing, spec, window)


def _pack_for_sequences_fake(mask: Tensor, bounds: Tensor, mask_packing: MaskPacking, *sizes: Any) -> list[Tensor]:
    spec, _ = _read_spec(bounds, *sizes)
    all_q, all_k = row_counts(spec)
    columns, rows = tiles(spec.max_seqlen_k), tiles(spec.max_seqlen_q)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty((1, mask.shape[1], *shape), dtype=dtype, device=mask.device)

    return [
        empty(all_q, columns * TILE_WORDS),
        empty(tile_count(all_q, spec), columns, dtype=torch.uint8),
        empty(tile_count(all_q, spec), 2 + columns),
        empty(tile_count(all_k, spec), 2 + rows),
    ]


_PACK_FOR_SEQUENCES = define(
    "prepare_sequence_mask",
    "(Tensor mask, Tensor bounds, str mask_packing, str layout, SymInt rows_q, SymInt rows_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, int left, int right) -> Tensor[]",
    _pack_for_sequences,
    _pack_for_sequences_fake,
)
map_each("prepare_sequence_mask", _PACK_FOR_SEQUENCES)


def _score_keys_fake(scores: Tensor, allowed: Tensor | None) -> Tensor:
    heads = scores.shape[:2] if allowed is None else torch.broadcast_shapes(scores.shape[:2], allowed.shape[:2])
    dtype = torch.int64 if scores.dtype == torch.float64 else torch.int32
    return scores.new_empty((*heads, scores.shape[3]), dtype=dtype)


run_score_keys = define(
    "score_keys",
    "(Tensor scores, Tensor? allowed) -> Tensor",
    lambda scores, allowed: packer_for(scores).score_keys(scores, allowed),
    _score_keys_fake,
)
run_topk_intervals = define(
    "topk_intervals",
    "(Tensor keys, SymInt k, SymInt seqlen_q, SymInt local) -> (Tensor start, Tensor stop)",
    lambda keys, *numbers: packer_for(keys).topk_intervals(keys, *numbers),
    lambda keys, *_: (keys.new_empty(keys.shape, dtype=torch.int32), keys.new_empty(keys.shape, dtype=torch.int32)),
)


_map_entries("score_keys", run_score_keys)
_map_entries("topk_intervals", run_topk_intervals)


def _interval_walk(start: Tensor, stop: Tensor, seqlen_q: int, reorder: bool, places: int) -> list[Tensor]:
    fastest, own_order = packer_for(start), start.new_empty((*start.shape[:2], 0))
    order = fastest.key_order(start, stop, seqlen_q) if reorder else own_order
    if order.size(2) == places or not reorder:
        return [order, *fastest.interval_tiles(start, stop, order, seqlen_q)]
    order, start, stop = fastest.first_places(start, stop, order, places)  # copies, so that the full order is freed
    return [order, *fastest.interval_tiles(start, stop, own_order, seqlen_q)]


def _interval_walk_fake(start: Tensor, stop: Tensor, seqlen_q: int, reorder: bool, places: int) -> list[Tensor]:
    rows, columns = tiles(seqlen_q), tiles(places if reorder else start.size(2))
    shapes = [(places if reorder else 0,), (columns * TILE, 2), (rows, 2 + columns), (columns, 2 + rows)]
    return [start.new_empty((*start.shape[:2], *shape)) for shape in shapes]


_WALK = define(
    "interval_walk",
    "(Tensor start, Tensor stop, SymInt seqlen_q, bool reorder, SymInt places) -> Tensor[]",
    _interval_walk,
    _interval_walk_fake,
)
_run_walk = unless_watched(_WALK, _interval_walk)
_map_entries("interval_walk", _WALK)


def interval_walk(
    start: Tensor, stop: Tensor, seqlen_q: int, reorder: bool, places: int | None = None
) -> Sequence[Tensor]:
    """Return order, bounds, row_lists and col_lists of an `IntervalMask`: O(Lq * places).

    `places` is the length of the order, by default Lk; it needs to be at least the number of live keys of each head.
    """
    places = start.size(2) if places is None else places
    tensors: Sequence[Tensor] = _run_walk(start, stop, seqlen_q, reorder, places)
    return tensors


def _mask_intervals(bits: Tensor, row_lists: Tensor, seqlen_k: int) -> ThreeTensors:
    return packer_for(bits).mask_intervals(bits, row_lists, seqlen_k)


def _mask_intervals_fake(bits: Tensor, row_lists: Tensor, seqlen_k: int) -> ThreeTensors:
    start, stop = (bits.new_empty((*bits.shape[:2], seqlen_k)) for _ in range(2))
    return start, stop, bits.new_empty((4,), dtype=torch.int64)


_MASK_INTERVALS = define(
    "mask_intervals",
    "(Tensor bits, Tensor row_lists, SymInt seqlen_k) -> (Tensor start, Tensor stop, Tensor numbers)",
    _mask_intervals,
    _mask_intervals_fake,
)
run_mask_intervals = unless_watched(_MASK_INTERVALS, _mask_intervals)
