"""The classes of calls that `calibrate` times, one row each, and the rows that a call belongs to."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from ..problem import AttentionProblem, BiasClass

BATCH, NUM_HEADS, HEAD_DIM = 2, 16, 64
DECODED = 16  # queries: a call without gradients of so many or fewer is decoding
LONG = 1024  # keys: from here on a call is long
_TIMED_DTYPES = (torch.bfloat16, torch.float16)


class Row(NamedTuple):
    """One class of calls: the call that stands for it, in bf16, with gradients unless `grad` is False."""

    name: str
    seqlen_q: int
    seqlen_k: int
    batch: int = BATCH
    num_heads_k: int = NUM_HEADS
    head_dim: int = HEAD_DIM
    mask: Literal["none", "key", "dense"] = "none"
    bias: BiasClass | None = None
    dbias: bool = False
    grad: bool = True

    @property
    def mask_shape(self) -> tuple[int, int, int, int] | None:
        """One mask for all heads: of keys, or of queries and keys."""
        if self.mask == "none":
            return None
        return self.batch, 1, 1 if self.mask == "key" else self.seqlen_q, self.seqlen_k

    @property
    def bias_shape(self) -> tuple[int, int, int, int] | None:
        """One bias for each head, which the batch shares."""
        if self.bias is None:
            return None
        return 1, NUM_HEADS, 1 if self.bias == "key" else self.seqlen_q, 1 if self.bias == "query" else self.seqlen_k


def _bias_name(bias: BiasClass, dbias: bool) -> str:
    return f"bias per {bias}, dbias" if dbias else f"bias per {bias}"


def _bias_row(bias: BiasClass, dbias: bool) -> Row:
    return Row(_bias_name(bias, dbias), 2048, 2048, bias=bias, dbias=dbias)


# Those that most programs need first: where the time ends, the last ones are not reached.
ROWS: tuple[Row, ...] = (
    Row("long", 4096, 4096),
    Row("dense mask", 2048, 2048, mask="dense"),
    _bias_row("score", True),
    _bias_row("key", True),
    Row("short", 512, 512, batch=8),
    Row("decode", 1, 4096, batch=8, grad=False),
    Row("key mask", 2048, 2048, mask="key"),
    Row("grouped heads", 2048, 2048, num_heads_k=4),
    Row("wide heads", 2048, 2048, head_dim=128),
    _bias_row("score", False),
    _bias_row("key", False),
    _bias_row("query", True),
    _bias_row("query", False),
)


def rows_of(p: AttentionProblem) -> tuple[str, ...]:
    """The rows that a call belongs to; none where the table says nothing of it.

    Each part of a call has a row: its mask, its bias, grouped heads, and head dims above 64. So does its length, where
    that is short or decoding, and where no part has one. Of lengths the nearest row counts: up to 16 queries without
    gradients are "decode", else fewer than 1024 keys "short", and all others "long". Causality, windows, softcap and
    determinism change no row. fp16 counts as bf16; fp32 and fp64 were not timed.
    """
    if p.dtype not in _TIMED_DTYPES:
        return ()
    parts: list[str] = []
    if p.mask is not None:
        parts.append("key mask" if p.mask_form in ("keys", "intervals") or p.mask.broadcast()[2] else "dense mask")
    if p.dbias_class is not None:
        parts.append(_bias_name(p.dbias_class, True))
    elif p.bias_class is not None:
        parts.append(_bias_name(p.bias_class, False))
    if p.num_heads_k != p.num_heads:
        parts.append("grouped heads")
    if max(p.head_dim, p.head_dim_v) > HEAD_DIM:
        parts.append("wide heads")
    if p.seqlen_q <= DECODED and not any(p.needs_grad):
        parts.append("decode")
    elif p.seqlen_k < LONG:
        parts.append("short")
    return tuple(parts) or ("long",)
