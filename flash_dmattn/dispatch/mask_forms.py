"""The forms of a mask: how a prepared one becomes part of a call, and what of a mask a backend receives."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from .backends.protocol import AnyBackend, KernelBackend, MaskTensors
from .problem import AttentionProblem, MaskForm, Shape4, TensorSpec, check_broadcast, check_flag, check_window

if TYPE_CHECKING:
    from .masks import PreparedMask


def describe_prepared(
    mask: PreparedMask,
    is_causal: bool,
    window_size: tuple[int, int] | None,
    sizes: Shape4,
    num_heads_k: int,
    device: torch.device,
) -> tuple[TensorSpec, MaskForm, bool, tuple[int, int]]:
    """Validate a prepared mask for a call; return its description, its form, and the band, which it decides.

    Args:
        mask: what the call has as its mask, no tensor.
        is_causal, window_size: those of the call. What they limit, the mask has to limit by the same numbers.
        sizes: (batch, heads, seqlen_q, seqlen_k) of the call.

    Raises:
        TypeError: neither a prepared mask nor a tensor.
        ValueError: it was prepared for other sizes, on another device or with another band.
    """
    # Not at the top: only a program that has made a prepared mask pays for the import, and it has done so already.
    from .masks.prepared import PreparedMask

    if not isinstance(mask, PreparedMask):
        raise TypeError(
            f"mask is a {type(mask).__name__}; it needs to be a bool torch.Tensor, True where q attends, "
            "or a prepared mask"
        )
    if mask.device != device:
        raise ValueError(f"mask is on {mask.device}; it needs to be on the device of q, {device}")
    for name, has, needs in (("seqlen_q", mask.seqlen_q, sizes[2]), ("seqlen_k", mask.seqlen_k, sizes[3])):
        if has != needs:
            raise ValueError(f"mask was prepared for {name} {has}; it needs that of the call, {needs}")
    shape = mask.shape
    check_broadcast("mask", shape, sizes, num_heads_k)
    _check_band(mask, check_flag("is_causal", is_causal), check_window(window_size))
    return unpacked_spec(shape), mask.form, mask.is_causal, mask.window_size


def _check_band(mask: PreparedMask, is_causal: bool, window_size: tuple[int, int]) -> None:
    right = 0 if mask.is_causal else mask.window_size[1]
    if is_causal:
        if right != 0:
            _refuse_band(mask, "is_causal is True")
    elif window_size[1] not in (-1, right):
        _refuse_band(mask, f"window_size is {window_size}")
    if window_size[0] not in (-1, mask.window_size[0]):
        _refuse_band(mask, f"window_size is {window_size}")


def _refuse_band(mask: PreparedMask, given: str) -> NoReturn:
    raise ValueError(
        f"{given}, but mask was prepared with is_causal={mask.is_causal}, window_size={mask.window_size}; "
        "a prepared mask brings its own limits: pass is_causal and window_size to prepare_mask"
    )


def unpacked_spec(shape: Shape4) -> TensorSpec:
    """The description of the contiguous bool tensor that `PreparedMask.unpacked` makes."""
    _, h, i, j = shape
    return TensorSpec(shape, (h * i * j, i * j, j, 1), torch.bool)


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
    from .masks.preparation import prepared_tensors  # not at the top: importing flash_dmattn does not need it

    p = problem
    return prepared_tensors(mask, p.seqlen_q, p.seqlen_k, p.is_causal, p.window_size)
