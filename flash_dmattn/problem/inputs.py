"""The tensors of one call, as one object from the entry of a call to a kernel launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .description import Arrival, AttentionProblem, MaskForm, NeedsGrad

# (dq, dk, dv, dbias), None where a gradient is not needed; of a call with a sink (dq, dk, dv, dbias, dsink).
Gradients = tuple[Tensor | None, ...]


class MaskChoice(NamedTuple):
    """The form of a prepared mask, or of the mask for the passes of a call.

    Attributes:
        form: see `MaskForm`. A mask with one row for all queries has three prepared forms. Form "keys" is for kernels
            that gather. Form "intervals" has the queries that the band leaves to each key. Form "tiles" has bits, which
            kernels need with a bias of one value per score.
        reorder: for the form "intervals": whether kept keys come first. Calls then copy k and v in that order, and
            only kept keys cost time.
    """

    form: MaskForm = "none"
    reorder: bool = False


class MaskView(NamedTuple):
    """A mask as kernels receive it: its form, and the tensors of that form.

    * "none": no tensors.
    * "dense": a bool tensor (Bm, Hm, Lq or 1, Lk or 1), in which a stride of 0 is a broadcast dim.
    * "tiles", "sequence_tiles": bits, classes, row_lists, col_lists.
    * "keys": kept, count, prefix.
    * "intervals": start, stop, order, bounds, row_lists, col_lists.
    * "tree": bits.
    * "lists": keys, count, slots.

    Bm is 1, the batch size, or a number that `Flags.mask_repeat` goes with.

    Attributes:
        form, tensors: as above.
        fresh: counters of 0, and if keys have an order also k and v and a bias of one value per key in this order. The
            packer of a call makes them for its forward pass, which may use them once. Nothing saves them.
    """

    form: MaskForm = "none"
    tensors: tuple[Tensor, ...] = ()
    fresh: Sequence[Tensor] = ()

    @property
    def dense(self) -> Tensor | None:
        return self.tensors[0] if self.form == "dense" else None


class SequenceView(NamedTuple):
    """The bounds of S sequences, as kernels receive them.

    Attributes:
        bounds: int32 (S, 4), contiguous, a row each: the first query, how many, the first key, how many. The first
            tokens are indices in a row of packed tokens, ascending, and 0 if queries or keys are not packed. They are
            within q, k and v, even if the caller's lengths are not.
        block_table: int32 (S, P), whose entry j // page_size is the page of key j; None where keys are not in pages.
            Its entries may be wrong: kernels clamp them.
    """

    bounds: Tensor
    block_table: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.bounds,) if self.block_table is None else (self.bounds, self.block_table)


NO_MASK = MaskView()


def in_rows(x: Tensor, arrival: Arrival) -> Tensor:
    """View q, k or v of a call as (B, L, H, D)."""
    if arrival == "heads_first":
        return x.transpose(1, 2)
    return x.unsqueeze(0) if arrival == "tokens" and x.dim() == 3 else x


def result_in_rows(x: Any, arrival: Arrival) -> Any:
    """View out, lse or a gradient of either with a batch of 1 if tokens are packed; None stays None."""
    return x.unsqueeze(0) if arrival == "tokens" and x is not None else x


def as_arrived(gradients: Gradients, arrival: Arrival) -> Gradients:
    """View the gradients of rows (B, L, H, D) as q, k and v arrived."""
    if arrival == "rows":
        return gradients
    turned = arrival == "heads_first"
    rows = (None if x is None else x.transpose(1, 2) if turned else x.squeeze(0) for x in gradients[:3])
    return *rows, *gradients[3:]


class Inputs(NamedTuple):
    """The tensors of a call, as a pass of a backend receives them.

    Attributes:
        q, k, v: (B, L, H, D); for passes with `Backend.reads_as_arrived` in the layout `AttentionProblem.arrival`.
        mask: in the form that the problem names.
        bias: 4-D, each dimension 1 or full, the heads also those of k; a dimension of stride 0 is a broadcast one.
        sink: (Hq,).
        sequences: the bounds of the sequences of the batch.
        dropout: int64 (2,) or, for a part of a call, (4,): the key of dropout.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: MaskView = NO_MASK
    bias: Tensor | None = None
    sink: Tensor | None = None
    sequences: SequenceView | None = None
    dropout: Tensor | None = None

    @property
    def others(self) -> tuple[Tensor, ...]:
        """The tensors that take no gradient: of the mask and of the sequences, and the key of dropout."""
        rest = self.mask.tensors
        if self.sequences is not None:
            rest = (*rest, *self.sequences.tensors)
        return rest if self.dropout is None else (*rest, self.dropout)

    @property
    def requires_grad(self) -> NeedsGrad:
        tensors = (self.q, self.k, self.v, self.bias, self.sink)
        return NeedsGrad(*(x is not None and x.requires_grad for x in tensors))

    @property
    def needs_grad(self) -> NeedsGrad:
        """Which gradients a call of these tensors has to produce here, none under `torch.no_grad()`."""
        return self.requires_grad if torch.is_grad_enabled() else NeedsGrad()

    def in_rows(self, arrival: Arrival) -> Inputs:
        if arrival == "rows":
            return self
        q, k, v = self[:3]
        return Inputs(in_rows(q, arrival), in_rows(k, arrival), in_rows(v, arrival), *self[3:])


class Saved(NamedTuple):
    """The tensors for a backward pass: the inputs of its call, and out and lse of the forward pass."""

    inputs: Inputs
    out: Tensor
    lse: Tensor

    def in_rows(self, arrival: Arrival) -> Saved:
        """View q, k and v as (B, L, H, D), and the results of packed ones with a batch of 1."""
        if arrival == "rows":
            return self
        x, out, lse = self
        return Saved(x.in_rows(arrival), result_in_rows(out, arrival), result_in_rows(lse, arrival))


class RowEntropy(NamedTuple):
    """The entropies of rows of the forward pass, and their gradient, both shaped as lse."""

    values: Tensor
    gradient: Tensor

    def in_rows(self, arrival: Arrival) -> RowEntropy:
        return RowEntropy(result_in_rows(self.values, arrival), result_in_rows(self.gradient, arrival))


class SavedLayout(NamedTuple):
    """How the tensors that autograd keeps of a call make `Inputs` and `Saved`: the same for all calls of a plan.

    Attributes:
        mask_form: the form of the mask, whose tensors come first among the tensors without gradients.
        num_sequence_tensors: the number of tensors of sequences, which come next.
        has_dropout: whether the key of dropout comes last.
        has_entropy: whether the entropies of rows are kept, too, after the tensors of the inputs.
    """

    mask_form: MaskForm
    num_sequence_tensors: int = 0
    has_dropout: bool = False
    has_entropy: bool = False

    def inputs(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None, *others: Tensor
    ) -> Inputs:
        if not others:
            return Inputs(q, k, v, NO_MASK, bias, sink)
        last = len(others) - self.has_dropout
        first = last - self.num_sequence_tensors
        mask = MaskView(self.mask_form, others[:first]) if first else NO_MASK
        sequences = SequenceView(*others[first:last]) if first < last else None
        return Inputs(q, k, v, mask, bias, sink, sequences, others[last] if self.has_dropout else None)

    def saved(self, out: Tensor, lse: Tensor, *inputs: Any) -> Saved:
        return Saved(self.inputs(*inputs), out, lse)


def make_saved_layout(p: AttentionProblem) -> SavedLayout:
    """Return the layout of the saved tensors of a class of calls, whose masks have the form that the problem names."""
    spec = p.sequences
    return SavedLayout(p.mask_form, 0 if spec is None else 1 + spec.has_pages, p.dropout_p > 0, p.flags.entropy)
