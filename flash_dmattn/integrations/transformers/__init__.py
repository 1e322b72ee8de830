"""flash_dmattn as an attention implementation of transformers, under the name "dmattn"; docs/transformers.md.

`register` registers the name. `check` reports for each attention module of a model whether it runs on flash_dmattn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...explanation import Explanation, explain
from .attention_function import USED, attend, attend_without, observed
from .class_tables import add_classes
from .mask_function import make_mask
from .models import asks_for_attention, computes_attention, masking_utils, no_interface, transformers

__all__ = ["check", "register"]

# Without "flash", because for names with it transformers requires a FlashAttention package.
NAME = "dmattn"


def register(*, ignored_arguments: Iterable[str] = ()) -> str:
    """Make flash_dmattn an attention implementation of transformers. A later call replaces an earlier one.

    Select it by `attn_implementation="dmattn"` in `from_pretrained` or `from_config`, or by
    `model.set_attn_implementation("dmattn")`. Masks then are not tensors with a value for each pair of tokens.

    Args:
        ignored_arguments: names of arguments that models pass to their attention and that do not change its result.
            Other unknown arguments are refused, also if an earlier call of `register` has named them.

    Returns:
        The name, "dmattn".

    Raises:
        ImportError: on import of this package, without transformers 5.0 or later.
        ValueError: `ignored_arguments` has an argument that attention needs.
        TypeError: `ignored_arguments` is no list of names, or a single one.

    Equivalent to calls of `AttentionInterface.register` and `AttentionMaskInterface.register`.

    >>> import torch, transformers
    >>> from flash_dmattn.integrations.transformers import register
    >>> name = register()
    >>> config = transformers.LlamaConfig(
    ...     hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
    >>> model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name)
    >>> model(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 50])
    """
    is_list = isinstance(ignored_arguments, Iterable) and not isinstance(ignored_arguments, str)
    names = list(ignored_arguments) if is_list else []
    if not is_list or not all(isinstance(name, str) for name in names):
        raise TypeError(f"ignored_arguments is {ignored_arguments!r}; it needs to be a list of names")
    ignored = frozenset(names)
    used = sorted(ignored & USED)
    if used:
        raise ValueError(f"ignored_arguments has {', '.join(used)}, which attention uses; it needs names of no effect")
    transformers.AttentionInterface.register(NAME, attend_without(ignored) if ignored else attend)
    masking_utils.AttentionMaskInterface.register(NAME, make_mask)
    add_classes(NAME)
    return NAME


@dataclass(frozen=True)
class Row:
    """One attention module of a model: its name in the model, and the name of its class.

    `problem` is why it does not run on flash_dmattn; None if it does. `calls` has an `Explanation` for each different
    call that it made; it is empty without inputs.
    """

    name: str
    kind: str
    problem: str | None
    calls: tuple[Explanation, ...] = ()

    def __str__(self) -> str:
        if self.problem is not None:
            return f"{self.name} ({self.kind}): NOT on dmattn: {self.problem}"
        runs = [f"{call.forward}{f', {call.backward} backward' if call.backward else ''}" for call in self.calls]
        return f"{self.name} ({self.kind}): {'; '.join(dict.fromkeys(runs)) or 'on dmattn'}"


@dataclass(frozen=True)
class Check:
    """The rows of `check`, one for each attention module in the order of the model; prints as a list."""

    rows: tuple[Row, ...]

    @property
    def complete(self) -> bool:
        """Whether every attention module runs on flash_dmattn."""
        return all(row.problem is None for row in self.rows)

    def __str__(self) -> str:
        return "\n".join(map(str, self.rows))

    __repr__ = __str__


def check(model: nn.Module, **inputs: Any) -> Check:
    """Report for each attention module of a model its backends, or why it does not run on flash_dmattn.

    Args:
        model: a model of transformers with `attn_implementation="dmattn"`.
        inputs: of its forward, which runs once, with gradients if they are enabled. Each call is explained by
            `flash_dmattn.explain`; weights and their gradients are not changed. Without inputs the model does not run,
            and `check` only inspects the sources of its modules.

    Returns:
        A `Check`: print it, or use its rows.

    Raises:
        NotImplementedError: the model has no attention interface, so it cannot run on flash_dmattn. transformers
            accepts "dmattn" for such a model without an error.
        TypeError: the model is no `torch.nn.Module`.
        Others: as the forward of the model.

    >>> import torch, transformers
    >>> from flash_dmattn.integrations.transformers import check, register
    >>> config = transformers.LlamaConfig(
    ...     hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=50)
    >>> model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=register())
    >>> with torch.no_grad():
    ...     print(check(model, input_ids=torch.tensor([[1, 2, 3]])))
    model.layers.0.self_attn (LlamaAttention): sdpa
    model.layers.1.self_attn (LlamaAttention): sdpa
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; it needs to be a torch.nn.Module")
    asks, computes = asks_for_attention, computes_attention
    modules = {name: part for name, part in model.named_modules() if asks(type(part)) or computes(type(part))}
    if not any(asks(type(part)) for part in modules.values()):
        raise NotImplementedError(no_interface(type(model).__name__))
    calls: dict[nn.Module, list[Explanation]] = {}

    def explain_call(module: nn.Module, call: dict[str, Any]) -> None:
        explanations = calls.setdefault(module, [])
        explanation = explain(**call)
        if all(explanation.problem != other.problem for other in explanations):
            explanations.append(explanation)

    if inputs:
        with observed(explain_call):
            model(**inputs)
    rows = []
    for name, part in modules.items():
        problem = _problem(part)
        if problem is None and inputs and part not in calls:
            problem = "these inputs do not reach it"
        rows.append(Row(name, type(part).__name__, problem, tuple(calls.get(part, ()))))
    return Check(tuple(rows))


def _problem(module: nn.Module) -> str | None:
    if not asks_for_attention(type(module)):
        return f"it computes attention itself in transformers {transformers.__version__}"
    chosen = getattr(getattr(module, "config", None), "_attn_implementation", NAME)
    if chosen != NAME:
        return f'its configuration says "{chosen}"; model.set_attn_implementation("{NAME}") changes that'
    return None
