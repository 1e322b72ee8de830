"""Watch the operators that run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Dispatched(TorchDispatchMode):
    """Show each operator that runs to a function: the operator, its arguments and its result."""

    def __init__(self, show: Callable[[Any, Any, Any], object] | None = None) -> None:
        super().__init__()
        self._show = show or self.show
        self.names: list[str] = []  # only operators of this library

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        if operator.namespace == "flash_dmattn":
            self.names.append(operator.name().partition("::")[2])
        self._show(operator, args, result)
        return result

    def show(self, operator: Any, args: Any, result: Any) -> None:
        """Take an operator that has run; a subclass has its own."""


class Products(Dispatched):
    """Count matrix products, their work, and the elements of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.work = self.largest = 0

    def show(self, operator: Any, args: Any, result: Any) -> None:
        if "bmm" in operator.__name__:
            self.products += 1
            self.work += result.numel() * args[1].shape[2]
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.numel())


def bytes_made(run: Callable[[], object]) -> list[int]:
    """Run a function, and list the bytes of the storage of each tensor that an operator makes there."""
    made: list[int] = []

    def show(operator: Any, arguments: Any, result: Any) -> None:
        made.extend(x.untyped_storage().nbytes() for x in tree_leaves(result) if isinstance(x, Tensor))

    with Dispatched(show):
        run()
    return made
