"""The dynamic mask: for every query exactly the k highest scored of the keys that it may see."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from ..definition import define, is_transformed
from ..problem import bounded, check_device, check_flag, collapse, hint
from .arguments import align_heads, bool_mask, common_shape, float_scores, integer, pad

# Heads of `IndexScores` that are multiplied at once, a bound on memory.
HEADS = 8
# Elements of a chunk of rows; each needs about 25 bytes of work space (key, candidates, tie counter).
CHUNK_ELEMENTS = 1 << 22


class ScoresByRows(Protocol):
    """The attributes of `IndexScores` that `weighted_products` needs; its scores are computed in chunks of queries."""

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
    """Split rows into chunks. If one is enough it is `slice(None)`: a compiler then keeps a symbolic length."""
    if hint(number) <= hint(step):
        return [slice(None)]
    return [slice(start, start + step) for start in range(0, number, step)]


def recomputed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Run a function anew for its gradients, in the place of its temporaries, except under transforms of `torch.func`,
    which refuse checkpoints."""
    from torch.utils.checkpoint import checkpoint  # importing flash_dmattn does not need it

    if is_transformed():
        return function
    return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)


def rectified(products: Tensor, dim: int, relu: bool, scale: float | None) -> Tensor:
    """Scale the products of heads of `dim` channels, and with `relu` set negative ones to 0."""
    products = products * (dim**-0.5 if scale is None else scale)
    return products.relu() if relu else products


def topk_mask(
    scores: Tensor, k: int, *, is_causal: bool = False, mask: Tensor | None = None, seqlen_q: int | None = None
) -> Tensor:
    """Let each query see the `k` highest scored keys that `mask` and causality allow.

    Equivalent, row by row, to a stable descending sort of the allowed scores that keeps the first k::

        allowed = mask & (j <= i + Lk - Lq) & (scores != -inf)
        order = scores.masked_fill(~allowed, -inf).sort(descending=True, stable=True).indices
        out = zeros.scatter(-1, order[..., :k], True) & allowed

    A row with at most k allowed keys keeps them all. Among equal scores the earliest key comes first. A key that is
    not allowed is never kept, and a score of -inf forbids its key, so a row is empty only if it has no allowed key.
    NaN ranks below every number. The result has no gradient.

    With one score per key and `is_causal`, row i keeps the top k of the keys up to its position. All thresholds are
    found together in O(Lk log Lk), because the threshold of a prefix can only rise with its length; no tensor larger
    than the result is allocated. If scores or mask depend on the query, rows are computed in chunks. It does not wait
    for the device.

    Args:
        scores: float tensor of 1 to 4 dims, read from the right as (B or 1, H or 1, Lq or 1, Lk): 3 dims are
            (H, Lq, Lk), never (B, H, Lk).
        k: number of keys to keep, >= 1; may exceed Lk.
        is_causal: whether query i is only allowed the keys j <= i + Lk - Lq.
        mask: bool tensor broadcastable to (B, H, Lq, Lk), True = allowed. `scores` and `mask` may have different
            heads, query heads and key-value heads: query head h uses key-value head h // G.
        seqlen_q: number of queries. By default the number of rows of `scores` or `mask`, or Lk if they have one row for
            all queries. Decoding one query with a cache needs `seqlen_q=1`. It is also needed if only one of `scores`
            and `mask` has more than one row, has 2 or 3 dims, and has another number of rows than of keys.

    Returns:
        Bool tensor (B, H, Lq, Lk); (B, H, 1, Lk) if neither scores nor mask depend on the query and it is not causal.

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
    # The loops depend on sizes, on which a compiler would specialise the graph; so it gets one operator.
    run = _OPERATOR if torch.compiler.is_compiling() else _selected
    arguments = topk_arguments(scores, mask, seqlen_q)
    if seqlen_q is None:
        _refuse_batch_as_queries(scores, mask)
    selected: Tensor = run(*arguments, k, is_causal)
    return selected


def _refuse_batch_as_queries(scores: Tensor, mask: Tensor | None) -> None:
    """Refuse a tensor of 2 or 3 dims if only it has a number of queries, and that is not the number of keys.

    Dims are read from the right, so the caller may have meant (B, Lk) or (B, H, Lk), where B or H would be queries.
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
    """Compute the mask from arguments that `topk_arguments` has checked; contiguous, as operators return it."""
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
    """Return integers in the order of the scores: the lowest for keys that are not allowed, the next for NaN.

    IEEE floats of one sign have the order of their bits as integers, which for negative ones is reversed; flipping
    their lower bits corrects it. As integers, NaN and -inf are ordinary values, and keys are equal if floats are.
    """
    wide = scores.double() if scores.dtype == torch.float64 else scores.float()
    integers = torch.int64 if wide.dtype == torch.float64 else torch.int32
    lowest, highest = torch.iinfo(integers).min, torch.iinfo(integers).max
    bits = (wide + 0.0).view(integers)  # -0.0 + 0.0 is 0.0, so the two zeros are equal
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
    # topk keeps any of equal keys, so it only provides the k-th value; the count keeps the earliest ones.
    kth = keys.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above = keys > kth
    tied = keys == kth
    places = k - above.sum(-1, keepdim=True, dtype=torch.int32)
    above |= tied & (tied.cumsum(-1, dtype=torch.int32) <= places)
    return above & allowed


def list_best(keys: Tensor, last: Tensor, k: int, local: int, places: int) -> tuple[Tensor, Tensor]:
    """List the columns that `select` chooses, and the allowed ones among the last `local` columns of each row.

    `last`, (rows,), is the last column that each row may see. Returns the columns, int32 (B, H, rows, places),
    ascending, then -1, and their number, int32 (B, H, rows). `places` needs to be at least the largest number.
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
    """Select the top k of each row, in chunks of rows; scores or allowed keys depend on the query."""
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
    # Forbidden keys get the rank seqlen_k, which is above every threshold.
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
    a permutation of 0 to L - 1, is partitioned stably into zeros and ones. For each prefix the range of entries with
    the same higher bits as the answer is tracked; the next bit is 0 if the range has enough zeros. The answer for a
    prefix of 0 is undefined.

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
    """Find for each key j of (N, L) the first position p >= j where k keys up to p are better; L if there is none.

    Key j is among the k best of the keys up to p exactly for `j <= p < stop[j]`: once k better keys have come, it never
    returns. The k-th best rank of a prefix can only fall as the prefix grows. So all these thresholds are found
    together, as for `topk_mask`, and a binary search finds where they fall below the rank of the key: O(L log L) in
    time, O(L) in memory.
    """
    rows, length = keys.shape
    rank = ranks(keys)
    positions = torch.arange(length, device=keys.device).expand(rows, -1)
    threshold = kth_smallest_of_prefixes(rank, positions + 1, k)
    # A prefix shorter than k keeps all its keys. Its largest rank rises with its length, so thresholds would not be
    # sorted; length, which is above all ranks, replaces it.
    threshold = threshold.masked_fill(positions + 1 < k, length)
    # Find the first position with a threshold below the rank. Both are negated, because searchsorted needs ascending.
    passed = torch.searchsorted(threshold.neg(), rank.neg(), right=True)
    return passed.maximum(positions).contiguous()


def topk_intervals(keys: Tensor, k: int, seqlen_q: int, local: int) -> tuple[Tensor, Tensor]:
    """Find the interval of queries that keep each key, (B, H, Lk), by causal top-k; 0 and 0 if no query keeps it.

    The last query is aligned with the last key. A query also keeps the last `local` keys up to its position.
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
