"""Keys of caches taken apart, so that a test can ask of each part of a key whether some change of a call touches it.

A test of a cache gives the key of one call, and changes of that call, each of one input. `check_told_apart` wants
another key for each change: no input is missing from the key. `check_covered` wants each part of the key to differ for
some change. A part that is new in the key has no change yet, so its test fails until it has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_dmattn
from flash_dmattn.dispatch.registry import BACKENDS

Place = tuple[int, ...]


def parts(key: Any, place: Place = ()) -> dict[Place, Any]:
    """The parts of nested tuples that are no tuples themselves, by their places; sizes and strides are one part."""
    if not isinstance(key, tuple) or (key and all(type(x) is int for x in key)):
        return {place: key}
    return {at: part for i, inner in enumerate(key) for at, part in parts(inner, (*place, i)).items()}


def check_told_apart(key: Any, changed: Any) -> None:
    """One change of a call changes its key."""
    assert changed != key
    assert hash(changed) is not None


def check_covered(key: Any, changed: Iterable[Any]) -> None:
    """Each part of a key differs in one of the keys of changed calls."""
    got = [parts(one) for one in changed]
    missing = [(place, part) for place, part in parts(key).items() if all(one.get(place, one) == part for one in got)]
    assert not missing, f"no change touches {missing}"


def _strided(x: Tensor) -> Tensor:
    """The same sizes, in twice the room and one more for each place of a dim."""
    return torch.empty_strided(x.shape, [2 * stride + 1 for stride in x.stride()], dtype=x.dtype)


# A key may tell this of a tensor.
TENSOR_CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "shape": lambda x: torch.empty_strided([size + 1 for size in x.shape], x.stride(), dtype=x.dtype),
    "strides": _strided,
    "dtype": lambda x: x.to(torch.uint8 if x.dtype == torch.bool else torch.float64),
    "device": lambda x: x.to("meta"),
}


def tensor_changes(x: Tensor, *, has_gradient: bool = True) -> dict[str, Tensor]:
    """Tensors that differ from `x` in one property, by its name.

    Args:
        x: the tensor.
        has_gradient: whether one of them requires a gradient.
    """
    got = {name: change(x) for name, change in TENSOR_CHANGES.items()}
    if has_gradient and x.is_floating_point():
        got["requires_grad"] = x.detach().clone().requires_grad_()
    return got


def under_other_settings(key: Callable[[], Any]) -> Iterator[Any]:
    """The key of one call where one setting outside of it is another."""
    with torch.no_grad():
        yield key()
    torch.use_deterministic_algorithms(True)
    yield key()
    torch.use_deterministic_algorithms(False)
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield key()
    torch.backends.cuda.matmul.fp32_precision = before
    with flash_dmattn.config(backend="reference"):
        yield key()
    flash_dmattn.config.set(backend="reference")
    yield key()
    flash_dmattn.config.set(backend="auto")
    with flash_dmattn.config(disabled="flex"):
        yield key()
    with flash_dmattn.config(fallback="silent"):
        yield key()
    with flash_dmattn.config(invariant=True):
        yield key()
    flash_dmattn.config.set(invariant=True)
    yield key()
    flash_dmattn.config.set(invariant=False)
    flash_dmattn.config.set(disabled="flex")
    yield key()
    flash_dmattn.config.set(disabled=())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BACKENDS, "version", BACKENDS.version + 1)
        yield key()
