"""The run of queries that sees each key of a packed mask, if there is one, in plain PyTorch: the kernel's oracle."""

from __future__ import annotations

import torch

from . import packing

# start, stop (see `IntervalMask`), and a bool of no dims: whether every key is seen by one run of queries.
MaskIntervals = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def mask_intervals(bits: torch.Tensor, seqlen_k: int) -> MaskIntervals:
    """The first query that sees each key and the one behind the last, and whether all between them do.

    A key is seen by one run of queries if and only if as many see it as there are from the first to the last.

    Args:
        bits: int32 (Bm, Hm, Lq, words) of a `TileMask`.
        seqlen_k: number of keys.

    Returns:
        start and stop int32 (Bm, Hm, Lk), contiguous, (0, 0) for a key that no query sees; a bool of no dims. Where
        that is False a kernel may leave anything from 0 to Lq in start and stop.

    Example:
        >>> bits = packing.pack_words(torch.tensor([[[[True, False], [True, True]]]]))
        >>> start, stop, is_intervals = mask_intervals(bits, 2)
        >>> start.tolist(), stop.tolist(), is_intervals.item()
        ([[[0, 1]]], [[[2, 2]]], True)
    """
    batch, num_heads, seqlen_q, _ = bits.shape
    start, stop, count = (torch.zeros(batch, num_heads, seqlen_k, dtype=torch.int64, device=bits.device) for _ in "abc")
    step = max(1, packing.CHUNK_ELEMENTS // max(1, batch * num_heads * seqlen_k))
    for begin in range(0, seqlen_q, step):
        flags = packing.unpack_words(bits[:, :, begin : begin + step], seqlen_k).to(torch.uint8)
        seen = flags.amax(2).bool()
        first, last = flags.argmax(2), flags.size(2) - 1 - flags.flip(2).argmax(2)  # argmax finds the first of a tie
        start = torch.where(seen & (count == 0), begin + first, start)
        stop = torch.where(seen, begin + last + 1, stop)
        count += flags.sum(2, dtype=torch.int64)
    start, stop, is_intervals = start.to(torch.int32), stop.to(torch.int32), (count == stop - start).all()
    return start.contiguous(), stop.contiguous(), is_intervals
