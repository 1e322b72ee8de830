"""Splits float masks, which are added to scores, into a bool mask and a bias."""

from __future__ import annotations

from numbers import Real
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..caches import TensorCache
from ..definition import is_transformed, is_watched, listed
from ..problem import (
    check_floats,
    check_strided,
    collapse,
    counts_changes,
    values_can_be_read,
)

Empty = Literal["softmax", "zero"]
Rest = Literal["auto", "none", "keep"]


class _Split(NamedTuple):
    """The result of a split; `is_unchanged` says that the bias is x itself, which the cache must not keep alive.

    `mask` is None if no key is hidden, and `bias` is None if there is none.
    """

    mask: Tensor | None
    bias: Tensor | None
    is_unchanged: bool = False


_splits = TensorCache()


def split_additive(
    x: Tensor, below: float = -1e3, *, empty: Empty = "softmax", rest: Rest = "auto"
) -> tuple[Tensor, Tensor | None]:
    """Split a tensor that is added to scores into a bool mask, True = attend, and a bias with the other values.

    A value at or below `below` hides its key: a bit then replaces -1e9 in the score, and kernels skip tiles in which
    all keys are hidden. `attention` itself never splits a bias.

    Equivalent to::

        if empty == "softmax":
            top = x.amax(-1, keepdim=True)
            x = x - torch.where((top <= below) & (top > -inf), top, 0)
        mask = ~(x <= below)
        rest = x.masked_fill(~mask, 0)  # None if values can be read and all are 0

    **When the result is the same.** Take a row of n keys. Let R be the largest score of a hidden key, without x, minus
    the largest score of a visible key, with x. Without the split, all hidden keys have at most the weight
    n * exp(R + below), which is 0 in fp32 if R < -below - 104, and in fp64 if R < -below - 745. For -1e9, -1e6 or
    finfo.min this holds in practice, and for the default of -1e3 up to R = 896. A value of -100 is no mask and stays a
    bias, because at R = 80 the error would be up to n * 2e-9; pass `below=-100` if you know R. Causality and windows
    of the call must leave each row one key that x shows. If they hide the last such key, the formula attends to keys
    at -1e9, but this mask to no key.

    **A row without a visible key** has three possible results:

    * `empty="softmax"`: the softmax of the formula, which a constant added to a row does not change. A row of only
      -1e9 keeps all its keys, and a row of only -inf none. Kernels skip no tile of such rows.
    * `empty="zero"`: zero, with zero gradients, as for a bool mask in this library and in torch. It is faster, and
      right if rows of padding are not used.
    * Approximately the mean of the values, which fp32 computes because adding -1e9 rounds scores away. It is not
      supported.

    A hidden key has probability 0 in both forms, so that all gradients agree, also the gradient of x.

    Args:
        x: float tensor that broadcasts to (*batch, H, Lq, Lk). NaN and +inf stay visible.
        below: negative number; -inf hides only keys at -inf. It is compared in the dtype of x.
        empty: "softmax" or "zero", see above.
        rest: how to find out whether there is a bias, that is, another value than 0 above `below`.

            * "auto" checks the values on a CPU, and on a GPU once for each tensor and version, if x has no gradient. It
              does not check, and returns a tensor, in a compiled graph, under a transform, in inference mode on a GPU,
              and in the capture of a CUDA graph.
            * "keep" never checks.
            * "none" is your promise that there is no bias. On a CPU it is checked at once, on a GPU by an assertion on
              the device, without a wait.

    Returns:
        The bool mask and the bias, or None, both of the shape of x; dims that x expands stay expanded. The bias has the
        gradient of x, and is x itself if no key is hidden. Results are kept for later calls with the same x, or with
        the same view of a tensor, until it changes or is freed: do not write to them.

    Raises:
        TypeError: x is no strided float tensor, or `below` no number.
        ValueError: x has no dim, `below` is not negative, or `empty` or `rest` is another string. With `rest="none"`:
            there is a bias, or x has a gradient, which would be lost.

    Example:
        >>> x = torch.tensor([[0.5, -1e9, 0.0], [-1e9, -1e9, -1e9]])
        >>> mask, rest = split_additive(x)
        >>> mask.tolist(), rest.tolist()
        ([[True, False, True], [True, True, True]], [[0.5, 0.0, 0.0], [0.0, 0.0, 0.0]])
        >>> mask, rest = split_additive(torch.tensor([[0.0, -1e9], [-1e9, -1e9]]), empty="zero")
        >>> mask.tolist(), rest
        ([[True, False], [False, False]], None)
    """
    mask, bias = separate(x, below, empty=empty, rest=rest)
    if mask is None:
        mask = torch.ones((), dtype=torch.bool, device=x.device).expand(x.shape)
    return mask, bias


def separate(
    x: Tensor, below: float = -1e3, *, empty: Empty = "softmax", rest: Rest = "auto"
) -> tuple[Tensor | None, Tensor | None]:
    """Check the arguments and split as `split_additive` does; the mask is None if values show that no key is hidden."""
    _check(x, below, empty, rest)
    is_plain = not (_has_derivative(x) or is_watched(x) or x.is_meta)
    if is_plain and x.is_cuda:
        is_plain = not torch.cuda.is_current_stream_capturing()
    if is_plain and counts_changes(x):
        # Each layer may make a new view of the same tensor, so the base is the key.
        base = x if x._base is None else x._base
        # Part of the key, because work on another stream would not wait for the result.
        stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else None
        place = x.storage_offset(), tuple(x.shape), x.stride(), x.dtype, x.is_neg()
        key = id(base), *place, below, empty, rest, stream
        result: _Split = _splits.get(key, [base], lambda: _split(x, below, empty, rest, may_read=True))
    else:
        # The assertion of rest="none" runs on the GPU, so the CPU does not wait.
        may_read = is_plain and (values_can_be_read(x) or (x.is_cuda and rest == "none"))
        result = _split(x, below, empty, rest, may_read=may_read)
    return result.mask, x if result.is_unchanged else result.bias


def _has_derivative(x: Tensor) -> bool:
    return (x.requires_grad and torch.is_grad_enabled()) or is_transformed() or forward_ad._current_level >= 0


def _split(x: Tensor, below: float, empty: Empty, rest: Rest, may_read: bool) -> _Split:
    # With a derivative, each element of an expanded dim has its own derivative, so dims are not collapsed.
    values = x if _has_derivative(x) else collapse(x, range(x.dim()))
    is_shifted = None
    if empty == "softmax" and x.shape[-1] != 0:
        top = values.detach().amax(-1, keepdim=True)
        is_shifted = (top <= below) & (top > float("-inf"))
        values = values - torch.where(is_shifted, top, 0.0)
    hidden = values.detach() <= below
    mask = (~hidden).expand(x.shape)
    left = values.masked_fill(hidden, 0.0)
    if rest == "none":
        if may_read and not x.is_cuda:
            if bool(left.any()):
                raise ValueError(f'x has values above {below} other than 0; rest="none" needs 0 there; use rest="keep"')
        elif may_read:
            torch._assert_async(~left.any(), f'x of split_additive(rest="none") has values above {below} other than 0')
        return _Split(mask, None)
    if rest == "auto" and may_read:
        shifts = hidden.new_zeros(()) if is_shifted is None else is_shifted.any()
        hides_keys, has_bias, is_shifted_anywhere = listed(torch.stack([hidden.any(), left.any(), shifts]))  # one wait
        is_unchanged = has_bias and not hides_keys and not is_shifted_anywhere
        bias = left.expand(x.shape) if has_bias and not is_unchanged else None
        return _Split(mask if hides_keys else None, bias, is_unchanged)
    return _Split(mask, left.expand(x.shape))


def _check(x: Tensor, below: float, empty: str, rest: str) -> None:
    check_strided("x", x)
    is_bool = isinstance(x, Tensor) and x.dtype == torch.bool
    check_floats("x", x, "; a bool mask needs no split" if is_bool else "")
    if x.dim() == 0:
        raise ValueError("x has shape (); it needs at least one dim, the keys")
    check_below(below)
    for name, value, words in (("empty", empty, ("softmax", "zero")), ("rest", rest, ("auto", "none", "keep"))):
        if value not in words:
            raise ValueError(f"{name} is {value!r}; it needs to be one of {', '.join(map(repr, words))}")
    if rest == "none" and x.requires_grad and torch.is_grad_enabled():
        raise ValueError('x has a gradient, which rest="none" would lose; use rest="keep", or x.detach()')


def check_below(below: float) -> float:
    """Return `below`; refuse anything but a negative number."""
    if not isinstance(below, (int, float, Real)) or isinstance(below, bool):
        raise TypeError(f"below is a {type(below).__name__}; it needs to be a negative number")
    if not below < 0:
        raise ValueError(f"below is {below}; it needs to be negative")
    return below
