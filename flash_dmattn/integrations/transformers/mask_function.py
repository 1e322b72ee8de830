"""The mask function of "dmattn": padding and a rule in the place of a mask for each pair of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...distributed.group import context_in_force
from .interface import refuse_config_without_interface
from .layer_mask import LayerMask
from .mask_rules import Rule, read_rule, rule_of_flags
from .versions import MODELS_ASK_FOR_TENSORS, masking_utils


def make_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int | None = None,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str | None = None,
    cache_position: Tensor | None = None,
    **others: Any,
) -> LayerMask | Tensor | None:
    """What transformers calls, once a forward, for the mask that all layers of a kind receive.

    Args:
        batch_size, q_length, kv_length: B, Lq and Lk.
        q_offset, kv_offset: the position of the first query and of the first key; tensors of static caches.
        mask_function: of positions (batch, head, query, key).
        attention_mask: (B, at most Lk + kv_offset) padding, bool, or None.
        allow_is_causal_skip, allow_is_bidirectional_skip: whether None may stand for a plain mask.
        use_vmap: whether somebody has laid a function of their own over it.
        device: where the mask has to be.
        cache_position: (Lq,), the positions of the queries, in the place of q_length and q_offset before 5.4.

    Returns:
        None where causality alone says all there is to say and Lq == Lk, or nothing is forbidden; a `LayerMask` where
        a rule describes it; else the bool tensor (B, 1, Lq, Lk) of transformers' own function for SDPA.

    Raises:
        NotImplementedError: the model has no attention interface, so that its own code would misread the result.
    """
    refuse_config_without_interface(others.get("config"))
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; it needs 2 dims, (batch, keys), or 4, "
            "(batch, heads or 1, queries, keys)"
        )
    given: dict[str, Any] = {"batch_size": batch_size, "kv_length": kv_length, "kv_offset": kv_offset, **others}
    given |= {"mask_function": mask_function, "attention_mask": attention_mask, "use_vmap": use_vmap}
    if cache_position is None:
        given |= {"q_length": q_length, "q_offset": q_offset, "device": device}
    else:
        given["cache_position"] = cache_position
        q_length, device = cache_position.shape[0], cache_position.device
        q_offset = _offset_of(cache_position, kv_length)
    assert q_length is not None and kv_length is not None
    may_skip = (allow_is_causal_skip, allow_is_bidirectional_skip)

    rule = _rule(mask_function, use_vmap, q_length, may_skip, others)
    used = _used_keys(rule, q_length, kv_length, q_offset, kv_offset) if rule is not None else None
    if rule is None or used is _MISALIGNED:
        # None only where Lq and Lk are equal, or it would have to be guessed how they are aligned.
        given["allow_is_causal_skip"] = allow_is_causal_skip and q_length == kv_length
        return masking_utils.sdpa_mask(**given, allow_is_bidirectional_skip=allow_is_bidirectional_skip)
    window = rule.window
    if window is not None and max(window) >= kv_length - 1 and context_in_force() is None:
        window = None  # it reaches every key; of a context there are more than these, on other ranks
    padding = _padding(attention_mask, kv_length, kv_offset, used)
    if padding is None and rule.documents is None and window is None and used is None:
        if (allow_is_causal_skip and q_length == kv_length) if rule.is_causal else allow_is_bidirectional_skip:
            return None
    shape = (batch_size, 1, q_length, kv_length)
    return LayerMask(shape, padding, rule.documents, rule.is_causal, window, used, device)


_MISALIGNED = -1


def _offset_of(cache_position: Tensor, kv_length: int | None) -> int | Tensor:
    """The position of the first query; read, which waits for the device, only where nothing else tells it."""
    if cache_position.shape[0] == kv_length:
        return 0
    return cache_position[0] if torch.compiler.is_compiling() else int(cache_position[0])


def _rule(
    function: Callable[..., Any], use_vmap: bool, q_length: int, may_skip: tuple[bool, bool], others: dict[str, Any]
) -> Rule | None:
    if use_vmap:
        return None
    if torch.compiler.is_compiling():
        rule = rule_of_flags(function, others.get("config"), others.get("local_size"), *may_skip)
    else:
        rule = read_rule(function)
    if rule is None or not MODELS_ASK_FOR_TENSORS or q_length == 1 or rule.documents is not None:
        return rule
    # A model that lets nothing be skipped indexes its mask, or adds another one to it.
    return rule if may_skip[0 if rule.is_causal else 1] else None


def _used_keys(
    rule: Rule, q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int | Tensor
) -> int | Tensor | None:
    """How many keys there are up to the last query: None for all of them, _MISALIGNED where no argument says it."""
    if not rule.is_causal and rule.window is None:
        return None
    used = q_offset + q_length - kv_offset
    if isinstance(used, Tensor):
        return used if rule.is_causal else _MISALIGNED
    if used == kv_length:
        return None
    return used if rule.is_causal and 0 < used < kv_length else _MISALIGNED


def _padding(
    attention_mask: Tensor | None, kv_length: int, kv_offset: int | Tensor, used: int | Tensor | None
) -> Tensor | None:
    """(B, 1, 1, Lk), or None where it forbids nothing; finding that out waits for the device, as SDPA's mask does."""
    if attention_mask is None:
        return None
    missing = kv_length + kv_offset - attention_mask.shape[-1]
    padding = attention_mask
    if missing > 0:
        padding = functional.pad(padding, (0, missing))  # type: ignore[arg-type]
    index = torch.arange(kv_length, device=padding.device)
    if isinstance(kv_offset, Tensor):
        padding = padding[:, index + kv_offset]
    else:
        padding = padding[:, kv_offset : kv_offset + kv_length]
    padding = padding.to(torch.bool)
    if not torch.compiler.is_compiling():
        seen = padding if used is None else padding | (index >= used)
        if bool(seen.all()):
            return None
    return padding[:, None, None, :]
