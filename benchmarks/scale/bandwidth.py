"""Bandwidth of the collectives that context parallelism uses, by size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .measure import Group, timed

SIZES = tuple(1 << n for n in range(20, 30))  # bytes of a rank: 1 MB to 512 MB


def bandwidths(group: Group, sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A row for each collective and size: `mb` a rank has, and GB/s that it receives."""
    for size in sizes:
        mine = torch.zeros(size // 2, dtype=torch.bfloat16, device=group.device)
        gathered = torch.empty(size // 2 * group.size, dtype=torch.bfloat16, device=group.device)
        traded = torch.empty_like(mine)
        runs: dict[str, tuple[Callable[[], Any], float]] = {
            "all_gather": (partial(dist.all_gather_into_tensor, gathered, mine), size * (group.size - 1)),
            "all_to_all": (partial(dist.all_to_all_single, traded, mine), size * (group.size - 1) / group.size),
        }
        for name, (run, received) in runs.items():
            milliseconds = timed(group, run)
            yield {"collective": name, "mb": size / 2**20, "ms": milliseconds, "gbs": received / milliseconds / 1e6}
