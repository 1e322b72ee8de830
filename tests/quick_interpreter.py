"""Triton's interpreter without work whose result nobody sees: two thirds of its time. Kernels compute what they did.

Written for the Triton of requirements-dev.txt.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import FunctionType, SimpleNamespace
from typing import Any

from triton import language
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_patch_lang = interpreter._patch_lang
_dtype_of = interpreter._get_np_dtype
_dtypes: dict[str, Any] = {}


class _Patched:
    """The functions of triton.language as the interpreter has them, from a launch to its end."""

    depth = 0

    def __init__(self) -> None:
        # Both names that a module has them by: kernels have the first, functions of triton.language the second.
        self._scope = _patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
        _Patched.depth += 1

    def restore(self) -> None:
        """Give back the functions that were there before."""
        _Patched.depth -= 1
        self._scope.restore()


def _patch_once(fn: FunctionType) -> _Patched | None:
    """Put them in place for a launch; a kernel's call of a function of its own asks again, and finds them there."""
    return None if _Patched.depth else _Patched()


def _known_dtype(dtype: Any) -> Any:
    """NumPy's dtype of one of Triton's; the interpreter builds its table of all of them for each tensor."""
    if isinstance(dtype, language.pointer_type):
        return _dtype_of(dtype)
    if str(dtype) not in _dtypes:
        _dtypes[str(dtype)] = _dtype_of(dtype)
    return _dtypes[str(dtype)]


_init_block = language.block_type.__init__
_blocks: dict[tuple[Any, ...], dict[str, Any]] = {}


def _init_known_block(self: language.block_type, element_ty: language.dtype, shape: Any) -> None:
    """A type of tiles as it was made before: it names itself and checks its sizes once."""
    key = (element_ty.name, *[size.value if isinstance(size, language.constexpr) else size for size in shape])
    if key not in _blocks:
        _init_block(self, element_ty, shape)
        _blocks[key] = self.__dict__.copy()
    self.__dict__.update(_blocks[key], element_ty=element_ty)


_shapes: dict[Any, tuple[Any, Any]] = {}


def _init_tensor(self: language.tensor, handle: Any, type: language.dtype) -> None:
    """A tensor whose shape, which nobody changes, is that of all tensors of these sizes."""
    sizes = type.shape if type.is_block() else ()
    key = tuple(sizes)
    if key not in _shapes:
        shape = language.tuple([language.constexpr(size) for size in sizes])
        _shapes[key] = (shape, language.constexpr(math.prod(sizes)))
    self.shape, self.numel = _shapes[key]
    self.handle, self.type, self.dtype = handle, type, type.scalar


_unwrap = language.core._unwrap_if_constexpr
_PLAIN = (int, bool, float, str, language.dtype, language.pointer_type, language.block_type, language.tensor)


def _unwrap_quickly(x: Any) -> Any:
    """The value of a constexpr, and of all else what it is; asked of mostly these."""
    kind = type(x)
    return x.value if kind is language.constexpr else x if kind in _PLAIN else _unwrap(x)


_broadcast = TritonSemantic.broadcast_impl_value


def _broadcast_others(self: TritonSemantic[Any], x: Any, y: Any) -> tuple[Any, Any]:
    """Two tensors of one shape, which they mostly have, as they are."""
    return (x, y) if x.shape is y.shape else _broadcast(self, x, y)


def make_quick() -> None:
    """Have this process' interpreter leave that work out."""
    builder = interpreter.interpreter_builder
    # It computes every sum of 32 bits a second time in 64, for a comparison that it makes only when debugging.
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _patch_once
    interpreter._get_np_dtype = _known_dtype
    language.block_type.__init__ = _init_known_block
    language.tensor.__init__ = _init_tensor
    language.core._unwrap_if_constexpr = _unwrap_quickly
    TritonSemantic.broadcast_impl_value = _broadcast_others
