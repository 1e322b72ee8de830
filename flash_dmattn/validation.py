"""Validates the input of a call, which no other module does, and describes it as an `AttentionProblem`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .biases import ByDistance, check_covered
from .definition import is_dtensor, is_transformed, unwrapped
from .dispatch.config import invariant
from .problem import (
    FLOAT_DTYPES,
    Arrival,
    AttentionProblem,
    Flags,
    MaskForm,
    NeedsGrad,
    Packing,
    RawFlags,
    Repeats,
    SequenceSpec,
    SequenceView,
    TensorSpec,
    allows_tf32,
    as_scores,
    causal_window,
    check_broadcast,
    check_device,
    check_dtype,
    check_flag,
    check_leading,
    check_number,
    check_scores,
    check_softcap,
    check_strided,
    check_values,
    check_window,
    describe_tensors,
    dtype_name,
    find_packing,
    replaced,
    tensor_spec,
    unpacked_spec,
)
from .problem.inputs import Inputs, in_rows
from .reference.positions import AUTOCAST_DEVICES
from .sequences.padding import Jagged

if TYPE_CHECKING:
    from .masks import PreparedMask
    from .masks.prepared.storage import BatchMask, SequenceTileMask

    Mask = Tensor | PreparedMask | None


def autocast_dtype(x: object) -> torch.dtype | None:
    """Return the dtype of autocast on the device of a tensor, if it is on."""
    # `x.device.type` makes a new string at each call, which is slow on the path of every call.
    kind = "" if not isinstance(x, Tensor) else "cuda" if x.is_cuda else x.device.type
    if kind not in AUTOCAST_DEVICES or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def cast_to(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Cast a tensor as autocast does: fp64 is not cast, as in torch; validation refuses an argument that is none."""
    if dtype is None or not isinstance(x, Tensor) or x.dtype in (dtype, torch.float64) or not x.is_floating_point():
        return x
    return x.to(dtype)


def follow_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast q, k and v to the dtype of autocast if it is on; bias never is."""
    dtype = autocast_dtype(q)
    return (q, k, v) if dtype is None else (cast_to(q, dtype), cast_to(k, dtype), cast_to(v, dtype))


def refuse_dtensors(*tensors: object) -> None:
    """Refuse a DTensor among k, v, mask, bias and sink; only called if q is no DTensor."""
    for name, x in zip(("q", "k", "v", "mask", "bias", "sink"), tensors, strict=True):
        if is_dtensor(x):
            raise TypeError(
                f"{name} is a DTensor, and q is a {type(tensors[0]).__name__}; q needs to be a DTensor, too, or "
                f"{name} a plain tensor: {name}.to_local()"
            )
        if is_transformed() and isinstance(x, Tensor) and is_dtensor(unwrapped(x)):
            raise TypeError(
                f"{name} is a DTensor inside of a transform of torch.func, such as vmap; it needs to be a plain tensor "
                f"there: {name}.to_local()"
            )


class _Sizes(NamedTuple):
    """The sizes of a call, with which its mask and its bias have to agree."""

    batch: int
    num_heads: int
    num_heads_k: int
    seqlen_q: int
    seqlen_k: int
    device: torch.device
    is_folded: bool
    sequences: SequenceSpec | None

    def check_broadcast(self, name: str, shape: Sequence[int]) -> None:
        if not self.is_folded:  # otherwise folding has checked the caller's shape
            check_broadcast(name, shape, (self.batch, self.num_heads, self.seqlen_q, self.seqlen_k), self.num_heads_k)


class PreparedCall(NamedTuple):
    """The arguments of a call in one form, which `call.prepare_call` makes.

    Attributes:
        q, k, v: in the dtype of autocast, in the layout `arrival`.
        mask, bias, sink: as the caller passed them, with leading dims folded.
        raw_flags: see `RawFlags`.
        repeats, leading: if leading dims were folded: the repeats of mask and bias, and the dims.
        spec, sequences: the layout of the sequences, and the tensors that locate them.
        jagged: wraps results as nested tensors, if q, k and v were nested.
        copies: sentences about tensors that were copied because their leading dims do not fold.
        by_distance: the settings of a bias by distance; `bias` then has its values.
        is_list_bias: whether `bias` has the values of a `ListBias`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    bias: Tensor | None
    sink: Tensor | None
    raw_flags: RawFlags
    arrival: Arrival = "rows"
    repeats: Repeats | None = None
    leading: tuple[int, ...] | None = None
    spec: SequenceSpec | None = None
    sequences: SequenceView | None = None
    jagged: Jagged | None = None
    copies: tuple[str, ...] = ()
    by_distance: ByDistance | None = None
    is_list_bias: bool = False


def describe(call: PreparedCall) -> tuple[AttentionProblem, Mask, Tensor | None]:
    """Validate one call; return its description, and mask and bias as 4-D views (a prepared mask unchanged)."""
    q, k, v = (in_rows(x, call.arrival) for x in (call.q, call.k, call.v))
    mask, bias, sink, raw_flags, sequences, repeats = (
        call.mask,
        call.bias,
        call.sink,
        call.raw_flags,
        call.spec,
        call.repeats,
    )
    by_distance, is_list_bias = call.by_distance, call.is_list_bias
    for name, x in (("q", q), ("k", k), ("v", v), ("mask", mask), ("bias", bias), ("sink", sink)):
        check_strided(name, x)
    sizes = _check_qkv(q, k, v, repeats is not None, sequences)
    is_causal, window = raw_flags.is_causal, raw_flags.window_size
    mask_spec = None
    mask_packing = bias_packing = _UNPACKED
    mask_form: MaskForm = "none"
    one_mask_row = False
    if isinstance(mask, Tensor):
        if mask.requires_grad:
            raise TypeError("mask requires grad; a mask never takes a gradient, pass additive values as bias instead")
        if mask.dtype != torch.bool:
            raise TypeError(
                f"mask has dtype {dtype_name(mask.dtype)}; it needs bool, True where q attends "
                "(mask.bool() of 1 and 0, mask == 0 of 0 and -inf, masks.padding_mask(mask) of padding (batch, "
                "seqlen_k); pass what adds to scores as bias)"
            )
        mask, mask_spec, mask_packing = _describe_scores("mask", mask, sizes)
        mask_form, one_mask_row = "dense", sequences is None and mask_spec.broadcast()[2]
    elif mask is not None:
        describe_prepared = _describe_prepared if sequences is None else _describe_with_sequences
        mask_spec, is_causal, window = describe_prepared(mask, is_causal, window, sizes)
        mask_form, one_mask_row = mask.form, sequences is None and mask.one_row
        if mask_form in ("sequence_tiles", "lists") and sequences is not None and sequences.packs_queries:
            mask_packing = "queries"
    if bias is not None and (is_list_bias or by_distance is not None):
        bias, bias_packing = _check_values(bias, mask, by_distance, sizes)
    elif bias is not None:
        _check_float("bias", bias)
        bias, _, bias_packing = _describe_scores("bias", bias, sizes)
    if sink is not None:
        _check_sink(sink, sizes)

    causal, window, scale = check_flag("is_causal", is_causal), check_window(window), raw_flags.softmax_scale
    is_ordered = torch.are_deterministic_algorithms_enabled()
    if raw_flags.deterministic is not None:
        is_ordered = check_flag("deterministic", raw_flags.deterministic)
    flags = Flags(
        *causal_window(causal, window),
        int(q.shape[3]) ** -0.5 if scale is None else check_number("softmax_scale", scale),
        check_softcap(raw_flags.softcap, scale),
        is_ordered or invariant(),
        *(repeats or _NO_REPEATS),
        mask_packing=mask_packing,
        bias_packing=bias_packing,
        dropout_p=check_number("dropout_p", raw_flags.dropout_p),
        one_mask_row=one_mask_row,
        zero=0 if by_distance is None else by_distance.zero,
        outside="" if by_distance is None else by_distance.outside,
        is_list_bias=is_list_bias,
        allows_tf32=allows_tf32(q.dtype),
        max_scores=check_flag("max_scores", raw_flags.max_scores),
        entropy=check_flag("entropy", raw_flags.entropy),
        invariant=invariant(),
        sequences=sequences,
    )
    if mask_form == "lists":
        lists: Any = mask
        block_q, block_k = lists.block_size
        flags = replaced(flags, block_q=block_q, block_k=block_k, list_size=lists.keys.shape[3])
    if by_distance is not None and by_distance.outside == "error" and bias is not None:
        check_covered(bias.shape[-1], by_distance.zero, sizes.seqlen_q, sizes.seqlen_k, flags.window)
    needs_grad = Inputs(q, k, v, bias=bias, sink=sink).needs_grad
    if sequences is not None:
        if raw_flags.return_probs:
            raise ValueError("return_probs is True; calls with sequences have no tensor of all probabilities")
        if sequences.has_pages and any(needs_grad):
            wanted = ", ".join(name for name, needed in zip(NeedsGrad._fields, needs_grad, strict=True) if needed)
            raise ValueError(f"{wanted} requires grad; keys in pages have no gradients (call under torch.no_grad())")
    problem = replaced(
        describe_tensors(q, k, v, mask_spec, mask_form, bias, sink, flags, needs_grad),
        is_causal=causal,
        window_size=window,
        return_lse=check_flag("return_lse", raw_flags.return_lse),
        return_probs=check_flag("return_probs", raw_flags.return_probs),
    )
    return problem, mask, bias


def follows_warn_only(call: PreparedCall, problem: AttentionProblem) -> bool:
    """Return whether only torch's warn-only mode requests a fixed order of sums; compilers cannot see that mode."""
    if call.raw_flags.deterministic is not None or not problem.deterministic or torch.compiler.is_compiling():
        return False
    return torch.is_deterministic_algorithms_warn_only_enabled()


_NO_REPEATS = Repeats()
_UNPACKED: Packing = "none"


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check q, k and v of a call without sequences, of any batch dims."""
    if not isinstance(q, Tensor) or q.dim() <= 4:
        _check_qkv(q, k, v, False, None)
        return
    for name, x in (("k", k), ("v", v)):
        check_leading(name, x, q)
    q, k, v = (x[(slice(0, 1),) * (x.dim() - 4)].flatten(0, -4) for x in (q, k, v))
    _check_qkv(q, k, v, True, None)


def _check_qkv(q: Tensor, k: Tensor, v: Tensor, is_folded: bool, sequences: SequenceSpec | None) -> _Sizes:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if type(x).__name__ == "Proxy":
            raise TypeError(
                f"{name} is a Proxy of torch.fx.symbolic_trace, which has no shape; make the function that calls "
                "attention a leaf by torch.fx.wrap, or use torch.export"
            )
        if not isinstance(x, Tensor):
            raise TypeError(
                f"{name} is a {type(x).__name__}; it needs to be a torch.Tensor of 4 dimensions"
                + (" (k[..., :n], where values are the first n channels of keys)" if name == "v" else "")
            )
        if x.dim() != 4:
            raise ValueError(
                f"{name} has {x.dim()} dimensions, shape {tuple(x.shape)}; "
                + ("it needs 4 or more: (*batch" if name == "q" else "it needs 4, as q: (batch")
                + ", seqlen, num_heads, head_dim)"
                + ("; packed rows need sequences=Sequences.packed(cu_seqlens)" if x.dim() == 3 else "")
            )
    _check_float("q", q)
    batch, seqlen_q, num_heads, head_dim = q.shape
    _, seqlen_k, num_heads_k, head_dim_v = v.shape
    # The sizes of keys are taken from v; below, k is compared with v.
    sizes = _Sizes(batch, num_heads, num_heads_k, seqlen_q, seqlen_k, q.device, is_folded, sequences)
    batch_k = k.shape[0] if sequences is not None and sequences.has_pages else batch
    for name, x in (("k", k), ("v", v)):
        check_dtype(name, x, q.dtype)
        check_device(name, x.device, sizes.device)
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
    if num_heads == 0 or num_heads_k == 0:
        raise ValueError(f"q has {num_heads} heads and k has {num_heads_k}; they need at least 1")
    if num_heads % num_heads_k != 0:
        is_heads_first = seqlen_k > 0 and seqlen_q % seqlen_k == 0
        advice = "; if heads come first in q, k and v, pass q.transpose(1, 2), and so k and v" if is_heads_first else ""
        raise ValueError(
            f"q has {num_heads} heads and k has {num_heads_k}; "
            f"the heads of q need to be a multiple of the heads of k (grouped-query attention){advice}"
        )
    if sequences is None:
        return sizes
    return sizes._replace(batch=sequences.number, seqlen_q=sequences.max_seqlen_q, seqlen_k=sequences.max_seqlen_k)


def _check_float(name: str, x: object, size: int | None = None) -> None:
    if not isinstance(x, Tensor):
        shape = "" if size is None else f" of shape ({size},)"
        call = "; pass what it returns" if isinstance(x, torch.nn.Module) else ""
        raise TypeError(f"{name} is a {type(x).__name__}; it needs to be a floating-point torch.Tensor{shape}{call}")
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"{name} has dtype {dtype_name(x.dtype)}; it needs float16, bfloat16, float32 or float64"
            + (" (pass a bool tensor as mask)" if name == "bias" and x.dtype == torch.bool else "")
        )


def _check_sink(sink: Tensor, sizes: _Sizes) -> None:
    num_heads = sizes.num_heads
    _check_float("sink", sink, num_heads)
    if sink.dim() != 1 or sink.shape[0] != num_heads:
        raise ValueError(
            f"sink has shape {tuple(sink.shape)}; it needs ({num_heads},): one logit for each head of q"
            + (f" (sink.expand({num_heads}) gives all heads the same)" if sink.numel() == 1 else "")
        )
    check_device("sink", sink.device, sizes.device)


def _describe_scores(name: str, x: Tensor, sizes: _Sizes) -> tuple[Tensor, TensorSpec, Packing]:
    """Validate a dense mask or a bias; return it as a 4-D view, its description, and its packed dim."""
    check_device(name, x.device, sizes.device)
    if sizes.sequences is not None:
        packing = find_packing(name, x.shape, sizes.sequences)
        x = as_scores(x)
        check_scores(name, x.shape, packing, sizes.sequences, (sizes.num_heads, sizes.num_heads_k))
        return x, tensor_spec(x), packing
    if x.dim() not in (2, 3, 4):
        raise ValueError(
            f"{name} has {x.dim()} dimensions, shape {tuple(x.shape)}; it needs 2, 3 or 4, "
            "read from the right as (batch, heads, seqlen_q, seqlen_k)"
        )
    x = as_scores(x)
    sizes.check_broadcast(name, x.shape)
    return x, tensor_spec(x), _UNPACKED


def _check_values(x: Tensor, mask: Any, by_distance: ByDistance | None, sizes: _Sizes) -> tuple[Tensor, Packing]:
    """Validate the values of a bias by distance or of a `ListBias`; return a 4-D view, and their packed dim."""
    _check_float("bias.values", x)
    check_device("bias.values", x.device, sizes.device)
    if x.dim() > 4:
        raise ValueError(f"bias.values has {x.dim() - 3} batch dims; it needs at most that of q")
    packing, batch, rows, spec = _UNPACKED, sizes.batch, sizes.seqlen_q, sizes.sequences
    if spec is not None and by_distance is not None and by_distance.has_rows:
        if spec.packs_queries and x.dim() == 3:
            packing, batch, rows = "queries", 1, spec.rows_q
        elif not spec.names_max[0]:
            raise ValueError(
                f"bias.values has shape {tuple(x.shape)}, by position; it needs max_seqlen_q, which the sequences do "
                f"not name (Sequences.{spec.layout.removesuffix('_packed')}(..., max_seqlen_q={x.shape[-2]}))"
            )
    if spec is not None and by_distance is None and spec.packs_queries:
        packing, batch = "queries", 1
    x = as_scores(x)
    if not sizes.is_folded:
        distances = ((rows,) if by_distance is not None and by_distance.has_rows else (),)
        fits = mask.sizes_of_values if by_distance is None else distances
        check_values(x.shape, (batch, sizes.num_heads), sizes.num_heads_k, *fits)
    return x, packing


# The description of a prepared mask, and the band of its call: is_causal and window_size.
_Prepared = tuple[TensorSpec, bool, tuple[int, int]]


def _describe_prepared(mask: object, is_causal: bool, window_size: tuple[int, int] | None, sizes: _Sizes) -> _Prepared:
    # Not at the top, so that only programs with prepared masks spend time on the import.
    from .masks.prepared.storage import BatchMask

    if getattr(mask, "sequences", None) is not None:
        raise ValueError("mask was prepared with sequences; it needs sequences=mask.sequences with it")
    if not isinstance(mask, BatchMask):
        if getattr(mask, "form", None) == "tree":
            raise ValueError("mask is a tree, of the new tokens of sequences; it needs sequences= with it")
        raise TypeError(
            f"mask is a {type(mask).__name__}; it needs to be a bool torch.Tensor, True where q attends, "
            "or a prepared mask"
        )
    check_device("mask", mask.device, sizes.device)
    for name, has, needs in (("seqlen_q", mask.seqlen_q, sizes.seqlen_q), ("seqlen_k", mask.seqlen_k, sizes.seqlen_k)):
        if has != needs:
            raise ValueError(f"mask was prepared for {name} {has}; it needs that of the call, {needs}")
    dims = mask.batch_dims
    if not sizes.is_folded and len(dims) > 1:
        raise ValueError(f"mask was prepared with leading dims {dims}; q has one batch dim, {sizes.batch}")
    sizes.check_broadcast("mask", mask.shape)
    return _own_band(mask, is_causal, window_size)


def _describe_with_sequences(
    mask: object, is_causal: bool, window_size: tuple[int, int] | None, sizes: _Sizes
) -> _Prepared:
    """Validate a prepared mask of a call with sequences."""
    from .masks.prepared.storage import ListMask, SequenceTileMask, TreeMask

    spec = sizes.sequences
    assert spec is not None
    if not isinstance(mask, (SequenceTileMask, TreeMask)) and getattr(mask, "spec", None) is None:
        form = getattr(mask, "form", None)
        kind = type(mask).__name__ if form is None else f"PreparedMask of the form {form!r}"
        maker = "from_lists(index, sequences=...)" if form == "lists" else "from_mask(mask, sequences=...)"
        raise TypeError(
            f"mask is a {kind}; with sequences it needs to be a bool torch.Tensor, or a prepared mask of "
            f"PreparedMask.{maker} or PreparedMask.from_tree"
        )
    assert isinstance(mask, (ListMask, SequenceTileMask, TreeMask))
    check_device("mask", mask.device, sizes.device)
    if not isinstance(mask, TreeMask):
        assert mask.spec is not None
        names = {"layout": "the layout", "number": "sequences", "rows_q": "seqlen_q", "rows_k": "seqlen_k"}
        for field in (*names, "max_seqlen_q", "max_seqlen_k"):
            name, has, needs = names.get(field, field), getattr(mask.spec, field), getattr(spec, field)
            if has != needs:
                raise ValueError(f"mask was prepared for {name} {has}; it needs that of the call, {needs}")
        heads = {1, sizes.num_heads, sizes.num_heads_k}
        if mask.shape[1] not in heads:
            raise ValueError(f"mask was prepared with {mask.shape[1]} heads; it needs one of {sorted(heads)}")
        return _own_band(mask, is_causal, window_size)
    number, tokens, _ = mask.shape
    if not spec.names_max[0]:
        raise ValueError(
            f"mask is a tree of {tokens} new tokens; it needs max_seqlen_q, which the sequences do not name "
            f"(Sequences.{spec.layout.removesuffix('_packed')}(..., max_seqlen_q={tokens}))"
        )
    if tokens != spec.max_seqlen_q:
        raise ValueError(f"mask is a tree of {tokens} new tokens; it needs max_seqlen_q of them, {spec.max_seqlen_q}")
    if number not in (1, spec.number):
        raise ValueError(f"mask is a tree of {number} sequences; it needs 1 or {spec.number}")
    window = check_window(window_size)
    if is_causal or window[1] != -1:
        limit = "is_causal is True" if is_causal else f"window_size is {window_size}"
        raise ValueError(
            f"{limit}, but mask is a tree, which says itself what of the new tokens is seen; "
            "with it only window_size=(left, -1) limits anything"
        )
    return unpacked_spec((number, 1, tokens, tokens)), is_causal, window


def _own_band(mask: BatchMask | SequenceTileMask, is_causal: bool, window_size: tuple[int, int] | None) -> _Prepared:
    """Return the band of the mask; limits of the call may be equal to it, but not change it."""
    is_causal, window = check_flag("is_causal", is_causal), check_window(window_size)
    right = 0 if mask.is_causal else mask.window_size[1]
    fits = right == 0 if is_causal else window[1] in (-1, right)
    if not fits or window[0] not in (-1, mask.window_size[0]):
        limit = "is_causal is True" if is_causal and not fits else f"window_size is {window}"
        raise ValueError(
            f"{limit}, but mask was prepared with is_causal={mask.is_causal}, window_size={mask.window_size}; "
            "a prepared mask brings its own limits: pass is_causal and window_size to PreparedMask.from_mask"
        )
    return unpacked_spec(mask.shape), mask.is_causal, mask.window_size
