"""Both passes of calls with lists, and the rules that the kernels of lists put on a call."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...gradients import differentiate_without_keys, has_pairs, run_without_keys
from ...problem import AttentionProblem, Gradients, MaskView, RowEntropy, dtype_name
from ...problem.inputs import Inputs, Saved
from ...reference.entropy import NOTHING_SENT, SentEntropy, joined_gradients
from ...reference.formula import spread_entries
from ..protocol import Backward, Forward, Rule

BLOCKS_OF_KEYS = (1, 16, 32, 64, 128)
MAX_BLOCK_OF_QUERIES = 128
# Head dims above 256, for example of latent attention, have kernels only for 16 bits: tiles of fp32 are too large.
MAX_HEAD_DIM, MAX_WIDE_HEAD_DIMS = 256, (576, 512)
# Tiles of a bool mask are as fast as lists of single keys if Lk * G is at most this multiple of K: docs/notes/lists.md.
_LEVEL = 256


def _kernels() -> ModuleType:
    return importlib.import_module("flash_dmattn.triton_kernels.list_calls")


def _has_key_bias(p: AttentionProblem) -> bool:
    if p.sequences is not None:
        return p.relative is None and p.bias is None
    return p.relative is None and (p.bias is None or (p.bias_class == "key" and not p.needs_grad.bias))


def _fits_tiles(p: AttentionProblem) -> bool:
    if max(p.head_dim, p.head_dim_v) <= MAX_HEAD_DIM:
        return True
    widest, widest_v = MAX_WIDE_HEAD_DIMS
    return p.head_dim <= widest and p.head_dim_v <= widest_v and p.dtype.itemsize == 2


def _pitch(page_size: int, strides: tuple[int, ...]) -> int:
    """Return the number of rows of keys from a page of a cache to the next; 0 if it is not an integer."""
    if page_size == 1:
        return 1
    return 0 if strides[1] == 0 or strides[0] % strides[1] else strides[0] // strides[1]


def _has_rows_of_pages(p: AttentionProblem) -> bool:
    if p.sequences is None or not p.sequences.has_pages:
        return True
    pitches = [_pitch(p.sequences.page_size, x) for x in (p.k_strides, p.v_strides)]
    return pitches[0] == pitches[1] > 0


RULES: tuple[Rule, ...] = (
    Rule(
        "list_blocks",
        lambda p: p.mask_form != "lists" or p.sequences is not None or p.flags.block_k in BLOCKS_OF_KEYS,
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
            f"lists have {p.mask.shape[1] if p.mask else 0} heads with {p.num_heads_k} key-value heads; the kernels "
            "read a key once for all heads of a group"
        ),
        'use backend="eager"',
    ),
    Rule(
        "list_head_dim",
        lambda p: p.mask_form != "lists" or _fits_tiles(p),
        lambda p: (
            f"head dims are {p.head_dim} and {p.head_dim_v} (v), of {dtype_name(p.dtype)}, with lists; the kernels "
            f"of lists have tiles for at most {MAX_HEAD_DIM}, and in 16 bits for {MAX_WIDE_HEAD_DIMS[0]} and "
            f"{MAX_WIDE_HEAD_DIMS[1]} (v)"
        ),
        'use backend="eager"',
    ),
    Rule(
        "list_sequences",
        lambda p: p.sequences is None or p.flags.block_k <= 1 or not (p.flags.is_list_bias and p.needs_grad.bias),
        lambda p: (
            f"the gradient of values for blocks of {p.flags.block_k} keys is needed with {p.batch} sequences; the "
            "kernels take single keys there, and sum over none of these blocks"
        ),
        'use backend=("triton", "eager")',
        ("backward",),
    ),
    Rule(
        "list_pages",
        lambda p: p.mask_form != "lists" or _has_rows_of_pages(p),
        lambda p: (
            f"pages of k and v have strides {p.k_strides[:2]} and {p.v_strides[:2]}; the kernels of lists read a cache "
            "as rows of one stride, the same rows of k and v"
        ),
        "lay k and v alike, with pages of whole rows",
    ),
    Rule(
        "list_dropout",
        lambda p: p.mask_form != "lists" or p.dropout_p == 0,
        lambda p: f"dropout_p is {p.dropout_p:g} with lists; the kernels of lists drop nothing",
        'use backend="eager"',
    ),
    Rule(
        "list_bias",
        lambda p: p.mask_form != "lists" or _has_key_bias(p),
        lambda p: (
            f"bias has shape {() if p.bias_tensor is None else tuple(p.bias_tensor.shape)} with lists; the kernels "
            "of lists read one value per key, have no gradient of it, and read none with sequences"
        ),
        "pass biases.ListBias(values, bias), with zeros for values",
    ),
)


def notes(p: AttentionProblem) -> tuple[str, ...]:
    """Note where tiles of a bool mask would be as fast as a call with lists."""
    if p.sequences is not None:
        blocks = ("takes blocks of keys as single keys with sequences",)
        return blocks if p.flags.block_k > 1 else ()
    group = p.num_heads // p.num_heads_k
    if p.flags.block_k > 1 or p.flags.block_q > 1 or p.seqlen_k * group >= _LEVEL * p.flags.list_size:
        return ()
    return (
        f"reads a key of a list for one query and {group} heads: with {p.flags.list_size} of {p.seqlen_k} keys in a "
        "list, PreparedMask.from_mask(mask.dense()) may be as fast where its bits fit in memory",
    )


def plan_forward(p: AttentionProblem) -> Forward:
    """Plan the forward pass of a class of calls with lists."""
    if p.sequences is not None:
        return _forward_with_sequences(p)
    if not (has_pairs(p) and p.flags.list_size):
        return run_without_keys(p._replace(seqlen_k=0))
    calls, numbers = _kernels(), _numbers(p)

    def forward(x: Inputs) -> tuple[Tensor, ...]:
        out, *rows = calls.list_forward(*_operands(p, x), numbers)
        return out.transpose_(1, 2), *rows  # in place, as in `mask_choice.forward_of`

    return forward


def plan_backward(p: AttentionProblem) -> Backward:
    """Plan the backward pass of a class of calls with lists."""
    if p.sequences is not None:
        return _backward_with_sequences(p)
    if not (has_pairs(p) and p.flags.list_size):
        return differentiate_without_keys(p)
    calls, numbers = _kernels(), _numbers(p)
    needs = calls.ListNeeds(*p.needs_grad)

    def backward(
        saved: Saved,
        dout: Tensor,
        dlse: Tensor | None,
        *,
        dbias_out: Tensor | None = None,
        entropy: RowEntropy | None = None,
    ) -> Gradients:
        x, out, lse = saved
        results = (out.transpose(1, 2), lse.contiguous())
        sent = NOTHING_SENT
        if entropy is not None:
            own_dlse, (dlse, dentropy) = dlse, joined_gradients(entropy, dlse, lse)
            sent = SentEntropy(dentropy, own_dlse)
        operands = (*_operands(p, x), *results, numbers, needs)
        gradients = calls.list_backward(dout.transpose(1, 2), dlse, *operands, sent=sent)
        *rows, dvalues, dsink = gradients
        dq, dk, dv = (None if g is None else g.transpose(1, 2) for g in rows)
        return dq, dk, dv, dvalues, dsink

    return backward


def _forward_with_sequences(p: AttentionProblem) -> Forward:
    if not has_pairs(p):
        return run_without_keys(p)
    run = plan_forward(_of_rows(p))

    def forward(x: Inputs) -> tuple[Tensor, ...]:
        rows, is_used = _in_rows(p, x)
        out, lse, *others = run(rows)
        return out, lse.masked_fill_(~is_used, -torch.inf), *others  # a row of no sequence has no sink either

    return forward


def _backward_with_sequences(p: AttentionProblem) -> Backward:
    if not has_pairs(p):
        return differentiate_without_keys(p)
    run = plan_backward(_of_rows(p))

    def backward(saved: Saved, dout: Tensor, dlse: Tensor | None, **more: Any) -> Gradients:
        rows, is_used = _in_rows(p, saved.inputs)
        # exp(sink - inf) is 0, so that rows of no sequence do not contribute to the gradient of a sink.
        return run(Saved(rows, saved.out, saved.lse.masked_fill(~is_used, torch.inf)), dout, dlse, **more)

    return backward


def _of_rows(p: AttentionProblem) -> AttentionProblem:
    """Describe the call of `_in_rows`."""
    spec = p.sequences
    assert spec is not None
    flags = p.flags
    flags = flags._replace(left=-1, right=-1, block_k=1, list_size=flags.list_size * flags.block_k, sequences=None)
    batch = 1 if spec.packs_queries else spec.number
    return p._replace(batch=batch, seqlen_q=spec.rows_q, seqlen_k=spec.rows_k, flags=flags)


def _in_rows(p: AttentionProblem, x: Inputs) -> tuple[Inputs, Tensor]:
    """Turn a call with sequences into one without: its lists have rows of packed keys, of a slot or of a cache.

    Blocks become single keys, because a sequence may begin anywhere in a block. Lists are shortened to visible keys, so
    the call needs no other limit. Also return whether each query belongs to a sequence, bool (B, 1, Lq). There is no
    synchronisation with the device.
    """
    from ...masks.prepared.lists import keys_seen  # importing flash_dmattn does not need it

    spec, sequences, k, v = p.sequences, x.sequences, x.k, x.v
    assert spec is not None and sequences is not None
    bounds, pages = sequences
    keys, _, slots = x.mask.tensors
    own, is_used, *limits = (each[:, None, :, None] for each in keys_seen(bounds, spec, p.window))
    first, low, high = (each.to(torch.int32) for each in limits)
    if p.flags.block_k > 1:
        keys, slots = _keys_of_blocks(keys, slots, p.flags.block_k, low if p.flags.left >= 0 else None)
    # Lists ascend, so keys that are hidden now, because lengths have changed, are the last of a list.
    there = (keys >= 0) & (keys <= high)
    if pages is None or spec.rows_k == 0:
        keys = keys + first
    else:
        pitch, size = _pitch(spec.page_size, p.k_strides), spec.page_size
        keys = torch.where(there, keys, 0)
        place = own * pages.shape[1] + keys // size
        page = pages.flatten()[place].clamp(0, max(k.shape[0] - 1, 0))
        keys = page * pitch + keys % size
        k, v = (_rows_of_pages(each, pitch).expand(keys.shape[0], -1, -1, -1) for each in (k, v))
    keys = torch.where(there, keys, -1)
    mask = MaskView("lists", (keys, there.sum(3, dtype=torch.int32), slots))
    return x._replace(k=k, v=v, mask=mask, sequences=None), is_used.squeeze(3)


def _keys_of_blocks(keys: Tensor, slots: Tensor, size: int, low: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the keys of blocks from `low` on, and the slots of their blocks, padded with -1."""
    own = slots if slots.shape[3] else torch.arange(keys.shape[3], dtype=keys.dtype, device=keys.device)
    singles = keys.unsqueeze(4) * size + torch.arange(size, dtype=keys.dtype, device=keys.device)
    singles = singles.masked_fill(keys.unsqueeze(4) < 0, -1).flatten(3)
    own = own.expand(keys.shape).repeat_interleave(size, 3)
    if low is None or keys.shape[3] == 0:
        return singles, own
    hidden = ((singles >= 0) & (singles < low)).sum(3, keepdim=True)
    place = torch.arange(singles.shape[3], device=keys.device) + hidden
    last = singles.shape[3] - 1
    kept = singles.gather(3, place.clamp(max=last)).masked_fill(place > last, -1)
    return kept, own.gather(3, place.clamp(max=last))


def _rows_of_pages(x: Tensor, pitch: int) -> Tensor:
    """View a cache (pages, page_size, H, D) as (1, rows, H, D), with `pitch` rows from a page to the next."""
    pages, size, heads, dim = x.shape
    if size == 1:
        return x.transpose(0, 1)
    _, *strides = x.stride()
    return x.as_strided((1, (pages - 1) * pitch + size, heads, dim), (0, *strides))


def _numbers(p: AttentionProblem) -> tuple[object, ...]:
    f = p.flags
    band = (f.softmax_scale, f.softcap, f.left, f.right)
    rest = (f.allows_tf32, f.max_scores, f.entropy, f.sums)
    numbers: tuple[object, ...] = _kernels().ListFlags(
        *band, f.block_q, f.block_k, p.head_dim_v, f.mask_repeat, f.bias_repeat, *rest
    )
    return numbers


def _operands(p: AttentionProblem, x: Inputs) -> tuple[Tensor | None, ...]:
    """Return the arguments of the kernels: q, k, v, keys, count, slots, values, a bias per key and the sink."""
    keys, count, slots = x.mask.tensors
    values, bias = (x.bias, None) if p.flags.is_list_bias else (None, x.bias)
    if bias is not None:
        bias = spread_entries(bias[:, :, :1], p.batch, p.flags.bias_repeat)
    q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
    sink = None if x.sink is None else x.sink.contiguous()
    return q, k, v, keys, count, slots if slots.shape[3] else None, values, bias, sink
