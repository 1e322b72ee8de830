"""Attention with arbitrary masks and additive biases: one call, several backends, one contract."""

import importlib.util as _util
import sys as _sys
from importlib import import_module as _import_module
from importlib.machinery import ModuleSpec as _ModuleSpec
from pathlib import Path as _Path
from typing import TYPE_CHECKING as _TYPE_CHECKING

from ._version import __version__

# A module of flash-dmattn 1.x, which has this import name, too.
if (_Path(__file__).parent / "flash_dmattn_interface.py").is_file():
    raise ImportError(
        f"{_Path(__file__).parent} has files of flash-dmattn 1.x and of flash_dmattn {__version__}, which have "
        "the same import name; run `python -m pip uninstall flash-dmattn`, then install flash_dmattn again"
    )

from .dispatch.config import process as _process

# `python -m flash_dmattn info` must start, because it shows the error. While Python looks for the module to run,
# sys.argv[0] is "-m".
_is_command = _sys.argv[:1] == ["-m"] and any(_word.endswith("flash_dmattn") for _word in _sys.orig_argv)
if _process.environment_error is not None and not _is_command:
    raise ValueError(_process.environment_error)

_root = _Path(__file__).resolve().parent.parent
if (_root / "setup.py").is_file() and (_root / "csrc").is_dir():
    # In a source checkout these folders are outside of the package, but are imported as a part of it. Changing
    # `__path__` would allow the same for every other folder of the checkout.
    for _name in ("reference", "triton_kernels", "examples"):
        _spec = _ModuleSpec(f"{__name__}.{_name}", None, is_package=True)
        _spec.submodule_search_locations = [str(_root / _name)]
        globals()[_name] = _sys.modules[_spec.name] = _util.module_from_spec(_spec)

try:
    import torch as _torch  # noqa: F401
except Exception as _error:
    # `python -m flash_dmattn info` must start, because it reports the error. Everything else raises at first use.
    _torch_error = _error

    def __getattr__(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(
            f"flash_dmattn.{name} needs torch, which cannot be imported: {_torch_error}"
        ) from _torch_error

else:
    from . import biases, masks, sequences, statistics
    from .api import attention
    from .backends.protocol import Backend
    from .definition import set_dtensor_loader
    from .dispatch.config import BackendChoice, config
    from .dispatch.registry import register_backend, unregister_backend
    from .dispatch.selection import (
        BackendError,
        BackendUnavailableError,
        BackendUnsupportedError,
        FallbackWarning,
        available_backends,
    )
    from .explanation import explain
    from .problem import AuxOutput, AuxRequest
    from .sequences import Sequences, append_to_cache

    if _TYPE_CHECKING:
        from . import distributed, nn

    # Imported at first use, because not every program needs them.
    _LAZY = ("distributed", "nn")

    def __getattr__(name: str) -> object:
        if name in _LAZY:
            return _import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def _load_dtensor() -> object:
        from .distributed import dtensor

        return dtensor

    set_dtensor_loader(_load_dtensor)


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "AuxOutput",
    "AuxRequest",
    "Backend",
    "BackendChoice",
    "BackendError",
    "BackendUnavailableError",
    "BackendUnsupportedError",
    "FallbackWarning",
    "Sequences",
    "__version__",
    "append_to_cache",
    "attention",
    "available_backends",
    "biases",
    "config",
    "distributed",
    "explain",
    "masks",
    "nn",
    "register_backend",
    "sequences",
    "statistics",
    "unregister_backend",
]
