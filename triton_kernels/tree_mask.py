"""Device functions for tree masks: the keys that the queries of a tile visit, and the new tokens of each query.

The queries of a sequence are its new tokens, and these are also its last keys. A tree has bits for the new tokens only;
every query attends to all keys before them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile_ops import band_of_queries, blocks_of


@triton.jit
def keys_of_trees(first, last, rows, tree, stride, shape, LEFT: tl.constexpr, BLOCK: tl.constexpr):
    """Find the blocks of keys that queries `rows`, first..last, visit, in the form of `keys_of_queries`.

    For a tree that is a chain this is the causal result. Blocks without a mask check end at the first new token that is
    hidden from some row. The last block visited has the last new token that is visible to some row.
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
    """Return whether rows attend to keys: the (rows, keys) tile of BLOCK keys from `first_key` on."""
    old = shape.seqlen_k - shape.seqlen_q
    token = (keys - old)[None, :]
    seen = (rows * 0)[:, None]
    # Load 32 bits at a time, because a load per score would need registers for its pointers. Bits of keys before the
    # new tokens are all ones.
    for step in tl.static_range(0, BLOCK // 32 + 1):
        word = ((first_key - old) >> 5) + step
        is_word = (rows < shape.seqlen_q) & (word >= 0) & (word * 32 < shape.seqlen_q)
        words = tl.load(tree + rows * stride + word, mask=is_word, other=-1)[:, None]
        seen = tl.where((token >> 5) == word, words, seen)
    return ((seen >> (token & 31)) & 1) != 0
