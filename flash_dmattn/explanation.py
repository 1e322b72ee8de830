"""`explain`: which backend a call would run on, and every reason why not another, as a table or a dict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from .backends.mask_choice import unpacking_note
from .backends.protocol import Backend, Direction, Reason
from .call import Numbers, prepare_call
from .dispatch.config import BackendChoice, fallback
from .dispatch.preferences import cite
from .dispatch.profiles import gpu_names
from .dispatch.refusals import BackendError, passes_of, reasons_against, refuse_fallback
from .dispatch.registry import BACKENDS
from .dispatch.selection import choice_in_force, choose, falls_back, selected_names
from .dtensors import above, is_dtensor
from .problem import (
    AttentionProblem,
    MaskForm,
    NeedsGrad,
    SequenceSpec,
    parse_arch,
    refuse_keywords,
    unpacked_spec,
)
from .sequences import Sequences
from .validation import refuse_dtensors

if TYPE_CHECKING:
    from .masks import PreparedMask

DTYPES = {
    **dict.fromkeys(("fp16", "float16", "half"), torch.float16),
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp32", "float32", "float"), torch.float32),
    **dict.fromkeys(("fp64", "float64", "double"), torch.float64),
}


@dataclass(frozen=True)
class Verdict:
    """What one backend says of a call: whether it serves each pass, every reason why not, and what it would do."""

    backend: str
    forward: bool
    backward: bool | None
    reasons: tuple[Reason, ...]
    preferences: tuple[Reason, ...]
    notes: tuple[str, ...]

    @property
    def accepts(self) -> bool:
        """Whether a call that names this backend runs."""
        return not self.reasons


@dataclass(frozen=True)
class Explanation:
    """The choice for one call and the verdict of every backend; prints as a table.

    Attributes:
        problem: the call.
        requested: the backend asked for, after settings were applied.
        forward: the chosen backend of the forward pass; None where the call would raise.
        backward: the chosen backend of the backward pass; None where nothing needs a gradient.
        error: the message of the error that the call would raise, or None.
        verdicts: one per backend, in order of preference.
        profile: what a profile of `python -m flash_dmattn calibrate` had to say, or why none did; None where the
            built-in rules decide.
        copies: the tensors that are copied for any backend, because their leading dims do not fold into one. Another
            line says how a mask of two dims is read where it could be padding, too.
    """

    problem: AttentionProblem
    requested: BackendChoice
    forward: str | None
    backward: str | None
    error: str | None
    verdicts: tuple[Verdict, ...]
    profile: str | None = None
    copies: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for json.dumps."""
        return {
            "problem": str(self.problem),
            "requested": self.requested,
            "elsewhere": self.problem.elsewhere,
            "forward": self.forward,
            "backward": self.backward,
            "error": self.error,
            "profile": self.profile,
            "copies": list(self.copies),
            "backends": {
                verdict.backend: {
                    "accepts": verdict.accepts,
                    "forward": verdict.forward,
                    "backward": verdict.backward,
                    "reasons": [reason._asdict() for reason in verdict.reasons],
                    "preferences": [reason._asdict() for reason in verdict.preferences],
                    "notes": list(verdict.notes),
                }
                for verdict in self.verdicts
            },
        }

    def __str__(self) -> str:
        elsewhere = f"no GPU of this machine is {self.problem.arch}: all backends count as installed there"
        lines = [elsewhere] if self.problem.elsewhere else []
        lines += [] if self.profile is None else [f"profile: {self.profile}"]
        return "\n".join([f"attention: {self.problem}", self.chosen, *lines, *self.copies, "", *self.table])

    @property
    def chosen(self) -> str:
        """The line that says what runs."""
        if self.error is not None:
            return f"backend={self.requested!r} would raise"
        if self.backward is None:
            return f"backend={self.requested!r} runs {self.forward}"
        return f"backend={self.requested!r} runs {self.forward} forward, {self.backward} backward"

    @property
    def table(self) -> list[str]:
        """The lines of the verdicts."""
        header = ("backend", "forward", "backward", "why")
        rows = [header, *(row for verdict in self.verdicts for row in self._rows(verdict))]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        table = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip()
            for row in rows
        ]
        table.insert(1, "  ".join(["-" * width for width in widths] + ["---"]))
        return table

    def _rows(self, verdict: Verdict) -> list[tuple[str, str, str, str]]:
        def cell(serves: bool | None, chosen: str | None) -> str:
            if serves is None:
                return "-"
            return ("CHOSEN" if chosen == verdict.backend else "yes") if serves else "no"

        why = [str(reason) for reason in verdict.reasons]
        runs_all = self.requested == "auto" and {self.forward, self.backward} <= {verdict.backend, None}
        passes = "auto finds no other here, and else passes it over" if runs_all else "auto passes it over"
        why += [f"{passes}: {reason}" for reason in verdict.preferences]
        why += verdict.notes
        first, *more = why or [""]
        cells = (verdict.backend, cell(verdict.forward, self.forward), cell(verdict.backward, self.backward), first)
        return [cells, *(("", "", "", line) for line in more)]

    __repr__ = __str__


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | PreparedMask | None = None,
    bias: Tensor | None = None,
    *,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    window_size: tuple[int, int] | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    return_probs: bool = False,
    backend: BackendChoice = "auto",
    sink: Tensor | None = None,
    sequences: Sequences | None = None,
    dropout_p: float = 0.0,
    **unknown: NoReturn,
) -> Explanation:
    """Say which backend `flash_dmattn.attention` would run these arguments on, and why not another; computes nothing.

    Args:
        q, k, v, mask, bias and the rest: as for `flash_dmattn.attention`.

    Of DTensors it explains the call of this rank, whose sizes decide there; where they share the sequence the result is
    that of `flash_dmattn.distributed.explain_context_parallel`.

    Returns:
        An `Explanation`: print it, or take its `to_dict()`.

    Raises:
        TypeError, ValueError: the arguments are invalid, as `attention` would say.

    >>> import torch, flash_dmattn
    >>> x = torch.randn(1, 8, 2, 16)
    >>> flash_dmattn.explain(x, x, x, is_causal=True).forward
    'eager'
    """
    if unknown:
        refuse_keywords(explain, unknown)
    numbers = Numbers(
        is_causal, softmax_scale, softcap, window_size, deterministic, return_lse, return_probs, dropout_p
    )
    if type(q) is not Tensor and is_dtensor(q):
        options = {**numbers._asdict(), "backend": backend, "sink": sink, "sequences": sequences}
        explained: Explanation = above().explain(q, k, v, mask, bias, **options)
        return explained
    call = prepare_call(q, k, v, mask, bias, sink, sequences, numbers)
    refuse_dtensors(call.q, call.k, call.v, call.mask, call.bias, sink)
    problem, _, _ = call.describe()
    copies = call.copies
    shape = tuple(mask.shape) if isinstance(mask, Tensor) and sequences is None and call.leading is None else ()
    if len(shape) == 2 and shape[0] == problem.batch > 1:
        reading = f"reads mask of shape {shape} as (seqlen_q, seqlen_k)"
        copies += (f"{reading}; padding of (batch, seqlen_k) is masks.padding_mask(mask)",)
    return explain_description(problem, backend, copies)


def explain_problem(
    q: tuple[int, ...],
    *,
    kv_heads: int | None = None,
    seqlen_k: int | None = None,
    head_dim_v: int | None = None,
    dtype: str | torch.dtype = "bf16",
    device: str = "sm_90",
    mask: tuple[int, ...] | None = None,
    bias: tuple[int, ...] | None = None,
    mask_prepared: bool = False,
    bias_dtype: str | torch.dtype | None = None,
    grad: bool = False,
    bias_grad: bool = False,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    window_size: tuple[int, int] | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    return_probs: bool = False,
    backend: BackendChoice = "auto",
    sink: bool = False,
    sequences: SequenceSpec | None = None,
    dropout_p: float = 0.0,
) -> Explanation:
    """Say which backend a call would run on, from shapes alone and for any GPU; no tensor, no memory.

    Args:
        q: shape of q, (*batch, seqlen_q, num_heads, head_dim).
        kv_heads, seqlen_k, head_dim_v: of k and v; as q where not given.
        dtype: of q, k and v: "fp16", "bf16", "fp32", "fp64" or a torch.dtype.
        device: "cpu", or the architecture of a GPU such as "sm_80", "sm_90", "gfx942". Where no GPU of this machine has
            it, all backends count as installed: what works here says nothing of a machine that has such a GPU.
        mask, bias: their shapes, or None; bias_dtype as dtype where not given.
        mask_prepared: whether the mask is the prepared form of one of that shape; beside sequences one of 3 dims,
            (S or 1, n, n), is a tree of n new tokens.
        grad: whether dq, dk and dv, and dsink of a sink, are needed; bias_grad: whether dbias is.
        sink: whether there is one, of the dtype of q.
        sequences: how those of the call lie, a `flash_dmattn.problem.SequenceSpec`; q is 4-D then, (1, Tq, Hq, D) where
            it is packed, and keys in pages have seqlen_k keys a page.
        The rest as for `flash_dmattn.attention`.

    Raises:
        TypeError, ValueError: the description is invalid.

    >>> import flash_dmattn
    >>> e = flash_dmattn.explain_problem(q=(2, 4096, 16, 64), kv_heads=4, dtype="bf16", device="sm_80",
    ...                                  bias=(1, 16, 4096, 4096), bias_grad=True)
    >>> e.problem.arch, e.problem.needs_grad.bias
    ('sm_80', True)
    """
    if len(q) < 4:
        raise ValueError(f"q is {q!r}; it needs 4 sizes or more: batch, seqlen_q, num_heads, head_dim")
    for name, sizes in (
        ("q", q),
        ("kv_heads", kv_heads),
        ("seqlen_k", seqlen_k),
        ("head_dim_v", head_dim_v),
        ("mask", mask),
        ("bias", bias),
    ):
        if any(size < 0 for size in ((sizes,) if isinstance(sizes, int) else sizes or ())):
            raise ValueError(f"{name} is {sizes!r}; sizes need to be at least 0")
    *batch, seqlen_q, num_heads, head_dim = q
    kv_heads = num_heads if kv_heads is None else kv_heads
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    arch = parse_arch(device)
    q_dtype = parse_dtype("dtype", dtype)
    own_dtype = q_dtype if bias_dtype is None else parse_dtype("bias_dtype", bias_dtype)

    def meta(shape: tuple[int, ...], dtype: torch.dtype = q_dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    mask_meta: Tensor | PreparedMask | None = None if mask is None else meta(mask, torch.bool)
    if sequences is not None and mask_prepared and isinstance(mask_meta, Tensor) and mask_meta.dim() == 3:
        from .masks import PreparedMask  # importing flash_dmattn does not need it

        mask_meta = PreparedMask.from_tree(mask_meta)
    numbers = Numbers(
        is_causal, softmax_scale, softcap, window_size, deterministic, return_lse, return_probs, dropout_p
    )
    call = prepare_call(
        meta(q),
        meta((*batch, seqlen_k, kv_heads, head_dim)),
        meta((*batch, seqlen_k, kv_heads, head_dim_v)),
        mask_meta,
        None if bias is None else meta(bias, own_dtype),
        meta((num_heads,)) if sink else None,
        None,
        numbers,
    )
    problem, _, _ = call._replace(spec=sequences).describe()
    problem = problem._replace(
        device="cpu" if arch == "cpu" else "cuda",
        arch=arch,
        elsewhere=arch != "cpu" and not gpu_names(arch),
        needs_grad=NeedsGrad(grad, grad, grad, bias_grad and bias is not None, grad and sink),
    )
    if mask_prepared and problem.mask is not None and problem.mask_form == "dense":
        mask_batch, mask_heads, rows, _ = problem.mask.shape
        flags = problem.flags
        form: MaskForm = "sequence_tiles"
        if sequences is not None:
            shape = sequences.shape_of_tiles(mask_heads)
            flags = flags._replace(mask_packing="queries" if sequences.packs_queries else "none")
        else:
            from .masks.prepared.operator import prepared_key_form  # importing flash_dmattn does not need it

            form = "tiles" if rows > 1 else prepared_key_form(seqlen_q).form
            shape = (mask_batch, mask_heads, rows if form == "keys" else seqlen_q, seqlen_k)
        problem = problem._replace(mask=unpacked_spec(shape), mask_form=form, flags=flags)
    return explain_description(problem, backend, call.copies)


def parse_dtype(name: str, dtype: str | torch.dtype) -> torch.dtype:
    """A torch.dtype, or the one a short name stands for."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"{name} is {dtype!r}; it needs to be one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def explain_description(problem: AttentionProblem, backend: BackendChoice, copies: tuple[str, ...] = ()) -> Explanation:
    """Explain a problem that is described already; `copies` are those that were made before it was."""
    requested = choice_in_force(backend)
    forward = backward = error = None
    try:
        selection = choose(problem, requested)
        if fallback() == "error" and falls_back(problem, requested, selection):
            refuse_fallback(problem)
        forward, backward = selected_names(problem, selection)
    except BackendError as refusal:
        error = str(refusal)
    return Explanation(
        problem,
        requested,
        forward,
        backward,
        error,
        tuple(verdict_of(backend, problem) for backend in BACKENDS.table.values()),
        cite(problem) if requested == "auto" else None,
        copies,
    )


def verdict_of(backend: Backend, problem: AttentionProblem) -> Verdict:
    """What one backend says of a problem."""

    def serves(direction: Direction) -> bool:
        return not reasons_against(backend, problem, (direction,))

    passes = passes_of(problem)
    reasons = reasons_against(backend, problem, passes)
    preferences = tuple(r for r in reasons_against(backend, problem, passes, auto=True) if r not in reasons)
    notes: tuple[str, ...] = ()
    if not reasons:
        notes = tuple(backend.notes(problem))
        unpacking = unpacking_note(problem, backend)
        notes = notes if unpacking is None else (unpacking, *notes)
    backward = serves("backward") if len(passes) == 2 else None
    return Verdict(backend.name, serves("forward"), backward, reasons, preferences, notes)
