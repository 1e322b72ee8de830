"""Dropout of the probabilities: which of them are kept follows from a key and the place of each, and nothing else.

The generator is Philox4x32-7, which is keyed and counts: its four words of 32 bits are a function of four counters and
of a key of two words. One call of it serves four probabilities, those of two queries and two keys that are 8 apart::

    counters    j', i', h, b    of key j, query i, head h, entry b;  i' is i without its bit 3: i // 16 * 8 + i % 8
    word        2 * bit 3 of i + bit 3 of j, out of 0 to 3
    kept        where word >= threshold = floor(p * 2^32), and then times scale = 1 / (1 - p)

So neither tiles nor threads nor chunks have a say. The two keys and queries are 8 apart because a thread of a tensor
core has both in its registers, in rows and in columns: what one call of Philox makes never leaves the thread.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Seven rounds pass every test of BigCrush. The authors advise ten for safety; in kernels of attention three rounds more
# would be a third of what dropout costs. FlashAttention has seven, too.
ROUNDS = 7
# The multipliers less 2^32: products of them with a word fit int64, which those of the multipliers do not.
_MULTIPLIERS = (0xD2511F53 - 2**32, 0xCD9E8D57 - 2**32)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 2**32 - 1

# Queries, and keys, of which half share their counters with the other half.
BLOCK, HALF = 16, 8

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counters: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Return the four words of Philox4x32-7, int64 of 0 to 2^32 - 1.

    Args:
        counters: four of them, int64 of 0 to 2^32 - 1, which broadcast against each other.
        key: two words of the same kind.

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011), sections 3.2 and 4.

    >>> zero = torch.tensor(0)
    >>> [f"{x.item():08x}" for x in philox((zero, zero, zero, zero), (zero, zero))]  # as Random123 gives it
    ['5f6fb709', '0d893f64', '4f121f81', '4f730a48']
    """
    a, b, c, d = counters
    key_a, key_b = key
    for _ in range(ROUNDS):
        high_a, low_a = _product(a, _MULTIPLIERS[0])
        high_c, low_c = _product(c, _MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ key_a, low_c, high_a ^ d ^ key_b, low_a
        key_a, key_b = (key_a + _WEYL[0]) & _WORD, (key_b + _WEYL[1]) & _WORD
    return a, b, c, d


def _product(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """The upper and the lower word of word * (multiplier + 2^32)."""
    product = word * multiplier
    return (product >> 32) + word, product & _WORD


def draw_key(device: torch.device) -> Tensor:
    """Draw the key of one call, two words in int64 (2,), from torch's generator of a device.

    An operation of torch like any other: it is captured in a CUDA graph, recorded by compilers, repeated under
    `torch.manual_seed` and by checkpoints, and follows the randomness of `torch.vmap`.
    """
    return torch.randint(0, 2**32, (2,), device=device)


def threshold_of(p: float) -> int:
    """The least word of what is kept, floor(p * 2^32), at most 2^32 - 1: of p = 1 the scale leaves nothing."""
    return min(int(p * 2**32), _WORD)


def scale_of(p: float) -> float:
    """The factor on what is kept, 1 / (1 - p); of p = 1 it is 0."""
    return 0.0 if p == 1.0 else 1.0 / (1.0 - p)


class Dropout(NamedTuple):
    """Dropout of one call.

    Attributes:
        p: the probability that one is dropped, from 0 to 1.
        key: int64 (2,), two words of 32 bits: see `draw_key`.
        first_entry: the number of the first entry of the batch.
    """

    p: float
    key: Tensor
    first_entry: int = 0

    @property
    def scale(self) -> float:
        """The factor on what is kept."""
        return scale_of(self.p)

    def kept(self, batch: slice, heads: slice, rows: slice, keys: slice) -> Tensor:
        """Return whether each probability of a part of the call is kept, bool (batch, query heads, rows, keys).

        Args:
            batch, heads, rows, keys: slices with a start and a stop.
        """
        device, key = self.key.device, self.key

        def counter(start: int, stop: int, dim: int) -> Tensor:
            return torch.arange(start, stop, device=device).view([-1 if d == dim else 1 for d in range(4)])

        first_row, first_key = rows.start // BLOCK, keys.start // BLOCK
        row_blocks, key_blocks = -(-rows.stop // BLOCK) - first_row, -(-keys.stop // BLOCK) - first_key
        counters = (
            counter(first_key * HALF, (first_key + key_blocks) * HALF, 3),
            counter(first_row * HALF, (first_row + row_blocks) * HALF, 2),
            counter(heads.start, heads.stop, 1),
            counter(self.first_entry + batch.start, self.first_entry + batch.stop, 0),
        )
        threshold = threshold_of(self.p)
        found = torch.stack([word >= threshold for word in philox(counters, (key[0], key[1]))])
        halves = found.unflatten(4, (key_blocks, HALF)).unflatten(3, (row_blocks, HALF)).unflatten(0, (2, 2))
        # (of queries, of keys, batch, heads, row blocks, 8, key blocks, 8), each half in its block.
        whole = halves.permute(2, 3, 4, 0, 5, 6, 1, 7).flatten(5, 7).flatten(2, 4)
        row, column = rows.start - first_row * BLOCK, keys.start - first_key * BLOCK
        return whole[:, :, row : row + rows.stop - rows.start, column : column + keys.stop - keys.start]

    def kept_of(self, p: Tensor) -> Tensor:
        """The same of whole probabilities (B, Hk, G, Lq, Lk)."""
        batch, heads_k, group, seqlen_q, seqlen_k = p.shape
        whole = self.kept(slice(0, batch), slice(0, heads_k * group), slice(0, seqlen_q), slice(0, seqlen_k))
        return whole.unflatten(1, (heads_k, group))

    def apply(self, p: Tensor) -> Tensor:
        """Return probabilities (B, Hk, G, Lq, Lk), or what goes with each of them, dropped and scaled."""
        return torch.where(self.kept_of(p), p * self.scale, 0.0)

    def of_entry(self, number: int) -> Dropout:
        """Dropout of a batch that begins with another entry."""
        return self._replace(first_entry=number)
