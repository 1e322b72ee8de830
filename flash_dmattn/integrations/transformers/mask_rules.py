"""What a mask function of transformers allows, read from its name and its closure instead of evaluated."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

from torch import Tensor

from .versions import masking_utils


class Rule(NamedTuple):
    """Causality, a window (left, right) around the query's own key, and the document (B, L) of each token."""

    is_causal: bool = False
    window: tuple[int, int] | None = None
    documents: Tensor | None = None


# What a function holds that one of these has made.
_HELD = {
    "sliding_window_overlay": {"sliding_window"},
    "sliding_window_bidirectional_overlay": {"sliding_window"},
    "packed_sequence_mask_function": {"packed_sequence_mask"},
    "remap_positions_for_packed_sequence": {"mask_function", "position_ids"},
    "and_masks": {"mask_functions"},
}


def read_rule(function: Callable[..., Any]) -> Rule | None:
    """The rule that a mask function stands for; None of one that is not known, which has to be evaluated.

    What closures hold has names that a version of transformers may change: a function that holds others is not known.
    """
    if function is masking_utils.causal_mask_function:
        return Rule(is_causal=True)
    if function is masking_utils.bidirectional_mask_function:
        return Rule()
    if not isinstance(function, FunctionType) or function.__module__ != masking_utils.__name__:
        return None  # a function of the same name elsewhere may mean something else
    maker, held = function.__qualname__.partition(".")[0], _closure(function)
    if held.keys() != _HELD.get(maker):
        return None
    if maker == "sliding_window_overlay":
        return Rule(window=(held["sliding_window"] - 1, -1))
    if maker == "sliding_window_bidirectional_overlay":
        return Rule(window=(held["sliding_window"], held["sliding_window"]))
    if maker == "packed_sequence_mask_function":
        return Rule(documents=held["packed_sequence_mask"])
    if maker == "remap_positions_for_packed_sequence":
        # Inside of a document positions differ as indices do, and other documents are forbidden by another function.
        return read_rule(held["mask_function"])
    return _all_of([read_rule(part) for part in held["mask_functions"]])


def rule_of_flags(
    function: Callable[..., Any],
    config: Any,
    local_size: int | None,
    allow_is_causal_skip: bool,
    allow_is_bidirectional_skip: bool,
) -> Rule | None:
    """The same under torch.compile, which does not show closures: from the flags that say nothing was laid over it."""
    if function is masking_utils.causal_mask_function or function is masking_utils.bidirectional_mask_function:
        return read_rule(function)
    if local_size is None or local_size != getattr(config, "sliding_window", None):
        return None
    if getattr(config, "attention_chunk_size", None) is not None:
        return None  # the size may be that of chunks
    if allow_is_causal_skip:
        return Rule(is_causal=True, window=(local_size - 1, -1))
    return Rule(window=(local_size, local_size)) if allow_is_bidirectional_skip else None


def _closure(function: FunctionType) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def _all_of(parts: list[Rule | None]) -> Rule | None:
    """The rule of several that all have to allow; None where one is unknown, or two have a window or documents."""
    known = [part for part in parts if part is not None]
    windows = [part.window for part in known if part.window is not None]
    documents = [part.documents for part in known if part.documents is not None]
    if len(known) < len(parts) or len(windows) > 1 or len(documents) > 1:
        return None
    return Rule(
        any(part.is_causal for part in known),
        windows[0] if windows else None,
        documents[0] if documents else None,
    )
