"""Checks of single arguments, and of the shapes of masks and biases; builders of masks share them."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor

from ..definition import is_mapped
from .description import Layout, Packing, SequenceSpec, dtype_name

P = ParamSpec("P")
T = TypeVar("T")

# Dimensions of q, and of k and v, in each layout.
RANKS: dict[Layout, tuple[int, int]] = {"packed": (3, 3), "padded": (4, 4), "paged": (4, 4), "paged_packed": (3, 4)}
# Names that other libraries give to an argument, and what to write here.
OTHER_NAMES = {
    **dict.fromkeys(("causal", "use_causal_mask"), "is_causal="),
    **dict.fromkeys(("scale", "sm_scale", "scaling"), "softmax_scale="),
    **dict.fromkeys(("attn_bias", "score_bias", "position_bias"), "bias="),
    **dict.fromkeys(("logits_soft_cap", "softcapping", "logit_cap"), "softcap="),
    **dict.fromkeys(("window", "sliding_window", "local_window_size"), "window_size=(left, right)"),
    **dict.fromkeys(("dropout", "attention_dropout", "p"), "dropout_p="),
    **dict.fromkeys(("sinks", "s_aux", "learnable_sink"), "sink="),
    **dict.fromkeys(("return_softmax_lse", "return_softmax"), "return_lse="),
    **dict.fromkeys(
        ("need_weights", "return_attn_probs", "output_attentions"), 'return_probs= with backend="reference"'
    ),
    **dict.fromkeys(("key_padding_mask", "attention_mask"), "mask=masks.padding_mask(...)"),
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"), "sequences=Sequences.packed(...)"),
    **dict.fromkeys(("cache_seqlens", "seqused_k"), "sequences=Sequences.padded(...)"),
    **dict.fromkeys(("block_table", "page_table"), "sequences=Sequences.paged(...)"),
    "attn_mask": "mask= where it is bool, bias= where it is added to scores",
    "block_mask": "mask=PreparedMask.from_mask_mod(...)",
    "enable_gqa": "nothing: the heads of k may always be fewer",
    "training": "dropout_p=0.0 where it is False",
}
_MOST = torch.finfo(torch.float32).max  # of what kernels and torch compute with
_FAR = 2**62
# By argument: its type, its least and its greatest value, and these in words.
_NUMBERS = {
    "softmax_scale": ("a number or None", -_MOST, _MOST, "finite in float32"),
    "scale": ("a number or None", -_MOST, _MOST, "finite in float32"),
    "softcap": ("a number, 0.0 for none", 0.0, _MOST, "finite in float32 and at least 0 (0 is off)"),
    "dropout_p": ("a number from 0 to 1, 0.0 for none", 0.0, 1.0, "a probability, from 0 to 1"),
}


def refuse_keywords(call: Callable[..., object], unknown: Mapping[str, object], like: Any = None) -> NoReturn:
    """Refuse keywords that a call, or a function whose keywords it takes, does not have; name the right ones."""
    name = next(iter(unknown))
    parameters = {**inspect.signature(like or call).parameters, **inspect.signature(call).parameters}
    names = [known for known, x in parameters.items() if x.kind is not x.VAR_KEYWORD]
    close = difflib.get_close_matches(name, names, 1)
    if name in OTHER_NAMES:
        hint = f"write {OTHER_NAMES[name]}"
    else:
        hint = f"did you mean {close[0]}?" if close else f"it takes {', '.join(names)}"
    raise TypeError(f"{call.__name__}() got an unexpected keyword argument {name!r}; {hint}")


def keywords_only(function: Callable[P, T]) -> Callable[P, T]:
    """Refuse positional arguments of a function that has keywords alone, and name these."""
    code = inspect.unwrap(function).__code__
    names = " or ".join(f"{name}=..." for name in code.co_varnames[: code.co_kwonlyargcount])

    @functools.wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> T:
        if arguments:
            raise TypeError(f"{function.__qualname__}() has an argument without a name; it needs names: write {names}")
        return function(*arguments, **keywords)

    return call


def arguments_like(like: Callable[..., object], call: Callable[..., object], **passed: object) -> dict[str, Any]:
    """Return the arguments of a call that has the parameters of another function, defaults included."""
    bound = inspect.signature(like).bind(**passed)
    bound.apply_defaults()
    unknown = bound.arguments.pop("unknown")
    if unknown:
        refuse_keywords(call, unknown, like)
    return bound.arguments


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


def check_type(name: str, x: object, kind: type, needs: str) -> None:
    """Refuse what is not of a type; `needs` is what the argument needs to be."""
    if not isinstance(x, kind):
        raise TypeError(f"{name} is a {type(x).__name__}; it needs to be {needs}")


def check_tensor(name: str, x: object, needs: str = "a torch.Tensor") -> None:
    """Refuse what is no tensor."""
    check_type(name, x, Tensor, needs)


def check_floats(name: str, x: object, advice: str = "") -> None:
    """Refuse what is no tensor of floats; the advice is the end of the message of a wrong dtype."""
    check_tensor(name, x, "a floating-point torch.Tensor")
    if isinstance(x, Tensor) and not x.is_floating_point():
        raise TypeError(f"{name} has dtype {dtype_name(x.dtype)}; it needs a floating-point dtype{advice}")


def check_dtype(name: str, x: Tensor, dtype: torch.dtype, of: str = "q") -> None:
    """Refuse a tensor of another dtype than the tensor named `of` has."""
    if x.dtype != dtype:
        raise TypeError(f"{name} has dtype {dtype_name(x.dtype)}; it needs that of {of}, {dtype_name(dtype)}")


def check_device(name: str, own: torch.device, device: torch.device, of: str = "q") -> None:
    """Refuse a tensor that is on another device than the argument named `of`."""
    if own != device:
        raise ValueError(f"{name} is on {own}; it needs to be on the device of {of}, {device}")


def check_flag(name: str, value: Any) -> bool:
    """Refuse anything but a bool, so that a tensor or a string never silently counts as True."""
    if value is True or value is False:
        return bool(value)
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):  # the latter up to NumPy 1
        return bool(value)
    raise TypeError(f"{name} is {value!r}; it needs to be True or False")


def check_number(name: str, value: Any) -> float:
    """Return a number of `_NUMBERS` as a float; refuse NaN and values out of range."""
    kind, least, most, needs = _NUMBERS[name]
    given: object = value
    if isinstance(given, torch.SymFloat):
        advice = "; multiply q by it and pass softmax_scale=1.0" if name == "softmax_scale" else ""
        raise TypeError(f"{name} is made of a dynamic length, and torch.export keeps numbers of a call{advice}")
    is_number = isinstance(value, (int, float, Real)) and not isinstance(value, bool)  # Real: the numbers of NumPy
    if not is_number:
        raise TypeError(f"{name} is a {type(value).__name__}; it needs to be {kind}")
    if not least <= value <= most:  # not isfinite: torch.compile cannot trace it with dynamic floats
        raise ValueError(f"{name} is {value}; it needs to be {needs}")
    return float(value)


def check_softcap(softcap: float, softmax_scale: float | None) -> float:
    """Return a softcap by which scaled scores can be divided in float32; the default scale is at most 1."""
    softcap = check_number("softcap", softcap)
    largest = 2.0 if softmax_scale is None else max(abs(softmax_scale), 2.0)
    if softcap > 0.0 and not largest <= softcap * _MOST:
        raise ValueError(
            f"softcap is {softcap} with softmax_scale {softmax_scale}; it needs to be larger, because scores are "
            "divided by it in float32 (0 is off)"
        )
    return softcap


def is_int(x: object) -> bool:
    """Return whether x is an int: a size that a compiler has a symbol for, or a number of NumPy, too; not a bool."""
    return isinstance(x, (int, torch.SymInt, Integral)) and not isinstance(x, bool)


def bounded(x: int) -> int:
    """Clamp an int that is added to positions if it is past all of them, so that sums do not overflow 64 bits."""
    x = x if isinstance(x, (int, torch.SymInt)) else int(x)
    return x if -_FAR < x < _FAR else (_FAR if x > 0 else -_FAR)


def check_window(window_size: tuple[int, int] | None) -> tuple[int, int]:
    """Return the window as (left, right), -1 for an unlimited side; None is (-1, -1)."""
    if window_size is None:
        return (-1, -1)
    if not (isinstance(window_size, (tuple, list)) and len(window_size) == 2):
        raise TypeError(f"window_size is {window_size!r}; it needs to be None or a pair (left, right) of ints")
    left, right = window_size
    for side in (left, right):
        if not is_int(side):
            raise TypeError(f"window_size is {window_size!r}; both sides need to be ints, -1 for unlimited")
        if side < -1:
            raise ValueError(f"window_size is {window_size!r}; both sides need to be at least -1 (-1 is unlimited)")
    return (bounded(left), bounded(right))


def values_can_be_read(x: Tensor) -> bool:
    """Return whether values may be read to check them: without a wait for a GPU or a broken graph, and if any exist.

    Fake tensors claim to be on a CPU. They are a subclass, as are other tensors whose values are elsewhere. Below
    `torch.vmap` a tensor has the values of all calls.
    """
    is_plain = type(x) is Tensor or type(x) is torch.nn.Parameter
    return is_plain and x.device.type == "cpu" and not torch.compiler.is_compiling() and not is_mapped(x)


def counts_changes(x: Tensor) -> bool:
    """Return whether `x._version` changes with the values: not in inference mode or memory of NumPy or a process."""
    if x.is_inference() or x.device.type != "cpu":
        return not x.is_inference()
    storage = x.untyped_storage()
    return storage.resizable() and not storage.is_shared()


def as_scores(x: Tensor) -> Tensor:
    """View a mask or a bias of 2, 3 or 4 dimensions, read from the right, as (batch, heads, seqlen_q, seqlen_k)."""
    dims = x.dim()
    return x if dims == 4 else x[None] if dims == 3 else x[None, None]


def batch_names(number: int) -> tuple[str, ...]:
    """Name the dims in front for messages: batch if there is one, else by their number.

    >>> batch_names(1), batch_names(2)
    (('batch',), ('batch dim 0', 'batch dim 1'))
    """
    return ("batch",) if number == 1 else tuple(f"batch dim {dim}" for dim in range(number))


def check_broadcast(name: str, shape: Sequence[int], sizes: Sequence[int], num_heads_k: int) -> None:
    """Refuse a mask or bias shape that does not broadcast to (*batch, heads, seqlen_q, seqlen_k) of as many dims."""
    *batch, num_heads, seqlen_q, seqlen_k = sizes
    allowed = (*[(1, size) for size in batch], (1, num_heads_k, num_heads), (1, seqlen_q), (1, seqlen_k))
    if _fits(shape, allowed):
        return
    names = (*batch_names(len(batch)), "heads", "seqlen_q", "seqlen_k")
    advice = ""
    tail, rest = tuple(shape[-1 - len(batch) :]), shape[: -1 - len(batch)]
    if tail[-2:] == (batch[-1], seqlen_k) and all(n == 1 for n in rest):
        if name == "mask" and len(batch) == 1:
            advice = "; padding of (batch, seqlen_k) is masks.padding_mask(mask)"
        elif _fits(tail, (*allowed[: len(batch)], allowed[-1])):
            advice = f"; padding of (*batch, seqlen_k) is {name}[..., None, None, :]"
    elif _fits(shape, (*allowed[:-3], *allowed[-2:], allowed[-3])):
        advice = f"; it fits with its heads before its positions: {name}.movedim(-1, -3)"
    elif len(batch) > 1 and shape[0] == 1 and _fits((*shape[1 : len(batch)], 1, *shape[len(batch) :]), allowed):
        advice = f"; it fits with a batch dim of 1 before its heads: {name}.unsqueeze(-4)"
    if _fits(shape, (*allowed[:-3], (1, seqlen_k, seqlen_q), (1, num_heads), (1, num_heads_k))):
        advice = "; it fits if heads come first in q, k and v: pass q.transpose(-2, -3), and so k and v"
    raise ValueError(_misfit(name, shape, names, allowed) + advice)


def check_values(
    shape: Sequence[int], sizes: Sequence[int], num_heads_k: int, rows: tuple[int, ...], places: int | None = None
) -> None:
    """Refuse values (*batch, heads, rows, n), for n distances or entries of lists, that do not match the call.

    `rows` has the valid numbers of rows; () if the values are for all queries and the caller passed no such dim.
    """
    *batch, num_heads = sizes
    last = ("seqlen_q", "distances") if places is None else ("queries or lists", "entries of a list")
    names: tuple[str, ...] = (*batch_names(len(batch)), "heads", *last)
    fits = (rows, () if places is None else (places,))
    allowed: tuple[tuple[int, ...], ...] = (*[(1, n) for n in batch], (1, num_heads_k, num_heads), *fits)
    if not rows:
        shape, names, allowed = ((*x[:-2], x[-1]) for x in (shape, names, allowed))
    if not _fits(shape, allowed):
        raise ValueError(_misfit("bias.values", shape, names, allowed))


def find_packing(name: str, shape: Sequence[int], spec: SequenceSpec) -> Packing:
    """Return which dim of a mask or a bias is packed, by its rank, and at rank 3 by its number of rows.

    With one query token a row may be either: it is packed keys unless it has max_seqlen_k columns and k has not.
    """
    if len(shape) == 4:
        return "none"
    if len(shape) == 3 and spec.packs_queries:
        is_one_row = shape[1] == 1 != shape[2] and spec.packs_keys
        is_query = is_one_row and spec.rows_q == 1 and shape[2] != spec.rows_k and shape[2] == spec.max_seqlen_k
        return "keys" if is_one_row and not is_query else "queries"
    forms = ["4 dimensions, (sequences, heads, max_seqlen_q, max_seqlen_k)"]
    if spec.packs_queries:
        forms.append("3, (heads, queries of all sequences, max_seqlen_k)")
    if spec.packs_keys:
        forms.append("or (heads, 1, keys of all sequences)")
    raise ValueError(
        f"{name} has {len(shape)} dimensions, shape {tuple(shape)}; with sequences it needs {', '.join(forms)}"
    )


def check_scores(
    name: str, shape: Sequence[int], packing: Packing, spec: SequenceSpec, heads: tuple[int, int] | None
) -> None:
    """Refuse a 4-D mask or bias that does not match sequences; `heads`: of q and k, None without a call."""
    first, by_position = 0 if packing == "none" else 1, ("max_seqlen_q", "max_seqlen_k")
    names: tuple[str, ...] = ("sequences", "heads", *by_position)
    rows: tuple[int, ...] = (1, spec.max_seqlen_q)
    keys = (1, spec.max_seqlen_k)
    if packing == "queries":
        names, rows = ("", "heads", "queries of all sequences", "max_seqlen_k"), (1, spec.rows_q)
    elif packing == "keys":
        names, rows, keys = ("", "heads", "1", "keys of all sequences"), (), (1, spec.rows_k)
    allowed: tuple[tuple[int, ...], ...]
    allowed = ((1, spec.number) if packing == "none" else (1,), () if heads is None else (1, *heads), rows, keys)
    unnamed = [
        f"{dim}={size}"
        for size, is_named, dim in zip(shape[2:], spec.names_max, names[2:], strict=True)
        if dim in by_position and size > 1 and not is_named
    ]
    # The error does not mention a dim without a name until all other dims are valid.
    without = {x.partition("=")[0] for x in unnamed}
    fits = tuple(() if dim in without else sizes for dim, sizes in zip(names, allowed, strict=True))
    if not _fits(shape, fits):
        advice = "" if packing == "none" else f"; by position in each sequence it has 4 dimensions, {name}[None]"
        raise ValueError(_misfit(name, shape[first:], names[first:], fits[first:]) + advice)
    if unnamed:
        call = f"Sequences.{spec.layout.removesuffix('_packed')}(..., {', '.join(unnamed)})"
        raise ValueError(
            f"{name} has shape {tuple(shape[first:])}, read as ({', '.join(names[first:])}); it needs "
            f"{' and '.join(x.partition('=')[0] for x in unnamed)}, which the sequences do not name ({call})"
        )


def _fits(shape: Sequence[int], allowed: Sequence[tuple[int, ...]]) -> bool:
    """Return whether each dim has one of its allowed sizes; () allows any."""
    for size, sizes in zip(shape, allowed, strict=True):
        # A loop, because Dynamo does not support `in` for symbols.
        if sizes and not any([size == one for one in sizes]):
            return False
    return True


def _misfit(name: str, shape: Sequence[int], dims: Sequence[str], allowed: Sequence[tuple[int, ...]]) -> str:
    """Return a message with the sizes that the dims of a shape may have."""
    wanted = [f"{dim} in {{{', '.join(map(str, sorted({*n})))}}}" for dim, n in zip(dims, allowed, strict=True) if n]
    return (
        f"{name} has shape {tuple(shape)}, read as ({', '.join(dims)}); it needs "
        f"{', '.join(wanted[:-1])} and {wanted[-1]}"
    )
