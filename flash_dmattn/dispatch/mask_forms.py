"""What of a mask a backend receives: a dense one, or the tensors of a prepared one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..backends.protocol import AnyBackend, KernelBackend
from ..problem import AttentionProblem, MaskTensors

if TYPE_CHECKING:
    from ..masks import PreparedMask


def takes_prepared(backend: AnyBackend) -> bool:
    """Whether a backend reads prepared masks; one that does not say receives dense ones."""
    return getattr(backend, "MASK_FORM", "dense") == "prepared"


def unpacking_note(problem: AttentionProblem, backend: AnyBackend) -> str | None:
    """What `explain` says of a prepared mask beside a backend that reads dense ones; None where there is none."""
    if problem.mask is None or problem.mask_form == "dense" or takes_prepared(backend):
        return None
    return f"unpacks the prepared mask to a dense bool tensor of {problem.mask.span() / 2**20:.1f} MB"


def dense_mask(mask: Tensor | PreparedMask | None) -> Tensor | None:
    """The mask of a call for a differentiable backend: 4-D bool, or None."""
    return mask if mask is None or isinstance(mask, Tensor) else mask.unpacked()


def mask_tensors(
    problem: AttentionProblem, mask: Tensor | PreparedMask, forward: AnyBackend, backward: KernelBackend | None
) -> MaskTensors:
    """The mask of a call as both passes of a pair receive it.

    Args:
        mask: as `describe` returns it.
        forward, backward: the backends of the passes; backward is None where no gradient is needed.

    Returns:
        (dense,), or the tensors of a prepared mask where every pass reads them. A dense mask is prepared here if two
        passes share the result; for one pass the backend does as it likes.
    """
    prepared = takes_prepared(forward) and (backward is None or takes_prepared(backward))
    if not isinstance(mask, Tensor):
        return mask.tensors if prepared else (mask.unpacked(),)
    if backward is None or not prepared:
        return (mask,)
    from ..masks.prepared.operator import prepared_tensors  # not at the top: importing flash_dmattn does not need it

    p = problem
    return prepared_tensors(mask, p.seqlen_q, p.seqlen_k, p.is_causal, p.window_size)
