"""`prepare_mask`: from a bool mask to the prepared mask that suits it."""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

import torch

from ...problem import causal_window, check_flag, check_window, merge
from ..arguments import bool_mask, integer
from ..broadcast import collapse
from .intervals import IntervalMask
from .operator import KeyForm, prepared_key_form, prepared_view
from .packers import packer
from .recognition import interval_tensors
from .types import KeyMask, PreparedMask, TileMask

if TYPE_CHECKING:
    from ...sequences.layout import Sequences
    from .sequence_tiles import SequenceTileMask

_KINDS: dict[str, type[PreparedMask]] = {"tiles": TileMask, "keys": KeyMask, "intervals": IntervalMask}


@overload
def prepare_mask(
    mask: torch.Tensor,
    *,
    seqlen_q: int | None = None,
    seqlen_k: int | None = None,
    is_causal: bool = False,
    window_size: tuple[int, int] | None = None,
    reorder: bool | None = None,
    as_tiles: bool = False,
    find_intervals: bool = False,
    sequences: None = None,
) -> PreparedMask: ...


@overload
def prepare_mask(
    mask: torch.Tensor,
    *,
    seqlen_q: int | None = None,
    seqlen_k: int | None = None,
    is_causal: bool = False,
    window_size: tuple[int, int] | None = None,
    reorder: None = None,
    as_tiles: bool = False,
    find_intervals: bool = False,
    sequences: Sequences,
) -> SequenceTileMask: ...


def prepare_mask(
    mask: torch.Tensor,
    *,
    seqlen_q: int | None = None,
    seqlen_k: int | None = None,
    is_causal: bool = False,
    window_size: tuple[int, int] | None = None,
    reorder: bool | None = None,
    as_tiles: bool = False,
    find_intervals: bool = False,
    sequences: Sequences | None = None,
) -> PreparedMask | SequenceTileMask:
    """Turns a bool mask, with causality and window, into what kernels walk; it is read once.

    The result stands for `mask & causal_mask(Lq, Lk) & sliding_window_mask(Lq, Lk, window_size)`, which is what its
    method `dense` returns. On a GPU it is made by kernels of the CUDA extension or of Triton, elsewhere by PyTorch,
    with the same result. Nothing waits for the device, unless `find_intervals` asks for it. Dims that were expanded
    (stride 0) count as size 1 and are never materialised.

    A mask of one row for all queries becomes an `IntervalMask`, or for fewer than 16 queries a `KeyMask`, both of O(Lk)
    in memory but for lists of tiles, band or no band. Any other becomes a `TileMask`, Lq * Lk / 8 bytes for each of its
    heads; tiles outside the band are not read.

    Beside `sequences` the mask has the shapes that `attention` takes there: by position, packed rows or packed keys.
    The band is that of each sequence. The result, a `SequenceTileMask` of max_seqlen_k / 8 bytes for each query and
    head, is for calls with the same `Sequences` object. Triton makes it on GPUs of NVIDIA, elsewhere PyTorch.

    Args:
        mask: bool tensor of 2 dims or more, read from the right as (*batch, Hm, Lq or 1, Lk or 1), any strides. Hm may
            be 1, Hk or Hq: heads stay as they are. Leading dims, each 1 or that of the calls, fold into the one batch
            of the result, which knows them as `batch_dims`.
        seqlen_q, seqlen_k: number of queries and keys; needed where the mask has size 1 for all of them. Beside
            `sequences` always needed: `q.shape[-3]` and `k.shape[-3]`, of pages `block_table.shape[1] * page_size`.
        is_causal: forbid keys past i + Lk - Lq.
        window_size: `(left, right)` keys around i + Lk - Lq; -1 is unlimited on that side.
        reorder: of a mask of one row, put kept keys first, so that kernels visit no others; k and v are then copied in
            each call. It pays where kept keys lie scattered, not for padding. By default from 4096 queries on, where
            the copy is cheap beside the call.
        as_tiles: of a mask of one row for 16 queries or more, make a `TileMask` all the same. It pays for calls with a
            bias of one value per query and key: beside it kernels read bits, which they make of an interval mask anew
            in each pass.
        find_intervals: look whether, within the band, each key of a mask that depends on the query is seen by one run
            of queries, as in causal top-k by one score per key, windows, documents or prefixes. Such a mask becomes an
            `IntervalMask`, and `reorder` applies to it: by default keys get an order where the tiles that it saves pay
            for it in a forward pass. Any other mask becomes what it does without. The answer is read back: the program
            waits for the device, once, which a CUDA graph cannot capture and `torch.compile` breaks its graph for.
        sequences: where the sequences of the calls lie; `reorder` and `find_intervals` are refused beside them,
            `as_tiles` is what is made.

    Returns:
        IntervalMask or KeyMask where the mask has one row for all queries, IntervalMask where `find_intervals` found
        some, else TileMask; SequenceTileMask beside sequences.

    Raises:
        TypeError: not a bool tensor, or a length, flag or window of another type.
        ValueError: another rank, lengths that are missing or differ from those of the mask, a negative window, both
            `as_tiles` and `find_intervals`.

    Example:
        >>> from flash_dmattn.masks import padding_mask, prepare_mask
        >>> prepared = prepare_mask(torch.rand(2, 4, 300, 200) < 0.5, is_causal=True)
        >>> prepared.bits.shape, prepared.classes.shape
        (torch.Size([2, 4, 300, 8]), torch.Size([2, 4, 3, 2]))
        >>> prepare_mask(padding_mask([3, 5], 6), seqlen_q=6).kept.tolist()
        [[[0, 1, 2, 6, 6, 6]], [[0, 1, 2, 3, 4, 6]]]
        >>> prepare_mask(torch.ones(3, 3, dtype=torch.bool).tril(), find_intervals=True).start.tolist()
        [[[0, 1, 2]]]
    """
    if check_flag("find_intervals", find_intervals) and (check_flag("as_tiles", as_tiles) or sequences is not None):
        other = "beside sequences" if sequences is not None else "with as_tiles=True"
        raise ValueError(f"find_intervals is True; {other} it must be False.")
    if sequences is not None:
        from .sequence_tiles import prepare_beside  # few programs have sequences

        if reorder is not None:
            raise ValueError(f"reorder is {reorder}; beside sequences it must be None.")
        return prepare_beside(
            mask, sequences, seqlen_q=seqlen_q, seqlen_k=seqlen_k, is_causal=is_causal, window_size=window_size
        )
    leading = None
    if isinstance(mask, torch.Tensor) and mask.dim() > 4:
        mask = collapse(mask, dims=tuple(range(mask.dim() - 3)))
        leading, mask = tuple(mask.shape[:-3]), merge(mask, mask.dim() - 3)
    given = bool_mask("mask", mask)
    if mask.dim() < 2:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)} ({mask.dim()}-D) and must have 2 dims or more, the last two of them "
            f"(seqlen_q, seqlen_k); pass mask[None] for keys."
        )
    seqlen_q = _length("seqlen_q", "row", given.size(2), seqlen_q)
    seqlen_k = _length("seqlen_k", "column", given.size(3), seqlen_k)
    is_causal, window_size = check_flag("is_causal", is_causal), check_window(window_size)
    of_keys = prepared_key_form(seqlen_q, None if reorder is None else check_flag("reorder", reorder))
    if check_flag("as_tiles", as_tiles) and of_keys.form == "intervals":
        of_keys = KeyForm("tiles")
    window = causal_window(is_causal, window_size)
    view = prepared_view(given, seqlen_q, seqlen_k, window, of_keys)
    if find_intervals and view.form == "tiles":
        bits, _, row_lists, _ = view.tensors
        found = interval_tensors(bits, row_lists, seqlen_k, reorder)
        if found is not None:
            return IntervalMask(seqlen_q, seqlen_k, is_causal, window_size, *found, leading=leading)
    kind = _KINDS[view.form]
    one_row = collapse(given).size(2) == 1
    return kind(seqlen_q, seqlen_k, is_causal, window_size, *view.tensors, leading=leading, one_row=one_row)


def _length(name: str, what: str, size: int, given: int | None) -> int:
    """The real length along a dim of a mask, from its size and from the argument."""
    if given is None:
        if size == 1:
            raise ValueError(f"mask has one {what} for all; {name} is None and must be their number.")
        return size
    if size not in (1, integer(name, given)):
        raise ValueError(f"mask has {size} {what}s and {name} is {given}; they must be equal, or the mask have 1.")
    return given


def from_bits(
    seqlen_k: int, is_causal: bool, window_size: tuple[int, int], bits: torch.Tensor, classes: torch.Tensor
) -> TileMask:
    """A `TileMask` from packed bits that have the band folded in, and their classes."""
    return TileMask(bits.size(2), seqlen_k, is_causal, window_size, bits, classes, *packer(bits).list_tiles(classes))
