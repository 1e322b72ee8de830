"""The cache of keys, values and key scores that one attention layer decodes from."""

from __future__ import annotations

import torch

from flash_dmattn.masks.arguments import integer


class KVCache:
    """Keys, values and key scores of the tokens that one layer has seen.

    Equivalent to ``torch.cat((old, new), dim=1)`` for each of k, v and scores, without copying what is already there:
    storage is allocated ahead and doubled when it runs out. One cache belongs to one layer.

    Args:
        max_length: number of tokens to allocate for at the first `append`; the cache still grows beyond it.

    >>> cache = KVCache(max_length=8)
    >>> k = v = torch.zeros(1, 3, 2, 4)
    >>> keys, values, scores = cache.append(k, v, torch.zeros(1, 3, 2))
    >>> cache.length, tuple(cache.append(k[:, :1], v[:, :1], torch.ones(1, 1, 2))[2].shape)
    (3, (1, 4, 2))
    """

    def __init__(self, max_length: int = 256) -> None:
        self.max_length = integer("max_length", max_length, 1)
        self.length = 0
        self._storage: tuple[torch.Tensor | None, ...] = (None, None, None)

    def append(
        self, k: torch.Tensor, v: torch.Tensor, scores: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Add tokens and return everything cached so far.

        Args:
            k: (B, L, Hk, D) new keys, already rotated to their positions.
            v: (B, L, Hk, Dv) new values.
            scores: (B, L, Hk) their key scores, or None in a layer with full attention.

        Returns:
            (k, v, scores) of all tokens, along dim 1, as views of the storage: valid until the next `append`.

        Raises:
            RuntimeError: a gradient is being recorded; the storage is written in place and has none.
            ValueError: batch, heads or the presence of scores differ from what is cached.
        """
        new = (k, v, scores)
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in new):
            raise RuntimeError("KVCache.append would lose the gradient of k, v or scores; decode under torch.no_grad()")
        if self.length:
            self._check_same_kind(new)
        end = self.length + k.shape[1]
        self._storage = tuple(
            None if x is None else self._reserve(held if self.length else None, x, end)
            for held, x in zip(self._storage, new, strict=True)
        )
        for held, x in zip(self._storage, new, strict=True):
            if held is not None and x is not None:
                held[:, self.length : end] = x
        self.length = end
        keys, values, key_scores = (None if held is None else held[:, :end] for held in self._storage)
        assert keys is not None and values is not None
        return keys, values, key_scores

    def truncate(self, length: int) -> None:
        """Forget every token from position ``length`` on, as after a rejected draft; the storage is kept.

        >>> cache = KVCache()
        >>> _ = cache.append(torch.zeros(1, 5, 1, 2), torch.zeros(1, 5, 1, 2), None)
        >>> cache.truncate(2)
        >>> cache.length
        2
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"length is {length}; it needs to be 0 to {self.length}, the tokens that the cache holds")
        self.length = length

    def _reserve(self, held: torch.Tensor | None, x: torch.Tensor, end: int) -> torch.Tensor:
        if held is not None and held.shape[1] >= end:
            return held
        capacity = max(end, self.max_length if held is None else 2 * held.shape[1])
        grown = x.new_empty((x.shape[0], capacity, *x.shape[2:]))
        if held is not None:
            grown[:, : self.length] = held[:, : self.length]
        return grown

    def _check_same_kind(self, new: tuple[torch.Tensor | None, ...]) -> None:
        for name, held, x in zip(("k", "v", "scores"), self._storage, new, strict=True):
            if (held is None) != (x is None):
                has, needs = ("None", "a tensor") if x is None else ("a tensor", "None")
                raise ValueError(f"{name} is {has}; this cache was filled with {needs}: use one cache per layer")
            if held is None or x is None:
                continue
            if (held.shape[0], *held.shape[2:]) != (x.shape[0], *x.shape[2:]):
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}; the cache holds "
                    f"({held.shape[0]}, {self.length}, {', '.join(map(str, held.shape[2:]))}): only dim 1 may differ"
                )
