"""Make the fields of prepared masks from a bool mask, blocks, lengths, intervals, scores or trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from ...problem import (
    Band,
    MaskForm,
    MaskView,
    SequenceSpec,
    causal_window,
    check_flag,
    check_scores,
    check_window,
    make_band,
    merge,
    packing_of,
    values_can_be_read,
)
from ...sequences.layout import Sequences
from ..arguments import DIMS, IntsLike, bool_mask, collapse, integer, integer_tensor, lengths_within, pair
from ..blocks import expand_blocks
from ..builders import Device, document_pair, padding_mask
from ..topk import select, topk_arguments
from .intervals import live_keys, order_saves, places_for, reorder_pays
from .operators import (
    KeyForm,
    pack_beside,
    packer,
    prepared_key_form,
    prepared_view,
    run_first_places,
    run_interval_tiles,
    run_key_order,
    run_mask_intervals,
    run_score_keys,
    run_topk_intervals,
)
from .packing import band_words, pack_rows, pack_tree, pack_words
from .sequence_packing import MaskPacking

Window = tuple[int, int]


class MaskFields(NamedTuple):
    """The form of a prepared mask, its tensors in the order of that form, and its other fields by name."""

    form: MaskForm
    tensors: Sequence[torch.Tensor]
    others: dict[str, Any]


def _limits(is_causal: bool, window_size: Window | None) -> dict[str, Any]:
    """The fields of the band, checked."""
    return {"is_causal": check_flag("is_causal", is_causal), "window_size": check_window(window_size)}


def _band(seqlen_q: int, seqlen_k: int, limits: dict[str, Any]) -> Band | None:
    return make_band(seqlen_q, seqlen_k, causal_window(**limits))


def _tiles_of(bits: torch.Tensor, classes: torch.Tensor, seqlen_k: int, limits: dict[str, Any]) -> MaskFields:
    """The fields of packed bits that have the band folded in, and of their classes."""
    tensors = bits, classes, *packer(bits).list_tiles(classes)
    return MaskFields("tiles", tensors, {"seqlen_q": bits.size(2), "seqlen_k": seqlen_k, **limits})


def from_mask(
    mask: torch.Tensor,
    seqlen_q: int | None,
    seqlen_k: int | None,
    is_causal: bool,
    window_size: Window | None,
    reorder: bool | None = None,
    as_tiles: bool = False,
    find_intervals: bool = False,
    sequences: Sequences | None = None,
) -> MaskFields:
    if check_flag("find_intervals", find_intervals) and (check_flag("as_tiles", as_tiles) or sequences is not None):
        other = "beside sequences" if sequences is not None else "with as_tiles=True"
        raise ValueError(f"find_intervals is True; {other} it must be False.")
    if sequences is not None:
        if reorder is not None:
            raise ValueError(f"reorder is {reorder}; beside sequences it must be None.")
        return _from_mask_of_sequences(mask, sequences, seqlen_q, seqlen_k, is_causal, window_size)
    leading = None
    if isinstance(mask, torch.Tensor) and mask.dim() > 4:
        mask = collapse(mask, dims=tuple(range(mask.dim() - 3)))
        leading, mask = tuple(mask.shape[:-3]), merge(mask, mask.dim() - 3)
    mask4 = bool_mask("mask", mask)
    if mask.dim() < 2:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)} ({mask.dim()}-D) and must have 2 dims or more, the last two of them "
            f"(seqlen_q, seqlen_k); pass mask[None] for keys."
        )
    seqlen_q = _length("seqlen_q", "row", mask4.size(2), seqlen_q)
    seqlen_k = _length("seqlen_k", "column", mask4.size(3), seqlen_k)
    limits = _limits(is_causal, window_size)
    key_form = prepared_key_form(seqlen_q, None if reorder is None else check_flag("reorder", reorder))
    if check_flag("as_tiles", as_tiles) and key_form.form == "intervals":
        key_form = KeyForm("tiles")
    numbers = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, **limits, "leading": leading}
    view = prepared_view(mask4, seqlen_q, seqlen_k, causal_window(**limits), key_form)
    if find_intervals and view.form == "tiles":
        tensors = _recognised(view, seqlen_q, seqlen_k, reorder)
        if tensors is not None:
            return MaskFields("intervals", tensors, numbers)
    return MaskFields(view.form, view.tensors, {**numbers, "one_row": collapse(mask4).size(2) == 1})


def _length(name: str, what: str, size: int, length: int | None) -> int:
    """The real length along a dim of a mask, from its size and from the argument."""
    if length is None:
        if size == 1:
            raise ValueError(f"mask has one {what} for all; {name} is None and must be their number.")
        return size
    if size not in (1, integer(name, length)):
        raise ValueError(f"mask has {size} {what}s and {name} is {length}; they must be equal, or the mask have 1.")
    return length


def from_blocks(
    block_mask: torch.Tensor,
    block_size: int | tuple[int, int],
    seqlen_q: int,
    seqlen_k: int,
    is_causal: bool,
    window_size: Window | None,
) -> MaskFields:
    blocks = collapse(bool_mask("block_mask", block_mask))
    block_q, block_k = size = pair("block_size", block_size, 1)
    if blocks.size(2) == 1:
        mask = expand_blocks(blocks, size, seqlen_q, seqlen_k)
        return from_mask(mask, seqlen_q, seqlen_k, is_causal, window_size)
    needed = -(-integer("seqlen_q", seqlen_q) // block_q)
    if blocks.size(2) != needed:
        raise ValueError(
            f"block_mask has {blocks.size(2)} blocks along seqlen_q (shape {tuple(block_mask.shape)}) and needs "
            f"{needed}, or 1, for seqlen_q = {seqlen_q} in blocks of {block_q}."
        )
    limits = _limits(is_causal, window_size)

    def words_of(start: int, stop: int) -> torch.Tensor:
        rows = blocks[:, :, start // block_q : -(-stop // block_q)]
        keys = expand_blocks(rows, (1, block_k), rows.size(2), seqlen_k).expand(-1, -1, -1, seqlen_k)
        block_of_row = torch.arange(start, stop, device=blocks.device) // block_q - start // block_q
        return pack_words(keys).index_select(2, block_of_row)

    shape = (blocks.size(0), blocks.size(1), seqlen_q, seqlen_k)
    packed = pack_rows(words_of, shape, _band(seqlen_q, seqlen_k, limits), blocks.device)
    return _tiles_of(*packed, seqlen_k, limits)


def from_window(
    seqlen_q: int, seqlen_k: int, is_causal: bool, window_size: Window | None, device: Device
) -> MaskFields:
    shape = (1, 1, integer("seqlen_q", seqlen_q), integer("seqlen_k", seqlen_k))
    limits = _limits(is_causal, window_size)
    band = _band(seqlen_q, seqlen_k, limits)
    device = torch.empty(0, device=device).device

    def words_of(start: int, stop: int) -> torch.Tensor:
        return band_words(start, stop, seqlen_k, band, device)

    return _tiles_of(*pack_rows(words_of, shape, None, device), seqlen_k, limits)


def from_documents(ids: IntsLike, ids_k: IntsLike | None, is_causal: bool, window_size: Window | None) -> MaskFields:
    ids_q, keys = document_pair(ids, ids_k)
    limits = _limits(is_causal, window_size)

    def words_of(start: int, stop: int) -> torch.Tensor:
        rows = ids_q[:, start:stop, None]
        return pack_words((rows == keys[:, None, :]) & (rows >= 0))[:, None]

    seqlen_q, seqlen_k = ids_q.size(1), keys.size(1)
    shape = (max(ids_q.size(0), keys.size(0)), 1, seqlen_q, seqlen_k)
    packed = pack_rows(words_of, shape, _band(seqlen_q, seqlen_k, limits), ids_q.device)
    return _tiles_of(*packed, seqlen_k, limits)


def from_lengths(
    lengths: IntsLike,
    seqlen_q: int,
    seqlen_k: int,
    side: Literal["right", "left"],
    is_causal: bool,
    window_size: Window | None,
) -> MaskFields:
    number = integer_tensor("lengths", lengths, (1,))
    lengths_within("lengths", number, integer("seqlen_k", seqlen_k))
    mask = padding_mask(number, seqlen_k, side=side)
    return from_mask(mask, seqlen_q, seqlen_k, is_causal, window_size, reorder=False)


def from_intervals(
    start: IntsLike,
    stop: IntsLike,
    seqlen_q: int,
    is_causal: bool,
    window_size: Window | None,
    reorder: bool,
    compact: bool,
) -> MaskFields:
    begins, ends = integer_tensor("start", start, (1, 2, 3)), integer_tensor("stop", stop, (1, 2, 3))
    if begins.device != ends.device:
        raise ValueError(f"stop is on {ends.device} and start on {begins.device}; they must be on one device.")
    # In 64 bits, so that small dtypes neither wrap nor refuse the limits.
    begins, ends = (collapse(x[(None,) * (3 - x.dim())], dims=(0, 1)).long() for x in (begins, ends))
    for dim, name in ((0, DIMS[0]), (1, DIMS[1]), (2, DIMS[3])):
        if begins.size(dim) != ends.size(dim) and 1 not in (begins.size(dim), ends.size(dim)):
            raise ValueError(
                f"stop has {name} = {ends.size(dim)} (shape {tuple(ends.shape)}) and start has {begins.size(dim)} "
                f"(shape {tuple(begins.shape)}); they must be equal, or one of them 1."
            )
    begins, ends = torch.broadcast_tensors(begins, ends)
    seqlen_q, seqlen_k = integer("seqlen_q", seqlen_q), begins.size(2)
    limits = _limits(is_causal, window_size)
    reorder = check_flag("reorder", reorder)
    _check_compact(compact, reorder)
    # Rows outside of the band, and rows that do not exist, are cut.
    band = _band(seqlen_q, seqlen_k, limits)
    if band is not None:
        keys = torch.arange(seqlen_k, device=begins.device)
        begins, ends = begins.maximum(keys - band.high), ends.minimum(keys - band.low + 1)
    begins, ends = begins.clamp(0, seqlen_q), ends.clamp(0, seqlen_q)
    dead = begins >= ends
    begins, ends = (x.masked_fill(dead, 0).to(torch.int32).contiguous() for x in (begins, ends))
    return _intervals_of(begins, ends, seqlen_q, limits, reorder, compact)


def from_topk(
    scores: torch.Tensor,
    k: int,
    is_causal: bool,
    mask: torch.Tensor | None,
    seqlen_q: int | None,
    local: int,
    reorder: bool | None,
    compact: bool,
) -> MaskFields:
    integer("k", k, 1)
    limits, local = _limits(is_causal, None), integer("local", local)
    if reorder is not None:
        check_flag("reorder", reorder)
    _check_compact(compact, reorder)
    if local and not is_causal:
        raise ValueError(f"local is {local} and is_causal is False; local keys are the last of a causal prefix.")
    values, allowed, seqlen_q = topk_arguments(scores, mask, seqlen_q)
    for name, x in (("scores", values), ("mask", allowed)):
        if x is not None and x.size(2) != 1:
            raise ValueError(
                f"{name} has {x.size(2)} rows (as 4-D, shape {tuple(x.shape)}) and must have one for all queries; "
                "what depends on the query makes no intervals: use PreparedMask.from_mask(topk_mask(...))."
            )
    keys = run_score_keys(values, allowed)
    batch, heads, seqlen_k = keys.shape
    if reorder is None and compact:
        reorder = True
    if reorder is None:
        has_backward = scores.requires_grad and torch.is_grad_enabled()
        reorder = reorder_pays(
            batch * heads, seqlen_q, seqlen_k, k + local, is_causal=is_causal, has_backward=has_backward
        )
    if is_causal:
        start, stop = run_topk_intervals(keys, k, seqlen_q, local)
    else:
        stop = (select(keys, k) * seqlen_q).to(torch.int32)
        start = torch.zeros_like(stop)
    return _intervals_of(start, stop, seqlen_q, limits, reorder, compact)


def _check_compact(compact: bool, reorder: bool | None) -> None:
    if check_flag("compact", compact) and reorder is False:
        raise ValueError("compact is True and reorder is False; only an order of keys has places to leave out.")


def _intervals_of(
    start: torch.Tensor, stop: torch.Tensor, seqlen_q: int, limits: dict[str, Any], reorder: bool, compact: bool
) -> MaskFields:
    seqlen_k = places = start.size(2)
    if compact:
        places = places_for(int(live_keys(start, stop)), seqlen_k)
    walked = interval_walk(start, stop, seqlen_q, reorder, places)
    return MaskFields("intervals", (start, stop, *walked), {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, **limits})


def interval_walk(
    start: torch.Tensor, stop: torch.Tensor, seqlen_q: int, reorder: bool, places: int
) -> Sequence[torch.Tensor]:
    """Return order, bounds, row_lists and col_lists of an `IntervalMask`: O(Lq * places).

    Args:
        start, stop: of the mask.
        seqlen_q: number of queries.
        reorder: whether it has an order of keys.
        places: how many places an order has, at least as many as a head has live keys.
    """
    order = run_key_order(start, stop, seqlen_q) if reorder else start.new_empty((*start.shape[:2], 0))
    if not reorder or places == start.size(2):
        return order, *run_interval_tiles(start, stop, order, seqlen_q)
    order, start, stop = run_first_places(start, stop, order, places)  # the rest is not kept alive
    return order, *run_interval_tiles(start, stop, start.new_empty((*start.shape[:2], 0)), seqlen_q)


def _recognised(view: MaskView, seqlen_q: int, seqlen_k: int, reorder: bool | None) -> Sequence[torch.Tensor] | None:
    """The tensors of an `IntervalMask` that allows the same as tiles; None where some key has several runs of queries.

    Values decide, so it waits for the device, once. The numbers of pairs and of tiles, which come back with the answer,
    say how many places an order of keys needs, and whether it pays in a forward pass unless `reorder` decides.
    """
    bits, _, row_lists, _ = view.tensors
    start, stop, numbers = run_mask_intervals(bits, row_lists, seqlen_k)
    has_several, live, pairs, active = numbers.tolist()
    if has_several:
        return None
    if reorder is None:
        kept = pairs / max(1, start.size(0) * start.size(1) * seqlen_q)
        reorder = kept > 0 and order_saves(active, pairs, kept, has_backward=False)
    return start, stop, *interval_walk(start, stop, seqlen_q, reorder, places_for(live, seqlen_k))


def from_tree(tree: torch.Tensor) -> MaskFields:
    if not isinstance(tree, torch.Tensor):
        raise TypeError(f"tree is a {type(tree).__name__} and must be a torch.bool tensor.")
    if tree.dtype != torch.bool:
        raise TypeError(f"tree has dtype {tree.dtype} and must be torch.bool, True = attend; pass tree != 0.")
    if tree.dim() != 3 or tree.shape[1] != tree.shape[2]:
        raise ValueError(f"tree has shape {tuple(tree.shape)} and must be (sequences or 1, new tokens, new tokens).")
    return MaskFields("tree", (pack_tree(tree),), {})


def _from_mask_of_sequences(
    mask: torch.Tensor,
    sequences: Sequences,
    seqlen_q: int | None,
    seqlen_k: int | None,
    is_causal: bool,
    window_size: Window | None,
) -> MaskFields:
    spec = _spec_of(sequences, seqlen_q, seqlen_k)
    mask4 = _where_sequences_are("mask", bool_mask("mask", mask), sequences)
    mask_packing = packing_of("mask", mask.shape, spec)
    check_scores("mask", mask4.shape, mask_packing, spec, None)
    return _pack_beside(mask4, mask_packing, sequences, spec, sequences.bounds_of(spec), is_causal, window_size)


def from_ragged(
    flat: torch.Tensor,
    sequences: Sequences,
    seqlen_q: int,
    seqlen_k: int,
    is_causal: bool,
    window_size: Window | None,
) -> MaskFields:
    spec = _spec_of(sequences, seqlen_q, seqlen_k)
    mask4 = _where_sequences_are("flat", bool_mask("flat", flat), sequences)
    if flat.dim() not in (1, 2):
        raise ValueError(f"flat has shape {tuple(flat.shape)} and must be (pairs,) or (heads, pairs).")
    bounds = sequences.bounds_of(spec)
    if values_can_be_read(bounds):
        pairs = int((bounds[:, 1].long() * bounds[:, 3]).sum())
        if flat.shape[-1] != pairs:
            raise ValueError(f"flat has {flat.shape[-1]} pairs and must have {pairs}, queries times keys of sequences.")
    return _pack_beside(mask4.transpose(1, 2), "ragged", sequences, spec, bounds, is_causal, window_size)


def _spec_of(sequences: Sequences, seqlen_q: int | None, seqlen_k: int | None) -> SequenceSpec:
    if not isinstance(sequences, Sequences):
        raise TypeError(f"sequences is a {type(sequences).__name__} and must be a flash_dmattn.Sequences.")
    for name, length, tensor in (("seqlen_q", seqlen_q, "q"), ("seqlen_k", seqlen_k, "k")):
        if length is None:
            pages = ", of pages block_table.shape[1] * page_size" if name == "seqlen_k" else ""
            raise ValueError(f"{name} is None; beside sequences it must be {tensor}.shape[-3]{pages}.")
    assert seqlen_q is not None and seqlen_k is not None
    return sequences.spec_of(integer("seqlen_q", seqlen_q), integer("seqlen_k", seqlen_k))


def _where_sequences_are(name: str, mask: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """The mask, if it is on their device."""
    if mask.device != sequences.device:
        raise ValueError(f"{name} is on {mask.device} and must be where sequences are, on {sequences.device}.")
    return mask


def _pack_beside(
    mask: torch.Tensor,
    mask_packing: MaskPacking,
    sequences: Sequences,
    spec: SequenceSpec,
    bounds: torch.Tensor,
    is_causal: bool,
    window_size: Window | None,
) -> MaskFields:
    limits = _limits(is_causal, window_size)
    tensors = pack_beside(mask, bounds, mask_packing, spec, causal_window(**limits))
    return MaskFields("sequence_tiles", tensors, {"sequences": sequences, "spec": spec, **limits})
