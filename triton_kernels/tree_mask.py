"""Device functions for tree masks: which keys the queries of a tile visit, and which of the new tokens each sees.

The last keys of a sequence are its new tokens, its queries. Bits say of these alone; all keys before them are seen.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile_ops import band_of_queries, blocks_of


@triton.jit
def keys_of_trees(first, last, rows, tree, stride, shape, LEFT: tl.constexpr, BLOCK: tl.constexpr):
    """What `keys_of_queries` gives for queries `rows`, which are first..last: of a chain what it gives under causality.

    Blocks that need no look end where some row does not see a new token; none is visited behind the last that one sees.
    """
    seen_by_all = shape.seqlen_q
    seen_by_some = 0
    is_row = (rows < shape.seqlen_q)[:, None]
    for word in range(0, tl.cdiv(shape.seqlen_q, 32)):
        tokens = word * 32 + tl.arange(0, 32)[None, :]
        words = tl.load(tree + rows * stride + word, mask=rows < shape.seqlen_q, other=0)[:, None]
        sees = ((words >> (tokens % 32)) & 1) != 0
        is_token = is_row & (tokens < shape.seqlen_q)
        seen_by_all = tl.minimum(seen_by_all, tl.min(tl.where(is_token & (sees == 0), tokens, shape.seqlen_q)))
        seen_by_some = tl.maximum(seen_by_some, tl.max(tl.where(is_token & sees, tokens + 1, 0)))
    old = shape.seqlen_k - shape.seqlen_q
    lo, lo_full, _, _ = band_of_queries(first, last, shape, LEFT, False)
    hi = tl.maximum(0, old + seen_by_some)
    hi_full = tl.maximum(0, old + seen_by_all)
    start, full, end, stop = blocks_of(tl.minimum(lo, hi), lo_full, hi_full, hi, BLOCK)
    return 0, full, end - full, full - start, stop - end


@triton.jit
def tree_allows(tree, first_key, rows, keys, stride, shape, BLOCK: tl.constexpr):
    """Whether rows see keys as far as a tree says: the (rows, keys) tile of BLOCK keys from `first_key` on."""
    old = shape.seqlen_k - shape.seqlen_q
    token = (keys - old)[None, :]
    seen = (rows * 0)[:, None]
    # By words of a row, of which a block meets few: a load per score takes the registers of its pointers. Words of old
    # keys are all seen.
    for step in tl.static_range(0, BLOCK // 32 + 1):
        word = ((first_key - old) >> 5) + step
        is_word = (rows < shape.seqlen_q) & (word >= 0) & (word * 32 < shape.seqlen_q)
        words = tl.load(tree + rows * stride + word, mask=is_word, other=-1)[:, None]
        seen = tl.where((token >> 5) == word, words, seen)
    return ((seen >> (token & 31)) & 1) != 0
