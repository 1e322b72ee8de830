"""Triton's interpreter without work whose result nobody sees: four fifths of its time. Kernels compute what they did.

Written for the Triton of requirements-dev.txt.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
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
_shapes: dict[Any, tuple[Any, Any]] = {}


def _shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """Shape and number of elements of all tensors of these sizes; nobody changes them."""
    if sizes not in _shapes:
        shape = language.tuple([language.constexpr(size) for size in sizes])
        _shapes[sizes] = (shape, language.constexpr(math.prod(sizes)))
    return _shapes[sizes]


def _init_known_block(self: language.block_type, element_ty: language.dtype, shape: Any) -> None:
    """A type of tiles as it was made before: it names itself and checks its sizes once."""
    key = (element_ty.name, *[size.value if isinstance(size, language.constexpr) else size for size in shape])
    if key not in _blocks:
        _init_block(self, element_ty, shape)
        _blocks[key] = {**self.__dict__, "of_tensors": _shape_of(tuple(self.shape)), "others": {}}
    self.__dict__.update(_blocks[key], element_ty=element_ty)


def _with_element(self: language.block_type, scalar_ty: language.dtype) -> language.block_type:
    """The type of tiles of these sizes with other elements, made once but for pointers, whose names say too little."""
    if type(scalar_ty) is not language.dtype:
        return language.block_type(scalar_ty, self.shape)
    if scalar_ty.name not in self.others:
        self.others[scalar_ty.name] = language.block_type(scalar_ty, self.shape)
    return self.others[scalar_ty.name]


_NO_SIZES = _shape_of(())
_SCALAR_SHAPE = _NO_SIZES[0]


def _init_tensor(self: language.tensor, handle: Any, type: language.dtype) -> None:
    """A tensor with the shape object of all tensors of these sizes."""
    if type.__class__ is language.block_type:
        self.shape, self.numel = type.of_tensors
        self.handle, self.type, self.dtype = handle, type, type.element_ty
    else:
        self.shape, self.numel = _NO_SIZES
        self.handle, self.type, self.dtype = handle, type, type.scalar


_check_size = interpreter._validate_np_data_size
_checked: set[tuple[int, str]] = set()


def _init_handle(self: interpreter.TensorHandle, data: Any, dtype: language.dtype, attr: Any = None) -> None:
    """A handle that asks once for each size of an element and each type whether the one fits into the other."""
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    pair = (data.itemsize, dtype.name)
    if pair not in _checked:
        self.__post_init__()
        _checked.add(pair)


_BUILTIN = language.core.builtin(lambda: None).__code__


def _patch_one(obj: object, name: str, member: Any, builder: object, scope: Any) -> None:
    """Put a builtin function in place that adds the interpreter's semantics; without a check that they are there."""
    inner = member.__wrapped__ if getattr(member, "__code__", None) is _BUILTIN else member

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return inner(*args, **kwargs)

    scope.set_attr(obj, name, call)


_unwrap = language.core._unwrap_if_constexpr
_PLAIN = (int, bool, float, str, language.dtype, language.pointer_type, language.block_type, language.tensor)


def _unwrap_quickly(x: Any) -> Any:
    """The value of a constexpr, and of all else what it is; asked of mostly these."""
    kind = type(x)
    return x.value if kind is language.constexpr else x if kind in _PLAIN else _unwrap(x)


_broadcast = TritonSemantic.broadcast_impl_value
_cast = TritonSemantic.cast
_check_operands = TritonSemantic.binary_op_type_checking_impl
_NUMBERS = (int, float, bool)
_meeting: dict[tuple[int, int], language.block_type] = {}  # the type of two tiles together, by their shapes
_beside: dict[tuple[Any, ...], tuple[language.dtype, language.tensor, dict[int, language.tensor]]] = {}


def _broadcast_others(self: TritonSemantic[Any], x: Any, y: Any) -> tuple[Any, Any]:
    """Two tensors of one shape, which they mostly have, as they are; a scalar beside a tile as a view of its sizes."""
    if x.shape is y.shape:
        return x, y
    if y.shape is _SCALAR_SHAPE and y.handle.data.size == 1:
        return x, _tile_of(y, x.type)
    if x.shape is _SCALAR_SHAPE and x.handle.data.size == 1:
        return _tile_of(x, y.type), y
    key = (id(x.shape), id(y.shape))  # `_shapes` keeps both
    if key not in _meeting:
        made = _broadcast(self, x, y)
        if len(x.shape) != len(y.shape) or x.shape is _SCALAR_SHAPE:
            return made
        _meeting[key] = made[0].type
    return _stretched(x, _meeting[key]), _stretched(y, _meeting[key])


def _stretched(x: language.tensor, like: language.block_type) -> language.tensor:
    """A tile as a view of the sizes of a type, where its own are these or 1."""
    if x.shape is like.of_tensors[0]:
        return x
    data = np.broadcast_to(x.handle.data, like.shape.values)
    return language.tensor(interpreter.TensorHandle(data, x.handle.dtype.scalar), like.with_element_ty(x.dtype))


def _tile_of(x: language.tensor, like: language.block_type) -> language.tensor:
    """A scalar as a tile of the sizes of a type, without a copy: no operation writes into what it is given."""
    data = np.asarray(x.handle.data, _known_dtype(x.handle.dtype))
    tile = np.ndarray(like.shape.values, data.dtype, data, 0, (0,) * len(like.shape))
    return language.tensor(interpreter.TensorHandle(tile, x.handle.dtype.scalar), like.with_element_ty(x.dtype))


def _cast_others(self: TritonSemantic[Any], x: Any, dtype: Any, rounding: str | None = None) -> Any:
    """A tensor that has the type, which most have, as it is."""
    return x if x.dtype is dtype.scalar else _cast(self, x, dtype, rounding)


def _operands(
    self: TritonSemantic[Any],
    x: Any,
    y: Any,
    x_may_point: bool = False,
    y_may_point: bool = False,
    is_arithmetic: bool = True,
    divides: bool = False,
) -> tuple[Any, Any]:
    """Two operands in the type that they are computed in; most are of one type, or a tensor and a number."""
    if type(x) is language.tensor and type(x.dtype) is language.dtype:
        if type(y) is language.tensor and x.dtype is y.dtype and not divides:
            return self.broadcast_impl_value(x, y)
        if type(y) in _NUMBERS and is_arithmetic:
            return _beside_number(self, x, y, False, divides)
    elif x_may_point and type(x) is type(y) is language.tensor and x.dtype.is_ptr() and y.dtype.is_int():
        return self.broadcast_impl_value(x, y)
    elif type(x) in _NUMBERS and is_arithmetic and type(y) is language.tensor and type(y.dtype) is language.dtype:
        return _beside_number(self, y, x, True, divides)[::-1]
    return _check_operands(self, x, y, x_may_point, y_may_point, is_arithmetic, divides)


def _beside_number(
    self: TritonSemantic[Any], x: language.tensor, value: float, is_first: bool, divides: bool
) -> tuple[Any, Any]:
    """A tensor and a number in the type that they are computed in; the number's tiles are made once."""
    # -0.0 equals 0.0, and True equals 1.
    key = (x.dtype.name, type(value), value, math.copysign(1.0, value), is_first, divides)
    if key not in _beside:
        one = language.tensor(interpreter.TensorHandle(np.zeros(1, _known_dtype(x.dtype)), x.dtype), x.dtype)
        two = _check_operands(self, *((value, one) if is_first else (one, value)), div_or_mod=divides)
        _beside[key] = (two[is_first].dtype, two[not is_first], {})
    dtype, number, tiles = _beside[key]
    x = _cast_others(self, x, dtype)
    if x.shape is not number.shape:
        if id(x.shape) not in tiles:  # `_shapes` keeps it
            tiles[id(x.shape)] = _broadcast(self, x, number)[1]
        number = tiles[id(x.shape)]
    return x, number


def make_quick() -> None:
    """Have this process' interpreter leave that work out."""
    builder = interpreter.interpreter_builder
    # It computes every sum of 32 bits a second time in 64, for a comparison that it makes only when debugging.
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _patch_once
    interpreter._patch_attr = _patch_one
    interpreter._get_np_dtype = _known_dtype
    language.block_type.__init__ = _init_known_block
    language.block_type.with_element_ty = _with_element
    language.tensor.__init__ = _init_tensor
    interpreter.TensorHandle.__init__ = _init_handle
    language.core._unwrap_if_constexpr = _unwrap_quickly
    TritonSemantic.broadcast_impl_value = _broadcast_others
    TritonSemantic.cast = _cast_others
    TritonSemantic.binary_op_type_checking_impl = _operands
