"""Compile what the Triton backend launches for a GPU that need not be here, and tell what each kernel takes.

The tensors are meta tensors: a plan reads sizes, strides, dtypes and alignment, never a value.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from flash_dmattn.masks.prepared.packing import TILE, MaskPacking, tiles
from flash_dmattn.problem import Flags, Layout, MaskForm, MaskView, NeedsGrad, Packing, SequenceSpec, SequenceView
from flash_dmattn.problem.inputs import Inputs, Saved
from flash_dmattn.reference.entropy import SentEntropy
from flash_dmattn.reference.gathers import Places
from flash_dmattn.reference.tangents import Tangents
from flash_dmattn.sequences.cache_writes import CacheWrite
from flash_dmattn.triton_kernels import (
    append,
    bands,
    gathers,
    interval_pack,
    key_pack,
    list_pack,
    mask_pack,
    positions,
    sequence_pack,
)
from flash_dmattn.triton_kernels.kernel_launch import Launch
from flash_dmattn.triton_kernels.launch import backward_plan, forward_plan
from flash_dmattn.triton_kernels.list_calls import (
    ListCall,
    ListFlags,
    ListNeeds,
    plan_list_backward,
    plan_list_forward,
)
from flash_dmattn.triton_kernels.plan import Call, read_of
from flash_dmattn.triton_kernels.plan_packed import plan_pieces
from flash_dmattn.triton_kernels.plan_sequences import SequenceCall
from flash_dmattn.triton_kernels.plan_tangents import plan_tangents

# A product of `mma.sync` in Triton's language of layouts: the terms of each of its sums, and the places of a thread.
_PRODUCT = re.compile(r"tt\.dot .*? : tensor<\d+x(\d+)x\w+, #ttg\.dot_op<\{opIdx = 0, parent = #\w+, kWidth = (\d+)\}")


class Kernel(NamedTuple):
    """A compiled kernel: its tile, registers of a thread, bytes of its stack and of shared memory, and its assembly.

    `short_sums` counts products of `mma.sync` whose sums have fewer terms than the four threads that share a row have
    places. Up to Triton 3.7 they are wrong (docs/notes/triton.md).
    """

    name: str
    block_m: int
    block_n: int
    registers: int
    stack: int
    shared: int
    text: str
    short_sums: int


@dataclass(frozen=True)
class Variant:
    """A call by what decides its kernels: sizes and flags as `Case` has them, letters for the shape of the bias."""

    head_dim: int
    mask: MaskForm = "none"
    bias: tuple[str, ...] | None = None
    is_causal: bool = False
    batch: int = 4  # more work than the least that pays for descriptors
    seqlen_q: int = 2048
    seqlen_k: int = 2048
    num_heads: int = 16
    num_heads_k: int = 16
    dtype: torch.dtype = torch.bfloat16
    bias_dtype: torch.dtype | None = None
    softcap: float = 0.0
    tf32: bool = False  # as where torch allows it for products of fp32
    sink: bool = False
    dropout_p: float = 0.0
    heads_first: bool = False  # as out is in memory
    row_stride: int = 0  # elements from a row of q, k, v and dout to the next; 0: contiguous
    outside: Literal["", "clamp", "zero"] = ""  # of a bias by distance, whose last letter is a number of values
    key_sums: bool = False  # whether p is summed, instead of both passes
    invariant: bool = False
    aux: bool = False  # whether largest scores and entropies are asked for, and entropies have a gradient

    def rows(self, seqlen: int, num_heads: int) -> Tensor:
        """A (B, L, H, D) tensor."""
        row = self.row_stride or num_heads * self.head_dim
        strides = (seqlen * row, row, self.head_dim, 1)
        shape = (self.batch, seqlen, num_heads, self.head_dim)
        return torch.empty_strided(shape, strides, dtype=self.dtype, device="meta")

    def mask_view(self) -> MaskView:
        """A mask with a head for each key-value head, or for all of them where it is one row."""
        tiles_q, tiles_k = triton.cdiv(self.seqlen_q, 128), triton.cdiv(self.seqlen_k, 128)
        shapes: list[tuple[int, ...]] = []
        if self.mask == "tiles":
            shapes = [(self.seqlen_q, 4 * tiles_k), (tiles_q, tiles_k), (tiles_q, 2 + tiles_k), (tiles_k, 2 + tiles_q)]
            shapes = [(self.batch, self.num_heads_k, *shape) for shape in shapes]
        elif self.mask == "keys":
            shapes = [(self.batch, 1, self.seqlen_k), (self.batch, 1), (self.batch, 1, self.seqlen_k + 1)]
        elif self.mask == "dense":
            shapes = [(self.batch, 1, self.seqlen_q, self.seqlen_k)]
        elif self.mask == "intervals":
            shapes = [(self.batch, 1, self.seqlen_k)] * 2
        tensors = [torch.empty(shape, dtype=torch.int32, device="meta") for shape in shapes]
        if self.mask == "tiles":
            tensors[1] = tensors[1].to(torch.uint8)
        elif self.mask == "dense":
            tensors[0] = tensors[0].to(torch.bool)
        return MaskView(self.mask, tuple(tensors))

    def call(self, arch: str) -> Call:
        """The call on a GPU of an architecture, with as many SMs as an H200."""
        sizes = {
            "B": self.batch,
            "Hq": self.num_heads,
            "Hk": self.num_heads_k,
            "Lq": self.seqlen_q,
            "Lk": self.seqlen_k,
        }
        bias = None
        if self.bias is not None:
            shape = [sizes[letter] if letter in sizes else int(letter) for letter in self.bias]
            bias = torch.empty(shape, dtype=self.bias_dtype or self.dtype, device="meta")
        q, k, v = (
            self.rows(seqlen, heads)
            for seqlen, heads in (
                (self.seqlen_q, self.num_heads),
                (self.seqlen_k, self.num_heads_k),
                (self.seqlen_k, self.num_heads_k),
            )
        )
        flags = Flags(-1, 0 if self.is_causal else -1, self.head_dim**-0.5, self.softcap, False)
        flags = flags._replace(dropout_p=self.dropout_p, zero=128 if self.outside else 0, outside=self.outside)
        flags = flags._replace(max_scores=self.aux, entropy=self.aux, sums=self.key_sums, invariant=self.invariant)
        v = column(k) if self.key_sums else v
        sink = torch.empty(self.num_heads, dtype=self.dtype, device="meta") if self.sink else None
        call = Call(q, k, v, self.mask_view(), bias, flags, sink)
        call.arch, call.num_sms, call.heads_first, call.allows_tf32 = arch, 132, self.heads_first, self.tf32
        return call


def run_plans(call: Call, launch: Callable[..., None]) -> None:
    """Run both passes of a call with every gradient asked for, with another function in the place of each launch.

    Sums of p have only the backward pass.
    """
    q, k, v, mask, bias = call.q, call.k, call.v, call.mask, call.bias
    sink = torch.empty(q.shape[2], dtype=q.dtype, device=q.device) if call.has_sink else None
    key = key_of(call)
    needs_grad = NeedsGrad(True, True, True, True, call.has_sink)
    out, dout = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty_like(q)
    lse, rows = lse_of(q, bias), lse_of(q, None)
    if call.flags.sums:
        needs_grad, out, lse, dout = NeedsGrad(v=True), column(q), rows, column(q)
    asked, sent = (rows,) * (call.flags.max_scores + call.flags.entropy), SentEntropy()
    dlse = None
    if call.flags.entropy:
        dlse, sent = rows, SentEntropy(rows, None)
    with mock.patch.object(Launch, "__call__", launch):
        x = Inputs(q, k, v, mask, bias, sink, None, key)
        if not call.flags.sums:
            forward_plan(call)(x, out, lse, *asked)
        backward_plan(call, dout, dlse, needs_grad)(Saved(x, out, lse), dout, dlse, sent)


def column(x: Tensor) -> Tensor:
    """A number in fp32 for each row of (B, L, H, D): the values of sums of p, or the weights of queries."""
    return torch.empty(*x.shape[:3], 1, dtype=torch.float32, device=x.device)


def lse_of(q: Tensor, bias: Tensor | None) -> Tensor:
    """The lse of rows (B, L, H, D), which is wide where there is a bias."""
    dtype = torch.float32 if bias is None else torch.float64
    return torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=dtype, device=q.device)


def key_of(call: Call) -> Tensor | None:
    return torch.empty(2, dtype=torch.int64, device="meta") if call.has_dropout else None


@dataclass(frozen=True)
class SequenceVariant(Variant):
    """A call of `batch` sequences of at most `seqlen_q` queries and `seqlen_k` keys.

    The letters of the bias stand for what they are of a dense call, "T" for all tokens of packed queries or keys.
    """

    layout: Layout = "packed"
    total: int = 16384  # tokens of packed queries, and of packed keys
    page_size: int = 16
    bias_packing: Packing = "none"

    @property
    def packs(self) -> tuple[bool, bool]:
        """Whether queries, and keys, are packed."""
        return self.layout in ("packed", "paged_packed"), self.layout == "packed"

    def call(self, arch: str) -> SequenceCall:
        """The call on a GPU of an architecture, with as many SMs as an H200."""
        packs_q, packs_k = self.packs
        pages = -(-self.seqlen_k // self.page_size)

        def rows(entries: int, seqlen: int, num_heads: int) -> Tensor:
            return torch.empty(entries, seqlen, num_heads, self.head_dim, dtype=self.dtype, device="meta")

        q = rows(1, self.total, self.num_heads) if packs_q else rows(self.batch, self.seqlen_q, self.num_heads)
        if packs_k:
            k = rows(1, self.total, self.num_heads_k)
        elif self.layout == "padded":
            k = rows(self.batch, self.seqlen_k, self.num_heads_k)
        else:
            k = rows(self.batch * pages, self.page_size, self.num_heads_k)
        sizes = {
            **{"B": self.batch, "Hq": self.num_heads, "Hk": self.num_heads_k},
            **{"Lq": self.seqlen_q, "Lk": self.seqlen_k, "T": self.total},
        }

        def scores(letters: Sequence[str], dtype: torch.dtype) -> Tensor:
            return torch.empty([sizes.get(letter, 1) for letter in letters], dtype=dtype, device="meta")

        bias = None if self.bias is None else scores(self.bias, self.bias_dtype or self.dtype)
        mask = MaskView()
        if self.mask == "dense":
            mask = MaskView("dense", (scores(("B", "1", "Lq", "Lk"), torch.bool),))
        if self.mask == "sequence_tiles":
            rows = self.total if packs_q else self.batch * self.seqlen_q
            columns, key_tiles = tiles(self.seqlen_k), self.total // TILE + self.batch
            shapes = [(rows, 4 * columns), (rows // TILE + self.batch, columns)]
            shapes += [(shapes[1][0], 2 + columns), (key_tiles, 2 + tiles(self.seqlen_q))]
            dtypes = (torch.int32, torch.uint8, torch.int32, torch.int32)
            made = (torch.empty((1, 1, *s), dtype=d, device="meta") for s, d in zip(shapes, dtypes, strict=True))
            mask = MaskView("sequence_tiles", tuple(made))
        if self.mask == "tree":
            words = (self.batch, self.seqlen_q, -(-self.seqlen_q // 32))
            mask = MaskView("tree", (torch.empty(words, dtype=torch.int32, device="meta"),))
        right = 0 if self.is_causal else -1
        spec = SequenceSpec(self.layout, self.batch, q.shape[1], k.shape[1], self.seqlen_q, self.seqlen_k)
        flags = Flags(-1, right, self.head_dim**-0.5, self.softcap, False, bias_packing=self.bias_packing)
        flags = flags._replace(dropout_p=self.dropout_p, sums=self.key_sums, sequences=spec, invariant=self.invariant)
        sink = torch.empty(self.num_heads, dtype=self.dtype, device="meta") if self.sink else None
        v = column(k) if self.key_sums else torch.empty_like(k)
        call = SequenceCall(q, k, v, mask, bias, flags, sink, self.view())
        call.arch, call.num_sms = arch, 132
        return call

    def view(self) -> SequenceView:
        bounds = torch.empty(self.batch, 4, dtype=torch.int32, device="meta")
        if not self.layout.startswith("paged"):
            return SequenceView(bounds)
        pages = -(-self.seqlen_k // self.page_size)
        return SequenceView(bounds, torch.empty(self.batch, pages, dtype=torch.int32, device="meta"))


def run_sequence_plans(variant: SequenceVariant, arch: str, launch: Callable[..., None]) -> None:
    """`run_plans` of a call with sequences; of one with pages or trees only the forward pass."""
    call, sequences = variant.call(arch), variant.view()
    key = key_of(call)
    q, k, v, mask, bias = call.q, call.k, call.v, call.mask, call.bias
    sink = torch.empty(q.shape[2], dtype=q.dtype, device=q.device) if call.has_sink else None
    out, lse = torch.empty_like(q), lse_of(q, bias)
    with mock.patch.object(Launch, "__call__", launch):
        x = Inputs(q, k, v, mask, bias, sink, sequences, key)
        if variant.key_sums:
            saved, dout = Saved(x, column(q), lse_of(q, None)), column(q)
            backward_plan(call, dout, None, NeedsGrad(v=True))(saved, dout, None)
            return
        forward_plan(call)(x, out, lse)
        if sequences.block_table is None and mask.form != "tree":
            dout, needs_grad = torch.empty_like(q), NeedsGrad(True, True, True, bias is not None, call.has_sink)
            backward_plan(call, dout, None, needs_grad)(Saved(x, out, lse), dout, None)


@dataclass(frozen=True)
class Job:
    """One kernel to compile for one GPU: what Triton would decide at a launch, decided."""

    kernel: Any
    arch: str
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, int]
    tile: tuple[int, int]
    launch: Launch
    arguments: dict[str, Any]  # of the launch that was recorded, with tensors and descriptors

    @property
    def name(self) -> str:
        """The kernel's, as the tests have it."""
        return str(self.kernel.__name__).removesuffix("_kernel").removeprefix("_")

    @property
    def key(self) -> str:
        """Equal for launches that one compiled kernel serves."""
        decided = (self.signature, self.constants, self.attributes, self.options)
        return repr((self.name, self.arch, *(sorted(part.items(), key=repr) for part in decided)))

    @property
    def _source(self) -> ASTSource:
        return ASTSource(self.kernel, self.signature, self.constants, self.attributes)

    def ttir(self) -> str:
        """The compiled form before layouts: one function, in the text of MLIR."""
        return str(self._form("ttir").str_nodebug())

    def ttgir(self) -> str:
        """The compiled form with layouts, in the text of MLIR."""
        return str(self._form("ttir", "ttgir").str_nodebug())

    def _form(self, *steps: str) -> Any:
        source, target = self._source, target_of(self.arch)
        backend = make_backend(target)
        options, context, stages = backend.parse_options(dict(self.options)), ir.context(), {}
        ir.load_dialects(context)
        backend.load_dialects(context)
        backend.add_stages(stages, options, source.language)
        functions = backend.get_codegen_implementation(options)
        module = source.make_ir(target, options, functions, backend.get_module_map(), context)
        metadata: dict[str, Any] = {"target": target}
        for step in steps:
            module = stages[step](module, metadata)
        return module

    def compile(self) -> Kernel:
        """Machine code and what it takes; from Triton's cache where it has been compiled before."""
        result = triton.compile(self._source, target=target_of(self.arch), options=self.options)
        short_sums = 0
        if "cubin" in result.asm:
            products = _PRODUCT.findall(result.asm["ttgir"])
            short_sums = sum(int(terms) < 4 * int(places) for terms, places in products)
            text, (registers, stack) = result.asm["ptx"], _usage_of_cubin(result.asm["cubin"])
        else:
            text = result.asm["amdgcn"]
            registers, stack = _number("vgpr_count", text), _number("private_segment_fixed_size", text)
        return Kernel(self.name, *self.tile, registers, stack, result.metadata.shared, text, short_sums)


def target_of(arch: str) -> GPUTarget:
    """The target of Triton's compiler for "sm_90" or "gfx942"."""
    return GPUTarget("cuda", int(arch[3:]), 32) if arch.startswith("sm_") else GPUTarget("hip", arch, 64)


def recorder(arch: str) -> tuple[list[Job], Callable[..., None]]:
    """A list of jobs, and what stands in the place of a launch to fill it."""
    jobs: list[Job] = []

    def record(launch: Launch, *tensors: Tensor | None) -> None:
        jobs.append(job_of(launch, tensors, arch))

    return jobs, record


def jobs_of(variant: Variant, arch: str) -> list[Job]:
    """The kernels that both passes of a call launch on a GPU."""
    jobs, record = recorder(arch)
    if isinstance(variant, SequenceVariant):
        run_sequence_plans(variant, arch, record)
    else:
        run_plans(variant.call(arch), record)
    return jobs


def packing_jobs(arch: str) -> list[Job]:
    """The kernels that prepare masks: rows that loads of 16, 4 and 1 bytes may read, with and without a band."""
    jobs, record = recorder(arch)
    with mock.patch.object(Launch, "__call__", record):
        for seqlen_k in (2048, 2044, 2047):
            mask = torch.empty(2, 4, 2048, seqlen_k, dtype=torch.bool, device="meta")
            for band in (None, (-1, 0)):
                mask_pack.pack_mask(mask, band)
            key_pack.key_set(mask[:, :, :1])
            for reorder in (False, True):
                key_pack.interval_tiles(*key_pack.key_intervals(mask[:, :, :1], 2048, (-2048, 0), reorder), 2048)
        bits, lists, keys = (
            torch.empty(2, 4, *shape, dtype=torch.int32, device="meta") for shape in ((2048, 64), (16, 18), (2048,))
        )
        interval_pack.mask_intervals(bits, lists, 2048)
        key_pack.first_places(keys, keys, keys, 256)
        mask_pack.list_tiles(torch.empty(2, 4, 16, 16, dtype=torch.uint8, device="meta"))
        key_pack.key_set(torch.empty(2, 4, 1, 16384, dtype=torch.bool, device="meta"))  # chunks are counted first
        for dtype in (torch.bfloat16, torch.float64):
            scores = torch.empty(2, 4, 1, 2048, dtype=dtype, device="meta")
            key_pack.score_keys(scores, None)
            key_pack.score_keys(scores, torch.empty(2, 1, 1, 2048, dtype=torch.bool, device="meta"))
    return jobs


# The masks of calls with sequences in the catalogue, by what decides a kernel; rows of 16, 4 and 1 bytes.
PACKED_SEQUENCES: tuple[tuple[Layout, MaskPacking, tuple[int, ...], tuple[int, int]], ...] = (
    *(
        ("packed", "queries", (1, 4, 16384, most), window)
        for most in (2048, 2044, 2047)
        for window in ((-1, 0), (-1, -1))
    ),
    *(("padded", "none", (8, 4, 2048, 2048), window) for window in ((-1, 0), (-1, -1))),
    ("paged", "none", (8, 1, 2048, 2047), (-1, 0)),
    ("packed", "keys", (1, 4, 1, 16384), (-1, 0)),
    ("packed", "queries", (1, 4, 16384, 48), (-1, -1)),  # one tile of keys
    *((layout, "ragged", (1, 1, 1, 2**24), (-1, -1)) for layout in ("packed", "padded")),
    *((layout, "tree", (8, 1, 64, 64), window) for layout, window in (("packed", (-1, -1)), ("padded", (64, -1)))),
)  # type: ignore[assignment]


def sequence_packing_jobs(arch: str) -> list[Job]:
    """The kernels that pack masks of sequences."""
    jobs, record = recorder(arch)
    with mock.patch.object(Launch, "__call__", record):
        for layout, packing, shape, window in PACKED_SEQUENCES:
            packs_q, packs_k = layout in ("packed", "paged_packed"), layout == "packed"
            most_q, most_k = 64 if packing == "tree" else 2048, shape[3] if packing in ("none", "queries") else 2048
            rows = (16384 if packs_q else most_q, 16384 if packs_k else most_k)
            mask = torch.empty(shape, dtype=torch.bool, device="meta")
            bounds = torch.empty(8, 4, dtype=torch.int32, device="meta")
            sequence_pack.pack_sequences(mask, bounds, packing, SequenceSpec(layout, 8, *rows, most_q, most_k), window)
    return jobs


def append_jobs(arch: str) -> list[Job]:
    """The kernel that writes to caches: of each layout, of few and of many tokens."""
    jobs, record = recorder(arch)

    def meta(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    bounds, table = (torch.empty(4, width, dtype=torch.int32, device="meta") for width in (4, 8))
    layouts: tuple[tuple[Layout, bool], ...] = (("packed", True), ("padded", False), ("paged", False))
    with mock.patch.object(Launch, "__call__", record):
        for layout, packs in (*layouts, ("paged_packed", True)):
            for tokens in (1, 2048):
                new = meta(1, 4 * tokens, 8, 128) if packs else meta(4, tokens, 8, 128)
                cache = meta(*((1, 65536) if layout == "packed" else (4, 16384)), 8, 128)
                in_pages = table if layout.startswith("paged") else None
                append.write(CacheWrite(cache, cache, new, new, bounds, in_pages, layout))
    return jobs


def piece_jobs(arch: str) -> list[Job]:
    """The kernel that stores the pieces of fp32 tensors."""
    jobs, record = recorder(arch)
    with mock.patch.object(Launch, "__call__", record):
        for word in ("fp16x3", "bf16x3"):
            for head_dim in (48, 128):
                x = torch.empty(4, 2048, 16, head_dim, dtype=torch.float32, device="meta")
                plan_pieces(word, x, x)(x, x)
                plan_pieces(word, x, x, x, x)(x, x, x, x)
    return jobs


def position_jobs(arch: str, dtype: torch.dtype, terms: int) -> list[Job]:
    """The kernels of a `Projected`: long and short calls, with a table for each head and with one that all share."""
    jobs, record = recorder(arch)
    with (
        mock.patch.object(Launch, "__call__", record),
        mock.patch("flash_dmattn.triton_kernels.positions.device_arch", return_value=arch),
    ):
        for length, heads in ((1500, 8), (200, 1)):
            rows = torch.empty(heads, 2 * length - 1, terms, dtype=dtype, device="meta")
            x = torch.empty(4, length, 8, terms, dtype=dtype, device="meta")
            products, keys = (
                positions.Products(rows, 0.125, by_keys, 4, (8, length, length)) for by_keys in (False, True)
            )
            scores = products.scores(x)
            keys.add_scores(x, scores)
            for each in (products, keys):
                each.gradients(products.place(4).copy_(scores), x, True, True)
    return jobs


def gather_jobs(arch: str, dtype: torch.dtype) -> list[Job]:
    """The kernels of values by position: three tables that all share, a long one of each entry; and a clamped band."""
    jobs, record = recorder(arch)
    with mock.patch.object(Launch, "__call__", record):
        for sizes, own in (((65, 65, 65), 1), ((4095,), 4)):
            own_positions = torch.empty(len(sizes), 4, 1024, dtype=torch.int64, device="meta")
            table = torch.empty(own, 4, sum(sizes), device="meta")
            places = Places(own_positions, own_positions, sizes, tuple(n == 65 for n in sizes))
            values = gathers.Gathers(table, places, dtype, 4)
            values.add_gradient(values.place(4).copy_(values.scores(slice(0, 4))), slice(0, 4))
        query_values = torch.empty(4, 8, 1500, 73, device="meta")
        band = bands.Bands(73, 64, dtype, 4, (8, 1500, 1500), query_values.device)
        band.gradient(band.place(4).copy_(band.scores(query_values)))
    return jobs


def tangent_jobs(arch: str, dtype: torch.dtype, head_dim: int) -> list[Job]:
    """The kernel of forward mode: all tangents with a bias in 16 or 32 bits, and only tq, tk and tv."""
    jobs, record = recorder(arch)
    flags, score = Flags(-1, 0, 0.125, 0.0, False), ("1", "Hq", "Lq", "Lk")
    biases: dict[str, dict[str, Any]] = {"own": {"bias": score}, "fp32": {"bias": score, "bias_dtype": torch.float32}}
    with mock.patch("flash_dmattn.triton_kernels.plan.device_arch", return_value=arch):
        for fields in (*biases.values(), {}):
            variant = Variant(head_dim, dtype=dtype, **fields)
            rows, bias = [variant.rows(2048, 16) for _ in range(3)], variant.call(arch).bias
            x, tangents = Inputs(*rows, MaskView("none"), bias), Tangents(*rows, bias, None)
            out, lse = torch.empty_like(rows[0]), lse_of(rows[0], bias)
            plan, read = plan_tangents(x, tangents, flags), read_of(x.mask)
            record(plan, *rows, bias, *tangents[:4], *read, out, lse, out, lse, None, None, None, None, None)
    return jobs


def list_jobs(arch: str, head_dim: int) -> list[Job]:
    """The kernels of lists, in both passes: single keys and blocks of 64, or keys of 576 with values inside them."""
    jobs, record = recorder(arch)

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    # Query heads of a key head, queries of a list, head dim of v, keys of an entry, entries.
    calls = ((128, 1, 512, 1, 512), (64, 1, 512, 32, 16))
    if head_dim != 576:
        calls = ((16, 1, head_dim, 1, 512), (16, 1, head_dim, 64, 16), (16, 64, head_dim, 1, 192))
    with (
        mock.patch.object(Launch, "__call__", record),
        mock.patch("flash_dmattn.triton_kernels.list_calls.device_arch", return_value=arch),
    ):
        for group, queries, dim_v, keys_each, entries in calls:
            q, k = meta(1, group, 4096, head_dim), meta(1, 1, 4096, head_dim)
            v = None if head_dim != dim_v else meta(1, 1, 4096, dim_v)
            rows = 4096 // queries
            keys, count = meta(1, 1, rows, entries, dtype=torch.int32), meta(1, 1, rows, dtype=torch.int32)
            values = meta(1, 1, rows, entries, dtype=torch.float32)
            out, lse = meta(1, group, 4096, dim_v), meta(1, group, 4096, dtype=torch.float64)
            flags = ListFlags(head_dim**-0.5, 0.0, -1, -1, queries, keys_each, dim_v)
            call = ListCall(q, k, v, keys, None, values, None, None, flags)
            lists = (q, k, v, keys, count, None, values, None, None)
            plan_list_forward(call)(*lists, out, lse)
            needs = ListNeeds(True, True, v is not None, True, False)
            plan_list_backward(call, out, out, None, needs, {})(*lists, out, None, out, lse, None)
        # The longest rows leave 64 registers to a thread, and some spill there: not on the GPU that they are meant for.
        for columns in (2048, 16384, *([list_pack.MOST_KEYS] if arch == "sm_90" else [])):
            scores = meta(1, 1, 64, columns, dtype=torch.int32)
            list_pack.list_best(scores, scores[0, 0, :, 0], 512, 0, 512)
    return jobs


def kernels_of(variant: Variant, arch: str) -> list[Kernel]:
    """Compile the kernels that both passes of a call launch on a GPU."""
    return [job.compile() for job in jobs_of(variant, arch)]


def job_of(launch: Launch, tensors: Sequence[Tensor | None], arch: str) -> Job:
    """Return the specialisation that Triton compiles for a launch: type, alignment and value of every argument."""
    arguments: list[Any] = list(tensors)
    for slot, shape, strides, block in launch.descriptors:
        arguments[slot] = TensorDescriptor(arguments[slot], shape, strides, block)
    arguments += launch.rest
    kernel, backend = launch.kernel, make_backend(target_of(arch))
    bound, specialization, _ = create_function_from_signature(kernel.signature, kernel.params, backend)(*arguments)
    _, signature, constants, attributes = kernel._pack_args(backend, launch.options, bound, specialization, None)
    tile = (bound.get("BLOCK_M", 0), bound.get("BLOCK_N", 0))
    return Job(kernel, arch, signature, constants, attributes, launch.options, tile, launch, bound)


def _usage_of_cubin(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread and bytes of its stack."""
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder) / "kernel.cubin").write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file]
        usage = subprocess.run(command, text=True, capture_output=True, check=True).stdout
    numbers = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert numbers is not None, usage
    return int(numbers[1]), int(numbers[2])


def _number(name: str, amdgcn: str) -> int:
    match = re.search(rf"\.{name}:\s+(\d+)", amdgcn)
    assert match is not None, f"the assembly has no {name}"
    return int(match[1])
