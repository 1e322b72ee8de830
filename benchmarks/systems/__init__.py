"""The systems that are compared: our backends, and the peers that a user of PyTorch would take instead."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import cuequivariance, fa4, flexattention, ours, predecessor, sdpa
from .protocol import Attend, Bound, Mode, Needs, System

__all__ = ["ALL", "DEFAULT", "Attend", "Bound", "Mode", "Needs", "System", "available", "by_name", "chosen"]

ALL: tuple[System, ...] = (
    *ours.SYSTEMS,
    *sdpa.SYSTEMS,
    *flexattention.SYSTEMS,
    *fa4.SYSTEMS,
    *cuequivariance.SYSTEMS,
    *predecessor.SYSTEMS,
)

# `reference` holds every score in fp32; the suites of speed and memory leave it out.
DEFAULT = {
    "equivalence": tuple(system.name for system in ALL),
    "performance": tuple(system.name for system in ALL if system.name != "reference"),
    "memory": tuple(system.name for system in ALL if system.name != "reference"),
    # SDPA has its fastest kernel with a dense mask, and the formula, which replaces it on a CPU.
    "model": ("cuda", "triton", "auto", "eager", "sdpa-cudnn", "sdpa-math", "flexattention"),
}


def by_name(name: str) -> System:
    """Return the system of a name.

    Raises:
        ValueError: there is none.
    """
    for system in ALL:
        if system.name == name:
            return system
    raise ValueError(f"no system is called {name!r}; there are {', '.join(system.name for system in ALL)}")


def available(names: Sequence[str], device: torch.device) -> tuple[list[System], dict[str, str]]:
    """Return the named systems that work on this machine, and the reasons why the others do not."""
    reasons = {name: by_name(name).missing(device) for name in names}
    return (
        [by_name(name) for name, reason in reasons.items() if not reason],
        {name: reason for name, reason in reasons.items() if reason},
    )


def chosen(suite: str, names: Sequence[str] | None, *, quick: bool, device: torch.device) -> list[str]:
    """Return the systems of a run: those asked for, else all of the suite; a quick run on a GPU compiles no graphs."""
    if names is not None:
        return [by_name(name).name for name in names]
    defaults = [by_name(name) for name in DEFAULT[suite]]
    if quick:
        defaults = [system for system in defaults if not (system.compiles and (device.type == "cuda" or system.ours))]
    return [system.name for system in defaults]
