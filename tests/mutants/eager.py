"""Faults of eager."""

from __future__ import annotations

from .fault import Fault

FAULTS: tuple[Fault, ...] = ()
