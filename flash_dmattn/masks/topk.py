"""The dynamic mask: for every query the k best scored keys among those it may see, exactly."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from ..definition import define
from ..problem import bounded, check_device, check_flag, collapse, hint
from .arguments import align_heads, bool_mask, common_shape, float_scores, integer, pad

# Heads of `IndexScores` whose products exist at once.
HEADS = 8
# Elements a chunk of rows may hold; about 25 bytes of work each (key, candidates, tie counter).
CHUNK_ELEMENTS = 1 << 22


class ScoresByRows(Protocol):
    """Scores that are computed for some queries at a time: `IndexScores`, which has these attributes."""

    @property
    def q(self) -> Tensor: ...
    @property
    def k(self) -> Tensor: ...
    @property
    def weights(self) -> Tensor: ...
    @property
    def relu(self) -> bool: ...
    @property
    def scale(self) -> float | None: ...
    @property
    def batch_dims(self) -> tuple[int, ...]: ...


def weighted_products(q: Tensor, k: Tensor, weights: Tensor, relu: bool, scale: float | None, rows: slice) -> Tensor:
    """Compute the scores of `IndexScores` for some queries and all keys, (B, 1, rows, Lk) in fp32."""
    wide: Any = torch.promote_types(q.dtype, torch.float32)
    q, k, weights = q.flatten(0, -4)[:, rows], k.flatten(0, -3), weights.flatten(0, -3)[:, rows]
    total = torch.zeros(q.shape[0], q.shape[1], k.shape[1], dtype=wide, device=q.device)
    for start in range(0, q.shape[2], HEADS):
        heads = slice(start, start + HEADS)
        products = rectified(torch.einsum("bihd,bjd->bihj", q[:, :, heads], k).to(wide), q.shape[3], relu, scale)
        total += torch.einsum("bih,bihj->bij", weights[:, :, heads].to(wide), products)
    return total.unsqueeze(1)


def row_chunks(number: int, step: int) -> list[slice]:
    """Split rows into chunks. One chunk has no limits: a loop would bind a length that a compiler has a symbol for."""
    if hint(number) <= hint(step):
        return [slice(None)]
    return [slice(start, start + step) for start in range(0, number, step)]


def rectified(products: Tensor, dim: int, relu: bool, scale: float | None) -> Tensor:
    """Scale the products of heads of `dim` channels, and with `relu` set negative ones to 0."""
    products = products * (dim**-0.5 if scale is None else scale)
    return products.relu() if relu else products


def topk_mask(
    scores: Tensor, k: int, *, is_causal: bool = False, mask: Tensor | None = None, seqlen_q: int | None = None
) -> Tensor:
    """Let each query see the `k` highest scored keys that `mask` and causality allow it.

    Equivalent, row by row, to a stable descending sort of the allowed scores and keeping the first k::

        allowed = mask & (j <= i + Lk - Lq) & (scores != -inf)
        order = scores.masked_fill(~allowed, -inf).sort(descending=True, stable=True).indices
        out = zeros.scatter(-1, order[..., :k], True) & allowed

    A row with k allowed keys or fewer keeps them all. Ties go to the earliest key. No key outside the allowed
    set is ever kept, so a row is empty only if nothing is allowed to it. A score of -inf forbids the key. NaN
    ranks below every number. The result carries no gradient.

    With one score per key and `is_causal`, row i keeps the top k of its own prefix. The threshold of a prefix
    only rises with its length, and all thresholds are found together in O(Lk log Lk); nothing larger than the
    result is allocated. Scores or masks that vary by query are selected in chunks of rows. No step waits for
    the device.

    Args:
        scores: float tensor of 1 to 4 dims, read from the right as (B or 1, H or 1, Lq or 1, Lk): 3 dims are
            (H, Lq, Lk), never (B, H, Lk).
        k: number of keys to keep, >= 1; may exceed Lk.
        is_causal: only keys j <= i + Lk - Lq are allowed to query i.
        mask: bool tensor broadcastable to (B, H, Lq, Lk), True = allowed. Its heads and the heads of
            `scores` may be grouped either way (query head h, key-value head h // G).
        seqlen_q: number of queries; by default what `scores` or `mask` have, and Lk if they have one row for all
            queries. Decoding one query against a cache needs `seqlen_q=1`, and scores or a mask of 2 or 3 dims that
            alone have another number of rows than of keys need that number.

    Returns:
        Bool tensor (B, H, Lq, Lk); (B, H, 1, Lk) where neither scores, mask nor causality vary by query.

    Raises:
        TypeError: `scores` is not float, `mask` is not bool, `k` is not an int, or `is_causal` is no bool.
        ValueError: k < 1, shapes that do not broadcast, or a number of queries that may be the batch or heads.

    Source: the dynamic mask of "Trainable Dynamic Mask Sparse Attention", 2025, made exact per prefix.

    Example:
        >>> scores = torch.tensor([3.0, 1.0, 2.0, 2.0])
        >>> topk_mask(scores, 2, is_causal=True)[0, 0].int()
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [1, 0, 1, 0],
                [1, 0, 1, 0]], dtype=torch.int32)
        >>> topk_mask(scores, 2).shape
        torch.Size([1, 1, 1, 4])
    """
    k = bounded(integer("k", k, 1))
    check_flag("is_causal", is_causal)
    # Loops follow the sizes, which a compiler would bind: for it there is one operator.
    run = _OPERATOR if torch.compiler.is_compiling() else _selected
    arguments = topk_arguments(scores, mask, seqlen_q)
    if seqlen_q is None:
        _refuse_batch_as_queries(scores, mask)
    selected: Tensor = run(*arguments, k, is_causal)
    return selected


def _refuse_batch_as_queries(scores: Tensor, mask: Tensor | None) -> None:
    """Refuse a tensor of 2 or 3 dims that alone says how many queries there are, where that is not the number of keys.

    Read from the right, the batch of (B, Lk) and the heads of (B, H, Lk) are queries.
    """
    seqlen_k = scores.shape[-1]
    tensors = {"scores": scores, "mask": mask}
    has_rows = {name: x for name, x in tensors.items() if x is not None and x.dim() > 1 and x.shape[-2] != 1}
    for name, x in has_rows.items():
        if len(has_rows) == 1 and x.dim() < 4 and x.shape[-2] != seqlen_k:
            shape, view = ("Lq, Lk", ":, None, None") if x.dim() == 2 else ("H, Lq, Lk", ":, :, None")
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, read from the right as ({shape}): {x.shape[-2]} queries of "
                f"{seqlen_k} keys; it needs seqlen_q={x.shape[-2]}, or 4 dims, {name}[{view}], where the first dim is "
                "the batch"
            )


def _selected(scores: Tensor, allowed: Tensor | None, seqlen_q: int, k: int, is_causal: bool) -> Tensor:
    """Make the mask of arguments that `topk_arguments` has checked; contiguous, as operators return it."""
    per_key = scores.size(2) == 1 and (allowed is None or allowed.size(2) == 1)
    if not per_key:
        return _topk_per_row(scores, k, allowed, seqlen_q, is_causal)
    keys = sort_keys(scores, allowed)
    return _topk_per_prefix(keys, k, seqlen_q) if is_causal else select(keys, k).contiguous()


def topk_arguments(scores: Tensor, mask: Tensor | None, seqlen_q: int | None) -> tuple[Tensor, Tensor | None, int]:
    """Check the arguments of `topk_mask`; return scores and mask, 4-D with aligned heads, and the number of queries.

    Scores have no gradient, and dims that were expanded are reduced to size 1.
    """
    if isinstance(scores, Tensor) and scores.dim() == 0:
        raise ValueError("scores is 0-D; it needs a dim of keys, the last one")
    scores = float_scores(scores)
    allowed = None if mask is None else bool_mask("mask", mask)
    if allowed is not None:
        check_device("mask", allowed.device, scores.device, "scores")
    if allowed is not None and allowed.size(3) not in (1, scores.size(3)):
        raise ValueError(f"mask has {allowed.size(3)} keys, scores {scores.size(3)}; mask needs 1 or as many keys")

    seqlen_q = _seqlen_q(scores, allowed, seqlen_q)
    scores = collapse(scores, dims=(0, 1, 2))
    if allowed is not None:
        allowed = collapse(allowed)
        scores, allowed = align_heads([scores, allowed], ["scores", "mask"])
        common_shape([scores, allowed], ["scores", "mask"])
    return scores, allowed, seqlen_q


def _seqlen_q(scores: Tensor, allowed: Tensor | None, seqlen_q: int | None) -> int:
    """Return the number of queries that the arguments agree on."""
    lengths = {}
    if seqlen_q is not None:
        lengths["seqlen_q"] = integer("seqlen_q", seqlen_q)
    for name, tensor in (("scores", scores), ("mask", allowed)):
        if tensor is not None and tensor.size(2) != 1:
            lengths[name] = tensor.size(2)
    if any(one != other for one, other in pairwise(lengths.values())):
        has = ", ".join(f"{name} has {n}" for name, n in lengths.items())
        raise ValueError(f"The numbers of queries differ: {has}; each needs to be 1 for all queries, or the same")
    return next(iter(lengths.values()), scores.size(3))


def sort_keys(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """Return integers in the order of the scores: the lowest for what is not allowed, the next for NaN.

    IEEE floats of one sign compare as their bits do. Flipping the lower bits of negative ones puts these in order, too.
    Integers make NaN and -inf ordinary values, and tie exactly where floats are equal.
    """
    wide = scores.double() if scores.dtype == torch.float64 else scores.float()
    integers = torch.int64 if wide.dtype == torch.float64 else torch.int32
    lowest, highest = torch.iinfo(integers).min, torch.iinfo(integers).max
    bits = (wide + 0.0).view(integers)  # -0.0 + 0.0 is 0.0: the two zeros tie
    keys = torch.where(bits < 0, bits ^ highest, bits)
    keys = keys.masked_fill_(wide.isnan(), lowest + 1).masked_fill_(wide == float("-inf"), lowest)
    return keys if allowed is None else torch.where(allowed, keys, lowest)


def score_keys(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """Apply `sort_keys` to one score per key, (B, H, 1, Lk): the result is (B, H, Lk), contiguous."""
    return sort_keys(scores, allowed)[:, :, 0].contiguous()


def select(keys: Tensor, k: int) -> Tensor:
    """Select the first k of each row in descending order of `keys`, the earliest first among equal ones."""
    allowed = keys > torch.iinfo(keys.dtype).min
    if k >= keys.size(-1):
        return allowed
    # topk promises nothing about ties, so it only provides the k-th value; the count settles the ties.
    kth = keys.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above = keys > kth
    tied = keys == kth
    places = k - above.sum(-1, keepdim=True, dtype=torch.int32)
    above |= tied & (tied.cumsum(-1, dtype=torch.int32) <= places)
    return above & allowed


def list_best(keys: Tensor, last: Tensor, k: int, local: int, places: int) -> tuple[Tensor, Tensor]:
    """List the columns that `select` chooses, and the allowed ones among the last `local` that a row may see.

    `last`, (rows,), is the last column that each row may see. The result is int32 (B, H, rows, places), ascending, then
    -1, and how many, (B, H, rows); no row chooses more than `places`.
    """
    columns = torch.arange(keys.size(-1), dtype=torch.int32, device=keys.device)
    chosen = select(keys, k)
    if local:
        chosen = chosen | ((columns > last[:, None] - local) & (keys > torch.iinfo(keys.dtype).min))
    place = torch.where(chosen, chosen.cumsum(-1) - 1, places)
    entries = columns.new_full((*keys.shape[:3], places + 1), -1)
    entries.scatter_(-1, place, columns.expand(place.shape))
    return entries[..., :places], chosen.sum(-1, dtype=torch.int32)


def _topk_per_row(scores: Tensor, k: int, allowed: Tensor | None, seqlen_q: int, is_causal: bool) -> Tensor:
    """Select the top k of rows that differ in scores or in what is allowed, in chunks of rows."""
    batch, num_heads, _, seqlen_k = _shape(scores, allowed)
    out = torch.empty(batch, num_heads, seqlen_q, seqlen_k, dtype=torch.bool, device=scores.device)
    columns = torch.arange(seqlen_k, device=scores.device)
    step = max(1, CHUNK_ELEMENTS // max(1, batch * num_heads * seqlen_k))
    for start in range(0, seqlen_q, step):
        rows = slice(start, min(start + step, seqlen_q))
        visible = None if allowed is None else _rows(allowed, rows)
        if is_causal:
            limit = torch.arange(rows.start, rows.stop, device=scores.device) + (seqlen_k - seqlen_q)
            causal = columns <= limit[:, None]
            visible = causal if visible is None else visible & causal
        out[:, :, rows] = select(sort_keys(_rows(scores, rows), visible), k)
    return out


def _shape(scores: Tensor, allowed: Tensor | None) -> torch.Size:
    return scores.shape if allowed is None else torch.broadcast_shapes(scores.shape, allowed.shape)


def _rows(tensor: Tensor, rows: slice) -> Tensor:
    return tensor if tensor.size(2) == 1 else tensor[:, :, rows]


def _topk_per_prefix(keys: Tensor, k: int, seqlen_q: int) -> Tensor:
    """Select the top k of every causal prefix of one row of keys: (B, H, 1, Lk) to (B, H, Lq, Lk)."""
    batch, num_heads, _, seqlen_k = keys.shape
    flat = keys.flatten(0, 2)
    rank = ranks(flat)
    prefix = torch.arange(seqlen_k - seqlen_q + 1, seqlen_k + 1, device=keys.device).clamp_(min=0)
    threshold = kth_smallest_of_prefixes(rank, prefix.expand(flat.size(0), -1), k)
    # A rank of seqlen_k is above every threshold: forbidden keys fall out in the one comparison.
    rank = rank.masked_fill_(flat == torch.iinfo(keys.dtype).min, seqlen_k).to(torch.int32)
    kept = rank[:, None, :] <= threshold.to(torch.int32)[:, :, None]
    return kept.tril_(seqlen_k - seqlen_q).view(batch, num_heads, seqlen_q, seqlen_k)


def ranks(keys: Tensor) -> Tensor:
    """Rank every key of a row in descending order, the earliest first among equal ones: int64 (N, L)."""
    order = keys.sort(dim=-1, descending=True, stable=True).indices
    positions = torch.arange(keys.size(1), device=keys.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, positions)


def kth_smallest_of_prefixes(rank: Tensor, prefix: Tensor, k: int) -> Tensor:
    """Find the k-th smallest (or else the largest) of the first `prefix` entries of each row of `rank`, int64 (N, Q).

    A wavelet matrix finds the answers bit by bit, highest first, for all prefixes (N, Q) at once. At each bit the row,
    a permutation of 0 to L - 1, is partitioned stably into zeros and ones. A query keeps the range of entries that
    share its higher bits; whether that range holds enough zeros decides its bit. The answer for a prefix of 0 means
    nothing.

    Source: Claude, Navarro and Ordonez, "The wavelet matrix", 2015, the quantile query.
    """
    length = rank.size(1)
    positions = torch.arange(length, device=rank.device)
    low, high = torch.zeros_like(prefix), prefix
    remaining = prefix.clamp(max=k) - 1
    answer = torch.zeros_like(prefix)
    for bit in reversed(range(max(0, length - 1).bit_length())):
        is_zero = (rank >> bit) & 1 == 0
        zeros_before = pad(is_zero.cumsum(1), (1, 0))
        zeros = zeros_before[:, -1:]
        zeros_low, zeros_high = zeros_before.gather(1, low), zeros_before.gather(1, high)
        inside = zeros_high - zeros_low
        one = remaining >= inside
        answer += one.to(answer.dtype) << bit
        remaining = torch.where(one, remaining - inside, remaining)
        low = torch.where(one, zeros + low - zeros_low, zeros_low)
        high = torch.where(one, zeros + high - zeros_high, zeros_high)
        before = zeros_before[:, :-1]
        rank = torch.empty_like(rank).scatter_(1, torch.where(is_zero, before, zeros + positions - before), rank)
    return answer


def topk_stops(keys: Tensor, k: int) -> Tensor:
    """Find for every key (N, L) the first position whose prefix has k keys that are better, from j to L.

    Key j is among the k best of the prefix that ends at p, itself included, exactly for `j <= p < stop[j]`: a key that
    k better ones have met never comes back. The k-th best rank of a prefix only falls as the prefix grows. So all of
    these thresholds are found together, as for `topk_mask`, and the place where they pass a key's own rank is a binary
    search: O(L log L) in time, O(L) in memory.
    """
    rows, length = keys.shape
    rank = ranks(keys)
    positions = torch.arange(length, device=keys.device).expand(rows, -1)
    threshold = kth_smallest_of_prefixes(rank, positions + 1, k)
    # A prefix of fewer than k keys keeps them all. Its greatest rank, which rises, would break the order of thresholds.
    threshold = threshold.masked_fill(positions + 1 < k, length)
    # Find the first position with a threshold below the rank; both are negated, so that the row ascends.
    passed = torch.searchsorted(threshold.neg(), rank.neg(), right=True)
    return passed.maximum(positions).contiguous()


def topk_intervals(keys: Tensor, k: int, seqlen_q: int, local: int) -> tuple[Tensor, Tensor]:
    """Find the run of queries that keep each key (B, H, Lk), by causal top-k; both ends are 0 if no query keeps it.

    The last query is aligned with the last key. A query also gets the last `local` keys up to its own.
    """
    seqlen_k = keys.size(2)
    position = torch.arange(seqlen_k, device=keys.device)
    stop = topk_stops(keys.flatten(0, 1), k).view(keys.shape).maximum(position + min(local, seqlen_k))
    start, stop = ((x + (seqlen_q - seqlen_k)).clamp(0, seqlen_q) for x in (position, stop))
    dead = (keys == torch.iinfo(keys.dtype).min) | (start >= stop)
    start, stop = (x.masked_fill(dead, 0).to(torch.int32).contiguous() for x in (start.expand(keys.shape), stop))
    return start, stop


def _selected_fake(scores: Tensor, allowed: Tensor | None, seqlen_q: int, k: int, is_causal: bool) -> Tensor:
    batch, num_heads, rows, seqlen_k = _shape(scores, allowed)
    rows = seqlen_q if is_causal or rows != 1 else 1
    return torch.empty(batch, num_heads, rows, seqlen_k, dtype=torch.bool, device=scores.device)


_OPERATOR = define(
    "topk_mask",
    "(Tensor scores, Tensor? allowed, SymInt seqlen_q, SymInt k, bool is_causal) -> Tensor",
    _selected,
    _selected_fake,
)
