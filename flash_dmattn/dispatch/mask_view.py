"""What of the mask of a call its backends receive: nothing, a dense mask, or a prepared one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..backends.protocol import AnyBackend, KernelBackend, reads_mask_form, reads_prepared_masks
from ..problem import AttentionProblem, MaskView, Shape4
from . import packers as packers  # registers the fast packers with flash_dmattn.masks

if TYPE_CHECKING:
    from ..masks import PreparedMask

_NONE = MaskView()


def dense_mask(mask: Tensor | PreparedMask | None) -> Tensor | None:
    """The mask of a call for a differentiable backend: 4-D bool, or None."""
    return mask if mask is None or isinstance(mask, Tensor) else mask.unpacked()


def mask_view(
    problem: AttentionProblem,
    mask: Tensor | PreparedMask | None,
    forward: AnyBackend,
    backward: KernelBackend | None,
) -> MaskView:
    """The mask of a call as both passes of a pair receive it.

    A dense mask is prepared here where two passes share the result; a forward pass alone prepares it itself, since it
    may do without. A prepared mask of a form that one of the passes does not read is unpacked to a dense one, which
    then goes the same way: `unpacking_note` says so.

    Args:
        mask: as `describe` returns it.
        forward, backward: the backends of the passes; backward is None where no gradient is needed.
    """
    if mask is None:
        return _NONE
    if not isinstance(mask, Tensor):
        form = mask.form
        if reads_mask_form(forward, form) and (backward is None or reads_mask_form(backward, form)):
            return mask.view
        mask = mask.unpacked()
    if backward is None or not (reads_prepared_masks(forward) and reads_prepared_masks(backward)):
        return MaskView("dense", (mask,))
    from ..masks.prepared.operator import prepared_view  # not at the top: importing flash_dmattn does not need it

    return prepared_view(mask, problem.seqlen_q, problem.seqlen_k, problem.window)


def unpacking_note(problem: AttentionProblem, backend: AnyBackend) -> str | None:
    """What `explain` says of a prepared mask beside a backend that reads dense ones; None where there is none."""
    mask, form = problem.mask, problem.mask_form
    if mask is None or form == "dense" or reads_mask_form(backend, form):
        return None
    unpacks = f"unpacks the prepared mask to a dense bool tensor of {mask.span() / 2**20:.1f} MB"
    if not reads_prepared_masks(backend):
        return unpacks
    return f"{unpacks}, and packs that in every call, to {_packed_bytes(mask.shape) / 2**20:.1f} MB"


def _packed_bytes(shape: Shape4) -> int:
    """What the bits of a dense mask of full lengths occupy, or its key set where it has one row."""
    batch, heads, rows, keys = shape
    return batch * heads * (8 * (keys + 1) if rows == 1 else rows * 16 * -(-keys // 128))
