"""A backend: its name, its rules, and how it plans the passes of a class of calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ..problem import FEATURES, AttentionProblem, Gradients, MaskForm
from ..problem.inputs import Inputs, Saved
from ..reference.tangents import Cotangents, Tangents

# "tangents" is the forward pass of a call in forward mode, which has the rules of "forward", too.
Direction = Literal["forward", "backward", "tangents"]

# The hint of a refusal, by the feature that a backend lacks.
_HINTS = {
    **dict.fromkeys(("relative_bias", "band_bias"), "bias.dense(seqlen_q, seqlen_k) is a tensor that it takes"),
    "lists": "PreparedMask.from_mask(mask.dense()) has a bit for each pair, which it may take",
    "max_scores": '"cuda", "triton", "flex" and "eager" have it',
    "entropy": '"triton" and "eager" have it',
    "list_bias": "bias.dense(mask) is a tensor that it takes, of one value for each pair",
}

# Features of the forward pass only: their result has no gradient, so a backward pass does not need it.
_FORWARD_ONLY = frozenset({"max_scores"})

# forward(inputs) -> (out, lse), followed by the maximum scores and the entropies of rows, in this order, if the flags
# of the problem ask for them. A forward pass that PyTorch differentiates also returns probabilities if the problem asks
# for them, and may return (out,) if the problem needs no other result.
Forward = Callable[[Inputs], tuple[Tensor, ...]]
# tangents(inputs, tangents) -> (out, lse, tout, tlse), computed together.
ForwardTangents = Callable[[Inputs, Tangents], tuple[Tensor, Tensor, Tensor, Tensor]]
# gradients(inputs, tangents, lse, cotangents) -> the gradients of the inputs, and of their tangents.
BackwardTangents = Callable[[Inputs, Tangents, Tensor, Cotangents], tuple[Tangents, Tangents]]


class Backward(Protocol):
    """The backward pass of a class of calls."""

    def __call__(
        self, saved: Saved, dout: Tensor, dlse: Tensor | None, *, dbias_out: Tensor | None = None
    ) -> Gradients:
        """Return (dq, dk, dv, dbias, dsink), with None for each that `problem.needs_grad` does not ask for.

        Only backends with `stores_dbias` get `dbias_out`, a tensor of the shape, dtype and device of the bias. It may
        have any strides without overlap. They write dbias into it and return it.

        Only backends with the feature "entropy" get `entropy=`, a `RowEntropy`, where entropies have a gradient.
        """
        ...


class Rule(NamedTuple):
    """One condition that a backend puts on a call.

    Attributes:
        code: the name of the rule.
        holds: a fast predicate. It depends only on the problem, because its answer is reused for calls with equal
            problems.
        says: the reason for a refusal, with the values of this call.
        hint: how to change the call.
        passes: the passes that it applies to; a backend may accept a forward pass and refuse the backward pass.
        calls: the calls that it applies to, without sequences ("dense"), with them, or both. `holds` gets only these.
        example: a call that breaks this rule and no other of the backend. Tests and docs/support.md use it. It has
            arguments of `explanation.explain_problem`, whose q is (2, 4096, 16, 64) if left out, and fields of its
            problem.
    """

    code: str
    holds: Callable[[AttentionProblem], bool]
    says: Callable[[AttentionProblem], str]
    hint: str = ""
    passes: tuple[Direction, ...] = ("forward", "backward")
    calls: Literal["dense", "sequences", "both"] = "both"
    example: Mapping[str, Any] = MappingProxyType({})

    def is_kept(self, problem: AttentionProblem) -> bool:
        """Return whether a call satisfies the rule; calls that it does not apply to do."""
        other = "sequences" if problem.sequences is None else "dense"
        return self.calls == other or self.holds(problem)


class Reason(NamedTuple):
    """Why a backend does not serve a call: a broken rule, a failed probe, or a setting that disables it."""

    backend: str
    code: str
    text: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.hint})" if self.hint else self.text


class Availability(NamedTuple):
    """The result of `probe()`: usable, or why not, and the exception that showed it.

    `reason` and `hint` are a line each; `details` is a longer text for a user who named this backend.
    """

    usable: bool
    reason: str = ""
    hint: str = ""
    exception: BaseException | None = None
    details: str = ""


class Probe:
    """A `probe` of a `Backend` that imports its dependencies once, for all threads, and caches the result."""

    def __init__(self, load: Callable[[], Availability]) -> None:
        self.load = load
        self.found: Availability | None = None
        self._loading = threading.Lock()

    def __call__(self) -> Availability:
        if self.found is None and torch.compiler.is_compiling():  # Dynamo, which runs on one thread, enters no lock
            self.found = self.load()
        if self.found is None:
            with self._loading:
                if self.found is None:
                    self.found = self.load()
        return self.found


@dataclass(frozen=True, eq=False)
class Backend:
    """A way to run attention: `flash_dmattn.register_backend` adds one.

    Calls with equal problems form a class. A backend plans a pass once for each class, and the planned pass runs every
    call of the class. All decisions that depend on the problem belong in the plan; the pass itself only handles
    tensors.

    Attributes:
        name: the name for `backend=`.
        plan_forward: problem -> forward(inputs) -> (out, lse). out is (B, Lq, Hq, Dv), or shaped as q with sequences;
            lse is (B, Hq, Lq). Both are contiguous.
        plan_backward: problem -> backward(saved, dout, dlse) -> gradients, each of the shape and dtype of its input.
            None if autograd differentiates `forward`.
        features: the arguments of `attention` that it supports, out of `flash_dmattn.problem.FEATURES`. A call that
            uses another one is refused; without "max_scores", which has no gradient, only its forward pass is.
        rules: conditions that a call must meet.
        auto_rules: further conditions under `backend="auto"`, for example of speed. They never apply to a call that
            names the backend.
        probe: returns whether it works on this machine. It runs at first use, its result is cached, and it never
            raises.
        notes: lines that `explain` shows for a call that it accepts, for example about copies.
        mask_forms: the forms of masks that its passes support: see `MaskForm`. A mask in another form is converted
            before a pass. A backend that lists "keys" gathers single keys.
        reads_dense: for a backend that lists prepared forms: whether a pass is faster with the bool mask. If both
            passes of a call are, its mask is not packed.
        reads_as_arrived: whether a pass takes q, k and v in the layout `arrival` of the problem, head-first
            (B, H, L, D) or as tokens (T, H, D), and returns their gradients in it. The results of tokens then are
            (T, Hq, Dv) and (Hq, T). Other passes get views (B, L, H, D).
        takes_fresh: whether its forward pass uses `MaskView.fresh` of an interval mask that the call has made.
        repeats_entries: whether it supports a mask or a bias that some, but not all, entries of the batch have in
            common: see `mask_repeat` and `bias_repeat` of `Flags`.
        refuses_entries: for a backend without `repeats_entries`: why a pass refuses such a mask or bias; empty if it
            accepts it.
        wide_lse: whether the lse of calls with a bias is float64 between its passes. With a bias of -1e9, float32 has
            no digits left for the log of the sum; `attention` still returns float32. Where log(sum) would vanish even
            in float64, `join_lse` in csrc/sm90/operands.h and triton_kernels/tile_ops.py scales it.
        is_invariant: whether it computes each row alone, or refuses the call, where `flags.invariant` of the problem is
            set: see `flash_dmattn.config`. Backends without it refuse all such calls.
        sums_probabilities: whether it takes calls of `statistics`, where `flags.sums` of the problem is set. v and dout
            may then be in fp32 beside q in 16 bits. Backends without it refuse all such calls.
        stores_dbias: whether `backward` takes dbias_out=: see `Backward`.
        differentiable_backward: (problem, inputs, dout, dlse) -> gradients, in differentiable PyTorch; with the feature
            "entropy" also (problem, inputs, dout, dlse, dentropy). Without it auto uses eager, and calls that name the
            backend have no second derivative.
        has_forward_ad: whether PyTorch's forward mode (torch.func.jvp) differentiates its forward pass.
        plan_tangents: problem -> tangents(inputs, tangents) -> (out, lse, tout, tlse), a forward pass in forward mode.
            Calls of a backend without one run on another: see `selection.select_tangents`.
        plan_tangent_gradients: (problem, needs_grad) -> the gradients of what `plan_tangents` computes, for a loss that
            contains tangents. `needs_grad` has ten flags: of q, k, v, bias and sink, then of their tangents.
        workspace_bytes: only for the fallback, which supports every call on every device: the memory that the fallback
            warning states, in bytes.
    """

    name: str
    plan_forward: Callable[[AttentionProblem], Forward]
    plan_backward: Callable[[AttentionProblem], Backward] | None = None
    features: frozenset[str] = frozenset()
    rules: tuple[Rule, ...] = ()
    auto_rules: tuple[Rule, ...] = ()
    probe: Callable[[], Availability] = lambda: Availability(True)
    notes: Callable[[AttentionProblem], tuple[str, ...]] = lambda problem: ()
    mask_forms: frozenset[MaskForm] = frozenset({"dense"})
    reads_dense: Callable[[AttentionProblem, Direction], bool] = lambda problem, direction: False
    reads_as_arrived: Callable[[AttentionProblem, Direction], bool] = lambda problem, direction: False
    takes_fresh: Callable[[AttentionProblem], bool] = lambda problem: False
    repeats_entries: bool = False
    refuses_entries: Callable[[AttentionProblem, Direction], str] = lambda problem, direction: (
        "this backend takes 1 or all"
    )
    wide_lse: bool = False
    is_invariant: bool = False
    sums_probabilities: bool = False
    stores_dbias: bool = False
    differentiable_backward: Callable[..., Gradients] | None = None
    has_forward_ad: bool = False
    plan_tangents: Callable[[AttentionProblem], ForwardTangents] | None = None
    plan_tangent_gradients: Callable[[AttentionProblem, tuple[bool, ...]], BackwardTangents] | None = None
    workspace_bytes: Callable[[AttentionProblem], int] | None = None

    @property
    def is_differentiable(self) -> bool:
        """Return whether autograd differentiates its forward pass, because it has no backward pass."""
        return self.plan_backward is None

    @property
    def is_fallback(self) -> bool:
        """Return whether auto uses it only if no other backend accepts a call, and then warns on an accelerator."""
        return self.workspace_bytes is not None

    def widens(self, bias: Tensor | None) -> bool:
        """Return whether lse is float64 between the passes of a call with this bias: see `wide_lse`."""
        return self.wide_lse and bias is not None

    def accepts(self, problem: AttentionProblem, direction: Direction) -> bool:
        """Return whether it accepts one pass of a call: the fast form of `broken_rules`."""
        if (problem.flags.invariant and not self.is_invariant) or (problem.flags.sums and not self.sums_probabilities):
            return False
        if problem.partly_shared and not self.repeats_entries and self.refuses_entries(problem, direction):
            return False
        lacks = problem.features - self.features
        if lacks and (direction != "backward" or lacks - _FORWARD_ONLY):
            return False
        return all_hold(self.rules, problem, direction)

    def serves_tangents(self, problem: AttentionProblem) -> bool:
        """Return whether it accepts the forward pass of a call in forward mode."""
        is_able = self.plan_tangents is not None and all_hold(self.rules, problem, "tangents")
        return is_able and self.accepts(problem, "forward")

    def broken_rules(self, problem: AttentionProblem, passes: tuple[Direction, ...]) -> tuple[Reason, ...]:
        """Return why it refuses these passes of a call: features that it lacks, and rules that the call breaks."""
        if problem.flags.invariant and not self.is_invariant:
            text = "config(invariant=True) is in force; here a row's bits depend on what else is in the batch"
            return (Reason(self.name, "invariant", text, 'backend="triton" has the mode'),)
        if problem.flags.sums and not self.sums_probabilities:
            text = "the call sums probabilities, with values in fp32 beside q in 16 bits; this backend does not"
            return (Reason(self.name, "sums", text, 'backend="triton" and "eager" do'),)
        lacks = problem.features - self.features
        if passes == ("backward",):
            lacks -= _FORWARD_ONLY
        missing = [name for name in FEATURES if name in lacks] if lacks else []
        return (
            *(
                Reason(self.name, name, f"{name} is set; this backend does not have it", _HINTS.get(name, ""))
                for name in missing
            ),
            *self._partly_shared(problem, passes),
            *self.unmet(self.rules, problem, passes),
        )

    def unmet(
        self, rules: tuple[Rule, ...], problem: AttentionProblem, passes: tuple[Direction, ...]
    ) -> tuple[Reason, ...]:
        """Return a reason for each of these rules that a call breaks in these passes, with the values of the call."""
        return tuple(
            Reason(self.name, rule.code, rule.says(problem), rule.hint)
            for rule in rules
            if any(p in rule.passes for p in passes) and not rule.is_kept(problem)
        )

    def _partly_shared(self, problem: AttentionProblem, passes: tuple[Direction, ...]) -> tuple[Reason, ...]:
        if self.repeats_entries or not problem.partly_shared:
            return ()
        said = next((said for each in passes if (said := self.refuses_entries(problem, each))), "")
        specs = {"mask": problem.mask, "bias": problem.bias_tensor}
        return tuple(
            Reason(
                self.name,
                f"shared_{name}",
                f"{name} has {spec.shape[0]} entries with a batch of {problem.batch}; {said}",
                f"expand the leading dims of {name} to those of q, or to 1",
            )
            for name in problem.partly_shared
            if said and (spec := specs[name]) is not None
        )


def all_hold(rules: tuple[Rule, ...], problem: AttentionProblem, direction: Direction) -> bool:
    """Return whether every rule of one pass holds."""
    for rule in rules:  # a loop, because a generator takes twice as long, and every new class of calls needs this
        if direction in rule.passes and not rule.is_kept(problem):
            return False
    return True
