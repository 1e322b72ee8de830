"""Sizes that a compiler has symbols for: what decides speed alone asks for hints of them, and binds nothing."""

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
        batch=hint(p.batch),
        seqlen_q=hint(p.seqlen_q),
        seqlen_k=hint(p.seqlen_k),
        num_heads=hint(p.num_heads),
        num_heads_k=hint(p.num_heads_k),
        q_strides=_hints(p.q_strides),
        k_strides=_hints(p.k_strides),
        v_strides=_hints(p.v_strides),
        mask=None if p.mask is None else _of_tensor(p.mask),
        bias=None if p.bias is None else _of_tensor(p.bias),
        flags=flags._replace(
            mask_repeat=hint(flags.mask_repeat),
            bias_repeat=hint(flags.bias_repeat),
            max_seqlen_q=hint(flags.max_seqlen_q),
            max_seqlen_k=hint(flags.max_seqlen_k),
        ),
        sequences=None if p.sequences is None else _of_sequences(p.sequences),
    )


def _of_tensor(spec: TensorSpec) -> TensorSpec:
    return spec._replace(shape=_hints(spec.shape), strides=_hints(spec.strides))


def _of_sequences(spec: SequenceSpec) -> SequenceSpec:
    return spec._replace(
        number=hint(spec.number),
        rows_q=hint(spec.rows_q),
        rows_k=hint(spec.rows_k),
        max_seqlen_q=hint(spec.max_seqlen_q),
        max_seqlen_k=hint(spec.max_seqlen_k),
        page_size=hint(spec.page_size),
    )


def _hints(sizes: Any) -> Any:
    return tuple([hint(size) for size in sizes])


def hint(size: int) -> int:
    """A size as it is, and as the call has it that is compiled where a compiler has a symbol."""
    if not torch.compiler.is_compiling():
        return size
    from torch.fx.experimental import symbolic_shapes  # only a compiler needs it, and has imported it

    # Releases of torch without it have guards.
    ask = getattr(symbolic_shapes, "optimization_hint", None)
    return size if ask is None else ask(size)
