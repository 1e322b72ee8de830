"""Interval masks from what defines them: intervals of queries, or the scores of a top-k, without a dense mask."""

from __future__ import annotations

import torch

from ...problem import causal_window, check_flag, check_window, make_band
from ..arguments import IntsLike, integer, integer_tensor
from ..broadcast import DIMS, collapse
from ..topk import select, topk_arguments
from .compact_order import compact_order, places_for
from .interval_operators import run_interval_tiles, run_key_order, run_score_keys, run_topk_intervals
from .interval_order import live_keys, reorder_pays
from .intervals import IntervalMask


def prepare_intervals(
    start: IntsLike,
    stop: IntsLike,
    seqlen_q: int,
    *,
    is_causal: bool = False,
    window_size: tuple[int, int] | None = None,
    reorder: bool = False,
    compact: bool = False,
) -> IntervalMask:
    """The prepared mask in which key j is seen by queries `start[j]` to `stop[j]`, not included.

    Equivalent to `prepare_mask(mask, is_causal=is_causal, window_size=window_size)` with::

        i = torch.arange(seqlen_q)[:, None]
        mask = (i >= start[..., None, :]) & (i < stop[..., None, :])

    No pair of a query and a key is looked at, only intervals and tiles of 128 x 128, and nothing waits for the device,
    unless `compact` asks for it.

    Args:
        start, stop: integer tensors or lists of 1 to 3 dims, read from the right as (Bm, Hm, Lk), and broadcast against
            each other: Bm is 1 or the batch size, Hm is 1, Hk or Hq. What lies below 0 or above `seqlen_q` is cut; a
            key with `start >= stop` is seen by nobody.
        seqlen_q: number of queries.
        is_causal, window_size: the band, as in `prepare_mask`; it is folded in.
        reorder: put keys of similar intervals side by side, so that kernels visit fewer tiles. It pays where keys that
            are seen lie scattered among others, as in `prepare_topk`, and not for windows or documents.
        compact: of an order, make places for live keys alone, as in `prepare_topk`.

    Returns:
        IntervalMask.

    Raises:
        TypeError: `start` or `stop` is not integer, or a length, flag or window of another type.
        ValueError: another rank, shapes that do not broadcast, two devices, a negative length or window, `compact`
            without `reorder`.

    Source: Wang et al., "FlashMask: Efficient and Rich Mask Extension of FlashAttention", 2024, which describes masks
        by the rows that each column leaves out.

    Example:
        >>> from flash_dmattn.masks import prepare_intervals
        >>> prepare_intervals([0, 1, 0], [4, 2, 0], 4).dense()[0, 0].int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [1, 0, 0],
                [1, 0, 0]], dtype=torch.int32)
    """
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
    is_causal, window_size = check_flag("is_causal", is_causal), check_window(window_size)
    reorder = check_flag("reorder", reorder)
    _check_compact(compact, reorder)
    # What lies outside of the band, or of the rows that exist, is cut.
    band = make_band(seqlen_q, seqlen_k, causal_window(is_causal, window_size))
    if band is not None:
        keys = torch.arange(seqlen_k, device=begins.device)
        begins, ends = begins.maximum(keys - band.high), ends.minimum(keys - band.low + 1)
    begins, ends = begins.clamp(0, seqlen_q), ends.clamp(0, seqlen_q)
    dead = begins >= ends
    begins, ends = (x.masked_fill(dead, 0).to(torch.int32).contiguous() for x in (begins, ends))
    return _interval_mask(begins, ends, seqlen_q, is_causal, window_size, reorder, compact)


def prepare_topk(
    scores: torch.Tensor,
    k: int,
    *,
    is_causal: bool = False,
    mask: torch.Tensor | None = None,
    seqlen_q: int | None = None,
    local: int = 0,
    reorder: bool | None = None,
    compact: bool = False,
) -> IntervalMask:
    """The prepared mask of the `k` highest scored keys of every query, from one score per key.

    Equivalent to `prepare_mask(topk_mask(scores, k, is_causal=is_causal, mask=mask, seqlen_q=seqlen_q),
    is_causal=is_causal)`, ties, NaN and -inf included. The best keys of a causal prefix stay the best until better ones
    come, so a key is seen by one interval of queries. These take O(Lk log Lk) in time and O(Lk) in memory, and lists of
    tiles 8 bytes for each 128 x 128 pairs. Nothing waits for the device, unless `compact` asks for it.

    Args:
        scores: float tensor of 1 to 4 dims, read from the right as (B or 1, H or 1, 1, Lk): one score per key for all
            queries. H is 1, Hk or Hq. No gradient goes through it.
        k: number of keys to keep, >= 1; may exceed Lk.
        is_causal: only keys j <= i + Lk - Lq are allowed to query i.
        mask: bool tensor broadcastable to (B, H, 1, Lk), True = allowed, the same for all queries.
        seqlen_q: number of queries; Lk by default. Decoding one query against a cache needs `seqlen_q=1`.
        local: a causal query also sees the last `local` keys up to its own, those that are allowed; they do not count
            as part of the k. It is `topk_mask(...) | sliding_window_mask(Lq, Lk, (local - 1, 0)) & mask`.
        reorder: put keys of similar intervals side by side, so that kernels visit fewer tiles. By default where that is
            expected to save more time than it costs: see "Order" in docs/prepared_masks.md. Sizes alone decide, with
            the heads of `scores` for those of the call, and a backward pass expected where `scores` need a gradient.
        compact: of an order, which is made then, make places for live keys alone. Of independent scores few are live,
            about k * (1 + ln(Lk / k)): at 1M keys and k = 1024 lists of tiles take a hundredth, and so do k, v and the
            sums of their gradients in each call. Their number is read back: the program waits for the device, once,
            which a CUDA graph cannot capture and `torch.compile` breaks its graph for. Where more than half of the keys
            are live, nothing changes.

    Returns:
        IntervalMask with the batch size and heads of scores and mask.

    Raises:
        TypeError: `scores` is not float, `mask` is not bool, `k` or `local` is not an int, or a flag is no bool.
        ValueError: `scores` or `mask` depends on the query, k < 1, `local` without `is_causal`, `compact` with
            `reorder=False`, shapes that do not broadcast.

    Source: the dynamic mask of "Trainable Dynamic Mask Sparse Attention", 2025, as intervals.

    Example:
        >>> from flash_dmattn.masks import prepare_topk
        >>> prepared = prepare_topk(torch.tensor([3.0, 1.0, 2.0, 2.0]), 2, is_causal=True)
        >>> prepared.start.tolist(), prepared.stop.tolist()
        ([[[0, 1, 2, 0]]], [[[4, 2, 4, 0]]])
        >>> prepared.dense()[0, 0].int()
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [1, 0, 1, 0],
                [1, 0, 1, 0]], dtype=torch.int32)
    """
    integer("k", k, 1)
    is_causal, local = check_flag("is_causal", is_causal), integer("local", local)
    if reorder is not None:
        check_flag("reorder", reorder)
    _check_compact(compact, reorder)
    if local and not is_causal:
        raise ValueError(f"local is {local} and is_causal is False; local keys are the last of a causal prefix.")
    values, allowed, seqlen_q = topk_arguments(scores, mask, seqlen_q)
    for name, given in (("scores", values), ("mask", allowed)):
        if given is not None and given.size(2) != 1:
            raise ValueError(
                f"{name} has {given.size(2)} rows (as 4-D, shape {tuple(given.shape)}) and must have one for all "
                f"queries; what depends on the query makes no intervals: use prepare_mask(topk_mask(...))."
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
    return _interval_mask(start, stop, seqlen_q, is_causal, (-1, -1), reorder, compact)


def _check_compact(compact: bool, reorder: bool | None) -> None:
    if check_flag("compact", compact) and reorder is False:
        raise ValueError("compact is True and reorder is False; only an order of keys has places to leave out.")


def _interval_mask(
    start: torch.Tensor,
    stop: torch.Tensor,
    seqlen_q: int,
    is_causal: bool,
    window_size: tuple[int, int],
    reorder: bool,
    compact: bool,
) -> IntervalMask:
    """The mask of intervals as its fields have them."""
    order = run_key_order(start, stop, seqlen_q) if reorder else start.new_empty((*start.shape[:2], 0))
    seqlen_k = places = start.size(2)
    if compact:
        places = places_for(int(live_keys(start, stop)), seqlen_k)
    if places < seqlen_k:
        walked = compact_order(start, stop, order, seqlen_q, places)
    else:
        walked = [order, *run_interval_tiles(start, stop, order, seqlen_q)]
    return IntervalMask(seqlen_q, seqlen_k, is_causal, window_size, start, stop, *walked)
