"""What the tensors of `Sequences` say: their values checked on the host, and made safe for kernels on the device."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..problem import SequenceSpec


class Tables(NamedTuple):
    """The fields of `Sequences` that have values to look at."""

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqlens_q: Tensor | None
    seqlens_k: Tensor | None
    block_table: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None


def make_bounds(tables: Tables, device: torch.device, spec: SequenceSpec) -> Tensor:
    """The bounds of a `SequenceView`: int32 (S, 4), no row of which leaves q, k or v, whatever the tensors say."""
    queries = (tables.cu_seqlens_q, tables.seqlens_q, spec.rows_q, spec.max_seqlen_q)
    keys = (tables.cu_seqlens_k, tables.seqlens_k, spec.rows_k, spec.max_seqlen_k)
    first, lengths = _safe_side(*queries, spec.number, device)
    # Self-attention. Not while compiling, where it would bind lengths that differ in calls to come.
    is_one_side = queries[0] is keys[0] and queries[1] is keys[1] and not torch.compiler.is_compiling()
    if is_one_side and queries[2:] == keys[2:]:
        return torch.stack((first, lengths, first, lengths), 1)
    return torch.stack((first, lengths, *_safe_side(*keys, spec.number, device)), 1)


def _safe_side(
    cu_seqlens: Tensor | None, used: Tensor | None, rows: int, most: int, number: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The firsts and the lengths of queries, or of keys, int32."""
    limit = min(rows, most)
    if used is not None:
        used = used.clamp(0, limit).to(torch.int32)  # in this order: int64 may have what int32 has not
    if cu_seqlens is None:
        first = torch.zeros(number, dtype=torch.int32, device=device)
        return first, torch.full_like(first, limit) if used is None else used
    # Ascending, whatever they say: kernels look for a sequence among them.
    edges = cu_seqlens.clamp(0, rows).to(torch.int32).cummax(0).values
    first, lengths = edges[:-1], edges[1:] - edges[:-1]
    return first, lengths.clamp(max=limit) if used is None else torch.minimum(lengths, used)


def check_values(
    tables: Tables, spec: SequenceSpec | None = None, pages: int = 0, names: tuple[str, str] = ("q", "k")
) -> None:
    """Refuse values that do not fit one another; waits for the device.

    Args:
        spec: of a call, which they have to fit, too.
        pages: of k, where keys are in pages.
        names: of the tensors that have queries and keys, for messages.

    Raises:
        ValueError: as `Sequences.check` says.
    """
    x = tables
    rows_q, rows_k = (None, None) if spec is None else (spec.rows_q, spec.rows_k)
    _check_side("q", x.cu_seqlens_q, x.seqlens_q, rows_q, x.max_seqlen_q, names[0])
    lengths = _check_side("k", x.cu_seqlens_k, x.seqlens_k, rows_k, x.max_seqlen_k, names[1])
    if x.block_table is not None and spec is not None:
        for s, (row, n) in enumerate(zip(x.block_table.tolist(), lengths, strict=True)):
            for page in row[: -(-n // max(spec.page_size, 1))]:
                if not 0 <= page < pages:
                    raise ValueError(f"block_table names page {page} for sequence {s}; {names[1]} has {pages} pages")


def _check_side(
    side: str, cu_seqlens: Tensor | None, used: Tensor | None, rows: int | None, most: int | None, tensor: str
) -> list[int]:
    """Check the values of queries, "q", or of keys; return the lengths, none where all slots are full.

    `tensor` is the name of the one that has them.
    """
    lengths: list[int] = []
    slots: list[int] | None = None
    if cu_seqlens is not None:
        name, edges = f"cu_seqlens_{side}", cu_seqlens.tolist()
        if edges[0] != 0:
            raise ValueError(f"{name} begins with {edges[0]}; it needs to begin with 0")
        for s, (start, end) in enumerate(pairwise(edges)):
            if end < start:
                raise ValueError(f"{name} falls from {start} to {end} at sequence {s}; it needs to ascend")
        if rows is not None and edges[-1] > rows:
            raise ValueError(f"{name} ends with {edges[-1]}; {tensor} has {rows} tokens")
        lengths = slots = [end - start for start, end in pairwise(edges)]
    if used is not None:
        lengths = used.tolist()
        for s, n in enumerate(lengths):
            slot = rows if slots is None else slots[s]
            if n < 0 or (slot is not None and n > slot):
                upto = "" if slot is None else f", and at most the {slot} of its slot"
                raise ValueError(f"seqlens_{side} is {n} for sequence {s}; it needs at least 0{upto}")
    for s, n in enumerate(lengths):
        if most is not None and n > most:
            what = "queries" if side == "q" else "keys"
            raise ValueError(f"sequence {s} has {n} {what}; max_seqlen_{side} says at most {most}")
    return lengths
