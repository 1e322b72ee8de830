"""Whether kernels walk the tiles of a bool mask beside sequences, which the call makes first, or read it as it is."""

from __future__ import annotations

from ..problem import AttentionProblem

# The one switch: with False a bool mask beside sequences is always read as it is.
PREPARES = True
# Fewer queries or keys have one tile, or a few: there is nothing to skip that costs as much as to look.
FEW_QUERIES, FEW_KEYS = 16, 128


def walks_tiles(problem: AttentionProblem) -> bool:
    """Whether a call beside sequences turns its bool mask into tiles, for backends that read prepared masks.

    Where each row of packed queries has a value for each key, kernels read a byte for every pair in every pass; a mask
    with one value for several rows or keys is small. A forward pass alone counts as two do. On AMD's GPUs PyTorch packs
    the mask, which takes longer than both passes.
    """
    p = problem
    if not PREPARES or p.mask is None or p.mask_form != "dense" or p.flags.mask_packing != "queries":
        return False
    _, _, shares_queries, shares_keys = p.mask.broadcast()
    if shares_queries or shares_keys or p.arch.startswith("gfx"):
        return False
    return p.seqlen_q > FEW_QUERIES and p.seqlen_k > FEW_KEYS


def mask_notes(problem: AttentionProblem) -> tuple[str, ...]:
    """What `explain` says of a bool mask beside sequences, on a backend that reads prepared ones."""
    if problem.mask_form != "dense":
        return ()
    advice = "prepare_mask(mask, sequences=...)"
    if walks_tiles(problem):
        return (f"packs the bool mask as bits and lists of tiles, once a call: {advice} does it once for all layers",)
    return (f"reads the bool mask as it is, and skips nothing for it: {advice} makes tiles of it",)
