"""How functions of the library become operators of torch, which are one node of a graph each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("flash_dmattn", "FRAGMENT")


def define(name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register an operator and its fake; return what calls it.

    Args:
        name: in `torch.ops.flash_dmattn`.
        schema: of its arguments and results.
        function: what it runs, on every device.
        fake: the same on tensors without values, sending nothing.
    """
    LIBRARY.define(f"{name}{schema}")
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flash_dmattn::{name}", fake, lib=LIBRARY)
    # The overload packets resolve overloads on every call; `.default` skips that.
    operator: Callable[..., Any] = getattr(torch.ops.flash_dmattn, name).default
    return operator
