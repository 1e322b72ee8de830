"""The operators of torch, one for each pass, through which watched calls go, whatever the backend.

They are declared with `Library.define` and `impl`, and an `autograd.Function` around them differentiates them, which
takes less than half the time of `custom_op` and `register_autograd`. Programs of `torch.export` have only the
operators, so `autograd.py` also registers a derivative. An operator rebuilds the problem of its call, and runs the same
planned pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .backends.mask_choice import tangents_in_rows, through_rows
from .definition import LIBRARY, define, each_call, map_each, stacked
from .dispatch.plan import backward_pass, forward_pass, tangent_gradients_pass, tangents_pass
from .dispatch.registry import BACKENDS
from .gradients import empty_gradients, empty_outputs, spread
from .problem import (
    AttentionProblem,
    Flags,
    Gradients,
    MaskForm,
    MaskView,
    NeedsGrad,
    SequenceSpec,
    SequenceView,
    TensorSpec,
    allowed_pairs,
    describe_tensors,
    spec_of,
    unpacked_spec,
)
from .problem.inputs import Inputs, Saved, as_arrived, result_in_rows
from .reference.tangents import Cotangents, Tangents

# The fields of `Inputs`: `mask` and `mask_form` make a `MaskView`, the tensors `sequences` a `SequenceView`. An empty
# list is passed as None, because AOTInductor cannot pass an empty list.
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor[]? mask, str mask_form, Tensor? bias, Tensor? sink, Tensor[]? sequences, "
    "Tensor? dropout"
)
# `Flags`, one by one. Three numbers stand for the `SequenceSpec`: the tensors tell the rest.
_FLAGS = (
    "int left, int right, float softmax_scale, float softcap, bool deterministic, "
    "SymInt mask_repeat, SymInt bias_repeat, str mask_packing, str bias_packing, float dropout_p, bool one_mask_row, "
    "SymInt zero, str outside, int block_q, int block_k, SymInt list_size, bool chosen, "
    "str layout, SymInt max_seqlen_q, SymInt max_seqlen_k"
)
# `backend` runs the pass. `backward` names the backend of the backward pass in exported programs, "" for the same one.
FORWARD_SCHEMA = f"({_INPUTS}, {_FLAGS}, str backend, str backward) -> (Tensor out, Tensor lse)"
# The result lists only the requested gradients, because an operator cannot return None under torch.compile.
BACKWARD_SCHEMA = (
    f"(Tensor dout, Tensor? dlse, {_INPUTS}, Tensor out, Tensor lse, {_FLAGS}, str backend, bool[5] needs_grad)"
    " -> Tensor[]"
)
# The same in forward mode: also the tangents of out and lse, and the gradients of all inputs, then of their tangents.
_TANGENTS = "Tensor? tq, Tensor? tk, Tensor? tv, Tensor? tbias, Tensor? tsink"
TANGENTS_SCHEMA = (
    f"({_TANGENTS}, {_INPUTS}, {_FLAGS}, str backend) -> (Tensor out, Tensor lse, Tensor tout, Tensor tlse)"
)
TANGENT_GRADIENTS_SCHEMA = (
    f"(Tensor? dout, Tensor? dlse, Tensor? dtout, Tensor? dtlse, {_TANGENTS}, {_INPUTS}, Tensor lse, {_FLAGS}, "
    "str backend, bool[10] needs_grad) -> Tensor[]"
)
NUM_INPUTS, NUM_FLAGS = 9, len(Flags._fields) + 2


def _flat(x: Inputs) -> tuple[Any, ...]:
    sequences = None if x.sequences is None else list(x.sequences.tensors)
    return x.q, x.k, x.v, list(x.mask.tensors) or None, x.mask.form, x.bias, x.sink, sequences, x.dropout


def read_inputs(arguments: Sequence[Any]) -> Inputs:
    """Read `_INPUTS`, the first arguments of an operator."""
    q, k, v, mask, form, bias, sink, sequences, dropout = arguments
    view = SequenceView(*sequences) if sequences else None
    return Inputs(q, k, v, MaskView(form, tuple(mask or ())), bias, sink, view, dropout)


def flat_flags(flags: Flags) -> tuple[Any, ...]:
    """Return `_FLAGS`, which an operator takes behind its tensors."""
    spec = flags.sequences
    return (*flags[:-1], *(("dense", 0, 0) if spec is None else (spec.layout, spec.max_seqlen_q, spec.max_seqlen_k)))


def read_flags(x: Inputs, arguments: Sequence[Any]) -> Flags:
    """Read `_FLAGS`, beside tensors that `read_inputs` returned."""
    *numbers, layout, max_seqlen_q, max_seqlen_k = arguments
    if x.sequences is None:
        return Flags(*numbers)
    (bounds, table), page_size, rows_k = x.sequences, 0, x.k.shape[1]
    if table is not None:
        page_size = x.k.shape[1]
        rows_k = table.shape[1] * page_size if x.k.shape[0] > 0 else 0
    sizes = (bounds.shape[0], x.q.shape[1], rows_k, max_seqlen_q, max_seqlen_k)
    return Flags(*numbers)._replace(sequences=SequenceSpec(layout, *sizes, page_size=page_size))


def forward(problem: AttentionProblem, backend: str, backward: str, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Call the operator of the forward pass; it gets views (B, L, H, D) of q, k and v, however they arrive."""
    onnx = None if torch.compiler.is_compiling() else sys.modules.get("torch.onnx")
    if onnx is not None and onnx.is_in_onnx_export():
        raise NotImplementedError(
            'ONNX has no operator like that of attention; call attention(..., backend="reference"), which is plain '
            "PyTorch, or use torch.export"
        )
    x, named = inputs.in_rows(problem.arrival), "" if backward == backend else backward
    out, lse = _forward_operator(*_flat(x), *flat_flags(problem.flags), backend, named)
    return (out.squeeze_(0), lse.squeeze_(0)) if problem.arrival == "tokens" else (out, lse)


def backward(
    problem: AttentionProblem, backend: str, saved: Saved, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Call the operator of the backward pass; return the five gradients, None for each that is not needed."""
    numbers = (*flat_flags(problem.flags), backend, list(problem.needs_grad))

    def run(saved: Saved, dout: Tensor, dlse: Tensor | None, **_: Any) -> Gradients:
        x, out, lse = saved
        return spread(_backward_operator(dout, dlse, *_flat(x), out, lse, *numbers), problem.needs_grad)

    return through_rows(problem, run)(saved, dout, dlse)


def tangents(problem: AttentionProblem, backend: str, x: Inputs, own: Tangents) -> tuple[Tensor, ...]:
    """Call the operator of the forward pass in forward mode: (out, lse, tout, tlse)."""
    arrival = problem.arrival
    rows = tangents_in_rows(own, arrival)
    results: tuple[Tensor, ...] = _tangents_operator(
        *rows, *_flat(x.in_rows(arrival)), *flat_flags(problem.flags), backend
    )
    # Not in place, because tangents may be batched in the way that is older than torch.func, which would miscount dims.
    return tuple(each.squeeze(0) for each in results) if arrival == "tokens" else results


def tangent_gradients(
    problem: AttentionProblem,
    backend: str,
    x: Inputs,
    own: Tangents,
    lse: Tensor,
    sent: Cotangents,
    needs_grad: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Call the operator of the gradients in forward mode; return all ten, None for each that is not needed."""
    arrival = problem.arrival
    arguments = (*tangents_in_rows(own, arrival), *_flat(x.in_rows(arrival)), result_in_rows(lse, arrival))
    rows = (result_in_rows(each, arrival) for each in sent)
    needed = _tangent_gradients_operator(*rows, *arguments, *flat_flags(problem.flags), backend, list(needs_grad))
    gradients = spread(needed, needs_grad)
    return (*as_arrived(gradients[:5], arrival), *as_arrived(gradients[5:], arrival))


def _run_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    inputs = read_inputs(arguments[:NUM_INPUTS])
    problem = describe_operands(inputs, read_flags(inputs, arguments[NUM_INPUTS:-2]))
    out, lse = forward_pass(BACKENDS[arguments[-2]], problem)(inputs)
    return out, lse


def _run_backward(dout: Tensor, dlse: Tensor | None, *arguments: Any) -> list[Tensor]:
    inputs, (out, lse) = read_inputs(arguments[:NUM_INPUTS]), arguments[NUM_INPUTS : NUM_INPUTS + 2]
    *flags, backend, needs_grad = arguments[NUM_INPUTS + 2 :]
    problem = describe_operands(inputs, read_flags(inputs, flags), NeedsGrad(*needs_grad))
    gradients: Gradients = backward_pass(BACKENDS[backend], problem)(Saved(inputs, out, lse), dout, dlse)
    return [gradient for gradient in gradients if gradient is not None]


def _run_tangents(*arguments: Any) -> tuple[Tensor, ...]:
    own, inputs = Tangents(*arguments[:5]), read_inputs(arguments[5 : 5 + NUM_INPUTS])
    *flags, backend = arguments[5 + NUM_INPUTS :]
    return tangents_pass(BACKENDS[backend], describe_operands(inputs, read_flags(inputs, flags)))(inputs, own)


def _run_tangent_gradients(*arguments: Any) -> list[Tensor]:
    sent, own = Cotangents(*arguments[:4]), Tangents(*arguments[4:9])
    inputs, lse = read_inputs(arguments[9 : 9 + NUM_INPUTS]), arguments[9 + NUM_INPUTS]
    *flags, backend, needs_grad = arguments[10 + NUM_INPUTS :]
    problem, needed = describe_operands(inputs, read_flags(inputs, flags)), tuple(needs_grad)
    both = tangent_gradients_pass(BACKENDS[backend], problem, needed)(inputs, own, lse, sent)
    return [x for gradients in both for x in gradients if x is not None]


def _tangents_fake(*arguments: Any) -> tuple[Tensor, ...]:
    x = read_inputs(arguments[5 : 5 + NUM_INPUTS])
    wide = BACKENDS[arguments[-1]].widens(x.bias)
    return (*empty_outputs(x.q, x.v, wide), *empty_outputs(x.q, x.v, wide))


def _tangent_gradients_fake(*arguments: Any) -> list[Tensor]:
    x = read_inputs(arguments[9 : 9 + NUM_INPUTS])
    return empty_gradients((x.q, x.k, x.v, x.bias, x.sink) * 2, arguments[-1])


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    x = read_inputs(arguments[:NUM_INPUTS])
    return empty_outputs(x.q, x.v, BACKENDS[arguments[-2]].widens(x.bias))


def _backward_fake(dout: Tensor, dlse: Tensor | None, *arguments: Any) -> list[Tensor]:
    x = read_inputs(arguments[:NUM_INPUTS])
    return empty_gradients((x.q, x.k, x.v, x.bias, x.sink), arguments[-1])


def _map_forward(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
    """Map the operator under `torch.func.vmap` in a graph, where the rules of `autograd.py` do not apply."""
    if any(isinstance(x, Tensor) and torch._C._functorch.is_gradtrackingtensor(x) for x in arguments):
        # Dynamo runs the operator itself below vmap, and the derivative of an operator serves no transform. This error
        # breaks the graph.
        raise NotImplementedError(
            "torch.compile traces torch.func.grad of vmap of attention, for which it keeps no derivative; "
            'call attention(..., backend="reference"), or transform outside of torch.compile'
        )
    return stacked([_forward_operator(*own) for own in each_call(info.batch_size, in_dims, arguments)])


# FLOP of the operators, for `torch.utils.flop_counter.FlopCounterMode`. A matrix product of one pair of a query and a
# key over a head dim counts two FLOP for each of its terms. The pairs that causality and the window allow are counted.
# Masks and lengths are on the device, and the host does not wait for them: so all pairs of a mask count, and with
# sequences max_seqlen_k keys count for each query. Softmax, bias and softcap count nothing, as in torch's own formulas.

_formulas: dict[Any, Callable[..., int]] = {}


def forward_flop(q: Tensor, k: Tensor, v: Tensor, *others: Any, out_val: object = None) -> int:
    """Return the FLOP of the forward operator: q k^T and p v, so 2 D + 2 Dv for each allowed pair and query head."""
    return forward_flop_of(_pairs(q, k, others[NUM_INPUTS - 3 : -2]), q.shape[3], v.shape[3])


def forward_flop_of(pairs: int, head_dim: int, head_dim_v: int) -> int:
    """Return the FLOP of a forward pass with a number of allowed pairs, counted over all query heads."""
    return pairs * 2 * (head_dim + head_dim_v)


def backward_flop(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *others: Any, out_val: object = None
) -> int:
    """Return the FLOP of the backward operator, for the gradients that are needed.

    For each allowed pair and query head: the scores are computed again, 2 D. dq, dk and dbias need dp = dout v^T, 2 Dv.
    Then dq and dk take 2 D each and dv takes 2 Dv; dbias and dsink take no product. All gradients together take 2.5
    times the forward pass if D is Dv.
    """
    return backward_flop_of(_pairs(q, k, others[NUM_INPUTS - 1 : -2]), q.shape[3], v.shape[3], others[-1])


def backward_flop_of(pairs: int, dim: int, dim_v: int, needs_grad: Sequence[bool]) -> int:
    """Return the FLOP of a backward pass with a number of allowed pairs, counted over all query heads."""
    need_q, need_k, need_v, need_bias, *_ = needs_grad
    if not any(needs_grad[:4]):
        return 0
    dp = dim_v if need_q or need_k or need_bias else 0
    return pairs * 2 * (dim + dp + need_v * dim_v + (need_q + need_k) * dim)


def tangents_flop(*arguments: Any, out_val: object = None) -> int:
    """Return the FLOP of the forward operator in forward mode: up to six products in the place of two.

    For each allowed pair and query head: 2 D + 2 Dv for out, 2 D each for tq k^T and q tk^T, 2 Dv for p tv, and 2 Dv
    for (p ts) v where scores have tangents.
    """
    tq, tk, tv, tbias, tsink, q, k, v = arguments[:8]
    dim, dim_v = q.shape[3], v.shape[3]
    moves_scores = any(x is not None for x in (tq, tk, tbias, tsink))
    products = dim * (1 + (tq is not None) + (tk is not None)) + dim_v * (1 + (tv is not None) + moves_scores)
    return _pairs(q, k, arguments[5 + NUM_INPUTS : -1]) * 2 * products


def tangent_gradients_flop(*arguments: Any, out_val: object = None) -> int:
    """Return the FLOP of the gradients in forward mode, each product that the formula names counted once."""
    dout, _, dtout, _, tq, tk, tv, _, _, q, k, v = arguments[:12]
    needs_grad = arguments[-1]
    need_q, need_k, need_v, _, _, need_tq, need_tk, need_tv, *_ = needs_grad
    sent, has_tq, has_tk = (dout is not None) + (dtout is not None), tq is not None, tk is not None
    scores = 1 + has_tq + has_tk + need_q * (1 + has_tk) + need_k * (1 + has_tq) + need_tq + need_tk
    values = sent * (1 + need_v) + (dtout is not None) * ((tv is not None) + need_tv)
    return _pairs(q, k, arguments[10 + NUM_INPUTS : -2]) * 2 * (q.shape[3] * scores + v.shape[3] * values)


def _pairs(q: Tensor, k: Tensor, numbers: Sequence[Any]) -> int:
    (batch, seqlen_q, num_heads, _), (left, right, *_, layout, _, max_seqlen_k) = q.shape, numbers
    if layout != "dense":
        return batch * seqlen_q * num_heads * max_seqlen_k
    return batch * num_heads * allowed_pairs(seqlen_q, k.shape[1], (left, right))


def register(operator: Any, formula: Callable[..., int]) -> Callable[..., Any]:
    """Let torch's counter count an operator by a formula of its arguments; return a function that calls the operator.

    Torch's counter is not imported here, because it imports Triton. If the program has imported it, it gets the
    formulas now; otherwise the first call that a dispatch mode watches passes them on.
    """
    _formulas[operator.overloadpacket] = formula
    _tell_counters()

    def call(*arguments: Any) -> Any:
        if not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0:
            _tell_counters()
        return operator(*arguments)

    return call


def _tell_counters() -> None:
    """Give the formulas to torch's counter, if it is imported, and to counters that are active."""
    counter = sys.modules.get("torch.utils.flop_counter")
    if counter is None:
        return
    for packet in [packet for packet in _formulas if packet not in counter.flop_registry]:
        # get_raw: the formulas take tensors, not shapes.
        counter.register_flop_formula(packet, get_raw=True)(_formulas[packet])
    for mode in _get_current_dispatch_mode_stack():
        # A counter copies the registry when it is made, perhaps before the formulas were in it.
        own = getattr(getattr(mode, "counter", None), "flop_registry", {})
        for packet in [packet for packet in _formulas if packet not in own]:
            own[packet] = counter.flop_registry[packet]


_forward_operator = register(define("attention_forward", FORWARD_SCHEMA, _run_forward, _forward_fake), forward_flop)
_backward_operator = register(
    define("attention_backward", BACKWARD_SCHEMA, _run_backward, _backward_fake), backward_flop
)
_tangents_operator = register(
    define("attention_tangents", TANGENTS_SCHEMA, _run_tangents, _tangents_fake), tangents_flop
)
_tangent_gradients_operator = register(
    define("attention_tangent_gradients", TANGENT_GRADIENTS_SCHEMA, _run_tangent_gradients, _tangent_gradients_fake),
    tangent_gradients_flop,
)
torch.library.register_vmap("flash_dmattn::attention_forward", _map_forward, lib=LIBRARY)
map_each("attention_backward", _backward_operator)  # as jacrev does in a graph


def describe_operands(x: Inputs, flags: Flags, needs_grad: NeedsGrad = NeedsGrad()) -> AttentionProblem:  # noqa: B008
    """Rebuild the problem of a call from the arguments of its operator."""
    spec, seqlen_q, seqlen_k = flags.sequences, x.q.shape[1], x.k.shape[1]
    if spec is not None:
        seqlen_q, seqlen_k = spec.max_seqlen_q, spec.max_seqlen_k
    mask = _describe_mask(x.mask, seqlen_q, seqlen_k, spec)
    return describe_tensors(x.q, x.k, x.v, mask, x.mask.form, x.bias, x.sink, flags, needs_grad)


def _describe_mask(mask: MaskView, seqlen_q: int, seqlen_k: int, spec: SequenceSpec | None) -> TensorSpec | None:
    form: MaskForm = mask.form
    if form == "none":
        return None
    first = mask.tensors[0]
    if form == "dense":
        return spec_of(first)
    if form == "tree":
        number, tokens, _ = first.shape
        return unpacked_spec((number, 1, tokens, tokens))
    if form == "sequence_tiles":
        assert spec is not None
        return unpacked_spec(spec.shape_of_tiles(first.shape[1]))
    if form == "lists" and spec is not None:
        seqlen_q = spec.rows_q
    return unpacked_spec((*first.shape[:2], 1 if form == "keys" else seqlen_q, seqlen_k))
