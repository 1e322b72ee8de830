"""Faults of triton."""

from __future__ import annotations

from .fault import Fault

FAULTS: tuple[Fault, ...] = ()
