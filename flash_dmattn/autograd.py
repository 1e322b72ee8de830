"""The `autograd.Function` that everything can watch: the contract of gradients, shared by every kernel backend.

Under `torch.vmap` both passes run once, with the mapped dim folded into the batch: see `MappedCall`. The batch shares
one sink per head, so calls that have each their own, or their own gradient of it, run one by one. So do calls with
dropout, whose entries are numbered anew in each.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .backends.protocol import KernelBackend, accepts, provided, repeats_entries
from .definition import distinct, is_batched, is_transformed, one_by_one
from .dispatch.config import BackendChoice
from .dispatch.mask_view import readable_view
from .dispatch.selection import choice_in_force, select_pair
from .operators import extra_arguments, view_of
from .problem import AttentionProblem, Gradients, MappedCall, MaskForm, MaskView, NeedsGrad, SequenceView


class Passes(NamedTuple):
    """What both passes of a call share and is no tensor: one argument, since autograd takes long for each."""

    problem: AttentionProblem
    forward: KernelBackend
    backward: KernelBackend | None  # None of a call without gradients
    mask_form: MaskForm
    requested: BackendChoice
    number_of_sequence_tensors: int = 0  # which stand behind those of the mask
    has_dropout: bool = False  # whether its key stands behind those

    def split(self, tensors: tuple[Tensor, ...]) -> tuple[MaskView, SequenceView | None, Tensor | None]:
        """The mask, the sequences and the key of dropout of the tensors that follow `Passes` among the arguments."""
        behind = len(tensors) - self.has_dropout
        end = behind - self.number_of_sequence_tensors
        dropout = tensors[behind] if self.has_dropout else None
        return MaskView(self.mask_form, tensors[:end]), view_of(tensors[end:behind]), dropout

    @property
    def exported(self) -> AttentionProblem:
        """The problem, with the name of the backend of the backward pass where it is another."""
        if self.backward is None or self.backward.NAME == self.forward.NAME:
            return self.problem
        return self.problem._replace(backward=self.backward.NAME)

    @property
    def runs_one_by_one(self) -> bool:
        """Whether calls that are mapped are not folded into one: sequences and dropout number the entries of each."""
        return self.has_dropout or self.number_of_sequence_tensors > 0


class Attention(torch.autograd.Function):
    """(out, lse) of a kernel backend, with the gradients of the contract and nothing that is not needed."""

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
        passes: Passes,
        *mask: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Run the forward pass."""
        return run_forward(passes.forward, passes.problem, q, k, v, bias, sink, *passes.split(mask))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep what the backward pass reads; lse is kept so that no (Lq, Lk) matrix has to be."""
        q, k, v, bias, sink, passes, *mask = inputs
        ctx.save_for_backward(q, k, v, bias, sink, *output, *mask)
        ctx.set_materialize_grads(False)  # an unused lse must not cost a dlse of zeros
        ctx.passes = passes

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
        passes: Passes,
        *mask: Tensor,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Run one forward pass for all the mapped calls, or of each its own."""
        if in_dims[4] is not None or passes.runs_one_by_one:
            calls = each_call(info.batch_size, in_dims, (q, k, v, bias, sink, passes, *mask))
            results = [attend_anew(passes, given, mask) for *given, passes, mask in calls]
            return tuple(torch.stack(x) for x in zip(*results, strict=True)), (0, 0)
        inputs, form = (q, k, v, bias), passes.mask_form
        call = MappedCall(
            info.batch_size,
            in_dims[:4],
            in_dims[6:],
            passes.problem,
            inputs,
            mask,
            form,
            repeats=reads_repeats(passes),
            needs_dsink=sink is not None and sink.requires_grad,
        )
        passes, mask = chosen_anew(passes, call.problem, call.mask)
        out, lse = attend(passes, *call.inputs, sink, *mask)
        return (call.split(out), call.split(lse)), (0, 0)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the backward pass, differentiable again where a graph of it is asked for."""
        q, k, v, bias, sink, out, lse, *mask = ctx.saved_tensors
        passes: Passes = ctx.passes
        rest = (None,) * (1 + len(mask))
        if dout is None:
            if dlse is None:
                return None, None, None, None, None, *rest
            dout = torch.zeros_like(out)
        return *differentiate(dout, dlse, q, k, v, bias, sink, out, lse, passes, *mask), *rest


def run_forward(
    backend: KernelBackend,
    problem: AttentionProblem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sink: Tensor | None,
    mask: MaskView,
    sequences: SequenceView | None,
    dropout: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The forward pass of a backend, which only of calls that have them is told of sinks, sequences and dropout."""
    if sink is None and sequences is None and dropout is None:
        return backend.forward(problem, q, k, v, mask, bias)
    return backend.forward(problem, q, k, v, mask, bias, **extra_arguments(sink, sequences, dropout))


def run_backward(
    passes: Passes,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    mask: tuple[Tensor, ...],
) -> Gradients:
    """The five gradients of the backend of the backward pass; that of a sink is None where there is none."""
    backend, (view, sequences, dropout) = passes.backward, passes.split(mask)
    assert backend is not None
    rest = extra_arguments(sink, sequences, dropout)
    gradients = backend.backward(passes.problem, dout, dlse, q, k, v, view, bias, out, lse, **rest)
    return gradients if sink is not None else (*gradients, None)


def attend(
    passes: Passes, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None, *mask: Tensor
) -> tuple[Tensor, Tensor]:
    """(out, lse), recorded where anything is to be derived from them."""
    if torch.compiler.is_exporting():
        # All that is kept is the operator, which has derivatives of its own; around it strict export keeps no_grad.
        return run_forward(passes.forward, passes.exported, q, k, v, bias, sink, *passes.split(mask))
    if passes.backward is None and not is_transformed():
        return run_forward(passes.forward, passes.problem, q, k, v, bias, sink, *passes.split(mask))
    results: tuple[Tensor, Tensor] = Attention.apply(*distinct(q, k, v, bias, sink, passes, *mask))
    return results


def each_call(size: int, in_dims: tuple[int | None, ...], arguments: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The arguments of each of the calls that `torch.vmap` maps, those from `Passes` on as (passes, mask)."""
    for index in range(size):
        given = [
            x.select(dim, index) if isinstance(x, Tensor) and dim is not None else x
            for x, dim in zip(arguments, in_dims, strict=True)
        ]
        place = next(place for place, x in enumerate(given) if isinstance(x, Passes))
        yield *given[:place], given[place], tuple(given[place + 1 :])


def attend_anew(passes: Passes, inputs: Sequence[Any], mask: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """(out, lse) of one of the calls that are mapped: which gradients it needs, its inputs tell."""
    needs_grad = NeedsGrad(*(x is not None and x.requires_grad for x in inputs))
    problem = passes.problem._replace(needs_grad=needs_grad if torch.is_grad_enabled() else NeedsGrad())
    passes, mask = chosen_anew(passes, problem, mask)
    q, k, v, bias, sink = inputs
    return attend(passes, q, k, v, bias, sink, *mask)


def reads_repeats(passes: Passes) -> bool:
    """Whether a mapped call may have masks and biases that a part of its batch shares, or has them expanded."""
    backends = (passes.forward, passes.backward)
    return choice_in_force(passes.requested) == "auto" or all(
        backend is None or repeats_entries(backend) for backend in backends
    )


def chosen_anew(
    passes: Passes, problem: AttentionProblem, mask: tuple[Tensor, ...]
) -> tuple[Passes, tuple[Tensor, ...]]:
    """The backends of a call that `torch.vmap` has changed, and the tensors of its mask as they read it."""
    forward, backward = select_pair(problem, passes.requested)
    view, *_ = passes.split(mask)
    behind = mask[len(view.tensors) :]
    view = readable_view(problem, view, forward, backward)
    chosen: dict[str, Any] = {"forward": forward, "backward": backward}
    return passes._replace(problem=problem, mask_form=view.form, **chosen), (*view.tensors, *behind)


def differentiate(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    passes: Passes,
    *mask: Tensor,
) -> Gradients:
    """The five gradients, recorded where anything is to be derived from them."""
    if is_batched(dout, dlse):
        return one_by_one(
            lambda dout, dlse: differentiate(dout, dlse, q, k, v, bias, sink, out, lse, passes, *mask), dout, dlse
        )
    if torch.is_grad_enabled() or is_transformed():
        gradients: Gradients = AttentionBackward.apply(dout, dlse, q, k, v, bias, sink, out, lse, passes, *mask)
        return gradients
    return run_backward(passes, dout, dlse, q, k, v, bias, sink, out, lse, mask)


class AttentionBackward(torch.autograd.Function):
    """The backward pass as a function of its own, so that it has a derivative or refuses to have one."""

    @staticmethod
    def forward(
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
        out: Tensor,
        lse: Tensor,
        passes: Passes,
        *mask: Tensor,
    ) -> tuple[Tensor | None, ...]:
        """Run the backward pass; nothing of (Lq, Lk) is kept for the second derivative."""
        return run_backward(passes, dout, dlse, q, k, v, bias, sink, out, lse, mask)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
        out: Tensor,
        lse: Tensor,
        passes: Passes,
        *mask: Tensor,
    ) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
        """Run one backward pass for all the mapped calls, each of which has gradients of its own."""
        needs_grad = passes.problem.needs_grad
        if in_dims[6] is not None or needs_grad.sink or passes.runs_one_by_one:
            arguments = (dout, dlse, q, k, v, bias, sink, out, lse, passes, *mask)
            calls = each_call(info.batch_size, in_dims, arguments)
            each = [differentiate(*given, passes, *mask) for *given, passes, mask in calls]
            results = tuple(None if x[0] is None else torch.stack(x) for x in zip(*each, strict=True))
            return results, tuple(None if x is None else 0 for x in results)
        inputs = (q, k, v, bias)
        call = MappedCall(
            info.batch_size,
            in_dims[2:6],
            in_dims[10:],
            passes.problem,
            inputs,
            mask,
            passes.mask_form,
            repeats=reads_repeats(passes),
            needs_grad=needs_grad,
        )
        if passes.backward is not None and accepts(passes.backward, call.problem, "backward"):
            passes, mask = passes._replace(problem=call.problem), call.mask
        else:
            passes, mask = chosen_anew(passes, call.problem, call.mask)
        dout, out, lse = (
            call.fold(x, dim) for x, dim in zip((dout, out, lse), (in_dims[0], *in_dims[7:9]), strict=True)
        )
        dlse = None if dlse is None else call.fold(dlse, in_dims[1])
        *gradients, _ = differentiate(dout, dlse, *call.inputs, sink, out, lse, passes, *mask)
        split = (call.split, call.split, call.split, call.split_bias)
        found = tuple(None if x is None else back(x) for x, back in zip(gradients, split, strict=True))
        return (*found, None), (*(None if x is None else 0 for x in found), None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        """Keep the inputs of the gradients; out and lse are functions of them."""
        dout, dlse, q, k, v, bias, sink, _, _, ctx.passes, *mask = inputs
        ctx.save_for_backward(dout, dlse, q, k, v, bias, sink, *mask)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Differentiate the gradient formula where the backend has one; it recomputes p, dense in (Lq, Lk)."""
        passes: Passes = ctx.passes
        problem, backend = passes.problem, passes.backward
        assert backend is not None
        differentiable_backward = provided(backend, "differentiable_backward")
        if differentiable_backward is None:
            raise NotImplementedError(
                f"backend {backend.NAME!r} has no second derivative of attention; "
                'call attention(..., backend="eager"), which has one'
            )
        dout, dlse, q, k, v, bias, sink, *mask = ctx.saved_tensors
        named = {"dout": dout, "dlse": dlse, "q": q, "k": k, "v": v, "bias": bias, "sink": sink}
        present = [name for name, x in named.items() if x is not None]
        needs_grad = problem.needs_grad
        view, sequences, dropout = passes.split(tuple(mask))
        rest_of_call = extra_arguments(None, sequences, dropout)

        def gradients_needed(*tensors: Tensor) -> tuple[Tensor, ...]:
            given: dict[str, Any] = dict(zip(present, tensors, strict=True))
            dlse, bias = given.pop("dlse", None), given.pop("bias", None)
            gradients = differentiable_backward(problem, dlse=dlse, mask=view, bias=bias, **rest_of_call, **given)
            return tuple(g for g, needed in zip(gradients, needs_grad, strict=False) if needed)

        # torch.func.vjp, unlike autograd.grad, also works under torch.func transforms.
        pull = torch.func.vjp(gradients_needed, *(named[name] for name in present))[1]
        rest = (None,) * (3 + len(mask))
        second = pull(tuple(g for g, needed in zip(cotangents, needs_grad, strict=True) if needed))
        found = dict(zip(present, second, strict=True))
        return found["dout"], found.get("dlse"), *(found.get(name) for name in NeedsGrad._fields), *rest


class _Positional(NamedTuple):
    """Arguments that were all given, by position."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def apply_defaults(self) -> None:
        """There is none."""


class _Signature(inspect.Signature):
    """A signature that binds in no time: torch finds and binds that of `forward` at every call."""

    def bind(self, /, *args: Any, **kwargs: Any) -> Any:
        """What torch asks for: the arguments as they are, where each has a place."""
        return super().bind(*args, **kwargs) if kwargs else _Positional(args, {})


for _forward in (Attention.forward, AttentionBackward.forward):
    vars(_forward)["__signature__"] = _Signature(list(inspect.signature(_forward).parameters.values()))
