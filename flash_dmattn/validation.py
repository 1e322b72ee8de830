"""The only validation of the input of a call, and its description as an `AttentionProblem`."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    from .masks import PreparedMask


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
    mask: Tensor | PreparedMask | None,
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
) -> tuple[AttentionProblem, Tensor | PreparedMask | None, Tensor | None]:
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
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it needs to be a torch.Tensor of 4 dimensions")
        if x.dim() != 4:
            raise ValueError(
                f"{name} has {x.dim()} dimensions, shape {tuple(x.shape)}; "
                + ("it needs 4 or more: (*batch" if name == "q" else "it needs 4, as q: (batch")
                + ", seqlen, num_heads, head_dim)"
            )
    dtype, device = q.dtype, q.device
    _check_float("q", q)
    batch, seqlen_q, num_heads, head_dim = q.shape
    _, seqlen_k, num_heads_k, head_dim_v = v.shape
    has_pages = sequences is not None and sequences.has_pages
    batch_k = k.shape[0] if has_pages else batch
    for name, x in (("k", k), ("v", v)):
        if x.dtype != dtype:
            raise TypeError(f"{name} has dtype {dtype_name(x.dtype)}; it needs that of q, {dtype_name(dtype)}")
        _check_device(name, x.device, device)
        if x.shape[0] != batch_k:
            other = "q" if batch_k == batch else "k"
            raise ValueError(f"{name} has batch size {x.shape[0]}; it needs that of {other}, {batch_k}")
    if k.shape[1] != seqlen_k or k.shape[2] != num_heads_k:
        raise ValueError(
            f"v has {seqlen_k} keys and {num_heads_k} heads; it needs those of k, {k.shape[1]} and {k.shape[2]}"
        )
    if k.shape[3] != head_dim:
        raise ValueError(f"k has head_dim {k.shape[3]}; it needs that of q, {head_dim}")
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
        mask, mask_spec, mask_packing = _describe_scores("mask", mask, sizes, num_heads_k, device, repeats, sequences)
        one_mask_row = sequences is None and mask_spec.broadcast()[2]
    elif mask is not None:
        mask_spec, mask_packing, is_causal, window_size = _describe_prepared(
            mask, is_causal, window_size, sizes, num_heads_k, device, repeats, sequences
        )
        mask_form = mask.form
        one_mask_row = sequences is None and mask.one_row
    if bias is not None:
        _check_float("bias", bias)
        bias, bias_spec, bias_packing = _describe_scores("bias", bias, sizes, num_heads_k, device, repeats, sequences)
    if sink is not None:
        _check_float("sink", sink, num_heads)
        if sink.dim() != 1 or sink.shape[0] != num_heads:
            raise ValueError(
                f"sink has shape {tuple(sink.shape)}; it needs ({num_heads},): one logit for each head of q"
                + (f" (sink.expand({num_heads}) gives all heads the same)" if sink.numel() == 1 else "")
            )
        _check_device("sink", sink.device, device)

    # Specialised on purpose under torch.compile: kernels are chosen and scaled by the head dims.
    head_dim, head_dim_v = int(head_dim), int(head_dim_v)
    causal = check_flag("is_causal", is_causal)
    window = check_window(window_size)
    flags = Flags(
        *causal_window(causal, window),
        check_scale(softmax_scale, head_dim),
        check_softcap(softcap),
        torch.are_deterministic_algorithms_enabled()
        if deterministic is None
        else check_flag("deterministic", deterministic),
        *(repeats or _NO_REPEATS),
        layout="dense" if sequences is None else sequences.layout,
        max_seqlen_q=0 if sequences is None else seqlen_q,
        max_seqlen_k=0 if sequences is None else seqlen_k,
        mask_packing=mask_packing,
        bias_packing=bias_packing,
        dropout_p=check_dropout(dropout_p),
        one_mask_row=one_mask_row,
    )
    needs_grad = NeedsGrad()
    if torch.is_grad_enabled():
        needs_grad = NeedsGrad(
            q.requires_grad,
            k.requires_grad,
            v.requires_grad,
            bias is not None and bias.requires_grad,
            sink is not None and sink.requires_grad,
        )
    if sequences is not None:
        if return_probs:
            raise ValueError("return_probs is True; calls with sequences have no tensor of all probabilities")
        if has_pages and any(needs_grad):
            wanted = ", ".join(name for name, needed in zip(NeedsGrad._fields, needs_grad, strict=True) if needed)
            raise ValueError(f"{wanted} requires grad; keys in pages have no gradients (call under torch.no_grad())")
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


_NO_REPEATS = Repeats()
_UNPACKED: Packing = "none"


def _check_device(name: str, own: torch.device, device: torch.device) -> None:
    if own != device:
        raise ValueError(f"{name} is on {own}; it needs to be on the device of q, {device}")


def _check_float(name: str, x: object, size: int | None = None) -> None:
    if not isinstance(x, Tensor):
        shape = "" if size is None else f" of shape ({size},)"
        raise TypeError(f"{name} is a {type(x).__name__}; it needs to be a floating-point torch.Tensor{shape}")
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"{name} has dtype {dtype_name(x.dtype)}; it needs float16, bfloat16, float32 or float64"
            + (" (pass a bool tensor as mask)" if name == "bias" and x.dtype == torch.bool else "")
        )


def _describe_scores(
    name: str,
    x: Tensor,
    sizes: Shape4,
    num_heads_k: int,
    device: torch.device,
    repeats: Repeats | None,
    sequences: SequenceSpec | None,
) -> tuple[Tensor, TensorSpec, Packing]:
    """Validate a dense mask or a bias; return it as a 4-D view, its description, and its packed dim."""
    _check_device(name, x.device, device)
    if sequences is not None:
        packing = packing_of(name, x.shape, sequences)
        x = as_scores(x)
        check_scores(name, x.shape, packing, sequences, (sizes[1], num_heads_k))
        return x, spec_of(x), packing
    if x.dim() not in (2, 3, 4):
        raise ValueError(
            f"{name} has {x.dim()} dimensions, shape {tuple(x.shape)}; it needs 2, 3 or 4, "
            "read from the right as (batch, heads, seqlen_q, seqlen_k)"
        )
    x = as_scores(x)
    if repeats is None:
        check_broadcast(name, x.shape, sizes, num_heads_k)
    return x, spec_of(x), _UNPACKED


def _describe_prepared(
    mask: PreparedMask,
    is_causal: bool,
    window_size: tuple[int, int] | None,
    sizes: Shape4,
    num_heads_k: int,
    device: torch.device,
    repeats: Repeats | None,
    sequences: SequenceSpec | None,
) -> tuple[TensorSpec, Packing, bool, tuple[int, int]]:
    """Validate a mask that is no tensor; return its description, its packed dim, and the band of the call.

    All but a tree decide the band: a limit of the call has to be the limit of the mask.
    """
    packing = _UNPACKED
    if sequences is None:
        # Not at the top: only a program that has made a prepared mask pays for the import.
        from .masks.prepared.storage import BatchMask

        if not isinstance(mask, BatchMask):
            if getattr(mask, "form", None) == "sequence_tiles":
                raise ValueError("mask was prepared beside sequences; it needs sequences=mask.sequences beside it")
            if getattr(mask, "form", None) == "tree":
                raise ValueError("mask is a TreeMask, of the new tokens of sequences; it needs sequences= beside it")
            raise TypeError(
                f"mask is a {type(mask).__name__}; it needs to be a bool torch.Tensor, True where q attends, "
                "or a prepared mask"
            )
        _check_device("mask", mask.device, device)
        for name, has, needs in (("seqlen_q", mask.seqlen_q, sizes[2]), ("seqlen_k", mask.seqlen_k, sizes[3])):
            if has != needs:
                raise ValueError(f"mask was prepared for {name} {has}; it needs that of the call, {needs}")
        dims = mask.batch_dims
        if repeats is None and len(dims) > 1:
            raise ValueError(f"mask was prepared with leading dims {dims}; q has one batch dim, {sizes[0]}")
        if repeats is None:
            check_broadcast("mask", mask.shape, sizes, num_heads_k)
    else:
        from .masks.prepared.storage import SequenceTileMask, TreeMask

        if not isinstance(mask, (SequenceTileMask, TreeMask)):
            raise TypeError(
                f"mask is a {type(mask).__name__}; beside sequences it needs to be a bool torch.Tensor, what "
                "PreparedMask.from_mask(mask, sequences=...) makes of one, or a TreeMask"
            )
        _check_device("mask", mask.device, device)
        if isinstance(mask, TreeMask):
            check_tree(mask.shape, sequences)
            window = check_window(window_size)
            if is_causal or window[1] != -1:
                limit = "is_causal is True" if is_causal else f"window_size is {window_size}"
                raise ValueError(
                    f"{limit}, but mask is a TreeMask, which says itself what of the new tokens is seen; "
                    "beside it only window_size=(left, -1) limits anything"
                )
            number, tokens, _ = mask.shape
            return unpacked_spec((number, 1, tokens, tokens)), packing, is_causal, window
        check_sequence_tiles(mask.spec, mask.shape[1], sequences, (sizes[1], num_heads_k))
        packing = "queries" if sequences.packs_queries else "none"
    is_causal, window = check_flag("is_causal", is_causal), check_window(window_size)
    right = 0 if mask.is_causal else mask.window_size[1]
    fits = right == 0 if is_causal else window[1] in (-1, right)
    if not fits or window[0] not in (-1, mask.window_size[0]):
        limit = "is_causal is True" if is_causal and not fits else f"window_size is {window}"
        raise ValueError(
            f"{limit}, but mask was prepared with is_causal={mask.is_causal}, window_size={mask.window_size}; "
            "a prepared mask brings its own limits: pass is_causal and window_size to PreparedMask.from_mask"
        )
    return unpacked_spec(mask.shape), packing, mask.is_causal, mask.window_size
