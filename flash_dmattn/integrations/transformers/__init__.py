"""flash_dmattn as an attention implementation of transformers, under the name "dmattn"; docs/transformers.md."""

from .registration import NAME, register
from .report import Check, Row, check

__all__ = ["NAME", "Check", "Row", "check", "register"]
