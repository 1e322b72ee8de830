"""The passes of `cuda` for a class of calls that is described: what its problem decides is decided once.

They hand the kernels what `backend.py` hands them. Where a class needs more than that, there is no pass here: sinks,
heads as rows beside a bias, an order of keys, gradients that PyTorch makes of others, calls without a pair of a query
and a key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...gradients import key_gradient, new_like
from ...problem import AttentionProblem, Gradients, MaskView, Shape4, fits_tma, make_band
from ..direct import DirectBackward, DirectForward, has_pairs, outputs_of
from .bias_rows import fits, is_small_and_shared, readable
from .group_rows import as_rows, has_group_rows, keys_in_sight

Rows = Callable[[Tensor], Tensor]


def forward_pass(
    p: AttentionProblem, mask: MaskView, attend: Callable[..., Any], rows: Rows, num_kv_splits: Callable[[], int]
) -> DirectForward | None:
    """The forward pass of a class of calls.

    Args:
        p: of the class.
        mask: of one of its calls; of its tensors, sizes alone count.
        attend: the operator of the extension.
        rows: what copies a tensor that TMA cannot read.
        num_kv_splits: asked at each call.
    """
    places = _places_of(p, mask, p.bias_class == "score")
    if places is None:
        return None
    if has_group_rows(p) and mask.form == "none":
        return None if p.bias is not None else _forward_of_groups(p, attend, rows, num_kv_splits)
    read_rows = _reader(_shapes(p), p.dtype.itemsize, rows)
    low, high = _band(p)
    scale, softcap, dropout_p = p.softmax_scale, p.softcap, p.dropout_p
    one_mask_row = p.flags.one_mask_row and make_band(p.seqlen_q, p.seqlen_k, p.window) is None
    outputs, read_bias, lists = outputs_of(p), _forward_bias(p), places[:2]

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
        mask: tuple[Tensor, ...],
        dropout: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = outputs(q)
        q, k, v = read_rows(q, k, v)
        if read_bias is not None and bias is not None:
            bias = read_bias(bias)
        walked = [mask[place] for place in lists] if mask else ()
        numbers = (low, high, scale, softcap, num_kv_splits(), dropout, dropout_p, one_mask_row)
        attend(q, k, v, walked, bias, None, out, lse, *numbers)
        return out, lse

    return run


def _forward_of_groups(
    p: AttentionProblem, attend: Callable[..., Any], rows: Rows, num_kv_splits: Callable[[], int]
) -> DirectForward | None:
    """That of one query, without mask and bias, the heads of a group as rows: see `group_rows`."""
    first, stop = keys_in_sight(p.seqlen_k, p.window)
    if first >= stop:
        return None
    (_, q_strides), (_, k_strides), (_, v_strides) = _shapes(p)
    heads_k, group, keys = p.num_heads_k, p.num_heads // p.num_heads_k, stop - first
    of_batch, _, of_head, of_value = q_strides
    shapes = (
        ((p.batch, group, heads_k, p.head_dim), (of_batch, of_head, group * of_head, of_value)),
        ((p.batch, keys, heads_k, p.head_dim), k_strides),
        ((p.batch, keys, heads_k, p.head_dim_v), v_strides),
    )
    read_rows = _reader(shapes, p.dtype.itemsize, rows)
    scale, softcap, outputs = p.softmax_scale, p.softcap, outputs_of(p)

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
        mask: tuple[Tensor, ...],
        dropout: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = outputs(q)
        q, k, v, out_rows, lse_rows = as_rows(q, k, v, out, lse, first, stop)
        q, k, v = read_rows(q, k, v)
        numbers = (-group, keys, scale, softcap, num_kv_splits(), None, 0.0, False)
        attend(q, k, v, (), None, None, out_rows, lse_rows, *numbers)
        return out, lse

    return run


def backward_pass(
    p: AttentionProblem,
    mask: MaskView,
    differentiate: Callable[..., Any],
    rows: Rows,
    num_dbias_chunks: Callable[[], int],
) -> DirectBackward | None:
    """The backward pass of a class of calls; arguments as of `forward_pass`."""
    needs, dbias_class = p.needs_grad, p.dbias_class
    places = _places_of(p, mask, "score" in (p.bias_class, dbias_class))
    if places is None or needs.sink or dbias_class == "query" or not any(needs):
        return None
    read_rows = _reader(_shapes(p), p.dtype.itemsize, rows)
    low, high = _band(p)
    scale, softcap, is_deterministic, dropout_p = p.softmax_scale, p.softcap, p.deterministic, p.dropout_p
    new_q, new_k, new_v = (
        new_like(shape, strides) if needed else None
        for (shape, strides), needed in zip(_shapes(p), needs[:3], strict=True)
    )
    new_bias = new_like(p.bias.shape, p.bias.strides) if dbias_class == "score" and p.bias is not None else None
    sum_sizes = (p.batch, p.num_heads, p.seqlen_k) if dbias_class == "key" else None
    # As in `backend.py`: of an interval mask the kernel may add to them.
    allocate = torch.zeros if mask.form == "intervals" else torch.empty
    copies_bias = p.bias_class == "score"
    bias_fits = copies_bias and p.bias is not None and fits(p.bias.shape, p.bias.strides, p.bias.dtype.itemsize)
    num_heads_k, repeat = p.num_heads_k, p.flags.bias_repeat

    def run(
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
        dropout: Tensor | None,
    ) -> Gradients:
        dq = None if new_q is None else new_q(q)
        dk = None if new_k is None else new_k(k)
        dv = None if new_v is None else new_v(v)
        dbias = stored = sums = None
        if new_bias is not None and bias is not None:
            dbias = stored = new_bias(bias)
        elif sum_sizes is not None:
            sums = allocate(sum_sizes, dtype=torch.float32, device=q.device)
        q, k, v = read_rows(q, k, v)
        if not (dout.is_contiguous() and dout.data_ptr() % 16 == 0):
            dout = rows(dout) if dout.stride()[3] == 1 else dout.contiguous()
        read = bias
        if copies_bias and bias is not None and not (bias_fits and bias.data_ptr() % 16 == 0):
            read = readable(bias)
        walked = [mask[place] for place in places] if mask else ()
        tensors = (dout, dlse, q, k, v, walked, None, read, out, lse, dq, dk, dv, stored, sums, None)
        differentiate(*tensors, low, high, scale, softcap, is_deterministic, num_dbias_chunks(), dropout, dropout_p)
        if sums is not None and bias is not None:
            dbias = key_gradient(bias, sums, num_heads_k, repeat)
        return dq, dk, dv, dbias

    return run


def _places_of(p: AttentionProblem, mask: MaskView, is_per_score: bool) -> tuple[int, ...] | None:
    """Where bits or bounds, row lists and column lists are among the tensors of a mask; None for no pass here."""
    if p.sequences is not None or p.sink is not None or p.partly_shared or not has_pairs(p):
        return None
    if mask.form == "none":
        return ()
    if mask.form == "tiles":
        return 0, 2, 3
    if mask.form == "intervals" and not is_per_score and mask.tensors[2].shape[2] == 0:
        return 3, 4, 5
    return None


def _shapes(p: AttentionProblem) -> tuple[tuple[Shape4, Shape4], ...]:
    """Of q, k and v, with their strides."""
    return (
        ((p.batch, p.seqlen_q, p.num_heads, p.head_dim), p.q_strides),
        ((p.batch, p.seqlen_k, p.num_heads_k, p.head_dim), p.k_strides),
        ((p.batch, p.seqlen_k, p.num_heads_k, p.head_dim_v), p.v_strides),
    )


def _reader(
    shapes: tuple[tuple[Shape4, Shape4], ...], itemsize: int, rows: Rows
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """What makes q, k and v of these shapes and strides such that TMA reads them, a copy where it has to be."""
    q_fits, k_fits, v_fits = (fits_tma(shape, strides, itemsize) for shape, strides in shapes)

    def read(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not (q_fits and q.data_ptr() % 16 == 0):
            q = rows(q)
        if not (k_fits and k.data_ptr() % 16 == 0):
            k = rows(k)
        if not (v_fits and v.data_ptr() % 16 == 0):
            v = rows(v)
        return q, k, v

    return read


def _band(p: AttentionProblem) -> tuple[int, int]:
    return make_band(p.seqlen_q, p.seqlen_k, p.window) or (-p.seqlen_q, p.seqlen_k)


def _forward_bias(p: AttentionProblem) -> Callable[[Tensor], Tensor] | None:
    """What makes a bias readable; None where none is copied: see `bias_rows.readable_if_small`."""
    if p.bias is None or p.bias_class != "score":
        return None
    shape, strides, dtype = p.bias
    (q_shape, _), _, (v_shape, _) = _shapes(p)
    copies = dtype == p.dtype and is_small_and_shared(shape, strides, q_shape, v_shape)
    if p.dropout_p == 0 and not copies:
        return None
    is_read = fits(shape, strides, dtype.itemsize)
    return lambda bias: bias if is_read and bias.data_ptr() % 16 == 0 else readable(bias)
