"""The GPUs that the kernels are compiled for, and how much is known of each: the one place that says so.

It is what docs/support.md prints, and what tests/test_triton_gpus.py holds against the compiler. No import of Triton.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

KIB = 1024

Standing = Literal["measured", "compiled"]


class Gpu(NamedTuple):
    """An architecture.

    Attributes:
        arch: as `device_arch` names it.
        products: some GPUs of that kind.
        shared: bytes of shared memory that one program may have.
        standing: "measured" on such a GPU, or "compiled" without one: no kernel of it has been run.
    """

    arch: str
    products: str
    shared: int
    standing: Standing


GPUS = (
    Gpu("sm_80", "A100", 163 * KIB, "compiled"),
    Gpu("sm_86", "A10, A40, RTX 30", 99 * KIB, "compiled"),
    Gpu("sm_89", "L4, L40S, RTX 40", 99 * KIB, "compiled"),
    Gpu("sm_90", "H100, H200", 227 * KIB, "measured"),
    Gpu("sm_100", "B200", 227 * KIB, "compiled"),
    Gpu("sm_120", "RTX 50, RTX PRO Blackwell", 99 * KIB, "compiled"),
    Gpu("gfx942", "MI300X", 64 * KIB, "compiled"),
)
# Of an architecture that is not listed: what the least of its vendor's has. sm_75 and older are refused by a rule.
LEAST_SHARED = {"sm": 99 * KIB, "gfx": 64 * KIB}


def gpu_of(arch: str) -> Gpu | None:
    """The row of an architecture, where it has one."""
    return next((gpu for gpu in GPUS if gpu.arch == arch), None)


def shared_bytes(arch: str) -> int:
    """The shared memory that a program may count on."""
    gpu = gpu_of(arch)
    return gpu.shared if gpu is not None else LEAST_SHARED["gfx" if arch.startswith("gfx") else "sm"]
