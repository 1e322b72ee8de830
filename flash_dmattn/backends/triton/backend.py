"""The Triton kernels as a backend: its rules, probe and notes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...problem import AttentionProblem, dtype_name, sm_number
from ...triton_kernels import precision
from ..mask_choice import interval_notes, sequence_notes
from ..protocol import Availability, Backend, Probe, Rule
from . import lists
from .passes import (
    copies_bias,
    has_few_pairs,
    is_short,
    kernels,
    plan_backward,
    plan_forward,
    plan_tangents,
    reads_as_arrived,
    reads_dense,
)

MAX_HEAD_DIM = 512
# With wider heads, tiles of fp32 would need 192 KB of shared memory in the backward pass, and most of their values
# would spill.
MAX_FP32_HEAD_DIM = 256


def _has_fp32_tiles(p: AttentionProblem) -> bool:
    return p.dtype != torch.float32 or max(p.head_dim, p.head_dim_v) <= MAX_FP32_HEAD_DIM


def _span_of_values(p: AttentionProblem) -> int:
    """Return the elements from the first to the last value of a head of a bias by distance; 0 without one."""
    return 0 if p.relative is None else 1 + (p.relative.shape[3] - 1) * p.relative.strides[3]


def _most_tangents(p: AttentionProblem) -> int:
    """Return the largest head dim in forward mode, where a tile has the tangents of q, k and v, too."""
    if p.dtype.itemsize == 4:
        return 64  # wider tiles would spill most of their values
    return 128 if p.arch.startswith("gfx") else 256


def _is_band(p: AttentionProblem) -> bool:
    return p.relative is not None and p.relative.shape[2] != 1


def _has_own_values(p: AttentionProblem) -> bool:
    """Return whether each head and each entry has its own values of a bias by distance."""
    return p.relative is not None and p.relative.shape[:2] == (p.batch, p.num_heads)


# Features that the kernels do not compute row by row: a name, and whether a call has it.
_NOT_INVARIANT: tuple[tuple[str, Callable[[AttentionProblem], bool]], ...] = (
    ("dropout", lambda p: p.dropout_p > 0),
    ("a bias by distance", lambda p: p.relative is not None),
    ("lists", lambda p: p.mask_form == "lists"),
    ("a tree", lambda p: p.mask_form == "tree"),
    ("a prepared mask of keys", lambda p: p.mask_form in ("keys", "intervals")),
    ("a bias of one value per query", lambda p: p.bias_class == "query"),
    ("max_scores", lambda p: p.flags.max_scores),
    ("entropy", lambda p: p.flags.entropy),
    ("sums of probabilities", lambda p: p.flags.sums),
    ("softmax_scale 0", lambda p: p.softmax_scale == 0),
    ("head dims above 256", lambda p: max(p.head_dim, p.head_dim_v) > 256),
)


def _has_own_heads(p: AttentionProblem) -> bool:
    return p.bias is not None and p.bias.shape[1] == p.num_heads


def _not_invariant(p: AttentionProblem) -> str:
    return ", ".join(name for name, is_used in _NOT_INVARIANT if is_used(p))


RULES: tuple[Rule, ...] = (
    Rule(
        "invariant",
        lambda p: not p.flags.invariant or not any(is_used(p) for _, is_used in _NOT_INVARIANT),
        lambda p: f"config(invariant=True) is in force and the call has {_not_invariant(p)}, which the mode lacks",
        "leave the mode, or see docs/invariance.md for what it has",
    ),
    Rule(
        "invariant_dbias",
        lambda p: not (p.flags.invariant and p.needs_grad.bias and p.bias is not None) or _has_own_heads(p),
        lambda p: (
            f"config(invariant=True) is in force, the gradient of bias is needed, and its heads are fewer than "
            f"{p.num_heads} query heads: sums over heads are taken in orders that go by the batch"
        ),
        "expand the heads of bias, or leave the mode",
        ("backward",),
    ),
    Rule(
        "invariant_tangents",
        lambda p: not p.flags.invariant,
        lambda p: "config(invariant=True) is in force, and the mode has no tangents",
        passes=("tangents",),
    ),
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
        lambda p: p.dtype != torch.float64 and (p.bias_tensor is None or p.bias_tensor.dtype != torch.float64),
        lambda p: (
            f"dtype is {dtype_name(p.dtype)}"
            + ("" if p.bias_tensor is None else f" and bias has {dtype_name(p.bias_tensor.dtype)}")
            + "; the kernels compute in at most float32"
        ),
        'cast, or use backend="eager"',
    ),
    Rule(
        "head_dim",
        lambda p: p.mask_form == "lists" or max(p.head_dim, p.head_dim_v) <= MAX_HEAD_DIM,
        lambda p: f"head dims are {p.head_dim} and {p.head_dim_v} (v); the tiles hold at most {MAX_HEAD_DIM}",
        'use backend="eager"',
    ),
    Rule(
        "relative_sequences",
        lambda p: p.relative is None or p.sequences is None or not p.needs_grad.bias,
        lambda p: (
            f"the gradient of a bias by distance is needed with {p.batch} sequences; the kernel that sums it takes "
            "whole batches"
        ),
        'use backend=("triton", "eager")',
        ("backward",),
    ),
    Rule(
        "relative_head_dim",
        lambda p: p.relative is None or not p.needs_grad.bias or max(p.head_dim, p.head_dim_v) <= 256,
        lambda p: (
            f"the gradient of a bias by distance is needed and head dims are {p.head_dim} and {p.head_dim_v} (v); the "
            "kernel that sums it has tiles for at most 256"
        ),
        'use backend=("triton", "eager")',
        ("backward",),
    ),
    Rule(
        "band_sequences",
        lambda p: not _is_band(p) or p.sequences is None,
        lambda p: f"bias is a Band with {p.batch} sequences; the kernels read one for whole batches",
        'use backend="eager"',
    ),
    Rule(
        "band_heads",
        lambda p: not _is_band(p) or not p.needs_grad.bias or _has_own_values(p),
        lambda p: (
            f"the gradient of a Band is needed, whose values are shared by some of {p.batch} entries and {p.num_heads} "
            "heads; the kernel stores it and does not sum"
        ),
        'use backend=("triton", "eager"), or expand the values',
        ("backward",),
    ),
    Rule(
        "values_span",
        lambda p: _span_of_values(p) < 2**31,
        lambda p: f"the values of a head of bias span {_span_of_values(p)} elements; the kernels count them in 32 bits",
        "pass fewer values, contiguous",
    ),
    Rule(
        "fp32_head_dim",
        _has_fp32_tiles,
        lambda p: (
            f"dtype is float32 and head dims are {p.head_dim} and {p.head_dim_v} (v); gradients in float32 have tiles "
            f"for at most {MAX_FP32_HEAD_DIM}"
        ),
        'use backend=("triton", "eager"), or 16 bits',
        passes=("backward",),
    ),
    Rule(
        "tangents_head_dim",
        lambda p: max(p.head_dim, p.head_dim_v) <= _most_tangents(p),
        lambda p: (
            f"head dims are {p.head_dim} and {p.head_dim_v} (v); in forward mode the tiles hold at most "
            f"{_most_tangents(p)} here"
        ),
        passes=("tangents",),
    ),
    Rule(
        "tangents_form",
        lambda p: p.mask_form != "lists" and not _is_band(p),
        lambda p: "the call has lists or a bias by query and distance; the kernel in forward mode reads neither",
        passes=("tangents",),
    ),
    *lists.RULES,
)
AUTO_RULES: tuple[Rule, ...] = (
    Rule(
        "measured_gpu",
        lambda p: p.device != "cuda" or p.arch == "sm_90",
        lambda p: f"the GPU is {p.arch}; the kernels have been tested and timed on sm_90 only",
        'backend="triton" runs it all the same',
    ),
    Rule(
        "fp32_head_dim_is_slow",
        _has_fp32_tiles,
        lambda p: (
            f"dtype is float32 and head dims are {p.head_dim} and {p.head_dim_v} (v); above "
            f"{MAX_FP32_HEAD_DIM} the kernels have tiles of 16 queries"
        ),
        'backend="triton" runs the forward pass all the same',
    ),
)


def _load() -> Availability:
    try:
        kernels()
    except Exception as error:  # a broken installation raises anything; a probe reports it
        return Availability(False, f"Triton cannot be imported: {error}", "pip install triton", error)
    return Availability(True)


probe = Probe(_load)


# How fp32 operands are multiplied, by the precision of a call; {setting} is torch's setting.
_PRODUCTS = {
    "fp16x3": "by three products of float16 on tensor cores, with the error of float32 ({setting})",
    "bf16x3": "by three products of bfloat16 on tensor cores, with a relative error of about 1e-5 ({setting})",
    "tf32": "in TF32 on tensor cores, with a relative error of about 1e-3 ({setting})",
    "ieee": "on CUDA cores: {why} ({setting})",
}


def _products_note(p: AttentionProblem) -> tuple[str, ...]:
    """Note how a call in fp32 multiplies."""
    if p.dtype != torch.float32 or p.device != "cuda":
        return ()
    setting = f"torch's float32 matmul precision is {'high' if p.flags.allows_tf32 else 'highest'!r}"
    most = precision.MOST_HEAD_DIM.get(p.arch)
    if p.mask_form == "lists":
        why = "the call has lists"
    elif most is None:
        why = f"pieces of 16 bits gain nothing on {p.arch}"
    elif max(p.head_dim, p.head_dim_v) > most:
        why = f"a head dim is above {most}, where pieces of 16 bits do not fit in registers"
    else:
        why = f"{p.seqlen_q} queries take as long as reading the keys"
    how = _PRODUCTS[precision.problem_precision(p)].format(setting=setting, why=why)
    return (f"multiplies in float32 {how}",)


def _invariant_note(p: AttentionProblem) -> tuple[str, ...]:
    if not p.flags.invariant:
        return ()
    keys = f"spans of {kernels().SPAN} keys in their order" if probe().usable else "spans of keys in their order"
    return (f"is invariant: a row's bits depend on the row alone, by {keys} and one tile for each class of calls",)


def _notes(problem: AttentionProblem) -> tuple[str, ...]:
    return (*_invariant_note(problem), *_notes_of_form(problem), *_products_note(problem))


def _notes_of_form(problem: AttentionProblem) -> tuple[str, ...]:
    p = problem
    if p.mask_form == "lists":
        return lists.notes(p)
    spread: tuple[str, ...] = ()
    if p.bias is not None and copies_bias(p):
        spread = (f"copies bias, whose last stride is {p.bias.strides[3]}: the kernels read rows of unit stride",)
    if p.sequences is not None:
        if p.mask_form == "tree" and any(p.needs_grad):
            return ("packs the tree as a mask of all keys for the gradients, a bit for each", *spread)
        return (*sequence_notes(p), *spread)
    copies = [
        f"copies {name}, whose last stride is {strides[3]}: the kernels read rows of unit stride"
        for name, strides in (("q", p.q_strides), ("k", p.k_strides), ("v", p.v_strides))
        if strides[3] != 1 and p.head_dim > 1
    ]
    works = probe().usable
    short_forward, short_backward = works and is_short(p, "forward"), works and is_short(p, "backward")
    if works and not short_backward and kernels().needs_fp32_delta(p.dtype, p.seqlen_k, p.window, p.needs_grad):
        copies.append("for the gradients copies q, k, v to fp32 and computes out anew: few keys feel its rounding")
    reads_bools = p.mask_form == "dense" and has_few_pairs(p)
    ordered = () if reads_bools or (short_forward and short_backward) else interval_notes(problem, gathers=True)
    return (*ordered, *copies, *spread)


BACKEND = Backend(
    name="triton",
    plan_forward=plan_forward,
    plan_backward=plan_backward,
    plan_tangents=plan_tangents,
    features=frozenset({"mask", "bias", "is_causal", "softcap", "window_size", "deterministic", "return_lse"})
    | {"sink", "sequences", "paged", "tree", "dropout_p", "relative_bias", "band_bias", "lists", "list_bias"}
    | {"max_scores", "entropy"},
    rules=RULES,
    auto_rules=AUTO_RULES,
    probe=probe,
    notes=_notes,
    mask_forms=frozenset({"tiles", "keys", "intervals", "sequence_tiles", "tree", "lists"}),
    reads_dense=reads_dense,
    reads_as_arrived=reads_as_arrived,
    repeats_entries=True,
    wide_lse=True,
    is_invariant=True,
    sums_probabilities=True,
)
