"""Packed documents and padded entries over ranks: their places as host ints, and the rows that attend to a key."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any, Literal, NamedTuple, TypeVar

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


class Piece(NamedTuple):
    """A document, or consecutive padded entries of equal lengths: rows and keys that make calls of their own.

    It has `how_many` entries of the batch, from `entry` on. Dropout counts them from `number` on, as one GPU does. Its
    first query and its first key are at position `first`.
    """

    entry: int
    how_many: int
    number: int
    first: int
    seqlen_q: int
    seqlen_k: int


class Spans(NamedTuple):
    """The sequences of a call, as host ints.

    `bounds` are begin and end of each document, or the numbers of queries and of keys of each padded entry. `kind` is
    "" for one whole sequence, without bounds. Documents that are "masked" share calls, whose mask hides the others.
    Each document of the kind "packed" makes calls of its own, and so does each "padded" entry.
    """

    bounds: tuple[int, ...] = ()
    kind: Literal["", "masked", "packed", "padded"] = ""

    @property
    def is_split(self) -> bool:
        """Whether each document or entry makes calls of its own."""
        return self.kind in ("packed", "padded")

    @property
    def lengths(self) -> set[tuple[int, int]]:
        """The numbers of queries and of keys of its documents or entries."""
        pairs = zip(self.bounds[::2], self.bounds[1::2])
        return set(pairs) if self.kind == "padded" else {(stop - start,) * 2 for start, stop in pairs}

    def pieces(self, a: int, b: int) -> tuple[Piece, ...]:
        """Return the pieces that have some of the positions [a, b) as queries.

        >>> Spans((0, 4, 4, 4, 4, 10), "packed").pieces(5, 9)
        (Piece(entry=0, how_many=1, number=2, first=4, seqlen_q=6, seqlen_k=6),)
        >>> [piece[:3] for piece in Spans((5, 5, 5, 5, 3, 6), "padded").pieces(0, 4)]
        [(0, 2, 0), (2, 1, 2)]
        """
        begins, ends = self.bounds[::2], self.bounds[1::2]
        if self.kind == "packed":
            numbers = range(bisect_right(ends, a), bisect_left(begins, b))
            sizes = ((number, begins[number], ends[number] - begins[number]) for number in numbers)
            return tuple(Piece(0, 1, number, first, length, length) for number, first, length in sizes if length)
        pieces, entry = [], 0
        for (seqlen_q, seqlen_k), equal in groupby(zip(begins, ends)):
            how_many = len(list(equal))
            if seqlen_q > a:
                pieces.append(Piece(entry, how_many, entry, 0, seqlen_q, seqlen_k))
            entry += how_many
        return tuple(pieces)


NO_SPANS = Spans()


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


def check_kind(sequences: Sequences) -> None:
    """Refuse anything but packed or padded sequences, and a graph of torch.compile, which cannot read them."""
    if not isinstance(sequences, Sequences):
        raise TypeError(f"sequences is a {type(sequences).__name__}; it needs to be a flash_dmattn.Sequences")
    if sequences.layout not in ("packed", "padded"):
        raise ValueError(
            f"sequences are {sequences.layout}; ranks that share a sequence need Sequences.packed, of all positions, "
            "or Sequences.padded"
        )
    if torch.compiler.is_compiling():
        advice = "make flash_dmattn.distributed.ShardedMask.from_sequences outside, and pass it as the mask"
        if sequences.layout == "padded":
            advice = (
                "pass a bool mask of the used keys, (B, 1, 1, Lk), "
                "if each entry has seqlen_k - seqlen_q keys more than queries, or else of the visible pairs"
            )
        raise ValueError(
            f"sequences is set in a graph of torch.compile, which cannot read where they begin or end; {advice}"
        )


def read_documents(sequences: Sequences, length: int) -> Documents:
    """Return the bounds of packed sequences, empty ones included, copied from the device once until they change.

    Raises:
        TypeError, ValueError: they are of another kind, do not end at `length`, or have other keys than queries.
    """
    check_kind(sequences)
    if sequences.layout == "padded":
        raise ValueError("sequences are padded; documents need Sequences.packed, of all positions")

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
        return tuple([end for start, number in zip(bounds, lengths) for end in (start, start + number)])

    return cached_for(sequences, (length,), make)


def without_empty(documents: Documents) -> Documents:
    """Return the bounds of the documents that have tokens; of one empty document if none has any.

    >>> without_empty((0, 4, 4, 4, 6, 10)), without_empty((0, 0))
    ((0, 4, 6, 10), (0, 0))
    """
    ends = [x for bounds in zip(documents[::2], documents[1::2]) for x in bounds if bounds[0] < bounds[1]]
    return tuple(ends) or (0, 0)


def read_lengths(sequences: Sequences, batch: int, seqlen_q: int, seqlen_k: int) -> tuple[int, ...]:
    """Return the numbers of queries and of keys of each padded entry, copied from the device once until they change.

    Raises:
        ValueError: there is not one sequence for each entry, or it is longer than its slot.
    """
    if sequences.number != batch:
        raise ValueError(f"q has {batch} entries; it needs one for each sequence, {sequences.number}")

    def make() -> tuple[int, ...]:
        sequences.check()
        slots = ((sequences.seqlens_q, seqlen_q), (sequences.seqlens_k, seqlen_k))
        queries, keys = [[length] * batch if used is None else listed(used) for used, length in slots]
        for side, used, length in (("q", queries, seqlen_q), ("k", keys, seqlen_k)):
            if max(used, default=0) > length:
                raise ValueError(
                    f"seqlens_{side} has {max(used)}; it needs at most the {length} positions of the whole sequence"
                )
        return tuple([number for entry in zip(queries, keys) for number in entry])

    return cached_for(sequences, (batch, seqlen_q, seqlen_k), make)


def sequences_on(sequences: Sequences, device: torch.device, longest: int) -> Sequences:
    """Return the sequences of a call with all positions, on the device of q; of packed ones with their length.

    Copies are cached for all layers, because the view that kernels read is cached in the `Sequences`.
    """

    def make() -> Sequences:
        def moved(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device, copy=True)  # a value must not keep the key of its entry alive

        begins, used, used_k = (moved(x) for x in (sequences.cu_seqlens_q, sequences.seqlens_q, sequences.seqlens_k))
        if begins is not None:
            return Sequences.packed(begins, seqlens_q=used, max_seqlen_q=longest)
        assert used_k is not None
        return Sequences.padded(seqlens_q=used, seqlens_k=used_k)

    return cached_for(sequences, ("on", device, longest), make)


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
