"""The operator that prepares a mask, for `PreparedMask.from_mask` and for calls of `attention`, compiled or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch

from ...definition import LIBRARY, define, unless_watched
from ...problem import Band, MaskView, hint, make_band
from ..broadcast import collapse
from .packers import Packer, packer
from .packing import TILE, TILE_WORDS, tiles

# Fewer queries are bound by reading k and v, so that fetching the kept keys one by one costs nothing; with more of them
# it costs five times what tiles do.
FEW_QUERIES = 16
# Heads below which tiles of few kept keys are too few programs for kernels that can gather keys instead.
FEW_HEADS = 8
# Queries of the heads that share a key, from which on a copy of k and v is at most a tenth of a forward pass. H200,
# bf16: the copy moves 8 * D bytes of a key at 3 TB/s, and 4 * D FLOP for each of these queries take 6e-15 s * D.
ORDER_FROM = 4096


Preparation = Callable[[torch.Tensor], MaskView]


class KeyForm(NamedTuple):
    """How a mask with one row for all queries is prepared: its form, and whether kept keys come first.

    "keys": the set of them, for few queries or heads, where kernels gather. "intervals": each key with the queries that
    the band leaves it; where a copy of k and v in order of kept keys is cheap beside the call, `reorder` is set, and
    only kept keys cost time. "tiles": bits, which kernels need beside a bias of one value per score.
    """

    form: Literal["keys", "intervals", "tiles"]
    reorder: bool = False


def key_form(
    mask_heads: int,
    batch: int,
    seqlen_q: int,
    num_heads: int,
    num_heads_k: int,
    *,
    bias_is_per_score: bool,
    gathers: bool,
) -> KeyForm:
    """The form of a one-row mask in a call.

    Args:
        mask_heads: heads of the mask, 1 where it is expanded over them.
        batch, seqlen_q, num_heads, num_heads_k: of the call.
        bias_is_per_score: whether it has a bias of one value per score, or the gradient of one of that shape.
        gathers: whether the kernels take a set of keys.
    """
    if gathers and seqlen_q < FEW_QUERIES:
        return KeyForm("keys")
    if bias_is_per_score:
        return KeyForm("tiles")
    # k and v cannot follow several orders at once.
    has_one_order = mask_heads in (1, num_heads_k)
    reorder = bool(has_one_order and seqlen_q * (num_heads // num_heads_k) >= ORDER_FROM)
    if gathers and reorder and batch * num_heads < FEW_HEADS:
        return KeyForm("keys")
    return KeyForm("intervals", reorder)


def prepared_key_form(seqlen_q: int, reorder: bool | None = None) -> KeyForm:
    """The form of a one-row mask that is prepared for calls of which only the number of queries is known."""
    seqlen_q = hint(seqlen_q)  # every form serves any number
    if seqlen_q < FEW_QUERIES:
        return KeyForm("keys")
    return KeyForm("intervals", bool(seqlen_q >= ORDER_FROM) if reorder is None else reorder)


def prepared_view(
    mask: torch.Tensor, seqlen_q: int, seqlen_k: int, window: tuple[int, int], of_keys: KeyForm
) -> MaskView:
    """The prepared form of a mask: "tiles", or where it has one row for all queries that of `of_keys`.

    Args:
        mask: bool (Bm, Hm, Lq or 1, Lk or 1), any strides; an expanded dim (stride 0) counts as size 1.
        seqlen_q, seqlen_k: of the call.
        window: as `causal_window` has it.
        of_keys: as `key_form` chooses it.

    Returns:
        The tensors of a `KeyMask`, an `IntervalMask` or a `TileMask`; no two of them share memory.
    """
    # Collapsed before the operator, so that sizes alone decide what it returns: compilers change strides.
    mask = collapse(mask)
    form = of_keys.form if mask.size(2) == 1 else "tiles"
    return MaskView(form, tuple(_run_prepare(mask, seqlen_q, seqlen_k, *window, form, of_keys.reorder)))


def plan_prepare(seqlen_q: int, seqlen_k: int, window: tuple[int, int], of_keys: KeyForm) -> Preparation:
    """Return `mask -> MaskView` of bool masks that are alike: the band and the packer are found once.

    It equals `prepared_view` without the operator, for masks of plain tensors that nothing watches.

    Args:
        seqlen_q, seqlen_k, window: of the calls.
        of_keys: the form, "tiles" of masks that have more than one row.
    """
    form, reorder = of_keys
    band, found = make_band(seqlen_q, seqlen_k, window), None
    rows = seqlen_q if form == "tiles" else 1

    def run(mask: torch.Tensor) -> MaskView:
        nonlocal found
        if found is None:
            found = packer(mask)
        mask = collapse(mask)
        if mask.shape[2] != rows or mask.shape[3] != seqlen_k:
            mask = mask.expand(-1, -1, rows, seqlen_k)
        return MaskView(form, tuple(_prepare(found, mask, seqlen_q, band, form, reorder)))

    return run


def _prepare(
    packer: Packer, mask: torch.Tensor, seqlen_q: int, band: Band | None, form: str, reorder: bool
) -> Sequence[torch.Tensor]:
    if form == "keys":
        return packer.key_set(mask)
    if form == "intervals":
        start, stop, order = packer.key_intervals(mask, seqlen_q, band, reorder)
        return start, stop, order, *packer.interval_tiles(start, stop, order, seqlen_q)
    return packer.pack_tiles(mask, band)


def prepare(
    mask: torch.Tensor, seqlen_q: int, seqlen_k: int, left: int, right: int, key_form: str, reorder: bool
) -> list[torch.Tensor]:
    """What the operator does, for a collapsed mask."""
    rows = seqlen_q if key_form == "tiles" else 1
    whole, band = mask.expand(-1, -1, rows, seqlen_k), make_band(seqlen_q, seqlen_k, (left, right))
    return list(_prepare(packer(mask), whole, seqlen_q, band, key_form, reorder))


def _prepare_fake(
    mask: torch.Tensor, seqlen_q: int, seqlen_k: int, left: int, right: int, key_form: str, reorder: bool
) -> list[torch.Tensor]:
    heads = mask.shape[:2]
    rows, columns = tiles(seqlen_q), tiles(seqlen_k)
    shapes: list[tuple[int, ...]]
    lists = [(*heads, rows, 2 + columns), (*heads, columns, 2 + rows)]
    if key_form == "keys":
        shapes = [(*heads, seqlen_k), tuple(heads), (*heads, seqlen_k + 1)]
    elif key_form == "intervals":
        of_keys, of_places = (*heads, seqlen_k), (*heads, columns * TILE, 2)
        shapes = [of_keys, of_keys, (*heads, seqlen_k if reorder else 0), of_places, *lists]
    else:
        shapes = [(*heads, seqlen_q, columns * TILE_WORDS), *lists]
    made = [torch.empty(shape, dtype=torch.int32, device=mask.device) for shape in shapes]
    if key_form == "tiles":
        made.insert(1, torch.empty((*heads, rows, columns), dtype=torch.uint8, device=mask.device))
    return made


def _prepare_many(
    info: Any, in_dims: tuple[Any, ...], mask: torch.Tensor, *others: Any
) -> tuple[list[torch.Tensor], list[int]]:
    """The rule of `torch.vmap`: the masks of all its calls are entries of one."""
    masks = mask.movedim(in_dims[0], 0)
    entries = masks.shape[:2]
    made = _OPERATOR(masks.flatten(0, 1), *others)
    return [x.view(*entries, *x.shape[1:]) for x in made], [0] * len(made)


_OPERATOR = define(
    "prepare_mask",
    "(Tensor mask, SymInt seqlen_q, SymInt seqlen_k, int left, int right, str key_form, bool reorder) -> Tensor[]",
    prepare,
    _prepare_fake,
)
_run_prepare = unless_watched(_OPERATOR, prepare)
torch.library.register_vmap("flash_dmattn::prepare_mask", _prepare_many, lib=LIBRARY)
