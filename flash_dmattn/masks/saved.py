"""What `torch.load` calls to make a prepared mask again, also with `weights_only=True`, its default.

It stands apart from the classes, which are imported on first use: a file of a mask can be read by a program that has
only imported `flash_dmattn`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..problem import SequenceSpec

if TYPE_CHECKING:
    from ..sequences.layout import Sequences
    from . import PreparedMask, SequenceTileMask, TreeMask


def restore(
    form: Literal["tiles", "keys", "intervals"],
    seqlen_q: int,
    seqlen_k: int,
    is_causal: bool,
    window_size: tuple[int, int],
    *tensors: torch.Tensor,
) -> PreparedMask:
    """A prepared mask of the fields without which there is none.

    Raises:
        ValueError: there is no prepared mask of that form.
    """
    from . import IntervalMask, KeyMask, TileMask

    types: dict[str, type[PreparedMask]] = {"tiles": TileMask, "keys": KeyMask, "intervals": IntervalMask}
    if form not in types:
        raise ValueError(f"form is {form!r}; a prepared mask has the form 'tiles', 'keys' or 'intervals'")
    return types[form](seqlen_q, seqlen_k, is_causal, window_size, *tensors)


def restore_with(others: dict[str, Any], *fields: Any) -> PreparedMask:
    """The same with the other fields, as `PreparedMask.__reduce__` writes them."""
    return dataclasses.replace(restore(*fields), **others)


def restore_leading(leading: tuple[int, ...], *fields: Any) -> PreparedMask:
    """As masks with leading dims were saved before `one_row`."""
    return restore_with({"leading": tuple(leading)}, *fields)


def restore_tree(bits: torch.Tensor) -> TreeMask:
    """A tree mask of its field."""
    from . import TreeMask

    return TreeMask(bits)


def restore_sequence_tiles(
    sequences: Sequences, spec: tuple[Any, ...], is_causal: bool, window_size: tuple[int, int], *tensors: torch.Tensor
) -> SequenceTileMask:
    """A mask beside sequences of its fields."""
    from . import SequenceTileMask

    return SequenceTileMask(sequences, SequenceSpec(*spec), is_causal, window_size, *tensors)


torch.serialization.add_safe_globals([restore, restore_with, restore_leading, restore_tree, restore_sequence_tiles])
