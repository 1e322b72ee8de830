"""Faults of front_end."""

from __future__ import annotations

from .fault import Fault

FAULTS: tuple[Fault, ...] = ()
