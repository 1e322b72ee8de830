"""The only list of GPUs that the kernels are compiled for, with how each was tested.

docs/support.md prints it, and tests/test_triton_gpus.py checks it against the compiler. It does not import Triton.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

KIB = 1024

Standing = Literal["measured", "forced", "compiled"]


class Gpu(NamedTuple):
    """An architecture.

    Attributes:
        arch: the name that `device_arch` gives.
        products: some GPUs of this architecture.
        shared: the largest shared memory of one program, in bytes.
        standing: "measured" if the kernels were tested and timed on such a GPU. "forced" if a Hopper GPU has run them,
            with its tiles, instructions and shared memory. "compiled" if nothing has.
    """

    arch: str
    products: str
    shared: int
    standing: Standing


GPUS = (
    Gpu("sm_80", "A100", 163 * KIB, "forced"),
    Gpu("sm_86", "A10, A40, RTX 30", 99 * KIB, "forced"),
    Gpu("sm_89", "L4, L40S, RTX 40", 99 * KIB, "forced"),
    Gpu("sm_90", "H100, H200", 227 * KIB, "measured"),
    Gpu("sm_100", "B200", 227 * KIB, "compiled"),
    Gpu("sm_120", "RTX 50, RTX PRO Blackwell", 99 * KIB, "forced"),
    Gpu("gfx942", "MI300X", 64 * KIB, "compiled"),
    Gpu("gfx950", "MI350X", 160 * KIB, "compiled"),
)
# Shared memory of an architecture that is not listed: the least of the listed GPUs of its vendor. A rule of the backend
# refuses sm_75 and older.
LEAST_SHARED = {"sm": 99 * KIB, "gfx": 64 * KIB}


# GPUs that have all that the tiles for Hopper need: the shared memory, TMA, and launches that overlap.
LIKE_HOPPER = ("sm_90", "sm_100")


def gpu_of(arch: str) -> Gpu | None:
    """Return the row of an architecture, or None."""
    return next((gpu for gpu in GPUS if gpu.arch == arch), None)


def shared_bytes(arch: str) -> int:
    """Return the bytes of shared memory that a program may use."""
    gpu = gpu_of(arch)
    return gpu.shared if gpu is not None else LEAST_SHARED["gfx" if arch.startswith("gfx") else "sm"]
