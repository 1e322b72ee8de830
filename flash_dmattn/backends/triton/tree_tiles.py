"""Converts trees of new tokens to tiles of all keys, for the backward kernels, which do not read trees."""

from __future__ import annotations

from torch import Tensor

from ...problem import Flags, MaskView, SequenceSpec


def tiles_of_tree(bits: Tensor, bounds: Tensor, rows_q: int, rows_k: int, flags: Flags) -> MaskView:
    """Make a mask of the form "sequence_tiles" from a tree, with all earlier keys, and the window of the call.

    Args:
        bits: the bits of a `TreeMask`.
        bounds: the bounds of the sequences; their keys must not lie in pages.
        rows_q, rows_k: the rows of q and k.
        flags: the flags of the call.
    """
    from ...masks.prepared.operators import packer  # importing flash_dmattn does not need it
    from ...masks.prepared.packing import unpack_tree

    spec = SequenceSpec(flags.layout, len(bounds), rows_q, rows_k, flags.max_seqlen_q, flags.max_seqlen_k)
    pairs = unpack_tree(bits)[:, None]
    return MaskView("sequence_tiles", tuple(packer(pairs).pack_sequences(pairs, bounds, "tree", spec, flags.window)))
