"""What `torch.load` calls to make a prepared mask again, also with `weights_only=True`, its default.

It stands apart from the classes, which are imported on first use: a file of a mask can be read by a program that has
only imported `flash_dmattn`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from . import PreparedMask


def restore(
    form: Literal["tiles", "keys"],
    seqlen_q: int,
    seqlen_k: int,
    is_causal: bool,
    window_size: tuple[int, int],
    *tensors: torch.Tensor,
) -> PreparedMask:
    """A prepared mask of its fields, as `PreparedMask.__reduce__` writes them.

    Raises:
        ValueError: the form is neither "tiles" nor "keys".
    """
    if form not in ("tiles", "keys"):
        raise ValueError(f"form is {form!r}; a prepared mask has the form 'tiles' or 'keys'")
    from . import KeyMask, TileMask

    if form == "tiles":
        return TileMask(seqlen_q, seqlen_k, is_causal, window_size, *tensors)
    return KeyMask(seqlen_q, seqlen_k, is_causal, window_size, *tensors)


torch.serialization.add_safe_globals([restore])
