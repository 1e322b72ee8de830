"""The bias of T5 and its kin as values of distances, in the place of the matrix that their modules make of a table.

Modules make the matrix in `compute_bias`, and pass it on to their attention function and to later layers. Once a model
uses "dmattn", this method returns a `TableBias` for long inputs.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...biases import Relative
from ...distributed.group import context_in_force
from .models import asks_for_attention, transformers

# A matrix of fewer scores a head is the faster way: faster kernels read it.
LEAST_SCORES = 2**22

_PARAMETERS = ("self", "query_length", "key_length", "device", "past_seen_tokens")
_read: set[type] = set()


class TableBias(NamedTuple):
    """The bias that a module makes of its table.

    Attributes:
        values: (H, 2 * reach + 1), of distances from -reach to reach; farther ones have the value of that end.
        seen: how many keys come before the key of the first query.
    """

    values: Tensor
    seen: int

    def relative(self, seqlen_q: int, seqlen_k: int) -> Relative:
        """Make the bias of a call, in which the last query would stand at the last key."""
        reach = self.values.shape[1] // 2
        return Relative(self.values, reach + (seqlen_k - seqlen_q) - self.seen, "clamp")


def read_tables(config: Any) -> None:
    """Let the modules of this configuration's model return their bias as a `TableBias`, where it has such modules."""
    kind = type(config)
    if kind in _read or config is None or torch.compiler.is_compiling():
        return
    _read.add(kind)
    try:
        model = transformers.MODEL_MAPPING[kind]
        models = model if isinstance(model, (list, tuple)) else (model,)
    except (KeyError, ImportError, AttributeError):
        return  # a model of the user, or a version with other names: its bias stays a matrix
    for one in models:
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
        # One query that has seen `reach` keys has all distances that differ.
        values = original(self, 1, 2 * reach + 1, device=device, past_seen_tokens=reach)
        return TableBias(values[0, :, 0], past_seen_tokens)

    kind.compute_bias = compute_bias


def _serves(module: Any, query_length: int, key_length: int, seen: Any) -> bool:
    """Tell whether a module may return its bias as values of distances."""
    if getattr(module.config, "_attn_implementation", None) != "dmattn" or torch.compiler.is_compiling():
        return False
    if not isinstance(seen, int) or context_in_force() is not None:  # a tensor of a static cache; rows of a rank
        return False
    if module.training and getattr(module, "gradient_checkpointing", False):  # which may pass on tensors alone
        return False
    return query_length * key_length >= LEAST_SCORES
