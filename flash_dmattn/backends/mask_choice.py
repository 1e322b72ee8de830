"""Chooses the form of the mask for the passes of a call; no other module converts the mask of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ..gradients import narrow
from ..problem import (
    Arrival,
    AttentionProblem,
    Gradients,
    MaskChoice,
    MaskForm,
    MaskView,
    SequenceView,
    hinted,
    make_band,
)
from ..problem.inputs import Inputs, Saved, as_arrived, in_rows, result_in_rows
from ..reference.tangents import Cotangents, Tangents
from .protocol import Backend, Backward, BackwardTangents, Direction, Forward, ForwardTangents

if TYPE_CHECKING:
    from ..masks import PreparedMask

# If False, the bool mask of a call with sequences is never packed.
PACKS_FOR_SEQUENCES = True
# Up to this number of queries or keys, skipping tiles saves less time than packing the mask takes.
FEW_QUERIES, FEW_KEYS = 16, 128
# With fewer heads, tiles of kept keys are too few programs to fill the GPU, and kernels that can gather keys are
# faster.
FEW_HEADS = 8


def choose_form(problem: AttentionProblem, forward: Backend, backward: Backend | None) -> MaskChoice:
    """Choose one form for both passes of a call, so that its mask is packed once.

    A prepared mask in a form that a pass does not support is converted; if it becomes a bool tensor, `unpacking_note`
    reports it. Lists are never converted here: a pass over tiles converts them itself, because a second derivative
    needs the lists.
    """
    if problem.mask_form == "lists":
        return MaskChoice("lists")
    passes: tuple[tuple[Backend, Direction], ...] = ((forward, "forward"),)
    if backward is not None:
        passes = (*passes, (backward, "backward"))
    return _choose(problem, passes)


def _choose(problem: AttentionProblem, passes: tuple[tuple[Backend, Direction], ...]) -> MaskChoice:
    form = problem.mask_form
    if form == "lists" and not all(form in each.mask_forms for each, _ in passes):
        return MaskChoice("intervals")  # a backend of tiles accepts lists only if their blocks are tiles
    if form in ("none", "tree", "lists") or (form != "dense" and all(form in each.mask_forms for each, _ in passes)):
        return MaskChoice(form)
    sized = hinted(problem)  # symbolic sizes may be replaced by hints, because the form only decides speed
    needed: MaskForm = "tiles" if problem.sequences is None else "sequence_tiles"
    if not all(needed in each.mask_forms for each, _ in passes):
        return MaskChoice("dense")
    if all(each.reads_dense(sized, direction) for each, direction in passes):
        return MaskChoice("dense")
    if problem.sequences is not None:
        return MaskChoice("sequence_tiles" if packs_for_sequences(sized) else "dense")
    return prepared_form(sized, all("keys" in each.mask_forms for each, _ in passes))


def prepared_form(problem: AttentionProblem, gathers: bool) -> MaskChoice:
    """Choose tiles, or a form of masks with one row for all queries; `gathers`: whether kernels load single keys."""
    p = problem
    if p.mask is None or not p.mask.broadcast()[2] or p.flags.invariant:
        return MaskChoice("tiles")
    from ..masks.prepared import operators  # importing flash_dmattn does not need it

    if gathers and p.seqlen_q < operators.FEW_QUERIES:
        return MaskChoice("keys")
    if reads_scores(p) or p.dropout_p > 0:
        return MaskChoice("tiles")
    # k and v cannot follow several orders at once.
    has_one_order = p.mask.broadcast()[1] or p.mask.shape[1] == p.num_heads_k
    reorder = bool(has_one_order and p.seqlen_q * (p.num_heads // p.num_heads_k) >= operators.ORDER_FROM)
    if gathers and reorder and p.batch * p.num_heads < FEW_HEADS:
        return MaskChoice("keys")
    return MaskChoice("intervals", reorder)


def packs_for_sequences(problem: AttentionProblem) -> bool:
    """Return whether a call with sequences packs its bool mask into tiles, for backends that support them.

    Packing is worthwhile if the mask has a value for each packed query and each key, because kernels would otherwise
    load a byte for every pair in every pass. A mask with one value for several rows or keys is small, and is not
    packed. On AMD GPUs masks are not packed, because PyTorch would do it there, which takes longer than both passes.
    """
    p = problem
    if not PACKS_FOR_SEQUENCES or p.mask is None or p.mask_form != "dense" or p.flags.mask_packing != "queries":
        return False
    _, _, shares_queries, shares_keys = p.mask.broadcast()
    if shares_queries or shares_keys or p.arch.startswith("gfx"):
        return False
    return p.flags.invariant or (p.seqlen_q > FEW_QUERIES and p.seqlen_k > FEW_KEYS)


def view_of(
    problem: AttentionProblem, choice: MaskChoice, mask: Tensor | PreparedMask, sequences: SequenceView | None = None
) -> MaskView:
    """Convert the user's mask to the chosen form; no other function packs or unpacks the mask of a call."""
    if not isinstance(mask, Tensor):
        if mask.form == choice.form:
            return mask.view
        return convert(problem, choice, mask.view, sequences)
    if choice.form == "dense":
        return MaskView("dense", (mask,))
    if choice.form == "sequence_tiles":
        from ..masks.prepared.operators import pack_for_sequences  # importing flash_dmattn does not need it

        spec, packing = problem.sequences, problem.flags.mask_packing
        assert spec is not None and sequences is not None
        return MaskView(
            "sequence_tiles", tuple(pack_for_sequences(mask, sequences.bounds, packing, spec, problem.window))
        )
    from ..masks.prepared.operators import prepared_view  # likewise

    return prepared_view(mask, problem.seqlen_q, problem.seqlen_k, problem.window, choice)


def plan_view(
    problem: AttentionProblem, choice: MaskChoice, forward: Backend, arrival: Arrival
) -> Callable[[Any, Tensor, Tensor, Tensor | None], MaskView] | None:
    """Return the conversion of `view_of` for a class of unwatched calls; None if it depends on the call.

    The function takes the mask, then k, v and bias as the call has them: see `MaskView.fresh`.
    """
    if problem.mask_form == choice.form:
        if choice.form == "dense":
            return lambda mask, *operands: MaskView("dense", (mask,))
        return lambda mask, *operands: mask.view
    if problem.mask_form != "dense" or choice.form not in ("tiles", "keys", "intervals"):
        return None
    from ..masks.prepared.operators import plan_prepare  # importing flash_dmattn does not need it

    prepare = plan_prepare(problem.seqlen_q, problem.seqlen_k, problem.window, choice)
    if choice.form != "intervals" or not forward.takes_fresh(problem):
        return lambda mask, *operands: prepare(mask)
    has_keys, turns = problem.bias_class == "key", arrival != "rows"

    def view(mask: Any, k: Tensor, v: Tensor, bias: Tensor | None) -> MaskView:
        if turns:
            k, v = in_rows(k, arrival), in_rows(v, arrival)
        return prepare(mask, k, v, bias if has_keys else None)

    return view


def convert(
    problem: AttentionProblem, choice: MaskChoice, view: MaskView, sequences: SequenceView | None = None
) -> MaskView:
    if view.form == choice.form:
        return view
    if view.form == "dense":
        return view_of(problem, choice, view.tensors[0], sequences)
    if view.form == "sequence_tiles":
        from ..masks.prepared.packing import unpack_sequences  # importing flash_dmattn does not need it

        assert problem.sequences is not None
        return MaskView("dense", (unpack_sequences(view.tensors[0], problem.sequences),))
    if view.form == "lists":
        from ..masks.prepared.operators import packer_for  # likewise

        keys = view.tensors[0]
        flags, lengths = problem.flags, (problem.seqlen_q, problem.seqlen_k)
        band = make_band(*lengths, problem.window)
        tensors, fresh = packer_for(keys).tiles_of_lists(keys, (flags.block_q, flags.block_k), lengths, band)
        return MaskView("intervals", tuple(tensors), fresh)
    from ..masks.prepared.storage import unpack_view  # likewise

    return view_of(problem, choice, unpack_view(view, problem.seqlen_q, problem.seqlen_k))


def forward_of(backend: Backend, problem: AttentionProblem) -> Forward:
    """Return the forward pass of a backend for a class of calls, with conversions of masks and views of q, k and v."""
    arrival = problem.arrival
    if problem.arrival != "rows" and not backend.reads_as_arrived(problem, "forward"):
        run = forward_of(backend, problem._replace(arrival="rows"))
        if arrival == "heads_first":
            return lambda inputs: run(inputs.in_rows(arrival))
        if backend.is_differentiable:
            return lambda inputs: tuple(x.squeeze(0) for x in run(inputs.in_rows(arrival)))

        def forward(inputs: Inputs) -> tuple[Tensor, ...]:
            # In place, because users may not write to an output of an autograd function that is a view.
            return tuple([x.squeeze_(0) for x in run(inputs.in_rows(arrival))])

        return forward
    choice = _choose(problem, ((backend, "forward"),))
    if choice.form == problem.mask_form:
        return backend.plan_forward(problem)
    run = backend.plan_forward(problem._replace(mask_form=choice.form))
    return lambda inputs: run(inputs._replace(mask=convert(problem, choice, inputs.mask, inputs.sequences)))


def backward_of(backend: Backend, problem: AttentionProblem) -> Backward:
    """Return the backward pass, with the same conversions; gradients have the layout in which q, k and v arrived."""
    run = _plan_backward(backend, problem)
    if problem.bias_tensor is None or backend.wide_lse:
        return run
    # The forward pass may have run on a backend with a wide lse.
    dtype = problem.dtype
    return lambda saved, *sent, **more: run(saved._replace(lse=narrow(saved.lse, dtype)), *sent, **more)


def _plan_backward(backend: Backend, problem: AttentionProblem) -> Backward:
    assert backend.plan_backward is not None
    if problem.arrival != "rows" and not backend.reads_as_arrived(problem, "backward"):
        return through_rows(problem, _plan_backward(backend, problem._replace(arrival="rows")))
    choice = _choose(problem, ((backend, "backward"),))
    if choice.form == problem.mask_form:
        return backend.plan_backward(problem)
    run = backend.plan_backward(problem._replace(mask_form=choice.form))

    def converted(saved: Saved, dout: Tensor, dlse: Tensor | None, **more: Any) -> tuple[Tensor | None, ...]:
        inputs: Inputs = saved.inputs
        mask = convert(problem, choice, inputs.mask, inputs.sequences)
        return run(saved._replace(inputs=inputs._replace(mask=mask)), dout, dlse, **more)

    return converted


def tangents_of(backend: Backend, problem: AttentionProblem) -> ForwardTangents:
    """Return the forward pass of a backend in forward mode, with the same conversions, for q, k and v as rows."""
    assert backend.plan_tangents is not None
    arrival, choice = problem.arrival, _choose(problem, ((backend, "tangents"),))
    run = backend.plan_tangents(problem._replace(arrival="rows", mask_form=choice.form))

    def tangents(x: Inputs, own: Tangents) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mask = convert(problem, choice, x.mask, x.sequences)
        out, lse, tout, tlse = run(x.in_rows(arrival)._replace(mask=mask), tangents_in_rows(own, arrival))
        if arrival == "tokens":  # in place, as in `forward_of`
            return out.squeeze_(0), lse.squeeze_(0), tout.squeeze_(0), tlse.squeeze_(0)
        return out, lse, tout, tlse

    return tangents


def tangent_gradients_of(backend: Backend, problem: AttentionProblem, needs_grad: tuple[bool, ...]) -> BackwardTangents:
    """Return the gradients of a call in forward mode, with the same conversions, in the layout of q, k and v."""
    assert backend.plan_tangent_gradients is not None
    arrival, choice = problem.arrival, _choose(problem, ((backend, "tangents"),))
    run = backend.plan_tangent_gradients(problem._replace(arrival="rows", mask_form=choice.form), needs_grad)

    def gradients(x: Inputs, own: Tangents, lse: Tensor, sent: Cotangents) -> tuple[Tangents, Tangents]:
        lse = lse if backend.wide_lse else narrow(lse, problem.dtype)
        inputs = x.in_rows(arrival)._replace(mask=convert(problem, choice, x.mask, x.sequences))
        rows = Cotangents(*(result_in_rows(each, arrival) for each in sent))
        both = run(inputs, tangents_in_rows(own, arrival), result_in_rows(lse, arrival), rows)
        input_gradients, tangent_gradients = (Tangents(*as_arrived(each, arrival)) for each in both)
        return input_gradients, tangent_gradients

    return gradients


def tangents_in_rows(tangents: Tangents, arrival: Arrival) -> Tangents:
    q, k, v = (None if x is None else in_rows(x, arrival) for x in tangents[:3])
    return Tangents(q, k, v, *tangents[3:])


def through_rows(problem: AttentionProblem, run: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Wrap a backward pass of rows (B, L, H, D), for tensors in any layout."""
    arrival = problem.arrival

    def backward(saved: Saved, dout: Tensor, dlse: Tensor | None, **more: Any) -> Gradients:
        dout, dlse = result_in_rows(dout, arrival), result_in_rows(dlse, arrival)
        if "entropy" in more:
            more["entropy"] = more["entropy"].in_rows(arrival)
        return as_arrived(run(saved.in_rows(arrival), dout, dlse, **more), arrival)

    return backward


def unpacking_note(problem: AttentionProblem, backend: Backend) -> str | None:
    """Describe for `explain` that a backend unpacks a prepared mask; None if it does not."""
    mask = problem.mask
    if mask is None or problem.mask_form in ("none", "dense", "tree", "lists") or "tiles" in backend.mask_forms:
        return None
    return f"unpacks the prepared mask to a dense bool tensor of {mask.span() / 2**20:.1f} MB"


def interval_notes(problem: AttentionProblem, gathers: bool) -> tuple[str, ...]:
    """Describe for `explain` how a backend with interval masks uses a mask that is one, or becomes one."""
    p = problem
    if p.mask_form == "intervals":
        if p.dropout_p > 0:
            return ("takes keys in their own order: dropout cannot follow a mask's order",)
        if p.bias_class == "score" or p.relative is not None:
            return (
                "takes keys in their own order: a bias of one value per query and key cannot follow a mask's order",
            )
        return ("in a mask's order of keys, if it has one, copies k and v",)
    if p.mask_form != "dense" or not prepared_form(p, gathers).reorder:
        return ()
    return ("copies k and v in the order of kept keys, so that others cost nothing",)


def sequence_notes(problem: AttentionProblem) -> tuple[str, ...]:
    """Describe for `explain` how a backend with prepared forms uses the bool mask of a call with sequences."""
    if problem.mask_form != "dense":
        return ()
    advice = "PreparedMask.from_mask(mask, sequences=...)"
    if packs_for_sequences(problem):
        return (f"packs the bool mask as bits and lists of tiles, once a call: {advice} does it once for all layers",)
    return (f"reads the bool mask as it is, and skips nothing for it: {advice} makes tiles of it",)


class IntervalWalk(NamedTuple):
    """The bounds and lists of tiles of an `IntervalMask`, and the order of keys that they use.

    Attributes:
        order: int32 (Bm, Hm, Lk), the permutation of keys; None for the identity.
    """

    bounds: Tensor
    row_lists: Tensor
    col_lists: Tensor
    order: Tensor | None


def interval_walk(problem: AttentionProblem, in_order: bool = True) -> Callable[[MaskView], IntervalWalk]:
    """Return the tiles of interval masks: in the order of the mask if the call uses it, else listed again."""
    heads, seqlen_q = (1, problem.num_heads_k), problem.seqlen_q
    may_follow = in_order and may_follow_order(problem)

    def walk(mask: MaskView) -> IntervalWalk:
        start, stop, order, bounds, row_lists, col_lists = mask.tensors
        if order.shape[2] == 0:
            return IntervalWalk(bounds, row_lists, col_lists, None)
        if may_follow and order.shape[1] in heads:
            return IntervalWalk(bounds, row_lists, col_lists, order)
        from ..masks.prepared import operators  # importing flash_dmattn does not need it

        _, bounds, row_lists, col_lists = operators.interval_walk(start, stop, seqlen_q, reorder=False)
        return IntervalWalk(bounds, row_lists, col_lists, None)

    return walk


def follows_order(problem: AttentionProblem, mask: MaskView) -> bool:
    """Return whether k, v and bias of a call can be copied into the order of keys of an interval mask.

    Not with a bias of one value per score, or a gradient of that shape: its copy would take longer than the order
    saves. Not if the heads of a group have different masks, because they have the same k and v. Not with dropout, whose
    random numbers depend on the index of a key.
    """
    return mask.tensors[2].shape[1] in (1, problem.num_heads_k) and may_follow_order(problem)


def may_follow_order(problem: AttentionProblem) -> bool:
    """Return the result of `follows_order` for masks that have one order for the heads of a group."""
    return problem.dropout_p == 0 and not reads_scores(problem)


def reads_scores(problem: AttentionProblem) -> bool:
    """Return whether a call has a bias of one value per score, or needs a gradient of one value per score."""
    return problem.relative is not None or "score" in (problem.bias_class, problem.dbias_class)
