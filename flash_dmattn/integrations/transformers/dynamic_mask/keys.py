"""The keys that a forward of the dynamic-mask language model sees: those of a cache, and which of them are real."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Keys:
    """A cache of transformers and the padding of its keys, for all layers of one forward.

    Args:
        cache: of transformers, dynamic or static; None without one.
        attention_mask: (B, cached + L) bool or integer, non-zero for a real token, or (B, 1, 1, keys) from
            `static_padding`; None where all are real.
        seqlen_q: L, the number of new tokens.
        device: theirs.

    Raises:
        ValueError: attention_mask has another shape.
        NotImplementedError: several tokens go into a static cache under torch.compile.

    Attributes:
        past: how many tokens are cached; a tensor of one in a static cache.
        padding: (B, 1, 1, keys) bool, True for a real key; None where all are.
    """

    def __init__(self, cache: Any, attention_mask: Tensor | None, seqlen_q: int, device: torch.device) -> None:
        self._cache = cache
        self.past: int | Tensor = 0 if cache is None else cache.get_seq_length()
        self._positions = torch.arange(seqlen_q, device=device) + self.past
        self._used: int | None = None  # keys of a static cache that are looked at; None for all
        padding = _checked(attention_mask)
        if is_static(cache):
            if padding is None or padding.dim() == 2:
                padding = static_padding(padding, cache, seqlen_q, device)
            # One query sees all keys that are real. Several need the keys to end at the last of them.
            if seqlen_q > 1:
                if torch.compiler.is_compiling():
                    raise NotImplementedError(
                        f"a static cache takes one token a step under torch.compile, and input_ids has {seqlen_q}: run "
                        "the prompt without it, as generate() does"
                    )
                self._used = int(self.past) + seqlen_q
                padding = padding[..., : self._used]
        elif padding is not None:
            _check_length(padding, int(self.past) + seqlen_q)
            padding = padding[:, None, None, :] if padding.dim() == 2 else padding
        # Where nothing is padded no mask is faster. Finding out waits for the device, as SDPA's mask does.
        if padding is not None and seqlen_q > 1 and not torch.compiler.is_compiling() and bool(padding.all()):
            padding = None
        self.padding = padding

    @property
    def query_index(self) -> Tensor | None:
        """(1,): where a single query lies among the keys of a static cache; None where the last key is its own."""
        return self._positions if is_static(self._cache) and self._positions.shape[0] == 1 else None

    @property
    def positions(self) -> Tensor:
        """(L,): the index of each new token among the keys."""
        return self._positions

    def append(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Put new keys and values (B, L, Hk, ·) behind those of a layer; returns all of them, (B, keys, Hk, ·)."""
        if self._cache is None:
            return k, v
        # Before 5.4 a static cache was told where to write; later ones know, and take no notice.
        where = {"cache_position": self._positions}
        k, v = (x.transpose(1, 2) for x in self._cache.update(k.transpose(1, 2), v.transpose(1, 2), layer, where))
        return k[:, : self._used], v[:, : self._used]


def is_static(cache: Any) -> bool:
    """Whether a cache has its full length from the beginning."""
    return cache is not None and bool(cache.is_compileable)


def static_padding(attention_mask: Tensor | None, cache: Any, seqlen_q: int, device: torch.device) -> Tensor:
    """(B or 1, 1, 1, keys) bool: the keys of a static cache that are real once seqlen_q more tokens are in it.

    Args:
        attention_mask: (B, at most keys), non-zero for a real token, or None where all tokens are.
        cache: a static cache.
        seqlen_q: number of new tokens.
        device: theirs.
    """
    keys = cache.layers[0].max_cache_len
    index = torch.arange(keys, device=device)
    real = (index < cache.get_seq_length() + seqlen_q)[None]
    if attention_mask is not None:
        real = real & F.pad(attention_mask.bool()[:, :keys], (0, max(0, keys - attention_mask.shape[1])))
    return real[:, None, None, :]


def _checked(attention_mask: Tensor | None) -> Tensor | None:
    if attention_mask is None:
        return None
    shape = tuple(attention_mask.shape)
    if len(shape) != 2 and not (len(shape) == 4 and shape[1:3] == (1, 1)):
        raise ValueError(
            f"attention_mask has shape {shape}; it needs to be (batch, keys), non-zero for a real token: which keys a "
            "query sees is the choice of the model"
        )
    return attention_mask.bool()


def _check_length(padding: Tensor, keys: int) -> None:
    if padding.shape[-1] != keys:
        raise ValueError(
            f"attention_mask has shape {tuple(padding.shape)}; it needs (batch, {keys}), cached tokens included"
        )
