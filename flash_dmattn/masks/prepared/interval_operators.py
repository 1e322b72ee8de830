"""The steps of making an interval mask that are more than a few operations, as operators.

A graph that makes such a mask has these in it, not the loops behind them, which take a compiler a minute. Where nothing
watches, steps that read integers alone are called without the operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from ...definition import define, unless_watched
from .packers import packer
from .packing import TILE, tiles

ThreeTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _define_of_integers(
    name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    return unless_watched(define(name, schema, function, fake), function)


def _topk(keys: torch.Tensor, k: int, seqlen_q: int, local: int) -> tuple[torch.Tensor, torch.Tensor]:
    return packer(keys).topk_intervals(keys, k, seqlen_q, local)


def _topk_fake(keys: torch.Tensor, k: int, seqlen_q: int, local: int) -> tuple[torch.Tensor, torch.Tensor]:
    start, stop = (keys.new_empty(keys.shape, dtype=torch.int32) for _ in range(2))
    return start, stop


def _order(start: torch.Tensor, stop: torch.Tensor, seqlen_q: int) -> torch.Tensor:
    return packer(start).key_order(start, stop, seqlen_q)


def _order_fake(start: torch.Tensor, stop: torch.Tensor, seqlen_q: int) -> torch.Tensor:
    return start.new_empty(start.shape, dtype=torch.int32)


def _tiles(start: torch.Tensor, stop: torch.Tensor, order: torch.Tensor, seqlen_q: int) -> list[torch.Tensor]:
    return list(packer(start).interval_tiles(start, stop, order, seqlen_q))


def _tiles_fake(start: torch.Tensor, stop: torch.Tensor, order: torch.Tensor, seqlen_q: int) -> list[torch.Tensor]:
    heads, rows, columns = start.shape[:2], tiles(seqlen_q), tiles(start.size(2))
    shapes = ((*heads, columns * TILE, 2), (*heads, rows, 2 + columns), (*heads, columns, 2 + rows))
    return [start.new_empty(shape) for shape in shapes]


def _first_places(start: torch.Tensor, stop: torch.Tensor, order: torch.Tensor, places: int) -> ThreeTensors:
    return packer(start).first_places(start, stop, order, places)


def _first_places_fake(start: torch.Tensor, stop: torch.Tensor, order: torch.Tensor, places: int) -> ThreeTensors:
    order, start, stop = (x.new_empty((*x.shape[:2], places)) for x in (order, start, stop))
    return order, start, stop


def _of_bits(bits: torch.Tensor, row_lists: torch.Tensor, seqlen_k: int) -> ThreeTensors:
    return packer(bits).mask_intervals(bits, row_lists, seqlen_k)


def _of_bits_fake(bits: torch.Tensor, row_lists: torch.Tensor, seqlen_k: int) -> ThreeTensors:
    start, stop = (bits.new_empty((*bits.shape[:2], seqlen_k)) for _ in range(2))
    return start, stop, bits.new_empty((4,), dtype=torch.int64)


def _score_keys(scores: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
    return packer(scores).score_keys(scores, allowed)


def _score_keys_fake(scores: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
    heads = scores.shape[:2] if allowed is None else torch.broadcast_shapes(scores.shape[:2], allowed.shape[:2])
    dtype = torch.int64 if scores.dtype == torch.float64 else torch.int32
    return scores.new_empty((*heads, scores.shape[3]), dtype=dtype)


run_score_keys = cast(
    Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
    define("score_keys", "(Tensor scores, Tensor? allowed) -> Tensor", _score_keys, _score_keys_fake),
)
run_topk_intervals = cast(
    Callable[[torch.Tensor, int, int, int], tuple[torch.Tensor, torch.Tensor]],
    define(
        "topk_intervals",
        "(Tensor keys, SymInt k, SymInt seqlen_q, SymInt local) -> (Tensor start, Tensor stop)",
        _topk,
        _topk_fake,
    ),
)
run_key_order = cast(
    Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor],
    _define_of_integers("key_order", "(Tensor start, Tensor stop, SymInt seqlen_q) -> Tensor", _order, _order_fake),
)
run_interval_tiles = cast(
    Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], list[torch.Tensor]],
    _define_of_integers(
        "interval_tiles",
        "(Tensor start, Tensor stop, Tensor order, SymInt seqlen_q) -> Tensor[]",
        _tiles,
        _tiles_fake,
    ),
)
run_first_places = cast(
    Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], ThreeTensors],
    _define_of_integers(
        "first_places",
        "(Tensor start, Tensor stop, Tensor order, SymInt places) -> (Tensor order, Tensor start, Tensor stop)",
        _first_places,
        _first_places_fake,
    ),
)
run_mask_intervals = cast(
    Callable[[torch.Tensor, torch.Tensor, int], ThreeTensors],
    _define_of_integers(
        "mask_intervals",
        "(Tensor bits, Tensor row_lists, SymInt seqlen_k) -> (Tensor start, Tensor stop, Tensor numbers)",
        _of_bits,
        _of_bits_fake,
    ),
)
