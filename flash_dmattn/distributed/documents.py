"""Packed documents over ranks: their bounds as host ints, and the rows of a rank that attend to a key."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..caches import TensorCache
from ..definition import assume_constant, listed
from ..sequences import Sequences
from .layout import SequenceLayout

T = TypeVar("T")
# The bounds of each document in the whole sequence: (begin, end, begin, end, ...), ascending.
Documents = tuple[int, ...]

_cache = TensorCache()


def cached_for(sequences: Sequences, key: tuple[object, ...], make: Callable[[], T]) -> T:
    """Return the cached result of `make` for sequences and a key: made once for all layers, until the sequences change.

    Inference mode has separate results, because a backward pass cannot save its tensors.
    """
    tensors = _tensors(sequences)
    full_key = (*map(id, tensors), *key, torch.is_inference_mode_enabled())
    made: T = _cache.get(full_key, tensors, make)
    return made


def _fields(sequences: Sequences) -> tuple[Tensor | None, ...]:
    return sequences.cu_seqlens_q, sequences.cu_seqlens_k, sequences.seqlens_q, sequences.seqlens_k


def _tensors(sequences: Sequences) -> list[Tensor]:
    return [x for x in _fields(sequences) if x is not None]


def read_documents(sequences: Sequences, length: int) -> Documents:
    """Return the bounds of packed sequences, copied from the device once until they change.

    Raises:
        TypeError, ValueError: they are of another kind, do not end at `length`, or have other keys than queries.
    """
    if not isinstance(sequences, Sequences):
        raise TypeError(f"sequences is a {type(sequences).__name__}; it needs to be a flash_dmattn.Sequences")
    if sequences.layout != "packed":
        raise ValueError(
            f"sequences are {sequences.layout}; ranks that share a sequence need Sequences.packed, of all positions"
        )
    if torch.compiler.is_compiling():
        raise ValueError(
            "sequences is set in a graph of torch.compile, which cannot read where they begin; make "
            "flash_dmattn.distributed.ShardedMask.from_sequences outside, and pass it as the mask"
        )

    def make() -> Documents:
        sequences.check()
        distinct = {id(x): x for x in _tensors(sequences)}  # keys often have the tensors of queries
        read = {name: listed(x) for name, x in distinct.items()}
        bounds, bounds_k, used, used_k = [read.get(id(x)) for x in _fields(sequences)]
        assert bounds is not None
        if bounds != bounds_k or used != used_k:
            raise ValueError("sequences have other keys than queries; ranks that share a sequence need the same")
        if bounds[-1] != length:
            raise ValueError(
                f"sequences end at {bounds[-1]}; ranks that share a sequence need the bounds of all of it, up to "
                f"{length} (seqlens_q= of Sequences.packed leaves tokens out)"
            )
        lengths = [stop - start for start, stop in pairwise(bounds)] if used is None else used
        ends = [end for start, number in zip(bounds, lengths) for end in (start, start + number) if number]
        return tuple(ends) or (0, 0)  # an empty document, because () means no documents

    return cached_for(sequences, (length,), make)


def format_bounds(documents: Documents) -> str:
    """Return bounds as a string, because Dynamo makes ints that change dynamic, but recompiles for a new string."""
    return " ".join(map(str, documents))


@assume_constant  # Dynamo traces no such strings
def parse_bounds(bounds: str) -> Documents:
    """Parse the bounds from a string of `format_bounds`.

    >>> parse_bounds(format_bounds((0, 4, 4, 10))), parse_bounds(format_bounds(()))
    ((0, 4, 4, 10), ())
    """
    return _parse_bounds(bounds)


@lru_cache(maxsize=256)
def _parse_bounds(bounds: str) -> Documents:
    return tuple(map(int, bounds.split()))


def bounds_text(documents: Documents) -> str:
    """Return bounds as text for comparisons and messages; long lists are hashed, because sending them takes time."""
    if len(documents) <= 16:
        return str(documents)
    return f"{documents[:8]} ..., {len(documents) // 2} in all, hash {hash(documents)}"


@assume_constant  # Dynamo traces no bisection; the bounds are numbers for it
def document_limits(documents: Documents, a: int, b: int) -> tuple[int, int, bool]:
    """Return (start, stop, is_one) for rows [a, b): the keys of their documents, and whether it is one document.

    `stop` is at least b, so that the sides of a window in a slice are never negative.

    >>> document_limits((0, 4, 4, 10), 5, 7), document_limits((0, 4, 4, 10), 2, 7), document_limits((0, 4), 5, 7)
    ((4, 10, True), (0, 10, False), (7, 7, False))
    """
    begins, ends = documents[::2], documents[1::2]
    first, last = bisect_right(ends, a), bisect_left(begins, b) - 1
    if first > last:
        return b, b, False
    return begins[first], max(ends[last], b), first == last and begins[first] <= a and b <= ends[first]


def rows_outside(
    sequences: Sequences, documents: Documents, layout: SequenceLayout, rank: int, device: torch.device
) -> Tensor | None:
    """Return which rows of a rank are outside of documents, bool (rows,), made once for all layers, or None.

    `documents` are the bounds that were read of the sequences.
    """

    def make() -> tuple[Tensor | None]:
        begins, ends = rows_seeing(documents, 0, layout.length)
        is_outside = layout.shard(begins == ends, 0, rank)
        return (is_outside.to(device) if bool(is_outside.any()) else None,)

    return cached_for(sequences, ("rows outside", layout, rank, device), make)[0]


def rows_seeing(documents: Documents, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return the first row that attends to each key of [start, stop), and the row after the last; int64, on the host.

    >>> [x.tolist() for x in rows_seeing((0, 2, 3, 5), 1, 5)]
    [[0, 0, 3, 3], [2, 0, 5, 5]]
    """
    on_host: Any = {"dtype": torch.int64, "device": "cpu"}
    bounds, keys = torch.tensor(documents, **on_host).view(-1, 2), torch.arange(start, stop, **on_host)
    document = torch.searchsorted(bounds[:, 0].contiguous(), keys, right=True) - 1
    begins, ends = bounds[document.clamp(min=0)].unbind(1)
    is_outside = (document < 0) | (keys >= ends)
    return begins.masked_fill(is_outside, 0), ends.masked_fill(is_outside, 0)
