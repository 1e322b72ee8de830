"""The attention function of "dmattn": converts the arguments of a transformers layer to a call of `attention`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ... import Sequences, attention
from ...biases import Bias
from ...caches import TensorCache
from ...call import prepare_call, run_call
from ...definition import is_of_transform
from ...distributed import SequenceLayout, context_parallel_attention
from ...distributed.group import InContext, context_in_force, groups_of, refuse_together
from ...masks.split import separate
from ...problem import RawFlags, check_tensor, collapse, counts_changes, dtype_name
from ...validation import follow_autocast
from .mask_function import LayerMask, MaskArguments
from .models import TableBias, is_called_without, is_captured, makes_zeros

# Arguments that every attention function gets, and that do not matter here: the mask, the rotation of queries and keys,
# and the outputs of a model are computed elsewhere.
_HARMLESS = {
    "cache_position",
    "labels",
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "seq_idx",
    "target_dtype",
    "use_cache",
}
_REFUSED = {
    "indices": "keys are chosen out of those that a bool attention_mask leaves, and there is none",
    "block_indices": "attention to chosen blocks alone is not passed on; use the model's own attn_implementation",
    "cache": 'a paged cache, of continuous batching, is not read; use attn_implementation="sdpa"',
    "output_attentions": (
        'probabilities are never made; use attn_implementation="eager", or flash_dmattn.attention(..., '
        'backend="reference", return_probs=True)'
    ),
    "head_mask": 'heads are not masked one by one; use attn_implementation="eager"',
}
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")

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
    position_bias: Tensor | TableBias | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    deterministic: bool | None = None,
    indices: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of a layer; every layer of a model calls it.

    Tensors are (B, H, L, D); heads of key and value are not repeated. `attention_mask` is the result of `make_mask`, a
    bool tensor, or a float tensor that is added to the scores; tensors are 4-D and broadcastable to (B, Hq, Lq, Lk).
    Without a mask the layer's `is_causal` counts.

    Args:
        position_bias: (B or 1, Hq, Lq, Lk) or a `TableBias`, added to the scores, with its gradient.
        s_aux: (Hq,), an attention sink, with its gradient.
        sliding_window: the window that the mask should have; refused if it hides keys that the mask does not hide.
        deterministic: True as in `attention`; False, the default of models, follows torch as None does.
        indices: (B, Lq, k), integers: the keys that each query has chosen; a bool `attention_mask` may hide some.
        others: `cu_seq_lens_q` and the other names in `PACKED`; names in `_HARMLESS` are ignored, others refused.

    Returns:
        (B, Lq, Hq, Dv), and None instead of probabilities.
    """
    sequences, context = None, context_in_force()
    if others:
        sequences = take_packed(others, query.shape[0])
        refuse_unknown(module, others)
    if indices is not None:
        attention_mask = _restrict(module, indices, attention_mask)
    _check_masks(attention_mask, position_bias, query.shape[2], key.shape[2])
    mask, bias, table = _split_masks(module, attention_mask, position_bias, query.shape[2], key.shape[2])
    is_causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if sequences is not None:
        values = bias if table is None else table.values
        arguments = _packed_arguments(sequences, attention_mask, values, is_causal)
    elif isinstance(attention_mask, LayerMask):
        first = attention_mask.first_keys() if context is None else None
        if first is None:
            arguments = attention_mask.arguments(bias is not None or table is not None)
        else:
            arguments, keys = first
            key, value, bias = _first_keys(key, value, bias, keys)
    elif attention_mask is not None:
        arguments = MaskArguments(mask)
    else:
        arguments = MaskArguments(is_causal=is_causal and (query.shape[2] > 1 or context is not None))
        if arguments.is_causal and query.shape[2] != key.shape[2]:
            _check_top_left(query.shape[2], key.shape[2])
            key, value, bias = _first_keys(key, value, bias, query.shape[2])
    if sliding_window is not None and not isinstance(attention_mask, Tensor):
        _refuse_forgotten_window(sliding_window, attention_mask, arguments, key.shape[2])
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(query.device.type):
        query, key, value = follow_autocast(query, key, value)
    added: Bias | None = None if bias is None else in_dtype(bias, query.dtype)
    if table is not None:
        added = table.relative(query.shape[2], key.shape[2])
    is_plain = context is None and arguments.sequences is None
    softcap, deterministic, sink = softcap or 0.0, deterministic or None, None if s_aux is None else s_aux.reshape(-1)
    call: dict[str, Any] = {}
    if _observers or not is_plain:
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if arguments.sequences is not None and arguments.sequences.layout == "packed":
            q, k, v = q.squeeze(0), k.squeeze(0), v.squeeze(0)
        call = {"q": q, "k": k, "v": v, **arguments._asdict(), "bias": added, "sink": sink, "softmax_scale": scaling}
        call |= {"softcap": softcap, "dropout_p": dropout, "deterministic": deterministic}
        show_observers(module, call)
    if is_plain:
        raw_flags = RawFlags(
            arguments.is_causal, scaling, softcap, arguments.window_size, deterministic, dropout_p=dropout
        )
        layer = prepare_call(query, key, value, arguments.mask, added, sink, None, raw_flags, heads_first=True)
        return run_call(layer, "auto")[0].contiguous(), None
    if context is None:
        out = attention(**call)
    else:
        out = attend_over_ranks(context, call, attention_mask, is_packed=sequences is not None)
    assert isinstance(out, Tensor)
    return (out.unsqueeze(0) if call["q"].dim() == 3 else out).contiguous(), None


def _check_masks(
    attention_mask: Tensor | LayerMask | None, position_bias: Tensor | TableBias | None, seqlen_q: int, seqlen_k: int
) -> None:
    """Refuse masks and biases of another type or dtype, and masks for other lengths."""
    # An object of another type, such as a BlockMask, must not count as no mask.
    if attention_mask is not None and not isinstance(attention_mask, LayerMask):
        check_tensor("attention_mask", attention_mask)
    if position_bias is not None and not isinstance(position_bias, TableBias):
        check_tensor("position_bias", position_bias)
    if isinstance(attention_mask, Tensor):
        if attention_mask.dim() != 4:
            shape = tuple(attention_mask.shape)
            raise ValueError(
                f"attention_mask has shape {shape}; a layer needs 4 dims, (batch, heads or 1, queries, keys)"
            )
        if not attention_mask.is_floating_point() and attention_mask.dtype != torch.bool:
            dtype = dtype_name(attention_mask.dtype)
            raise TypeError(f"attention_mask has dtype {dtype}; with 4 dims it needs to be bool, or float to be added")
    elif attention_mask is not None and attention_mask.shape[2:] != (seqlen_q, seqlen_k):
        raise ValueError(
            f"attention_mask is for {attention_mask.shape[2]} queries and {attention_mask.shape[3]} keys; this layer "
            f"has {seqlen_q} and {seqlen_k}"
        )


def _split_masks(
    module: nn.Module,
    attention_mask: Tensor | LayerMask | None,
    position_bias: Tensor | TableBias | None,
    seqlen_q: int,
    seqlen_k: int,
) -> tuple[Tensor | None, Tensor | None, TableBias | None]:
    """Return the bool mask of a tensor, and the sum of a float mask and `position_bias`: a tensor or a table."""
    table = position_bias if isinstance(position_bias, TableBias) else None
    bias: Tensor | None = None
    if isinstance(position_bias, Tensor) and not _is_empty_bias(module, position_bias):
        bias = position_bias
    if not isinstance(attention_mask, Tensor):
        return None, bias, table
    if attention_mask.dtype == torch.bool:
        return attention_mask, bias, table
    mask, rest = _split_float_mask(attention_mask)
    if table is not None and rest is not None:
        bias, table = table.relative(seqlen_q, seqlen_k).dense(seqlen_q, seqlen_k), None
    return mask, rest if bias is None else bias if rest is None else bias + rest, table


def _first_keys(key: Tensor, value: Tensor, bias: Tensor | None, keys: int) -> tuple[Tensor, Tensor, Tensor | None]:
    return key[:, :, :keys], value[:, :, :keys], None if bias is None else bias[..., :keys]


def _check_top_left(seqlen_q: int, seqlen_k: int) -> None:
    """Check a causal call without a mask, in which transformers lets query i attend to keys up to i."""
    if seqlen_k < seqlen_q:
        raise ValueError(
            f"attention is causal without a mask, of {seqlen_q} queries and {seqlen_k} keys; it needs at least as many "
            "keys, or an attention_mask"
        )


# The arguments that may change the result, so `register` refuses to ignore them.
USED = {*inspect.signature(attend).parameters, *PACKED} - {"others"}


def attend_without(names: frozenset[str]) -> Callable[..., tuple[Tensor, None]]:
    """Make an `attend` that drops arguments with these names, which have no effect."""

    def attend_ignoring(*args: Any, **others: Any) -> tuple[Tensor, None]:
        return attend(*args, **{name: value for name, value in others.items() if name not in names})

    return attend_ignoring


def _restrict(module: nn.Module, indices: Tensor, mask: Tensor | LayerMask | None) -> Tensor:
    """Restrict a mask to chosen keys.

    The result is a dense mask and not a mask of lists, because the model has computed scores of all pairs anyway. Its
    heads are not grouped, and without groups tiles are faster than lists.
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        refuse_unknown(module, {"indices": indices})
    assert isinstance(mask, Tensor)
    chosen = mask.new_zeros((indices.shape[0], 1, indices.shape[1], mask.shape[-1]))
    return chosen.scatter_(3, indices.unsqueeze(1).long(), True) & mask


def _split_float_mask(mask: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Split a float mask into a bool mask and a bias, once for all layers.

    A learned mask is only a bias, and so is any mask in a graph, where values are unknown.
    """
    if torch.compiler.is_compiling() or (mask.requires_grad and torch.is_grad_enabled()):
        return None, mask
    return separate(mask)


def show_observers(module: nn.Module, call: dict[str, Any]) -> None:
    """Pass a call of `attention` that a module is about to make to all observers."""
    for observer in _observers:
        observer(module, call)


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Call `observer(module, arguments)` before every call of `attention`."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


_copies, _zeros, _limits = TensorCache(), TensorCache(), TensorCache()


def in_dtype(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a bias to the dtype of q, contiguous, once for all layers with the same bias.

    In T5 all layers of a stack have one bias, without unit stride. Expanded dims become size 1.
    """
    if bias.dtype == dtype and bias.is_contiguous():
        return bias

    def copied() -> Tensor:
        return collapse(bias, range(bias.dim())).to(dtype).contiguous()

    # Not cached for a leaf that needs a gradient, because its copy would keep it alive; nor in a compiler, which finds
    # equal expressions. A CUDA graph has to copy at each replay.
    if torch.compiler.is_compiling() or is_captured(bias) or (bias.is_leaf and bias.requires_grad):
        return copied()
    copy: Tensor = _copies.get((id(bias), dtype, torch.is_grad_enabled()), [bias], copied)
    return copy


def refuse_unknown(module: object, arguments: dict[str, Any]) -> None:
    """Refuse unknown arguments, which may change the result, with advice."""
    for name, value in arguments.items():
        if value is None or value is False or name in _HARMLESS:
            continue
        hint = _REFUSED.get(name)
        if hint is None:
            hint = (
                "nobody knows whether it changes the result; if it does not, say so with flash_dmattn.integrations."
                f'transformers.register(ignored_arguments=["{name}"]), which has to name all such arguments'
            )
        raise NotImplementedError(f"dmattn does not know {name}, which {type(module).__name__} passes: {hint}")


def take_packed(arguments: dict[str, Any], batch: int) -> Sequences | None:
    """Remove and return the arguments of packed sequences, which data collators and vision towers pass."""
    limits_q, limits_k, longest_q, longest_k = (arguments.pop(name, None) for name in PACKED)
    if limits_q is None:
        if limits_k is not None:
            raise ValueError("cu_seq_lens_k is given and cu_seq_lens_q is None; packed sequences need both")
        return None
    if batch != 1:
        raise ValueError(
            f"cu_seq_lens_q is given with a batch of {batch}; packed sequences need a batch of 1, one row of all tokens"
        )
    limits_k = limits_q if limits_k is None else limits_k
    for name, limits in (("cu_seq_lens_q", limits_q), ("cu_seq_lens_k", limits_k)):
        check_tensor(name, limits, "an int32 or int64 torch.Tensor")
    values = (limits_q, limits_k, longest_q, longest_k)
    tensors = [x for x in values if isinstance(x, Tensor)]
    if torch.compiler.is_compiling() or is_captured(longest_q, longest_k):
        return _packed(*values)

    def made() -> Sequences:
        # Aliases, because a kept value must not keep the caller's tensors alive.
        alias = limits_q.detach()
        return _packed(alias, alias if limits_k is limits_q else limits_k.detach(), longest_q, longest_k)

    # Cached, because all layers have the same tensors.
    key = tuple([id(x) if isinstance(x, Tensor) else x for x in values])
    sequences: Sequences = _limits.get(key, tensors, made)
    return sequences


def _packed(limits_q: Tensor, limits_k: Tensor, longest_q: Any, longest_k: Any) -> Sequences:
    return Sequences.packed(limits_q, limits_k, max_seqlen_q=_bound(longest_q), max_seqlen_k=_bound(longest_k))


def _bound(longest: Any) -> int | None:
    """Return a bound on lengths as an int; None for a tensor in a graph, because bounds do not change the result."""
    if isinstance(longest, Tensor):
        return None if torch.compiler.is_compiling() or is_captured(longest) else int(longest)
    return longest


def _is_empty_bias(module: nn.Module, bias: Tensor) -> bool:
    """Return whether the bias is the zeros (1, H, Lq, Lk) that T5 and similar models create for cross attention.

    Only modules with certain attributes can have them. Then values are checked, once for all layers with the same
    tensor, because that waits for the device. On a GPU the device asserts instead that they are 0, without a wait, if
    the source of the module shows that it creates zeros, and it was called without a bias. False for a bias that has a
    gradient, or for which values or changes are unknown.
    """
    no_table = getattr(module, "has_relative_attention_bias", None) is False
    if not no_table or not getattr(module, "is_decoder", False) or getattr(module, "is_causal", True):
        return False
    if torch.compiler.is_compiling() or bias.requires_grad or type(bias) is not Tensor:
        return False
    if bias.is_meta or is_of_transform(bias) or not counts_changes(bias):
        return False
    if is_captured(bias):
        return False

    def is_empty() -> bool:
        kind: type = type(module)
        if bias.is_cuda and makes_zeros(kind) and is_called_without(module, "position_bias"):
            torch._assert_async(~bias.any(), f"{kind.__name__} has a bias of cross attention other than 0")
            return True
        return not bool(bias.any())

    return bool(_zeros.get(id(bias), [bias], is_empty))


def _refuse_forgotten_window(
    sliding_window: int | tuple[int, int], mask: LayerMask | None, arguments: MaskArguments, seqlen_k: int
) -> None:
    """Refuse a window that is an argument of the layer and hides keys, if the mask does not have it."""
    if mask is not None and mask.window is not None:
        return
    sequences = arguments.sequences
    longest = seqlen_k if sequences is None or sequences.max_seqlen_k is None else sequences.max_seqlen_k
    width = sliding_window if isinstance(sliding_window, int) else max(sliding_window)
    if 0 < width < longest - (not arguments.is_causal):  # some two-sided windows count the query's position, too
        raise NotImplementedError(
            f"sliding_window is {sliding_window} and attention_mask, {mask}, has no window: of {longest} keys it would "
            "forbid some; use a mask of transformers' create_sliding_window_causal_mask, or sliding_window=None"
        )


def _packed_arguments(
    sequences: Sequences, mask: Tensor | LayerMask | None, bias: Tensor | None, is_causal: bool
) -> MaskArguments:
    """Make the arguments of a call with packed sequences; a mask adds causality, window and padding."""
    unfit = None
    if isinstance(mask, Tensor):
        unfit = f"attention_mask is a tensor of shape {tuple(mask.shape)}"
    elif mask is not None and mask.used is not None:
        unfit = "the keys are those of a static cache"
    elif mask is not None and mask.blocks is not None:
        unfit = "attention_mask has blocks, by positions of the whole row"
    elif bias is not None:
        unfit = f"there is a bias of shape {tuple(bias.shape)}, by positions of the whole row"
    if unfit is not None:
        raise ValueError(f"cu_seq_lens_q is given, and {unfit}, which does not go with it: leave out one of the two")
    if mask is None:
        return MaskArguments(None, is_causal, None, sequences)
    assert isinstance(mask, LayerMask)
    padding = None if mask.padding is None else mask.padding[0]  # (1, 1, Lk): packed keys have no batch dim
    return MaskArguments(padding, mask.is_causal, mask.window, sequences)


def attend_over_ranks(
    context: InContext, call: dict[str, Any], attention_mask: Tensor | LayerMask | None, is_packed: bool
) -> Tensor:
    """Attend from the positions of this rank to the keys of all ranks, in a `use_context_parallel` block.

    A `LayerMask` provides causality and window; a tensor has the rows of this rank, over all keys. Packed sequences,
    padding, documents and caches are refused, because they are known only for the positions of this rank.
    """
    call = dict(call)
    if isinstance(attention_mask, LayerMask) and not is_packed:
        try:
            _refuse_local(attention_mask, context.layout, context.rank)
        except NotImplementedError as error:
            refuse_together(groups_of(context.group), error)
        call |= {"mask": None, "is_causal": attention_mask.is_causal, "window_size": attention_mask.window}
        call["sequences"] = None
    out = context_parallel_attention(group=context.group, layout=context.layout, **call)
    assert isinstance(out, Tensor)
    return out


def _refuse_local(mask: LayerMask, layout: SequenceLayout, rank: int) -> None:
    unfit = [name for name in ("padding", "used", "blocks") if getattr(mask, name) is not None]
    if mask.documents is not None and not _are_intervals(mask.documents, layout, rank):
        unfit.append("documents")
    if unfit:
        raise NotImplementedError(
            f"attention_mask has {', '.join(unfit)} of this rank's tokens, and keys are on all ranks of "
            "use_context_parallel: pass a bool mask (batch, 1, rows of this rank, all keys)"
        )


def _are_intervals(documents: Tensor, layout: SequenceLayout, rank: int) -> bool:
    """Return whether documents are only the intervals of this rank, because transformers takes a gap for a new one."""
    device = documents.device
    lengths = torch.tensor([b - a for a, b in layout.intervals[rank]], dtype=torch.int64, device=device)
    number = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
    return documents.shape[1] == len(number) and bool((documents - documents[:, :1] == number).all())
