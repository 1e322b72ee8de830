"""Lists of keys for queries, and a bias with a value for each entry of a list: as tables of pairs, and chunk by chunk.

A table has a number for each query and key, for the rows and keys of one chunk: the slot of the entry that chose the
pair, or -1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Lists(NamedTuple):
    """Lists of blocks of keys: list i // block_q is for query i, and entry n is for keys from n * block_k on.

    Attributes:
        keys: int32 (Bm, Hm, R, K), ascending, each once, -1 last.
        slots: int32 (Bm, Hm, R, K), the index of each entry in the list of the caller. Or (Bm, Hm, R, 0) if the order
            of entries is unchanged.
        block_q, block_k: queries of a list, and keys of a block.
    """

    keys: Tensor
    slots: Tensor
    block_q: int
    block_k: int


class ListValues(NamedTuple):
    """A bias with one value for each entry of a list, which all keys of its block get.

    Attributes:
        values: (Bv, Hv, Lq or R, K), in the order of the caller's lists.
        lists: of the call.
        repeat: of the lists: entry b of the batch has entry b // repeat % Bm.
    """

    values: Tensor
    lists: Lists
    repeat: int = 1


def table(keys: Tensor, slots: Tensor, first: int, number: int) -> Tensor:
    """Return the slots of the blocks from `first` on, (..., R, number): -1 where a list does not have the block.

    >>> table(torch.tensor([[0, 2, -1]]), torch.tensor([[1, 0, -1]]), 0, 4)
    tensor([[ 1, -1,  0, -1]])
    """
    values = slots if slots.shape[-1] else torch.arange(keys.shape[-1], dtype=keys.dtype, device=keys.device)
    place = keys.long() - first
    # One more column, which is dropped, is for entries outside of the range.
    place = torch.where((place >= 0) & (place < number), place, number)
    made = keys.new_full((*keys.shape[:-1], number + 1), -1)
    return made.scatter_(-1, place, values.expand(keys.shape))[..., :number]


def spread(x: Tensor, dim: int, block: int, start: int, stop: int) -> Tensor:
    """Repeat each element of a dim for its block, beginning with block start // block; return start to stop."""
    if block > 1:  # a block may be longer than the whole dim
        x = x.repeat_interleave(min(block, start % block + stop - start), dim)
    return x.narrow(dim, start % block, stop - start)


def sum_blocks(x: Tensor, dim: int, block: int, start: int) -> Tensor:
    """Return the sums of a dim over blocks; its first element has number `start`. This is the reverse of `spread`."""
    length = x.shape[dim]
    if block == 1:
        return x
    if 0 < start % block + length <= block:  # one block, possibly longer than the whole dim
        return x.sum(dim, keepdim=True)
    padding = (0, 0) * (x.dim() - 1 - dim) + (start % block, -(start + length) % block)
    return F.pad(x, padding).unflatten(dim, (-1, block)).sum(dim + 1)


def blocks_of(run: slice, block: int) -> slice:
    """Return the blocks that a run touches."""
    return slice(run.start // block, -(-run.stop // block))


def slot_table(lists: Lists, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Return the slot of each pair of a call, int64 (Bm, Hm, Lq, Lk): -1 where no entry chose it."""
    made = table(lists.keys, lists.slots, 0, -(-seqlen_k // lists.block_k))
    return spread(spread(made, 2, lists.block_q, 0, seqlen_q), 3, lists.block_k, 0, seqlen_k).long()


def dense_bias(values: Tensor, slots: Tensor, block_q: int) -> Tensor:
    """Return the bias of each pair of a call, (B, H, Lq, Lk): 0 where no entry chose it; differentiable.

    Args:
        values: (Bv, Hv, Lq or R, K), differentiable.
        slots: of `slot_table`. Its heads are 1, or a multiple or divisor of the heads of values.
        block_q: of the lists.
    """
    heads = max(values.shape[1], slots.shape[1])
    values, slots = repeat_heads(by_query(values, slots.shape[2], block_q), heads), repeat_heads(slots, heads)
    if values.shape[3] == 0:
        return values.new_zeros(slots.shape) + values.flatten()[:0].sum()
    return gather_entries(values, slots)


def gather_entries(values: Tensor, index: Tensor) -> Tensor:
    """Gather the values of an index in each row, both of four dims that broadcast; 0 where the index is negative."""
    shape = torch.broadcast_shapes(values.shape[:3], index.shape[:3])
    # Not `take_along_dim`, which would make a symbolic length of a compiler a constant.
    taken = values.expand(*shape, -1).gather(3, index.clamp(min=0).long().expand(*shape, -1))
    return taken.masked_fill(index < 0, 0.0)


def value_gradient(dbias: Tensor, values: Tensor, slots: Tensor, block_q: int) -> Tensor:
    """Return the gradient of the values from the gradient of `dense_bias`, (B, H, Lq, Lk); differentiable."""
    heads = dbias.shape[1]
    slots = repeat_heads(slots, heads).expand(dbias.shape)
    zeros = dbias.new_zeros(*dbias.shape[:3], values.shape[3])
    sums = zeros.scatter_add(3, slots.clamp(min=0), dbias.masked_fill(slots < 0, 0.0)) if values.shape[3] else zeros
    if values.shape[2] != sums.shape[2]:
        sums = sum_blocks(sums, 2, block_q, 0)
    if values.shape[1] not in (1, heads):
        sums = sums.unflatten(1, (values.shape[1], -1)).sum(2)
    return sums.sum_to_size(values.shape)


def by_query(values: Tensor, seqlen_q: int, block_q: int) -> Tensor:
    """Give each query the values of its list."""
    if values.shape[2] == seqlen_q:
        return values
    return values.repeat_interleave(min(block_q, max(seqlen_q, 1)), 2)[:, :, :seqlen_q]


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat heads of groups to `num_heads` heads; one head for all stays one."""
    return x if x.shape[1] in (1, heads) else x.repeat_interleave(heads // x.shape[1], 1)
