"""The fixture `counted`: "dmattn" registered with transformers, and a record of what arrives and is called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import transformers
from torch import nn
from transformers_models import softmax_in_float64

from flash_dmattn.call import prepare_call
from flash_dmattn.integrations.transformers import attention_function, register
from flash_dmattn.problem import Numbers


class Counted:
    """The calls of `flash_dmattn.attention` as their arguments, and the masks that layers received."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[dict[str, Any]] = []
        self.masks: list[Any] = []
        self._patch = patch

    def drop(self, name: str) -> None:
        """Leave out an argument of every call from now on, as a faulty adapter would."""

        def without(*tensors: Any, heads_first: bool) -> Any:
            call = prepare_call(*tensors, heads_first=heads_first)
            if name in Numbers._fields:
                return call._replace(numbers=call.numbers._replace(**{name: Numbers._field_defaults[name]}))
            return call._replace(**{name: None})

        self._patch.setattr(attention_function, "prepare_call", without)


@contextmanager
def counting() -> Iterator[Counted]:
    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(patch)
        softmax_in_float64(patch)

        def attend(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **others: Any) -> Any:
            counted.masks.append(attention_mask)
            return attention_function.attend(module, query, key, value, attention_mask, **others)

        name = register()
        transformers.AttentionInterface.register(name, attend)
        try:
            with attention_function.observed(lambda module, call: counted.calls.append(call)):
                yield counted
        finally:
            register()
