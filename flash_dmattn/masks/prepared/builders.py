"""Prepared masks built from what defines them, block masks, windows, documents and lengths, without a dense mask."""

from __future__ import annotations

from typing import Literal

import torch

from ...problem import causal_window, check_flag, check_window, make_band
from ..arguments import IntsLike, bool_mask, integer, integer_tensor, lengths_within, pair
from ..blocks import expand_blocks
from ..broadcast import collapse
from ..builders import Device, padding_mask
from .packing import band_words, pack_rows, pack_words
from .prepare import from_bits, prepare_mask
from .types import PreparedMask, TileMask


def prepare_blocks(
    block_mask: torch.Tensor,
    block_size: int | tuple[int, int],
    seqlen_q: int,
    seqlen_k: int,
    *,
    is_causal: bool = False,
    window_size: tuple[int, int] | None = None,
) -> PreparedMask:
    """The prepared mask of a block mask.

    Equivalent to `prepare_mask(expand_blocks(block_mask, block_size, seqlen_q, seqlen_k), seqlen_q=seqlen_q,
    seqlen_k=seqlen_k, is_causal=is_causal, window_size=window_size)`. Keys are packed once for each row of blocks.

    Args:
        block_mask: bool tensor of 2 to 4 dims, (..., ceil(seqlen_q / bq) or 1, ceil(seqlen_k / bk) or 1).
        block_size: tokens per block, one int or (bq, bk); blocks of whole tiles, 128, waste least.
        seqlen_q, seqlen_k: number of queries and keys.
        is_causal, window_size: the band, as in `prepare_mask`.

    Returns:
        TileMask; where one row of blocks stands for all queries what `prepare_mask` makes of one row.

    Raises:
        TypeError: `block_mask` is not bool, or a size is not an int.
        ValueError: the number of blocks does not fit the lengths.

    Example:
        >>> from flash_dmattn.masks import prepare_blocks
        >>> prepare_blocks(torch.eye(3, dtype=torch.bool), 128, 384, 384).classes[0, 0].tolist()
        [[2, 0, 0], [0, 2, 0], [0, 0, 2]]
    """
    blocks = collapse(bool_mask("block_mask", block_mask))
    block_q, block_k = size = pair("block_size", block_size, 1)
    if blocks.size(2) == 1:
        mask = expand_blocks(blocks, size, seqlen_q, seqlen_k)
        return prepare_mask(mask, seqlen_q=seqlen_q, seqlen_k=seqlen_k, is_causal=is_causal, window_size=window_size)
    needed = -(-integer("seqlen_q", seqlen_q) // block_q)
    if blocks.size(2) != needed:
        raise ValueError(
            f"block_mask has {blocks.size(2)} blocks along seqlen_q (shape {tuple(block_mask.shape)}) and needs "
            f"{needed}, or 1, for seqlen_q = {seqlen_q} in blocks of {block_q}."
        )
    is_causal, window_size = check_flag("is_causal", is_causal), check_window(window_size)

    def words_of(start: int, stop: int) -> torch.Tensor:
        rows = blocks[:, :, start // block_q : -(-stop // block_q)]
        keys = expand_blocks(rows, (1, block_k), rows.size(2), seqlen_k).expand(-1, -1, -1, seqlen_k)
        of_row = torch.arange(start, stop, device=blocks.device) // block_q - start // block_q
        return pack_words(keys).index_select(2, of_row)

    band = make_band(seqlen_q, seqlen_k, causal_window(is_causal, window_size))
    shape = (blocks.size(0), blocks.size(1), seqlen_q, seqlen_k)
    return from_bits(seqlen_k, is_causal, window_size, *pack_rows(words_of, shape, band, blocks.device))


def prepare_window(
    seqlen_q: int,
    seqlen_k: int,
    *,
    is_causal: bool = False,
    window_size: tuple[int, int] | None = None,
    device: Device = None,
) -> TileMask:
    """The prepared mask of causality and a window alone.

    Equivalent to `prepare_mask(sliding_window_mask(seqlen_q, seqlen_k, window_size), is_causal=is_causal)` in all its
    tensors, where lengths are above 1. Computed by words of 32 keys.

    Args:
        seqlen_q, seqlen_k: number of queries and keys.
        is_causal, window_size: the band, as in `prepare_mask`.
        device: where to put the result.

    Returns:
        TileMask with Bm = Hm = 1.

    Raises:
        TypeError, ValueError: lengths below 0, or a flag or window of another kind.

    Example:
        >>> from flash_dmattn.masks import prepare_window
        >>> prepare_window(384, 384, is_causal=True).classes[0, 0].tolist()
        [[1, 0, 0], [2, 1, 0], [2, 2, 1]]
    """
    shape = (1, 1, integer("seqlen_q", seqlen_q), integer("seqlen_k", seqlen_k))
    is_causal, window_size = check_flag("is_causal", is_causal), check_window(window_size)
    band = make_band(seqlen_q, seqlen_k, causal_window(is_causal, window_size))
    where = torch.empty(0, device=device).device

    def words_of(start: int, stop: int) -> torch.Tensor:
        return band_words(start, stop, seqlen_k, band, where)

    return from_bits(seqlen_k, is_causal, window_size, *pack_rows(words_of, shape, None, where))


def prepare_documents(
    ids: IntsLike,
    ids_k: IntsLike | None = None,
    *,
    is_causal: bool = False,
    window_size: tuple[int, int] | None = None,
) -> TileMask:
    """The prepared mask of packed documents: each query sees the keys of its own document.

    Equivalent to `prepare_mask(document_mask(ids, ids_k), is_causal=is_causal, window_size=window_size)`, for two
    queries or more.

    Args:
        ids: integer tensor or list, (Lq,) or (B, Lq), for instance from `document_ids`. Negative ids are padding.
        ids_k: the document of each key, (Lk,) or (B, Lk); `ids` by default.
        is_causal, window_size: the band, as in `prepare_mask`.

    Returns:
        TileMask with Hm = 1, and Bm = B where ids depend on the batch.

    Raises:
        TypeError: ids are not integer.
        ValueError: ids have another rank, or two different batch sizes.

    Example:
        >>> from flash_dmattn.masks import document_ids, prepare_documents
        >>> prepare_documents(document_ids([128, 256])).classes[0, 0].tolist()
        [[2, 0, 0], [0, 2, 2], [0, 2, 2]]
    """
    of_q = torch.atleast_2d(integer_tensor("ids", ids, (1, 2)))
    of_k = of_q if ids_k is None else torch.atleast_2d(integer_tensor("ids_k", ids_k, (1, 2)).to(of_q.device))
    if of_q.size(0) != of_k.size(0) and 1 not in (of_q.size(0), of_k.size(0)):
        raise ValueError(
            f"ids_k has batch size {of_k.size(0)} (shape {tuple(of_k.shape)}) and ids has {of_q.size(0)} "
            f"(shape {tuple(of_q.shape)}); they must be equal, or one of them 1."
        )
    is_causal, window_size = check_flag("is_causal", is_causal), check_window(window_size)

    def words_of(start: int, stop: int) -> torch.Tensor:
        rows = of_q[:, start:stop, None]
        return pack_words((rows == of_k[:, None, :]) & (rows >= 0))[:, None]

    seqlen_q, seqlen_k = of_q.size(1), of_k.size(1)
    band = make_band(seqlen_q, seqlen_k, causal_window(is_causal, window_size))
    shape = (max(of_q.size(0), of_k.size(0)), 1, seqlen_q, seqlen_k)
    return from_bits(seqlen_k, is_causal, window_size, *pack_rows(words_of, shape, band, of_q.device))


def prepare_lengths(
    lengths: IntsLike,
    seqlen_q: int,
    seqlen_k: int,
    *,
    side: Literal["right", "left"] = "right",
    is_causal: bool = False,
    window_size: tuple[int, int] | None = None,
) -> PreparedMask:
    """The prepared mask of padded keys, from the number of keys that are not padding.

    Equivalent to `prepare_mask(padding_mask(lengths, seqlen_k, side=side), seqlen_q=seqlen_q, is_causal=is_causal,
    window_size=window_size, reorder=False)`.

    Args:
        lengths: integer tensor or list (B,).
        seqlen_q, seqlen_k: number of queries, and of keys with padding.
        side: the side that the padding is on.
        is_causal, window_size: the band, as in `prepare_mask`; it counts padding as keys.

    Returns:
        IntervalMask, for fewer than 16 queries KeyMask; Bm = B, Hm = 1.

    Raises:
        TypeError: lengths are not integer.
        ValueError: another rank, a length below 0 or above `seqlen_k` (checked on CPU only; on an accelerator it counts
            as 0 or `seqlen_k`), an unknown `side`.

    Example:
        >>> from flash_dmattn.masks import prepare_lengths
        >>> prepare_lengths([1, 3], 4, 4, side="left").kept[:, 0].tolist()
        [[3, 4, 4, 4], [1, 2, 3, 4]]
    """
    number = integer_tensor("lengths", lengths, (1,))
    lengths_within("lengths", number, integer("seqlen_k", seqlen_k))
    return prepare_mask(
        padding_mask(number, seqlen_k, side=side),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        is_causal=is_causal,
        window_size=window_size,
        reorder=False,
    )
