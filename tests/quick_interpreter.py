"""Triton's interpreter without work whose result nobody sees: half of its time. Kernels compute what they did.

Written for the Triton of requirements-dev.txt.
"""

from __future__ import annotations

from dataclasses import replace
from types import FunctionType, SimpleNamespace
from typing import Any

from triton import language
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


def make_quick() -> None:
    """Have this process' interpreter leave that work out."""
    builder = interpreter.interpreter_builder
    # It computes every sum of 32 bits a second time in 64, for a comparison that it makes where it debugs alone.
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _patch_once
    interpreter._get_np_dtype = _known_dtype
