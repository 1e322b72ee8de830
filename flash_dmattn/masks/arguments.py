"""Checks the arguments of mask builders, and brings masks of different broadcast shapes to a common shape."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..problem import check_floats, check_strided, check_tensor, is_int, values_can_be_read

# Lengths, or 0/1 masks, as users hold them: a tensor, or nested Python lists.
IntsLike = Tensor | Sequence[int] | Sequence[Sequence[int]]

DIMS = ("batch", "heads", "seqlen_q", "seqlen_k")
INTEGER_DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def integer(name: str, value: int, minimum: int = 0) -> int:
    """Return `value`, an int of at least `minimum`; a `torch.SymInt` stays one."""
    if not is_int(value):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); it needs to be an int >= {minimum}")
    if value < minimum:
        raise ValueError(f"{name} is {value}; it needs to be >= {minimum}")
    return value if isinstance(value, (int, torch.SymInt)) else int(value)


def pair(name: str, value: int | tuple[int, int], minimum: int) -> tuple[int, int]:
    """Return `value` as a pair of ints of at least `minimum`; one int is used for both."""
    if is_int(value):
        value = (value, value)  # type: ignore[assignment]
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{name} is {value!r}; it needs to be an int or a pair of ints")
    return integer(f"{name}[0]", value[0], minimum), integer(f"{name}[1]", value[1], minimum)


def as_tensor(name: str, value: IntsLike, device: torch.device | str | None = None) -> Tensor:
    """Return `value` as a tensor, on `device` if there is one; a tensor is not moved to torch's default device."""
    if isinstance(value, Tensor):
        return value if device is None else value.to(device)
    try:
        return torch.as_tensor(value, device=device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"{name} is {value!r} ({type(value).__name__}); it needs to be an integer torch.Tensor, or a list of ints"
        ) from error


def integer_tensor(name: str, value: IntsLike, ndims: tuple[int, ...]) -> Tensor:
    """Return `value` as an integer tensor; its rank needs to be one of `ndims`."""
    tensor = as_tensor(name, value)
    if not isinstance(value, Tensor) and tensor.numel() == 0:
        tensor = tensor.to(torch.int64)  # torch makes a float tensor from an empty list
    if tensor.dim() not in ndims:
        needs = " or ".join(f"{n}-D" for n in ndims)
        raise ValueError(f"{name} has shape {tuple(tensor.shape)} ({tensor.dim()}-D); it needs to be {needs}")
    if tensor.dtype not in INTEGER_DTYPES:
        raise TypeError(f"{name} has dtype {tensor.dtype}; it needs an integer dtype; pass {name}.long()")
    return tensor


def bool_mask(name: str, mask: Tensor) -> Tensor:
    """Return a bool mask of 0 to 4 dims as 4-D: dims are added on the left."""
    check_strided(name, mask)
    check_tensor(name, mask, f"a bool torch.Tensor{f'; {name}.unpacked() is one' if hasattr(mask, 'unpacked') else ''}")
    if mask.dtype != torch.bool:
        raise TypeError(f"{name} has dtype {mask.dtype}; it needs to be torch.bool, True = attend; pass {name} != 0")
    return four_dims(name, mask)


def four_dims(name: str, tensor: Tensor) -> Tensor:
    """Add dims of size 1 on the left until there are 4."""
    if tensor.dim() > 4:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} ({tensor.dim()}-D); it needs at most 4 dims, "
            f"broadcastable to (batch, heads, seqlen_q, seqlen_k)"
        )
    return tensor[(None,) * (4 - tensor.dim())]


def float_scores(scores: Tensor) -> Tensor:
    """Return a float tensor of scores as 4-D, without its gradient."""
    check_floats("scores", scores)
    return four_dims("scores", scores.detach())


def lengths_within(name: str, lengths: Tensor, maximum: int | None = None) -> None:
    """Refuse negative lengths and lengths above `maximum`, if values can be read without waiting."""
    if lengths.numel() == 0 or not values_can_be_read(lengths):
        return
    low, high = (int(x) for x in lengths.aminmax())
    if low < 0:
        raise ValueError(f"{name} has a negative length ({low}); every length needs to be >= 0")
    if maximum is not None and high > maximum:
        raise ValueError(f"{name} has a length of {high}, longer than the sequence; at most {maximum} is possible")


def align_heads(tensors: list[Tensor], names: list[str]) -> list[Tensor]:
    """Bring all head dims to 1 or the largest, Hq: query head h gets key-value head h // G."""
    num_heads = max(t.size(1) for t in tensors)
    aligned = []
    for tensor, name in zip(tensors, names, strict=True):
        heads = tensor.size(1)
        if heads in (1, num_heads):
            aligned.append(tensor)
        elif heads and num_heads % heads == 0:
            aligned.append(tensor.repeat_interleave(num_heads // heads, dim=1))
        else:
            raise ValueError(
                f"{name} has {heads} heads (shape {tuple(tensor.shape)}) with {num_heads} heads elsewhere; "
                f"it needs 1, {num_heads}, or a divisor of {num_heads}"
            )
    return aligned


def common_shape(tensors: list[Tensor], names: list[str]) -> tuple[int, int, int, int]:
    """Return the smallest 4-D shape that all 4-D `tensors` broadcast to."""
    shape = [1, 1, 1, 1]
    owner = ["", "", "", ""]
    for tensor, name in zip(tensors, names, strict=True):
        for dim, size in enumerate(tensor.shape):
            if size == 1:
                continue
            if shape[dim] not in (1, size):
                raise ValueError(
                    f"{name} has {DIMS[dim]} = {size} (shape {tuple(tensor.shape)}) and {owner[dim]} has {shape[dim]}; "
                    f"each dim needs to be 1 or the same everywhere"
                )
            shape[dim], owner[dim] = size, name
    return shape[0], shape[1], shape[2], shape[3]


def pad(x: Tensor, counts: tuple[int, ...], value: int = 0) -> Tensor:
    """Pad as `F.pad(x, counts, value=value)` does, which in PyTorch 2.9 refuses a tensor with an empty dim.

    >>> pad(torch.ones(2, 0, dtype=torch.bool), (0, 3)).tolist()
    [[False, False, False], [False, False, False]]
    """
    if x.numel() > 0:
        return F.pad(x, counts, value=value)
    shape = list(x.shape)
    for dim, (before, after) in enumerate(zip(counts[::2], counts[1::2], strict=True), start=1):
        shape[-dim] += before + after
    return x.new_full(shape, value)
