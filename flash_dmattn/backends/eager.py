"""Eager PyTorch on any device: the chunked pair of `flash_dmattn.reference.eager`, and the fallback of auto."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import operators
from ..problem import AttentionProblem, Gradients, MaskTensors
from ..reference import eager as chunked
from ..reference import formula
from .protocol import Availability, Rule

NAME = "eager"

RULES: tuple[Rule, ...] = (
    Rule(
        "return_probs",
        lambda p: not p.return_probs,
        lambda p: "return_probs is set; this backend never holds the probabilities of a whole call",
        'use backend="reference"',
    ),
)
AUTO_RULES: tuple[Rule, ...] = ()


def probe() -> Availability:
    """Always usable: it needs nothing but torch."""
    return Availability(True)


_chunk_bytes = chunked.DEFAULT_CHUNK_BYTES


def set_chunk_bytes(nbytes: int) -> None:
    """Bound the temporaries of one chunk, in bytes (256 MB unless set); the whole call uses little more than that.

    >>> from flash_dmattn.backends import eager
    >>> eager.set_chunk_bytes(64 * 2**20)
    >>> eager.set_chunk_bytes(eager.chunked.DEFAULT_CHUNK_BYTES)
    """
    global _chunk_bytes
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes <= 0:
        raise ValueError(f"nbytes is {nbytes!r}; it needs to be a positive number of bytes")
    _chunk_bytes = nbytes


def workspace_bytes(problem: AttentionProblem) -> int:
    """Bytes of temporaries a call can hold at once: what the fallback warning names."""
    width = 8 if problem.dtype == torch.float64 else 4
    scores = problem.batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k * width
    unpacked = 0 if problem.mask is None or problem.mask_form == "dense" else problem.mask.span()
    return unpacked + min(_chunk_bytes, 3 * scores)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: list[Tensor],
    bias: Tensor | None,
    is_causal: bool,
    window_size: list[int],
    softmax_scale: float,
    softcap: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    left, right = window_size
    return chunked.forward(
        q,
        k,
        v,
        mask[0] if mask else None,
        bias,
        is_causal=is_causal,
        softmax_scale=softmax_scale,
        softcap=softcap,
        window_size=(left, right),
        chunk_bytes=_chunk_bytes,
    )


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: list[Tensor],
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    window_size: list[int],
    softmax_scale: float,
    softcap: float,
    deterministic: bool,
    need: list[bool],
) -> Gradients:
    left, right = window_size
    need_q, need_k, need_v, need_bias = need
    return chunked.backward(
        dout,
        dlse,
        q,
        k,
        v,
        mask[0] if mask else None,
        bias,
        out,
        lse,
        is_causal=is_causal,
        softmax_scale=softmax_scale,
        softcap=softcap,
        window_size=(left, right),
        chunk_bytes=_chunk_bytes,
        need=(need_q, need_k, need_v, need_bias),
    )


forward, backward = operators.define_pair(NAME, _forward, _backward)


def differentiable_backward(
    problem: AttentionProblem,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskTensors,
    bias: Tensor | None,
) -> Gradients:
    """The gradients as differentiable PyTorch, whose own derivative is the second derivative of attention."""
    return formula.gradients(
        dout,
        dlse,
        q,
        k,
        v,
        mask[0] if mask else None,
        bias,
        is_causal=problem.is_causal,
        softmax_scale=problem.softmax_scale,
        softcap=problem.softcap,
        window_size=problem.window_size,
    )
