"""Attention over several GPUs: context parallelism, which shards one sequence over the ranks of a group."""

from .api import context_parallel_attention, gather_sequence
from .explanation import explain_context_parallel
from .group import use_context_parallel
from .layout import SequenceLayout
from .slices import ShardedMask

__all__ = [
    "SequenceLayout",
    "ShardedMask",
    "context_parallel_attention",
    "explain_context_parallel",
    "gather_sequence",
    "use_context_parallel",
]
