"""What of the mask of a call its backends receive: nothing, a dense mask, or a prepared one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..backends.interval_walk import call_key_form
from ..backends.protocol import AnyBackend, KernelBackend, gathers_keys, reads_dense, reads_prepared_masks
from ..backends.sequence_walk import walks_tiles
from ..problem import AttentionProblem, MaskView, SequenceView, hinted
from . import packers as packers  # registers the fast packers with flash_dmattn.masks

if TYPE_CHECKING:
    from ..masks import PreparedMask, SequenceTileMask, TreeMask

_NONE = MaskView()


def dense_mask(mask: Tensor | PreparedMask | SequenceTileMask | TreeMask | None) -> Tensor | None:
    """The mask of a call for a differentiable backend: 4-D bool, of a tree (S or 1, 1, n, n), or None."""
    if mask is None or isinstance(mask, Tensor):
        return mask
    return mask.unpacked() if mask.form != "tree" else mask.unpacked()[:, None]


def mask_view(
    problem: AttentionProblem,
    mask: Tensor | PreparedMask | SequenceTileMask | TreeMask | None,
    forward: AnyBackend,
    backward: KernelBackend | None,
    sequences: SequenceView | None = None,
) -> MaskView:
    """The mask of a call as both passes of a pair receive it.

    A dense mask is prepared here where two passes share the result; a forward pass alone prepares it itself, since it
    may do without. Beside sequences `walks_tiles` decides, of both alike. A prepared mask that one of the passes does
    not read is unpacked to a dense one: `unpacking_note` says so.

    Args:
        mask: as `describe` returns it.
        forward, backward: the backends of the passes; backward is None where no gradient is needed.
        sequences: those of the call.
    """
    if mask is None:
        return _NONE
    reads_it = reads_prepared_masks(forward) and (backward is None or reads_prepared_masks(backward))
    if not isinstance(mask, Tensor):
        if reads_it or mask.form == "tree":
            return mask.view
        mask = mask.unpacked()
    sized = hinted(problem) if reads_it else problem  # the form of a mask decides speed alone
    if problem.sequences is not None:
        if sequences is None or not reads_it or not walks_tiles(sized):
            return MaskView("dense", (mask,))
        from ..masks.prepared.sequence_operator import prepared_beside  # importing flash_dmattn does not need it

        return prepared_beside(problem, mask, sequences)
    if backward is None or not reads_it:
        return MaskView("dense", (mask,))
    if reads_dense(forward, sized, "forward") and reads_dense(backward, sized, "backward"):
        return MaskView("dense", (mask,))
    from ..masks.prepared.operator import KeyForm, prepared_view  # importing flash_dmattn does not need it

    gathers = gathers_keys(forward) and gathers_keys(backward)
    of_keys = call_key_form(sized, gathers) or KeyForm("tiles")
    return prepared_view(mask, problem.seqlen_q, problem.seqlen_k, problem.window, of_keys)


def readable_view(problem: AttentionProblem, view: MaskView, *backends: AnyBackend | None) -> MaskView:
    """A view for backends that were chosen after it was made: dense where one of them does not read prepared masks."""
    if view.form == "none" or view.form == "dense" or view.form == "tree":
        return view
    if all(b is None or reads_prepared_masks(b) for b in backends):
        return view
    if view.form == "sequence_tiles":
        assert problem.sequences is not None
        from ..masks.prepared.sequence_packing import unpack_sequences  # importing flash_dmattn does not need it

        return MaskView("dense", (unpack_sequences(view.tensors[0], problem.sequences),))
    from ..masks.saved import restore  # likewise

    # The band of the problem applies to every form, so that this one need not know it.
    mask = restore(view.form, problem.seqlen_q, problem.seqlen_k, False, (-1, -1), *view.tensors)
    return MaskView("dense", (mask.unpacked(),))


def unpacking_note(problem: AttentionProblem, backend: AnyBackend) -> str | None:
    """What `explain` says of a prepared mask beside a backend that reads dense ones; None where there is none."""
    mask = problem.mask
    if mask is None or problem.mask_form in ("dense", "tree") or reads_prepared_masks(backend):
        return None
    return f"unpacks the prepared mask to a dense bool tensor of {mask.span() / 2**20:.1f} MB"
