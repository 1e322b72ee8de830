"""Attention over several GPUs: context parallelism, which shares one sequence among the ranks of a group."""

from .api import context_parallel_attention
from .context import use_context_parallel
from .explanation import ParallelExplanation, explain_context_parallel
from .layout import SequenceLayout
from .mask import ShardedMask, prepare_mask

__all__ = [
    "ParallelExplanation",
    "SequenceLayout",
    "ShardedMask",
    "context_parallel_attention",
    "explain_context_parallel",
    "prepare_mask",
    "use_context_parallel",
]
