"""Inspects models of transformers: which modules call the configured attention function, and T5's bias by distance.

The import raises a clear error if transformers is missing or too old.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from typing import Any, NamedTuple

import torch
from packaging.version import Version
from torch import Tensor, nn

from ...biases import Relative
from ...distributed.group import context_in_force

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

# Since about 5.14 a model may set this flag to get a tensor as its mask. Before, the flag only meant that the mask is
# not plainly causal.
MODELS_ASK_FOR_TENSORS = "allow_is_causal_skip" in inspect.signature(masking_utils.create_causal_mask).parameters

_MAKES_ZEROS = re.compile(
    r"if not self\.has_relative_attention_bias:\s*position_bias = torch\.zeros\(\s*\(1, self\.n_heads,"
)
_ASKS = re.compile(r"ALL_ATTENTION_FUNCTIONS|attention_interface\(")
_COMPUTES = re.compile(r"softmax\(|scaled_dot_product_attention\(")


def asks_for_attention(kind: type) -> bool:
    """Return whether a module calls the attention function of the configuration, or calls flash_dmattn itself."""
    if getattr(kind, "calls_flash_dmattn", False):
        return True
    return not issubclass(kind, transformers.PreTrainedModel) and _ASKS.search(_source(kind)) is not None


def computes_attention(kind: type) -> bool:
    """Return whether a module computes attention in its code, by its name and its source."""
    named = "attention" in kind.__name__.lower()
    return named and not asks_for_attention(kind) and _COMPUTES.search(_source(kind)) is not None


@functools.lru_cache(maxsize=256)
def makes_zeros(kind: type) -> bool:
    """Return whether a module without a table creates zeros as its bias, and passes its bias on unchanged."""
    if not kind.__module__.startswith("transformers.models."):
        return False
    try:
        forward = inspect.getsource(kind.forward)  # type: ignore[attr-defined]
    except (OSError, TypeError, AttributeError):
        return False
    is_passed_on = "position_bias=position_bias" in forward and "position_bias +" not in forward
    return is_passed_on and _MAKES_ZEROS.search(forward) is not None


def is_called_without(module: nn.Module, name: str) -> bool:
    """Return whether a module that is being called got no argument of this name; False if that is unknown.

    It inspects the frame of the call, because hooks may have changed the arguments, and `forward` may have assigned a
    tensor to the name.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals["self"] is module:
            try:
                bound = inspect.signature(module.forward).bind(*frame.f_locals["args"], **frame.f_locals["kwargs"])
            except (TypeError, ValueError):
                return False
            return bound.arguments.get(name) is None
        frame = frame.f_back
    return False


def is_captured(*tensors: object) -> bool:
    """Return whether a CUDA graph is capturing operations on these tensors: it must not depend on current values."""
    on_gpu = any(isinstance(x, Tensor) and x.is_cuda for x in tensors)
    return on_gpu and torch.cuda.is_current_stream_capturing()


@functools.lru_cache(maxsize=256)
def _source(kind: type) -> str:
    # The whole class, because some compute attention in another method than forward, and its bases in transformers.
    sources = []
    for base in kind.__mro__:
        if base.__module__.startswith("torch.") or base is object:
            continue
        try:
            sources.append(inspect.getsource(base))
        except (OSError, TypeError):
            continue
    return "\n".join(sources)


def refuse_config_without_interface(config: Any) -> None:
    """Refuse a model without an attention interface: its configuration accepts "dmattn", its code needs a tensor."""
    if config is None or torch.compiler.is_compiling():
        return
    kind: type = type(config)
    message = _refusal(kind)
    if message is not None:
        raise NotImplementedError(message)


@functools.lru_cache(maxsize=256)
def _refusal(kind: type) -> str | None:
    models = _models_of(kind)
    try:
        refused = bool(models) and not any(one._can_set_attn_implementation() for one in models)
    except AttributeError:  # a version with other names; such models then get the errors of `LayerMask`
        return None
    return no_interface(models[0].__name__) if refused else None


def _models_of(kind: type) -> tuple[Any, ...]:
    """Return the models of a configuration; () for a part of a larger model, and for a model of the user."""
    try:
        model = transformers.MODEL_MAPPING[kind]
    except (KeyError, ImportError, AttributeError):
        return ()
    return tuple(model) if isinstance(model, (list, tuple)) else (model,)


def no_interface(name: str) -> str:
    """Return the error message for a model that cannot run on flash_dmattn."""
    return (
        f'{name} has no attention interface in transformers {transformers.__version__}: attn_implementation="dmattn" '
        'would leave its own attention in use, with a mask that it cannot read; use attn_implementation="eager", or a '
        "version of transformers in which it has one (docs/transformers.md)"
    )


# Modules of T5 and similar models compute their bias, a matrix, from a table in `compute_bias`, and pass it on to their
# attention function and to later layers. Once a model uses "dmattn", this method returns a `TableBias` for long inputs.

# Below this number of scores per head (2048 queries x 2048 keys) the model keeps its matrix. Kernels are faster with a
# matrix than with values by distance, and such a matrix is small.
LEAST_SCORES = 2**22

_PARAMETERS = ("self", "query_length", "key_length", "device", "past_seen_tokens")
_read: set[type] = set()


class TableBias(NamedTuple):
    """The bias of a module, by distance.

    Attributes:
        values: (H, 2 * reach + 1), for distances -reach to reach; greater ones have the value at that end.
        seen: the number of keys before the key of the first query.
    """

    values: Tensor
    seen: int

    def relative(self, seqlen_q: int, seqlen_k: int) -> Relative:
        """Make the bias of a call, where `zero` has to be for the last query aligned with the last key."""
        reach = self.values.shape[1] // 2
        return Relative(self.values, reach + (seqlen_k - seqlen_q) - self.seen, "clamp")


def read_tables(config: Any) -> None:
    """Replace `compute_bias` in the modules of this configuration's model, if it has any, to return a `TableBias`."""
    kind = type(config)
    if kind in _read or config is None or torch.compiler.is_compiling():
        return
    _read.add(kind)
    for one in _models_of(kind):
        for part in list(vars(sys.modules[one.__module__]).values()):
            if isinstance(part, type) and issubclass(part, nn.Module) and _has_table(part):
                _replace(part)


def _has_table(kind: type[nn.Module]) -> bool:
    compute = vars(kind).get("compute_bias")
    return (
        inspect.isfunction(compute)
        and tuple(inspect.signature(compute).parameters) == _PARAMETERS
        and asks_for_attention(kind)
        and "position_bias=position_bias" in inspect.getsource(kind.forward)  # as it is, to the attention function
    )


def _replace(kind: Any) -> None:
    original = kind.compute_bias

    @functools.wraps(original)
    def compute_bias(
        self: Any, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0
    ) -> Tensor | TableBias:
        if type(self) is not kind or not _serves(self, query_length, key_length, past_seen_tokens):
            bias: Tensor = original(self, query_length, key_length, device=device, past_seen_tokens=past_seen_tokens)
            return bias
        reach = self.relative_attention_max_distance
        # One query after `reach` keys has all distances from -reach to reach.
        values = original(self, 1, 2 * reach + 1, device=device, past_seen_tokens=reach)
        return TableBias(values[0, :, 0], past_seen_tokens)

    kind.compute_bias = compute_bias


def _serves(module: Any, query_length: int, key_length: int, seen: Any) -> bool:
    """Return whether a module may return its bias as values of distances."""
    if getattr(module.config, "_attn_implementation", None) != "dmattn" or torch.compiler.is_compiling():
        return False
    if not isinstance(seen, int) or context_in_force() is not None:  # a tensor with a static cache; rows of a rank
        return False
    if module.training and getattr(module, "gradient_checkpointing", False):  # it can only pass on tensors
        return False
    return query_length * key_length >= LEAST_SCORES
