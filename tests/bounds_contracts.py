"""Contracts: the arguments of a launch, and the values of the tensors that kernels take places from.

A contract has facts about each value of a tensor, for Z3, and the contents of such a tensor, drawn at random, for the
places of stores. Each says which code keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from bounds_numbers import Descriptor, Pointer, Value
from bounds_terms import Interval, Term, choose, const, div, equal, load
from compiled_triton import Job
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

TILE = 128
MOST_DRAWN = 1 << 24  # values of a table; a launch with a larger one is open where stores depend on it


def numbers_of(name: str, kind: Any, value: Any) -> Iterator[tuple[str, Any, Any]]:
    """The names, types and values of an argument, one for each number of a tuple."""
    if isinstance(kind, tuple):
        fields = getattr(kind, "_fields", None) or range(len(kind))
        for field, each, x in zip(fields, kind, value, strict=True):
            yield from numbers_of(f"{name}.{field}", each, x)
    else:
        yield name, kind, value


class Arguments:
    """The arguments of a launch: `values` in the order of the compiled function, its numbers and tensors by name."""

    def __init__(self, job: Job) -> None:
        self.values: list[Value] = []
        self.numbers: dict[str, int] = {}
        self.tensors: dict[str, Tensor] = {}
        self.programs = job.launch.grid[0]
        for name, value in job.arguments.items():
            for part, kind, x in numbers_of(name, job.signature[name], value):
                if isinstance(x, (int, bool)):
                    self.numbers[part] = int(x)
                if isinstance(x, TensorDescriptor):
                    self.tensors[part] = x.base
                    self.values.append(Descriptor(part, tuple(x.shape), tuple(x.strides)))
                    self.values += [const(n, 32) for n in x.shape] + [const(n, 64) for n in x.strides]
                elif kind == "constexpr":
                    continue
                elif isinstance(x, Tensor):
                    self.tensors[part] = x
                    self.values.append(Pointer(part, const(0, 64)))
                else:
                    self.values.append(const(int(x), int(kind[1:])) if kind[0] in "iu" else None)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes from the first element of each tensor to the end of its last."""
        return {name: span(x) for name, x in self.tensors.items()}


def span(x: Tensor) -> int:
    if x.numel() == 0:
        return 0
    return x.element_size() * (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)))


class Contract(NamedTuple):
    """The values of one tensor: their interval, facts of the value at a place, and contents."""

    interval: Interval
    facts: Callable[[Term, Term], Sequence[Term]] = lambda value, index: ()
    contents: Callable[[np.random.Generator], Any] | None = None


def elements(place: Term, size: int) -> Term:
    """The number of the element at a place in bytes."""
    if place.op == "const" or size == 1:
        return const(place.lo // size) if place.op == "const" else place
    if place.op == "mul" and place.args[1].value is not None and place.args[1].lo % size == 0:
        return place.args[0] * (place.args[1].lo // size)
    if place.op == "add":
        return elements(place.args[0], size) + elements(place.args[1], size)
    if place.op == "choose":
        return choose(place.args[0], *(elements(x, size) for x in place.args[1:]))
    return div(place, const(size), 64)


class Contracts:
    """The contracts of a launch. A tensor without one may hold anything."""

    def __init__(self, job: Job, arguments: Arguments) -> None:
        self.arguments, self.numbers, self.tensors = arguments, arguments.numbers, arguments.tensors
        self.name = job.name
        self.of: dict[str, Contract] = {}
        self.sequences_seen: list[Term] = []  # whose bounds a kernel loads
        maker = getattr(self, f"_{job.name}", None)
        if "dropout_key" in self.tensors and self.tensors["dropout_key"].numel() == 2:
            # `draw_key` draws 32 bits. A bit above them would say that two numbers follow.
            self.of["dropout_key"] = Contract((0, 2**32 - 1))
        if maker is not None:
            maker()
        elif "lists.most" in self.numbers:
            self._lists()
        elif "shape.seqlen_k" in self.numbers:
            self._attention()

    def load(self, tensor: str, place: Term, bits: int) -> Term:
        """The term of a value."""
        if tensor == "bounds" and (index := elements(place, 4)).op == "add" and index.args[1].value == 3:
            own = elements(index.args[0] * 4, 16)
            if own not in self.sequences_seen:
                self.sequences_seen.append(own)
        return self._load(tensor, place, bits)

    def _load(self, tensor: str, place: Term, bits: int) -> Term:
        contract = self.of.get(tensor)
        return load(tensor, place, bits, None if contract is None else contract.interval)

    def facts(self, x: Term) -> Sequence[Term]:
        contract = self.of.get(x.name)
        return () if contract is None else contract.facts(x, elements(x.args[0], self.tensors[x.name].element_size()))

    def at(self, tensor: str, index: Term) -> Term:
        x = self.tensors[tensor]
        return self._load(tensor, index * x.element_size(), 8 * x.element_size())

    def contents(self, seed: int) -> dict[str, Any]:
        """Values of tensors that keep their contracts."""
        drawn = {}
        for name, contract in self.of.items():
            if contract.contents is not None and self.tensors[name].numel() <= MOST_DRAWN:
                dtype = torch.empty(0, dtype=self.tensors[name].dtype).numpy().dtype
                drawn[name] = np.ascontiguousarray(contract.contents(np.random.default_rng(seed)), dtype).reshape(-1)
        return drawn

    # The tables of attention kernels

    def _attention(self) -> None:
        numbers, layout = self.numbers, self.numbers.get("SEQUENCES", 0)
        if numbers.get("MASK") == 1 and "mask_index" in self.tensors:
            self.of["mask_index"] = self.tile_lists("mask_index")
        if numbers.get("MASK") == 2 and "mask_index" in self.tensors:
            self._kept_keys()
        if layout:
            sides = (Side(numbers["layout.rows_q"], numbers["shape.seqlen_q"], layout in (1, 4)),)
            sides += (Side(numbers["layout.rows_k"], numbers["shape.seqlen_k"], layout == 1),)
            self.of["bounds"] = self.sequences("bounds", *sides)
        if "table" in self.tensors:
            self.of["table"] = Contract((-(2**31), 2**31 - 1))  # clamped where it is read

    def tile_lists(self, name: str) -> Contract:
        """Lists of tiles of a row: the numbers of full and of partial tiles, and then all tiles, each once.

        `mask_pack.write_list` writes them. A full tile of keys lies inside of the keys: bits beyond them are 0.
        """
        is_of_keys = self.name not in (
            "backward_keys",
            "pair_columns",
        )  # those walk columns, whose tiles are of queries
        x = self.tensors[name]
        row = x.shape[-1]
        count = row - 2

        def facts(value: Term, index: Term) -> list[Term]:
            column = index % row
            first = index - column
            full, partial = self.at(name, first), self.at(name, first + 1)
            return [
                *self._full_tiles(value, index // row, (column < 2) | (full + 2 <= column), is_of_keys),
                full + partial <= count,
                (column < 2) | (value < count),
            ]

        def contents(rng: np.random.Generator) -> Any:
            rows = x.numel() // row
            lists = np.empty((rows, row), np.int64)
            lists[:, 0] = rng.integers(0, count + 1, rows)
            lists[:, 1] = rng.integers(0, count + 1 - lists[:, 0])
            lists[:, 2:] = rng.permuted(np.broadcast_to(np.arange(count), (rows, count)), axis=1)
            return lists

        return Contract((0, max(count, 0)), facts, contents)

    def _full_tiles(self, tile: Term, row: Term, is_other: Term, is_of_keys: bool) -> list[Term]:
        numbers = self.numbers
        end = tile * TILE + TILE
        if not is_of_keys:
            return []
        if not numbers.get("SEQUENCES", 0):
            return [is_other | (end <= numbers["shape.seqlen_k"])]
        said = []
        for own in self.sequences_seen:
            first, queries, keys = (self.at("bounds", own * 4 + column) for column in (0, 1, 3))
            if numbers["SEQUENCES"] not in (1, 4):
                first = own * numbers["layout.rows_q"] + first
            top = first // TILE + own
            is_own = (top <= row) & (row < top + (queries + (TILE - 1)) // TILE)
            said.append(is_other | ~is_own | (end <= keys))
        return said

    def _kept_keys(self) -> None:
        """The kept keys of a row in order, then `Lk`; and how many there are before each key.

        `key_pack._key_set_kernel` writes both. Row by row, without gaps.
        """
        length = self.tensors["mask_index"].shape[-1] - 1
        rows = self.tensors["mask_index"].numel() // (length + 1)

        def before(value: Term, index: Term) -> list[Term]:
            place = index % (length + 1)
            return [value <= place, value <= self.at("mask_index", index - place + length)]

        def kept(value: Term, index: Term) -> list[Term]:
            row, place = index // length, index % length
            total = self.at("mask_index", row * (length + 1) + length)
            return [(total <= place) | (value < length)]

        def contents(rng: np.random.Generator) -> Any:
            return rng.random((rows, length)) < 0.6

        def prefix(rng: np.random.Generator) -> Any:
            return np.concatenate([np.zeros((rows, 1), np.int64), contents(rng).cumsum(1)], 1)

        def keys(rng: np.random.Generator) -> Any:
            return np.sort(np.where(contents(rng), np.arange(length), length), 1)

        self.of["mask_index"] = Contract((0, length), before, prefix)
        self.of["mask_data"] = Contract((0, length), kept, keys)

    def sequences(self, name: str, q: Side, k: Side) -> Contract:
        """The first query, the queries, the first key and the keys of each sequence.

        `_safe_bounds` of flash_dmattn/sequences/layout.py clamps them: they ascend, and lie inside of the rows.
        """
        number = self.tensors[name].shape[0]

        def facts(value: Term, index: Term) -> list[Term]:
            column = index % 4
            said = []
            for place, side in ((0, q), (2, k)):
                is_first, is_length = equal(column, const(place)), equal(column, const(place + 1))
                said.append(~is_length | (value <= min(side.rows, side.most)))
                if side.is_packed:
                    said.append(~is_first | (value + self.at(name, index + 1) <= side.rows))
                    said.append(~is_length | (value + self.at(name, index - 1) <= side.rows))
                else:
                    said.append(~is_first | (value <= 0))
            return said

        def contents(rng: np.random.Generator) -> Any:
            columns = []
            for side in (q, k):
                limit = min(side.rows, side.most)
                if side.is_packed:
                    edges = np.sort(rng.integers(0, side.rows + 1, number + 1))
                    columns += [edges[:-1], np.minimum(np.diff(edges), limit)]
                else:
                    columns += [np.zeros(number, np.int64), rng.integers(0, limit + 1, number)]
            return np.stack(columns, 1)

        return Contract((0, max(q.rows, k.rows, 0)), facts, contents)

    def _append(self) -> None:
        numbers, page = self.numbers, self.numbers["PAGE"]
        packs = bool(numbers["PACKS_TOKENS"])
        q = Side(numbers["rows"] if packs else numbers["slots"], numbers["rows"], packs)
        rows = self.tensors["k_cache"].shape[1]
        if page:
            rows = self.tensors["table"].shape[1] * page
        self.of["bounds"] = self.sequences("bounds", q, Side(rows, rows, bool(numbers["PACKS_KEYS"])))
        self.of["table"] = Contract((-(2**31), 2**31 - 1))

        owned = self.tensors["table"].numel()  # sequences that are written to share no page
        if page:
            self.of["table"] = Contract((-(2**31), 2**31 - 1), contents=lambda rng: rng.permutation(owned))

    def _backward_gather(self) -> None:
        if self.numbers["MASK"] == 2:
            self._kept_keys()

    def _fill_gaps(self) -> None:
        numbers = self.numbers
        side = Side(numbers["rows"], numbers["rows"], bool(numbers["IS_PACKED"]))
        self.of["bounds"] = self.sequences("bounds", side, side)

    def _pack_sequences(self) -> None:
        numbers, packed = self.numbers, bool(self.numbers["IS_PACKED"])
        rows = numbers["num_rows"] if packed else numbers["slots"]
        most = TILE * numbers["tiles_k"]
        mask = self.tensors["mask_ptr"].shape
        if numbers["KIND"] == 0 and numbers["stride_first_k"] == 0:
            most = min(most, mask[3])
        is_packed = numbers["stride_first_k"] > 0
        total = mask[3] if is_packed else most
        most_q = rows  # a tree, and a mask with a row for each place, has as many rows as a sequence may have queries
        if numbers["KIND"] != 1 and numbers["stride_first_q"] == 0 and mask[2] > 1:
            most_q = min(rows, mask[2])
        self.of["bounds_ptr"] = self.sequences("bounds_ptr", Side(rows, most_q, packed), Side(total, most, is_packed))
        if numbers["KIND"] == 1:
            self.of["pairs_ptr"] = Contract((0, 2**40))  # clamped where it is read

    def _list_sequences(self) -> None:
        numbers = self.numbers
        q = Side(numbers["slots_q"], TILE * numbers["most_rows"], bool(numbers["PACKS_QUERIES"]))
        k = Side(numbers["slots_k"], TILE * numbers["tiles_k"], bool(numbers["PACKS_KEYS"]))
        self.of["bounds_ptr"] = self.sequences("bounds_ptr", q, k)

    def _places(self, name: str, length: int) -> None:
        """An order of keys: places of `key_pack._key_intervals_kernel`, each below the number of keys."""
        rows = self.tensors[name].numel() // max(length, 1)
        self.of[name] = Contract(
            (0, max(length - 1, 0)), contents=lambda rng: rng.permuted(np.tile(np.arange(length), (rows, 1)), axis=1)
        )

    def _interval_tiles(self) -> None:
        if self.numbers["HAS_ORDER"]:
            self._places("order_ptr", self.numbers["seqlen_k"])

    def _first_places(self) -> None:
        self._places("order_ptr", self.numbers["seqlen_k"])

    # The tables of lists

    def _lists(self) -> None:
        """Entries of each row of lists, which ascend, and how many there are: `lists` checks them at its making."""
        numbers, tensors = self.numbers, self.tensors
        each, most = numbers.get("KEYS_EACH", 1), numbers["lists.most"]
        blocks = max(-(-numbers["shape.seqlen_k"] // each), 1)

        def rows(name: str, row: int) -> int:
            return tensors[name].numel() // row

        def ascending(rng: np.random.Generator) -> Any:
            return np.tile(np.sort(rng.choice(blocks, most, replace=blocks < most)), (rows("entries", most), 1))

        def below_the_count(value: Term, index: Term) -> list[Term]:
            is_rest = self.at("counts", index // most) <= index % most
            return [is_rest | ((const(0) <= value) & (value < blocks))]

        if "entries" in tensors:
            self.of["entries"] = Contract((-(2**31), 2**31 - 1), below_the_count, ascending)
        if "counts" in tensors:
            self.of["counts"] = Contract((0, most), contents=lambda rng: rng.integers(0, most + 1, rows("counts", 1)))
        if "values" in tensors and "slots" in tensors:
            columns = tensors["values"].shape[-1]
            self.of["slots"] = Contract(
                (0, columns - 1),
                contents=lambda rng: np.tile(rng.permutation(columns)[:most], (rows("slots", most), 1)),
            )
        if "segments" in tensors:
            self._segments(most * numbers["lists.rows"])

    def _segments(self, entries: int) -> None:
        """The inverse lists of `list_calls.inverse_lists`, whose parts of blocks ascend from 0 on."""
        count = self.numbers["most_segments"]

        def first_is_0(value: Term, index: Term) -> list[Term]:
            return [~equal(index % (self.numbers["blocks"] + 1), const(0)) | equal(value, const(0))]

        self.of["segments"] = Contract((0, count), first_is_0)
        if "inverse" in self.tensors:
            self.of["inverse"] = Contract((0, entries - 1))
            self.of["offsets"] = Contract((0, entries))

    def _list_add(self) -> None:
        """A key has so many rows from `offsets` on: a sum of the counts before it, in `list_calls._plan_rows`."""
        rows = self.tensors["rows"].shape[0]

        def facts(value: Term, index: Term) -> list[Term]:
            return [value + self.at("counts", index) <= rows]

        def after_counts(value: Term, index: Term) -> list[Term]:
            return [value + self.at("offsets", index) <= rows]

        self.of["offsets"] = Contract((0, rows), facts)
        self.of["counts"] = Contract((0, rows), after_counts)


class Side(NamedTuple):
    """The rows of queries, or of keys: of all sequences if they are packed, else of one; and the most of a sequence."""

    rows: int
    most: int
    is_packed: bool
