"""Attention over sequences of many lengths as a loop: one call for each, of the rows that are its own.

`forward` and `backward` loop over the chunked pair of `eager.py`; `attention` and `gradients` over the plain formula,
and are differentiable. Lengths are read on the host, so all of them wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import eager, formula
from .chunks import is_capturing
from .dropout import Dropout


class Sequence(NamedTuple):
    """One sequence: the entry of q and of k that it is part of, and its rows of them."""

    number: int
    entry_q: int
    entry_k: int
    queries: slice
    keys: slice
    seqlen_q: int
    seqlen_k: int


class Batch:
    """The sequences of a call, and what each of them reads of its tensors.

    Args:
        bounds: int32 (S, 4): the first query, how many, the first key, how many, of each sequence.
        block_table: int32 (S, P), the pages of keys, or None.
        packs_queries, packs_keys: whether q is (1, Tq, Hq, D) or (S, Lq, Hq, D), and k the same.
        mask_packing, bias_packing: what of a mask or a bias is packed: "none", "queries" or "keys"; or "tree" of a mask
            (S or 1, 1, n, n) of the new tokens of each sequence, which are its queries and its last keys.

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
                'backend="eager" reads the lengths of sequences on the host, which cannot be captured in a CUDA graph; '
                "another backend can"
            )
        if type(bounds) is not Tensor:  # it says so in the place of torch, whose error names an operator
            raise RuntimeError(
                'backend="reference" reads the lengths of sequences, and fake tensors have no values; '
                'backend="eager" gives shapes without them'
            )
        self._table = block_table
        self.packing = {"mask": mask_packing, "bias": bias_packing}
        self.sequences = [
            Sequence(
                s,
                0 if packs_queries else s,
                0 if packs_keys else s,
                slice(first_q, first_q + len_q),
                slice(first_k, first_k + len_k),
                len_q,
                len_k,
            )
            for s, (first_q, len_q, first_k, len_k) in enumerate(bounds.tolist())
        ]

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.sequences)

    def queries(self, x: Tensor, s: Sequence) -> Tensor:
        """Its rows of a tensor shaped as q, with a batch dim of 1."""
        return x[s.entry_q : s.entry_q + 1, s.queries]

    def rows(self, x: Tensor, s: Sequence) -> Tensor:
        """Its rows of a tensor shaped as lse, (B, Hq, Lq)."""
        return x[s.entry_q : s.entry_q + 1, :, s.queries]

    def keys(self, x: Tensor, s: Sequence) -> Tensor:
        """Its rows of a tensor shaped as k; a copy where they lie in pages."""
        if self._table is None:
            return x[s.entry_k : s.entry_k + 1, s.keys]
        pages = self._table[s.number, : -(-s.seqlen_k // max(x.shape[1], 1))].long().clamp(0, max(x.shape[0] - 1, 0))
        return x[pages].flatten(0, 1)[None, : s.seqlen_k]

    def scores(self, name: str, x: Tensor, s: Sequence) -> Tensor:
        """Its part of a mask or a bias, or of a tensor shaped as one; dims of size 1 stay."""
        packing = self.packing[name]
        if packing == "tree":
            return self._tree(x, s)
        entry = slice(s.number, s.number + 1) if packing == "none" and x.shape[0] > 1 else slice(None)
        queries = s.queries if packing == "queries" else slice(s.seqlen_q)
        keys = s.keys if packing == "keys" else slice(s.seqlen_k)
        return x[
            entry,
            :,
            queries if x.shape[2] > 1 else slice(None),
            keys if x.shape[3] > 1 else slice(None),
        ]

    @staticmethod
    def _tree(x: Tensor, s: Sequence) -> Tensor:
        own = x[s.number if x.shape[0] > 1 else 0]
        allowed = own.new_ones(1, 1, s.seqlen_q, s.seqlen_k)
        tail = min(s.seqlen_q, s.seqlen_k)  # of the new tokens, those that have a key
        allowed[..., s.seqlen_k - tail :] = own[None, :, : s.seqlen_q, s.seqlen_q - tail : s.seqlen_q]
        return allowed

    def inputs(
        self, s: Sequence, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """The inputs of its call."""
        return (
            self.queries(q, s),
            self.keys(k, s),
            self.keys(v, s),
            None if mask is None else self.scores("mask", mask, s),
            None if bias is None else self.scores("bias", bias, s),
        )


@torch.no_grad()
def forward(
    batch: Batch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | None = None,
    dropout: Dropout | None = None,
    **flags: Any,
) -> tuple[Tensor, Tensor]:
    """out and lse of all rows, 0 and -inf in those of no sequence; each sequence by :func:`eager.forward`.

    Args:
        batch: where the sequences lie.
        q, k, v: 4-D, as the layout has them.
        mask, bias: 4-D, each by position or packed, as `batch` says.
        sink, dropout, flags: as for :func:`eager.forward`; an entry of the batch is a sequence here.
    """
    out, lse = _empty(q, v)

    def results_of(s: Sequence) -> tuple[Tensor, ...]:
        inputs = batch.inputs(s, q, k, v, mask, bias)
        return eager.forward(*inputs, sink=sink, dropout=_dropout_of(s, dropout), **flags)

    _write(batch, out, lse, results_of)
    return out, lse


@torch.no_grad()
def backward(
    batch: Batch,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    sink: Tensor | None = None,
    dropout: Dropout | None = None,
    *,
    needs_grad: tuple[bool, ...],
    **flags: Any,
) -> tuple[Tensor | None, ...]:
    """The gradients asked for, each sequence by :func:`eager.backward`; zeros in rows and keys of no sequence.

    Those of bias and sink, which sequences share, are summed in the dtype of the softmax and rounded once.
    """

    def gradients_of(s: Sequence, bias: Tensor | None, sink: Tensor | None) -> tuple[Tensor | None, ...]:
        of_dlse = None if dlse is None else batch.rows(dlse, s)
        inputs, results = batch.inputs(s, q, k, v, mask, bias), (batch.queries(out, s), batch.rows(lse, s))
        numbers = {"sink": sink, "dropout": _dropout_of(s, dropout), "needs_grad": needs_grad, **flags}
        return eager.backward(batch.queries(dout, s), of_dlse, *inputs, *results, **numbers)

    return _summed(batch, (q, k, v, bias, sink), needs_grad, gradients_of)


def attention(
    batch: Batch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | None = None,
    dropout: Dropout | None = None,
    **flags: Any,
) -> tuple[Tensor, Tensor]:
    """The same as :func:`forward` by the plain formula, differentiable: the oracle.

    Args:
        flags: is_causal, softmax_scale, softcap and window_size, as for :func:`formula.attention`.
    """
    out, lse = _empty(q, v)
    # Sums of nothing: results are functions of the inputs, even where there are no sequences.
    nothing = sum(x.flatten()[:0].sum() for x in (q, k, v, bias, sink) if x is not None)
    out, lse = out + nothing, lse + nothing

    def results_of(s: Sequence) -> tuple[Tensor, ...]:
        inputs = batch.inputs(s, q, k, v, mask, bias)
        return formula.attention(*inputs, sink=sink, dropout=_dropout_of(s, dropout), **flags)

    _write(batch, out, lse, results_of)
    return out, lse


def gradients(
    batch: Batch,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | None = None,
    dropout: Dropout | None = None,
    **flags: Any,
) -> tuple[Tensor | None, ...]:
    """All gradients by :func:`formula.gradients`, themselves differentiable; the rest as for :func:`attention`."""

    def gradients_of(s: Sequence, bias: Tensor | None, sink: Tensor | None) -> tuple[Tensor | None, ...]:
        of_dlse = None if dlse is None else batch.rows(dlse, s)
        inputs = batch.inputs(s, q, k, v, mask, bias)
        of_s = _dropout_of(s, dropout)
        return formula.gradients(batch.queries(dout, s), of_dlse, *inputs, sink=sink, dropout=of_s, **flags)

    return _summed(batch, (q, k, v, bias, sink), (True,) * 5, gradients_of)


def _dropout_of(s: Sequence, dropout: Dropout | None) -> Dropout | None:
    return None if dropout is None else dropout.of_entry(s.number)


def _write(batch: Batch, out: Tensor, lse: Tensor, results_of: Callable[[Sequence], tuple[Tensor, ...]]) -> None:
    """Write out and lse of every sequence that has queries."""
    for s in batch:
        if s.seqlen_q > 0:
            of_out, of_lse = results_of(s)
            batch.queries(out, s).copy_(of_out)
            batch.rows(lse, s).copy_(of_lse)


def _summed(
    batch: Batch,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    needs_grad: tuple[bool, ...],
    gradients_of: Callable[[Sequence, Tensor | None, Tensor | None], tuple[Tensor | None, ...]],
) -> tuple[Tensor | None, ...]:
    """The gradients asked for of (q, k, v, bias, sink), without the last where there is no sink.

    Rows of q and k are of one sequence each. Bias and sink, which sequences share, are handed out in the dtype of the
    softmax, so that their gradients are summed in it and rounded once.
    """
    q, k, v, *shared = inputs
    bias, sink = (None if x is None else x.to(formula.softmax_dtype(q)) for x in shared)
    sums = [
        x.new_zeros(x.shape) if x is not None and needed else None
        for x, needed in zip((q, k, v, bias, sink), needs_grad, strict=True)
    ]
    parts = (batch.queries, batch.keys, batch.keys, lambda x, s: batch.scores("bias", x, s), lambda x, s: x)
    for s in batch:
        if s.seqlen_q > 0:
            for total, x, part in zip(sums, gradients_of(s, bias, sink), parts, strict=False):
                if total is not None and x is not None:
                    part(total, s).add_(x)
    found = [None if x is None or like is None else x.to(like.dtype) for x, like in zip(sums, inputs, strict=True)]
    return tuple(found if sink is not None else found[:4])


def _empty(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = q.new_zeros(q.shape[:3] + v.shape[3:])
    return out, q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=formula.softmax_dtype(q))
