"""Which calls of F.scaled_dot_product_attention are served, and how one becomes a call of `flash_dmattn.attention`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ... import attention
from ...problem import FLOAT_DTYPES
from ...validation import AUTOCAST_DEVICES

NO_MASK = "no mask"


def reason_to_pass_on(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool, enable_gqa: bool
) -> str | None:
    """Why a call is torch's; None where it is ours. Arguments as of F.scaled_dot_product_attention.

    What torch itself would refuse is passed on too: its own message says what is wrong.
    """
    if attn_mask is None:
        return NO_MASK
    tensors = (query, key, value, attn_mask)
    if not all(map(_is_plain, tensors)):
        return "a tensor subclass"
    dtypes = {_autocast_dtype(x) for x in (query, key, value)}
    if len(dtypes) > 1 or dtypes.isdisjoint(FLOAT_DTYPES):
        return "dtypes of q, k and v"
    if attn_mask.dtype != torch.bool and attn_mask.dtype not in FLOAT_DTYPES:
        return "dtype of the mask"
    if any(x.device != query.device for x in tensors):
        return "devices"
    if not _shapes_fit(query, key, value, enable_gqa):
        return "shapes of q, k and v"
    if is_causal and query.shape[-2] != key.shape[-2]:
        return "is_causal, unequal lengths"  # aligned at the first key there, at the last key here
    if not _mask_fits(attn_mask, (*_batch(query, key, value), query.shape[-3], query.shape[-2], key.shape[-2])):
        return "shape of the mask"
    return None


def serve(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """A call that `reason_to_pass_on` has no reason against: q, k and v as transposed views, nothing copied."""
    batch = _batch(query, key, value) or (1,)  # (heads, L, D) has none
    q, k, v = (x.expand(*batch, *x.shape[-3:]).transpose(-3, -2) for x in (query, key, value))
    attn_mask = torch.atleast_2d(attn_mask)
    is_bool = attn_mask.dtype == torch.bool
    if not is_bool:
        attn_mask = attn_mask.to(_autocast_dtype(attn_mask))
    out = attention(
        q,
        k,
        v,
        attn_mask if is_bool else None,
        None if is_bool else attn_mask,
        is_causal=is_causal,
        softmax_scale=scale,
        dropout_p=dropout_p,
    )
    assert isinstance(out, Tensor)
    out = out.transpose(-3, -2)
    return out if query.dim() > 3 or len(batch) > 1 else out.squeeze(0)


def _autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype that autocast gives a tensor: `attention` casts q, k and v, torch's own the mask as well."""
    kind = x.device.type
    if not x.is_floating_point() or x.dtype == torch.float64 or kind not in AUTOCAST_DEVICES:
        return x.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _is_plain(x: Tensor) -> bool:
    """Whether operators of this library see the tensor itself, as they do not of a nested or a distributed one."""
    if type(x) is not Tensor and type(x) is not torch.nn.Parameter:  # Dynamo before 2.12 cannot compare functions
        if type(x).__torch_function__ not in (Tensor.__torch_function__, torch._C._disabled_torch_function_impl):
            return False
    return not x.is_nested and not is_traceable_wrapper_subclass(x)


def _batch(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """The batch dims of the result: torch lets those of q, k and v broadcast."""
    if q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
        return tuple(q.shape[:-3])
    return tuple(torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3]))


def _shapes_fit(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> bool:
    if min(q.dim(), k.dim(), v.dim()) < 3 or not q.dim() == k.dim() == v.dim():
        return False
    if q.shape[-1] != k.shape[-1] or k.shape[-3:-1] != v.shape[-3:-1] or 0 in (q.shape[-1], v.shape[-1]):
        return False
    for sizes in zip(q.shape[:-3], k.shape[:-3], v.shape[:-3]):
        if len(set(sizes) - {1}) > 1:
            return False
    heads, heads_k = q.shape[-3], k.shape[-3]
    return heads == heads_k > 0 or heads_k == 1 or (enable_gqa and heads_k > 0 and heads % heads_k == 0)


def _mask_fits(mask: Tensor, scores: tuple[int, ...]) -> bool:
    """Whether the mask broadcasts to the scores; one with more dims would make the result larger."""
    if mask.dim() > len(scores):
        return False
    return all(size in (1, whole) for size, whole in zip(reversed(mask.shape), reversed(scores)))
