"""The part of docs/support.md about GPUs: what the rules refuse is refused, the rest is as the table of GPUs has it."""

from __future__ import annotations

from ..dispatch.registry import BACKENDS
from ..explanation import explain_problem
from ..triton_kernels.gpus import GPUS, KIB

# Of the GPUs that the rules refuse the nearest, with its shared memory in KB.
REFUSED_GPU = ("sm_75", "T4, RTX 20", 64)

LEGEND = """\
What is known of the kernels of this library on each GPU; `flex` and `eager` run what PyTorch has for it.

* **measured**: tested and timed on such a GPU.
* **compiled**: never run there. Every run of the tests compiles each kernel for it, for a sample of calls: the kernels
  keep to the shared memory that a program may have, and spill no more registers than a bound.
  `python tests/compile_everything.py` compiles them for all calls. `backend="triton"` runs them.
* **refused**: an error says why.

Of a GPU that is not listed nothing is known. `triton` runs there by name, with tiles that fit the smallest of them."""


def gpu_table() -> str:
    """What is known of each architecture, by the backends with kernels of our own."""
    known: list[tuple[str, str, int, str]] = [(*REFUSED_GPU, "refused")]
    known += [(gpu.arch, gpu.products, gpu.shared // KIB, gpu.standing) for gpu in GPUS]
    lines = ["| GPU | such as | shared memory | `cuda` | `triton` |", "| --- | --- | --- | --- | --- |"]
    for arch, products, shared, standing in known:
        problem = explain_problem(q=(2, 4096, 16, 64), dtype="bf16", device=arch, grad=True).problem
        # The CUDA kernels are for one architecture, on which they are measured.
        said = {"cuda": "measured", "triton": standing}
        words = [word if BACKENDS[name].accepts(problem, "forward") else "refused" for name, word in said.items()]
        lines.append(f"| {arch} | {products} | {shared} KB | {' | '.join(words)} |")
    return "\n".join(lines)


def section() -> str:
    """Its heading, what the words mean, and the table."""
    return f"## GPUs\n\n{LEGEND}\n\n{gpu_table()}"
