"""Where the tokens, the keys and the key scores of sequences lie in one call of a layer, and which keys are kept."""

from __future__ import annotations

import torch

from flash_dmattn.masks.prepared.operators import run_score_keys, run_topk_intervals
from flash_dmattn.problem import values_can_be_read
from flash_dmattn.sequences import Sequences
from flash_dmattn.sequences.tokens import token_places

from .kv_cache import KVCache
from .paged_cache import PagedKVCache


class LayerSequences:
    """The sequences of one call of a layer of self-attention.

    Args:
        x: (T, hidden_size) where sequences pack queries, else (S, L, hidden_size).
        hidden_size: what x has to have.
        attention_mask, cache, sequences: the arguments of the layer.

    Attributes:
        pool: the cache of paged sequences; None of packed ones.
        positions: int64, of x without its last dim: the position of each token in its sequence.

    Raises:
        TypeError, ValueError: the arguments do not go together.
    """

    def __init__(
        self,
        x: torch.Tensor,
        hidden_size: int,
        attention_mask: torch.Tensor | None,
        cache: KVCache | PagedKVCache | None,
        sequences: Sequences,
    ) -> None:
        self.pool = _pool_of(sequences, attention_mask, cache)
        self.is_packed = sequences.cu_seqlens_q is not None
        if x.dim() != (2 if self.is_packed else 3) or x.shape[-1] != hidden_size:
            needs = "(tokens" if self.is_packed else "(sequences, length"
            raise ValueError(f"x has shape {tuple(x.shape)}; beside these sequences it must be {needs}, {hidden_size})")
        like = x.unsqueeze(-2)  # for all that decides where sequences lie, a head
        k, v = (like, like) if self.pool is None else (self.pool.k, self.pool.v)
        self._spec = sequences.spec(like, k, v)
        self._view = sequences.view(self._spec, k.shape[0], names=("x", "x" if self.pool is None else "cache"))
        self._bounds = self._view.bounds
        if self.pool is None and values_can_be_read(self._bounds):
            if not torch.equal(self._bounds[:, :2], self._bounds[:, 2:]):
                raise ValueError("cu_seqlens_k differ from cu_seqlens_q; in self-attention they must be the same")
        self._is_empty = len(self._bounds) == 0 or x.numel() == 0 or k.numel() == 0
        self.positions = torch.zeros(x.shape[:-1], dtype=torch.long, device=x.device)
        if not self._is_empty:
            entries = 1 if self.is_packed else x.shape[0]
            self._own, place, _ = token_places(self._bounds, entries, x.shape[-2], self.is_packed)
            lengths = self._bounds.long()[self._own]
            self.positions = (place + lengths[:, 3] - lengths[:, 1]).view(x.shape[:-1])

    def bias(self, scores: torch.Tensor) -> torch.Tensor:
        """The bias of key scores (T, Hk) or (pages, page_size, Hk): by packed key, or by position."""
        return scores.t().unsqueeze(1) if self.pool is None else self._by_sequence(scores).unsqueeze(2)

    def mask(self, ranks: torch.Tensor, keep: int, local: int) -> torch.Tensor | None:
        """The best `keep` keys of each prefix, and the `local` last ones; None where that is all of them.

        Args:
            ranks: of keys, shaped as scores.

        Returns:
            bool (Hk, T, max_seqlen_k) where queries are packed, else (S, Hk, L, max_seqlen_k).

        Raises:
            ValueError: packed sequences name no max_seqlen_k.
        """
        most = self._spec.max_seqlen_k
        if keep >= most or self._is_empty:
            return None
        if not self._spec.names_max[1]:
            raise ValueError(
                f"sequences name no max_seqlen_k; a layer that keeps {keep} keys needs it "
                "(Sequences.packed(..., max_seqlen_q=...))"
            )
        keys = run_score_keys(self._by_sequence(ranks)[:, :, None], None)
        # The best of a causal prefix stay so until better ones come: each key is kept by one interval of positions.
        # What stands behind the last key is in no prefix of a token.
        start, stop = run_topk_intervals(keys, keep, most, local)
        if not self.is_packed:
            position = self.positions[:, None, :, None]
            return (start[:, :, None] <= position) & (position < stop[:, :, None])
        # Head by head: what is compared takes four bytes where the mask takes one.
        own, position = self._own, self.positions[:, None]
        rows = [(start[own, h] <= position) & (position < stop[own, h]) for h in range(start.shape[1])]
        return torch.stack(rows)

    def _by_sequence(self, scores: torch.Tensor) -> torch.Tensor:
        """(S, Hk, max_seqlen_k) of scores; any value behind the last key of a sequence."""
        most, table = self._spec.max_seqlen_k, self._view.block_table
        if table is not None:
            pages = table.long().clamp(0, scores.shape[0] - 1)
            return scores[pages].flatten(1, 2)[:, :most].transpose(1, 2)
        place = self._bounds[:, 2:3].long() + torch.arange(most, device=scores.device)
        return scores[place.clamp(max=max(scores.shape[0] - 1, 0))].transpose(1, 2)


def _pool_of(
    sequences: Sequences, attention_mask: torch.Tensor | None, cache: KVCache | PagedKVCache | None
) -> PagedKVCache | None:
    """The cache of paged sequences, None of packed ones; refuse what does not go with them."""
    if not isinstance(sequences, Sequences):
        raise TypeError(f"sequences is a {type(sequences).__name__}; it must be a flash_dmattn.Sequences")
    if attention_mask is not None:
        raise ValueError("attention_mask is a tensor; beside sequences it must be None: they have no padding")
    if sequences.layout == "padded":
        raise ValueError("sequences are padded; they must be packed or paged (or pass attention_mask in their place)")
    if sequences.layout == "packed":
        if cache is not None:
            raise ValueError(
                f"cache is a {type(cache).__name__}; beside packed sequences it must be None (Sequences.paged has one)"
            )
        return None
    if not isinstance(cache, PagedKVCache):
        raise ValueError(f"cache is a {type(cache).__name__}; beside paged sequences it must be a PagedKVCache")
    return cache
