"""Checks of single arguments, shared by `attention` and the builders of masks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor


def as_scores(x: Tensor) -> Tensor:
    """A mask or a bias of 2, 3 or 4 dimensions, read from the right as (batch, heads, seqlen_q, seqlen_k)."""
    dims = x.dim()
    return x if dims == 4 else x[None] if dims == 3 else x[None, None]


def check_broadcast(name: str, shape: Sequence[int], sizes: Sequence[int], num_heads_k: int) -> None:
    """Refuse a mask or bias shape that does not broadcast to (*batch, heads, seqlen_q, seqlen_k) of as many dims."""
    *batch, h, i, j = shape
    *wanted, num_heads, seqlen_q, seqlen_k = sizes
    fits = (h == 1 or h in (num_heads, num_heads_k)) and (i == 1 or i == seqlen_q) and (j == 1 or j == seqlen_k)
    for b, size in zip(batch, wanted, strict=True):
        fits = fits and (b == 1 or b == size)
    if fits:
        return
    names = batch_names(len(batch))
    heads = f"{{1, {num_heads_k}, {num_heads}}}" if num_heads_k != num_heads else f"{{1, {num_heads}}}"
    leading = ", ".join(f"{dim} in {{1, {size}}}" for dim, size in zip(names, wanted, strict=True))
    raise ValueError(
        f"{name} has shape {tuple(shape)}, read as ({', '.join(names)}, heads, seqlen_q, seqlen_k); "
        f"it needs {leading}, heads in {heads}, "
        f"seqlen_q in {{1, {seqlen_q}}} and seqlen_k in {{1, {seqlen_k}}}"
    )


def batch_names(number: int) -> tuple[str, ...]:
    """What messages call the dims in front: batch where it is one, else by their number.

    >>> batch_names(1), batch_names(2)
    (('batch',), ('batch dim 0', 'batch dim 1'))
    """
    return ("batch",) if number == 1 else tuple(f"batch dim {dim}" for dim in range(number))


def check_flag(name: str, value: bool) -> bool:
    """Refuse anything but a bool, so that a tensor or a string never silently counts as True."""
    if value is True or value is False:
        return value
    raise TypeError(f"{name} is {value!r}; it needs to be True or False")


def check_scale(softmax_scale: float | None, head_dim: int) -> float:
    """The factor on q @ k^T: `head_dim ** -0.5` when unset; 0.0 is a value."""
    if softmax_scale is None:
        return head_dim**-0.5
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (int, float)):
        raise TypeError(f"softmax_scale is a {type(softmax_scale).__name__}; it needs to be a number or None")
    if not -math.inf < softmax_scale < math.inf:  # not isfinite: torch.compile cannot trace it with dynamic floats
        raise ValueError(f"softmax_scale is {softmax_scale}; it needs to be finite")
    return float(softmax_scale)


def check_softcap(softcap: float) -> float:
    """The softcap as a float: 0.0 is off, negative is refused."""
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)):
        raise TypeError(f"softcap is a {type(softcap).__name__}; it needs to be a number, 0.0 for none")
    if not 0 <= softcap < math.inf:
        raise ValueError(f"softcap is {softcap}; it needs to be finite and at least 0 (0 is off)")
    return float(softcap)


def check_dropout(dropout_p: float) -> float:
    """The probability of dropout as a float, 0.0 for none; NaN is refused with what is out of range."""
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)):
        raise TypeError(f"dropout_p is a {type(dropout_p).__name__}; it needs to be a number from 0 to 1, 0.0 for none")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p is {dropout_p}; it needs to be a probability, from 0 to 1")
    return float(dropout_p)


def check_window(window_size: tuple[int, int] | None) -> tuple[int, int]:
    """The window as (left, right), -1 for an unlimited side; None is (-1, -1)."""
    if window_size is None:
        return (-1, -1)
    if not (isinstance(window_size, (tuple, list)) and len(window_size) == 2):
        raise TypeError(f"window_size is {window_size!r}; it needs to be None or a pair (left, right) of ints")
    left, right = window_size
    for side in (left, right):
        if isinstance(side, bool) or not isinstance(side, int):
            raise TypeError(f"window_size is {window_size!r}; both sides need to be ints, -1 for unlimited")
        if side < -1:
            raise ValueError(f"window_size is {window_size!r}; both sides need to be at least -1 (-1 is unlimited)")
    return (left, right)
