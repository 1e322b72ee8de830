"""Both passes of torch's flash kernel on CPUs, which adds a mask or a bias to the scores."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.linalg import vector_norm as _size  # order inf: maximum |x|; -inf: minimum; NaN stays

from ...gradients import differentiate_without_keys, has_pairs, run_without_keys
from ...problem import AttentionProblem, Gradients, collapse, make_band
from ...problem.inputs import Inputs, Saved, as_arrived
from ...reference.eager import LARGE_LSE
from ...reference.lists import repeat_heads
from ..eager import BACKEND as EAGER
from ..mask_choice import backward_of, forward_of
from ..protocol import Backward, Direction, Forward

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
# The range of queries for which causal calls are split into blocks. In longer calls only a small part of the visited
# keys is hidden, and the kernel has larger blocks of queries.
_CAUSAL_BLOCK = 128
_CUT_FROM, _CUT_TO = 192, 1024
# Eager computes rows with a larger lse, in both passes, because the rounding of their scores differs by more than exp
# can represent. This does not include a bias of -1e9, which is usual for padding.
_EXACT_LSE = 2.0**30


def kernel_is_causal(p: AttentionProblem) -> bool:
    """Return whether the kernel's own causality, which counts from the first key, is the band of a call.

    With a scale of 0 or less the kernel returns NaN (torch 2.13): it multiplies -inf by it.
    """
    left, right = p.window
    return (left, right) == (-1, 0) and p.seqlen_q == p.seqlen_k and p.softmax_scale > 0


def needs_band(p: AttentionProblem) -> bool:
    """Return whether the band of a call is added to the scores as a mask."""
    return make_band(p.seqlen_q, p.seqlen_k, p.window) is not None and not kernel_is_causal(p)


def added_dtype(p: AttentionProblem) -> torch.dtype:
    """Return the dtype of the tensor that is added to the scores: the dtype of q if it can hold the bias, else fp32."""
    if p.bias is None or p.bias.dtype == p.dtype or p.dtype in (torch.float32, torch.float64):
        return p.dtype
    return torch.float32


def _plan_added(p: AttentionProblem) -> Callable[[Tensor | None, Tensor | None], Tensor] | None:
    """Return (mask, bias) -> the tensor that is added to the scores, broadcast to them, or None."""
    band = make_band(p.seqlen_q, p.seqlen_k, p.window) if needs_band(p) else None
    if band is None and p.mask is None and p.bias is None:
        return None
    heads, shape = p.num_heads, (p.batch, p.num_heads, p.seqlen_q, p.seqlen_k)
    zero, hidden = (torch.tensor(x, dtype=added_dtype(p), device="cpu") for x in (0.0, -torch.inf))

    def added(mask: Tensor | None, bias: Tensor | None) -> Tensor:
        x = zero if bias is None else repeat_heads(bias, heads).to(zero.dtype)
        allowed = None if mask is None else repeat_heads(mask, heads)
        if band is not None:
            diagonals = torch.arange(p.seqlen_k, device="cpu") - torch.arange(p.seqlen_q, device="cpu")[:, None]
            inside = (diagonals >= band.low) & (diagonals <= band.high)
            allowed = inside if allowed is None else allowed & inside
        return (x if allowed is None else torch.where(allowed, x, hidden)).expand(shape)

    return added


def _plan_rows(p: AttentionProblem) -> Callable[[Inputs], tuple[Tensor, Tensor, Tensor]]:
    """Return inputs -> q, k, v as (B, H, L, D) with rows of unit stride: the kernel is wrong for other layouts."""
    is_read = p.head_dim == 1 or p.q_strides[3] == p.k_strides[3] == p.v_strides[3] == 1
    if p.arrival == "heads_first":
        return (lambda x: x[:3]) if is_read else lambda x: (x.q.contiguous(), x.k.contiguous(), x.v.contiguous())
    if is_read:
        return lambda x: (x.q.transpose(1, 2), x.k.transpose(1, 2), x.v.transpose(1, 2))
    return lambda x: (_rows(x.q), _rows(x.k), _rows(x.v))


def _as_results(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of the kernel as (B, L, H, D) and lse; in place, as in `mask_choice.forward_of`."""
    return out.transpose_(1, 2).contiguous(), lse.contiguous()


def _rows(x: Tensor) -> Tensor:
    x = x.transpose(1, 2)
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def reads_as_arrived(p: AttentionProblem, direction: Direction) -> bool:
    """Return whether a pass takes q, k and v as (B, H, L, D), the layout of the kernel."""
    return p.device == "cpu" and p.arrival == "heads_first" and has_pairs(p)


def plan_forward(p: AttentionProblem) -> Forward:
    """Plan the forward pass of a class of calls."""
    if not has_pairs(p):
        return run_without_keys(p)
    added, rows, is_causal, scale = _plan_added(p), _plan_rows(p), kernel_is_causal(p), p.softmax_scale
    in_blocks = added is None and is_causal and _CUT_FROM <= p.seqlen_k <= _CUT_TO
    in_blocks = in_blocks and p.dtype in (torch.float32, torch.float64)  # combining would round 16 bits again

    def forward(x: Inputs) -> tuple[Tensor, Tensor]:
        q, k, v = rows(x)
        mask = None if added is None else added(x.mask.dense, x.bias)
        if in_blocks:
            out, lse = _attend_in_blocks(q, k, v, scale)
        else:
            out, lse = _as_results(*_FORWARD(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale))
        if _is_usual(lse, _EXACT_LSE if x.bias is None else LARGE_LSE):
            return out, lse
        if mask is not None:
            if not _size(lse, torch.inf) < torch.inf:  # or NaN
                limits = mask if x.bias is None or added is None else added(x.mask.dense, None)
                out, lse = _without_hidden(out, lse, q, k, v, mask, limits, is_causal, scale)
            # Rows that see no key, for which the kernel writes 0. A bias of -inf plus a score of NaN is NaN.
            if x.bias is None or _size(q, torch.inf) + _size(k, torch.inf) < torch.inf:
                is_empty = ~_sees_key(mask, is_causal)
                out, lse = out.masked_fill(is_empty.mT[..., None], 0.0), lse.masked_fill(is_empty, -torch.inf)
        # The kernel writes 0 for short rows of NaN, too, and for scores that are all -inf. Its lse is +inf or NaN for a
        # row with a score of +inf.
        is_inexact = ~(lse.abs() <= _EXACT_LSE) & (lse != -torch.inf)
        is_lost = (lse == 0) | is_inexact
        is_great = (lse.abs() > LARGE_LSE) & (lse != -torch.inf)
        if mask is not None and x.bias is not None and is_great.any():
            if is_inexact.any():  # then eager computes all gradients, from its own rounded scores
                is_lost = is_lost | is_great
            else:
                _, new_out, rest = _attend_less_lse(q, k, v, mask, lse.masked_fill(~is_great, 0.0), is_causal, scale)
                is_great &= rest.isfinite()  # a hidden key with NaN makes it NaN
                out = torch.where(is_great.mT[..., None], new_out.transpose(1, 2), out)
                lse = torch.where(is_great, lse + rest, lse)
        if is_lost.any():
            new_out, new_lse = forward_of(EAGER, p)(x)
            out, lse = torch.where(is_lost.mT[..., None], new_out, out), torch.where(is_lost, new_lse, lse)
        return out, lse

    return forward


def _attend_less_lse(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, lse: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Subtract lse from the scores first; return the tensor that is added to them, and out and lse of the kernel.

    If lse is large, its rounding would affect every p, and scores with a large bias have lost digits. Both passes do
    this, so that they have the same p.
    """
    added = ((lse.new_zeros(()) if mask is None else mask) - lse[..., None]).expand(*lse.shape, k.shape[2])
    return added, *_FORWARD(q, k, v, 0.0, is_causal, attn_mask=added, scale=scale)


def _is_usual(lse: Tensor, largest: float = _EXACT_LSE) -> bool:
    """Return whether no lse is 0, NaN or larger: other rows of the kernel are right."""
    return bool(_size(lse, -torch.inf) > 0) and bool(_size(lse, torch.inf) <= largest)


def _attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend causally, block by block of queries: the kernel visits up to 512 keys past the diagonal.

    Each block attends to the keys before it, and causally to its own; the two results are joined by their lse.
    """
    batch, heads, seqlen, _ = q.shape
    outs, lses = q.new_empty(batch, seqlen, heads, v.shape[3]), q.new_empty(batch, heads, seqlen)
    for first in range(0, seqlen, _CAUSAL_BLOCK):
        rows = slice(first, min(first + _CAUSAL_BLOCK, seqlen))
        q_block = q[:, :, rows]
        out, lse = _FORWARD(q_block, k[:, :, rows], v[:, :, rows], 0.0, True, scale=scale)
        if first > 0:
            before, lse_before = _FORWARD(q_block, k[:, :, :first], v[:, :, :first], 0.0, False, scale=scale)
            total = torch.logaddexp(lse, lse_before)
            if not (_is_usual(lse) and _is_usual(lse_before)):  # a block may have lost digits of the other
                total.masked_fill_((lse == 0) | (lse_before == 0), torch.nan)
            out = out.mul_(lse.sub(total).exp_()[..., None])
            out.addcmul_(before, lse_before.sub(total).exp_()[..., None])
            lse = total
        outs[:, rows], lses[:, :, rows] = out.transpose(1, 2), lse
    return outs, lses


def _sees_key(mask: Tensor, is_causal: bool) -> Tensor:
    """Return whether each query attends to a key, bool (B or 1, H or 1, Lq or 1)."""
    for dim in range(3):
        mask = mask[(slice(None),) * dim + (slice(1),)] if mask.stride(dim) == 0 else mask
    seen = mask != -torch.inf  # a bias of NaN is visible
    if not is_causal:
        return seen.any(-1)
    if seen.shape[2] == 1:
        return seen[:, :, 0].cumsum(-1) > 0  # query i attends to the keys up to i
    return seen.tril().any(-1)


def _without_hidden(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    limits: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Recompute rows without a visible key or a bias of NaN or +inf: the kernel adds the mask, and NaN - inf is NaN.

    `limits` is the mask without the bias.
    """
    bad_keys, bad_added = ~k.isfinite().all(-1), collapse(mask)
    bad_added = bad_added.isnan() | (bad_added == torch.inf)
    clean = collapse(mask).masked_fill(bad_added, 0.0).expand(mask.shape)
    clean_k = k.masked_fill(bad_keys[..., None], 0.0)
    new_out, new_lse = _FORWARD(q, clean_k, v, 0.0, is_causal, attn_mask=clean, scale=scale)
    sees_bad = (limits > -torch.inf) & (repeat_heads(bad_keys, q.shape[1])[:, :, None] | bad_added)
    sees_bad = (sees_bad.tril() if is_causal else sees_bad).any(-1)
    return torch.where(sees_bad.mT[..., None], out, new_out.transpose(1, 2)), torch.where(sees_bad, lse, new_lse)


def plan_backward(p: AttentionProblem) -> Backward:
    """Plan the backward pass of a class of calls."""
    if not has_pairs(p):
        return differentiate_without_keys(p)
    if p.dtype in (torch.float16, torch.bfloat16):
        return _plan_backward_in_fp32(p)
    added, rows, is_causal, scale = _plan_added(p), _plan_rows(p), kernel_is_causal(p), p.softmax_scale
    dim, needs_grad = p.head_dim, p.needs_grad

    def backward(saved: Saved, dout: Tensor, dlse: Tensor | None, *, dbias_out: Tensor | None = None) -> Gradients:
        x, out, lse = saved
        arrived_dlse = dlse
        mask = None if added is None else added(x.mask.dense, x.bias)
        q, k, v = rows(x)
        if not _size(lse, torch.inf) <= LARGE_LSE:
            is_empty = lse == -torch.inf
            lse = lse.masked_fill(is_empty, 0.0)  # exp(-inf - 0) is the 0 that exp(-inf - -inf) is not
            dlse = None if dlse is None else dlse.masked_fill(is_empty, 0.0)
            largest = float(_size(lse, torch.inf))
            if not largest <= _EXACT_LSE:
                return backward_of(EAGER, p)(saved, dout, arrived_dlse)
            if largest > LARGE_LSE:
                mask, _, rest = _attend_less_lse(q, k, v, mask, lse, is_causal, scale)
                lse = rest.masked_fill(is_empty, 0.0)
        tensors = (_rows(dout), q, k, v, out.transpose(1, 2))
        if dlse is None:
            gradients = _BACKWARD(*tensors, lse, 0.0, is_causal, attn_mask=mask, scale=scale)
        else:
            # One more column, of dlse in dout, 1 in v and 0 in out, adds dlse to dout v^T and leaves delta unchanged.
            columns: tuple[Tensor | float, ...] = (dlse.to(lse.dtype)[..., None], 0.0, 0.0, 1.0, 0.0)
            wider = [_with_column(t, c) for t, c in zip(tensors, columns, strict=True)]
            gradients = [g[..., :dim] for g in _BACKWARD(*wider, lse, 0.0, is_causal, attn_mask=mask, scale=scale)]
        # The kernel multiplies hidden keys and whole blocks by 0, which spreads inf and NaN of these keys.
        if not sum(_size(g, torch.inf) for g in gradients) < torch.inf:
            return backward_of(EAGER, p)(saved, dout, arrived_dlse)
        dq, dk, dv = (g.transpose(1, 2).contiguous() for g in gradients)
        own = (dq if needs_grad.q else None, dk if needs_grad.k else None, dv if needs_grad.v else None, None)
        return as_arrived(own, p.arrival)

    return backward


def _plan_backward_in_fp32(p: AttentionProblem) -> Backward:
    """Plan a backward pass that recomputes out, because an out in 16 bits makes delta too inaccurate."""
    single = p._replace(dtype=torch.float32)
    run_forward, run_backward = plan_forward(single), plan_backward(single)

    def backward(saved: Saved, dout: Tensor, dlse: Tensor | None, *, dbias_out: Tensor | None = None) -> Gradients:
        x = saved.inputs
        x = x._replace(q=x.q.float(), k=x.k.float(), v=x.v.float())
        gradients = run_backward(Saved(x, *run_forward(x)), dout.float(), dlse)
        return tuple(g if g is None else g.to(p.dtype) for g in gradients)

    return backward


def _with_column(x: Tensor, column: Tensor | float) -> Tensor:
    """Append a column to rows of x."""
    if not isinstance(column, Tensor):
        column = x.new_full((*x.shape[:3], 1), column)
    return torch.cat((x, column), 3)
