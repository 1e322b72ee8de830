"""The only validation of the input of a call, and its description as an `AttentionProblem`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from .definition import is_transformed
from .dtensors import is_dtensor
from .problem import (
    FLOAT_DTYPES,
    AttentionProblem,
    Flags,
    MaskForm,
    NeedsGrad,
    Packing,
    Repeats,
    SequenceSpec,
    Shape4,
    TensorSpec,
    as_scores,
    causal_window,
    check_broadcast,
    check_dropout,
    check_flag,
    check_scale,
    check_scores,
    check_sequence_tiles,
    check_softcap,
    check_strided,
    check_tree,
    check_window,
    device_arch,
    dtype_name,
    packing_of,
    spec_of,
    unpacked_spec,
)

if TYPE_CHECKING:
    from .masks import PreparedMask, SequenceTileMask, TreeMask


def follow_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in the dtype of autocast where it is on; fp64 and bias keep theirs, as in torch's own."""
    # On the path of every call: torch spells the device's name anew each time that it is asked for.
    kind = "" if not isinstance(q, Tensor) else "cuda" if q.is_cuda else q.device.type
    if kind not in AUTOCAST_DEVICES or not torch.is_autocast_enabled(kind):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)

    def cast(x: Tensor) -> Tensor:
        follows = isinstance(x, Tensor) and x.dtype != dtype and x.is_floating_point() and x.dtype != torch.float64
        return x.to(dtype) if follows else x  # what cannot follow is for the validation to name

    return cast(q), cast(k), cast(v)


# Asked for once: torch.is_autocast_enabled raises for a device type that has no autocast.
AUTOCAST_DEVICES = tuple(name for name in ("cpu", "cuda", "mps", "xpu", "hpu") if torch.amp.is_autocast_available(name))


def refuse_dtensors(*tensors: object) -> None:
    """Refuse q, k, v, mask, bias and sink where one is a DTensor, of calls whose q is none.

    Raises:
        TypeError: it names the argument, and, inside of a transform of `torch.func`, that.
    """
    for name, x in zip(("q", "k", "v", "mask", "bias", "sink"), tensors, strict=True):
        if is_dtensor(x):
            raise TypeError(
                f"{name} is a DTensor, and q is a {type(tensors[0]).__name__}; q needs to be a DTensor, too, or "
                f"{name} a plain tensor: {name}.to_local()"
            )
        if is_transformed() and isinstance(x, Tensor) and is_dtensor(_unwrapped(x)):
            raise TypeError(
                f"{name} is a DTensor inside of a transform of torch.func, such as vmap; it needs to be a plain tensor "
                f"there: {name}.to_local()"
            )


def _unwrapped(x: Tensor) -> Tensor:
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x


def describe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | PreparedMask | SequenceTileMask | TreeMask | None,
    bias: Tensor | None,
    is_causal: bool,
    softmax_scale: float | None,
    softcap: float,
    window_size: tuple[int, int] | None,
    deterministic: bool | None,
    return_lse: bool,
    return_probs: bool,
    repeats: Repeats | None = None,
    sequences: SequenceSpec | None = None,
    dropout_p: float = 0.0,
    sink: Tensor | None = None,
) -> tuple[AttentionProblem, Tensor | PreparedMask | SequenceTileMask | TreeMask | None, Tensor | None]:
    """Validate one call; return its description and the mask and bias as 4-D views, a prepared mask as it is.

    Args:
        q, k, v and the rest: as for `flash_dmattn.attention`.
        repeats: of a call whose leading dims were folded, which has checked those of mask and bias.
        sequences: of a call that has them, whose q, k and v have a batch dim of 1 where they are packed.

    Raises:
        TypeError: an argument is not a tensor, or its dtype is not what the call needs.
        ValueError: shapes, devices or values do not fit together.
    """
    for name, x in (("q", q), ("k", k), ("v", v), ("mask", mask), ("bias", bias), ("sink", sink)):
        check_strided(name, x)
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)) or not (
        q.dim() == k.dim() == v.dim() == 4
    ):
        _refuse_rank(q, k, v)
    dtype, device = q.dtype, q.device
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"q has dtype {dtype_name(dtype)}; it needs float16, bfloat16, float32 or float64")
    shape_k, shape_v = k.shape, v.shape
    batch, seqlen_q, num_heads, head_dim = q.shape
    _, seqlen_k, num_heads_k, head_dim_v = shape_v
    batch_k = batch if sequences is None or not sequences.has_pages else shape_k[0]
    if not (
        k.dtype == dtype == v.dtype
        and k.device == device == v.device
        and shape_k[0] == batch_k == shape_v[0]
        and shape_k[1] == seqlen_k
        and shape_k[2] == num_heads_k
        and shape_k[3] == head_dim
    ):
        _refuse_mismatch(q, k, v, batch_k)
    if head_dim == 0 or head_dim_v == 0:
        raise ValueError(f"q, k and v have head dims {head_dim} and {head_dim_v} (v); they need at least 1")
    if num_heads_k == 0 or num_heads % num_heads_k != 0:
        raise ValueError(
            f"q has {num_heads} heads and k has {num_heads_k}; "
            "the heads of q need to be a multiple of the heads of k (grouped-query attention)"
        )

    if sequences is not None:
        batch, seqlen_q, seqlen_k = sequences.number, sequences.max_seqlen_q, sequences.max_seqlen_k
    sizes = (batch, num_heads, seqlen_q, seqlen_k)
    mask_spec = bias_spec = None
    mask_packing = bias_packing = _UNPACKED
    mask_form: MaskForm = "none"
    one_mask_row = False
    if isinstance(mask, Tensor):
        if mask.requires_grad:
            raise TypeError("mask requires grad; a mask never takes a gradient, pass additive values as bias instead")
        if mask.dtype != torch.bool:
            raise TypeError(
                f"mask has dtype {dtype_name(mask.dtype)}; it needs bool, True where q attends "
                "(use mask.bool() for 0/1 values, masks.padding_mask(mask) for padding of (batch, seqlen_k), or pass "
                "additive values as bias)"
            )
        mask_form = "dense"
        mask, mask_spec, mask_packing = _describe_broadcast(
            "mask", mask, sizes, num_heads_k, device, repeats, sequences
        )
        one_mask_row = sequences is None and mask_spec.broadcast()[2]
    elif mask is not None and sequences is not None:
        mask_spec, mask_form, mask_packing, is_causal, window_size = _describe_beside(
            mask, is_causal, window_size, (num_heads, num_heads_k), sequences, device
        )
    elif mask is not None:
        mask_spec, mask_form, is_causal, window_size = _describe_prepared(
            mask, is_causal, window_size, sizes, num_heads_k, device, repeats
        )
        one_mask_row = mask.one_row  # type: ignore[union-attr]
    if bias is not None:
        if not isinstance(bias, Tensor):
            raise TypeError(f"bias is a {type(bias).__name__}; it needs to be a floating-point torch.Tensor")
        if bias.dtype not in FLOAT_DTYPES:
            raise TypeError(
                f"bias has dtype {dtype_name(bias.dtype)}; it needs float16, bfloat16, float32 or float64"
                + (" (pass a bool tensor as mask)" if bias.dtype == torch.bool else "")
            )
        bias, bias_spec, bias_packing = _describe_broadcast(
            "bias", bias, sizes, num_heads_k, device, repeats, sequences
        )

    if sink is not None:
        _check_sink(sink, num_heads, device)

    # Specialised on purpose under torch.compile: kernels are chosen and scaled by the head dims.
    head_dim, head_dim_v = int(head_dim), int(head_dim_v)
    causal = check_flag("is_causal", is_causal)
    window = _NO_WINDOW if window_size is None else check_window(window_size)
    flags = Flags(
        *causal_window(causal, window),
        head_dim**-0.5 if softmax_scale is None else check_scale(softmax_scale, head_dim),
        check_softcap(softcap),
        torch.are_deterministic_algorithms_enabled()
        if deterministic is None
        else check_flag("deterministic", deterministic),
        *(_NO_REPEATS if repeats is None else repeats),
        dropout_p=check_dropout(dropout_p),
        one_mask_row=one_mask_row,
    )
    needs_grad = _NOTHING_NEEDS_GRAD
    if torch.is_grad_enabled():
        needs_grad = NeedsGrad(
            q.requires_grad,
            k.requires_grad,
            v.requires_grad,
            bias is not None and bias.requires_grad,
            sink is not None and sink.requires_grad,
        )
    if sequences is not None:
        _refuse_beside_sequences(sequences, needs_grad, return_probs)
        flags = flags._replace(
            layout=sequences.layout,
            max_seqlen_q=seqlen_q,
            max_seqlen_k=seqlen_k,
            mask_packing=mask_packing,
            bias_packing=bias_packing,
        )
    problem = AttentionProblem(
        device.type,
        device_arch(device),
        dtype,
        batch,
        seqlen_q,
        seqlen_k,
        num_heads,
        num_heads_k,
        head_dim,
        head_dim_v,
        q.stride(),  # type: ignore[arg-type]
        k.stride(),  # type: ignore[arg-type]
        v.stride(),  # type: ignore[arg-type]
        mask_spec,
        mask_form,
        bias_spec,
        causal,
        window,
        flags,
        check_flag("return_lse", return_lse),
        check_flag("return_probs", return_probs),
        needs_grad,
        None if sink is None else sink.dtype,
        sequences,
    )
    return problem, mask, bias


_NOTHING_NEEDS_GRAD = NeedsGrad()
_NO_WINDOW = (-1, -1)
_NO_REPEATS = Repeats()
_UNPACKED: Packing = "none"


# What names the fault stands apart from the test for one, which every call pays for.
def _refuse_rank(q: Tensor, k: Tensor, v: Tensor) -> NoReturn:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it needs to be a torch.Tensor of 4 dimensions")
        if x.dim() != 4:
            raise ValueError(
                f"{name} has {x.dim()} dimensions, shape {tuple(x.shape)}; "
                + ("it needs 4 or more: (*batch" if name == "q" else "it needs 4, as q: (batch")
                + ", seqlen, num_heads, head_dim)"
            )
    raise AssertionError("q, k and v are tensors of 4 dimensions")


def _refuse_mismatch(q: Tensor, k: Tensor, v: Tensor, batch: int) -> NoReturn:
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {dtype_name(x.dtype)}; it needs that of q, {dtype_name(q.dtype)}")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}; it needs to be on the device of q, {q.device}")
        if x.shape[0] != batch:
            of = "q" if batch == q.shape[0] else "k"
            raise ValueError(f"{name} has batch size {x.shape[0]}; it needs that of {of}, {batch}")
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(
            f"v has {v.shape[1]} keys and {v.shape[2]} heads; it needs those of k, {k.shape[1]} and {k.shape[2]}"
        )
    raise ValueError(f"k has head_dim {k.shape[3]}; it needs that of q, {q.shape[3]}")


def _refuse_beside_sequences(sequences: SequenceSpec, needs_grad: NeedsGrad, return_probs: bool) -> None:
    if return_probs:
        raise ValueError("return_probs is True; calls with sequences have no tensor of all probabilities")
    if sequences.has_pages and any(needs_grad):
        named = ", ".join(name for name, needed in zip(NeedsGrad._fields, needs_grad, strict=True) if needed)
        raise ValueError(f"{named} requires grad; keys in pages have no gradients (call under torch.no_grad())")


def _describe_broadcast(
    name: str,
    x: Tensor,
    sizes: Shape4,
    num_heads_k: int,
    device: torch.device,
    repeats: Repeats | None,
    sequences: SequenceSpec | None,
) -> tuple[Tensor, TensorSpec, Packing]:
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}; it needs to be on the device of q, {device}")
    dims = x.dim()
    if sequences is None and dims not in (2, 3, 4):
        raise ValueError(
            f"{name} has {dims} dimensions, shape {tuple(x.shape)}; it needs 2, 3 or 4, "
            "read from the right as (batch, heads, seqlen_q, seqlen_k)"
        )
    if sequences is not None:
        packing = packing_of(name, x.shape, sequences)
        x = as_scores(x)
        check_scores(name, x.shape, packing, sequences, (sizes[1], num_heads_k))
        return x, spec_of(x), packing
    x = as_scores(x)
    shape = x.shape
    if repeats is None:
        check_broadcast(name, shape, sizes, num_heads_k)
    return x, spec_of(x), _UNPACKED


def _check_sink(sink: Tensor, num_heads: int, device: torch.device) -> None:
    if not isinstance(sink, Tensor):
        raise TypeError(
            f"sink is a {type(sink).__name__}; it needs to be a floating-point torch.Tensor of shape ({num_heads},)"
        )
    if sink.dtype not in FLOAT_DTYPES:
        raise TypeError(f"sink has dtype {dtype_name(sink.dtype)}; it needs float16, bfloat16, float32 or float64")
    if sink.dim() != 1 or sink.shape[0] != num_heads:
        raise ValueError(
            f"sink has shape {tuple(sink.shape)}; it needs ({num_heads},): one logit for each head of q"
            + (f" (sink.expand({num_heads}) gives all heads the same)" if sink.numel() == 1 else "")
        )
    if sink.device != device:
        raise ValueError(f"sink is on {sink.device}; it needs to be on the device of q, {device}")


def _describe_beside(
    mask: PreparedMask | SequenceTileMask | TreeMask,
    is_causal: bool,
    window_size: tuple[int, int] | None,
    heads: tuple[int, int],
    sequences: SequenceSpec,
    device: torch.device,
) -> tuple[TensorSpec, MaskForm, Packing, bool, tuple[int, int]]:
    """Validate what a call with sequences has as its mask that is no tensor.

    Returns:
        Its description, its form, what of it is packed, and the band, which a mask with tiles decides.
    """
    from .masks.prepared.sequence_tiles import SequenceTileMask  # as in `_describe_prepared`
    from .masks.prepared.tree import TreeMask

    if not isinstance(mask, (SequenceTileMask, TreeMask)):
        raise TypeError(
            f"mask is a {type(mask).__name__}; beside sequences it needs to be a bool torch.Tensor, what "
            "prepare_mask(mask, sequences=...) makes of one, or a TreeMask"
        )
    if mask.device != device:
        raise ValueError(f"mask is on {mask.device}; it needs to be on the device of q, {device}")
    if isinstance(mask, SequenceTileMask):
        check_sequence_tiles(mask.spec, mask.shape[1], sequences, heads)
        _check_band(mask, check_flag("is_causal", is_causal), check_window(window_size))
        mask_packing: Packing = "queries" if sequences.packs_queries else "none"
        return unpacked_spec(mask.shape), mask.form, mask_packing, mask.is_causal, mask.window_size
    check_tree(mask.shape, sequences)
    window = _NO_WINDOW if window_size is None else check_window(window_size)
    given = "is_causal is True" if is_causal else f"window_size is {window_size}"
    if is_causal or window[1] != -1:
        raise ValueError(
            f"{given}, but mask is a TreeMask, which says itself what of the new tokens is seen; "
            "beside it only window_size=(left, -1) limits anything"
        )
    number, tokens, _ = mask.shape
    return unpacked_spec((number, 1, tokens, tokens)), mask.form, _UNPACKED, is_causal, window


def _describe_prepared(
    mask: PreparedMask | SequenceTileMask | TreeMask,
    is_causal: bool,
    window_size: tuple[int, int] | None,
    sizes: Shape4,
    num_heads_k: int,
    device: torch.device,
    repeats: Repeats | None,
) -> tuple[TensorSpec, MaskForm, bool, tuple[int, int]]:
    """Validate a prepared mask for a call; return its description, its form, and the band, which it decides.

    Args:
        mask: what the call has as its mask, no tensor.
        is_causal, window_size: those of the call. What they limit, the mask has to limit by the same numbers.
        sizes: (batch, heads, seqlen_q, seqlen_k) of the call.

    Raises:
        TypeError: neither a prepared mask nor a tensor.
        ValueError: it was prepared for other sizes, on another device or with another band.
    """
    # Not at the top: only a program that has made a prepared mask pays for the import, and it has done so already.
    from .masks.prepared.types import PreparedMask

    if not isinstance(mask, PreparedMask):
        if getattr(mask, "form", None) == "sequence_tiles":
            raise ValueError("mask was prepared beside sequences; it needs sequences=mask.sequences beside it")
        if getattr(mask, "form", None) == "tree":
            raise ValueError("mask is a TreeMask, of the new tokens of sequences; it needs sequences= beside it")
        raise TypeError(
            f"mask is a {type(mask).__name__}; it needs to be a bool torch.Tensor, True where q attends, "
            "or a prepared mask"
        )
    if mask.device != device:
        raise ValueError(f"mask is on {mask.device}; it needs to be on the device of q, {device}")
    for name, has, needs in (("seqlen_q", mask.seqlen_q, sizes[2]), ("seqlen_k", mask.seqlen_k, sizes[3])):
        if has != needs:
            raise ValueError(f"mask was prepared for {name} {has}; it needs that of the call, {needs}")
    shape = mask.shape
    if repeats is None:
        if len(mask.batch_dims) > 1:
            raise ValueError(f"mask was prepared with leading dims {mask.batch_dims}; q has one batch dim, {sizes[0]}")
        check_broadcast("mask", shape, sizes, num_heads_k)
    _check_band(mask, check_flag("is_causal", is_causal), check_window(window_size))
    return unpacked_spec(shape), mask.form, mask.is_causal, mask.window_size


def _check_band(mask: PreparedMask | SequenceTileMask, is_causal: bool, window_size: tuple[int, int]) -> None:
    right = 0 if mask.is_causal else mask.window_size[1]
    if is_causal:
        if right != 0:
            _refuse_band(mask, "is_causal is True")
    elif window_size[1] not in (-1, right):
        _refuse_band(mask, f"window_size is {window_size}")
    if window_size[0] not in (-1, mask.window_size[0]):
        _refuse_band(mask, f"window_size is {window_size}")


def _refuse_band(mask: PreparedMask | SequenceTileMask, given: str) -> NoReturn:
    raise ValueError(
        f"{given}, but mask was prepared with is_causal={mask.is_causal}, window_size={mask.window_size}; "
        "a prepared mask brings its own limits: pass is_causal and window_size to prepare_mask"
    )
