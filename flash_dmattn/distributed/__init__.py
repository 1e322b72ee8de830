"""Attention over several GPUs: context parallelism, which shares one sequence among the ranks of a group."""

from .api import context_parallel_attention
from .context import use_context_parallel
from .layout import SequenceLayout
from .mask import ShardedMask, prepare_mask

__all__ = ["SequenceLayout", "ShardedMask", "context_parallel_attention", "prepare_mask", "use_context_parallel"]
