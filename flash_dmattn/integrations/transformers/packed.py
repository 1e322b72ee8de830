"""Packed sequences that a data collator or a vision tower describes: cu_seq_lens_q and what comes with it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ... import Sequences

PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def take_packed(arguments: dict[str, Any], batch: int) -> Sequences | None:
    """Take the four arguments out of the others; the sequences that they describe, or None where there are none.

    Args:
        arguments: of the attention function; what is taken is removed.
        batch: of q.

    Raises:
        ValueError: the batch has more rows than one, or keys have limits and queries none.
    """
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
    return _remembered(limits_q, limits_k, longest_q, longest_k)


# Every layer passes the same tensors, and what is known of them is made once; of the last pair, while it lives.
_last: tuple[list[weakref.ref[Tensor]], tuple[Any, ...], Sequences] | None = None


def _remembered(limits_q: Tensor, limits_k: Tensor, longest_q: Any, longest_k: Any) -> Sequences:
    global _last
    given = (limits_q, limits_k, longest_q, longest_k)
    tensors = [x for x in given if isinstance(x, Tensor)]
    # Tensors of inference mode do not say when they change.
    if torch.compiler.is_compiling() or any(x.is_inference() for x in tensors):
        return _packed(*given)
    key = tuple(x._version if isinstance(x, Tensor) else x for x in given)
    last = _last
    if last is not None and last[1] == key and _are(last[0], tensors):
        return last[2]
    # Of aliases, since what is kept must not keep the tensors.
    alias = limits_q.detach()
    found = _packed(alias, alias if limits_k is limits_q else limits_k.detach(), longest_q, longest_k)
    _last = ([weakref.ref(x, _forget) for x in tensors], key, found)
    return found


def _are(refs: list[weakref.ref[Tensor]], tensors: list[Tensor]) -> bool:
    return len(refs) == len(tensors) and all(ref() is x for ref, x in zip(refs, tensors, strict=True))


def _forget(gone: weakref.ref[Tensor]) -> None:
    global _last
    if _last is not None and any(ref is gone for ref in _last[0]):
        _last = None


def _packed(limits_q: Tensor, limits_k: Tensor, longest_q: Any, longest_k: Any) -> Sequences:
    return Sequences.packed(limits_q, limits_k, max_seqlen_q=_bound(longest_q), max_seqlen_k=_bound(longest_k))


def _bound(longest: Any) -> int | None:
    """A bound on lengths as an int; it changes no result, so in a compiled graph a tensor is left out."""
    if isinstance(longest, Tensor):
        return None if torch.compiler.is_compiling() else int(longest)
    return longest
