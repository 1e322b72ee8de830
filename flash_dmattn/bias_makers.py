"""How a call makes its bias for some entries of its batch, and the gradients of what it is made of.

A maker has the settings of a bias, and knows what its tensors, the factors, mean. `prepare` returns an object that
makes the bias of a part of the batch, takes the gradient of this bias, and in the end has the gradient of each factor.
Kernels do both on the GPUs of the backend triton, and PyTorch elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from .biases import Band, Projected, Relative, fold_factors
from .dispatch.config import disabled
from .dispatch.registry import works
from .problem import bounded, device_arch, merge, sm_number
from .reference import distances, gathers, positions
from .reference.positions import pitch_of

Factors = Sequence[Tensor]


class Term(NamedTuple):
    """Hold the settings of a term: the index of distance 0, whether its ends count beyond, and its side."""

    zero: int
    clamps: bool
    by_keys: bool = False


class Made(Protocol):
    """The bias of one call, made for some entries of the batch at a time."""

    def scores(self, span: slice) -> Tensor:
        """Return the bias of some entries, (entries, heads, Lq, Lk); (1, ...) if all share it."""

    def place(self, entries: int) -> Tensor | None:
        """Return where a backward pass may store the gradient of the bias of so many entries; None for anywhere."""

    def add_gradient(self, ds: Tensor, span: slice, needs: Sequence[bool]) -> None:
        """Take the gradient of the bias of some entries, which follow those before; `needs` tells of each factor."""

    def gradients(self, needs: Sequence[bool]) -> list[Tensor | None]:
        """Return the gradient of each factor; None where it is not needed."""


@dataclass(frozen=True)
class ProjectedMaker:
    """Make the scores of a `Projected` of one term or two. Factors are content and table of each."""

    terms: tuple[Term, ...]
    name: ClassVar[str] = "Projected"
    noun: ClassVar[str] = "scores of the Projected"
    has_softcap: ClassVar[bool] = False  # it would be of the sum of both products, where passes add a bias behind it

    @staticmethod
    def of(bias: Projected, batch: tuple[int, ...], lengths: tuple[int, int]) -> tuple[ProjectedMaker, list[Tensor]]:
        """Return the maker of a bias and its factors, with the batch dims folded into one."""
        leading = len(batch)
        terms = tuple(Term(*term.numbers, term.of == "keys") for term in bias.terms)
        factors: list[Tensor] = []
        for term in bias.terms:
            factors += [merge(term.content, leading) if leading > 1 else term.content, term.table]
        return ProjectedMaker(terms), factors

    def bias(self, factors: Factors) -> Projected:
        """Return the bias of a call with one batch dim."""
        made: Projected | None = None
        pairs = zip(factors[::2], factors[1::2], strict=True)
        for (zero, clamps, by_keys), pair in reversed(list(zip(self.terms, pairs, strict=True))):
            made = Projected(*pair, zero, "clamp" if clamps else "zero", "keys" if by_keys else "queries", made)
        assert made is not None
        return made

    def is_shared(self, factors: Factors) -> bool:
        """Return whether all entries of the batch have the same bias."""
        return False

    def heads(self, factors: Factors) -> int:
        """Return the heads of the bias."""
        return max(content.shape[2] for content in factors[::2])

    def dtype(self, factors: Factors) -> torch.dtype:
        """Return the dtype of the bias."""
        return factors[0].dtype

    def bytes_of_entry(self, factors: Factors, lengths: tuple[int, int]) -> int:
        """Return the bytes of the workspace for an entry of the batch.

        Scores of keys by themselves count twice: a kernel makes them transposed, and another one turns them.
        """
        copies = 1 + all(term.by_keys for term in self.terms)
        heads = sum(x.shape[2] for x in factors[::2]) * copies
        return heads * lengths[0] * pitch_of(lengths[1]) * self.dtype(factors).itemsize

    def flop(self, factors: Factors, needs: Sequence[bool] | None = None) -> int:
        """Return the FLOP for a score: of the forward pass, or of a backward pass with these gradients of factors.

        A backward pass makes each product again, and has a gradient of each factor.
        """
        terms = sum(table.shape[2] for table in factors[1::2])
        return 2 * terms * (1 if needs is None else 1 + any(needs[::2]) + any(needs[1::2]))

    def prepare(self, factors: Factors, lengths: tuple[int, int], scale: float, entries: int) -> Made:
        """Prepare the bias of a call in parts of at most so many entries."""
        return _Projections(self.terms, factors, lengths, scale, entries)


@dataclass(frozen=True)
class RelativeMaker:
    """Make the values of a `Relative` with positions. Factors are values, positions of queries, and of keys of each."""

    terms: tuple[Term, ...]
    name: ClassVar[str] = "Relative"
    noun: ClassVar[str] = "values of the Relative"
    has_softcap: ClassVar[bool] = True

    @staticmethod
    def of(bias: Relative, batch: tuple[int, ...], lengths: tuple[int, int]) -> tuple[RelativeMaker, list[Tensor]]:
        """Return the maker of a bias and its factors, with the batch dims folded into one."""
        factors = fold_factors(bias.factors(*lengths), batch)
        return RelativeMaker(tuple(Term(*numbers) for numbers in bias.numbers)), factors

    def bias(self, factors: Factors) -> Relative:
        made: Relative | None = None
        for n, (zero, clamps, _) in reversed(list(enumerate(self.terms))):
            values, queries, keys = factors[3 * n : 3 * n + 3]
            made = Relative(values, zero, "clamp" if clamps else "zero", (queries, keys), made)
        assert made is not None
        return made

    def is_shared(self, factors: Factors) -> bool:
        return all(x.shape[0] == 1 for x in factors)

    def heads(self, factors: Factors) -> int:
        return max(x.shape[1] for x in factors[::3])

    def dtype(self, factors: Factors) -> torch.dtype:
        return functools.reduce(torch.promote_types, [x.dtype for x in factors[::3]])

    def bytes_of_entry(self, factors: Factors, lengths: tuple[int, int]) -> int:
        return self.heads(factors) * lengths[0] * pitch_of(lengths[1]) * self.dtype(factors).itemsize

    def flop(self, factors: Factors, needs: Sequence[bool] | None = None) -> int:
        return 0  # values are read and added, as values of any bias

    def prepare(self, factors: Factors, lengths: tuple[int, int], scale: float, entries: int) -> Made:
        return _Gathered(self.terms, factors, entries)


@dataclass(frozen=True)
class BandMaker:
    """Make a `Band` that clamps. Its factor is the values."""

    terms: tuple[Term, ...]
    name: ClassVar[str] = "Band"
    noun: ClassVar[str] = "values of the Band"
    has_softcap: ClassVar[bool] = True

    @staticmethod
    def of(bias: Band, batch: tuple[int, ...], lengths: tuple[int, int]) -> tuple[BandMaker, list[Tensor]]:
        """Return the maker of a bias and its factor, with the batch dims folded into one."""
        return BandMaker((Term(bounded(bias.zero), True),)), fold_factors([bias.values], batch, (3,))

    def bias(self, factors: Factors) -> Band:
        return Band(factors[0], self.terms[0].zero, "clamp")

    def is_shared(self, factors: Factors) -> bool:
        return factors[0].shape[0] == 1

    def heads(self, factors: Factors) -> int:
        return factors[0].shape[1]

    def dtype(self, factors: Factors) -> torch.dtype:
        return factors[0].dtype

    def bytes_of_entry(self, factors: Factors, lengths: tuple[int, int]) -> int:
        return self.heads(factors) * lengths[0] * pitch_of(lengths[1]) * self.dtype(factors).itemsize

    def flop(self, factors: Factors, needs: Sequence[bool] | None = None) -> int:
        return 0

    def prepare(self, factors: Factors, lengths: tuple[int, int], scale: float, entries: int) -> Made:
        return _Banded(factors[0], self.terms[0].zero, lengths, entries)


Maker = ProjectedMaker | RelativeMaker | BandMaker
MAKERS: dict[str, Any] = {maker.name: maker for maker in (ProjectedMaker, RelativeMaker, BandMaker)}


def has_kernels(x: Tensor) -> bool:
    """Return whether kernels make the biases of calls with this tensor: on the GPUs of the backend triton."""
    is_served = x.is_cuda and x.dtype != torch.float64 and (sm_number(device_arch(x.device)) or 80) >= 80
    return is_served and "triton" not in disabled() and works("triton")


def products_of(x: Tensor) -> Any:
    """Return the class of the products: by Triton, or in PyTorch."""
    if has_kernels(x):
        from .triton_kernels import positions as kernels

        return kernels.Products
    return positions.Products


def gathers_of(x: Tensor) -> Any:
    """Return the class of biases by position: by Triton, or in PyTorch."""
    if has_kernels(x):
        from .triton_kernels import gathers as kernels

        return kernels.Gathers
    return gathers.Gathers


def bands_of(x: Tensor) -> Any:
    """Return the class of bands that clamp: by Triton, or in PyTorch."""
    if has_kernels(x):
        from .triton_kernels import bands as kernels

        return kernels.Bands
    return distances.Bands


class _Projections:
    """The products of a call, of one term or two. `main` is the index of the term of queries, which has all heads."""

    def __init__(
        self, terms: tuple[Term, ...], factors: Factors, lengths: tuple[int, int], scale: float, entries: int
    ) -> None:
        self.terms, self.factors, self.lengths = terms, factors, lengths
        self.contents, self.tables = factors[::2], factors[1::2]
        self.made: list[list[Any]] = [[] for _ in terms]  # gradients of the content of each part
        self.each: list[Any] = []
        for term, content, table in zip(terms, self.contents, self.tables, strict=True):
            length, others = reversed(lengths) if term.by_keys else lengths
            shape = (content.shape[2], length, others)
            rows = positions.rows_of_call(table, *term[:2], *lengths, term.by_keys)
            self.each.append(products_of(content)(rows, scale, term.by_keys, entries, shape))
        self.main = min(range(len(terms)), key=lambda n: terms[n].by_keys)  # 0 if keys have the only term

    def scores(self, span: slice) -> Tensor:
        total: Tensor = self.each[self.main].scores(self.contents[self.main][span])
        for n, (each, content) in enumerate(zip(self.each, self.contents, strict=True)):
            if n != self.main:
                each.add_scores(content[span], total)
        return total

    def place(self, entries: int) -> Tensor | None:
        place: Tensor | None = self.each[self.main].place(entries)
        return place

    def add_gradient(self, ds: Tensor, span: slice, needs: Sequence[bool]) -> None:
        for n, (each, content) in enumerate(zip(self.each, self.contents, strict=True)):
            needs_x, needs_rows = needs[2 * n : 2 * n + 2]
            if needs_x or needs_rows:
                x = content[span]
                shared = ds if x.shape[2] == ds.shape[1] else ds.unflatten(1, (x.shape[2], -1)).sum(2)
                self.made[n].append(each.gradients(shared, x, needs_x, needs_rows))

    def gradients(self, needs: Sequence[bool]) -> list[Tensor | None]:
        gradients: list[Tensor | None] = []
        for n, (term, each, table) in enumerate(zip(self.terms, self.each, self.tables, strict=True)):
            gradients.append(joined(self.made[n]) if needs[2 * n] else None)
            if not needs[2 * n + 1]:
                gradients.append(None)
            else:
                settings = (*term[:2], *self.lengths, term.by_keys)
                gradients.append(positions.table_gradient(each.rows_gradient(), table, *settings))
        return gradients


class _Gathered:
    """The values of a call with positions."""

    def __init__(self, terms: tuple[Term, ...], factors: Factors, entries: int) -> None:
        self.factors = factors
        table, places, dtype = gathers.prepare(factors, [term[:2] for term in terms])
        self.all: Any = gathers_of(table)(table, places, dtype, entries)

    def scores(self, span: slice) -> Tensor:
        made: Tensor = self.all.scores(span)
        return made

    def place(self, entries: int) -> Tensor | None:
        place: Tensor | None = self.all.place(entries)
        return place

    def add_gradient(self, ds: Tensor, span: slice, needs: Sequence[bool]) -> None:
        if any(needs):
            self.all.add_gradient(ds, span)

    def gradients(self, needs: Sequence[bool]) -> list[Tensor | None]:
        gradients: list[Tensor | None] = [None] * len(self.factors)
        if any(needs):
            made = gathers.split_gradient(self.all.table_gradient(), self.factors[::3])
            gradients[::3] = [x if is_needed else None for x, is_needed in zip(made, needs[::3], strict=True)]
        return gradients


class _Banded:
    """The values of a call with a `Band` that clamps."""

    def __init__(self, values: Tensor, zero: int, lengths: tuple[int, int], entries: int) -> None:
        self.values, self.parts = values, list[Tensor]()
        shape, entries = (values.shape[1], *lengths), min(entries, len(values))
        self.bands: Any = bands_of(values)(values.shape[3], zero, values.dtype, entries, shape, values.device)

    def scores(self, span: slice) -> Tensor:
        made: Tensor = self.bands.scores(gathers.entries_of(self.values, span))
        return made

    def place(self, entries: int) -> Tensor | None:
        place: Tensor | None = self.bands.place(min(entries, len(self.values)))
        return place

    def add_gradient(self, ds: Tensor, span: slice, needs: Sequence[bool]) -> None:
        if needs[0]:
            self.parts.append(self.bands.gradient(ds).to(self.values.dtype))

    def gradients(self, needs: Sequence[bool]) -> list[Tensor | None]:
        return [joined(self.parts) if needs[0] else None]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Join the tensors of the parts of a batch."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
