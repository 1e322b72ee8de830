"""What a backend module offers: a name, rules, a probe, and either a forward/backward pair or one function."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from torch import Tensor

from ..problem import FEATURES, AttentionProblem, Gradients, MaskView, SequenceView

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Direction = Literal["forward", "backward"]


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


class Backend(Protocol):
    """A module with these names is a backend. `AUTO_RULES` bind only `backend="auto"`, never a forced call.

    Optional functions count where PROVIDES, a frozenset, lists their names; a helper that happens to be called so does
    not:
        notes(problem) -> tuple[str, ...]: what `explain` should say of a call that it accepts, such as copies it makes.
        refuses_entries(problem, direction) -> str: of a backend that reads some of these, what it takes where it does
            not read those of a call; empty where it does.
        reads_dense(problem, direction) -> bool: of such a pair, whether that pass of a call is best served by a dense
            mask as it is. One that both passes read so is not prepared.
        differentiable_backward(problem, dout, dlse, q, k, v, mask, bias): the gradients of a pair as differentiable
            PyTorch, without which a second derivative is refused; with sink=, sequences= and dropout= where there are.
        direct_forward(problem, mask), direct_backward(problem, mask): of such a pair, what runs that pass of every call
            of a class, with all decided that the problem says; None where it has nothing to decide beforehand. `mask`
            is the `MaskView` of one of its calls, of whose tensors sizes alone count. See `backends.direct`.
        heads_first_forward(problem, mask), heads_first_backward(problem, mask): the same for q, k and v that arrive as
            (B, H, L, D); out and dout are (B, L, H, Dv), gradients as q, k and v. The problem is that of (B, L, H, D).

    Optional constants:
        MASK_FORM = "prepared": a forward/backward pair that reads tile, key and interval masks.
        REPEATS_ENTRIES = True: it reads a mask or a bias that some entries of the batch share and others do not, as
            `mask_repeat` and `bias_repeat` of `Flags` have it; calls with such a one are refused otherwise.
        GATHERS_KEYS = True: of such a pair, that it fetches single keys, and few queries are best served by key masks.
        STORES_DBIAS = True: `backward` of such a pair takes dbias_out=, a tensor of the shape, dtype and device of the
            bias, of any strides that keep its numbers apart. It puts dbias there and returns that tensor in its place;
            where its kernels cannot write so, by a copy. What lies between rows of dbias_out is not touched.
        HAS_FORWARD_AD = True: forward-mode derivatives (torch.func.jvp) go through it.
        IS_FALLBACK = True: it takes every call on every device, and has workspace_bytes(problem) -> int; auto falls
            back to it, and warns of so many bytes.
    """

    @property
    def NAME(self) -> str: ...

    @property
    def FEATURES(self) -> frozenset[str]:
        """The arguments of `attention` that it has, out of `flash_dmattn.problem.FEATURES`; others are refused."""
        ...

    @property
    def RULES(self) -> tuple[Rule, ...]: ...

    @property
    def AUTO_RULES(self) -> tuple[Rule, ...]: ...

    def probe(self) -> Availability:
        """Whether the backend works on this machine: lazy, remembered, never raises."""
        ...


class KernelBackend(Backend, Protocol):
    """A backend made of an explicit forward/backward pair; `flash_dmattn.autograd` differentiates it.

    `bias` is None or 4-D with each dimension 1 or full (the heads also `num_heads_k`); a dimension of stride 0 is a
    broadcast one. `mask` has the form "none" or "dense", with `MASK_FORM = "prepared"` also "tiles", "keys" or
    "intervals"; both passes of a call receive the same. With `REPEATS_ENTRIES` the batch of mask and bias may be
    another than 1 or full: see `Flags`. The band of the problem applies to every form, and is folded into "tiles" and
    "intervals" already. `backward` returns None where `problem.needs_grad` asks for nothing.

    `sink` (Hq,) is passed to a backend that lists "sink" in `FEATURES`, with calls that have one; others need no such
    argument. `lse` holds it. So with `sequences`, beside which q, k, v, mask and bias are 4-D as `Flags.layout`,
    `mask_packing` and `bias_packing` say; out is shaped as q, lse (B, Hq, Lq), and a mask "dense", with `MASK_FORM =
    "prepared"` also "sequence_tiles", or "tree" for one that lists "tree". So with `dropout` int64 (2,), the key of a
    call whose `Flags.dropout_p` is not 0, to a backend that lists "dropout_p": `flash_dmattn.reference.dropout` says
    which probabilities it drops.
    """

    def forward(
        self,
        problem: AttentionProblem,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: MaskView,
        bias: Tensor | None,
        *,
        sink: Tensor | None = None,
        sequences: SequenceView | None = None,
        dropout: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) of the contract."""
        ...

    def backward(
        self,
        problem: AttentionProblem,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: MaskView,
        bias: Tensor | None,
        out: Tensor,
        lse: Tensor,
        *,
        sink: Tensor | None = None,
        sequences: SequenceView | None = None,
        dropout: Tensor | None = None,
    ) -> Gradients:
        """(dq, dk, dv, dbias) of the contract; with a sink (dq, dk, dv, dbias, dsink)."""
        ...


class CompositeBackend(Backend, Protocol):
    """A backend written in differentiable PyTorch: autograd goes through it, no pair needed.

    `mask` is None or a bool tensor, 4-D as `bias` is; a prepared mask is unpacked for it, a tree to (S or 1, 1, n, n),
    n new tokens by n, for one that lists "tree". `sink`, `sequences` and `dropout` are as of a `KernelBackend`.
    """

    def attention(
        self,
        problem: AttentionProblem,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        bias: Tensor | None,
        *,
        sink: Tensor | None = None,
        sequences: SequenceView | None = None,
        dropout: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """(out, lse), and the probabilities as a third where the problem asks for them."""
        ...


AnyBackend = KernelBackend | CompositeBackend

# What PROVIDES of a backend may list; `Backend` says what each does.
OPTIONAL = (
    "notes",
    "refuses_entries",
    "reads_dense",
    "differentiable_backward",
    "direct_forward",
    "direct_backward",
    "heads_first_forward",
    "heads_first_backward",
)


def provided(backend: AnyBackend | Backend | None, name: str) -> Callable[..., Any] | None:
    """An optional function of a backend; None where it does not say that it has one."""
    return getattr(backend, name) if name in getattr(backend, "PROVIDES", ()) else None


def is_composite(backend: AnyBackend) -> TypeIs[CompositeBackend]:
    """Whether a backend is one differentiable function rather than a forward/backward pair."""
    if isinstance(backend, ModuleType):
        return "attention" in backend.__dict__  # on the path of every call: hasattr costs five times as much to say no
    return hasattr(backend, "attention")


def reads_prepared_masks(backend: AnyBackend) -> bool:
    """Whether a backend reads prepared masks; one that does not say receives dense ones."""
    return getattr(backend, "MASK_FORM", "dense") == "prepared"


def gathers_keys(backend: AnyBackend) -> bool:
    """Whether the kernels of a backend that reads prepared masks fetch the keys of a `KeyMask` one by one."""
    return getattr(backend, "GATHERS_KEYS", False)


def reads_dense(backend: AnyBackend, problem: AttentionProblem, direction: Direction) -> bool:
    """Whether one pass of a call is best served by a dense mask as it is; a backend that does not say prepares it."""
    if not reads_prepared_masks(backend):
        return True
    reads = provided(backend, "reads_dense")
    return reads is not None and bool(reads(problem, direction))


def repeats_entries(backend: AnyBackend | Backend) -> bool:
    """Whether a backend reads masks and biases that a part of the batch shares."""
    return getattr(backend, "REPEATS_ENTRIES", False)


def stores_dbias(backend: AnyBackend) -> bool:
    """Whether the backward pass of a pair puts the gradient of a bias where it is told to."""
    return getattr(backend, "STORES_DBIAS", False)


def has_forward_ad(backend: AnyBackend) -> bool:
    """Whether forward-mode derivatives go through a backend."""
    return getattr(backend, "HAS_FORWARD_AD", False)


def is_fallback(backend: AnyBackend) -> bool:
    """Whether auto takes a backend only when nothing better is left, and warns on an accelerator."""
    return getattr(backend, "IS_FALLBACK", False)


def broken_rules(backend: Backend, problem: AttentionProblem, passes: tuple[Direction, ...]) -> tuple[Reason, ...]:
    """Why a backend refuses the given passes of a call: features that it lacks, and rules that the call breaks."""
    missing = [name for name in FEATURES if name in problem.features - backend.FEATURES]
    return (
        *(Reason(backend.NAME, name, f"{name} is set; this backend does not have it") for name in missing),
        *_partly_shared(backend, problem, passes),
        *unmet(backend, backend.RULES, problem, passes),
    )


def refuses_entries(backend: Backend, problem: AttentionProblem, direction: Direction) -> str:
    """What a backend takes in the place of a mask or a bias that a part of the batch shares; empty if it reads it."""
    if repeats_entries(backend):
        return ""
    says = provided(backend, "refuses_entries")
    return "this backend takes 1 or all" if says is None else str(says(problem, direction))


def _partly_shared(backend: Backend, problem: AttentionProblem, passes: tuple[Direction, ...]) -> tuple[Reason, ...]:
    if not problem.partly_shared:
        return ()
    said = next((said for each in passes if (said := refuses_entries(backend, problem, each))), "")
    if not said:
        return ()
    specs = {"mask": problem.mask, "bias": problem.bias}
    return tuple(
        Reason(
            backend.NAME,
            f"shared_{name}",
            f"{name} has {spec.shape[0]} entries beside a batch of {problem.batch}; {said}",
            f"expand the leading dims of {name} to those of q, or to 1",
        )
        for name in problem.partly_shared
        if (spec := specs[name]) is not None
    )


def unmet(
    backend: Backend, rules: tuple[Rule, ...], problem: AttentionProblem, passes: tuple[Direction, ...]
) -> tuple[Reason, ...]:
    """The rules out of some of a backend that a call breaks in the given passes, with the values found."""
    return tuple(
        Reason(backend.NAME, rule.code, rule.says(problem), rule.hint)
        for rule in rules
        if any(p in rule.passes for p in passes) and not rule.holds(problem)
    )


def accepts(backend: Backend, problem: AttentionProblem, direction: Direction) -> bool:
    """Whether a backend serves one pass of a call: the fast form of `broken_rules`."""
    if problem.partly_shared and refuses_entries(backend, problem, direction):
        return False
    return problem.features <= backend.FEATURES and all_hold(backend.RULES, problem, direction)


def all_hold(rules: tuple[Rule, ...], problem: AttentionProblem, direction: Direction) -> bool:
    """Whether every rule of one pass holds."""
    for rule in rules:  # a plain loop: a generator costs twice as much on this path
        if direction in rule.passes and not rule.holds(problem):
            return False
    return True
