"""The checks that mask builders make on their arguments, and the sentences they fail with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..problem import check_strided, values_can_be_read

# Lengths, or 0/1 masks, as users hold them: a tensor, or nested Python lists.
IntsLike = torch.Tensor | Sequence[int] | Sequence[Sequence[int]]

INTEGER_DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def integer(name: str, value: int, minimum: int = 0) -> int:
    """`value`, if it is an int of at least `minimum`; a size that a compiler has a symbol for stays that symbol."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}) and must be an int >= {minimum}.")
    if value < minimum:
        raise ValueError(f"{name} is {value} and must be >= {minimum}.")
    return value


def pair(name: str, value: int | tuple[int, int], minimum: int) -> tuple[int, int]:
    """`value` as a pair of ints of at least `minimum`; one int stands for both."""
    if isinstance(value, (int, torch.SymInt)):
        value = (value, value)
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{name} is {value!r} and must be an int or a pair of ints.")
    return integer(f"{name}[0]", value[0], minimum), integer(f"{name}[1]", value[1], minimum)


def integer_tensor(name: str, value: IntsLike, ndims: tuple[int, ...]) -> torch.Tensor:
    """`value` as an integer tensor whose rank is one of `ndims`."""
    tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    if not isinstance(value, torch.Tensor) and tensor.numel() == 0:
        tensor = tensor.to(torch.int64)  # an empty list has no dtype of its own: torch calls it float
    if tensor.dtype not in INTEGER_DTYPES:
        raise TypeError(f"{name} has dtype {tensor.dtype} and must have an integer dtype; pass {name}.long().")
    if tensor.dim() not in ndims:
        needs = " or ".join(f"{n}-D" for n in ndims)
        raise ValueError(f"{name} has shape {tuple(tensor.shape)} ({tensor.dim()}-D) and must be {needs}.")
    return tensor


def bool_mask(name: str, mask: torch.Tensor) -> torch.Tensor:
    """`mask`, 4-D (dims are added on the left), if it is a bool tensor of 0 to 4 dims."""
    check_strided(name, mask)
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"{name} is a {type(mask).__name__} and must be a torch.bool tensor.")
    if mask.dtype != torch.bool:
        raise TypeError(f"{name} has dtype {mask.dtype} and must be torch.bool, True = attend; pass {name} != 0.")
    return four_dims(name, mask)


def four_dims(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with size-1 dims added on the left until it has four."""
    if tensor.dim() > 4:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} ({tensor.dim()}-D) and must have at most 4 dims, "
            f"broadcastable to (batch, heads, seqlen_q, seqlen_k)."
        )
    return tensor[(None,) * (4 - tensor.dim())]


def lengths_within(name: str, lengths: torch.Tensor, maximum: int | None = None) -> None:
    """Raises if a length is negative or above `maximum`, where the values can be read without waiting."""
    if lengths.numel() == 0 or not values_can_be_read(lengths):
        return
    low, high = (int(x) for x in lengths.aminmax())
    if low < 0:
        raise ValueError(f"{name} has a negative length ({low}); every length must be >= 0.")
    if maximum is not None and high > maximum:
        raise ValueError(f"{name} has a length of {high}, longer than the sequence; at most {maximum} is possible.")
