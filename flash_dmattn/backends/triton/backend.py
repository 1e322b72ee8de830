"""The Triton kernels: one forward, a key- and a query-stationary backward, a mask packed once per pass."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch import Tensor

from ... import operators
from ...gradients import empty_gradients
from ...problem import (
    AttentionProblem,
    Flags,
    Gradients,
    MaskView,
    NeedsGrad,
    SequenceView,
    dtype_name,
    sm_number,
)
from ..direct import DirectBackward, DirectForward
from ..interval_walk import interval_notes, walked_view
from ..protocol import Availability, Direction, Rule
from ..sequence_walk import mask_notes
from . import direct
from .key_order import Ordered
from .tree_tiles import tiles_of_tree

NAME = "triton"
FEATURES = frozenset(
    {
        *("mask", "bias", "is_causal", "softcap", "window_size", "deterministic", "return_lse"),
        *("sink", "sequences", "paged", "tree", "dropout_p"),
    }
)
MASK_FORM = "prepared"
GATHERS_KEYS = True
REPEATS_ENTRIES = True
PROVIDES = frozenset(
    {"notes", "reads_dense", "direct_forward", "direct_backward", "heads_first_forward", "heads_first_backward"}
)

MAX_HEAD_DIM = 256

RULES: tuple[Rule, ...] = (
    Rule(
        "device",
        lambda p: p.device == "cuda",
        lambda p: f"device is {p.device}; the kernels run on GPUs",
        "move the tensors to a GPU",
    ),
    Rule(
        "arch",
        lambda p: (sm_number(p.arch) or 80) >= 80,
        lambda p: f"the GPU is {p.arch}; the kernels need sm_80 or later",
        'use backend="eager"',
    ),
    Rule(
        "dtype",
        lambda p: p.dtype != torch.float64 and (p.bias is None or p.bias.dtype != torch.float64),
        lambda p: (
            f"dtype is {dtype_name(p.dtype)}"
            + ("" if p.bias is None else f", that of bias {dtype_name(p.bias.dtype)}")
            + "; the kernels compute in at most float32"
        ),
        'cast, or use backend="eager"',
    ),
    Rule(
        "head_dim",
        lambda p: max(p.head_dim, p.head_dim_v) <= MAX_HEAD_DIM,
        lambda p: f"head dims are {p.head_dim} and {p.head_dim_v} (v); the tiles hold at most {MAX_HEAD_DIM}",
        'use backend="eager"',
    ),
)
AUTO_RULES: tuple[Rule, ...] = (
    Rule(
        "measured_gpu",
        lambda p: p.device != "cuda" or p.arch == "sm_90",
        lambda p: f"the GPU is {p.arch}; the kernels have been tested and timed on sm_90 only",
        'backend="triton" runs it all the same',
    ),
)

# Not imported at the top: importing Triton takes a second, and flash_dmattn has to import without it.
_MODULE = "flash_dmattn.triton_kernels.launch"
_SEQUENCES = "flash_dmattn.triton_kernels.sequences"
_found: Availability | None = None
_launch: ModuleType | None = None


def probe() -> Availability:
    """Whether Triton and the kernels can be imported; the first result is remembered."""
    global _found
    if _found is None:
        _found = _load()
    return _found


def _load() -> Availability:
    try:
        importlib.import_module(_MODULE)
    except Exception as error:  # a broken installation raises anything; a probe reports it
        return Availability(False, f"Triton cannot be imported: {error}", "pip install triton", error)
    return Availability(True)


def _kernels() -> ModuleType:
    # Found once: the import system takes two microseconds to find it again.
    global _launch
    if _launch is None:
        _launch = importlib.import_module(_MODULE)
    return _launch


def _of_sequences() -> ModuleType:
    return importlib.import_module(_SEQUENCES)


def reads_dense(problem: AttentionProblem, direction: Direction) -> bool:
    """Whether a pass of a call has short rows, whose kernels read a bool mask as it is."""
    call = _kernels().ShortCall.described(problem)
    serves: bool = call.serves_forward() if direction == "forward" else call.serves_backward()
    return serves


def notes(problem: AttentionProblem) -> tuple[str, ...]:
    """Copies that a call makes."""
    p = problem
    if p.sequences is not None:
        if p.mask_form == "tree" and any(p.needs_grad):
            return ("packs the tree as a mask of all keys for the gradients, a bit for each",)
        return mask_notes(p)
    copies = [
        f"copies {name}, whose last stride is {strides[3]}: the kernels read rows of unit stride"
        for name, strides in (("q", p.q_strides), ("k", p.k_strides), ("v", p.v_strides))
        if strides[3] != 1 and p.head_dim > 1
    ]
    short = [probe().usable and reads_dense(p, direction) for direction in ("forward", "backward")]
    if not short[1] and probe().usable and _kernels().needs_fp32_delta(p.dtype, p.seqlen_k, p.window, p.needs_grad):
        copies.append("for the gradients copies q, k, v to fp32 and computes out anew: few keys feel its rounding")
    ordered = () if all(short) else interval_notes(problem, GATHERS_KEYS)
    return (*ordered, *copies)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskView,
    bias: Tensor | None,
    flags: Flags,
    sink: Tensor | None = None,
    sequences: SequenceView | None = None,
    dropout: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    out, lse = operators.empty_outputs(q, v)
    if sequences is not None:
        if len(sequences.bounds) == 0 or out.numel() == 0:
            return operators.fill_empty(out, lse, None)
        _of_sequences().forward(q, k, v, mask, bias, out, lse, flags, sink, sequences, dropout)
        return out, lse
    if k.shape[1] == 0:
        return operators.fill_empty(out, lse, sink)
    if out.numel() > 0:
        if mask.form != "none" and not _kernels().is_short_forward(q, k, v, mask):
            mask = walked_view(mask, q, k, bias, flags, needs_dbias=False, gathers=GATHERS_KEYS)
            if mask.form == "intervals":
                ordered = Ordered(q, k, v, mask, bias, flags)
                k, v, mask, bias, flags = ordered.k, ordered.v, ordered.mask, ordered.bias, ordered.flags
        _kernels().forward(q, k, v, mask, bias, out, lse, flags, sink, dropout)
    return out, lse


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskView,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    flags: Flags,
    needs_grad: NeedsGrad,
    sink: Tensor | None = None,
    sequences: SequenceView | None = None,
    dropout: Tensor | None = None,
) -> Gradients:
    if sequences is not None:
        if len(sequences.bounds) == 0 or out.numel() == 0:
            lse = torch.full_like(lse, torch.inf)  # none of its rows has a sink
            return empty_gradients((q, k, v, bias), dout, None, out, lse, sink, needs_grad)
        if mask.form == "tree":
            mask = tiles_of_tree(mask.tensors[0], sequences.bounds, q.shape[1], k.shape[1], flags)
        of_call = (dout, dlse, q, k, v, mask, bias, out, lse, flags, needs_grad, sink, sequences, dropout)
        found: Gradients = _of_sequences().backward(*of_call)
        return found
    if out.numel() == 0 or k.shape[1] == 0:
        return empty_gradients((q, k, v, bias), dout, dlse, out, lse, sink, needs_grad)
    run = _kernels().backward
    reads_it = mask.form == "none" or _kernels().is_short_backward(q, k, v, mask)
    if not reads_it:
        mask = walked_view(mask, q, k, bias, flags, needs_dbias=needs_grad.bias, gathers=GATHERS_KEYS)
    if reads_it or mask.form != "intervals":
        gradients: Gradients = run(dout, dlse, q, k, v, mask, bias, out, lse, flags, needs_grad, sink, dropout)
        return gradients
    ordered = Ordered(q, k, v, mask, bias, flags, needs_dbias=needs_grad.bias)
    inputs = (q, ordered.k, ordered.v, ordered.mask, ordered.bias)
    dq, dk, dv, dbias, *of_sink = run(dout, dlse, *inputs, out, lse, ordered.flags, needs_grad, sink, dropout)
    return dq, ordered.by_key(dk), ordered.by_key(dv), ordered.bias_by_key(dbias), *of_sink


forward, backward = operators.define_pair(NAME, _forward, _backward)


def direct_forward(problem: AttentionProblem, mask: MaskView) -> DirectForward | None:
    """The forward pass of a class of calls: see `Backend`."""
    return direct.forward_pass(problem, mask, _kernels())


def direct_backward(problem: AttentionProblem, mask: MaskView) -> DirectBackward | None:
    """The backward pass of a class of calls."""
    return direct.backward_pass(problem, mask, _kernels())


def heads_first_forward(problem: AttentionProblem, mask: MaskView) -> DirectForward | None:
    """The forward pass of a class of calls whose q, k and v arrive as (B, H, L, D)."""
    return direct.forward_pass(problem, mask, _kernels(), heads_first=True)


def heads_first_backward(problem: AttentionProblem, mask: MaskView) -> DirectBackward | None:
    """The backward pass of such a class."""
    return direct.backward_pass(problem, mask, _kernels(), heads_first=True)
