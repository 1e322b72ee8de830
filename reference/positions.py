"""Scores by distance that depend on the query, or on the key: products with a table that has a row for each distance.

A call reads one row of the table for each of its distances, Lq + Lk - 1 of them. `rows_of_call` picks these rows, and
`table_gradient` is its transpose. The products themselves, `product`, `content_gradient` and `add_rows_gradient`, know
no table: L vectors of one side of the call (its queries, or its keys) meet M positions of the other side, and score
(i, j) is `scale * <x[i], rows[j - i + L - 1]>`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from .distances import Distances, by_distance, dense, distance_sums, fold_distances

# torch.is_autocast_enabled raises for device types without autocast, so they are filtered here, once: torch 2.11 cannot
# trace the question.
AUTOCAST_DEVICES = tuple(name for name in ("cpu", "cuda", "mps", "xpu", "hpu") if torch.amp.is_autocast_available(name))
PITCH = 16  # elements; a row of a bias in a workspace has a multiple of them


def pitch_of(keys: int) -> int:
    """Return the elements of a row of a bias for so many keys."""
    return -(-keys // PITCH) * PITCH


def rows_of_call(table: Tensor, zero: int, clamps: bool, seqlen_q: int, seqlen_k: int, by_keys: bool) -> Tensor:
    """Return the row of each distance of a call, (Ht, Lq + Lk - 1, P); differentiable.

    Args:
        table: (Ht, n, P), rows in ascending order of key minus query.
        zero: the index of distance 0, with the last query at the last key.
        clamps: whether distances beyond the table get its first or its last row; otherwise they get zeros.
        by_keys: whether keys are the side that has vectors; rows then are in the order of query minus key.
    """
    if torch.compiler._is_exporting_flag:  # where slices of the table would fix the lengths of a program
        place = torch.arange(seqlen_q + seqlen_k - 1, device=table.device) + (zero - (seqlen_k - 1))
        last = table.shape[1] - 1
        rows = table.index_select(1, place.clamp(0, last))
        rows = rows if clamps else torch.where(((place >= 0) & (place <= last))[:, None], rows, 0.0)
    elif table.shape[1] == seqlen_q + seqlen_k - 1 and zero == seqlen_k - 1:
        rows = table
    else:
        columns = table.transpose(1, 2)[None]
        rows = by_distance(Distances(columns, zero, clamps), seqlen_q, seqlen_k)[0].transpose(1, 2)
    return rows.flip(1) if by_keys else rows


def table_gradient(
    drows: Tensor, table: Tensor, zero: int, clamps: bool, seqlen_q: int, seqlen_k: int, by_keys: bool
) -> Tensor:
    """Return the gradient of the table from the gradient of `rows_of_call`, (heads, Lq + Lk - 1, P).

    drows may have more heads than the table; heads that share one head of the table are added.
    """
    heads = table.shape[0]
    shared = drows.unflatten(0, (heads, -1)).sum(1)
    strip = (shared.flip(1) if by_keys else shared).transpose(1, 2)
    sums = fold_distances(strip, table.shape[1], zero, clamps, (seqlen_q, seqlen_k))
    return sums.transpose(1, 2).to(table.dtype)


def product(x: Tensor, rows: Tensor, scale: float) -> Tensor:
    """Return the scores (B, H, L, M) of x (B, L, H, P) and rows (Ht, L + M - 1, P); differentiable.

    It is computed in fp32 (fp64 for fp64) and rounded once to the dtype of x. In float16 scores beyond its largest
    number become that number, because an infinite bias would make NaN of the softmax.
    """
    length, others = x.shape[1], rows.shape[1] - x.shape[1] + 1
    wide = _wide(x)
    with without_autocast(x):
        strip = torch.einsum("blhp,hnp->bhln", wide, _for_heads(rows, x.shape[2]).to(wide.dtype)) * scale
    made = dense(Distances(strip, others - 1, False), length, others)
    return within_range(made, x.dtype).to(x.dtype)


def within_range(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scores that are finite in float16, if they are to have that dtype."""
    if dtype != torch.float16:
        return scores
    most = torch.finfo(dtype).max
    fixed = scores.detach()
    # The gradient passes through, as it does through scores of a workspace; the difference is 0.
    return fixed.clamp(-most, most) + torch.where(fixed.isfinite(), scores - fixed, 0.0)


def content_gradient(ds: Tensor, rows: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return the gradient of x, (B, L, H, P) in `dtype`, from the gradient of `product`, (B, H, L, M)."""
    wide = _wide(ds)
    strip = _by_distance(wide)
    with without_autocast(ds):
        return (torch.einsum("bhln,hnp->blhp", strip, _for_heads(rows, ds.shape[1]).to(wide.dtype)) * scale).to(dtype)


def add_rows_gradient(ds: Tensor, x: Tensor, sums: Tensor) -> None:
    """Add the gradient of the rows of each head to `sums` (H, L + M - 1, P), without the scale.

    Entries of the batch are added one after the other, so that parts of a batch give the bits of the whole.
    """
    for entry, vectors in zip(ds, x, strict=True):
        strip = _by_distance(_wide(entry)[None])[0]
        with without_autocast(ds):
            sums += torch.einsum("hln,lhp->hnp", strip, vectors.to(strip.dtype))


def _by_distance(ds: Tensor) -> Tensor:
    """Lay out a gradient of scores (B, H, L, M) by distance, (B, H, L, L + M - 1)."""
    length, others = ds.shape[2:]
    count = length + others - 1
    return distance_sums(ds, Distances(ds.new_empty(()).expand(1, 1, length, count), others - 1, False))


def _for_heads(rows: Tensor, heads: int) -> Tensor:
    """Return the rows of each head; heads of a group share one head of the rows."""
    return rows if rows.shape[0] in (1, heads) else rows.repeat_interleave(heads // rows.shape[0], 0)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Turn autocast off on the device of a tensor: products of fp32 would be rounded to 16 bits."""
    kind = x.device.type
    is_on = kind in AUTOCAST_DEVICES and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if is_on else nullcontext()


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


class Products:
    """The products of one call in PyTorch, for some entries of the batch at a time.

    Args:
        rows: (Ht, L + M - 1, P), of `rows_of_call`.
        scale: of the scores.
        by_keys: whether keys are the side that has vectors.
        entries: the most entries of the batch that are computed at once.
        shape: (heads, L, M) of the scores, vectors first.
    """

    def __init__(self, rows: Tensor, scale: float, by_keys: bool, entries: int, shape: tuple[int, int, int]) -> None:
        self.rows, self.scale, self.by_keys, self.shape = rows, scale, by_keys, shape
        self.sums: Tensor | None = None

    def scores(self, x: Tensor) -> Tensor:
        """Return the scores of some entries, x (entries, L, H, P): (entries, H, Lq, Lk)."""
        made = product(x, self.rows, self.scale)
        return made.transpose(2, 3).contiguous() if self.by_keys else made

    def add_scores(self, x: Tensor, total: Tensor) -> None:
        """Add the scores of keys to those of queries, which may have more heads."""
        made = self.scores(x)
        total.unflatten(1, (made.shape[1], -1)).add_(made.unsqueeze(2))
        if total.dtype == torch.float16:
            total.copy_(within_range(total, total.dtype))

    def place(self, entries: int) -> Tensor | None:
        """Return where a backward pass may store the gradient of the scores of so many entries; None for anywhere."""
        return None

    def gradients(self, ds: Tensor, x: Tensor, needs_x: bool, needs_rows: bool) -> Tensor | None:
        """Return the gradient of x, contiguous, from the gradient of its scores; None where it is not needed.

        The gradient of the rows is added to sums. Entries come after the entries of the call before.
        """
        ds = ds.transpose(2, 3) if self.by_keys else ds
        if needs_rows:
            if self.sums is None:
                wide = _wide(x[:0]).dtype
                self.sums = torch.zeros(self.shape[0], *self.rows.shape[1:], dtype=wide, device=x.device)
            add_rows_gradient(ds, x, self.sums)
        return content_gradient(ds, self.rows, self.scale, x.dtype) if needs_x else None

    def rows_gradient(self) -> Tensor:
        """Return the gradient of the rows that `gradients` has added, (heads, L + M - 1, P), in fp32 at least."""
        assert self.sums is not None
        return self.sums * self.scale
