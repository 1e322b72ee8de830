"""Who writes to caches on a GPU: Triton on those of NVIDIA, where it is installed and nobody has disabled it."""

from __future__ import annotations

from functools import cache

from ..problem import device_arch
from ..sequences import cache_writes
from ..sequences.cache_writes import CacheWrite, Writer
from .config import disabled
from .triton_modules import triton_module


def find_writer(write: CacheWrite) -> Writer | None:
    """The fastest writer for a write; None for PyTorch."""
    if not write.k_cache.is_cuda or "triton" in disabled():
        return None
    return _triton_writer() if device_arch(write.k_cache.device).startswith("sm_") else None


@cache
def _triton_writer() -> Writer | None:
    of_caches = triton_module("flash_dmattn.triton_kernels.append")
    writer: Writer | None = None if of_caches is None else of_caches.write
    return writer


cache_writes.register(find_writer)
