"""The sizes of a call where a compiler has symbols for them: what decides speed alone asks for hints, and binds nothing."""

from __future__ import annotations

from typing import Any

import torch

from .description import AttentionProblem, SequenceSpec, TensorSpec


def hinted(problem: AttentionProblem) -> AttentionProblem:
    """The problem with the sizes of the call that is compiled in the place of symbols.

    A condition on a symbol becomes a guard: a graph is compiled anew where the condition holds no more, and
    `torch.export` refuses a range that it divides. One on a hint does neither.
    """
    if not torch.compiler.is_compiling():
        return problem
    p, flags = problem, problem.flags
    return p._replace(
        batch=_hint(p.batch),
        seqlen_q=_hint(p.seqlen_q),
        seqlen_k=_hint(p.seqlen_k),
        num_heads=_hint(p.num_heads),
        num_heads_k=_hint(p.num_heads_k),
        q_strides=_hints(p.q_strides),
        k_strides=_hints(p.k_strides),
        v_strides=_hints(p.v_strides),
        mask=None if p.mask is None else _of_tensor(p.mask),
        bias=None if p.bias is None else _of_tensor(p.bias),
        flags=flags._replace(
            mask_repeat=_hint(flags.mask_repeat),
            bias_repeat=_hint(flags.bias_repeat),
            max_seqlen_q=_hint(flags.max_seqlen_q),
            max_seqlen_k=_hint(flags.max_seqlen_k),
        ),
        sequences=None if p.sequences is None else _of_sequences(p.sequences),
    )


def _of_tensor(spec: TensorSpec) -> TensorSpec:
    return spec._replace(shape=_hints(spec.shape), strides=_hints(spec.strides))


def _of_sequences(spec: SequenceSpec) -> SequenceSpec:
    return spec._replace(
        number=_hint(spec.number),
        rows_q=_hint(spec.rows_q),
        rows_k=_hint(spec.rows_k),
        max_seqlen_q=_hint(spec.max_seqlen_q),
        max_seqlen_k=_hint(spec.max_seqlen_k),
        page_size=_hint(spec.page_size),
    )


def _hints(sizes: Any) -> Any:
    return tuple([_hint(size) for size in sizes])


def _hint(size: int) -> int:
    from torch.fx.experimental import symbolic_shapes  # only a compiler needs it, and has imported it

    # Releases of torch without it have guards.
    hint = getattr(symbolic_shapes, "optimization_hint", None)
    return size if hint is None else hint(size)
