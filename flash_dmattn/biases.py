"""Biases that replace a matrix: one value for each head and distance, or for each entry of a mask of lists.

Pass a `Relative`, a `Band` or a `ListBias` as `bias=`. The (Lq, Lk) matrix is then never allocated, in either pass, and
the gradient of the values is summed in fp32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from .masks.arguments import integer
from .problem import Outside, as_scores, bounded, check_flag, check_floats, check_tensor, is_int
from .reference import distances
from .reference.lists import by_query, dense_bias, repeat_heads, slot_table

if TYPE_CHECKING:
    from .masks import PreparedMask
    from .masks.prepared.storage import ListMask

__all__ = ["Band", "ListBias", "Relative", "alibi", "from_function", "t5", "t5_buckets"]

_OUTSIDE = ("error", "clamp", "zero")
_FLOAT = "a floating-point torch.Tensor"  # for messages


def _refuse_sum() -> NoReturn:
    """Refuse the sum of a bias by distance and a tensor; Python's error would not say what to do instead."""
    raise TypeError("a bias by distance is no tensor; to add to it, make one: bias.dense(seqlen_q, seqlen_k)")


class Relative(NamedTuple):
    """A bias with one value for each head and distance.

    Equivalent PyTorch, with distance 0 between the last query and the last key, as everywhere in `attention`::

        distance = torch.arange(Lk) - (torch.arange(Lq) + Lk - Lq)[:, None]
        bias = values[..., zero + distance]                                  # (Hv, Lq, Lk) or (Bv, Hv, Lq, Lk)

    Attributes:
        values: (Hv, n) or (*batch, Hv, n), any float dtype, any strides. Hv is 1, the heads of k or the heads of q;
            batch dims are 1 or full. -inf masks. The gradient has its shape and dtype.
        zero: the index of distance 0 in `values`; any integer, also one outside of the values.
        outside: the rule for distances without a value. "error" refuses a call that has such distances, except where
            causality or a window hides them; "clamp" gives them the first or the last value; "zero" gives them 0.

    Example:
        >>> from flash_dmattn import attention, biases
        >>> q = k = v = torch.randn(2, 10, 4, 8)
        >>> values = torch.zeros(4, 2 * 3 + 1, requires_grad=True)  # distances -3 to 3; the ends are for all others
        >>> out = attention(q, k, v, bias=biases.Relative(values, zero=3, outside="clamp"))
        >>> out.sum().backward()
        >>> values.grad.shape
        torch.Size([4, 7])
    """

    values: Tensor
    zero: int
    outside: Outside = "error"

    def dense(self, seqlen_q: int, seqlen_k: int) -> Tensor:
        """Make the matrix of these values, for calls that need it: (*batch, Hv, Lq, Lk); with a gradient.

        Raises:
            ValueError: a distance has no value, and `outside` is "error".

        >>> Relative(torch.tensor([[1, 2, 3]]), zero=1, outside="clamp").dense(2, 3)
        tensor([[[1, 2, 3],
                 [1, 1, 2]]])
        """
        return _matrix(self, seqlen_q, seqlen_k)

    def __add__(self, other: object) -> NoReturn:
        _refuse_sum()

    def __radd__(self, other: object) -> NoReturn:
        _refuse_sum()


class Band(NamedTuple):
    """A bias with one value for each head, query and distance, in a band of distances; it is 0 outside of the band.

    Equivalent PyTorch: as for `Relative` with `outside="zero"`, and a row of values for each query.

    Attributes:
        values: (H, Lq, n) or (*batch, H, Lq, n), any float dtype, any strides; H and batch dims as for `Relative`. The
            values of a query are in ascending order of keys.
        zero: the index of distance 0.

    Example:
        >>> Band(torch.tensor([[[1, 2], [3, 4], [5, 6]]]), zero=1).dense(3, 3)  # values of distances -1 and 0
        tensor([[[2, 0, 0],
                 [3, 4, 0],
                 [0, 5, 6]]])
    """

    values: Tensor
    zero: int

    def dense(self, seqlen_q: int, seqlen_k: int) -> Tensor:
        """Make the matrix of these values, for calls that need it: (*batch, H, Lq, Lk); with a gradient.

        Raises:
            ValueError: the values have other than seqlen_q rows.
        """
        return _matrix(self, seqlen_q, seqlen_k)

    def __add__(self, other: object) -> NoReturn:
        _refuse_sum()

    def __radd__(self, other: object) -> NoReturn:
        _refuse_sum()


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


Bias = Tensor | Relative | Band | ListBias


class ByDistance(NamedTuple):
    """The settings of a bias by distance; its values are an argument of their own."""

    zero: int
    outside: Outside
    has_rows: bool  # whether there is one row of values per query, as in a `Band`


def split(bias: Any) -> tuple[Any, ByDistance | None]:
    """Split a bias by distance into its values, (*batch, Hv, 1 or Lq, n), and its settings; return a tensor as is."""
    if not isinstance(bias, (Relative, Band)):
        return bias, None
    is_band = isinstance(bias, Band)
    kind, values, zero = type(bias).__name__, bias.values, bias.zero
    check_tensor("bias.values", values, _FLOAT)
    if not is_int(zero):
        raise TypeError(f"bias.zero is a {type(zero).__name__}; it needs to be an int, the index of distance 0")
    outside: Outside = "zero" if isinstance(bias, Band) else bias.outside
    if outside not in _OUTSIDE:
        raise ValueError(f"bias.outside is {outside!r}; it needs to be one of {', '.join(map(repr, _OUTSIDE))}")
    least, dims = (3, "heads, seqlen_q, distances") if is_band else (2, "heads, distances")
    if values.dim() < least:
        raise ValueError(
            f"bias.values has {values.dim()} dimensions, shape {tuple(values.shape)}; a {kind} needs {least} or more, "
            f"read from the right as (*batch, {dims})"
        )
    if values.shape[-1] == 0:
        raise ValueError(f"bias.values has shape {tuple(values.shape)}, of no distance; it needs one at least")
    return values if is_band else values.unsqueeze(-2), ByDistance(bounded(zero), outside, is_band)


def _broadcast(*sizes: int, divides: bool = False) -> bool:
    """Return whether sizes are 1 or equal; with `divides` also if they divide the largest, as heads of k do."""
    most = max(sizes)
    return all(x in (1, most) or (divides and x > 0 and most % x == 0) for x in sizes)


def require_dense_bias(bias: object, where: str) -> None:
    """Refuse a bias by distance or for lists where a call supports only tensors, and name the tensor to pass."""
    if isinstance(bias, (Relative, Band, ListBias)):
        raise TypeError(
            f"bias is a {type(bias).__name__} {where}; it needs to be a tensor there, the rows of this rank of "
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


def check_covered(number: int, zero: int, seqlen_q: int, seqlen_k: int, window: tuple[int, int] = (-1, -1)) -> None:
    """Refuse distances of a call without a value; a window of `causal_window` hides those beyond it."""
    left, right = window
    low = 1 - seqlen_k if left < 0 else max(1 - seqlen_k, -left)
    high = seqlen_q - 1 if right < 0 else min(seqlen_q - 1, right)
    has_pairs = seqlen_q > 0 and seqlen_k > 0
    if has_pairs and low <= high and (zero + low < 0 or zero + high >= number):
        raise ValueError(
            f"bias has values for distances {-zero} to {number - 1 - zero}; it needs those of the call, {low} to "
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
