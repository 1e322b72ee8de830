"""The eager passes with the blocks of queries of an interval mask as entries of a batch.

If queries keep few keys each, the host takes longer for a block of queries, of some forty small operations, than its
products. Here all blocks are one call. Each is an entry with one key-value head, which has copies of the visible keys
of the block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import eager, formula
from .chunks import GOOD_ROWS, GOOD_SCORES
from .distances import AnyBias
from .masks import AnyMask, Intervals

# All blocks have the number of keys of the largest, which may be at most this multiple of their visible keys.
_MOST_PADDING = 2


class QueryBlocks(NamedTuple):
    """The blocks of one call, of N = B * Hk * blocks entries with K keys each.

    Attributes:
        sizes: (B, Hk, G, blocks, rows of a block), of the call.
        seqlens: (Lq, Lk) of the call.
        places: (N * K,), the key of each entry in a (B * Hk * (Lk + 1), X) matrix. Key Lk of a head stands for no key.
        mask: the queries of its block that see each of them.
        dtype: of the softmax.
    """

    sizes: tuple[int, int, int, int, int]
    seqlens: tuple[int, int]
    places: Tensor
    mask: Intervals
    dtype: torch.dtype

    def cut(self, x: Tensor) -> Tensor:
        """Return the rows of a (B, Lq, Hq, X) tensor as (N, rows, G, X)."""
        batch, heads, group, blocks, rows = self.sizes
        more = blocks * rows - self.seqlens[0]
        x = (F.pad(x, (0, 0, 0, 0, 0, more)) if more else x).to(self.dtype)
        x = x.reshape(batch, blocks, rows, heads, group, x.shape[3]).permute(0, 3, 1, 2, 4, 5)
        return x.reshape(batch * heads * blocks, rows, group, x.shape[5])

    def join(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the (N, rows, G, X) rows of blocks as a (B, Lq, Hq, X) tensor."""
        batch, heads, group, blocks, rows = self.sizes
        x = x.reshape(batch, heads, blocks, rows, group, x.shape[3]).permute(0, 2, 3, 1, 4, 5)
        x = x.reshape(batch, blocks * rows, heads * group, x.shape[5])
        return x[:, : self.seqlens[0]].to(dtype).contiguous()

    def gather(self, x: Tensor) -> Tensor:
        """Return the keys of a (B, Lk, Hk, X) tensor as (N, K, 1, X)."""
        # The extra key is zero, so that products with it are finite.
        rows = F.pad(x.transpose(1, 2), (0, 0, 0, 1)).to(self.dtype)
        return rows.reshape(-1, x.shape[3]).index_select(0, self.places).view(len(self.mask.start), -1, 1, x.shape[3])

    def scatter(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sums (B, Lk, Hk, X) of the (N, K, 1, X) gradients of gathered keys."""
        batch, heads, seqlen_k, width = *self.sizes[:2], self.seqlens[1], x.shape[3]
        sums = x.new_zeros(batch * heads * (seqlen_k + 1), width)
        sums.index_add_(0, self.places, x.reshape(-1, width))
        sums = sums.view(batch, heads, seqlen_k + 1, width)[:, :, :seqlen_k]
        return sums.transpose(1, 2).to(dtype).contiguous()

    def gather_bias(self, bias: Tensor | None) -> Tensor | None:
        """Return a bias (B or 1, heads, 1, Lk) as (N, G or 1, 1, K)."""
        if bias is None:
            return None
        batch, heads = self.sizes[:2]
        rows = formula.grouped(bias, heads, heads * self.sizes[2])[:, :, :, 0].expand(batch, heads, -1, -1)
        return self.gather(rows.permute(0, 3, 1, 2)).permute(0, 3, 2, 1)

    def scatter_bias(self, dbias: Tensor, bias: Tensor) -> Tensor:
        """Return the gradient of a bias from the gradient of its gathered keys."""
        sums = self.scatter(dbias.permute(0, 3, 2, 1), self.dtype).permute(0, 2, 3, 1)  # (B, Hk, G or 1, Lk)
        grouped_bias = formula.grouped(bias, self.sizes[1], self.sizes[1] * self.sizes[2])
        return sums[:, :, :, None].sum_to_size(grouped_bias.shape).reshape(bias.shape).to(bias.dtype)


@torch.no_grad()
def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: AnyMask | None, bias: AnyBias | None, **arguments: Any
) -> tuple[Tensor, ...]:
    """Compute :func:`eager.forward`, with all blocks of queries as one batch if that is faster."""
    blocks = query_blocks(q, k, v, mask, bias, arguments)
    if blocks is None:
        return eager.forward(q, k, v, mask, bias, **arguments)
    assert bias is None or isinstance(bias, Tensor)
    inputs = (blocks.cut(q), blocks.gather(k), blocks.gather(v), blocks.mask, blocks.gather_bias(bias))
    numbers = {**_own_numbers(arguments), **{name: arguments[name] for name in ("max_scores", "entropy")}}
    out, *rows = eager.forward(*inputs, **numbers)
    joined = (blocks.join(x.mT[..., None], x.dtype)[..., 0].mT.contiguous() for x in rows)
    return blocks.join(out, q.dtype), *joined


@torch.no_grad()
def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AnyMask | None,
    bias: AnyBias | None,
    out: Tensor,
    lse: Tensor,
    **arguments: Any,
) -> eager.Gradients:
    """Compute :func:`eager.backward`, with all blocks of queries as one batch if that is faster."""
    blocks = query_blocks(q, k, v, mask, bias, arguments)
    if blocks is None:
        return eager.backward(dout, dlse, q, k, v, mask, bias, out, lse, **arguments)
    assert bias is None or isinstance(bias, Tensor)

    def rows(x: Tensor) -> Tensor:
        return blocks.cut(x.mT[..., None])[..., 0].mT

    dlse_rows, lse_rows, entropy = None if dlse is None else rows(dlse), rows(lse), arguments["entropy"]
    inputs = (blocks.cut(q), blocks.gather(k), blocks.gather(v), blocks.mask, blocks.gather_bias(bias))
    numbers = {**_own_numbers(arguments), "needs_grad": arguments["needs_grad"]}
    if entropy is not None:
        numbers["entropy"] = tuple(rows(x) for x in entropy)
    dq, dk, dv, dbias = eager.backward(blocks.cut(dout), dlse_rows, *inputs, blocks.cut(out), lse_rows, **numbers)[:4]
    dq = None if dq is None else blocks.join(dq, q.dtype)
    dk, dv = (None if x is None else blocks.scatter(x, k.dtype) for x in (dk, dv))
    return dq, dk, dv, None if dbias is None or bias is None else blocks.scatter_bias(dbias, bias)


def _own_numbers(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that its blocks also have; the band is in the masks of blocks."""
    return {name: arguments[name] for name in ("softmax_scale", "softcap", "chunk_bytes")}


def query_blocks(
    q: Tensor, k: Tensor, v: Tensor, mask: AnyMask | None, bias: AnyBias | None, arguments: dict[str, Any]
) -> QueryBlocks | None:
    """Return the blocks of a call that is faster as one batch of them; None for other calls."""
    if not isinstance(mask, Intervals) or not _has_blocks(q, k, mask, bias, arguments):
        return None
    (batch, seqlen_q, num_heads, _), (seqlen_k, heads) = q.shape, k.shape[1:3]
    mask_batch, mask_heads, _ = mask.start.shape
    group, rows, most_bytes = num_heads // heads, _rows_of_blocks(q, k), arguments["chunk_bytes"]
    first = torch.arange(0, seqlen_q, rows, dtype=mask.start.dtype, device=q.device)[:, None]
    blocks = len(first)
    if mask_batch * mask_heads * blocks * seqlen_k > most_bytes:
        return None
    seen = ((mask.start[:, :, None] < first + rows) & (mask.stop[:, :, None] > first)).flatten(0, 2)
    counts = seen.sum(1)
    most, total = int(counts.max()), int(counts.sum())
    entries, width = batch * heads * blocks, q.shape[3] + v.shape[3]
    if not 0 < most * len(counts) <= _MOST_PADDING * total or 2 * entries * most * width * q.itemsize > most_bytes:
        return None
    # A chunk of eager has all entries and heads with the same mask. If it is large, the time of the host does not
    # matter.
    sharing = batch * heads // (mask_batch * mask_heads)
    if sharing * group * rows * most > GOOD_SCORES:
        return None
    block, key = seen.nonzero().unbind(1)
    slot = torch.arange(total, device=q.device) - (counts.cumsum(0) - counts)[block]
    keys = key.new_full((len(counts), most), seqlen_k).index_put_((block, slot), key)
    keys = keys.view(mask_batch, mask_heads, blocks, most).expand(batch, heads, -1, -1)
    # The extra key is hidden from all queries.
    bounds = [F.pad(x, (0, 1)).expand(batch, heads, -1)[:, :, None].expand(-1, -1, blocks, -1) for x in mask]
    own_mask = Intervals(*((x.gather(3, keys) - first).reshape(entries, 1, most) for x in bounds))
    head = torch.arange(batch * heads, device=q.device).view(batch, heads, 1, 1)
    places = (keys + head * (seqlen_k + 1)).flatten()
    sizes = (batch, heads, group, blocks, rows)
    return QueryBlocks(sizes, (seqlen_q, seqlen_k), places, own_mask, formula.softmax_dtype(q))


def _rows_of_blocks(q: Tensor, k: Tensor) -> int:
    return -(-GOOD_ROWS * k.shape[2] // q.shape[2])


def _has_blocks(q: Tensor, k: Tensor, mask: Intervals, bias: AnyBias | None, arguments: dict[str, Any]) -> bool:
    """Return whether the blocks of a call can compute it, and there are several."""
    if q.device.type != "cpu" or q.dtype != formula.softmax_dtype(q) or q.numel() == 0:
        return False
    if arguments["sink"] is not None or arguments["dropout"] is not None:
        return False
    (batch, seqlen_q), (seqlen_k, heads) = q.shape[:2], k.shape[1:3]
    has_key_bias = bias is None or (isinstance(bias, Tensor) and bias.shape[2:] == (1, seqlen_k))
    entries = {mask.start.shape[0], 1 if bias is None or not isinstance(bias, Tensor) else bias.shape[0]}
    reads_own = mask.start.shape[1] in (1, heads) and entries <= {1, batch}
    return has_key_bias and reads_own and seqlen_q > _rows_of_blocks(q, k)
