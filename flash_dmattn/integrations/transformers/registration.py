"""`register`: from then on transformers knows "dmattn"."""

from __future__ import annotations

from collections.abc import Iterable

from .attention_function import USED, attend, attend_without
from .mask_function import make_mask
from .versions import masking_utils, transformers

# Not a name with "flash" in it: for that transformers looks for a package of FlashAttention.
NAME = "dmattn"


def register(*, ignored_arguments: Iterable[str] = ()) -> str:
    """Make flash_dmattn an attention implementation of transformers; a later call takes the place of an earlier one.

    A model takes it with `attn_implementation="dmattn"` in `from_pretrained` or `from_config`, or with
    `model.set_attn_implementation("dmattn")`. Masks are then described instead of written out for each pair of tokens.

    Args:
        ignored_arguments: names of all arguments that models pass to their attention, and that change nothing in it.
            Others that are not known are refused, those of an earlier call too.

    Returns:
        The name, "dmattn".

    Raises:
        ImportError: on import of this package, without transformers 5.0 or later.
        ValueError: an argument to ignore is one that attention needs.
        TypeError: `ignored_arguments` is a single name.

    Equivalent, in transformers' own words, to `AttentionInterface.register` and `AttentionMaskInterface.register`.

    >>> import torch, transformers
    >>> from flash_dmattn.integrations.transformers import register
    >>> name = register()
    >>> config = transformers.LlamaConfig(
    ...     hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
    >>> model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name)
    >>> model(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 50])
    """
    if isinstance(ignored_arguments, str):
        raise TypeError(f'ignored_arguments is the name "{ignored_arguments}"; it needs to be a list of names')
    ignored = frozenset(ignored_arguments)
    used = sorted(ignored & USED)
    if used:
        raise ValueError(f"ignored_arguments has {', '.join(used)}, which attention uses; it needs names of no effect")
    transformers.AttentionInterface.register(NAME, attend_without(ignored) if ignored else attend)
    masking_utils.AttentionMaskInterface.register(NAME, make_mask)
    return NAME
