"""Names of arguments that differ between versions of transformers, and those that are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers.modeling_outputs import CausalLMOutputWithPast

# "past_key_values" until it was renamed.
_fields = {field.name for field in dataclasses.fields(CausalLMOutputWithPast)}
CACHE = "cache" if "cache" in _fields else "past_key_values"
# What the loss of transformers reads.
LOSS_ARGUMENTS = ("num_items_in_batch", "ignore_index", "shift_labels")
# Passed along by generate() and Trainer, and decided elsewhere.
_HARMLESS = {"cache_position", "return_dict"}


def one_cache(cache: Any, past_key_values: Any) -> Any:
    """The cache, under whichever of its two names it comes.

    Raises:
        ValueError: two different ones.
    """
    if cache is not None and past_key_values is not None and cache is not past_key_values:
        raise ValueError("cache and past_key_values are both given, and differ; they are two names of one argument")
    return past_key_values if cache is None else cache


def refuse_unknown(arguments: dict[str, Any]) -> None:
    """Refuse what would change the result and is not known.

    Raises:
        NotImplementedError: one of them is set.
    """
    for name, value in arguments.items():
        if value is None or value is False or name in _HARMLESS:
            continue
        hint = ""
        if name == "output_attentions":
            hint = (
                ": probabilities are never made; flash_dmattn.attention(..., return_probs=True) makes those of a layer"
            )
        if name.startswith("cu_seq_lens"):
            hint = ": give each document a row of its own, and an attention_mask"
        raise NotImplementedError(f"DynamicMaskModel does not know {name}{hint}")
