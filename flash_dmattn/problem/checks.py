"""Checks of single arguments, and of masks and biases beside sequences; builders of masks share them."""

from __future__ import annotations

import difflib
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from .description import Layout, Packing, SequenceSpec

# Dimensions of q, and of k and v, in each layout.
RANKS: dict[Layout, tuple[int, int]] = {"packed": (3, 3), "padded": (4, 4), "paged": (4, 4), "paged_packed": (3, 4)}
# Other libraries call an argument so; what to write here.
OTHER_NAMES = {
    **dict.fromkeys(("causal", "use_causal_mask"), "is_causal="),
    **dict.fromkeys(("scale", "sm_scale", "scaling"), "softmax_scale="),
    **dict.fromkeys(("attn_bias", "score_bias", "position_bias"), "bias="),
    **dict.fromkeys(("logits_soft_cap", "softcapping", "logit_cap"), "softcap="),
    **dict.fromkeys(("window", "sliding_window", "local_window_size"), "window_size=(left, right)"),
    **dict.fromkeys(("dropout", "attention_dropout"), "dropout_p="),
    **dict.fromkeys(("sinks", "s_aux", "learnable_sink"), "sink="),
    **dict.fromkeys(("return_softmax_lse", "return_softmax"), "return_lse="),
    **dict.fromkeys(
        ("need_weights", "return_attn_probs", "output_attentions"), 'return_probs= beside backend="reference"'
    ),
    **dict.fromkeys(("key_padding_mask", "attention_mask"), "mask=masks.padding_mask(...)"),
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"), "sequences=Sequences.packed(...)"),
    **dict.fromkeys(("cache_seqlens", "seqused_k"), "sequences=Sequences.padded(...)"),
    **dict.fromkeys(("block_table", "page_table"), "sequences=Sequences.paged(...)"),
    "attn_mask": "mask= where it is bool, bias= where it is added to scores",
    "enable_gqa": "nothing: the heads of k may always be fewer",
}


def refuse_keywords(call: Callable[..., object], unknown: Mapping[str, object]) -> NoReturn:
    """Refuse keywords that a call does not have, as Python does, and name the right ones.

    Raises:
        TypeError: in any case.
    """
    name = next(iter(unknown))
    names = [known for known, x in inspect.signature(call).parameters.items() if x.kind is not x.VAR_KEYWORD]
    close = difflib.get_close_matches(name, names, 1)
    if name in OTHER_NAMES:
        hint = f"write {OTHER_NAMES[name]}"
    else:
        hint = f"did you mean {close[0]}?" if close else f"it takes {', '.join(names)}"
    raise TypeError(f"{call.__name__}() got an unexpected keyword argument {name!r}; {hint}")


def check_strided(name: str, x: object) -> None:
    """Refuse a tensor whose elements have no strides, and a tensor with a mask of its own."""
    if not isinstance(x, Tensor):
        return
    if x.layout is not torch.strided:
        dense = "to_padded_tensor(0.0)" if x.is_nested else "to_dense()"
        raise TypeError(f"{name} has layout {x.layout}; it needs a strided tensor: {name}.{dense}")
    masked = sys.modules.get("torch.masked.maskedtensor.core")
    if type(x) is not Tensor and masked is not None and isinstance(x, masked.MaskedTensor):
        raise TypeError(
            f"{name} is a MaskedTensor, whose own mask no call reads; it needs a plain tensor: {name}.get_data(), with "
            "mask= for the keys to hide"
        )


def as_scores(x: Tensor) -> Tensor:
    """A mask or a bias of 2, 3 or 4 dimensions, read from the right as (batch, heads, seqlen_q, seqlen_k)."""
    dims = x.dim()
    return x if dims == 4 else x[None] if dims == 3 else x[None, None]


def check_broadcast(name: str, shape: Sequence[int], sizes: Sequence[int], num_heads_k: int) -> None:
    """Refuse a mask or bias shape that does not broadcast to (*batch, heads, seqlen_q, seqlen_k) of as many dims."""
    *batch, h, i, j = shape
    *wanted, num_heads, seqlen_q, seqlen_k = sizes
    fits = (h == 1 or h in (num_heads, num_heads_k)) and (i == 1 or i == seqlen_q) and (j == 1 or j == seqlen_k)
    for b, size in zip(batch, wanted, strict=True):
        fits = fits and (b == 1 or b == size)
    if fits:
        return
    names = batch_names(len(batch))
    heads = f"{{1, {num_heads_k}, {num_heads}}}" if num_heads_k != num_heads else f"{{1, {num_heads}}}"
    leading = ", ".join(f"{dim} in {{1, {size}}}" for dim, size in zip(names, wanted, strict=True))
    is_padding = name == "mask" and (i, j) == (wanted[-1], seqlen_k) and not (h > 1 or any(b > 1 for b in batch))
    raise ValueError(
        f"{name} has shape {tuple(shape)}, read as ({', '.join(names)}, heads, seqlen_q, seqlen_k); "
        f"it needs {leading}, heads in {heads}, "
        f"seqlen_q in {{1, {seqlen_q}}} and seqlen_k in {{1, {seqlen_k}}}"
        + ("; padding of (batch, seqlen_k) is masks.padding_mask(mask)" if is_padding else "")
    )


def batch_names(number: int) -> tuple[str, ...]:
    """What messages call the dims in front: batch where it is one, else by their number.

    >>> batch_names(1), batch_names(2)
    (('batch',), ('batch dim 0', 'batch dim 1'))
    """
    return ("batch",) if number == 1 else tuple(f"batch dim {dim}" for dim in range(number))


def check_flag(name: str, value: bool) -> bool:
    """Refuse anything but a bool, so that a tensor or a string never silently counts as True."""
    if value is True or value is False:
        return value
    raise TypeError(f"{name} is {value!r}; it needs to be True or False")


def check_scale(softmax_scale: float | None, head_dim: int) -> float:
    """The factor on q @ k^T: `head_dim ** -0.5` when unset; 0.0 is a value."""
    if softmax_scale is None:
        return head_dim**-0.5
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (int, float)):
        raise TypeError(f"softmax_scale is a {type(softmax_scale).__name__}; it needs to be a number or None")
    if not -math.inf < softmax_scale < math.inf:  # not isfinite: torch.compile cannot trace it with dynamic floats
        raise ValueError(f"softmax_scale is {softmax_scale}; it needs to be finite")
    return float(softmax_scale)


def check_softcap(softcap: float) -> float:
    """The softcap as a float: 0.0 is off, negative is refused."""
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)):
        raise TypeError(f"softcap is a {type(softcap).__name__}; it needs to be a number, 0.0 for none")
    if not 0 <= softcap < math.inf:
        raise ValueError(f"softcap is {softcap}; it needs to be finite and at least 0 (0 is off)")
    return float(softcap)


def check_dropout(dropout_p: float) -> float:
    """The probability of dropout as a float, 0.0 for none; NaN is refused with what is out of range."""
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)):
        raise TypeError(f"dropout_p is a {type(dropout_p).__name__}; it needs to be a number from 0 to 1, 0.0 for none")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p is {dropout_p}; it needs to be a probability, from 0 to 1")
    return float(dropout_p)


def check_window(window_size: tuple[int, int] | None) -> tuple[int, int]:
    """The window as (left, right), -1 for an unlimited side; None is (-1, -1)."""
    if window_size is None:
        return (-1, -1)
    if not (isinstance(window_size, (tuple, list)) and len(window_size) == 2):
        raise TypeError(f"window_size is {window_size!r}; it needs to be None or a pair (left, right) of ints")
    left, right = window_size
    for side in (left, right):
        if isinstance(side, bool) or not isinstance(side, int):
            raise TypeError(f"window_size is {window_size!r}; both sides need to be ints, -1 for unlimited")
        if side < -1:
            raise ValueError(f"window_size is {window_size!r}; both sides need to be at least -1 (-1 is unlimited)")
    return (left, right)


def values_can_be_read(x: Tensor) -> bool:
    """Whether values may decide an error: not where reading them stops a GPU or breaks a graph, nor where none exist.

    Fake tensors say that they are on a CPU; they are a subclass, as others are whose values are elsewhere.
    """
    is_plain = type(x) is Tensor or type(x) is torch.nn.Parameter
    return is_plain and x.device.type == "cpu" and not torch.compiler.is_compiling()


def packing_of(name: str, shape: Sequence[int], spec: SequenceSpec) -> Packing:
    """Return which dim of a mask or a bias is packed, by its rank, and at rank 3 by its number of rows.

    Raises:
        ValueError: calls of this layout take no such rank.
    """
    if len(shape) == 4:
        return "none"
    if len(shape) == 3 and spec.packs_queries:
        return "keys" if shape[1] == 1 != shape[2] and spec.packs_keys else "queries"
    forms = ["4 dimensions, (sequences, heads, max_seqlen_q, max_seqlen_k)"]
    if spec.packs_queries:
        forms.append("3, (heads, queries of all sequences, max_seqlen_k)")
    if spec.packs_keys:
        forms.append("or (heads, 1, keys of all sequences)")
    raise ValueError(
        f"{name} has {len(shape)} dimensions, shape {tuple(shape)}; beside sequences it needs {', '.join(forms)}"
    )


def check_scores(
    name: str, shape: Sequence[int], packing: Packing, spec: SequenceSpec, heads: tuple[int, int] | None
) -> None:
    """Refuse a mask or a bias, read as 4-D, whose shape does not fit the sequences.

    Args:
        heads: how many q has, and k; None where no call is known.
    """
    rows, columns = spec.max_seqlen_q, spec.max_seqlen_k
    names = ("max_seqlen_q", "max_seqlen_k")
    batch = {1, spec.number}
    if packing == "queries":
        rows, names, batch = spec.rows_q, ("queries of all sequences", "max_seqlen_k"), {1}
    elif packing == "keys":
        rows, columns, names, batch = 1, spec.rows_k, ("1", "keys of all sequences"), {1}
    b, h, i, j = shape
    if b in batch and (heads is None or h in (1, *heads)) and i in (1, rows) and j in (1, columns):
        for size, named, dim in zip((i, j), spec.names_max, names, strict=True):
            if dim.startswith("max_") and size > 1 and not named:
                raise ValueError(
                    f"{name} has shape {_own(shape, packing)}, by position; it needs {dim}, which the sequences do not "
                    f"name (Sequences.{spec.layout.removesuffix('_packed')}(..., {dim}={size}))"
                )
        return
    wanted = f"{names[0]} in {sorted({1, rows})}, {names[1]} in {sorted({1, columns})}"
    if heads is not None:
        wanted = f"heads in {sorted({1, *heads})}, {wanted}"
    if packing == "none":
        wanted = f"sequences in {sorted(batch)}, {wanted}"
    dims = ("sequences, " if packing == "none" else "") + f"heads, {names[0]}, {names[1]}"
    raise ValueError(f"{name} has shape {_own(shape, packing)}, read as ({dims}); it needs {wanted}")


def check_tree(shape: Sequence[int], spec: SequenceSpec) -> None:
    """Refuse a tree mask (S or 1, n, n) that was made for other sequences."""
    number, tokens, _ = shape
    if not spec.names_max[0]:
        raise ValueError(
            f"mask is a TreeMask of {tokens} new tokens; it needs max_seqlen_q, which the sequences do not name "
            f"(Sequences.{spec.layout.removesuffix('_packed')}(..., max_seqlen_q={tokens}))"
        )
    if tokens != spec.max_seqlen_q:
        raise ValueError(
            f"mask is a TreeMask of {tokens} new tokens; it needs max_seqlen_q of them, {spec.max_seqlen_q}"
        )
    if number not in (1, spec.number):
        raise ValueError(f"mask is a TreeMask of {number} sequences; it needs 1 or {spec.number}")


def check_sequence_tiles(prepared: SequenceSpec, mask_heads: int, spec: SequenceSpec, heads: tuple[int, int]) -> None:
    """Refuse a mask with tiles that was prepared for calls of other sizes.

    Args:
        prepared: the sequences that it was prepared for.
        mask_heads: how many heads it has.
        spec: the sequences of the call.
        heads: how many q has, and k.
    """
    # The first six fields of both.
    names = ("the layout", "sequences", "seqlen_q", "seqlen_k", "max_seqlen_q", "max_seqlen_k")
    for name, has, needs in zip(names, prepared, spec):
        if has != needs:
            raise ValueError(f"mask was prepared for {name} {has}; it needs that of the call, {needs}")
    if mask_heads not in (1, *heads):
        raise ValueError(f"mask was prepared with {mask_heads} heads; it needs one of {sorted({1, *heads})}")


def _own(shape: Sequence[int], packing: Packing) -> tuple[int, ...]:
    return tuple(shape) if packing == "none" else tuple(shape[1:])
