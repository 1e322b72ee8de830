"""Trees of new tokens for the backward kernels, which read no trees: as a mask of all keys, in tiles."""

from __future__ import annotations

from torch import Tensor

from ...problem import Flags, MaskView, SequenceSpec


def tiles_of_tree(bits: Tensor, bounds: Tensor, rows_q: int, rows_k: int, flags: Flags) -> MaskView:
    """A mask of the form "sequence_tiles" that allows what a tree does and every earlier key, in the window of a call.

    Args:
        bits: of a `TreeMask`.
        bounds: of the sequences, none of which has its keys in pages.
        rows_q, rows_k: of q and k.
        flags: of the call.
    """
    from ...masks.prepared.packers import packer  # importing flash_dmattn does not need it
    from ...masks.prepared.packing import unpack_tree

    spec = SequenceSpec(flags.layout, len(bounds), rows_q, rows_k, flags.max_seqlen_q, flags.max_seqlen_k)
    pairs = unpack_tree(bits)[:, None]
    return MaskView("sequence_tiles", tuple(packer(pairs).pack_sequences(pairs, bounds, "tree", spec, flags.window)))
