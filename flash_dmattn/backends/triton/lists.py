"""Both passes of calls with lists, and the rules that the kernels of lists put on a call."""

from __future__ import annotations

import importlib
from types import ModuleType

from torch import Tensor

from ...gradients import differentiate_without_keys, has_pairs, run_without_keys
from ...problem import AttentionProblem, Gradients, dtype_name
from ...problem.inputs import Inputs, Saved
from ...reference.formula import spread_entries
from ..protocol import Backward, Forward, Rule

BLOCKS_OF_KEYS = (1, 16, 32, 64, 128)
MAX_BLOCK_OF_QUERIES = 128
# Head dims above 256, as of latent heads, have kernels for 16 bits alone: tiles of fp32 do not fit.
MAX_HEAD_DIM, MAX_WIDE_HEAD_DIMS = 256, (576, 512)
# Tiles of a bool mask are as fast as lists of single keys where Lk * G is so many times K: see docs/notes/lists.md.
_LEVEL = 256


def _kernels() -> ModuleType:
    return importlib.import_module("flash_dmattn.triton_kernels.list_calls")


def _has_key_bias(p: AttentionProblem) -> bool:
    return p.relative is None and (p.bias is None or (p.bias_class == "key" and not p.needs_grad.bias))


def _fits_tiles(p: AttentionProblem) -> bool:
    if max(p.head_dim, p.head_dim_v) <= MAX_HEAD_DIM:
        return True
    widest, widest_v = MAX_WIDE_HEAD_DIMS
    return p.head_dim <= widest and p.head_dim_v <= widest_v and p.dtype.itemsize == 2


RULES: tuple[Rule, ...] = (
    Rule(
        "list_blocks",
        lambda p: p.mask_form != "lists" or p.flags.block_k in BLOCKS_OF_KEYS,
        lambda p: (
            f"lists are of blocks of {p.flags.block_k} keys; the kernels take {', '.join(map(str, BLOCKS_OF_KEYS))}"
        ),
        'list more blocks of one of these sizes, or use backend="eager"',
    ),
    Rule(
        "list_queries",
        lambda p: p.mask_form != "lists" or p.flags.block_q <= MAX_BLOCK_OF_QUERIES,
        lambda p: f"lists are for {p.flags.block_q} queries each; the kernels take at most {MAX_BLOCK_OF_QUERIES}",
        "repeat each list for fewer queries",
    ),
    Rule(
        "list_heads",
        lambda p: p.mask_form != "lists" or (p.mask is not None and p.mask.shape[1] in (1, p.num_heads_k)),
        lambda p: (
            f"lists have {p.mask.shape[1] if p.mask else 0} heads beside {p.num_heads_k} key-value heads; the kernels "
            "read a key once for all heads of a group"
        ),
        'use backend="eager"',
    ),
    Rule(
        "list_head_dim",
        lambda p: p.mask_form != "lists" or _fits_tiles(p),
        lambda p: (
            f"head dims are {p.head_dim} and {p.head_dim_v} (v), of {dtype_name(p.dtype)}, beside lists; the kernels "
            f"of lists have tiles for at most {MAX_HEAD_DIM}, and in 16 bits for {MAX_WIDE_HEAD_DIMS[0]} and "
            f"{MAX_WIDE_HEAD_DIMS[1]} (v)"
        ),
        'use backend="eager"',
    ),
    Rule(
        "list_dropout",
        lambda p: p.mask_form != "lists" or p.dropout_p == 0,
        lambda p: f"dropout_p is {p.dropout_p:g} beside lists; the kernels of lists drop nothing",
        'use backend="eager"',
    ),
    Rule(
        "list_bias",
        lambda p: p.mask_form != "lists" or _has_key_bias(p),
        lambda p: (
            f"bias has shape {() if p.bias_tensor is None else tuple(p.bias_tensor.shape)} beside lists; the kernels "
            "of lists read one value per key, and have no gradient of it"
        ),
        "pass biases.Chosen(values, bias), with zeros for values",
    ),
)


def notes(p: AttentionProblem) -> tuple[str, ...]:
    """Say where tiles of a bool mask would be as fast as a call with lists."""
    group = p.num_heads // p.num_heads_k
    if p.flags.block_k > 1 or p.flags.block_q > 1 or p.seqlen_k * group >= _LEVEL * p.flags.places:
        return ()
    return (
        f"reads a key of a list for one query and {group} heads: with {p.flags.places} of {p.seqlen_k} keys in a list, "
        "PreparedMask.from_mask(mask.dense()) may be as fast where its bits fit in memory",
    )


def plan_forward(p: AttentionProblem) -> Forward:
    """Plan the forward pass of a class of calls with lists."""
    if not (has_pairs(p) and p.flags.places):
        return run_without_keys(p._replace(seqlen_k=0))
    calls, numbers = _kernels(), _numbers(p)

    def forward(x: Inputs) -> tuple[Tensor, Tensor]:
        out, lse = calls.list_forward(*_operands(p, x), numbers)
        return out.transpose(1, 2), lse

    return forward


def plan_backward(p: AttentionProblem) -> Backward:
    """Plan the backward pass of a class of calls with lists."""
    if not (has_pairs(p) and p.flags.places):
        return differentiate_without_keys(p)
    calls, numbers = _kernels(), _numbers(p)
    needs = calls.ListNeeds(*p.needs_grad)

    def backward(saved: Saved, dout: Tensor, dlse: Tensor | None, *, dbias_out: Tensor | None = None) -> Gradients:
        x, out, lse = saved
        results = (out.transpose(1, 2), lse.contiguous())
        gradients = calls.list_backward(dout.transpose(1, 2), dlse, *_operands(p, x), *results, numbers, needs)
        *rows, dvalues, dsink = gradients
        dq, dk, dv = (None if g is None else g.transpose(1, 2) for g in rows)
        return dq, dk, dv, dvalues, dsink

    return backward


def _numbers(p: AttentionProblem) -> tuple[object, ...]:
    f = p.flags
    band = (f.softmax_scale, f.softcap, f.left, f.right)
    numbers: tuple[object, ...] = _kernels().ListFlags(
        *band, f.block_q, f.block_k, p.head_dim_v, f.mask_repeat, f.bias_repeat
    )
    return numbers


def _operands(p: AttentionProblem, x: Inputs) -> tuple[Tensor | None, ...]:
    """Return what the kernels read: q, k, v, keys, count, slots, values, a bias per key and the sink."""
    keys, count, slots = x.mask.tensors
    values, bias = (x.bias, None) if p.flags.chosen else (None, x.bias)
    if bias is not None:
        bias = spread_entries(bias[:, :, :1], p.batch, p.flags.bias_repeat)
    q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
    sink = None if x.sink is None else x.sink.contiguous()
    return q, k, v, keys, count, slots if slots.shape[3] else None, values, bias, sink
