"""The formula of attention with mask and bias, written for clarity; in fp64 it is the oracle of every test."""

from __future__ import annotations

import torch
from torch import Tensor

from .distances import AnyBias, Distances, dense, distance_sums
from .dropout import Dropout
from .sinks import sink_gradient


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    bias: AnyBias | None = None,
    *,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    window_size: tuple[int, int] | None = None,
    return_probs: bool = False,
    sink: Tensor | None = None,
    dropout: Dropout | None = None,
    max_scores: bool = False,
    entropy: bool = False,
) -> tuple[Tensor, ...]:
    """Attend with mask, bias, causal limit, window, softcap and sink, by the plain formula.

    Equivalent PyTorch, for one head and without softcap::

        s = softmax_scale * q @ k.T + bias
        s = s.masked_fill(~allowed, -inf)
        lse = s.logsumexp(-1)  # with a sink: torch.logaddexp(s.logsumexp(-1), sink)
        out = (s - lse).exp() @ v  # with dropout: torch.where(kept, (s - lse).exp() / (1 - p), 0) @ v

    Autograd differentiates all results, twice, in q, k, v, bias and sink. A row with nothing allowed has out 0, lse
    -inf (with a sink: the sink), and gradient 0 in q, k, v and bias. fp32 and fp64 are computed in their own dtype.
    fp16 and bf16 are plain PyTorch in that dtype with the softmax in fp32. Both products round their result, and the
    probabilities are rounded before ``@ v``.

    Args:
        q: (B, Lq, Hq, D), float.
        k: (B, Lk, Hk, D), q's dtype; query head h has key-value head h // (Hq // Hk).
        v: (B, Lk, Hk, Dv), q's dtype.
        mask: bool, True = attend; broadcastable to (B, Hq, Lq, Lk), its head dim may be Hk.
        bias: float, added to the scaled scores; shaped as mask, or a bias by distance. -inf masks, any finite number is
            just a number.
        is_causal: allow key j for query i only where j <= i + Lk - Lq (bottom-right aligned).
        softmax_scale: factor of the scores; None means D ** -0.5.
        softcap: if positive, scores become softcap * tanh(scores / softcap) before the bias.
        window_size: (left, right), in keys on either side of i + Lk - Lq; -1 is unlimited.
        return_probs: also return the (B, Hq, Lq, Lk) probabilities.
        sink: (Hq,), any float dtype: one more logit for each query head, without a value, not scaled and not capped.
            -inf stands for no sink.
        dropout: which probabilities are dropped before ``@ v``; None for none.
        max_scores: also return the maximum score of each row, (B, Hq, Lq), without the sink; it has no gradient.
        entropy: also return the entropy of each row, (B, Hq, Lq), of its keys and its sink.

    Returns:
        ``(out, lse)``, and then max_scores, entropy and probs where they are asked for. out is (B, Lq, Hq, Dv) in q's
        dtype. lse (B, Hq, Lq) is the natural log of the sum of exp of the scores. All but out are fp32 (fp64 for fp64),
        and without dropout. The caller validates the arguments.

    Source: Vaswani et al. (arXiv:1706.03762, section 3.2.1); softcap as in Gemma 2 (arXiv:2408.00118, section 2);
    sinks as in gpt-oss (arXiv:2508.10925).

    >>> import torch
    >>> q = k = v = torch.eye(2, dtype=torch.float64).view(1, 2, 1, 2)
    >>> out, lse = attention(q, k, v, is_causal=True, softmax_scale=1.0)
    >>> [[round(x, 3) for x in row] for row in out[0, :, 0].tolist()]  # a row per query: all of key 0, then 1 : e
    [[1.0, 0.0], [0.269, 0.731]]
    """
    s, _ = scores(q, k, mask, bias, is_causal, softmax_scale, softcap, window_size)
    p, lse, share = _softmax(s, sink)
    weights = p if dropout is None else dropout.apply(p)
    out = torch.einsum("bhgij,bjhd->bihgd", weights.to(v.dtype), v).flatten(2, 3)
    results = [lse]
    if max_scores:
        results.append(largest(s))
    if entropy:
        results.append(row_entropy(p, share))
    if return_probs:
        results.append(p)
    return out, *(x.flatten(1, 2) for x in results)


def gradients(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    bias: AnyBias | None = None,
    *,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    window_size: tuple[int, int] | None = None,
    sink: Tensor | None = None,
    dropout: Dropout | None = None,
    dentropy: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of :func:`attention` by their formulas, themselves differentiable.

    Equivalent PyTorch: ``torch.autograd.grad((out, lse), (q, k, v, bias, sink), (dout, dlse))``. fp16 and bf16 inputs
    are computed in fp32 and rounded once.

    Args:
        dout: (B, Lq, Hq, Dv), the gradient of out.
        dlse: (B, Hq, Lq), the gradient of lse, or None for zero.
        dentropy: likewise of the entropy.
        the rest: as for :func:`attention`.

    Returns:
        ``(dq, dk, dv, dbias)`` in the shapes and dtypes of q, k, v, and bias or its values; dbias is None without a
        bias. With a sink ``(dq, dk, dv, dbias, dsink)``.

    Source: the softmax derivative of FlashAttention (arXiv:2205.14135, appendix B.2), with dlse subtracted from delta.
    The entropy H of a row with gradient g adds -g p ln p to ds, and g H to delta.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 4, 1, 8, dtype=torch.float64).requires_grad_()
    >>> out, lse = attention(q, k, v)
    >>> dq, dk, dv, _ = gradients(torch.ones_like(out), None, q, k, v)
    >>> torch.allclose(dq, torch.autograd.grad(out.sum(), q)[0])
    True
    """
    wide = softmax_dtype(q)
    num_heads_k = k.shape[2]
    qg, kg, vg = q.to(wide).unflatten(2, (num_heads_k, -1)), k.to(wide), v.to(wide)
    dout_g = dout.to(wide).unflatten(2, (num_heads_k, -1))
    scale = default_scale(q, softmax_scale)
    s, slope = scores(q.to(wide), kg, mask, bias, is_causal, scale, softcap, window_size)
    p, lse, share = _softmax(s, sink)
    weights = p if dropout is None else dropout.apply(p)
    out = torch.einsum("bhgij,bjhd->bihgd", weights, vg)
    delta = (dout_g * out).sum(-1).permute(0, 2, 3, 1)
    if dlse is not None:
        # The lse of an empty row is the constant -inf. Its dlse is ignored, because inf * (p = 0) would be NaN.
        delta = delta - dlse.to(wide).unflatten(1, (num_heads_k, -1)).masked_fill(lse == -torch.inf, 0.0)
    dp = torch.einsum("bihgd,bjhd->bhgij", dout_g, vg)
    dp = dp if dropout is None else dropout.apply(dp)
    sink_delta = delta  # of the sink, whose dp is 0
    if dentropy is not None:
        g = dentropy.to(wide).unflatten(1, (num_heads_k, -1)).masked_fill(lse == -torch.inf, 0.0)
        delta = delta + g * row_entropy(p, share)
        sink_delta = delta if share is None else delta + g * log_of(share)
        dp = dp - g.unsqueeze(-1) * log_of(p)
    ds = p * (dp - delta.unsqueeze(-1))
    ds_product = scale * (ds if slope is None else ds * slope)

    dq = torch.einsum("bhgij,bjhd->bihgd", ds_product, kg).flatten(2, 3)
    dk = torch.einsum("bhgij,bihgd->bjhd", ds_product, qg)
    dv = torch.einsum("bhgij,bihgd->bjhd", weights, dout_g)
    dbias = None
    if bias is not None:
        dbias = bias_gradient(ds, bias, q.shape[2])
    gradients = dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dbias
    if sink is None:
        return gradients
    return *gradients, sink_gradient(sink, lse.flatten(1, 2), sink_delta.flatten(1, 2))


def scores(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    bias: AnyBias | None,
    is_causal: bool,
    softmax_scale: float | None,
    softcap: float,
    window_size: tuple[int, int] | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the (B, Hk, G, Lq, Lk) scores, -inf where not allowed, and the slope of the softcap or None."""
    (_, seqlen_q, num_heads, _), (_, seqlen_k, num_heads_k, _) = q.shape, k.shape
    s = torch.einsum("bihgd,bjhd->bhgij", q.unflatten(2, (num_heads_k, -1)), k)
    s = s.to(softmax_dtype(q)) * default_scale(q, softmax_scale)
    slope = None
    if softcap > 0:
        t = torch.tanh(s / softcap)
        s, slope = softcap * t, 1 - t * t
    if bias is not None:
        if isinstance(bias, Distances):  # in the dtype of s, so that gradients of values are rounded once
            bias = dense(bias._replace(values=bias.values.to(s.dtype)), seqlen_q, seqlen_k)
        s = s + grouped(bias, num_heads_k, num_heads).to(s.dtype)
    keep = allowed(mask, seqlen_q, seqlen_k, is_causal, window_size, q.device)
    if keep is not None:
        s = s.masked_fill(~grouped(keep, num_heads_k, num_heads), -torch.inf)
    return s, slope


def bias_gradient(ds: Tensor, bias: AnyBias, num_heads: int) -> Tensor:
    """Return the gradient of a bias, or of its values, from the gradient of the scores, (B, Hk, G, Lq, Lk)."""
    if isinstance(bias, Tensor):
        return ds.sum_to_size(grouped(bias, ds.shape[1], num_heads).shape).reshape(bias.shape).to(bias.dtype)
    values = bias.values
    shared = grouped(values, ds.shape[1], num_heads).shape[:3]
    sums = distance_sums(ds.sum_to_size((*shared, *ds.shape[3:])), bias)
    return sums.reshape(values.shape).to(values.dtype)


def softmax(s: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the probabilities over the last dim and the logsumexp; a row of -inf gives zeros and -inf, without NaN.

    Args:
        s: (B, Hk, G, Lq, Lk).
        sink: (Hk * G,), one more logit for every row of a head; it counts in the sum only.
    """
    return _softmax(s, sink)[:2]


def largest(s: Tensor) -> Tensor:
    """Return the maximum score of each row, (B, Hk, G, Lq), without a gradient; -inf without keys."""
    return s.detach().amax(-1) if s.shape[-1] else s.new_full(s.shape[:-1], -torch.inf)


def row_entropy(p: Tensor, share: Tensor | None) -> Tensor:
    """Return -sum p ln p over the keys of each row and its sink, whose probability is `share`."""
    total = -(p * log_of(p)).sum(-1)
    return total if share is None else total - share * log_of(share)


def log_of(p: Tensor) -> Tensor:
    """Return ln p, 0 where p is 0: there neither p ln p nor a derivative of it counts."""
    return p.masked_fill(p == 0, 1.0).log()


def _softmax(s: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the result of :func:`softmax`, and the probability of the sink, (B, Hk, G, Lq)."""
    # Any constant shift gives the same result, so it needs no gradient. logsumexp, unlike amax, also takes Lk = 0.
    shift = s.detach().logsumexp(-1, keepdim=True)
    if sink is not None:
        sink = sink.to(s.dtype).view(*s.shape[1:3], 1, 1)
        shift = torch.logaddexp(shift, sink.detach())
    finite_shift = shift.masked_fill(shift == -torch.inf, 0.0)
    weight = torch.exp(s - finite_shift)
    total, sink_weight = weight.sum(-1, keepdim=True), None
    if sink is not None:
        sink_weight = torch.exp(sink - finite_shift)
        total = total + sink_weight
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    share = None if sink_weight is None else (sink_weight / total).squeeze(-1)
    return weight / total, (shift + torch.log(total)).squeeze(-1), share


def allowed(
    mask: Tensor | None,
    seqlen_q: int,
    seqlen_k: int,
    is_causal: bool,
    window_size: tuple[int, int] | None,
    device: torch.device | str | None = None,
) -> Tensor | None:
    """Return mask & causal & window as one bool tensor that broadcasts to (B, H, Lq, Lk), or None without a limit."""
    left, right = window_size if window_size is not None else (-1, -1)
    if is_causal:
        right = 0
    if left < 0 and right < 0:
        return mask
    # The distance of key j to the right of the diagonal that ends in the bottom-right corner.
    diagonal = torch.arange(seqlen_q, device=device).unsqueeze(1) + (seqlen_k - seqlen_q)
    offset = torch.arange(seqlen_k, device=device) - diagonal
    inside = offset >= -left if left >= 0 else torch.ones_like(offset, dtype=torch.bool)
    if right >= 0:
        inside = inside & (offset <= right)  # ONNX has no operator for &=
    return inside if mask is None else mask & inside


def grouped(x: Tensor, num_heads_k: int, num_heads: int) -> Tensor:
    """View a mask or bias of 2 to 4 dims as (B | 1, Hk | 1, G | 1, Lq | 1, Lk | 1)."""
    x = x[(None,) * (4 - x.dim())]
    return x.unflatten(1, (num_heads_k, -1)) if x.shape[1] == num_heads else x.unsqueeze(2)


def spread_entries(x: Tensor, batch: int, repeat: int) -> Tensor:
    """Return a mask or bias with an entry for each of the batch: entry b is entry b // repeat % Bx of x (Bx, ...)."""
    size = x.shape[0]
    if size in (1, batch):
        return x
    times = batch // max(size * repeat, 1)
    return x[None, :, None].expand(times, size, repeat, *x.shape[1:]).flatten(0, 2)


def sum_entries(x: Tensor, size: int, repeat: int) -> Tensor:
    """Sum x (B, ...) over repeated entries, so that size entries remain: the reverse of :func:`spread_entries`."""
    batch = x.shape[0]
    if size in (1, batch):
        return x
    return x.view(batch // max(size * repeat, 1), size, repeat, *x.shape[1:]).sum((0, 2))


def softmax_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype of the softmax for inputs like q: fp64 for fp64, otherwise fp32."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def default_scale(q: Tensor, softmax_scale: float | None) -> float:
    """Return softmax_scale, or head_dim ** -0.5 if it is None."""
    return q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
