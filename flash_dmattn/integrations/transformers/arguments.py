"""The arguments that call sites of transformers hand to an attention function: used, of no effect, or refused."""

from __future__ import annotations

from typing import Any

# Told to every attention function, and of no effect on what this one computes: the mask, the rotation of queries and
# keys and the outputs of a model have been decided elsewhere.
_HARMLESS = {
    "cache_position",
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
    "indices": "attention to chosen keys alone is not passed on; use the model's own attn_implementation",
    "block_indices": "attention to chosen blocks alone is not passed on; use the model's own attn_implementation",
    "cache": 'a paged cache, of continuous batching, is not read; use attn_implementation="sdpa"',
    "output_attentions": (
        'probabilities are never made; use attn_implementation="eager", or flash_dmattn.attention(..., '
        'backend="reference", return_probs=True)'
    ),
    "head_mask": 'heads are not masked one by one; use attn_implementation="eager"',
}


def refuse_unknown(module: object, arguments: dict[str, Any]) -> None:
    """Refuse what would change the result and is not passed on.

    Raises:
        NotImplementedError: one of them is set, with what to do about it.
    """
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
