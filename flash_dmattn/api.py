"""`attention`, the public call; its docstring is the specification."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NoReturn, TypedDict, overload

from torch import Tensor

from .biases import Bias, is_made
from .call import prepare_call, run_call
from .definition import dtensor_module, is_dtensor
from .dispatch.config import BackendChoice
from .problem import AnyAuxRequest, AuxOutput, RawFlags, make_output, read_request, refuse_keywords, replaced
from .projected import attend_made
from .sequences import Sequences

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .masks import PreparedMask


class Options(TypedDict, total=False):
    """Keywords of `attention` that do not change the type of its result, for the overloads below."""

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
    bias: Bias | None = None,
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
    bias: Bias | None = None,
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
    bias: Bias | None = None,
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
    bias: Bias | None = None,
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
    bias: Bias | None = None,
    *,
    return_aux: AnyAuxRequest,
    **options: Unpack[Options],
) -> tuple[Tensor, AuxOutput]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | PreparedMask | None = None,
    bias: Bias | None = None,
    *,
    return_aux: AnyAuxRequest | None,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, AuxOutput]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | PreparedMask | None = None,
    bias: Bias | None = None,
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
    bias: Bias | None = None,
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
    return_aux: AnyAuxRequest | None = None,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, ...] | tuple[Tensor, AuxOutput]:
    """Compute softmax attention with any boolean mask and any additive bias; both broadcast, and results are exact.

    Without softcap, window and empty rows it is, in PyTorch::

        G = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(G, 2), v.repeat_interleave(G, 2)
        s = softmax_scale * torch.einsum("bihd,bjhd->bhij", q, k) + bias
        p = s.masked_fill(~mask, -math.inf).softmax(-1)
        out = torch.einsum("bhij,bjhd->bihd", F.dropout(p, dropout_p), v)

    There may be any number of batch dims: q, k and v are `(*batch, L, H, D)`; mask and bias broadcast against
    `(*batch, Hq, Lq, Lk)` as in torch, and are not expanded in memory. Tensors whose batch dims do not fold into one
    are copied: see `explain`. Under `torch.vmap` the mapped dim is one more batch dim. Tensors may be DTensors,
    all on one mesh, sharded by batch, heads or sequence: see docs/dtensor.md.

    Sizes: B is the batch. Lq and Lk are the lengths of queries and keys. There are Hq query heads and Hk key-value
    heads with Hq % Hk == 0; query head h uses key-value head h // (Hq // Hk). D and Dv are head dims. B, Lq and Lk may
    be 0.

    Args:
        q: (B, Lq, Hq, D); float16, bfloat16, float32, or float64; any strides. Here and below, B stands for all batch
            dims.
        k: (B, Lk, Hk, D), dtype and device of q.
        v: (B, Lk, Hk, Dv), dtype and device of q.
        mask: bool, True where q attends: (B, Hq or Hk, Lq, Lk), each dimension 1 or full. Fewer dimensions, at least 2,
            are aligned from the right as in torch, so a 2-D mask is (Lq, Lk). For padding of (B, Lk) use
            `masks.padding_mask(padding)`. A dimension of stride 0 is never materialised. A mask has no gradient. It may
            be a prepared mask of `flash_dmattn.masks`, for any number of calls of its lengths. A prepared mask includes
            is_causal and window_size: leave them unset here, or pass the same limits. With `sequences` it must be
            prepared for these sequences, or by `from_tree`. A hidden key may be NaN. A hidden value may not be NaN or
            inf, because 0 * NaN is NaN, as in torch. With `sequences` keys past their lengths are never loaded: see
            docs/masks.md.
        bias: added to the scaled scores, without being scaled; -inf masks. Shapes are as for mask, any float dtype.
            Its gradient has its shape and dtype, is accumulated in fp32 and rounded once. Besides a tensor it may be:

            * a `biases.Relative` or `biases.Band`: values by the distance of query and key, as
              `biases.t5(weight)` makes them; the (Lq, Lk) tensor is never materialised. With positions it is made for
              a few entries of the batch at a time;
            * a `biases.ListBias`: values for the entries of a mask of lists;
            * a `biases.Projected`: products of queries or keys with a row for each distance. They are a part of the
              scores, inside of softmax_scale and softcap.
        is_causal: query i attends to keys j <= i + Lk - Lq (aligned bottom-right).
        softmax_scale: factor on q @ k^T; None means D ** -0.5. 0.0 is a valid value.
        softcap: if positive, scaled scores become softcap * tanh(scores / softcap), before the bias.
        window_size: (left, right): i + Lk - Lq - left <= j <= i + Lk - Lq + right; -1 is unlimited on that side.
        deterministic: True asks for forward and backward results that are equal bit by bit from run to run, or a
            refusal; None follows `torch.are_deterministic_algorithms_enabled()`.
        return_lse: also return lse, differentiable.
        return_probs: also return the probabilities (B, Hq, Lq, Lk), without dropout, for inspection; only
            backend="reference" has them.
        backend: "auto", a name ("cuda", "triton", "flex", "sdpa", "eager", "reference"), or a
            pair (forward, backward).
        sink: (Hq,), any float dtype, on the device of q: an attention sink, one more logit in every row of a head,
            without a value. It is not scaled and not capped; -inf means no sink. It only counts in the sum:
            lse = log(exp(sink) + sum of exp of the scores), out = sum of exp(score - lse) * v. Its gradient has its
            dtype, is accumulated in fp32 and rounded once.
        sequences: a `Sequences`, for a batch of sequences of different lengths. Each sequence attends to itself only,
            and its causality and windows are aligned to its own end. See below.
        dropout_p: the rate, from 0 to 1, at which probabilities are dropped. Kept ones are divided by 1 - dropout_p.
            lse is without dropout. Each call draws from torch's generator of the device of q, so `torch.manual_seed`
            repeats it. The same probabilities are dropped on every backend, in both passes and in every layout. There
            is no training mode here: pass 0.0 for evaluation.
        return_aux: a `flash_dmattn.AuxRequest(lse=, max_scores=, entropy=)`, or torch's `AuxRequest`: also return the
            requested statistics, as a `flash_dmattn.AuxOutput`. See docs/numbers.md.

    With `sequences` the layout decides the shapes, for S sequences with Tq and Tk tokens in all:

    | layout | q | k, v | lse |
    | --- | --- | --- | --- |
    | packed | (Tq, Hq, D) | (Tk, Hk, D or Dv) | (Hq, Tq) |
    | padded | (S, Lq, Hq, D) | (S, Lk, Hk, D or Dv) | (S, Hq, Lq) |
    | paged | (S, Lq, Hq, D), or packed | (pages, page_size, Hk, D or Dv) | as for q |

    * A mask or a bias is then by position, (S, H, max_seqlen_q, max_seqlen_k), with each dim 1 or full; H is 1, Hk or
      Hq. With packed queries it may be packed, too: (H, Tq, max_seqlen_k), whose rows are the rows of q; (H, Tq, 1); or
      with packed keys (H, 1, Tk).
    * Rows of no sequence have out 0, lse -inf and zero gradients.
    * No value of one sequence, not even NaN, affects another one; unused slots affect none.
    * q, k and v may also be nested tensors of the jagged layout, (S, j, H, D), without `sequences`; then out is nested,
      too, and lse is nested as (S, Hq, j).

    For example `sequences=Sequences.packed(torch.tensor([0, 3, 8]))` is for rows 0 to 2 and 3 to 7 of q, k and v.

    Returns:
        out (B, Lq, Hq, Dv) in the dtype of q; or, if more is requested, a tuple of out, lse and the probabilities, or
        with `return_aux` of out and an `AuxOutput`. lse (B, Hq, Lq) is the natural log of the sum of exp of the allowed
        scores and the sink, in fp32 (fp64 for fp64). A row without an allowed key has out 0, lse -inf (with a sink: the
        sink), and contributes to no gradient except the gradient of the sink.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices or values do not match, the backend is unknown, or `return_aux` is passed together
            with `return_lse` or `return_probs`.
        BackendUnsupportedError: the named backend refuses this call; the message gives every reason.
        BackendUnavailableError: the named backend does not work on this machine.
        NotImplementedError: on a second derivative through a named kernel backend, or the gradient of a tangent
            (`torch.func.jvp`) that a named one computed; backend="eager" has both. On `max_scores` or `entropy` of
            `return_aux` in forward mode; backend="reference" has them.

    Sources: the recurrence over key blocks is from Dao et al., FlashAttention (2022) and FlashAttention-2 (2023).
    docs/mathematics.md derives the gradients, with the gradient of the bias. Sinks are defined as in OpenAI, gpt-oss
    model card (2025), after Xiao et al., Efficient streaming language models with attention sinks (2023). Dropout uses
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
    raw_flags = RawFlags(
        is_causal, softmax_scale, softcap, window_size, deterministic, return_lse, return_probs, dropout_p
    )
    asked = None
    if return_aux is not None:
        asked = read_request(return_aux, return_lse, return_probs)
        raw_flags = replaced(raw_flags, return_lse=asked[0], max_scores=asked[1], entropy=asked[2])
    if type(q) is not Tensor and is_dtensor(q):
        options = {**raw_flags._asdict(), "backend": backend, "sink": sink, "sequences": sequences}
        results = dtensor_module().attention(q, k, v, mask, bias, **options)
        if asked is None:
            return results
        return (results[0], make_output(results, *asked)) if any(asked) else (results, make_output((), *asked))
    if is_made(bias):
        results = attend_made(q, k, v, mask, bias, sink, sequences, raw_flags, backend)
    else:
        results = run_call(prepare_call(q, k, v, mask, bias, sink, sequences, raw_flags), backend)
    if asked is not None:
        return results[0], make_output(results, *asked)
    if return_lse:
        return results
    return results[0] if not return_probs else (results[0], results[2])
