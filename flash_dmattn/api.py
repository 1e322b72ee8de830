"""`attention`: the one public call; its docstring is the specification."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NoReturn, TypedDict, overload

from torch import Tensor

from .call import Numbers, prepare_call, run_call
from .dispatch.config import BackendChoice
from .dtensors import above, is_dtensor
from .problem import refuse_keywords
from .sequences import Sequences

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .masks import PreparedMask


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
    mask: Tensor | PreparedMask | None = None,
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
    mask: Tensor | PreparedMask | None = None,
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
    mask: Tensor | PreparedMask | None = None,
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
    mask: Tensor | PreparedMask | None = None,
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
    mask: Tensor | PreparedMask | None = None,
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
    mask: Tensor | PreparedMask | None = None,
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
    numbers = Numbers(
        is_causal, softmax_scale, softcap, window_size, deterministic, return_lse, return_probs, dropout_p
    )
    if type(q) is not Tensor and is_dtensor(q):
        options = {**numbers._asdict(), "backend": backend, "sink": sink, "sequences": sequences}
        return above().attention(q, k, v, mask, bias, **options)
    results = run_call(prepare_call(q, k, v, mask, bias, sink, sequences, numbers), backend)
    if return_lse:
        return results
    return results[0] if not return_probs else (results[0], results[2])
