"""Every kernel of the Triton backend for every GPU that it is meant for, what each may take, and samples of them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from compiled_triton import (
    Job,
    Kernel,
    SequenceVariant,
    Variant,
    append_jobs,
    gather_jobs,
    jobs_of,
    list_jobs,
    packing_jobs,
    piece_jobs,
    position_jobs,
    sequence_packing_jobs,
    tangent_jobs,
)
from compiled_variants import SEQUENCE_VARIANTS, VARIANTS

from flash_dmattn.backends.triton.backend import MAX_FP32_HEAD_DIM
from flash_dmattn.triton_kernels.gpus import GPUS, shared_bytes

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ARCHS = tuple(gpu.arch for gpu in GPUS)
# Kernels that multiply matrices. The others hold little, and take a second to compile for all GPUs.
PRODUCTS = (
    *("forward", "backward_keys", "backward_queries", "backward_product", "backward_bias"),
    *("backward_diagonals", "short_forward", "short_backward", "pairs", "pair_rows", "pair_columns", "tangents"),
    *("list_forward", "list_queries", "list_keys", "list_pairs", "list_product", "list_rows"),
    *("project", "project_queries", "project_table"),
)
# The instructions of tensor cores: in this order of sm_100, sm_90, every NVIDIA GPU and AMD's GPUs. If a tile asks for
# more than the GPU has, the compiler may make a kernel that traps, without an error.
TENSOR_CORES = re.compile(r"\b(tcgen05\.mma|wgmma\.mma_async|mma\.sync|v_mfma)")
# The widest heads whose kernels in fp32, whose products have no tensor cores, take seconds and not most of a minute.
SAMPLED_FP32 = 64


# Bytes of stack, where registers spill, that a kernel may take: for products in 16 bits, then for products in fp32.
SPILLS = {
    "backward_keys": {"sm_8": 576, "sm_90": 320, "sm_100": 768, "sm_120": 576, "gfx": 1024},
    "short_backward": {"sm_100": 320, "sm_90": 320, "sm": 288, "gfx": 320},
    "": {"sm_90": 320, "sm": 288, "gfx": 320},
}
SPILLS_FP32 = {
    "backward_queries": {"sm_90": 2304, "sm": 1024, "gfx": 320},
    "": {"sm_90": 1280, "sm": 448, "gfx": 320},
}
# Calls with sequences take the tiles of dense calls, without descriptors; no others were timed.
SPILLS_SEQUENCES = {
    **SPILLS,
    "forward": {"sm_90": 1024, "sm": 288, "gfx": 320},
    "backward_keys": {"sm_8": 576, "sm_90": 544, "sm_100": 768, "sm_120": 576, "gfx": 1216},
}
# The bounds of 16-bit kernels with head dims above 256. Most of this stack is in epilogues and in loops at edges.
SPILLS_WIDE = {
    "forward": {"sm_90": 480, "sm": 352, "gfx": 320},
    "pairs": {"sm_8": 640, "sm_120": 640, "sm": 352, "gfx": 320},
    "pair_columns": {"sm_90": 384, "sm": 64, "gfx": 64},
    "": {"sm": 352, "gfx": 320},
}
SPILLS_ELSEWHERE = 32  # no spills: the frame of a call of the 64-bit division


SEQUENCES = "sequences, "  # what the variant of an entry with sequences begins with


class Entry(NamedTuple):
    """A kernel to compile: the dtype of q, k and v ("-" where there is none), and the call that launches it."""

    dtype: str
    variant: str
    head_dim: int
    job: Job

    @property
    def label(self) -> str:
        return f"{self.job.arch} {self.dtype} {self.job.name}, {self.variant}"


def catalogue(
    archs: Iterable[str] = ARCHS, dtypes: Iterable[str] = tuple(DTYPES), words: Sequence[str] = ()
) -> list[Entry]:
    """Every kernel once: of the calls in `VARIANTS`, each in each dtype, of those with sequences, of what prepares."""
    entries: dict[str, Entry] = {}
    for arch in archs:
        listed = [Entry("-", "packing", 0, job) for job in packing_jobs(arch)]
        listed += [Entry("-", f"{SEQUENCES}packing", 0, job) for job in sequence_packing_jobs(arch)]
        listed += [Entry("-", "append", 0, job) for job in append_jobs(arch)]
        listed += [Entry("-", "pieces", 0, job) for job in piece_jobs(arch)]
        if "bf16" in dtypes:
            listed += [Entry("bf16", f"lists, {dim}", dim, job) for dim in (128, 576) for job in list_jobs(arch, dim)]
        for dtype in dtypes:
            listed += [Entry(dtype, "gathers", 0, job) for job in gather_jobs(arch, DTYPES[dtype])]
            for dim in (64, 128, 256):
                jobs = position_jobs(arch, DTYPES[dtype], dim)
                listed += [Entry(dtype, f"projected, {dim}", dim, job) for job in jobs]
            for name, fields in VARIANTS.items():
                variant = Variant(**fields)
                if variant.dtype == torch.bfloat16:
                    variant = replace(variant, dtype=DTYPES[dtype])
                elif variant.dtype != DTYPES[dtype]:  # it is there for its own dtype
                    continue
                jobs = jobs_of(variant, arch)
                if dtype == "fp32" and variant.head_dim > MAX_FP32_HEAD_DIM:  # whose gradients a rule refuses
                    jobs = [job for job in jobs if job.name in ("forward", "combine")]
                listed += [Entry(dtype, name, variant.head_dim, job) for job in jobs]
            # The widest heads that forward mode takes there.
            widest = 64 if dtype == "fp32" else 256 if arch.startswith("sm_") else 128
            for dim in (d for d in (64, 128, 256) if d <= widest):
                jobs = tangent_jobs(arch, DTYPES[dtype], dim)
                listed += [Entry(dtype, f"forward mode, {dim}", dim, job) for job in jobs]
            for name, fields in SEQUENCE_VARIANTS.items() if dtype == "bf16" else ():
                sequence_variant = SequenceVariant(**fields)
                jobs = jobs_of(sequence_variant, arch)
                listed += [Entry(dtype, f"{SEQUENCES}{name}", sequence_variant.head_dim, job) for job in jobs]
        for entry in listed:
            if all(word in entry.label for word in words):
                entries.setdefault(entry.job.key, entry)
    return list(entries.values())


def sample(entries: Iterable[Entry], number: int = 0) -> list[Entry]:
    """Each kernel once on each GPU, in turns of the dtypes and calls: other numbers are other samples."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        if entry.dtype != "fp32" or entry.head_dim <= SAMPLED_FP32:
            groups.setdefault((entry.job.arch, entry.job.name), []).append(entry)

    def turn(entry: Entry) -> bytes:
        return hashlib.sha256(f"{number} {entry.label}".encode()).digest()

    return [min(group, key=turn) for group in groups.values()]


class Result(NamedTuple):
    """The result of compiling an entry: the kernel, and all that is out of bounds."""

    label: str
    arch: str
    dtype: str
    name: str
    kernel: Kernel | None
    problems: tuple[str, ...]

    @property
    def line(self) -> str:
        took = ""
        if self.kernel is not None:
            k = self.kernel
            took = f"{k.block_m}x{k.block_n}, registers {k.registers}, stack {k.stack}, shared memory {k.shared}"
        return f"{self.label}: {'; '.join(part for part in (took, *self.problems) if part)}"


def compiled(entry: Entry) -> Result:
    """Compile an entry and hold it against its bounds."""
    job = entry.job
    try:
        kernel = job.compile()
    except Exception as error:  # whatever the compiler says is the result
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return Result(entry.label, job.arch, entry.dtype, job.name, None, (why,))
    without_text = kernel._replace(text="")  # which is large, and nobody reads of thousands of kernels
    return Result(entry.label, job.arch, entry.dtype, job.name, without_text, tuple(problems(entry, kernel)))


def problems(entry: Entry, kernel: Kernel) -> list[str]:
    said = []
    arch, room, stack = entry.job.arch, shared_bytes(entry.job.arch), stack_limit(entry)
    if kernel.shared > room:
        said.append(f"more shared memory than the {room} bytes of {arch}")
    if kernel.stack > stack:
        said.append(f"more stack than the bound of {stack} bytes")
    if entry.dtype in ("bf16", "fp16") and entry.job.name in PRODUCTS and TENSOR_CORES.search(kernel.text) is None:
        said.append("no tcgen05, wgmma, mma or mfma: its products leave out the tensor cores")
    if kernel.short_sums:
        said.append(f"{kernel.short_sums} products have sums too short for the threads of a row")
    return said


def stack_limit(entry: Entry) -> int:
    """Bytes of stack that the kernel may take: its row with the longest prefix of the name of its GPU decides."""
    if entry.job.name not in PRODUCTS:
        return SPILLS_ELSEWHERE
    bounds = SPILLS_FP32 if entry.dtype == "fp32" else SPILLS
    if entry.variant.startswith(SEQUENCES):
        bounds = SPILLS_SEQUENCES
    if entry.head_dim > 256 and entry.dtype != "fp32":
        bounds = SPILLS_WIDE
    row = bounds.get(entry.job.name, bounds[""])
    return row[max((family for family in row if entry.job.arch.startswith(family)), key=len)]


def table(results: Iterable[Result]) -> str:
    """For each GPU, dtype and kernel, the most shared memory and stack that one takes, in Markdown."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.arch, result.dtype, result.name), []).append(result)
    lines = ["| GPU | dtype | kernel | compiled | shared memory, of | stack | out of bounds |", f"|{' --- |' * 7}"]
    ranks = {arch: rank for rank, arch in enumerate(ARCHS)}
    for (arch, dtype, name), group in sorted(groups.items(), key=lambda item: (ranks[item[0][0]], *item[0][1:])):
        kernels = [result.kernel for result in group if result.kernel is not None]
        shared, stack = (max((k[i] for k in kernels), default=0) for i in (5, 4))
        wrong = sum(bool(result.problems) for result in group)
        room = shared_bytes(arch)
        lines.append(f"| {arch} | {dtype} | {name} | {len(kernels)} | {shared}, {room} | {stack} | {wrong} |")
    return "\n".join(lines)
