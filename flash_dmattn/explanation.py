"""`explain`: which backend a call would run on, and every reason why not another, as a table or a dict."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .api import attention
from .backends.mask_choice import unpacking_note
from .backends.protocol import Backend, Direction, Reason
from .biases import Band, Bias, ByDistance, Relative, is_made
from .call import prepare_call
from .definition import dtensor_module, is_dtensor
from .dispatch.config import BackendChoice, fallback
from .dispatch.profiles import cite, gpu_names
from .dispatch.registry import BACKENDS
from .dispatch.selection import (
    BackendError,
    choice_in_force,
    choose,
    falls_back,
    passes_of,
    reasons_against,
    refuse_fallback,
    select_tangents,
    selected_names,
    without_order,
)
from .problem import (
    AttentionProblem,
    MaskForm,
    NeedsGrad,
    RawFlags,
    SequenceSpec,
    arguments_like,
    read_request,
    unpacked_spec,
)
from .projected import describe_made
from .validation import describe, follows_warn_only, refuse_dtensors

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .api import Options
    from .masks import PreparedMask
    from .problem import AnyAuxRequest

DTYPES = {
    **dict.fromkeys(("fp16", "float16", "half"), torch.float16),
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp32", "float32", "float"), torch.float32),
    **dict.fromkeys(("fp64", "float64", "double"), torch.float64),
}


@dataclass(frozen=True)
class Verdict:
    """The verdict of one backend on a call.

    Attributes:
        backend: its name.
        forward, backward: whether it accepts each pass; None where nothing needs a gradient.
        reasons: every reason why not.
        preferences: why "auto" does not use it for passes that it accepts.
        notes: what it would do with this call.
    """

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
    """The choice for one call and the verdict of every backend; prints as a table, as wide as the terminal.

    Attributes:
        problem: the call.
        requested: the requested backend, after settings were applied.
        forward: the chosen backend of the forward pass; None where the call would raise.
        backward: the chosen backend of the backward pass; None where nothing needs a gradient.
        error: the message of the error that the call would raise, or None.
        verdicts: one per backend, in order of preference.
        profile: what a profile of `python -m flash_dmattn calibrate` decided, or why none did; None where the
            built-in rules decide.
        copies: the tensors that are copied for any backend, because their leading dims do not fold into one. Another
            line tells how a mask of two dims is interpreted if it could also be padding.
        tangents: the backend of the call in forward mode (`torch.func.jvp`), which computes out with its tangent; None
            if that would raise.
    """

    problem: AttentionProblem
    requested: BackendChoice
    forward: str | None
    backward: str | None
    error: str | None
    verdicts: tuple[Verdict, ...]
    profile: str | None = None
    copies: tuple[str, ...] = ()
    tangents: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for json.dumps."""
        return {
            "problem": str(self.problem),
            "requested": self.requested,
            "is_hypothetical": self.problem.is_hypothetical,
            **{name: getattr(self, name) for name in ("forward", "backward", "tangents", "error", "profile")},
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
        return self.to_text(shutil.get_terminal_size().columns if sys.stdout.isatty() else None)

    def to_text(self, width: int | None = None) -> str:
        """Return the printed table; reasons that are longer than the width are wrapped.

        For a backend that does not run on the call's device, the table has only this reason; `verdicts` has all.
        """
        hypothetical = f"no GPU of this machine is {self.problem.arch}: all backends count as installed there"
        lines = [hypothetical] if self.problem.is_hypothetical else []
        lines += [] if self.profile is None else [f"profile: {self.profile}"]
        gpu = (
            ["", 'on a GPU: explain(..., device="sm_90"), or another architecture']
            if self.problem.arch == "cpu"
            else []
        )
        dual = (
            [] if self.tangents in (None, self.forward) else ["", f"in forward mode (torch.func.jvp): {self.tangents}"]
        )
        return "\n".join(
            [f"attention: {self.problem}", self.chosen, *lines, *self.copies, "", *self._table(width), *dual, *gpu]
        )

    @property
    def chosen(self) -> str:
        """Return one line about the backends that run."""
        if self.error is not None:
            return f"backend={self.requested!r} would raise"
        if self.backward is None:
            return f"backend={self.requested!r} runs {self.forward}"
        return f"backend={self.requested!r} runs {self.forward} forward, {self.backward} backward"

    def _table(self, width: int | None = None) -> list[str]:
        header = ("backend", "forward", "backward", "why")
        rows = [header, *(row for verdict in self.verdicts for row in self._rows(verdict))]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        if width is not None:
            room = max(30, width - sum(widths) - 2 * len(widths))
            rows = [line for row in rows for line in _wrapped(row, room)]
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

        # Other reasons of a backend that does not run on this device do not matter.
        device = [reason for reason in verdict.reasons if reason.code == "device"]
        why = [str(reason) for reason in device or verdict.reasons]
        runs_all = self.requested == "auto" and {self.forward, self.backward} <= {verdict.backend, None}
        passes = "auto uses it only because no other backend accepts this call" if runs_all else "auto passes it over"
        why += [f"{passes}: {reason}" for reason in verdict.preferences]
        why += verdict.notes
        first, *more = why or [""]
        cells = (verdict.backend, cell(verdict.forward, self.forward), cell(verdict.backward, self.backward), first)
        return [cells, *(("", "", "", line) for line in more)]

    __repr__ = __str__


def _wrapped(row: tuple[str, str, str, str], room: int) -> list[tuple[str, str, str, str]]:
    first, *more = textwrap.wrap(row[3], room, subsequent_indent="  ", break_on_hyphens=False) or [""]
    return [(*row[:3], first), *(("", "", "", line) for line in more)]


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | PreparedMask | None = None,
    bias: Bias | None = None,
    *,
    device: str | None = None,
    return_lse: bool = False,
    return_probs: bool = False,
    return_aux: AnyAuxRequest | None = None,
    **options: Unpack[Options],
) -> Explanation:
    """Explain which backend would run a call with these arguments, and why not another one; computes nothing.

    Tensors may be on the device "meta", which takes no memory. DTensors are explained by the call of this rank, because
    its sizes decide; for a sharded sequence by `flash_dmattn.distributed.explain_context_parallel`.

    Args:
        q, k, v, mask, bias and the rest: as for `flash_dmattn.attention`.
        device: "cpu", or the architecture of a GPU such as "sm_80", "sm_90", "gfx942", instead of the device of the
            tensors. If this machine has no such GPU, all backends count as installed, because the libraries here tell
            nothing about a machine that has one.

    Returns:
        An `Explanation`: print it, or use its `to_dict()`.

    Raises:
        TypeError, ValueError: the arguments are invalid, as in `attention`.

    >>> import torch, flash_dmattn
    >>> x = torch.randn(1, 8, 2, 16)
    >>> flash_dmattn.explain(x, x, x, is_causal=True).forward
    'sdpa'
    >>> x = torch.empty(8, 65536, 16, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    >>> e = flash_dmattn.explain(x, x, x, is_causal=True, device="sm_90")
    >>> e.problem.arch, e.backward is not None
    ('sm_90', True)
    """
    tensors = {"q": q, "k": k, "v": v, "mask": mask, "bias": bias}
    arguments = arguments_like(attention, explain, **tensors, return_probs=return_probs, **options)
    asked = read_request(return_aux, return_lse, return_probs)
    arguments |= dict(zip(("return_lse", "max_scores", "entropy"), asked, strict=True))
    del arguments["return_aux"]
    if type(q) is not Tensor and is_dtensor(q):
        if device is not None:
            raise ValueError(f"device is {device!r}; it needs to be None with DTensors, whose ranks have GPUs already")
        values = [arguments.pop(name) for name in tensors]
        explained: Explanation = dtensor_module().explain(*values, **arguments)
        return explained
    raw_flags, backend = RawFlags(*(arguments.pop(name) for name in RawFlags._fields)), arguments.pop("backend")
    described = None
    if is_made(bias):
        described = describe_made(**arguments, raw_flags=raw_flags)
        arguments["bias"] = None
    call = prepare_call(**arguments, raw_flags=raw_flags)
    refuse_dtensors(call.q, call.k, call.v, call.mask, call.bias, call.sink)
    problem, copies = (describe(call)[0], call.copies) if described is None else described
    shape = tuple(mask.shape) if isinstance(mask, Tensor) and call.spec is None and call.leading is None else ()
    if len(shape) == 2 and shape[0] == problem.batch > 1:
        reading = f"reads mask of shape {shape} as (seqlen_q, seqlen_k)"
        copies += (f"{reading}; padding of (batch, seqlen_k) is masks.padding_mask(mask)",)
    problem = problem if device is None else _moved(problem, device)
    if follows_warn_only(call, problem):
        problem = without_order(problem, choice_in_force(backend), warn=False)
    return explain_description(problem, backend, copies)


def _moved(problem: AttentionProblem, device: str) -> AttentionProblem:
    """Describe the same call on "cpu", or on a GPU of an architecture."""
    arch = parse_arch(device)
    kind = "cpu" if arch == "cpu" else "cuda"
    return problem._replace(device=kind, arch=arch, is_hypothetical=arch != "cpu" and not gpu_names(arch))


def parse_arch(name: str) -> str:
    """Parse an architecture as users write it; return it as `device_arch` does.

    >>> parse_arch("sm90a"), parse_arch("gfx942"), parse_arch("cpu")
    ('sm_90', 'gfx942', 'cpu')

    Raises:
        ValueError: it is neither "cpu" nor the name of a GPU's architecture.
    """
    text = name if isinstance(name, str) else ""
    if text == "cpu" or re.fullmatch(r"gfx[0-9a-f]{3,4}", text):
        return text
    match = re.fullmatch(r"sm_?(\d{2,3})[af]?", text)
    if match is None:
        raise ValueError(
            f"device is {name!r}; it needs to be 'cpu' or the architecture of a GPU, such as 'sm_80' (A100), 'sm_90' "
            "(H100, H200), 'sm_100' (B200) or 'gfx942' (MI300)"
        )
    return f"sm_{match[1]}"


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
    backend: BackendChoice = "auto",
    sink: bool = False,
    sequences: SequenceSpec | None = None,
    by_distance: ByDistance | None = None,
    **raw_flags: Any,
) -> Explanation:
    """Explain a call by its shapes, for the command line and for tables of calls.

    Args:
        q, mask, bias: shapes of the tensors.
        kv_heads, seqlen_k, head_dim_v, bias_dtype: as q and `dtype` if left out.
        dtype: a torch.dtype, or a name out of `DTYPES`.
        device: as for `explain`.
        mask_prepared: whether the mask is the prepared form of one of that shape. With sequences a shape of 3 dims,
            (S or 1, n, n), is a tree of n new tokens.
        grad: whether dq, dk and dv, and dsink of a sink, are needed.
        bias_grad: whether dbias is needed.
        sequences: their layout. q is 4-D then, (1, Tq, Hq, D) where it is packed, and keys in pages have seqlen_k keys
            a page.
        by_distance: the numbers of a bias by distance; `bias` is the shape of its values, (H, n), or (H, Lq, n), with
            batch dims in front.
        raw_flags: fields of `RawFlags`.

    Raises:
        TypeError, ValueError: the description is invalid.
    """
    if len(q) < 4:
        raise ValueError(f"q is {q!r}; it needs 4 sizes or more: batch, seqlen_q, num_heads, head_dim")
    shapes = {"q": q, "kv_heads": kv_heads, "seqlen_k": seqlen_k, "head_dim_v": head_dim_v, "mask": mask, "bias": bias}
    for name, sizes in shapes.items():
        if any(size < 0 for size in ((sizes,) if isinstance(sizes, int) else sizes or ())):
            raise ValueError(f"{name} is {sizes!r}; sizes need to be at least 0")
    *batch, seqlen_q, num_heads, head_dim = q
    kv_heads = num_heads if kv_heads is None else kv_heads
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    q_dtype = _parse_dtype("dtype", dtype)
    own_dtype = q_dtype if bias_dtype is None else _parse_dtype("bias_dtype", bias_dtype)

    def meta(shape: tuple[int, ...], dtype: torch.dtype = q_dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    added: Tensor | Relative | Band | None = None if bias is None else meta(bias, own_dtype)
    if by_distance is not None and isinstance(added, Tensor):
        zero, outside, has_rows = by_distance
        added = Band(added, zero) if has_rows else Relative(added, zero, outside)
    mask_meta: Tensor | PreparedMask | None = None if mask is None else meta(mask, torch.bool)
    if sequences is not None and mask_prepared and isinstance(mask_meta, Tensor) and mask_meta.dim() == 3:
        from .masks import PreparedMask  # importing flash_dmattn does not need it

        mask_meta = PreparedMask.from_tree(mask_meta)
    call = prepare_call(
        meta(q),
        meta((*batch, seqlen_k, kv_heads, head_dim)),
        meta((*batch, seqlen_k, kv_heads, head_dim_v)),
        mask_meta,
        added,
        meta((num_heads,)) if sink else None,
        None,
        RawFlags(**raw_flags),
    )
    problem, _, _ = describe(call._replace(spec=sequences))
    needs_grad = NeedsGrad(grad, grad, grad, bias_grad and bias is not None, grad and sink)
    problem = _moved(problem, device)._replace(needs_grad=needs_grad)
    if mask_prepared and problem.mask is not None and problem.mask_form == "dense":
        mask_batch, mask_heads, rows, _ = problem.mask.shape
        flags = problem.flags
        form: MaskForm = "sequence_tiles"
        if sequences is not None:
            shape = sequences.shape_of_tiles(mask_heads)
            flags = flags._replace(mask_packing="queries" if sequences.packs_queries else "none")
        else:
            from .masks.prepared.operators import one_row_form  # importing flash_dmattn does not need it

            form = "tiles" if rows > 1 else one_row_form(seqlen_q).form
            shape = (mask_batch, mask_heads, rows if form == "keys" else seqlen_q, seqlen_k)
        problem = problem._replace(mask=unpacked_spec(shape), mask_form=form, flags=flags)
    return explain_description(problem, backend, call.copies)


def _parse_dtype(name: str, dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"{name} is {dtype!r}; it needs to be one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def explain_description(problem: AttentionProblem, backend: BackendChoice, copies: tuple[str, ...] = ()) -> Explanation:
    """Explain a described problem; `copies` names tensors that were copied before."""
    requested = choice_in_force(backend)
    forward = backward = error = tangents = None
    if problem.flags.invariant:
        copies = (*copies, _without_mode(problem, requested))
    try:
        selection = choose(problem, requested)
        is_differentiable = selection.forward.has_forward_ad
        try:
            tangents = (selection.forward if is_differentiable else select_tangents(problem, selection.forward)).name
        except BackendError:
            tangents = None
        if fallback() == "error" and falls_back(problem, requested, selection):
            refuse_fallback(problem)
        forward, backward = selected_names(problem, selection)
    except BackendError as refusal:
        error, tangents = refusal.details, None
    return Explanation(
        problem,
        requested,
        forward,
        backward,
        error,
        tuple(make_verdict(backend, problem) for backend in BACKENDS.table.values()),
        cite(problem) if requested == "auto" else None,
        copies,
        tangents,
    )


def _without_mode(problem: AttentionProblem, requested: BackendChoice) -> str:
    """Say which backends would run a call without the invariant mode, whose price is their lead."""
    free = problem._replace(flags=problem.flags._replace(invariant=False))
    try:
        names = [name for name in selected_names(free, choose(free, requested)) if name is not None]
    except BackendError:
        return "config(invariant=True) is in force: docs/invariance.md has its price"
    ran = " forward, ".join(names) + (" backward" if len(names) > 1 else "")
    return f"config(invariant=True) is in force; without it {ran} would run: docs/invariance.md has the price"


def make_verdict(backend: Backend, problem: AttentionProblem) -> Verdict:
    def serves(direction: Direction) -> bool:
        return not reasons_against(backend, problem, (direction,))

    passes = passes_of(problem)
    reasons = reasons_against(backend, problem, passes)
    served = tuple(direction for direction in passes if serves(direction))
    preferences = tuple(r for r in reasons_against(backend, problem, served, auto=True) if r not in reasons)
    notes: tuple[str, ...] = ()
    if not reasons:
        notes = tuple(backend.notes(problem))
        unpacking = unpacking_note(problem, backend)
        notes = notes if unpacking is None else (unpacking, *notes)
    backward = serves("backward") if len(passes) == 2 else None
    return Verdict(backend.name, serves("forward"), backward, reasons, preferences, notes)
