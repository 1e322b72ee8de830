"""Packed sequences that a data collator or a vision tower describes: cu_seq_lens_q and what comes with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import Sequences

_NAMES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def take_packed(arguments: dict[str, Any], batch: int) -> Sequences | None:
    """Take the four arguments out of the others; the sequences that they describe, or None where there are none.

    Args:
        arguments: of the attention function; what is taken is removed.
        batch: of q.

    Raises:
        ValueError: the batch has more rows than one, or keys have limits and queries none.
    """
    limits_q, limits_k, longest_q, longest_k = (arguments.pop(name, None) for name in _NAMES)
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


# Every layer passes the same tensors, and what is known of them is made once. One pair is kept, of a few numbers.
_last: tuple[tuple[Any, ...], Sequences] | None = None


def _remembered(limits_q: Tensor, limits_k: Tensor, longest_q: Any, longest_k: Any) -> Sequences:
    global _last
    # Tensors of inference mode do not say when they change.
    if torch.compiler.is_compiling() or limits_q.is_inference() or limits_k.is_inference():
        return _packed(limits_q, limits_k, longest_q, longest_k)
    key = (limits_q, limits_q._version, limits_k, limits_k._version, longest_q, longest_k)
    last = _last
    if last is not None and all(x is y or (isinstance(x, int) and x == y) for x, y in zip(last[0], key, strict=True)):
        return last[1]
    found = _packed(limits_q, limits_k, longest_q, longest_k)
    _last = (key, found)
    return found


def _packed(limits_q: Tensor, limits_k: Tensor, longest_q: Any, longest_k: Any) -> Sequences:
    return Sequences.packed(limits_q, limits_k, max_seqlen_q=_bound(longest_q), max_seqlen_k=_bound(longest_k))


def _bound(longest: Any) -> int | None:
    """A bound on lengths as an int; it changes no result, so in a compiled graph a tensor is left out."""
    if isinstance(longest, Tensor):
        return None if torch.compiler.is_compiling() else int(longest)
    return longest
