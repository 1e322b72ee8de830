"""The cache in pages that one attention layer shares among the sequences it decodes."""

from __future__ import annotations

import torch

from flash_dmattn.sequences import Sequences, append_to_cache


class PagedKVCache:
    """Keys, values and key scores of one layer in pages of a pool; `Sequences.paged` says whose pages they are.

    Which pages a sequence has is the caller's to decide: the same `block_table` serves the caches of all layers. A page
    is free again as soon as no table names it.

    Args:
        pages, page_size: of the pool.
        num_heads_k, head_dim: of the layer's keys and values.
        has_scores: whether it also holds key scores, as a layer with `keep_window_size` needs.
        device, dtype: of the keys and values; scores have fp32 at least.

    Attributes:
        k, v: (pages, page_size, Hk, D).
        scores: (pages, page_size, Hk), or None.

    >>> cache = PagedKVCache(pages=4, page_size=16, num_heads_k=2, head_dim=8)
    >>> cache.k.shape, cache.scores.shape
    (torch.Size([4, 16, 2, 8]), torch.Size([4, 16, 2]))
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        num_heads_k: int,
        head_dim: int,
        *,
        has_scores: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = (pages, page_size, num_heads_k)
        for name, size in zip(("pages", "page_size", "num_heads_k", "head_dim"), (*shape, head_dim), strict=True):
            if size < 1:
                raise ValueError(f"{name} is {size}; it must be at least 1")
        self.k = torch.zeros(*shape, head_dim, device=device, dtype=dtype)
        self.v = torch.zeros_like(self.k)
        of_scores = torch.promote_types(self.k.dtype, torch.float32)
        self.scores = torch.zeros(shape, device=device, dtype=of_scores) if has_scores else None

    def append(self, k: torch.Tensor, v: torch.Tensor, scores: torch.Tensor | None, sequences: Sequences) -> None:
        """Write the keys, values and scores of new tokens to the last places of their sequences.

        Args:
            k, v: (S, L, Hk, D), or (T, Hk, D) where queries are packed; keys already rotated to their positions.
            scores: the same without D, or None of a layer with full attention.
            sequences: `Sequences.paged`, whose seqlens_k count the new tokens.

        Raises:
            TypeError, ValueError: as `append_to_cache`; or scores are given to a cache without, or not to one with.
        """
        if (scores is None) != (self.scores is None):
            has, needs = ("None", "a tensor") if scores is None else ("a tensor", "None")
            raise ValueError(f"scores is {has}; this cache needs {needs} (has_scores is {self.scores is not None})")
        append_to_cache(self.k, self.v, k, v, sequences)
        if scores is not None and self.scores is not None:
            append_to_cache(self.scores[..., None], None, scores[..., None], None, sequences)
