"""Faults of masks."""

from __future__ import annotations

from .fault import Fault

FAULTS: tuple[Fault, ...] = ()
