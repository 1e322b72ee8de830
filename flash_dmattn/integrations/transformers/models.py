"""The import of transformers, or one clear error; and which models and modules ask for their attention function."""

from __future__ import annotations

import inspect
import re
from typing import Any
from weakref import WeakKeyDictionary

import torch
from packaging.version import Version

OLDEST = "5.0"
INSTALL = f"pip install 'transformers>={OLDEST}'"

try:
    import transformers
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"flash_dmattn.integrations.transformers needs transformers {OLDEST} or later, and there is no "
        f"{error.name}: {INSTALL}",
        name=error.name,
    ) from error

if Version(transformers.__version__) < Version(OLDEST):
    raise ImportError(
        f"flash_dmattn.integrations.transformers needs transformers {OLDEST} or later, and {transformers.__version__} "
        f"is installed: {INSTALL}"
    )

from transformers import masking_utils  # noqa: E402

# Since about 5.14 a model may ask for a tensor as its mask by this flag. Before, the flag only said that a causal mask
# is no plain one.
MODELS_ASK_FOR_TENSORS = "allow_is_causal_skip" in inspect.signature(masking_utils.create_causal_mask).parameters

_ASKS = re.compile(r"ALL_ATTENTION_FUNCTIONS|attention_interface\(")
_COMPUTES = re.compile(r"softmax\(|scaled_dot_product_attention\(")


def asks_for_attention(kind: type) -> bool:
    """Tell whether a module calls the attention function that the configuration names, or calls flash_dmattn itself."""
    if getattr(kind, "calls_flash_dmattn", False):
        return True
    return not issubclass(kind, transformers.PreTrainedModel) and _ASKS.search(_source(kind)) is not None


def computes_attention(kind: type) -> bool:
    """Tell whether a module takes the softmax itself, as its name and its source say."""
    named = "attention" in kind.__name__.lower()
    return named and not asks_for_attention(kind) and _COMPUTES.search(_source(kind)) is not None


_sources: WeakKeyDictionary[type, str] = WeakKeyDictionary()
_refusals: WeakKeyDictionary[type, str | None] = WeakKeyDictionary()


def _source(kind: type) -> str:
    # The whole class, since some compute in another method than forward, and its bases in transformers.
    if kind in _sources:
        return _sources[kind]
    sources = []
    for base in kind.__mro__:
        if base.__module__.startswith("torch.") or base is object:
            continue
        try:
            sources.append(inspect.getsource(base))
        except (OSError, TypeError):
            continue
    return _sources.setdefault(kind, "\n".join(sources))


def refuse_config_without_interface(config: Any) -> None:
    """Refuse a model whose own code would read our mask.

    `from_config`, or a configuration that names "dmattn", selects it for any model, without a word.

    Raises:
        NotImplementedError: no model class of this configuration asks for its attention function.
    """
    if config is None or torch.compiler.is_compiling():
        return
    kind = type(config)
    if kind not in _refusals:
        _refusals[kind] = _refusal(kind)
    message = _refusals[kind]
    if message is not None:
        raise NotImplementedError(message)


def _refusal(kind: type) -> str | None:
    try:
        model = transformers.MODEL_MAPPING[kind]
        models = model if isinstance(model, (list, tuple)) else (model,)
        refused = not any(one._can_set_attn_implementation() for one in models)
    except (KeyError, ImportError, AttributeError):
        # A part of a larger model, a model of the user, or a version with other names: nothing to judge by. A model
        # that takes our mask for a tensor meets the errors of `LayerMask`.
        return None
    return no_interface(models[0].__name__) if refused else None


def no_interface(name: str) -> str:
    """Say that a model cannot run on flash_dmattn."""
    return (
        f'{name} has no attention interface in transformers {transformers.__version__}: attn_implementation="dmattn" '
        'would leave its own attention in use, with a mask that it cannot read; use attn_implementation="eager", or a '
        "version of transformers in which it has one (docs/transformers.md)"
    )
