"""`attention`: the one public call; its docstring is the specification."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NoReturn, TypedDict, overload

from torch import Tensor
from torch.autograd import forward_ad

from . import exported as exported  # gives operators that stand alone their derivatives
from .autograd import Passes, attend
from .backends.protocol import has_forward_ad, is_composite
from .direct import attend_directly, is_ready, ready_for
from .dispatch.call_cache import look_up, remember
from .dispatch.config import BackendChoice
from .dispatch.mask_view import dense_mask, mask_view
from .dispatch.selection import choice_in_force, select
from .dtensors import above, is_dtensor
from .operators import extra_arguments
from .problem import SequenceSpec, SequenceView, as_scores, fold_call, refuse_keywords, unfold
from .reference.dropout import draw_key
from .sequences import Sequences
from .sequences.layout import lay_out
from .sequences.nested import Jagged, is_nested
from .validation import describe, follow_autocast, refuse_dtensors

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .masks import PreparedMask, SequenceTileMask, TreeMask


class Options(TypedDict, total=False):
    """Keywords of `attention` that do not decide what it returns, for the overloads below."""

    is_causal: bool
    softmax_scale: float | None
    softcap: float
    window_size: tuple[int, int] | None
    deterministic: bool | None
    backend: BackendChoice
    sink: Tensor | None
    sequences: Sequences | None
    dropout_p: float


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | PreparedMask | SequenceTileMask | TreeMask | None = None,
    bias: Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    return_probs: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | PreparedMask | SequenceTileMask | TreeMask | None = None,
    bias: Tensor | None = None,
    *,
    return_lse: Literal[True],
    return_probs: Literal[False] = False,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | PreparedMask | SequenceTileMask | TreeMask | None = None,
    bias: Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    return_probs: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | PreparedMask | SequenceTileMask | TreeMask | None = None,
    bias: Tensor | None = None,
    *,
    return_lse: Literal[True],
    return_probs: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | PreparedMask | SequenceTileMask | TreeMask | None = None,
    bias: Tensor | None = None,
    *,
    return_lse: bool = False,
    return_probs: bool = False,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, ...]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | PreparedMask | SequenceTileMask | TreeMask | None = None,
    bias: Tensor | None = None,
    *,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    window_size: tuple[int, int] | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    return_probs: bool = False,
    backend: BackendChoice = "auto",
    sink: Tensor | None = None,
    sequences: Sequences | None = None,
    dropout_p: float = 0.0,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, ...]:
    """Softmax attention with an arbitrary boolean mask and an additive bias, both broadcast, both exact.

    Without softcap, window and empty rows it is, in PyTorch::

        G = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(G, 2), v.repeat_interleave(G, 2)
        s = softmax_scale * torch.einsum("bihd,bjhd->bhij", q, k) + bias
        p = s.masked_fill(~mask, -math.inf).softmax(-1)
        out = torch.einsum("bhij,bjhd->bihd", F.dropout(p, dropout_p), v)

    Any number of batch dims may stand before (L, H, D): q, k and v (*batch, L, H, D), mask and bias broadcast against
    (*batch, Hq, Lq, Lk) as in torch. None is expanded; dims whose strides do not fold into one are copied, which
    `explain` tells. Under `torch.vmap` the mapped dim is one more of them. Tensors may be DTensors, all of them on one
    mesh, whose batch, heads or sequence are shared among ranks: see docs/dtensor.md.

    Sizes: B batch, Lq and Lk query and key lengths, Hq query heads and Hk key-value heads with Hq % Hk == 0 (query
    head h reads key-value head h // (Hq // Hk)), D and Dv head dims. B, Lq and Lk may be 0.

    Args:
        q: (B, Lq, Hq, D), or with more batch dims in the place of B, as all that follows; float16, bfloat16, float32,
            or float64. Any strides.
        k: (B, Lk, Hk, D), dtype and device of q.
        v: (B, Lk, Hk, Dv), dtype and device of q.
        mask: bool, True where q attends; each dimension 1 or full, (B, Hq or Hk, Lq, Lk); fewer dimensions, 2 at least,
            are read from the right as in torch: two are (Lq, Lk), and padding of (B, Lk), which may look the same, is
            `masks.padding_mask(padding)`. A dimension of stride 0 is never materialised. Takes no gradient. Or a
            prepared mask of `flash_dmattn.masks`, for any number of calls of its lengths: it brings is_causal and
            window_size, which here stay unset or limit no side in another way. Beside sequences, of these a `TreeMask`
            alone: which of its new tokens each query sees.
            A hidden key may hold anything, NaN included; a hidden value may not, since 0 * NaN is NaN, as in torch.
            `sequences` do not read what lies beyond their lengths: see docs/masks.md.
        bias: added to the scaled scores, itself unscaled; -inf masks. Shaped as mask, of its own shape; any float
            dtype. Its gradient has its shape and dtype, is accumulated in fp32 and rounded once.
        is_causal: query i attends keys j <= i + Lk - Lq (aligned bottom-right).
        softmax_scale: factor on q @ k^T; D ** -0.5 when None. 0.0 is a value.
        softcap: if positive, scaled scores become softcap * tanh(scores / softcap), before the bias.
        window_size: (left, right): i + Lk - Lq - left <= j <= i + Lk - Lq + right; -1 is unlimited on that side.
        deterministic: True asks for results equal bit by bit from run to run, forward and backward, or a refusal;
            None follows `torch.are_deterministic_algorithms_enabled()`.
        return_lse: also return lse, differentiable.
        return_probs: also return the probabilities (B, Hq, Lq, Lk), without dropout, for looking at; only
            backend="reference" has them.
        backend: "auto", a name ("cuda", "triton", "flex", "eager", "reference"), or a pair (forward, backward).
        sink: (Hq,), any float dtype, on the device of q: an attention sink, one more logit in every row of a head, with
            no value. Neither scaled nor capped; -inf is none. It takes part in the sum alone:
            lse = log(exp(sink) + sum of exp of the scores), out = sum of exp(score - lse) * v. Its gradient has its
            dtype, is accumulated in fp32 and rounded once.
        sequences: a `Sequences`, where the batch is sequences of many lengths. Each attends to itself alone, causality
            and windows aligned to its own end. See below.
        dropout_p: the probability, from 0 to 1, that a probability is dropped; those that are kept are divided by
            1 - dropout_p. lse is without dropout. Which are dropped is drawn anew in each call, from torch's generator
            of the device of q, so `torch.manual_seed` repeats it; it is the same on every backend and in both passes,
            whatever the layout. There is no training mode here: pass 0.0 where the model evaluates.

    With `sequences` the shapes are those of its layout, for S sequences with Tq and Tk tokens in all:

    | layout | q | k, v | lse |
    | --- | --- | --- | --- |
    | packed | (Tq, Hq, D) | (Tk, Hk, D or Dv) | (Hq, Tq) |
    | padded | (S, Lq, Hq, D) | (S, Lk, Hk, D or Dv) | (S, Hq, Lq) |
    | paged | (S, Lq, Hq, D), or packed | (pages, page_size, Hk, D or Dv) | as of q |

    A mask or a bias is then by position, (S, H, max_seqlen_q, max_seqlen_k), or, where queries are packed, packed:
    (H, Tq, max_seqlen_k), row by row as q; (H, Tq, 1); or beside packed keys (H, 1, Tk). H is 1, Hk or Hq, and each dim
    of the first 1 or full. Rows of no sequence have out 0, lse -inf and zero gradients. Nothing of one sequence, NaN
    included, reaches another, nor anything of unused slots. q, k and v may also be nested tensors of the jagged layout,
    (S, j, H, D), which bring their sequences; so is out then, and lse is (S, Hq, j).

    Returns:
        out (B, Lq, Hq, Dv) in the dtype of q; or a tuple of it with lse (B, Hq, Lq), the natural log of the sum of
        exp of the allowed scores and the sink, fp32 (fp64 for fp64), and the probabilities, as asked for. A row with
        nothing allowed has out 0, lse -inf, or its sink, and zero in every gradient but that of the sink.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices or values do not fit, or the backend is unknown.
        BackendUnsupportedError: the named backend refuses this call; the message gives every reason.
        BackendUnavailableError: the named backend does not work on this machine.
        NotImplementedError: on a second derivative through a kernel backend; backend="eager" has one.

    The recurrence over key blocks is Dao et al., FlashAttention (2022) and FlashAttention-2 (2023); the gradients,
    with that of the bias, are derived in docs/mathematics.md. Sinks are those of OpenAI, gpt-oss model card
    (2025), after Xiao et al., Efficient streaming language models with attention sinks (2023). Dropout is drawn by
    Philox4x32-7, Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011).

    >>> import torch, flash_dmattn
    >>> q = torch.randn(1, 5, 4, 16)
    >>> k, v = torch.randn(1, 7, 2, 16), torch.randn(1, 7, 2, 16)
    >>> bias = torch.zeros(1, 2, 1, 7, requires_grad=True)  # one learned value per key and key-value head
    >>> mask = torch.rand(7) > 0.3
    >>> out = flash_dmattn.attention(q, k, v, mask[None], bias, is_causal=True)
    >>> out.square().sum().backward()
    >>> out.shape, bias.grad.shape
    (torch.Size([1, 5, 4, 16]), torch.Size([1, 2, 1, 7]))
    """
    if unknown:
        refuse_keywords(attention, unknown)
    leading = repeats = None
    spec: SequenceSpec | None = None
    where: SequenceView | None = None
    jagged: Jagged | None = None
    if type(q) is not Tensor and is_dtensor(q):
        return above().attention(
            q,
            k,
            v,
            mask,
            bias,
            is_causal=is_causal,
            softmax_scale=softmax_scale,
            softcap=softcap,
            window_size=window_size,
            deterministic=deterministic,
            return_lse=return_lse,
            return_probs=return_probs,
            backend=backend,
            sink=sink,
            sequences=sequences,
            dropout_p=dropout_p,
        )
    if is_nested(q) and sequences is None:
        jagged = Jagged(q, k, v)
        q, k, v, sequences = jagged.q, jagged.k, jagged.v, jagged.sequences
    if sequences is not None:
        q, k, v, spec, where = lay_out(sequences, q, k, v, mask)
    elif isinstance(q, Tensor) and q.dim() > 4:
        q, k, v, mask, bias, leading, repeats, _ = fold_call(q, k, v, mask, bias)
    q, k, v = follow_autocast(q, k, v)
    numbers = (is_causal, softmax_scale, softcap, window_size, deterministic)
    flags = (*numbers, return_lse, return_probs, repeats, spec, dropout_p)
    key, found = look_up(q, k, v, mask, bias, flags, backend, sink)
    if found is None:
        if key is None:
            refuse_dtensors(q, k, v, mask, bias, sink)
        problem, mask, bias = describe(q, k, v, mask, bias, *flags, sink)
        forward, backward = selection = select(problem, backend)
        if key is not None:
            found = remember(key, problem, selection, backend)
    else:
        problem, forward, backward, _ = found
        mask = as_scores(mask) if isinstance(mask, Tensor) else mask
        bias = None if bias is None else as_scores(bias)
    dropout = draw_key(q.device) if problem.flags.dropout_p > 0 else None
    results: tuple[Tensor, ...]
    if forward_ad._current_level >= 0 and not has_forward_ad(forward):
        _refuse_tangents(forward.NAME, q, k, v, bias, sink)
    if is_composite(forward):
        results = forward.attention(problem, q, k, v, dense_mask(mask), bias, **extra_arguments(sink, where, dropout))
    else:
        view = mask_view(problem, mask, forward, backward, where)
        of_sequences = () if where is None else where.tensors
        if found is not None and is_ready(found):
            ready = ready_for(found, view, backend, len(of_sequences))
            results = attend_directly(ready, q, k, v, bias, sink, (*view.tensors, *of_sequences), dropout)
        else:
            requested = choice_in_force(backend)
            passes = Passes(problem, forward, backward, view.form, requested, len(of_sequences), dropout is not None)
            of_dropout = () if dropout is None else (dropout,)
            results = attend(passes, q, k, v, bias, sink, *view.tensors, *of_sequences, *of_dropout)
    if leading is not None:
        results = tuple(unfold(x, leading) for x in results)
    if spec is not None and spec.packs_queries:
        results = tuple(x.squeeze(0) for x in results)
        if jagged is not None:
            results = jagged.wrap(results)
    if return_lse:
        return results
    return results[0] if not return_probs else (results[0], results[2])


def _refuse_tangents(backend: str, *inputs: Tensor | None) -> None:
    # An operator without a forward-mode derivative, FlexAttention's too, drops the tangents: a derivative of zero.
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in inputs):
        raise NotImplementedError(
            f"backend {backend!r} has no forward-mode derivative of attention (torch.func.jvp, jacfwd); "
            'call attention(..., backend="reference"), which has one'
        )
