"""The operators of torch, one for each pass, for watched calls of all backends.

They are declared with `Library.define` and `impl`, and an `autograd.Function` around them differentiates them: a call
takes less than half the time on the host that it takes with `custom_op` and `register_autograd`. Programs of
`torch.export` have only the operators, so `autograd.py` also registers a derivative. An operator rebuilds the problem
of its call, and runs the same planned pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .backends.mask_choice import tangents_in_rows, through_rows
from .definition import LIBRARY, by_name, define, each_call, map_each, stacked
from .dispatch.plan import backward_pass, forward_pass, tangent_gradients_pass, tangents_pass
from .dispatch.registry import BACKENDS
from .gradients import empty_gradients, empty_outputs, empty_statistic, spread
from .problem import (
    AttentionProblem,
    Flags,
    Gradients,
    MaskForm,
    MaskView,
    NeedsGrad,
    RowEntropy,
    SequenceSpec,
    SequenceView,
    TensorSpec,
    allowed_pairs,
    describe_tensors,
    tensor_spec,
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
# A `SequenceSpec` is passed as three fields: the rest follows from the tensors.
_SPEC = {"layout": "dense", "max_seqlen_q": 0, "max_seqlen_k": 0}
_NUMBERS = Flags._fields[:-1]
_read_numbers = attrgetter(*_NUMBERS)
_MAY_BE_SYMBOLS = ("mask_repeat", "bias_repeat", "zero", "list_size", "max_seqlen_q", "max_seqlen_k")
# `Flags`, field by field, each of the type of its value.
_FLAGS = ", ".join(
    f"{'SymInt' if name in _MAY_BE_SYMBOLS else type(value).__name__} {name}"
    for name, value in {**dict(zip(_NUMBERS, Flags(-1, -1, 1.0, 0.0, False))), **_SPEC}.items()
)
# `backend` runs the pass. `backward` names the backend of the backward pass in exported programs, "" for the same one.
# A result that the flags do not ask for has no elements.
FORWARD_SCHEMA = (
    f"({_INPUTS}, {_FLAGS}, str backend, str backward) -> (Tensor out, Tensor lse, Tensor max_scores, Tensor entropy)"
)
# The result has only the needed gradients, because an operator cannot return None under torch.compile.
BACKWARD_SCHEMA = (
    f"(Tensor dout, Tensor? dlse, Tensor? dentropy, {_INPUTS}, Tensor out, Tensor lse, Tensor? row_entropy, {_FLAGS}, "
    "str backend, bool[5] needs_grad)"
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


def _flat(x: Inputs) -> tuple[Any, ...]:
    """Return `_INPUTS`, which an operator takes before its flags."""
    sequences = None if x.sequences is None else list(x.sequences.tensors)
    return x.q, x.k, x.v, list(x.mask.tensors) or None, x.mask.form, x.bias, x.sink, sequences, x.dropout


def read_inputs(a: Any) -> Inputs:
    """Return the inputs of a call from the arguments of its operator."""
    sequences = SequenceView(*a.sequences) if a.sequences else None
    return Inputs(a.q, a.k, a.v, MaskView(a.mask_form, tuple(a.mask or ())), a.bias, a.sink, sequences, a.dropout)


def flat_flags(flags: Flags) -> tuple[Any, ...]:
    """Return `_FLAGS`, which an operator takes behind its tensors."""
    spec = flags.sequences
    numbers = flags[: len(_NUMBERS)]
    return (*numbers, *(_SPEC.values() if spec is None else (spec.layout, spec.max_seqlen_q, spec.max_seqlen_k)))


def _read_flags(a: Any) -> Flags:
    """Return the flags of a call from the arguments of its operator."""
    flags = Flags(*_read_numbers(a))
    if not a.sequences:
        return flags
    (bounds, *tables), page_size, rows_k = a.sequences, 0, a.k.shape[1]
    if tables:
        page_size = a.k.shape[1]
        rows_k = tables[0].shape[1] * page_size if a.k.shape[0] > 0 else 0
    sizes = (bounds.shape[0], a.q.shape[1], rows_k, a.max_seqlen_q, a.max_seqlen_k)
    return flags._replace(sequences=SequenceSpec(a.layout, *sizes, page_size=page_size))


def read_call(a: Any) -> tuple[AttentionProblem, Inputs]:
    """Return the problem and the inputs of a call from the arguments of its operator."""
    x = read_inputs(a)
    return describe_operands(x, _read_flags(a)), x


def forward(problem: AttentionProblem, backend: str, backward: str, inputs: Inputs) -> tuple[Tensor, ...]:
    """Call the operator of the forward pass; it gets views (B, L, H, D) of q, k and v, however they arrive."""
    onnx = None if torch.compiler.is_compiling() else sys.modules.get("torch.onnx")
    if onnx is not None and onnx.is_in_onnx_export():
        raise NotImplementedError(
            'ONNX has no operator like that of attention; call attention(..., backend="reference"), which is plain '
            "PyTorch, or use torch.export"
        )
    x, named = inputs.in_rows(problem.arrival), "" if backward == backend else backward
    out, lse, *more = _forward_operator(*_flat(x), *flat_flags(problem.flags), backend, named)
    asked = (problem.flags.max_scores, problem.flags.entropy)
    results = (out, lse, *[each for each, is_asked in zip(more, asked, strict=True) if is_asked])
    return tuple([each.squeeze_(0) for each in results]) if problem.arrival == "tokens" else results


def backward(
    problem: AttentionProblem,
    backend: str,
    saved: Saved,
    dout: Tensor,
    dlse: Tensor | None,
    entropy: RowEntropy | None = None,
) -> tuple[Tensor | None, ...]:
    """Call the operator of the backward pass; return the five gradients, None for each that is not needed."""
    numbers = (*flat_flags(problem.flags), backend, list(problem.needs_grad))

    def run(saved: Saved, dout: Tensor, dlse: Tensor | None, **more: Any) -> Gradients:
        x, out, lse = saved
        values, dentropy = more.get("entropy", (None, None))
        gradients = _backward_operator(dout, dlse, dentropy, *_flat(x), out, lse, values, *numbers)
        return spread(gradients, problem.needs_grad)

    more = {} if entropy is None else {"entropy": entropy}
    return through_rows(problem, run)(saved, dout, dlse, **more)


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


def _read_tangents(a: Any) -> Tangents:
    return Tangents(a.tq, a.tk, a.tv, a.tbias, a.tsink)


def _run_forward(a: Any) -> tuple[Tensor, ...]:
    problem, x = read_call(a)
    out, lse, *more = forward_pass(BACKENDS[a.backend], problem)(x)
    asked = iter(more)
    return out, lse, *(next(asked) if each else lse.new_empty(0) for each in (a.max_scores, a.entropy))


def _run_backward(a: Any) -> list[Tensor]:
    problem, x = read_call(a)
    run = backward_pass(BACKENDS[a.backend], problem._replace(needs_grad=NeedsGrad(*a.needs_grad)))
    more: dict[str, Any] = {} if a.dentropy is None else {"entropy": RowEntropy(a.row_entropy, a.dentropy)}
    return [gradient for gradient in run(Saved(x, a.out, a.lse), a.dout, a.dlse, **more) if gradient is not None]


def _run_tangents(a: Any) -> tuple[Tensor, ...]:
    problem, x = read_call(a)
    return tangents_pass(BACKENDS[a.backend], problem)(x, _read_tangents(a))


def _run_tangent_gradients(a: Any) -> list[Tensor]:
    problem, x = read_call(a)
    run = tangent_gradients_pass(BACKENDS[a.backend], problem, tuple(a.needs_grad))
    both = run(x, _read_tangents(a), a.lse, Cotangents(a.dout, a.dlse, a.dtout, a.dtlse))
    return [gradient for gradients in both for gradient in gradients if gradient is not None]


def _forward_fake(a: Any) -> tuple[Tensor, ...]:
    out, lse = empty_outputs(a.q, a.v, BACKENDS[a.backend].widens(a.bias))
    return (
        out,
        lse,
        *(empty_statistic(lse, a.q.dtype) if each else lse.new_empty(0) for each in (a.max_scores, a.entropy)),
    )


def _backward_fake(a: Any) -> list[Tensor]:
    return empty_gradients((a.q, a.k, a.v, a.bias, a.sink), a.needs_grad)


def _tangents_fake(a: Any) -> tuple[Tensor, ...]:
    wide = BACKENDS[a.backend].widens(a.bias)
    return (*empty_outputs(a.q, a.v, wide), *empty_outputs(a.q, a.v, wide))


def _tangent_gradients_fake(a: Any) -> list[Tensor]:
    return empty_gradients((a.q, a.k, a.v, a.bias, a.sink) * 2, a.needs_grad)


def _map_forward(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
    """Map the operator under `torch.func.vmap` in a graph, where the rules of `autograd.py` do not apply."""
    if any(isinstance(x, Tensor) and torch._C._functorch.is_gradtrackingtensor(x) for x in arguments):
        # Dynamo runs the operator itself below vmap, and the derivative of an operator is not used by transforms. This
        # error breaks the graph.
        raise NotImplementedError(
            "torch.compile traces torch.func.grad of vmap of attention, for which it keeps no derivative; "
            'call attention(..., backend="reference"), or transform outside of torch.compile'
        )
    return stacked([_forward_operator(*own) for own in each_call(info.batch_size, in_dims, arguments)])


# FLOP of the operators, for `torch.utils.flop_counter.FlopCounterMode`. A matrix product of one pair of a query and a
# key over a head dim counts two FLOP for each of its terms. The pairs that causality and the window allow are counted.
# Masks and lengths are on the device, and the host does not wait for them: so all pairs of a mask count, and with
# sequences max_seqlen_k keys count for each query. Softmax, bias and softcap do not count, as in torch's formulas.

_formulas: dict[Any, Callable[..., int]] = {}


def _forward_flop(a: Any) -> int:
    """Return the FLOP of the forward operator: q k^T and p v, so 2 D + 2 Dv for each allowed pair and query head."""
    return count_forward_flop(_pairs(a), a.q.shape[3], a.v.shape[3])


def count_forward_flop(pairs: int, head_dim: int, head_dim_v: int) -> int:
    """Return the FLOP of a forward pass with a number of allowed pairs, counted over all query heads."""
    return pairs * 2 * (head_dim + head_dim_v)


def _backward_flop(a: Any) -> int:
    """Return the FLOP of the backward operator, for the gradients that are needed.

    For each allowed pair and query head: the scores are computed again, 2 D. dq, dk and dbias need dp = dout v^T, 2 Dv.
    Then dq and dk take 2 D each and dv takes 2 Dv; dbias and dsink take no product. All gradients together take 2.5
    times the forward pass if D is Dv.
    """
    return count_backward_flop(_pairs(a), a.q.shape[3], a.v.shape[3], a.needs_grad)


def count_backward_flop(pairs: int, dim: int, dim_v: int, needs_grad: Sequence[bool]) -> int:
    """Return the FLOP of a backward pass with a number of allowed pairs, counted over all query heads."""
    need_q, need_k, need_v, need_bias, *_ = needs_grad
    if not any(needs_grad[:4]):
        return 0
    dp = dim_v if need_q or need_k or need_bias else 0
    return pairs * 2 * (dim + dp + need_v * dim_v + (need_q + need_k) * dim)


def _tangents_flop(a: Any) -> int:
    """Return the FLOP of the forward operator in forward mode: up to six products instead of two.

    For each allowed pair and query head: 2 D + 2 Dv for out, 2 D each for tq k^T and q tk^T, 2 Dv for p tv, and 2 Dv
    for (p ts) v where scores have tangents.
    """
    tangents = _read_tangents(a)
    moves_scores = any(x is not None for x in (tangents.q, tangents.k, tangents.bias, tangents.sink))
    products = a.q.shape[3] * (1 + (a.tq is not None) + (a.tk is not None))
    products += a.v.shape[3] * (1 + (a.tv is not None) + moves_scores)
    return _pairs(a) * 2 * products


def _tangent_gradients_flop(a: Any) -> int:
    """Return the FLOP of the gradients in forward mode, each product that the formula names counted once."""
    need_q, need_k, need_v, _, _, need_tq, need_tk, need_tv, *_ = a.needs_grad
    sent, has_tq, has_tk = (a.dout is not None) + (a.dtout is not None), a.tq is not None, a.tk is not None
    scores = 1 + has_tq + has_tk + need_q * (1 + has_tk) + need_k * (1 + has_tq) + need_tq + need_tk
    values = sent * (1 + need_v) + (a.dtout is not None) * ((a.tv is not None) + need_tv)
    return _pairs(a) * 2 * (a.q.shape[3] * scores + a.v.shape[3] * values)


def _pairs(a: Any) -> int:
    """Count the pairs of a query and a key that a call allows, over all query heads."""
    batch, seqlen_q, num_heads, _ = a.q.shape
    if a.layout != "dense":
        return batch * seqlen_q * num_heads * a.max_seqlen_k
    return batch * num_heads * allowed_pairs(seqlen_q, a.k.shape[1], (a.left, a.right))


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


def define_counted(
    name: str, schema: str, run: Callable[[Any], Any], fake: Callable[[Any], Any], flop: Callable[[Any], int]
) -> Callable[..., Any]:
    """Define an operator with a formula of its FLOP; all three functions read its arguments by name."""
    wrap = by_name(schema)
    return register(define(name, schema, wrap(run), wrap(fake)), wrap(flop))


_forward_operator = define_counted("attention_forward", FORWARD_SCHEMA, _run_forward, _forward_fake, _forward_flop)
_backward_operator = define_counted(
    "attention_backward", BACKWARD_SCHEMA, _run_backward, _backward_fake, _backward_flop
)
_tangents_operator = define_counted(
    "attention_tangents", TANGENTS_SCHEMA, _run_tangents, _tangents_fake, _tangents_flop
)
_tangent_gradients_operator = define_counted(
    "attention_tangent_gradients",
    TANGENT_GRADIENTS_SCHEMA,
    _run_tangent_gradients,
    _tangent_gradients_fake,
    _tangent_gradients_flop,
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
        return tensor_spec(first)
    if form == "tree":
        number, tokens, _ = first.shape
        return unpacked_spec((number, 1, tokens, tokens))
    if form == "sequence_tiles":
        assert spec is not None
        return unpacked_spec(spec.shape_of_tiles(first.shape[1]))
    if form == "lists" and spec is not None:
        seqlen_q = spec.rows_q
    return unpacked_spec((*first.shape[:2], 1 if form == "keys" else seqlen_q, seqlen_k))
