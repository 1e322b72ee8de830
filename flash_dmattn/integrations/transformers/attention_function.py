"""The attention function of "dmattn": what a layer of transformers passes, as one call of `flash_dmattn.attention`."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped
from torch.utils.weak import WeakTensorKeyDictionary

from ... import attention
from ...call import Numbers, prepare_call, run_call
from ...distributed.group import context_in_force
from ...validation import follow_autocast
from .arguments import refuse_unknown
from .layer_mask import LayerMask, MaskArguments
from .over_ranks import attend_over_ranks
from .packed import PACKED, take_packed

Observer = Callable[[nn.Module, dict[str, Any]], None]
_observers: list[Observer] = []


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | LayerMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    deterministic: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What every layer of a model calls.

    Args:
        module: the layer, whose `is_causal` counts where there is no mask.
        query: (B, Hq, Lq, D); key (B, Hk, Lk, D); value (B, Hk, Lk, Dv), not repeated.
        attention_mask: what `make_mask` returned, a bool tensor, or a float tensor that is added to the scores, both
            4-D and broadcastable to (B, Hq, Lq, Lk).
        dropout, scaling, softcap, is_causal: as in `attention`; layers pass a dropout above 0 in training alone.
        position_bias: (B or 1, Hq, Lq, Lk), added to the scores, with its gradient.
        s_aux: (Hq,), an attention sink, with its gradient.
        sliding_window: what the mask says in other words; refused where it would forbid keys and the mask does not.
        deterministic: True as in `attention`; False, which models pass by default, follows torch as None does.
        others: `cu_seq_lens_q` and what belongs to it; the rest is of no effect, or refused.

    Returns:
        (B, Lq, Hq, Dv), and None in the place of probabilities.

    Raises:
        NotImplementedError: an argument that would change the result and is not passed on.
        TypeError, ValueError: as `attention`, and of masks that do not go with packed sequences.
    """
    sequences, context = None, context_in_force()
    if others:
        sequences = take_packed(others, query.shape[0])
        refuse_unknown(module, others)
    bias = None if position_bias is None or _is_empty_bias(module, position_bias) else position_bias
    dense = None
    if isinstance(attention_mask, Tensor):
        if attention_mask.dim() != 4:
            _refuse_rank(attention_mask)
        if attention_mask.is_floating_point():  # a mask of numbers is added
            bias = attention_mask if bias is None else bias + attention_mask
        elif attention_mask.dtype == torch.bool:
            dense = attention_mask
        else:
            _refuse_dtype(attention_mask)
    elif attention_mask is not None:
        _check_lengths(attention_mask, query, key)
    if sequences is not None:
        found = _of_packed(sequences, attention_mask, bias, _is_causal(module, is_causal))
    elif isinstance(attention_mask, LayerMask):
        found = attention_mask.arguments(bias is not None)
    elif isinstance(attention_mask, Tensor):
        found = MaskArguments(dense)
    else:
        found = MaskArguments(is_causal=_is_causal(module, is_causal) and (query.shape[2] > 1 or context is not None))
        if found.is_causal and query.shape[2] != key.shape[2]:
            key, value, bias = _align_top_left(query, key, value, bias)
    if sliding_window is not None and not isinstance(attention_mask, Tensor):
        _refuse_forgotten_window(sliding_window, attention_mask, found, key.shape[2])
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(query.device.type):
        query, key, value = follow_autocast(query, key, value)
    if bias is not None:
        bias = in_dtype(bias, query.dtype)
    call: dict[str, Any] | None = None
    if _observers:
        call = _call(query, key, value, found, bias, scaling, softcap, s_aux, dropout, deterministic)
        show_observers(module, call)
    if context is None and found.sequences is None:
        mask, is_causal, window, _ = found
        sink = None if s_aux is None else s_aux.reshape(-1)
        numbers = Numbers(is_causal, scaling, softcap or 0.0, window, deterministic or None, dropout_p=dropout)
        layer = prepare_call(query, key, value, mask, bias, sink, None, numbers, heads_first=True)
        return run_call(layer, "auto")[0].contiguous(), None
    if call is None:
        call = _call(query, key, value, found, bias, scaling, softcap, s_aux, dropout, deterministic)
    if context is None:
        out = attention(**call)
    else:
        out = attend_over_ranks(context, call, attention_mask, is_packed=sequences is not None)
    assert isinstance(out, Tensor)
    return (out.unsqueeze(0) if call["q"].dim() == 3 else out).contiguous(), None


# The arguments that a call is made of.
USED = {*inspect.signature(attend).parameters, *PACKED} - {"others"}


def attend_without(names: frozenset[str]) -> Callable[..., tuple[Tensor, None]]:
    """`attend` for layers that pass arguments of these names, which are of no effect."""

    def attend_ignoring(*args: Any, **given: Any) -> tuple[Tensor, None]:
        return attend(*args, **{name: value for name, value in given.items() if name not in names})

    return attend_ignoring


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    found: MaskArguments,
    bias: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
    dropout: float,
    deterministic: bool | None,
) -> dict[str, Any]:
    """The arguments of `attention`."""
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if found.sequences is not None and found.sequences.layout == "packed":
        q, k, v = q.squeeze(0), k.squeeze(0), v.squeeze(0)
    call: dict[str, Any] = {"q": q, "k": k, "v": v, **found._asdict(), "softmax_scale": scaling, "bias": bias}
    call |= {"softcap": softcap or 0.0, "sink": None if s_aux is None else s_aux.reshape(-1), "dropout_p": dropout}
    return call | {"deterministic": deterministic or None}


def show_observers(module: nn.Module, call: dict[str, Any]) -> None:
    """Show a call of `attention`, which a module is about to make, to whoever observes."""
    for observer in _observers:
        observer(module, call)


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Show every call to `observer`, as the arguments of `attention`, before it is made."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def in_dtype(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias in the dtype of q and contiguous, converted once for all layers that share it.

    T5 hands one bias, whose last stride is not 1, to every layer of a stack. Dims that were expanded become size 1.
    """
    global _last
    last = None if torch.compiler.is_compiling() else _last
    if last is not None and last[0]() is bias and last[1] == (bias._version, dtype, torch.is_grad_enabled()):
        return last[2]
    if bias.dtype == dtype and bias.is_contiguous():
        return bias
    expanded = [dim for dim in range(bias.dim()) if bias.stride(dim) == 0 and bias.shape[dim] > 1]
    if expanded:  # what would be copied is small then
        for dim in expanded:
            bias = bias.narrow(dim, 0, 1)
        return bias.to(dtype).contiguous()
    # A leaf that needs a gradient would be kept alive by its own copy; a compiler finds equal expressions itself.
    if torch.compiler.is_compiling() or (bias.is_leaf and bias.requires_grad) or bias.is_inference():
        return bias.to(dtype).contiguous()
    key = (bias._version, dtype, torch.is_grad_enabled())
    kept = _copies.get(bias)
    if kept is None or kept[0] != key:
        kept = _copies[bias] = (key, bias.to(dtype).contiguous())
    _last = (weakref.ref(bias, _forget), *kept)
    return kept[1]


# The copy of a bias goes when the bias does.
_copies = WeakTensorKeyDictionary()
# That of the layer before, which is found in a tenth of the time.
_last: tuple[weakref.ref[Tensor], tuple[Any, ...], Tensor] | None = None


def _forget(gone: weakref.ref[Tensor]) -> None:
    global _last
    if _last is not None and _last[0] is gone:
        _last = None


def _check_lengths(mask: LayerMask, query: Tensor, key: Tensor) -> None:
    if isinstance(mask, LayerMask) and mask.shape[2:] != (query.shape[2], key.shape[2]):
        raise ValueError(
            f"attention_mask is for {mask.shape[2]} queries and {mask.shape[3]} keys; this layer has {query.shape[2]} "
            f"and {key.shape[2]}"
        )


def _refuse_rank(mask: Tensor) -> NoReturn:
    raise ValueError(
        f"attention_mask has shape {tuple(mask.shape)}; a layer needs 4 dims, (batch, heads or 1, queries, keys)"
    )


def _refuse_dtype(mask: Tensor) -> NoReturn:
    name = str(mask.dtype).removeprefix("torch.")
    raise TypeError(f"attention_mask has dtype {name}; with 4 dims it needs to be bool, or float to be added")


def _is_causal(module: nn.Module, is_causal: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _is_empty_bias(module: nn.Module, bias: Tensor) -> bool:
    """Whether the bias is the zeros (1, H, Lq, Lk) that T5 and its kin make for cross attention.

    Attributes say where they may be, and the values whether they are: once for all layers that share the tensor, since
    reading waits for the device. A bias stays one where it has a gradient, and where it cannot be read or watched.
    """
    no_table = getattr(module, "has_relative_attention_bias", None) is False
    if not no_table or not getattr(module, "is_decoder", False) or getattr(module, "is_causal", True):
        return False
    if torch.compiler.is_compiling() or bias.requires_grad or bias.is_inference() or type(bias) is not Tensor:
        return False
    if bias.is_meta or is_wrapped(bias) or (bias.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    known = _zeros.get(bias)
    if known is None or known[0] != bias._version:
        known = _zeros[bias] = bias._version, not bool(bias.any())
    return known[1]


# By bias: its version, and whether it is zeros.
_zeros: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _refuse_forgotten_window(
    sliding_window: int | tuple[int, int], mask: LayerMask | None, found: MaskArguments, seqlen_k: int
) -> None:
    """Refuse a window that the layer is told of, that forbids keys, and that its mask does not have."""
    if mask is not None and mask.window is not None:
        return
    sequences = found.sequences
    longest = seqlen_k if sequences is None or sequences.max_seqlen_k is None else sequences.max_seqlen_k
    width = sliding_window if isinstance(sliding_window, int) else max(sliding_window)
    if 0 < width < longest - (not found.is_causal):  # to both sides models count the query's own key, or do not
        raise NotImplementedError(
            f"sliding_window is {sliding_window} and attention_mask, {mask}, has no window: of {longest} keys it would "
            "forbid some; use a mask of transformers' create_sliding_window_causal_mask, or sliding_window=None"
        )


def _of_packed(sequences: Any, mask: Tensor | LayerMask | None, bias: Tensor | None, is_causal: bool) -> MaskArguments:
    """The arguments of a call whose sequences the caller describes; of a mask causality, window and padding count."""
    unfit = None
    if isinstance(mask, Tensor):
        unfit = f"attention_mask is a tensor of shape {tuple(mask.shape)}"
    elif mask is not None and mask.used is not None:
        unfit = "the keys are those of a static cache"
    elif bias is not None:
        unfit = f"there is a bias of shape {tuple(bias.shape)}, by positions of the whole row"
    if unfit is not None:
        raise ValueError(f"cu_seq_lens_q is given, and {unfit}, which does not go with it: leave out one of the two")
    if mask is None:
        return MaskArguments(None, is_causal, None, sequences)
    assert isinstance(mask, LayerMask)
    padding = None if mask.padding is None else mask.padding[0]  # (1, 1, Lk): beside packed keys, one value for each
    return MaskArguments(padding, mask.is_causal, mask.window, sequences)


def _align_top_left(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Without a mask transformers lets query i see keys up to i; keys that no query sees are left out."""
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    if seqlen_k < seqlen_q:
        raise ValueError(
            f"attention is causal without a mask, of {seqlen_q} queries and {seqlen_k} keys; it needs at least as many "
            "keys, or an attention_mask"
        )
    return key[:, :, :seqlen_q], value[:, :, :seqlen_q], None if bias is None else bias[..., :seqlen_q]
