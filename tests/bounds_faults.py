"""Faults planted in kernels, one at a time, which `bounds.py` has to find: masks, strides, blocks, widths, rows."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from compiled_triton import (
    Job,
    SequenceVariant,
    Variant,
    append_jobs,
    jobs_of,
    list_jobs,
    packing_jobs,
    piece_jobs,
)
from compiled_variants import SEQUENCE_VARIANTS, VARIANTS

ARCH = "sm_90"


class Planted(NamedTuple):
    """`before`, which stands once in a device function, becomes `after`; a kernel of some launches then has the fault.

    `question` is the one that has to find it. It `is_quick` where its launches take no seconds to plan.
    """

    what: str
    function: str
    before: str
    after: str
    launches: Callable[[], list[Job]]
    kernel: str
    question: str
    is_quick: bool = True


def dense(name: str, **other: Any) -> Callable[[], list[Job]]:
    return lambda: jobs_of(replace(Variant(**VARIANTS[name]), **other), ARCH)


def with_sequences(name: str, **other: Any) -> Callable[[], list[Job]]:
    return lambda: jobs_of(replace(SequenceVariant(**SEQUENCE_VARIANTS[name]), **other), ARCH)


ODD = {"batch": 2, "seqlen_q": 197, "seqlen_k": 197, "num_heads": 2, "num_heads_k": 2}

PLANTED = (
    Planted(
        "out has no mask of rows",
        "forward.forward_kernel",
        "stored = row_ok[:, None] & (dims_v < shape.head_dim_v)[None, :]",
        "stored = (rows >= 0)[:, None] & (dims_v < shape.head_dim_v)[None, :]",
        dense("64 plain", **ODD),
        "forward",
        "two programs",
    ),
    Planted(
        "out has no mask of columns",
        "forward.forward_kernel",
        "stored = row_ok[:, None] & (dims_v < shape.head_dim_v)[None, :]",
        "stored = row_ok[:, None] & (dims_v >= 0)[None, :]",
        dense("96 plain", **ODD),
        "forward",
        "outside",
    ),
    Planted(
        "heads a row apart",
        "tile_ops.load_tile",
        "base = x + b * strides.batch + h.to(tl.int64) * strides.head",
        "base = x + b * strides.batch + h.to(tl.int64) * strides.row",
        dense("64 short"),
        "forward",
        "outside",
    ),
    Planted(
        "keys without a mask of rows",
        "tile_ops.load_tile",
        "tl.load(pointers, mask=(rows < num_rows)[:, None], other=0.0)",
        "tl.load(pointers, mask=(rows >= 0)[:, None], other=0.0)",
        dense("64 short", **ODD),
        "forward",
        "outside",
    ),
    Planted(
        "a product of 32 bits in a long tensor",
        "tile_ops.load_tile",
        "rows.to(tl.int64)[:, None] * strides.row + dims",
        "(rows * strides.row)[:, None] + dims",
        dense("128 causal", batch=1, seqlen_q=2**20 + 5, seqlen_k=2**20 + 5),
        "forward",
        "wraps",
    ),
    Planted(
        "one key of the prefix too far",
        "tile_ops.keys_of_queries",
        "tl.load(index + hi_full), tl.load(index + hi)",
        "tl.load(index + hi_full), tl.load(index + hi + 1)",
        dense("64 keys", **ODD),
        "forward",
        "outside",
    ),
    Planted(
        "lists begin one entry later",
        "tile_ops.block_at",
        "tl.load(walk + 2 + place // SPLIT)",
        "tl.load(walk + 3 + place // SPLIT)",
        dense("64 tiles"),
        "forward",
        "outside",
    ),
    Planted(
        "a bool mask without a mask of keys",
        "tile_ops.load_bools",
        "mask=(rows < shape.seqlen_q) & (keys < shape.seqlen_k)",
        "mask=(rows < shape.seqlen_q) & (keys >= 0)",
        dense("64 few pairs, full", **ODD),
        "forward",
        "outside",
    ),
    Planted(
        "delta takes half of a block's rows",
        "backward_delta.delta_kernel",
        "rows = tile * BLOCK_M +",
        "rows = tile * (BLOCK_M // 2) +",
        dense("64 plain", **ODD),
        "delta",
        "two programs",
    ),
    Planted(
        "heads of a group share the rows of delta",
        "backward_delta.delta_kernel",
        "place = (b * shape.num_heads + h) * at.entry_rows + rows",
        "place = (b * shape.num_heads + h // 2 * 2) * at.entry_rows + rows",
        dense("128 grouped"),
        "delta",
        "two programs",
    ),
    Planted(
        "dq is a block too far",
        "backward_queries.backward_queries_kernel",
        "place = ((at.row_q + rows) * shape.num_heads + h)",
        "place = ((at.row_q + rows + BLOCK_M) * shape.num_heads + h)",
        dense("64 plain", **ODD),
        "backward_queries",
        "outside",
    ),
    Planted(
        "dk of all heads in the rows of one",
        "backward_keys.backward_keys_kernel",
        "place = (at.row_k + keys) * owners + owner",
        "place = (at.row_k + keys) * owners",
        dense("64 plain", **ODD),
        "backward_keys",
        "two programs",
    ),
    Planted(
        "the lse of the next share",
        "forward_combine.combine_kernel",
        "parts_lse + every * size + row",
        "parts_lse + (every + 1) * size + row",
        dense("128 one query"),
        "combine",
        "outside",
    ),
    Planted(
        "the sum of slots without a mask",
        "sum_slots.sum_slots_kernel",
        "tl.store(dbias + at, acc.to(dbias.dtype.element_ty), mask=inside)",
        "tl.store(dbias + at, acc.to(dbias.dtype.element_ty))",
        dense("64 two runs", seqlen_q=125, seqlen_k=125),
        "sum_slots",
        "outside",
    ),
    Planted(
        "the length of a sequence is that of the next",
        "sequences.bounds_of",
        "shape_of(shape, tl.load(at + 1), tl.load(at + 3))",
        "shape_of(shape, tl.load(at + 5), tl.load(at + 3))",
        with_sequences("64 packed"),
        "forward",
        "two programs",
    ),
    Planted(
        "the keys of a sequence are the first query of the next",
        "sequences.bounds_of",
        "tl.load(at + 3))",
        "tl.load(at + 4))",
        with_sequences("64 padded"),
        "forward",
        "outside",
    ),
    Planted(
        "numbers of pages as they are",
        "sequences.load_pages",
        "tl.minimum(tl.maximum(page, 0), layout.pages - 1).to(tl.int64)",
        "tl.maximum(page, 0).to(tl.int64)",
        with_sequences("128 paged"),
        "forward",
        "outside",
    ),
    Planted(
        "the size of a gap in 32 bits",
        "fill_gaps.fill_gaps_kernel",
        "values = (end - begin).to(tl.int64) * width",
        "values = (end - begin) * width",
        with_sequences("64 padded", batch=1, seqlen_q=2**22, seqlen_k=2**22),
        "fill_gaps",
        "wraps",
    ),
    Planted(
        "new tokens of a slot beyond its length",
        "append.append_kernel",
        "is_written = is_row & (token >= 0) & (token < tokens) & (place >= 0)",
        "is_written = is_row & (token >= 0) & (place >= 0)",
        lambda: append_jobs(ARCH)[2:4],
        "append",
        "outside",
    ),
    Planted(
        "a list is read beyond its end",
        "list_ops.keys_at",
        "entry = tl.minimum(place, end - 1)",
        "entry = place",
        lambda: list_jobs(ARCH, 128)[:1],
        "list_forward",
        "outside",
        False,
    ),
    Planted(
        "rows of bits half as far apart",
        "mask_pack._pack_kernel",
        "row_starts = (head.to(tl.int64) * seqlen_q + rows) * tiles_k * 4",
        "row_starts = (head.to(tl.int64) * seqlen_q + rows) * tiles_k * 2",
        lambda: packing_jobs(ARCH)[:1],
        "pack",
        "two programs",
    ),
    Planted(
        "pieces of all entries in the rows of the first",
        "pieces._pack",
        "packed + (b * entry + line.to(tl.int64) * packing.width)",
        "packed + (line.to(tl.int64) * packing.width)",
        lambda: piece_jobs(ARCH)[:1],
        "pack_pieces",
        "two programs",
    ),
)


@contextmanager
def planted(fault: Planted) -> Iterator[None]:
    """Change a device function in memory; nothing that is compiled is kept."""
    module, _, name = fault.function.partition(".")
    function = getattr(importlib.import_module(f"flash_dmattn.triton_kernels.{module}"), name)
    source = function.src
    assert source.count(fault.before) == 1, f"{fault.function} has {source.count(fault.before)} times: {fault.before}"
    function._unsafe_update_src(source.replace(fault.before, fault.after))
    try:
        yield
    finally:
        function._unsafe_update_src(source)


def jobs_with(fault: Planted) -> list[Job]:
    return [job for job in fault.launches() if job.name == fault.kernel]
