"""The two steps of making an interval mask that are more than a few operations, as operators.

A graph that makes such a mask has these two in it, not the loops behind them, which take a compiler a minute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from ..topk_stops import topk_stops
from .interval_order import key_order

_LIBRARY = torch.library.Library("flash_dmattn", "FRAGMENT")


def _define(name: str, schema: str, function: Callable[..., torch.Tensor], fake: Callable[..., torch.Tensor]) -> object:
    _LIBRARY.define(f"{name}{schema}")
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flash_dmattn::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.flash_dmattn, name).default


def _stops_fake(keys: torch.Tensor, k: int) -> torch.Tensor:
    return keys.new_empty(keys.shape, dtype=torch.int64)


def _order_fake(start: torch.Tensor, stop: torch.Tensor, seqlen_q: int) -> torch.Tensor:
    return start.new_empty(start.shape, dtype=torch.int32)


run_topk_stops = cast(
    Callable[[torch.Tensor, int], torch.Tensor],
    _define("topk_stops", "(Tensor keys, SymInt k) -> Tensor", topk_stops, _stops_fake),
)
run_key_order = cast(
    Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor],
    _define("key_order", "(Tensor start, Tensor stop, SymInt seqlen_q) -> Tensor", key_order, _order_fake),
)
