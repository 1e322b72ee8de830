"""The run of queries that sees each key of a packed mask, if there is one, in plain PyTorch: the kernels' oracle."""

from __future__ import annotations

import torch

from . import packing
from .interval_order import live_keys

# start, stop (see `IntervalMask`), and four numbers, int64.
MaskIntervals = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def mask_intervals(bits: torch.Tensor, row_lists: torch.Tensor, seqlen_k: int) -> MaskIntervals:
    """The first query that sees each key and the one behind the last, whether all between them do, and what to count.

    A key is seen by one run of queries if and only if as many see it as there are from the first to the last.

    Args:
        bits: int32 (Bm, Hm, Lq, words) of a `TileMask`.
        row_lists: int32 (Bm, Hm, Tq, 2 + Tk), of the same.
        seqlen_k: number of keys.

    Returns:
        start and stop int32 (Bm, Hm, Lk), contiguous, (0, 0) for a key that no query sees; numbers int64 (4,): 0 where
        every key is seen by one run, else 1; how many keys of a head are live, at most; pairs of a query and a key that
        it sees; tiles that some pair is in. Where the first is 1 a kernel may leave anything in the rest.

    Example:
        >>> bits, classes = packing.pack_mask(torch.tensor([[[[True, False], [True, True]]]]), None)
        >>> start, stop, numbers = mask_intervals(bits, packing.list_tiles(classes)[0], 2)
        >>> start.tolist(), stop.tolist(), numbers.tolist()
        ([[[0, 1]]], [[[2, 2]]], [0, 2, 3, 1])
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
    has_several = (count != stop - start).any()
    pairs, active = (x.sum(dtype=torch.int64) for x in (stop - start, row_lists[..., :2]))
    numbers = torch.stack([has_several.long(), live_keys(start, stop), pairs, active])
    return start.to(torch.int32).contiguous(), stop.to(torch.int32).contiguous(), numbers
