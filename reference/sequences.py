"""Attention over sequences of different lengths as a loop: one call for each sequence, on its own rows.

`forward` and `backward` call the chunked passes of `eager.py`, once for consecutive sequences of equal lengths.
`forward_tangents` and `backward_tangents` do so with the passes of `tangents.py`. `attention` and `gradients` call the
plain formula, and are differentiable. All read lengths on the host, so they wait for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_dmattn.definition import listed

from . import eager, formula
from . import tangents as forward_mode
from .chunks import is_capturing
from .distances import ChunkBias, values_of, with_values
from .dropout import Dropout
from .lists import Lists, ListValues, dense_bias, slot_table, value_gradient
from .masks import AnyMask, TileBits
from .tangents import Cotangents, Tangents


class Sequence(NamedTuple):
    """One sequence, or some consecutive ones of equal lengths: the entries of a batch."""

    number: int
    first_q: int
    seqlen_q: int
    first_k: int
    seqlen_k: int
    how_many: int = 1

    @property
    def entries(self) -> slice:
        """The numbers of the sequences."""
        return slice(self.number, self.number + self.how_many)


class Batch:
    """The sequences of a call, and the slices of its tensors for a sequence.

    Args:
        bounds: int32 (S, 4): first query, number of queries, first key and number of keys of each sequence.
        block_table: int32 (S, P), the pages of keys, or None.
        packs_queries, packs_keys: whether q is packed, (1, Tq, Hq, D), or padded, (S, Lq, Hq, D); k likewise.
        mask_packing, bias_packing: which dim of a mask or a bias is packed: "none", "queries" or "keys". A mask may
            also be a "tree", (S or 1, 1, n, n): it masks the new tokens of each sequence, its queries and last keys.

    Raises:
        RuntimeError: a CUDA graph is being captured.
    """

    def __init__(
        self,
        bounds: Tensor,
        block_table: Tensor | None,
        packs_queries: bool,
        packs_keys: bool,
        mask_packing: str = "none",
        bias_packing: str = "none",
    ) -> None:
        if is_capturing(bounds.device):
            raise RuntimeError(
                "eager and reference read the lengths of sequences on the host, which cannot be captured in a CUDA "
                "graph; another backend can"
            )
        if type(bounds) is not Tensor:  # torch's own error would only name an operator
            raise RuntimeError(
                'backend="reference" reads the lengths of sequences, and fake tensors have no values; '
                'backend="eager" gives shapes without them'
            )
        self._table = block_table
        self._packs_queries, self._packs_keys = packs_queries, packs_keys
        self.packing = {"mask": mask_packing, "bias": bias_packing}
        self.sequences = [Sequence(number, *row) for number, row in enumerate(listed(bounds))]

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.sequences)

    def runs(self) -> Iterator[Sequence]:
        """Yield the sequences; consecutive ones of equal lengths that are adjacent in memory are one."""
        start = 0
        for stop in range(1, len(self.sequences) + 1):
            if stop == len(self.sequences) or not self._continues(*self.sequences[stop - 1 : stop + 1]):
                yield self.sequences[start]._replace(how_many=stop - start)
                start = stop

    def _continues(self, one: Sequence, other: Sequence) -> bool:
        """Return whether the second sequence has the lengths of the first and follows it in memory."""
        return (
            one.seqlen_q == other.seqlen_q
            and one.seqlen_k == other.seqlen_k
            and (not self._packs_queries or one.first_q + one.seqlen_q == other.first_q)
            and (not self._packs_keys or one.first_k + one.seqlen_k == other.first_k)
        )

    def fills(self, q: Tensor, s: Sequence) -> bool:
        """Return whether every row of q is a query of these sequences, in the layout of a call with only them."""
        return not self._packs_queries and (s.how_many, s.seqlen_q) == q.shape[:2] and s.seqlen_q > 0

    def queries(self, x: Tensor, s: Sequence) -> Tensor:
        """Return the rows of sequences in a tensor shaped as q, an entry for each."""
        if self._packs_queries:
            return _unpacked(x[0], 0, s.first_q, s.how_many, s.seqlen_q)
        return x[s.entries, : s.seqlen_q]

    def rows(self, x: Tensor, s: Sequence) -> Tensor:
        """Return the rows of sequences in a tensor shaped as lse, (B, Hq, Lq)."""
        if self._packs_queries:
            return _unpacked(x[0], 1, s.first_q, s.how_many, s.seqlen_q).transpose(0, 1)
        return x[s.entries, :, : s.seqlen_q]

    def keys(self, x: Tensor, s: Sequence) -> Tensor:
        """Return the rows of sequences in a tensor shaped as k; a copy if they are in pages."""
        if self._packs_keys:
            return _unpacked(x[0], 0, s.first_k, s.how_many, s.seqlen_k)
        if self._table is None:
            return x[s.entries, : s.seqlen_k]
        pages = self._table[s.entries, : -(-s.seqlen_k // max(x.shape[1], 1))].long().clamp(0, max(x.shape[0] - 1, 0))
        return x[pages].flatten(1, 2)[:, : s.seqlen_k]

    def mask(self, x: AnyMask, s: Sequence) -> AnyMask:
        """Return the part of a mask for sequences; dims of size 1 are kept."""
        if isinstance(x, Tensor):
            return self.scores("mask", x, s)
        if isinstance(x, Lists):
            return x._replace(keys=self.by_query("mask", x.keys, s), slots=self.by_query("mask", x.slots, s))
        # Rows of bits are consecutive, without a batch dim, also for padded sequences.
        assert isinstance(x, TileBits)
        if self._packs_queries:
            return TileBits(_unpacked(x.bits[0], 1, s.first_q, s.how_many, s.seqlen_q).transpose(0, 1))
        by_slot = x.bits[0].unflatten(1, (len(self.sequences), -1))
        return TileBits(by_slot[:, s.entries, : s.seqlen_q].transpose(0, 1))

    def scores(self, name: str, x: Tensor, s: Sequence) -> Tensor:
        """Return the part of a mask or a bias for sequences; dims of size 1 are kept."""
        packing = self.packing[name]
        if packing == "tree":
            return self._tree(x, s)
        if packing == "none":
            entries = s.entries if x.shape[0] > 1 else slice(None)
            queries = slice(s.seqlen_q) if x.shape[2] > 1 else slice(None)
            return x[entries, :, queries, : s.seqlen_k if x.shape[3] > 1 else None]
        if packing == "queries":
            keys = slice(s.seqlen_k) if x.shape[3] > 1 else slice(None)
            if x.shape[2] == 1:
                return x[..., keys]
            return _unpacked(x[0], 1, s.first_q, s.how_many, s.seqlen_q).transpose(0, 1)[..., keys]
        return _unpacked(x[0], 2, s.first_k, s.how_many, s.seqlen_k).permute(2, 0, 1, 3) if x.shape[3] > 1 else x

    def bias(self, x: ChunkBias, s: Sequence) -> ChunkBias:
        """Return the part of a bias for sequences."""
        if isinstance(x, Tensor):
            return self.scores("bias", x, s)
        if isinstance(x, ListValues):
            lists = self.mask(x.lists, s)
            assert isinstance(lists, Lists)
            x = x._replace(lists=lists)
        return x._replace(values=self.by_query("bias", x.values, s))

    def by_query(self, name: str, x: Tensor, s: Sequence) -> Tensor:
        """Return what sequences read of lists, or of values by distance or of lists, (S or 1, H, 1 or queries, n)."""
        if self.packing[name] == "queries":
            return _unpacked(x[0], 1, s.first_q, s.how_many, s.seqlen_q).transpose(0, 1) if x.shape[2] > 1 else x
        entries = s.entries if x.shape[0] > 1 else slice(None)
        return x[entries, :, : s.seqlen_q if x.shape[2] > 1 else None]

    @staticmethod
    def _tree(x: Tensor, s: Sequence) -> Tensor:
        tree = x[s.entries] if x.shape[0] > 1 else x
        allowed = tree.new_ones(tree.shape[0], 1, s.seqlen_q, s.seqlen_k)
        tail = min(s.seqlen_q, s.seqlen_k)  # the number of new tokens that have a key
        allowed[..., s.seqlen_k - tail :] = tree[:, :, : s.seqlen_q, s.seqlen_q - tail : s.seqlen_q]
        return allowed

    def inputs(
        self, s: Sequence, q: Tensor, k: Tensor, v: Tensor, mask: AnyMask | None, bias: ChunkBias | None
    ) -> tuple[Tensor, Tensor, Tensor, Any, Any]:
        """Return the inputs of the call for one sequence."""
        return (
            self.queries(q, s),
            self.keys(k, s),
            self.keys(v, s),
            None if mask is None else self.mask(mask, s),
            None if bias is None else self.bias(bias, s),
        )


@torch.no_grad()
def forward(
    batch: Batch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AnyMask | None,
    bias: ChunkBias | None,
    sink: Tensor | None = None,
    dropout: Dropout | None = None,
    max_scores: bool = False,
    entropy: bool = False,
    **flags: Any,
) -> tuple[Tensor, ...]:
    """Return out and lse of all rows, by one :func:`eager.forward` per run; 0 and -inf in rows of no sequence.

    Args:
        batch: the layout of the sequences.
        q, k, v: 4-D, packed or padded as `batch` says.
        mask, bias: 4-D, each by position or packed, as `batch` says; or a bias by distance within each sequence.
        sink, dropout, flags: as for :func:`eager.forward`. Dropout counts a sequence as an entry of the batch.
        max_scores, entropy: also return these, -inf and 0 in rows of no sequence.
    """
    flags |= {"max_scores": max_scores, "entropy": entropy}

    def results_of(s: Sequence) -> tuple[Tensor, ...]:
        inputs = batch.inputs(s, q, k, v, mask, bias)
        return eager.forward(*inputs, sink=sink, dropout=_dropout_of(s, dropout), **flags)

    runs = list(batch.runs())
    if len(runs) == 1 and batch.fills(q, runs[0]):
        return results_of(runs[0])
    results = _empty(q, v, max_scores, entropy)
    _write(batch, runs, results, results_of)
    return results


@torch.no_grad()
def backward(
    batch: Batch,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AnyMask | None,
    bias: ChunkBias | None,
    out: Tensor,
    lse: Tensor,
    sink: Tensor | None = None,
    dropout: Dropout | None = None,
    *,
    needs_grad: tuple[bool, ...],
    entropy: tuple[Tensor, Tensor] | None = None,
    **flags: Any,
) -> tuple[Tensor | None, ...]:
    """Return the requested gradients, by one :func:`eager.backward` per run; zeros in rows of no sequence.

    Bias and sink belong to all sequences, so their gradients are summed in the dtype of the softmax and rounded once.
    """

    def gradients_of(s: Sequence, bias: ChunkBias | None, sink: Tensor | None) -> tuple[Tensor | None, ...]:
        own_dlse = None if dlse is None else batch.rows(dlse, s)
        inputs, results = batch.inputs(s, q, k, v, mask, bias), (batch.queries(out, s), batch.rows(lse, s))
        numbers = {"sink": sink, "dropout": _dropout_of(s, dropout), "needs_grad": needs_grad, **flags}
        if entropy is not None:
            numbers["entropy"] = tuple(batch.rows(x, s) for x in entropy)
        return eager.backward(batch.queries(dout, s), own_dlse, *inputs, *results, **numbers)

    return _summed(batch, batch.runs(), (q, k, v, bias, sink), needs_grad, gradients_of)


def forward_tangents(
    batch: Batch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AnyMask | None,
    bias: ChunkBias | None,
    sink: Tensor | None,
    tangents: Tangents,
    dropout: Dropout | None = None,
    **flags: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out, lse and their tangents, by one :func:`tangents.forward` per run.

    Arguments are as for :func:`forward`; a row of no sequence has tangents of 0.
    """
    out, lse = _empty(q, v)
    results = out, lse, torch.zeros_like(out), torch.zeros_like(lse)

    def results_of(s: Sequence) -> tuple[Tensor, ...]:
        inputs, own_tangents = batch.inputs(s, q, k, v, mask, bias), _tangents_of(batch, s, bias, tangents)
        return forward_mode.forward(*inputs, sink, own_tangents, dropout=_dropout_of(s, dropout), **flags)

    _write(batch, batch.runs(), results, results_of)
    return results


def backward_tangents(
    batch: Batch,
    cotangents: Cotangents,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AnyMask | None,
    bias: ChunkBias | None,
    sink: Tensor | None,
    tangents: Tangents,
    lse: Tensor,
    dropout: Dropout | None = None,
    *,
    needs_grad: tuple[bool, ...],
    **flags: Any,
) -> tuple[Tangents, Tangents]:
    """Return the gradients of all inputs and their tangents, by one :func:`tangents.backward` per run."""

    def gradients_of(s: Sequence, bias: ChunkBias | None, sink: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs, own_tangents = batch.inputs(s, q, k, v, mask, bias), _tangents_of(batch, s, bias, tangents)
        parts = (batch.queries, batch.rows, batch.queries, batch.rows)
        sent = Cotangents(*(None if x is None else part(x, s) for x, part in zip(cotangents, parts, strict=True)))
        numbers = {"dropout": _dropout_of(s, dropout), "needs_grad": needs_grad, **flags}
        both = forward_mode.backward(sent, *inputs, sink, own_tangents, batch.rows(lse, s), **numbers)
        return (*both[0], *both[1])

    inputs = (q, k, v, bias, sink)
    sums = _summed(batch, batch.runs(), inputs, needs_grad, gradients_of)
    return Tangents(*sums[:5]), Tangents(*sums[5:])


def _tangents_of(batch: Batch, s: Sequence, bias: ChunkBias | None, tangents: Tangents) -> Tangents:
    """Return the tangents of the inputs for sequences."""
    tq, tk, tv, tbias, tsink = tangents
    if tbias is not None:
        tbias = values_of(batch.bias(with_values(bias, tbias), s))
    own_q, own_k, own_v = (
        None if x is None else part(x, s) for x, part in ((tq, batch.queries), (tk, batch.keys), (tv, batch.keys))
    )
    return Tangents(own_q, own_k, own_v, tbias, tsink)


def attention(
    batch: Batch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AnyMask | None,
    bias: ChunkBias | None,
    sink: Tensor | None = None,
    dropout: Dropout | None = None,
    max_scores: bool = False,
    entropy: bool = False,
    **flags: Any,
) -> tuple[Tensor, ...]:
    """Return the results of :func:`forward` by the plain formula, differentiable: the oracle.

    Args:
        flags: is_causal, softmax_scale, softcap and window_size, as for :func:`formula.attention`.
    """
    flags |= {"max_scores": max_scores, "entropy": entropy}
    results = _empty(q, v, max_scores, entropy)
    # Add sums of empty tensors, so that results depend on the inputs for autograd even without sequences.
    nothing = sum(x.flatten()[:0].sum() for x in (q, k, v, values_of(bias), sink) if x is not None)
    results = tuple(x + nothing for x in results)

    def results_of(s: Sequence) -> tuple[Tensor, ...]:
        inputs, _ = _as_tensors(batch.inputs(s, q, k, v, mask, bias))
        return formula.attention(*inputs, sink=sink, dropout=_dropout_of(s, dropout), **flags)

    _write(batch, batch, results, results_of)
    return results


def gradients(
    batch: Batch,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AnyMask | None,
    bias: ChunkBias | None,
    sink: Tensor | None = None,
    dropout: Dropout | None = None,
    dentropy: Tensor | None = None,
    **flags: Any,
) -> tuple[Tensor | None, ...]:
    """Return all gradients by :func:`formula.gradients`, themselves differentiable.

    Arguments are as for :func:`attention`.
    """

    def gradients_of(s: Sequence, bias: ChunkBias | None, sink: Tensor | None) -> tuple[Tensor | None, ...]:
        own_dlse, own_dentropy = (None if x is None else batch.rows(x, s) for x in (dlse, dentropy))
        inputs, back = _as_tensors(batch.inputs(s, q, k, v, mask, bias))
        numbers = {"sink": sink, "dropout": _dropout_of(s, dropout), "dentropy": own_dentropy, **flags}
        dq, dk, dv, dbias, *dsink = formula.gradients(batch.queries(dout, s), own_dlse, *inputs, **numbers)
        return dq, dk, dv, None if dbias is None else back(dbias), *dsink

    return _summed(batch, batch, (q, k, v, bias, sink), (True,) * 5, gradients_of)


def _as_tensors(
    inputs: tuple[Tensor, Tensor, Tensor, Any, Any],
) -> tuple[tuple[Tensor, Tensor, Tensor, Any, Any], Callable[[Tensor], Tensor]]:
    """Turn lists, and values for their entries, into the mask and the bias of all pairs, for the formula.

    Also return a function that converts the gradient of this bias to the gradient of the values.
    """
    q, k, v, mask, bias = inputs
    if not isinstance(mask, Lists):
        return inputs, lambda dbias: dbias
    slots = slot_table(mask, q.shape[1], k.shape[1])
    if not isinstance(bias, ListValues):
        return (q, k, v, slots >= 0, bias), lambda dbias: dbias
    # Gradients are rounded once.
    values, step = bias.values.to(torch.promote_types(bias.values.dtype, formula.softmax_dtype(q))), mask.block_q
    added = dense_bias(values, slots, step)
    return (q, k, v, slots >= 0, added), lambda dbias: value_gradient(dbias, values, slots, step)


def _dropout_of(s: Sequence, dropout: Dropout | None) -> Dropout | None:
    return None if dropout is None else dropout.starting_at(s.number)


def _unpacked(x: Tensor, dim: int, first: int, count: int, length: int) -> Tensor:
    """View consecutive sequences of one length along a dim: that dim becomes (count, length)."""
    return x.narrow(dim, first, count * length).unflatten(dim, (count, length))


def _write(
    batch: Batch,
    sequences: Iterable[Sequence],
    results: tuple[Tensor, ...],
    results_of: Callable[[Sequence], tuple[Tensor, ...]],
) -> None:
    """Write the results of every sequence that has queries: tensors shaped as out, and rows such as lse."""
    for s in sequences:
        if s.seqlen_q > 0:
            for x, result in zip(results, results_of(s), strict=True):
                part = batch.queries if x.dim() == 4 else batch.rows
                part(x, s).copy_(result)


def _summed(
    batch: Batch,
    sequences: Iterable[Sequence],
    inputs: tuple[Tensor, Tensor, Tensor, ChunkBias | None, Tensor | None],
    needs_grad: tuple[bool, ...],
    gradients_of: Callable[[Sequence, ChunkBias | None, Tensor | None], tuple[Tensor | None, ...]],
) -> tuple[Tensor | None, ...]:
    """Sum the needed gradients of (q, k, v, bias, sink) over sequences, and of their tangents if needed.

    Each row of q and k belongs to one sequence. Bias and sink belong to all sequences, so `gradients_of` gets them in
    the dtype of the softmax; their gradients are then summed in that dtype and rounded once. Without a sink there are
    four results instead of five.
    """
    q, k, v, bias, sink = inputs
    passed = (q, k, v, values_of(bias), sink) * (len(needs_grad) // 5)
    values, sink = (None if x is None else x.to(formula.softmax_dtype(q)) for x in passed[3:5])
    summed = (q, k, v, values, sink) * (len(needs_grad) // 5)
    sums = [
        x.new_zeros(x.shape) if x is not None and needed else None for x, needed in zip(summed, needs_grad, strict=True)
    ]
    bias = with_values(bias, values)
    bias_part = functools.partial(batch.scores if bias is None or isinstance(bias, Tensor) else batch.by_query, "bias")
    parts = (batch.queries, batch.keys, batch.keys, bias_part, lambda x, s: x) * (len(needs_grad) // 5)
    for s in sequences:
        if s.seqlen_q > 0:
            for total, x, part in zip(sums, gradients_of(s, bias, sink), parts, strict=False):
                if total is not None and x is not None:
                    part(total, s).add_(x)
    results = [None if x is None or like is None else x.to(like.dtype) for x, like in zip(sums, passed, strict=True)]
    return tuple(results[:4] if sink is None and len(results) == 5 else results)


def _empty(q: Tensor, v: Tensor, max_scores: bool = False, entropy: bool = False) -> tuple[Tensor, ...]:
    """Return the results of rows of no sequence: out, lse, and the other requested ones."""
    filled = (0.0, -torch.inf, *[-torch.inf] * max_scores, *[0.0] * entropy)
    shapes = (q.shape[:3] + v.shape[3:], *[(q.shape[0], q.shape[2], q.shape[1])] * (len(filled) - 1))
    dtypes = (q.dtype, *[formula.softmax_dtype(q)] * (len(filled) - 1))
    return tuple(
        q.new_full(shape, value, dtype=dtype) for shape, value, dtype in zip(shapes, filled, dtypes, strict=True)
    )
