"""A backend: its name, its rules, and how it plans the passes of a class of calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from ..problem import FEATURES, AttentionProblem, Gradients, MaskForm
from ..problem.inputs import Inputs, Saved

Direction = Literal["forward", "backward"]

# forward(inputs) -> (out, lse); where PyTorch differentiates it, also the probabilities if the problem asks for them,
# and out alone if it does not ask for lse.
Forward = Callable[[Inputs], tuple[Tensor, ...]]


class Backward(Protocol):
    """The backward pass of a class of calls."""

    def __call__(
        self, saved: Saved, dout: Tensor, dlse: Tensor | None, *, dbias_out: Tensor | None = None
    ) -> Gradients:
        """(dq, dk, dv, dbias, dsink), None for each that `problem.needs_grad` does not ask for.

        `dbias_out` is passed to backends with `stores_dbias` alone. dbias is written to it and returned as it: a tensor
        of the shape, dtype and device of the bias, and of any strides that keep its numbers apart.
        """
        ...


class Rule(NamedTuple):
    """One condition a backend puts on a call.

    `holds` is the fast predicate, of the problem alone: its answer is remembered for calls that are alike. `says` gives
    the reason for a refusal, with the values found; `hint` says what to do about it. `passes` names the passes that
    need the rule: a backend may accept a forward and refuse its backward.
    """

    code: str
    holds: Callable[[AttentionProblem], bool]
    says: Callable[[AttentionProblem], str]
    hint: str = ""
    passes: tuple[Direction, ...] = ("forward", "backward")


class Reason(NamedTuple):
    """Why a backend does not serve a call: a broken rule, a failed probe, or a switch that disables it."""

    backend: str
    code: str
    text: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.hint})" if self.hint else self.text


class Availability(NamedTuple):
    """What `probe()` found: usable, or the reason why not and the exception behind it.

    `reason` and `hint` are a line each; `details` is more to read for the person who asked for this backend.
    """

    usable: bool
    reason: str = ""
    hint: str = ""
    exception: BaseException | None = None
    details: str = ""


@dataclass(frozen=True, eq=False)
class Backend:
    """A way to run attention: `flash_dmattn.register_backend` adds one.

    A plan is made once for a class of calls, which agree in everything that their problem says; what it returns runs
    each of them. Decide in the plan what the problem decides, and look at tensors alone in the pass.

    Attributes:
        name: what `backend=` calls it.
        plan_forward: problem -> forward(inputs) -> (out, lse): out (B, Lq, Hq, Dv), with sequences shaped as q, and lse
            (B, Hq, Lq), both contiguous.
        plan_backward: problem -> backward(saved, dout, dlse) -> gradients, each of the shape and dtype of its input.
            None where `forward` is differentiable PyTorch, which autograd goes through.
        features: the arguments of `attention` that it has, out of `flash_dmattn.problem.FEATURES`; others are refused.
        rules: what calls need for it to serve them.
        auto_rules: preferences: they bind only `backend="auto"`, never a forced call.
        probe: whether it works on this machine: lazy, remembered, never raises.
        notes: what `explain` should say of a call that it accepts, such as copies it makes.
        mask_forms: the forms of masks that its passes read: see `MaskForm`. A mask of another form is converted to one
            of these before a pass; a backend that lists "keys" fetches single keys.
        reads_dense: whether a pass of a call is best served by a bool mask as it is, asked of a backend that lists
            prepared forms. A mask that both passes of a call read so is not prepared.
        reads_heads_first: whether a pass of a call takes q, k and v as (B, H, L, D), and returns their gradients so.
        repeats_entries: whether it reads a mask or a bias that some entries of the batch share and others do not, as
            `mask_repeat` and `bias_repeat` of `Flags` say.
        refuses_entries: names what it takes where it does not read such a mask or bias of a call; empty where it does.
        stores_dbias: whether `backward` takes dbias_out=: see `Backward`.
        differentiable_backward: (problem, inputs, dout, dlse) -> gradients as differentiable PyTorch, without which a
            second derivative is refused.
        has_forward_ad: whether forward-mode derivatives (torch.func.jvp) go through it.
        workspace_bytes: the bytes that auto warns of when it falls back to this backend, which takes every call on
            every device. None for all other backends.
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
    reads_heads_first: Callable[[AttentionProblem, Direction], bool] = lambda problem, direction: False
    repeats_entries: bool = False
    refuses_entries: Callable[[AttentionProblem, Direction], str] = lambda problem, direction: (
        "this backend takes 1 or all"
    )
    stores_dbias: bool = False
    differentiable_backward: Callable[[AttentionProblem, Inputs, Tensor, Tensor | None], Gradients] | None = None
    has_forward_ad: bool = False
    workspace_bytes: Callable[[AttentionProblem], int] | None = None

    @property
    def is_differentiable(self) -> bool:
        """Whether autograd goes through its forward pass, so that it has no backward pass of its own."""
        return self.plan_backward is None

    @property
    def is_fallback(self) -> bool:
        """Whether auto takes it only when nothing better is left, and warns on an accelerator."""
        return self.workspace_bytes is not None

    def accepts(self, problem: AttentionProblem, direction: Direction) -> bool:
        """Whether it serves one pass of a call: the fast form of `broken_rules`."""
        if problem.partly_shared and not self.repeats_entries and self.refuses_entries(problem, direction):
            return False
        return problem.features <= self.features and all_hold(self.rules, problem, direction)

    def broken_rules(self, problem: AttentionProblem, passes: tuple[Direction, ...]) -> tuple[Reason, ...]:
        """Why it refuses these passes of a call: features that it lacks, and rules that the call breaks."""
        missing = [name for name in FEATURES if name in problem.features - self.features]
        return (
            *(Reason(self.name, name, f"{name} is set; this backend does not have it") for name in missing),
            *self._partly_shared(problem, passes),
            *self.unmet(self.rules, problem, passes),
        )

    def unmet(
        self, rules: tuple[Rule, ...], problem: AttentionProblem, passes: tuple[Direction, ...]
    ) -> tuple[Reason, ...]:
        """The rules out of some of its own that a call breaks in these passes, with the values found."""
        return tuple(
            Reason(self.name, rule.code, rule.says(problem), rule.hint)
            for rule in rules
            if any(p in rule.passes for p in passes) and not rule.holds(problem)
        )

    def _partly_shared(self, problem: AttentionProblem, passes: tuple[Direction, ...]) -> tuple[Reason, ...]:
        if self.repeats_entries or not problem.partly_shared:
            return ()
        said = next((said for each in passes if (said := self.refuses_entries(problem, each))), "")
        specs = {"mask": problem.mask, "bias": problem.bias}
        return tuple(
            Reason(
                self.name,
                f"shared_{name}",
                f"{name} has {spec.shape[0]} entries beside a batch of {problem.batch}; {said}",
                f"expand the leading dims of {name} to those of q, or to 1",
            )
            for name in problem.partly_shared
            if said and (spec := specs[name]) is not None
        )


def all_hold(rules: tuple[Rule, ...], problem: AttentionProblem, direction: Direction) -> bool:
    """Whether every rule of one pass holds."""
    for rule in rules:  # a plain loop: a generator costs twice as much on this path
        if direction in rule.passes and not rule.holds(problem):
            return False
    return True
