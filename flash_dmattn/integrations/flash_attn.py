"""The functions of the package flash-attn, with its arguments and results, computed by `flash_dmattn.attention`.

For code that imports them from `flash_attn`, one line changes::

    from flash_dmattn.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func

Two things differ. Probabilities, the third result of `return_attn_probs=True`, are always None. Every device, dtype
and head dim of `attention` works. As in flash-attn, a row without a visible key has lse +inf; in `attention` -inf.

The functions of `flash_attn.bert_padding` are here, too. Arguments of FlashAttention-3 and -4 are accepted by name:
`learnable_sink`, and for packed sequences `seqused_q`, `seqused_k` and `page_table`. `num_splits`, `pack_gqa` and
`sm_margin`, which change only the speed of their kernels, have no effect. Other arguments are refused unless they have
their default.

All functions have these arguments:

- `dropout_p`, `softmax_scale` (None means D ** -0.5) and `softcap`, as in `attention`.
- `causal`: whether query i attends only to keys j <= i + Lk - Lq.
- `window_size`: (left, right), also as a tensor; -1 or None for an unlimited side.
- `alibi_slopes`: float32 (H,) or (B, H): adds -slope * |i + Lk - Lq - j| to the score of query i and key j. If later
  keys are hidden, it is a bias with one value per key; otherwise a float32 bias (1 or B, H, Lq, Lk).
- `deterministic`: True for gradients with equal bits in each run; False follows torch's global setting.
- `return_attn_probs`: return (out, lse, None) instead of out; lse is float32, or float64 for float64.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import Sequences, append_to_cache, attention
from ..definition import listed
from ..dispatch.config import similar
from ..masks.arguments import integer
from ..problem import check_device, check_number, check_tensor, check_window, dtype_name, values_can_be_read

__version__ = "2.8.3"  # the version of flash-attn with these functions
__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "index_first_axis",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
]

Result = Tensor | tuple[Tensor, Tensor, None]

# Arguments of FlashAttention-3 and -4 that are not supported: default, and advice for the message.
_REFUSED: dict[str, tuple[Any, str]] = {
    "attention_chunk": (0, "pass a mask to flash_dmattn.attention"),
    "mask_mod": (None, "flash_dmattn.attention takes masks.PreparedMask.from_mask_mod(mask_mod, ...)"),
    "score_mod": (None, "flash_dmattn.attention takes a bias"),
    "aux_tensors": (None, "flash_dmattn.attention takes a mask and a bias"),
    "block_sparse_tensors": (None, "flash_dmattn.attention takes masks.PreparedMask.from_blocks(...)"),
    "qv": (None, "append it to q, and its keys to k"),
    **dict.fromkeys(("q_descale", "k_descale", "v_descale"), (None, "scale q, k and v in 16 bits")),
}
_WITHOUT_EFFECT = ("num_splits", "pack_gqa", "sm_margin")
# Names of flash-attn that are not here, and what to use instead.
_ELSEWHERE = {
    **dict.fromkeys(
        ("apply_rotary_emb", "RotaryEmbedding"),
        "flash_dmattn.nn.positions has rotary_angles, and apply_rotary for q and k",
    ),
    "flash_attn_combine": "lse joins parts of the keys: docs/mathematics.md",
    "get_scheduler_metadata": "kernels here need no metadata",
}


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:  # not an AttributeError, because "from ... import" would replace its text
        raise ImportError(f"{name} of flash-attn is not in {__name__}: {_ELSEWHERE[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Batch(NamedTuple):
    """The sequences of a call, and their lengths for ALiBi; all None in a dense call."""

    sequences: Sequences | None = None
    seqlens_q: Tensor | None = None  # (S,); None if all queries are used
    seqlens_k: Tensor | None = None  # (S,)
    ends_q: Tensor | None = None  # (S,): the end of the queries of each sequence, if they are packed
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0


class _ForwardAlone(torch.autograd.Function):
    """Return out for keys in pages although inputs require grad, as flash-attn does, but refuse a backward pass."""

    @staticmethod
    def forward(needing: Tensor, out: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        raise RuntimeError("keys in pages have no gradients; call without block_table to train")


class _Options(NamedTuple):
    """The arguments that all functions have."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: Any  # a pair, or a tensor of two
    softcap: float
    alibi_slopes: Tensor | None
    deterministic: bool
    return_lse: bool
    sink: Tensor | None = None


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    **newer: Any,
) -> Result:
    """Compute attention as `flash_attn.flash_attn_func` does.

    Args:
        q: (B, Lq, Hq, D).
        k, v: (B, Lk, Hk, D) with Hq % Hk == 0.
        learnable_sink: (Hq,), the `sink` of `attention`.
        others: see the docstring of the module.

    Returns:
        out (B, Lq, Hq, D); with `return_attn_probs` (out, lse, None), lse (B, Hq, Lq).

    Raises:
        TypeError, ValueError: as `attention`, or `alibi_slopes` has another shape, dtype or device.
        NotImplementedError: probabilities under dropout are requested.

    >>> import torch
    >>> from flash_dmattn.integrations.flash_attn import flash_attn_func
    >>> q, k, v = torch.randn(3, 2, 8, 4, 16)
    >>> out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    >>> tuple(out.shape), tuple(lse.shape)
    ((2, 8, 4, 16), (2, 4, 8))
    """
    _check_newer(flash_attn_func, newer)
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    return _attend(q, k, v, options._replace(sink=learnable_sink), _Batch())


def flash_attn_qkvpacked_func(qkv: Tensor, *arguments: Any, **named: Any) -> Result:
    """Compute attention as `flash_attn.flash_attn_qkvpacked_func` does: qkv is (B, L, 3, H, D).

    See `flash_attn_func` for the other arguments, returns and errors.

    >>> import torch
    >>> from flash_dmattn.integrations.flash_attn import flash_attn_qkvpacked_func
    >>> tuple(flash_attn_qkvpacked_func(torch.randn(2, 8, 3, 4, 16), causal=True).shape)
    (2, 8, 4, 16)
    """
    _check_named(flash_attn_qkvpacked_func, flash_attn_func, named, 3)
    q, k, v = _split("qkv", qkv, 3)
    return flash_attn_func(q, k, v, *arguments, **named)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *arguments: Any, **named: Any) -> Result:
    """Compute attention as `flash_attn.flash_attn_kvpacked_func` does: kv is (B, Lk, 2, Hk, D).

    See `flash_attn_func` for the other arguments, returns and errors.
    """
    _check_named(flash_attn_kvpacked_func, flash_attn_func, named, 3)
    k, v = _split("kv", kv, 2)
    return flash_attn_func(q, k, v, *arguments, **named)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    **newer: Any,
) -> Result:
    """Compute attention of packed sequences as `flash_attn.flash_attn_varlen_func` does.

    Args:
        q: (Tq, Hq, D).
        k, v: (Tk, Hk, D); with `block_table` (pages, page_size, Hk, D), without gradients.
        cu_seqlens_q, cu_seqlens_k: (S + 1,), int32: the first token of each sequence, then the number of all tokens.
        max_seqlen_q, max_seqlen_k: bounds on the lengths. A tensor with one element is converted to an int, which waits
            for the device.
        block_table, page_table: (S, P), int32: the pages of each sequence; two names for one argument.
        seqused_q, seqused_k: (S,), int32: the number of used tokens of each sequence. With `block_table` and
            `seqused_k`, `cu_seqlens_k` may be None.
        learnable_sink: (Hq,), the `sink` of `attention`.
        others: see the docstring of the module.

    Returns:
        out (Tq, Hq, D); with `return_attn_probs` (out, lse, None), lse (Hq, Tq).

    Raises:
        TypeError, ValueError: as `attention` and `Sequences`, or `alibi_slopes` has another shape, dtype or device.
        NotImplementedError: probabilities under dropout are requested.

    >>> import torch
    >>> from flash_dmattn.integrations.flash_attn import flash_attn_varlen_func
    >>> q, k, v = torch.randn(3, 8, 4, 16)
    >>> ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    >>> tuple(flash_attn_varlen_func(q, k, v, ends, ends, 5, 5, causal=True).shape)
    (8, 4, 16)
    """
    _check_newer(flash_attn_varlen_func, newer)
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    block_table = _one_table(block_table, page_table)
    for name, edges in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if edges is None and name == "cu_seqlens_k" and block_table is not None and seqused_k is not None:
            continue
        check_tensor(name, edges, "an int32 or int64 torch.Tensor")
        assert edges is not None
        if edges.dim() != 1:
            raise ValueError(f"{name} has shape {tuple(edges.shape)}; it needs 1 dimension")
    if alibi_slopes is not None and (seqused_q is not None or (seqused_k is not None and block_table is None)):
        raise NotImplementedError("alibi_slopes are set with seqused_q or seqused_k; pack the used tokens alone")
    most = {"max_seqlen_q": _bound(max_seqlen_q), "max_seqlen_k": _bound(max_seqlen_k)}
    seqlens_k = seqused_k if cu_seqlens_k is None else cu_seqlens_k.diff()
    if block_table is None:
        sequences = Sequences.packed(cu_seqlens_q, cu_seqlens_k, **most, seqlens_q=seqused_q, seqlens_k=seqused_k)
    elif seqused_q is not None:
        raise NotImplementedError("seqused_q is set with pages; it needs to be None: pack the used queries alone")
    else:
        seqlens_k = seqlens_k if seqused_k is None else seqused_k
        assert seqlens_k is not None
        sequences = Sequences.paged(block_table, seqlens_k, cu_seqlens_q=cu_seqlens_q, **most)
    numbers = (most["max_seqlen_q"], most["max_seqlen_k"])
    batch = _Batch(sequences, cu_seqlens_q.diff(), seqlens_k, cu_seqlens_q[1:], *numbers)
    return _attend(q, k, v, options._replace(sink=learnable_sink), batch)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | Tensor | None, *arguments: Any, **named: Any
) -> Result:
    """Compute attention as `flash_attn.flash_attn_varlen_qkvpacked_func` does: qkv is (T, 3, H, D).

    See `flash_attn_varlen_func` for the other arguments, returns and errors.
    """
    _check_named(flash_attn_varlen_qkvpacked_func, flash_attn_varlen_func, named, 7)
    q, k, v = _split("qkv", qkv, 3)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *arguments, **named)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    *arguments: Any,
    **named: Any,
) -> Result:
    """Compute attention as `flash_attn.flash_attn_varlen_kvpacked_func` does: kv is (Tk, 2, Hk, D).

    See `flash_attn_varlen_func` for the other arguments, returns and errors.
    """
    _check_named(flash_attn_varlen_kvpacked_func, flash_attn_varlen_func, named, 7)
    k, v = _split("kv", kv, 2)
    ends = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return flash_attn_varlen_func(q, k, v, *ends, *arguments, **named)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    **newer: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Write new keys and values into a cache, and attend to it, as `flash_attn.flash_attn_with_kvcache` does.

    Args:
        q: (B, Lq, Hq, D).
        k_cache, v_cache: (B, Lc, Hk, D); with `block_table` (pages, page_size, Hk, D). k and v are written into them.
        k, v: (B, L, Hk, D): new keys and values, to append to the cache; L is Lq for causal calls.
        cache_seqlens: (B,), int32, or one int: the number of keys in each cache before the call; None means all Lc.
        block_table, page_table: (B, P), int32: the pages of each cache; two names for one argument.
        learnable_sink: (Hq,), the `sink` of `attention`.
        num_splits: has no effect; kernels split keys by the sizes of the call.
        rotary_cos, rotary_sin, rotary_interleaved, cache_batch_idx, cache_leftpad: refused.
        others: see the docstring of the module.

    Returns:
        out (B, Lq, Hq, D); with `return_softmax_lse` (out, lse), lse (B, Hq, Lq). There are no gradients.

    Raises:
        TypeError, ValueError: as `attention`, `append_to_cache` and `Sequences`; only one of k and v is passed; new
            keys or a `block_table` are passed without `cache_seqlens`.
        NotImplementedError: a refused argument is passed.

    >>> import torch
    >>> from flash_dmattn.integrations.flash_attn import flash_attn_with_kvcache
    >>> k_cache, v_cache = torch.zeros(2, 2, 64, 4, 16)
    >>> q, k, v = torch.randn(3, 2, 1, 4, 16)  # one new token
    >>> used = torch.tensor([20, 7], dtype=torch.int32)
    >>> tuple(flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=used, causal=True).shape)
    (2, 1, 4, 16)
    >>> bool(k_cache[0, 20].equal(k[0, 0]))
    True
    """
    queries = newer.pop("cu_seqlens_q", None)
    _check_newer(flash_attn_with_kvcache, newer)
    block_table = _one_table(block_table, page_table)
    refused = {
        "cu_seqlens_q": (queries, "call flash_attn_varlen_func with block_table and seqused_k"),
        "rotary_cos": (rotary_cos, "rotate q and k before the call"),
        "rotary_sin": (rotary_sin, "rotate q and k before the call"),
        "cache_batch_idx": (cache_batch_idx, "pass the entries of the cache in the order of q, or a block_table"),
        "cache_leftpad": (cache_leftpad, "pass a mask to flash_dmattn.attention"),
    }
    for name, (value, instead) in refused.items():
        if value is not None:
            raise NotImplementedError(f"{name} is set; it needs to be None here: {instead}")
    if (k is None) != (v is None):
        raise ValueError("one of k and v is None; both need to be tensors, or None")
    if cache_seqlens is None and (k is not None or block_table is not None):
        raise ValueError(
            "cache_seqlens is None; new keys and pages need it: the number of keys in each cache before the call"
        )
    tensors: dict[str, Any] = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    for name, x in (tensors if k is None else tensors | {"k": k, "v": v}).items():
        check_tensor(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it needs 4 dimensions")
    options = _Options(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, False, return_softmax_lse)
    options, batch = options._replace(sink=learnable_sink), _Batch()
    with torch.no_grad():
        if cache_seqlens is not None:
            if isinstance(cache_seqlens, int):
                if not 0 <= integer("cache_seqlens", cache_seqlens) < 2**31:
                    raise ValueError(f"cache_seqlens is {cache_seqlens}; it needs to be a number of keys in the cache")
                cache_seqlens = torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
            check_tensor("cache_seqlens", cache_seqlens)
            if cache_seqlens.dtype not in (torch.int32, torch.int64) or cache_seqlens.shape != q.shape[:1]:
                shape, dtype = tuple(cache_seqlens.shape), dtype_name(cache_seqlens.dtype)
                raise ValueError(
                    f"cache_seqlens has shape {shape} and dtype {dtype}; it needs int32 or int64 ({q.shape[0]},)"
                )
            new = 0 if k is None else k.shape[1]
            seqlens_k, slots = cache_seqlens + new, k_cache.shape[1]
            if block_table is not None:
                check_tensor("block_table", block_table)
                slots = slots * block_table.shape[-1]
            if values_can_be_read(cache_seqlens):
                for entry, number in enumerate(listed(cache_seqlens)):
                    if not 0 <= number <= slots - new:
                        raise ValueError(
                            f"cache_seqlens is {number} for entry {entry}, and k has {new} new keys; the cache has "
                            f"room for {slots}"
                        )
            if block_table is None:
                sequences = Sequences.padded(seqlens_k=seqlens_k)
            else:
                sequences = Sequences.paged(block_table, seqlens_k)
            if k is not None and v is not None:
                # seqlens_k includes the new keys, as `append_to_cache` needs.
                append_to_cache(k_cache, v_cache, k, v, sequences)
            batch = _Batch(sequences, None, seqlens_k, None, q.shape[1], slots)
        result = _attend(q, k_cache, v_cache, options, batch)
    return result[:2] if return_softmax_lse else result


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Take rows of the first dim, as `flash_attn.bert_padding.index_first_axis` does."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Put rows into zeros (first_axis_dim, ...), as `flash_attn.bert_padding.index_put_first_axis` does."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Remove the padding of (B, L, ...), as `flash_attn.bert_padding.unpad_input` does; it waits for the device.

    Args:
        hidden_states: (B, L, ...).
        attention_mask: (B, L), bool or 0/1: which tokens are real.
        unused_mask: (B, L): tokens that are kept, but not counted as used.

    Returns:
        The tokens (T, ...), their indices in the flattened batch, cu_seqlens (B + 1,) in int32, the longest length as
        an int, and the number of used tokens of each entry, (B,) in int32.

    >>> import torch
    >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    >>> tokens, indices, cu_seqlens, most, _ = unpad_input(torch.arange(6).view(2, 3), mask)
    >>> tokens.tolist(), indices.tolist(), cu_seqlens.tolist(), most
    ([0, 1, 3], [0, 1, 3], [0, 2, 3], 2)
    """
    check_tensor("hidden_states", hidden_states)
    check_tensor("attention_mask", attention_mask)
    if attention_mask.dim() != 2 or hidden_states.shape[:2] != attention_mask.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; it needs (batch, seqlen), the first dims of "
            f"hidden_states, {tuple(hidden_states.shape)}"
        )
    used = attention_mask != 0
    kept = used if unused_mask is None else used | (unused_mask != 0)
    seqlens = kept.sum(1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = F.pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(seqlens.max()) if seqlens.numel() else 0
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, cu_seqlens, longest, used.sum(1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put tokens (T, ...) back into (B, L, ...) with zeros, as `flash_attn.bert_padding.pad_input` does."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _bound(most: Any) -> Any:
    """Return a bound on lengths; convert a tensor of one integer, such as `cu_seqlens.diff().max()`, to an int."""
    if isinstance(most, Tensor) and most.numel() == 1 and not (most.is_floating_point() or most.dtype == torch.bool):
        return int(most)
    return most


def _one_table(block_table: Tensor | None, page_table: Tensor | None) -> Tensor | None:
    if block_table is not None and page_table is not None:
        raise ValueError("block_table and page_table are set; one of them needs to be None")
    return page_table if block_table is None else block_table


def _check_newer(call: Callable[..., Any], newer: dict[str, Any]) -> None:
    """Refuse unknown arguments, and arguments of FlashAttention-3 and -4 that would change the result."""
    for name, value in newer.items():
        if name in _WITHOUT_EFFECT:
            continue
        if name not in _REFUSED:
            _refuse_name(call, call, name)
        default, instead = _REFUSED[name]
        if value is not default and not (default == 0 and value == 0):
            raise NotImplementedError(f"{name} is set; it needs to be {default} here: {instead}")


def _check_named(call: Callable[..., Any], inner: Callable[..., Any], named: dict[str, Any], first: int) -> None:
    """Refuse keyword arguments that a packed function does not have: the first ones of `inner`, and unknown ones."""
    known = tuple(inspect.signature(inner).parameters)
    for name in named:
        if name in known[:first] or (name not in known and name not in _WITHOUT_EFFECT and name not in _REFUSED):
            _refuse_name(call, inner, name, first)


def _refuse_name(call: Callable[..., Any], inner: Callable[..., Any], name: str, first: int = 0) -> NoReturn:
    parameters = [x for x in inspect.signature(call).parameters if x not in ("arguments", "named", "newer")]
    names = dict.fromkeys(
        [*parameters, *(x for x in tuple(inspect.signature(inner).parameters)[first:] if x != "newer")]
    )
    meant = similar(name, names)
    hint = f"it takes {', '.join(names)}" if meant is None else f"did you mean {meant!r}?"
    if name in ("mask", "bias", "attn_mask", "attn_bias", "attention_mask"):
        hint = "flash_dmattn.attention takes a mask and a bias"
    raise TypeError(f"{call.__name__}() got an unexpected keyword argument {name!r}; {hint}")


def _split(name: str, packed: Tensor, number: int) -> tuple[Tensor, ...]:
    check_tensor(name, packed)
    if packed.dim() < 4 or packed.shape[-3] != number:
        raise ValueError(f"{name} has shape {tuple(packed.shape)}; it needs {number} tensors in its third to last dim")
    return packed.unbind(-3)


def _attend(q: Tensor, k: Tensor, v: Tensor, options: _Options, batch: _Batch) -> Any:
    if isinstance(options.window_size, Tensor):  # flash-attn allows it, and its tests pass one
        options = options._replace(window_size=tuple(listed(options.window_size.flatten())))
    if isinstance(options.window_size, (tuple, list)):
        options = options._replace(window_size=tuple(-1 if side is None else side for side in options.window_size))
    options = options._replace(window_size=check_window(options.window_size))
    if options.return_lse and check_number("dropout_p", options.dropout_p) > 0:
        raise NotImplementedError("return_attn_probs is True with dropout_p; dropped probabilities are never stored")
    is_paged = batch.sequences is not None and batch.sequences.block_table is not None
    # If one of them requires grad, autograd requests a gradient. `attention` refuses arguments that are no tensors.
    needing = [x for x in (q, k, v) if isinstance(x, Tensor) and x.requires_grad]
    if is_paged and torch.is_grad_enabled() and needing:
        with torch.no_grad():
            results = _attend(q, k, v, options, batch)
        return (
            _ForwardAlone.apply(needing[0], results)
            if isinstance(results, Tensor)
            else (_ForwardAlone.apply(needing[0], results[0]), *results[1:])
        )
    bias = shift = None
    if options.alibi_slopes is not None:
        bias, shift = _alibi(options.alibi_slopes, q, k, options, batch)
    results = attention(
        q,
        k,
        v,
        None,
        bias,
        is_causal=options.causal,
        softmax_scale=options.softmax_scale,
        softcap=options.softcap,
        window_size=None if options.window_size == (-1, -1) else options.window_size,
        deterministic=options.deterministic or None,
        return_lse=options.return_lse,
        sequences=batch.sequences,
        dropout_p=options.dropout_p,
        sink=options.sink,
    )
    if isinstance(results, Tensor):
        return results
    out, lse = results
    lse = lse if shift is None else lse - shift
    return out, lse.masked_fill(lse == -torch.inf, torch.inf), None


def _alibi(slopes: Tensor, q: Tensor, k: Tensor, options: _Options, batch: _Batch) -> tuple[Tensor, Tensor | None]:
    """Return the bias of ALiBi, and the amount by which it raises lse, in the shape of lse, or None for 0.

    If later keys are hidden, -slope * (i - j) is slope * j minus a constant of the row. The constant does not change
    the softmax, so a bias with one value per key is enough, but it changes lse.
    """
    check_tensor("alibi_slopes", slopes)
    for name, x in (("q", q), ("k", k)):
        check_tensor(name, x)
        if x.dim() < 3:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it needs 4 dimensions, or 3 of packed sequences")
    check_device("alibi_slopes", slopes.device, q.device)
    num_heads, entries = q.shape[-2], q.shape[0] if batch.seqlens_k is None else batch.seqlens_k.shape[0]
    if slopes.dtype != torch.float32 or tuple(slopes.shape) not in ((num_heads,), (entries, num_heads)):
        needs = f"({num_heads},) or ({entries}, {num_heads})"
        raise ValueError(
            f"alibi_slopes has dtype {slopes.dtype} and shape {tuple(slopes.shape)}; it needs float32, and {needs}"
        )
    slopes = slopes.reshape(-1, num_heads)
    if batch.seqlens_k is None:
        seqlen_q, seqlen_k = q.shape[1], k.shape[1]
        offset: int | Tensor = seqlen_k - seqlen_q
    else:
        seqlen_q = integer("max_seqlen_q", batch.max_seqlen_q)
        seqlen_k = integer("max_seqlen_k", batch.max_seqlen_k)
        offset = (batch.seqlens_k - (seqlen_q if batch.seqlens_q is None else batch.seqlens_q))[:, None]
    keys = torch.arange(seqlen_k, device=q.device, dtype=torch.float32)
    place = torch.arange(seqlen_q, device=q.device)[None] + offset  # the key aligned with each query: (1 or S, Lq)
    if not options.causal and options.window_size[1] != 0:
        return -slopes[:, :, None, None] * (place[:, None, :, None] - keys).abs(), None
    last = seqlen_k - 1  # subtracted, so that the bias of keys near the last queries is small
    bias = slopes[:, :, None, None] * (keys - last)
    if not options.return_lse:
        return bias, None
    if batch.ends_q is None or batch.seqlens_k is None:
        return bias, slopes[:, :, None] * (place - last)[:, None]
    if entries == 0:
        return bias, None  # no token is in a sequence, and lse is -inf everywhere
    tokens = torch.arange(q.shape[0], device=q.device)
    owner = torch.searchsorted(batch.ends_q, tokens, right=True).clamp(max=entries - 1)  # its sequence
    place = tokens - batch.ends_q[owner] + batch.seqlens_k[owner]
    return bias, slopes.expand(entries, num_heads)[owner].t() * (place - last)
