"""Biases that replace a matrix: values for each head and distance, for entries of a mask of lists, or products.

Pass a `Relative`, a `Band` or a `ListBias` as `bias=`. The (Lq, Lk) matrix is then never allocated, in either pass, and
the gradient of the values is summed in fp32 and rounded once. A `Projected` is a part of the scores: products of the
queries, or of the keys, with a row for each distance. They are made for a few entries of the batch at a time, and so
are the values of a `Relative` with positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from .definition import is_dtensor
from .masks.arguments import integer
from .problem import (
    Outside,
    RawFlags,
    as_scores,
    bounded,
    causal_window,
    check_device,
    check_dtype,
    check_flag,
    check_floats,
    check_number,
    check_softcap,
    check_strided,
    check_tensor,
    check_values,
    check_window,
    is_int,
    merge,
    replaced,
)
from .reference import distances, gathers, positions
from .reference.lists import by_query, dense_bias, repeat_heads, slot_table

if TYPE_CHECKING:
    from .masks import PreparedMask
    from .masks.prepared.storage import ListMask

__all__ = ["Band", "ListBias", "Projected", "Relative", "alibi", "from_function", "t5", "t5_buckets"]

_OUTSIDE = ("error", "clamp", "zero")
_FLOAT = "a floating-point torch.Tensor"  # for messages


def _refuse_sum() -> NoReturn:
    """Refuse the sum of a bias by distance and a tensor; Python's error would not say what to do instead."""
    raise TypeError("a bias by distance is no tensor; to add to it, make one: bias.dense(seqlen_q, seqlen_k)")


def _refuse_sum_of_projected() -> NoReturn:
    raise TypeError(
        "a Projected is no tensor; plus= adds one of the other side; softmax_scale * bias.dense(seqlen_q, seqlen_k) "
        "is a tensor to add to, for a call without softcap"
    )


class Relative(NamedTuple):
    """A bias with one value for each head and distance.

    Equivalent PyTorch, with distance 0 between the last query and the last key, as everywhere in `attention`::

        distance = torch.arange(Lk) - (torch.arange(Lq) + Lk - Lq)[:, None]
        bias = values[..., zero + distance]                                  # (Hv, Lq, Lk) or (Bv, Hv, Lq, Lk)

    With positions the distance is `keys[..., None, :] - queries[..., None]` of integers up to 2^61, such as
    coordinates or times, whatever the order of the tokens. This bias is made for a few entries of the batch at a
    time, in the dtype of the values. Its gradient is summed in fp32, in a fixed order which does not depend on their
    number.

    Attributes:
        values: (Hv, n) or (*batch, Hv, n), any float dtype, any strides. Hv is 1, the heads of k or the heads of q;
            batch dims are 1 or full. -inf masks. The gradient has its shape and dtype.
        zero: the index of distance 0 in `values`; any integer, also one outside of the values.
        outside: the rule for distances without a value. "error" refuses a call that has such distances, except where
            causality or a window hides them; "clamp" gives them the first or the last value; "zero" gives them 0.
            With positions, which no call reads in advance, it needs to be one of the last two.
        positions: of queries and of keys, integers (L,) or (*batch, L), with batch dims of 1 or full size.
        plus: another `Relative`, with positions or without, whose values are added. It may have one, too.

    Example:
        >>> from flash_dmattn import attention, biases
        >>> q = k = v = torch.randn(2, 10, 4, 8)
        >>> values = torch.zeros(4, 2 * 3 + 1, requires_grad=True)  # distances -3 to 3; the ends are for all others
        >>> out = attention(q, k, v, bias=biases.Relative(values, zero=3, outside="clamp"))
        >>> out.sum().backward()
        >>> values.grad.shape
        torch.Size([4, 7])
        >>> times = torch.randint(100, (2, 10))  # of each token
        >>> out = attention(q, k, v, bias=biases.Relative(values, 3, "clamp", positions=(times, times)))
    """

    values: Tensor
    zero: int
    outside: Outside = "error"
    positions: tuple[Tensor, Tensor] | None = None
    plus: Relative | None = None

    def dense(self, seqlen_q: int, seqlen_k: int) -> Tensor:
        """Make the matrix of these values, for calls that need it: (*batch, Hv, Lq, Lk); with a gradient.

        Raises:
            TypeError: values or positions are no tensors of their dtypes, or zero is no int.
            ValueError: positions have another length, or a distance has no value, and `outside` is "error".

        >>> Relative(torch.tensor([[1, 2, 3]]), zero=1, outside="clamp").dense(2, 3)
        tensor([[[1, 2, 3],
                 [1, 1, 2]]])
        >>> places = torch.tensor([5, 9]), torch.tensor([9, 5, 0])
        >>> Relative(torch.tensor([[1.0, 2.0, 3.0]]), 1, "clamp", positions=places).dense(2, 3)
        tensor([[[3., 2., 1.],
                 [2., 1., 1.]]])
        """
        if not is_made(self):
            return _matrix(self, seqlen_q, seqlen_k)
        lengths = integer("seqlen_q", seqlen_q), integer("seqlen_k", seqlen_k)
        self.check_parts(*lengths)
        self.check_covers(*lengths)
        factors = self.factors(*lengths)
        dims = [tuple(x.shape[: -1 if n % 3 else -2]) for n, x in enumerate(factors)]
        heads = [x.shape[-2] for x in factors[::3]]
        try:
            batch = tuple(torch.broadcast_shapes(*dims))
        except RuntimeError:
            raise ValueError(
                f"bias has batch dims {dims} of values and positions; each needs to be 1 or full"
            ) from None
        if any(max(heads) % max(number, 1) for number in heads):
            raise ValueError(f"bias has values of {heads} heads; each needs to be 1 or a divisor of the most")
        table, places, dtype = gathers.prepare(fold_factors(factors, batch), self.numbers)
        made = gathers.gather(table, places)
        return made.to(dtype).expand(math.prod(batch), *made.shape[1:]).reshape(*batch, *made.shape[1:])

    @property
    def terms(self) -> tuple[Relative, ...]:
        """This bias, and others that are added."""
        return (self, *self.plus.terms) if isinstance(self.plus, Relative) else (self,)

    @property
    def named_terms(self) -> tuple[tuple[str, Relative], ...]:
        """The terms, with the names that messages give them."""
        return tuple((".".join(("bias", *("plus",) * place)), term) for place, term in enumerate(self.terms))

    @property
    def named_tensors(self) -> tuple[tuple[str, Any], ...]:
        """The tensors of this term."""
        pair = self.positions if isinstance(self.positions, (tuple, list)) else ()
        return ("values", self.values), *((f"positions[{n}]", x) for n, x in enumerate(pair))

    @property
    def numbers(self) -> tuple[tuple[int, bool], ...]:
        """The index of distance 0 of each term, and whether distances beyond its values get the ends."""
        return tuple((bounded(term.zero), term.outside == "clamp") for term in self.terms)

    def factors(self, seqlen_q: int, seqlen_k: int) -> list[Tensor]:
        """Return the values of each term, and its positions of queries and of keys in int64."""
        made: list[Tensor] = []
        for term in self.terms:
            pair = term.positions
            if pair is None:
                last = torch.arange(seqlen_k - seqlen_q, seqlen_k, device=term.values.device)
                pair = last, torch.arange(seqlen_k, device=term.values.device)
            made += [term.values, *(x.long() for x in pair)]
        return made

    def check_parts(self, seqlen_q: int, seqlen_k: int, device: torch.device | None = None) -> None:
        """Check each part by itself, on the device of q, or of the values."""
        for name, term in self.named_terms:
            check_floats(f"{name}.values", term.values)
            check_strided(f"{name}.values", term.values)
            split(term, name)
            if term.positions is not None:
                term._check_positions(name, seqlen_q, seqlen_k)
            for part, x in term.named_tensors:
                check_device(f"{name}.{part}", x.device, device or self.values.device, "q" if device else "bias.values")
            if term.plus is not None and not isinstance(term.plus, Relative):
                raise TypeError(f"{name}.plus is a {type(term.plus).__name__}; it needs to be None or a Relative")

    def _check_positions(self, name: str, seqlen_q: int, seqlen_k: int) -> None:
        if not isinstance(self.positions, (tuple, list)) or len(self.positions) != 2:
            raise TypeError(
                f"{name}.positions is a {type(self.positions).__name__}; it needs to be a pair of integer tensors, the "
                "positions of queries and of keys"
            )
        if self.outside == "error":
            raise ValueError(
                f'{name}.outside is "error" with positions, which no call reads in advance; it needs to be "clamp" or '
                '"zero"'
            )
        sides = (("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k))
        for n, (x, (kind, length)) in enumerate(zip(self.positions, sides, strict=True)):
            part = f"{name}.positions[{n}]"
            check_tensor(part, x, "an integer torch.Tensor")
            check_strided(part, x)
            if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
                raise TypeError(f"{part} has dtype {str(x.dtype)[6:]}; it needs an integer dtype")
            if x.dim() == 0 or x.shape[-1] != length:
                raise ValueError(f"{part} has shape {tuple(x.shape)}; it needs (*batch, {kind}), {kind} {length}")

    def check_with(self, q: Tensor, k: Tensor) -> None:
        """Check the parts with q (*batch, Lq, Hq, D) and k (*batch, Lk, Hk, D), which have been checked."""
        self.check_parts(q.shape[-3], k.shape[-3], q.device)
        batch, heads = tuple(q.shape[:-3]), sorted({1, k.shape[-2], q.shape[-2]})
        for name, term in self.named_terms:
            if term.values.shape[-2] not in heads:
                raise ValueError(f"{name}.values has {term.values.shape[-2]} heads; it needs one of {heads}")
            for n, (part, x) in enumerate(term.named_tensors):
                own = tuple(x.shape[: -1 if n else -2])
                fits = zip(own[::-1], batch[::-1])
                if len(own) > len(batch) or any(size not in (1, full) for size, full in fits):
                    raise ValueError(f"{name}.{part} has batch dims {own}; they need to be 1 or those of q, {batch}")

    def check_covers(self, seqlen_q: int, seqlen_k: int, window: tuple[int, int] = (-1, -1)) -> None:
        """Refuse distances without a value that a window of `causal_window` leaves, where `outside` is "error"."""
        for name, term in self.named_terms:
            if term.outside == "error":
                check_covered(term.values.shape[-1], term.zero, seqlen_q, seqlen_k, window, name=name)

    def __add__(self, other: object) -> NoReturn:
        _refuse_sum()

    def __radd__(self, other: object) -> NoReturn:
        _refuse_sum()


class Band(NamedTuple):
    """A bias with one value for each head, query and distance, in a band of distances.

    Equivalent PyTorch: as for `Relative`, with a row of values for each query. With `outside="clamp"` the bias is made
    for a few entries of the batch at a time.

    Attributes:
        values: (H, Lq, n) or (*batch, H, Lq, n), any float dtype, any strides; H and batch dims as for `Relative`. The
            values of a query are in ascending order of keys.
        zero: the index of distance 0.
        outside: the rule for distances without a value: "zero", or "clamp", the first or the last value of the query.

    Example:
        >>> Band(torch.tensor([[[1, 2], [3, 4], [5, 6]]]), zero=1).dense(3, 3)  # values of distances -1 and 0
        tensor([[[2, 0, 0],
                 [3, 4, 0],
                 [0, 5, 6]]])
    """

    values: Tensor
    zero: int
    outside: Literal["zero", "clamp"] = "zero"

    def dense(self, seqlen_q: int, seqlen_k: int) -> Tensor:
        """Make the matrix of these values, for calls that need it: (*batch, H, Lq, Lk); with a gradient.

        Raises:
            ValueError: the values have other than seqlen_q rows.
        """
        return _matrix(self, seqlen_q, seqlen_k)

    @property
    def terms(self) -> tuple[Band, ...]:
        """This bias alone: it has no other that is added."""
        return (self,)

    @property
    def named_terms(self) -> tuple[tuple[str, Band], ...]:
        """The terms, with the names that messages give them."""
        return (("bias", self),)

    @property
    def named_tensors(self) -> tuple[tuple[str, Any], ...]:
        """The tensors of this term."""
        return (("values", self.values),)

    def check_with(self, q: Tensor, k: Tensor) -> None:
        """Check the values with q (*batch, Lq, Hq, D) and k (*batch, Lk, Hk, D), which have been checked."""
        check_floats("bias.values", self.values)
        check_strided("bias.values", self.values)
        values, _ = split(self)
        check_device("bias.values", values.device, q.device)
        batch = tuple(q.shape[:-3])
        if values.dim() > len(batch) + 3:
            raise ValueError(f"bias.values has more batch dims than q, whose batch dims are {batch}")
        shape = (*(1,) * (len(batch) + 3 - values.dim()), *values.shape)
        check_values(shape, (*batch, q.shape[-2]), k.shape[-2], (q.shape[-3],))

    def check_covers(self, seqlen_q: int, seqlen_k: int, window: tuple[int, int] = (-1, -1)) -> None:
        """Refuse nothing: all distances have a value."""

    def __add__(self, other: object) -> NoReturn:
        _refuse_sum()

    def __radd__(self, other: object) -> NoReturn:
        _refuse_sum()


class Projected(NamedTuple):
    """A part of the scores: the product of each query, or of each key, with a row for its distance.

    Conformers and Transformer-XL, DeBERTa, Enformer and Wav2Vec2-BERT have such positions. Scale and softcap are of the
    sum, as in these models; equivalent PyTorch, with distance 0 between the last query and the last key::

        distance = torch.arange(Lk) - (torch.arange(Lq) + Lk - Lq)[:, None]
        rows = table[:, zero + distance]                                     # (H, Lq, Lk, P)
        s = torch.einsum("bihd,bjhd->bhij", q, k)
        s = s + torch.einsum("bihp,hijp->bhij", content, rows)               # of="keys": "bjhp,hijp->bhij"
        s = softmax_scale * s                                                # then softcap, masks and softmax

    No tensor of all scores is kept for the gradients, which have the shapes and dtypes of content and table. The
    gradient of the table is summed in fp32, entry by entry of the batch, and rounded once; where PyTorch makes all
    scores (see docs/biases.md), rows beyond a clamped end are added up in the dtype of the table.

    Attributes:
        content: (*batch, Lq, Hq, P), or (*batch, Lk, Hk, P) of keys; dtype of q, any strides. It is what the model
            multiplies with its positions: often q plus a learned vector. P is from 1 to 256, whatever the head dim.
        table: (Ht, n, P), dtype of q, any strides; rows are in ascending order of key minus query. Ht is 1, or the
            heads of k. Vectors of queries may also have a table for each head of q.
        zero: the index of distance 0 in the table; any integer, also one outside of the table.
        outside: the rule for distances without a row, as of `Relative`: "error", "clamp" or "zero".
        of: the side that content is of, "queries" or "keys".
        plus: another `Projected`, of the other side. Its products are added: DeBERTa has both.

    Example:
        >>> from flash_dmattn import attention, biases
        >>> q = k = v = torch.randn(2, 10, 4, 8)
        >>> table = torch.randn(4, 2 * 10 - 1, 8, requires_grad=True)  # distances from -9 to 9
        >>> attention(q, k, v, bias=biases.Projected(q, table, zero=9)).sum().backward()
        >>> table.grad.shape
        torch.Size([4, 19, 8])
    """

    content: Tensor
    table: Tensor
    zero: int
    outside: Outside = "error"
    of: Literal["queries", "keys"] = "queries"
    plus: Projected | None = None

    def dense(self, seqlen_q: int, seqlen_k: int) -> Tensor:
        """Make the product of every score, (*batch, heads of content, Lq, Lk), with a gradient.

        It is not scaled: `softmax_scale * bias.dense(Lq, Lk)` is an ordinary bias of the same call without softcap. In
        float16 it is float32, because products may be larger than the range of float16.

        Raises:
            TypeError: content or table is no tensor of floats, or zero no int.
            ValueError: content has another number of rows, or a distance has no row, and `outside` is "error".

        >>> Projected(torch.ones(1, 2, 1, 1), torch.tensor([[[1.0], [2.0], [3.0]]]), zero=1).dense(2, 2)
        tensor([[[[2., 3.],
                  [1., 2.]]]])
        """
        integer("seqlen_q", seqlen_q), integer("seqlen_k", seqlen_k)
        for name, term in self.named_terms:
            term.check_parts(name)
            needed, length = (seqlen_k, "seqlen_k") if term.of == "keys" else (seqlen_q, "seqlen_q")
            if term.content.shape[-3] != needed:
                raise ValueError(
                    f"{name}.content has {term.content.shape[-3]} rows; it needs {length} of them, {needed}"
                )
            for part, tensor in term.named_tensors:
                check_dtype(f"{name}.{part}", tensor, self.content.dtype, "bias.content")
                check_device(f"{name}.{part}", tensor.device, self.content.device, "bias.content")
        self.check_covers(seqlen_q, seqlen_k)
        if self.plus is not None:
            (*batch, _, heads, _), (*others, _, other_heads, _) = self.content.shape, self.plus.content.shape
            most, least = max(heads, other_heads), min(heads, other_heads)
            if batch != others or most % max(least, 1) != 0:
                raise ValueError(
                    f"bias.plus.content has batch {tuple(others)} and {other_heads} heads; it needs the batch of "
                    f"bias.content, {tuple(batch)}, and a multiple or a divisor of its {heads} heads"
                )
        is_half = self.content.dtype == torch.float16
        return (self.converted(lambda x: x.float()) if is_half else self).scores(seqlen_q, seqlen_k, 1.0)

    @property
    def terms(self) -> tuple[Projected, ...]:
        """This bias, and the one that is added."""
        return (self,) if self.plus is None else (self, self.plus)

    @property
    def named_terms(self) -> tuple[tuple[str, Projected], ...]:
        """The terms, with the names that messages give them."""
        return tuple(zip(("bias", "bias.plus"), self.terms))

    def scores(self, seqlen_q: int, seqlen_k: int, scale: float) -> Tensor:
        """Return `dense` times a scale, of parts that have been checked; each product is rounded once."""
        first, *others = [term._product(seqlen_q, seqlen_k, scale) for term in self.terms]
        if not others:
            return first
        total = _over_groups(first, others[0]) + _over_groups(others[0], first)
        return positions.within_range(total, total.dtype)

    def _product(self, seqlen_q: int, seqlen_k: int, scale: float) -> Tensor:
        heads = self.content.shape[-2]
        if seqlen_q == 0 or seqlen_k == 0 or self.content.numel() == 0:
            unread = (self.content.flatten()[:0].sum() + self.table.flatten()[:0].sum()) * scale
            return self.content.new_zeros(*self.content.shape[:-3], heads, seqlen_q, seqlen_k) + unread
        batch = self.content.shape[:-3]
        x = merge(self.content, len(batch)) if len(batch) != 1 else self.content
        rows = positions.rows_of_call(self.table, *self.numbers, seqlen_q, seqlen_k, self.of == "keys")
        made = positions.product(x, rows, scale)
        made = made.transpose(2, 3) if self.of == "keys" else made
        return made if len(batch) == 1 else made.unflatten(0, batch) if batch else made.squeeze(0)

    def converted(self, convert: Callable[[Any], Any]) -> Projected:
        """Return the same with other tensors, also in the one that is added."""
        plus = self.plus.converted(convert) if isinstance(self.plus, Projected) else self.plus
        return Projected(convert(self.content), convert(self.table), self.zero, self.outside, self.of, plus)

    @property
    def numbers(self) -> tuple[int, bool]:
        """The index of distance 0, and whether distances beyond the table get its ends."""
        return bounded(self.zero), self.outside == "clamp"

    @property
    def named_tensors(self) -> tuple[tuple[str, Any], ...]:
        """The tensors of this term."""
        return ("content", self.content), ("table", self.table)

    def check_parts(self, name: str = "bias") -> None:
        """Check each part by itself. Messages call the `Projected` `name`."""
        for part, tensor in self.named_tensors:
            check_floats(f"{name}.{part}", tensor)
            check_strided(f"{name}.{part}", tensor)
        if not is_int(self.zero):
            raise TypeError(
                f"{name}.zero is a {type(self.zero).__name__}; it needs to be an int, the index of distance 0"
            )
        for part, value, values in (("outside", self.outside, _OUTSIDE), ("of", self.of, _SIDES)):
            if value not in values:
                raise ValueError(f"{name}.{part} is {value!r}; it needs to be one of {', '.join(map(repr, values))}")
        content, table = tuple(self.content.shape), tuple(self.table.shape)
        if len(content) < 3:
            raise ValueError(f"{name}.content has shape {content}; it needs (*batch, {self.of}, heads, terms)")
        if len(table) != 3 or table[1] == 0:
            raise ValueError(
                f"{name}.table has shape {table}; it needs (heads, distances, terms), of one distance at least"
            )
        if content[-1] != table[2] or not 1 <= table[2] <= _MOST_TERMS:
            raise ValueError(
                f"{name}.content has {content[-1]} terms in a product and {name}.table {table[2]}; they need the same "
                f"number, from 1 to {_MOST_TERMS}"
            )
        heads = content[-2]
        if table[0] == 0 or heads % table[0] != 0:
            raise ValueError(
                f"{name}.table has {table[0]} heads and {name}.content {heads}; it needs 1, or a divisor of these"
            )
        if self.plus is None:
            return
        if not isinstance(self.plus, Projected):
            raise TypeError(f"bias.plus is a {type(self.plus).__name__}; it needs to be None or a Projected")
        joins = (
            "contents and tables of the same distances can be concatenated along their last dim, which adds products"
        )
        if name != "bias":
            raise ValueError(f"{name} has plus, a third Projected; it needs None there: {joins}")
        if self.plus.of == self.of:
            raise ValueError(f"bias.plus is another Projected of {self.of}; it needs to be of the other side: {joins}")

    def check_with(self, q: Tensor, k: Tensor) -> None:
        """Check the parts with q (*batch, Lq, Hq, D) and k (*batch, Lk, Hk, D), which have been checked."""
        for name, term in self.named_terms:
            term._check_term_with(q, k, name)

    def _check_term_with(self, q: Tensor, k: Tensor, name: str) -> None:
        self.check_parts(name)
        side, x, kind = ("k", k, "seqlen_k") if self.of == "keys" else ("q", q, "seqlen_q")
        wanted = (*x.shape[:-1], self.table.shape[2])
        for part, tensor in self.named_tensors:
            check_dtype(f"{name}.{part}", tensor, q.dtype)
            check_device(f"{name}.{part}", tensor.device, q.device)
        if tuple(self.content.shape) != tuple(wanted):
            raise ValueError(
                f"{name}.content has shape {tuple(self.content.shape)}; it needs the batch, {kind} and heads of "
                f"{side}: {tuple(wanted)}"
            )
        heads = sorted({1, k.shape[-2]} if self.of == "keys" else {1, k.shape[-2], q.shape[-2]})
        if self.table.shape[0] not in heads:
            raise ValueError(f"{name}.table has {self.table.shape[0]} heads; it needs one of {heads}")

    def check_covers(self, seqlen_q: int, seqlen_k: int, window: tuple[int, int] = (-1, -1)) -> None:
        """Refuse distances without a row that a window of `causal_window` leaves, where `outside` is "error"."""
        for name, term in self.named_terms:
            if term.outside == "error":
                check_covered(term.table.shape[1], term.zero, seqlen_q, seqlen_k, window, "rows", name)

    def __add__(self, other: object) -> NoReturn:
        _refuse_sum_of_projected()

    def __radd__(self, other: object) -> NoReturn:
        _refuse_sum_of_projected()


def _over_groups(scores: Tensor, others: Tensor) -> Tensor:
    """Repeat scores of heads of k for the heads of q that the others have."""
    return scores.repeat_interleave(max(others.shape[-3] // max(scores.shape[-3], 1), 1), -3)


def is_made(bias: object) -> TypeGuard[MadeBias]:
    """Return whether a call makes a bias as a tensor, for a few entries of its batch at a time."""
    if isinstance(bias, Relative):
        return bias.positions is not None or bias.plus is not None
    return isinstance(bias, Projected) or (isinstance(bias, Band) and bias.outside != "zero")


def fold_factors(factors: list[Tensor], batch: tuple[int, ...], dims_of: Sequence[int] = (2, 1, 1)) -> list[Tensor]:
    """Fold the batch dims of `Relative.factors` into one, of size 1 where all entries of a tensor are the same.

    `dims_of` has the number of the last dims, which stay, of the tensors of each term.
    """
    folded = []
    for n, x in enumerate(factors):
        dims = dims_of[n % len(dims_of)]
        own, rest = tuple(x.shape[:-dims]), x.shape[-dims:]
        own = (*(1,) * (len(batch) - len(own)), *own)
        if all(size == 1 for size in own):
            folded.append(x.reshape(1, *rest))
            continue
        if own != batch and x.requires_grad and x.dtype in (torch.float16, torch.bfloat16):
            x = x.float()  # the gradient is summed over the expanded dims, and rounded once
        folded.append(x.expand(*batch, *rest).reshape(math.prod(batch), *rest))
    return folded


_SIDES = ("queries", "keys")
_MOST_TERMS = 256  # a tile of so many fits in the memory of an SM


MadeBias = Projected | Relative | Band


class Lowered(NamedTuple):
    """A call that makes its bias, as a call with a tensor."""

    q: Tensor
    k: Tensor
    bias: Tensor
    raw_flags: RawFlags


def kind_of(bias: MadeBias) -> str:
    """Return the name of a bias that a call makes, for messages."""
    more = {Relative: " with positions", Band: " that clamps"}
    return f"{type(bias).__name__}{more.get(type(bias), '')}"


def refuse_layouts(bias: MadeBias, q: object, mask: object, sequences: object) -> None:
    """Refuse sequences and lists in a call that makes its bias."""
    if sequences is not None or (isinstance(q, Tensor) and q.is_nested):
        raise TypeError(
            f"bias is a {kind_of(bias)} with sequences; it needs to be None or another bias there: pad q, k and v to "
            "one length, and hide the padding by a mask"
        )
    if getattr(mask, "form", None) == "lists":
        raise TypeError(
            f"bias is a {kind_of(bias)} with lists; it needs to be a ListBias there, of values for their entries, or "
            "mask a bool tensor: mask.dense()"
        )


def check_made(bias: MadeBias, q: Tensor, k: Tensor, mask: Any, raw_flags: RawFlags) -> None:
    """Check a bias that a call makes with the other arguments; q and k are tensors of 4 dims or more."""
    limits = mask if hasattr(mask, "window_size") else raw_flags  # a prepared mask has its limits
    window = causal_window(check_flag("is_causal", limits.is_causal), check_window(limits.window_size))
    for name, term in bias.named_terms:
        for part, x in term.named_tensors:
            if is_dtensor(x):
                raise TypeError(
                    f"{name}.{part} is a DTensor, and q is none; it needs to be a tensor: {part}.to_local()"
                )
    bias.check_with(q, k)
    bias.check_covers(q.shape[-3], k.shape[-3], window)


def scale_of(q: Tensor, raw_flags: RawFlags) -> float:
    """Return the factor of the scores of a call."""
    scale = raw_flags.softmax_scale
    return int(q.shape[-1]) ** -0.5 if scale is None else check_number("softmax_scale", scale)


def lower(bias: MadeBias, q: Tensor, k: Tensor, raw_flags: RawFlags) -> Lowered:
    """Make a tensor of a bias, in PyTorch, with a gradient.

    With a `Projected` a softcap is of the sum of both products. So all scores are made here then, and the call only
    adds them: it has q and k of zeros, and no softcap.
    """
    lengths = q.shape[-3], k.shape[-3]
    if not isinstance(bias, Projected):
        return Lowered(q, k, bias.dense(*lengths), raw_flags)
    scale = scale_of(q, raw_flags)
    softcap = check_softcap(raw_flags.softcap, raw_flags.softmax_scale)
    if softcap == 0:
        return Lowered(q, k, bias.scores(*lengths, scale), raw_flags)
    wide = torch.promote_types(q.dtype, torch.float32)
    made = bias.converted(lambda x: x.to(wide)).scores(*lengths, scale)
    group = q.shape[-2] // max(k.shape[-2], 1)
    keys = k.to(wide).repeat_interleave(group, -2)
    made = made.repeat_interleave(q.shape[-2] // made.shape[-3], -3)
    with positions.without_autocast(q):
        s = torch.einsum("...ihd,...jhd->...hij", q.to(wide), keys) * scale + made
    capped = softcap * torch.tanh(s / softcap)
    flags = replaced(raw_flags, softmax_scale=0.0, softcap=0.0)
    return Lowered(torch.zeros_like(q), torch.zeros_like(k), capped, flags)


class ListBias(NamedTuple):
    """A bias with one value for each entry of a mask of lists; pairs that no entry chose have none.

    Equivalent PyTorch, for single keys, and lists that have each key once::

        bias = torch.zeros(B, H, Lq, Lk).scatter(-1, index, values)  # the mask allows only the keys in index

    With blocks of keys every key of a block gets the value of its entry. If a list names a key twice, the value of the
    first entry counts. The gradient of `values` has their shape and dtype; it is 0 for entries that no query uses.

    Attributes:
        values: (*batch, H, Lq, K), or (*batch, H, R, K) with one row for each of the R lists of a head; any float
            dtype, any strides. Entries are in the order of the index that made the lists. H is 1, the heads of k or the
            heads of q; batch dims are 1 or full.
        bias: a tensor, the bias of an ordinary call, which is added to the values in fp32. With blocks of keys it needs
            to have one value per query; with sequences it needs to be None.

    Example:
        >>> import torch
        >>> from flash_dmattn import attention, biases
        >>> from flash_dmattn.masks import PreparedMask
        >>> q = k = v = torch.randn(1, 4, 1, 8)
        >>> lists = PreparedMask.from_lists(torch.tensor([[0, -1], [1, 0], [0, 2], [1, 3]]), seqlen_k=4)
        >>> values = torch.zeros(1, 1, 4, 2, requires_grad=True)
        >>> attention(q, k, v, lists, biases.ListBias(values)).sum().backward()
        >>> values.grad.shape
        torch.Size([1, 1, 4, 2])
    """

    values: Tensor
    bias: Tensor | None = None

    def dense(self, mask: PreparedMask) -> Tensor:
        """Make the matrix of these values, for calls that need it: (*batch, H, Lq, Lk), 0 elsewhere; with a gradient.

        Args:
            mask: from `PreparedMask.from_lists` or `from_topk_lists`.

        Raises:
            TypeError: the mask has no lists, or values or the bias are no tensors.
            ValueError: the values have another shape than the lists, or the bias does not broadcast to the result.
        """
        lists = require_lists(mask)
        check_tensor("bias.values", self.values, _FLOAT)
        if self._has_batch_dims(lists):
            one, folded, batch_dims = self._fold(lists)
            return one.dense(folded).unflatten(0, batch_dims)
        rows, places = lists.sizes_of_values
        if not 2 <= self.values.dim() <= 4 or self.values.shape[-2] not in rows or self.values.shape[-1] != places:
            raise ValueError(
                f"bias.values has shape {tuple(self.values.shape)}; it needs (batch, heads, "
                f"{' or '.join(map(str, sorted(set(rows))))}, {places}), a value for each entry of the lists"
            )
        slots = slot_table(lists.as_lists, lists.seqlen_q, lists.seqlen_k)
        made = dense_bias(as_scores(self.values), slots, lists.block_size[0])
        if self.bias is None:
            return made
        check_floats("bias.bias", self.bias)
        bias = as_scores(self.bias)
        batch, heads, *lengths = made.shape
        if (
            not 2 <= self.bias.dim() <= 4
            or not _broadcast(bias.shape[0], batch)
            or not _broadcast(bias.shape[1], heads, divides=True)
            or not all(own in (1, size) for own, size in zip(bias.shape[2:], lengths, strict=True))
        ):
            raise ValueError(
                f"bias.bias has shape {tuple(self.bias.shape)}; it needs to broadcast to (batch, heads, seqlen_q, "
                f"seqlen_k), {tuple(made.shape)}"
            )
        return _sum(made, bias)

    def with_bias(self, mask: Any) -> Tensor:
        """Return the values plus the value of the ordinary bias for the key of each entry.

        Raises:
            TypeError: the mask has no lists, or values or the bias are no tensors.
            ValueError: the bias has a value per key and lists have blocks of keys, or its shape is another one, or the
                lists are of sequences.
        """
        lists = require_lists(mask)
        check_tensor("bias.values", self.values, _FLOAT)
        if self.values.dim() < 2:
            raise ValueError(
                f"bias.values has shape {tuple(self.values.shape)}; it needs (*batch, heads, rows, entries)"
            )
        if self.bias is None:
            return self.values
        check_floats("bias.bias", self.bias)
        if lists.sequences is not None:
            raise ValueError(
                "bias.bias is set with lists of sequences; it needs to be None: add what it has for lists.index to "
                "bias.values"
            )
        if self.bias.dim() < 2:
            raise ValueError(f"bias.bias has shape {tuple(self.bias.shape)}; it needs (*batch, heads, Lq, Lk)")
        if self._has_batch_dims(lists):
            one, folded, batch_dims = self._fold(lists)
            return one.with_bias(folded).unflatten(0, batch_dims)
        bias, block_k = as_scores(self.bias), lists.block_size[1]
        shapes = (as_scores(self.values).shape, bias.shape, lists.shape)
        if not _broadcast(*(x[0] for x in shapes)) or not _broadcast(*(x[1] for x in shapes), divides=True):
            raise ValueError(
                f"bias.bias has shape {tuple(self.bias.shape)} with bias.values of {tuple(self.values.shape)} and "
                f"lists of {lists.shape[1]} heads for a batch of {lists.shape[0]}; it needs a batch and heads of 1, or "
                "of theirs"
            )
        if bias.shape[-1] == 1:
            added = bias
        elif block_k > 1:
            raise ValueError(
                f"bias.bias has shape {tuple(self.bias.shape)} with lists of blocks of {block_k} keys; it needs one "
                "value per query, (..., Lq, 1), or lists of single keys"
            )
        elif bias.shape[-1] != lists.seqlen_k or bias.shape[-2] not in (1, lists.seqlen_q):
            raise ValueError(
                f"bias.bias has shape {tuple(self.bias.shape)}; it needs (..., 1 or {lists.seqlen_q}, 1 or "
                f"{lists.seqlen_k})"
            )
        else:
            added = lists.gather(bias)
        values = as_scores(self.values)
        if added.shape[2] not in (1, values.shape[2]):
            values, added = (by_query(x, lists.seqlen_q, lists.block_size[0]) for x in (values, added))
        return _sum(values, added)

    def _has_batch_dims(self, lists: ListMask) -> bool:
        return max(x.dim() for x in self if isinstance(x, Tensor)) > 4 or lists.leading is not None

    def _fold(self, lists: ListMask) -> tuple[ListBias, ListMask, tuple[int, ...]]:
        """Fold the batch dims of values, bias and lists into one; return also these dims."""
        tensors = [x for x in self if isinstance(x, Tensor)]
        shapes = [*(tuple(x.shape[:-3]) for x in tensors), lists.batch_dims]
        try:
            dims = tuple(torch.broadcast_shapes(*shapes))
        except RuntimeError:
            bias_dims = "" if self.bias is None else f", bias.bias {shapes[1]}"
            raise ValueError(
                f"bias.values has batch dims {shapes[0]}{bias_dims} and the lists {shapes[-1]}; each needs to be 1 or "
                "the same"
            ) from None
        one = ListBias(*(x.expand(*dims, *x[(None,) * (3 - x.dim())].shape[-3:]).flatten(0, -4) for x in tensors))
        return one, replace(lists.expand_batch(dims), leading=None), dims


def _sum(values: Tensor, bias: Tensor) -> Tensor:
    """Add two tensors of 4 dims, with the heads of either, in fp32 at least: 16 bits would round the sum."""
    heads = max(values.shape[1], bias.shape[1])
    dtype = torch.promote_types(torch.promote_types(values.dtype, bias.dtype), torch.float32)
    return repeat_heads(values, heads).to(dtype) + repeat_heads(bias, heads)


def require_lists(mask: Any) -> ListMask:
    """Return the mask of a call with a `ListBias`; refuse one without lists."""
    if getattr(mask, "form", None) != "lists":
        has = "None" if mask is None else f"a {type(mask).__name__}"
        raise TypeError(
            f"mask is {has} and bias is a ListBias, of values for entries of lists; mask needs to be a PreparedMask of "
            "from_lists or from_topk_lists"
        )
    lists: ListMask = mask
    return lists


Bias = Tensor | Relative | Band | Projected | ListBias


class ByDistance(NamedTuple):
    """The settings of a bias by distance; its values are an argument of their own."""

    zero: int
    outside: Outside
    has_rows: bool  # whether there is one row of values per query, as in a `Band`


def split(bias: Any, name: str = "bias") -> tuple[Any, ByDistance | None]:
    """Split a bias by distance into its values, (*batch, Hv, 1 or Lq, n), and its settings; return a tensor as is.

    Positions are left out. Messages call the bias `name`.
    """
    if not isinstance(bias, (Relative, Band)):
        return bias, None
    is_band = isinstance(bias, Band)
    kind, values, zero = type(bias).__name__, bias.values, bias.zero
    check_tensor(f"{name}.values", values, _FLOAT)
    if not is_int(zero):
        raise TypeError(f"{name}.zero is a {type(zero).__name__}; it needs to be an int, the index of distance 0")
    outside: Outside = bias.outside
    rules = _OUTSIDE[1:] if is_band else _OUTSIDE
    if outside not in rules:
        raise ValueError(f"{name}.outside is {outside!r}; it needs to be one of {', '.join(map(repr, rules))}")
    least, dims = (3, "heads, seqlen_q, distances") if is_band else (2, "heads, distances")
    if values.dim() < least:
        raise ValueError(
            f"{name}.values has {values.dim()} dimensions, shape {tuple(values.shape)}; a {kind} needs {least} or "
            f"more, read from the right as (*batch, {dims})"
        )
    if values.shape[-1] == 0:
        raise ValueError(f"{name}.values has shape {tuple(values.shape)}, of no distance; it needs one at least")
    return values if is_band else values.unsqueeze(-2), ByDistance(bounded(zero), outside, is_band)


def _broadcast(*sizes: int, divides: bool = False) -> bool:
    """Return whether sizes are 1 or equal; with `divides` also if they divide the largest, as heads of k do."""
    most = max(sizes)
    return all(x in (1, most) or (divides and x > 0 and most % x == 0) for x in sizes)


def require_dense_bias(bias: object, where: str) -> None:
    """Refuse a bias by distance or for lists where a call supports only tensors, and name the tensor to pass."""
    if isinstance(bias, (Relative, Band, ListBias, Projected)):
        kind = kind_of(bias) if is_made(bias) else type(bias).__name__
        scale = "softmax_scale * " if isinstance(bias, Projected) else ""
        raise TypeError(
            f"bias is a {kind} {where}; it needs to be a tensor there, the rows of this rank of {scale}"
            f"bias.dense({'mask' if isinstance(bias, ListBias) else 'seqlen_q, seqlen_k'})"
        )


def _matrix(bias: Relative | Band, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Make the matrix of a bias by distance, (*batch, Hv, Lq, Lk)."""
    values, numbers = split(bias)
    assert numbers is not None
    integer("seqlen_q", seqlen_q)
    integer("seqlen_k", seqlen_k)
    if numbers.has_rows and values.shape[-2] != seqlen_q:
        raise ValueError(f"bias.values has {values.shape[-2]} queries; it needs seqlen_q of them, {seqlen_q}")
    if numbers.outside == "error":
        check_covered(values.shape[-1], numbers.zero, seqlen_q, seqlen_k)
    four = values.reshape(math.prod(values.shape[:-3]), *values.shape[-3:])
    made = distances.dense(distances.Distances(four, numbers.zero, numbers.outside == "clamp"), seqlen_q, seqlen_k)
    return made.reshape(*values.shape[:-2], seqlen_q, seqlen_k)


def check_covered(
    number: int,
    zero: int,
    seqlen_q: int,
    seqlen_k: int,
    window: tuple[int, int] = (-1, -1),
    kind: Literal["values", "rows"] = "values",
    name: str = "bias",
) -> None:
    """Refuse distances of a call without a value, or a row; a window of `causal_window` hides those beyond it."""
    left, right = window
    low = 1 - seqlen_k if left < 0 else max(1 - seqlen_k, -left)
    high = seqlen_q - 1 if right < 0 else min(seqlen_q - 1, right)
    has_pairs = seqlen_q > 0 and seqlen_k > 0
    if has_pairs and low <= high and (zero + low < 0 or zero + high >= number):
        raise ValueError(
            f"{name} has {kind} for distances {-zero} to {number - 1 - zero}; it needs those of the call, {low} to "
            f'{high} (or outside="clamp", or "zero")'
        )


def t5(weight: Tensor, *, is_bidirectional: bool = True, max_distance: int = 128) -> Relative:
    """Make T5's bias from its table; it has the same size for all lengths.

    Args:
        weight: (buckets, H), any float dtype. T5's checkpoints call it `relative_attention_bias.weight`.
        is_bidirectional: whether keys after the query have separate buckets, as in an encoder.
        max_distance: all distances from here on are in the last bucket.

    Returns:
        A `Relative` with values (H, 2 * max_distance + 1), or (H, max_distance + 1) unless `is_bidirectional`.

    Raises:
        TypeError: `weight` is no tensor of floats, `max_distance` no int, or `is_bidirectional` no bool.
        ValueError: `weight` has another shape, too few buckets, or an odd number with `is_bidirectional`, or
            `max_distance` is too small for them.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", 2020.

    Example:
        >>> weight = torch.zeros(32, 4, requires_grad=True)
        >>> t5(weight).values.shape
        torch.Size([4, 257])
    """
    check_floats("weight", weight)
    least = 4 if is_bidirectional else 2
    if weight.dim() != 2 or weight.shape[0] < least:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; it needs (buckets, heads), {least} buckets or more")
    check_flag("is_bidirectional", is_bidirectional)
    if is_bidirectional and weight.shape[0] % 2:
        raise ValueError(f"weight has {weight.shape[0]} buckets; with is_bidirectional it needs an even number")
    integer("max_distance", max_distance, weight.shape[0] // least + 1)
    reach = torch.arange(-max_distance, (max_distance if is_bidirectional else 0) + 1, device=weight.device)
    rows = t5_buckets(reach, weight.shape[0], max_distance, is_bidirectional)
    return Relative(F.embedding(rows, weight).T, max_distance, "clamp")


def t5_buckets(distance: Tensor, num_buckets: int, max_distance: int, is_bidirectional: bool = True) -> Tensor:
    """Find the row of T5's table for each distance, the key's position minus the query's.

    >>> t5_buckets(torch.tensor([-200, -9, -8, -7, 0, 1, 8, 200]), 32, 128).tolist()
    [15, 8, 8, 7, 0, 17, 24, 31]
    """
    after = torch.zeros_like(distance)
    if is_bidirectional:
        num_buckets //= 2
        after = (distance > 0).long() * num_buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = num_buckets // 2
    # The first `exact` buckets have one distance each; the widths of the others grow by a factor. In fp32, as in T5.
    scale = (num_buckets - exact) / math.log(max_distance / exact)
    far = exact + ((distance.float().clamp(min=1) / exact).log() * scale).long()
    return after + torch.where(distance < exact, distance, far.clamp(max=num_buckets - 1))


def alibi(slopes: Tensor, seqlen_q: int, seqlen_k: int | None = None) -> Relative:
    """Make ALiBi's bias, -slope * |distance|, with a gradient of the slopes.

    In causal attention a bias with one value per key gives the same result and costs less: see docs/biases.md.

    Args:
        slopes: (H,), for example of `nn.alibi_slopes`.
        seqlen_q: number of queries.
        seqlen_k: number of keys; as many as queries by default.

    Raises:
        TypeError: `slopes` is no tensor of floats, or a length no int.
        ValueError: `slopes` has another shape, or a length is negative.

    Source: Press et al., "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation",
        2022.

    Example:
        >>> alibi(torch.tensor([0.5]), 2, 3).values
        tensor([[-1.0000, -0.5000, -0.0000, -0.5000]])
    """
    check_floats("slopes", slopes)
    if slopes.dim() != 1:
        raise ValueError(f"slopes has shape {tuple(slopes.shape)}; it needs (heads,)")
    integer("seqlen_q", seqlen_q)
    low = 1 - max(seqlen_q if seqlen_k is None else integer("seqlen_k", seqlen_k), 1)
    slopes = slopes.to(torch.promote_types(slopes.dtype, torch.float32))
    return from_function(lambda distance: -slopes[:, None] * distance.abs(), low, max(seqlen_q, 1) - 1, slopes.device)


def from_function(
    function: Callable[[Tensor], Tensor],
    low: int,
    high: int,
    device: torch.device | str | None = None,
    outside: Outside = "error",
) -> Relative:
    """Make a bias from a function of the distance; gradients go through the function.

    Args:
        function: gets the distances in fp32, (n,), ascending. It returns the values, (H, n) or (n,).
        low, high: the least and the greatest distance. With `outside="error"` a call needs all from `1 - seqlen_k`
            to `seqlen_q - 1`.
        device: of the distances.
        outside: see `Relative`.

    Raises:
        TypeError: `function` is no function, or returns no tensor; `low` or `high` is no int.
        ValueError: `low` is above `high`, or `function` returns another number of values.

    Example:
        >>> from_function(lambda distance: -distance.abs().log1p(), -1, 2).values  # KERPLE, one head
        tensor([[-0.6931, -0.0000, -0.6931, -1.0986]])
    """
    for name, x in (("low", low), ("high", high)):
        if not is_int(x):
            raise TypeError(f"{name} is {x!r} ({type(x).__name__}); it needs to be an int")
    if low > high:
        raise ValueError(f"low is {low} and high is {high}; low needs to be at most high")
    if not callable(function):
        raise TypeError(f"function is a {type(function).__name__}; it needs to be a function of the distances")
    values = function(torch.arange(low, high + 1, device=device).float())
    if not isinstance(values, Tensor):
        raise TypeError(f"function returns a {type(values).__name__}; it needs to return {_FLOAT}")
    if values.dim() == 0 or values.shape[-1] != high + 1 - low:
        raise ValueError(
            f"function returns shape {tuple(values.shape)}; it needs to return (heads, {high + 1 - low}) or "
            f"({high + 1 - low},), a value for each distance from {low} to {high}"
        )
    return Relative(values[None] if values.dim() == 1 else values, -low, outside)
