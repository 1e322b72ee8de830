"""Write wgmma_instructions.h: the matrix instruction m64nNk16 for every N and dtype the kernels use.

An instruction names each of its N / 2 accumulators, so the text is written by a program. Run it again after a change:

    python csrc/device/generate_wgmma.py            # writes the header beside this file
    python csrc/device/generate_wgmma.py --check    # fails where the header is not what this would write
"""

from __future__ import annotations

import sys
from pathlib import Path

HEADER = Path(__file__).with_name("wgmma_instructions.h")
# The methods that kernels use, for each width N.
METHODS = {
    16: ("shared_b_transposed",),
    32: ("shared_b_transposed", "registers_b_transposed"),
    64: ("shared_k_major", "shared_b_transposed", "registers_b_transposed"),
    80: ("shared_k_major", "shared_a_transposed"),
    96: ("shared_k_major", "registers_b_transposed"),
    128: ("shared_k_major", "shared_b_transposed", "shared_transposed", "registers_b_transposed"),
    **dict.fromkeys((192, 256), ("shared_k_major", "shared_transposed", "registers_b_transposed")),
}
DTYPES = {"__half": "f16", "__nv_bfloat16": "bf16"}

PREAMBLE = """\
// Written by generate_wgmma.py; do not edit.
//
// D (64 x N, fp32, in registers) += A (64 x 16) B (16 x N), or = where accumulate is false, for one warpgroup.
// Source of the form: the PTX ISA, section on wgmma.mma_async.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace flash_dmattn {

template <class T, int kN>
struct Wgmma;
"""


def _listed(items: list[str], start: str, width: int = 8) -> str:
    """Items separated by commas, some to a line."""
    rows = [", ".join(items[i : i + width]) for i in range(0, len(items), width)]
    return f",\n{start}".join(rows)


def instruction(dtype: str, n: int) -> str:
    """The struct of one dtype and width, with a method for each place and major dim of its operands."""
    count = n // 2
    name = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{DTYPES[dtype]}.{DTYPES[dtype]}"
    row_stats = [f"%{i}" for i in range(count)]
    rows = [", ".join(row_stats[i : i + 16]) for i in range(0, count, 16)]
    places = ', "\n        "'.join(rows)
    outputs = _listed([f'"+f"(d[{i}])' for i in range(count)], " " * 10)

    def body(a: str, inputs: str, tail: str, used: int) -> str:
        return f"""\
    asm volatile(
        "{{\\n"
        ".reg .pred p;\\n"
        "setp.ne.b32 p, %{count + used}, 0;\\n"
        "{name} "
        "{{{places}}}, "
        "{a}, %{count + used - 1}, p, {tail};\\n"
        "}}\\n"
        : {outputs}
        : {inputs}, "l"(b), "r"(static_cast<int>(accumulate)));
"""

    quads = ", ".join(f"%{count + i}" for i in range(4))
    fragment = f"{{{quads}}}", ", ".join(f'"r"(a[{i}])' for i in range(4))
    descriptor = f"%{count}", '"l"(a)'
    sums = f"float (&d)[{count}]"
    in_shared = f"({sums}, uint64_t a, uint64_t b, bool accumulate)"
    methods = {
        "shared_k_major": (
            "A and B from shared memory, both K-major.", "run", in_shared, body(*descriptor, "1, 1, 0, 0", 2),
        ),
        "shared_b_transposed": (
            "A and B from shared memory, A K-major, B N-major.", "run_b_transposed", in_shared,
            body(*descriptor, "1, 1, 0, 1", 2),
        ),
        "shared_a_transposed": (
            "A and B from shared memory, A M-major, B K-major.", "run_a_transposed", in_shared,
            body(*descriptor, "1, 1, 1, 0", 2),
        ),
        "shared_transposed": (
            "A and B from shared memory, A M-major, B N-major.", "run_ab_transposed", in_shared,
            body(*descriptor, "1, 1, 1, 1", 2),
        ),
        "registers_b_transposed": (
            "A from registers, B from shared memory, N-major.", "run",
            f"({sums}, const uint32_t (&a)[4], uint64_t b,\n{' ' * 45}bool accumulate)",
            body(*fragment, "1, 1, 1", 5),
        ),
    }  # fmt: skip
    written = []
    for key in METHODS[n]:
        said, method, arguments, text = methods[key]
        written.append(f"  // {said}\n  __device__ static __forceinline__ void {method}{arguments} {{\n{text}  }}\n")
    return f"template <>\nstruct Wgmma<{dtype}, {n}> {{\n{''.join(written)}}};\n"


def text() -> str:
    """The whole header."""
    parts = [instruction(dtype, n) for dtype in DTYPES for n in METHODS]
    return "\n".join([PREAMBLE, *parts, "}  // namespace flash_dmattn\n"])


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if HEADER.exists() and HEADER.read_text() == text() else f"{HEADER} is not current: run {__file__}")
    HEADER.write_text(text())
