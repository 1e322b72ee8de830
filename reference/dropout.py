"""Dropout of the probabilities: a dropout key and the position of a probability decide whether it is kept.

The generator is Philox4x32-7. It is a function of four counters and a key of two 32-bit numbers, and returns four
numbers of 32 bits. One call serves four probabilities: two queries that are 8 apart, by two keys that are 8 apart::

    counters    j', i', h, b    of key j, query i, head h, entry b;  i' is i without its bit 3: i // 16 * 8 + i % 8
    word        2 * bit 3 of i + bit 3 of j, out of 0 to 3
    kept        where word >= threshold = floor(p * 2^32), and then times scale = 1 / (1 - p)

So tiles, threads and chunks do not change the result. The distance is 8 because a thread of a tensor core has rows 8
apart, and columns 8 apart, in its registers. So a thread uses all numbers of its calls.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Seven rounds pass every test of BigCrush. The authors advise ten for safety, but in kernels of attention three more
# rounds would add a third to the cost of dropout. FlashAttention has seven, too.
ROUNDS = 7
# The multipliers minus 2^32, because products with the multipliers themselves would overflow int64.
_MULTIPLIERS = (0xD2511F53 - 2**32, 0xCD9E8D57 - 2**32)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 2**32 - 1

# In a block of 16 queries or keys, number i and number i + 8 have the same counters.
BLOCK, HALF = 16, 8

# In the second number of a key: the places at which a part of a call begins follow.
_PLACES_FOLLOW = 1 << 32

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counters: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Return the four numbers of Philox4x32-7, int64 of 0 to 2^32 - 1.

    Args:
        counters: four tensors, int64 of 0 to 2^32 - 1, which broadcast against each other.
        key: two tensors, int64 of 0 to 2^32 - 1.

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
    """Return the upper and the lower 32 bits of word * (multiplier + 2^32)."""
    product = word * multiplier
    return (product >> 32) + word, product & _WORD


def draw_key(device: torch.device) -> Tensor:
    """Draw the dropout key of one call, two 32-bit numbers in int64 (2,), from torch's generator of a device.

    It is an ordinary random operation of torch. So CUDA graphs capture it, compilers record it, `torch.manual_seed` and
    checkpoints reproduce it, and `torch.vmap` applies its `randomness`.
    """
    return torch.randint(0, 2**32, (2,), device=device)


def key_of_part(key: Tensor, *, row: int = 0, first_key: int = 0, head: int = 0, entry: int = 0) -> Tensor:
    """Return the dropout key of a part of a call, which drops what the whole call drops there: int64 (4,).

    The part is a call of its own, whose kernels count from 0. So bit 32 of the second number says that two numbers
    follow. Each has two places of 32 bits, which kernels add: row and key, head and entry.

    Args:
        key: of the whole call, or of a part of it that is cut again.
        row, first_key: where the part begins. They are multiples of 16, because kernels draw for blocks of 16.
        head, entry: its first query head, and its first entry of the batch.

    >>> key_of_part(torch.tensor([1, 2]), row=16, head=3).tolist()
    [1, 4294967298, 16, 3]
    """
    if not (row or first_key or head or entry):
        return key
    assert row % BLOCK == 0 == first_key % BLOCK, "kernels draw for blocks of 16 rows and 16 keys"
    # Scalars are filled in, because a copy from the host would wait for the device.
    places = [
        torch.full((1,), low | high << 32, dtype=key.dtype, device=key.device)
        for low, high in ((row, first_key), (head, entry))
    ]
    if key.shape[0] == 2:
        return torch.cat((key[:1], key[1:] | _PLACES_FOLLOW, *places))
    return torch.cat((key[:2], key[2:] + torch.cat(places)))


def threshold_of(p: float) -> int:
    """Return the least number of a kept probability, floor(p * 2^32), at most 2^32 - 1: for p = 1 the scale is 0."""
    return min(int(p * 2**32), _WORD)


def scale_of(p: float) -> float:
    """Return the factor of kept probabilities, 1 / (1 - p); 0 for p = 1."""
    return 0.0 if p == 1.0 else 1.0 / (1.0 - p)


class Dropout(NamedTuple):
    """Dropout of one call.

    Attributes:
        p: the rate, from 0 to 1, at which probabilities are dropped.
        key: int64 (2,), see `draw_key`, or (4,) for a part of a call, see `key_of_part`.
        first_entry: the number of the first entry of the batch.
    """

    p: float
    key: Tensor
    first_entry: int = 0

    @property
    def scale(self) -> float:
        """Return the factor of kept probabilities."""
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
        counters: Words = (
            counter(first_key * HALF, (first_key + key_blocks) * HALF, 3),
            counter(first_row * HALF, (first_row + row_blocks) * HALF, 2),
            counter(heads.start, heads.stop, 1),
            counter(self.first_entry + batch.start, self.first_entry + batch.stop, 0),
        )
        if key.shape[0] > 2:
            a, b, c, d = counters
            counters = a + (key[2] >> 32) // 2, b + (key[2] & _WORD) // 2, c + (key[3] & _WORD), d + (key[3] >> 32)
        threshold = threshold_of(self.p)
        kept = torch.stack([word >= threshold for word in philox(counters, (key[0], key[1] & _WORD))])
        halves = kept.unflatten(4, (key_blocks, HALF)).unflatten(3, (row_blocks, HALF)).unflatten(0, (2, 2))
        # (half of queries, half of keys, batch, heads, row blocks, 8, key blocks, 8): each half goes to its block.
        blocks = halves.permute(2, 3, 4, 0, 5, 6, 1, 7).flatten(5, 7).flatten(2, 4)
        row, column = rows.start - first_row * BLOCK, keys.start - first_key * BLOCK
        return blocks[:, :, row : row + rows.stop - rows.start, column : column + keys.stop - keys.start]

    def kept_of(self, p: Tensor) -> Tensor:
        """Return whether each of the probabilities (B, Hk, G, Lq, Lk) of a call is kept."""
        batch, heads_k, group, seqlen_q, seqlen_k = p.shape
        kept = self.kept(slice(0, batch), slice(0, heads_k * group), slice(0, seqlen_q), slice(0, seqlen_k))
        return kept.unflatten(1, (heads_k, group))

    def apply(self, p: Tensor) -> Tensor:
        """Drop and scale probabilities (B, Hk, G, Lq, Lk), or other values that have one for each of them."""
        return torch.where(self.kept_of(p), p * self.scale, 0.0)

    def starting_at(self, entry: int) -> Dropout:
        """Return the dropout of a batch whose first entry has this number."""
        return self._replace(first_entry=entry)
