"""`append_to_cache` writes new keys and values into a cache: its checks, and the operator that writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..definition import define, listed
from ..problem import (
    FLOAT_DTYPES,
    PACKED_QUERIES,
    Layout,
    check_device,
    check_dtype,
    check_tensor,
    check_type,
    dtype_name,
    values_can_be_read,
)
from .layout import Sequences, token_places


def append_to_cache(k_cache: Tensor, v_cache: Tensor | None, k: Tensor, v: Tensor | None, sequences: Sequences) -> None:
    """Write the keys and values of new tokens into a cache, in place, after the tokens there; one launch on a GPU.

    Pass the same `sequences` to the call of `attention` that follows: their queries are the new tokens, and their
    `seqlens_k` include the new tokens. So new token i of n in sequence s becomes its key `seqlens_k[s] - n + i`::

        for s, (tokens, keys) in enumerate(zip(seqlens_q, seqlens_k)):
            k_cache[s, keys - tokens : keys] = k[s, :tokens]  # padded; in pages by block_table, likewise

    Other elements of the caches are neither read nor written. It works inside `torch.compile` and CUDA graphs, and has
    no gradient.

    Args:
        k_cache: (S, Lk, Hk, D) with padded sequences, (pages, page_size, Hk, D) with paged ones, (Tk, Hk, D) with
            packed ones, where `cu_seqlens_k` bounds the slots. float16, bfloat16, float32 or float64; any strides.
        v_cache: the same for values, with head dim Dv. None, with v None, for a cache of keys only.
        k: (S, L, Hk, D), or (T, Hk, D) if the sequences pack queries; dtype and device of `k_cache`.
        v: (S, L, Hk, Dv) or (T, Hk, Dv).
        sequences: a `Sequences`. Tokens of no sequence, and unused ones after `seqlens_q`, are not written.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes or devices differ; a gradient is needed; elements of a cache overlap in memory. On a CPU
            also: a sequence has more new tokens than keys, two tokens go to one row, a page does not exist. On a GPU
            wrong values are not refused: they write to wrong rows of the cache, but never outside of it.

    >>> import torch, flash_dmattn
    >>> k_cache, v_cache = torch.zeros(2, 6, 16, 4, 32)  # 6 pages of 16 keys
    >>> q, k, v = torch.randn(3, 2, 1, 4, 32)  # a new token for each of 2 sequences
    >>> cache = flash_dmattn.Sequences.paged(torch.tensor([[5, 0], [2, 3]]), torch.tensor([17, 7]))
    >>> flash_dmattn.append_to_cache(k_cache, v_cache, k, v, cache)
    >>> torch.equal(k_cache[0, 0], k[0, 0]), torch.equal(v_cache[2, 6], v[1, 0])
    (True, True)
    >>> flash_dmattn.attention(q, k_cache, v_cache, is_causal=True, sequences=cache).shape
    torch.Size([2, 1, 4, 32])
    """
    check_type("sequences", sequences, Sequences, "a flash_dmattn.Sequences")
    tensors = {"k_cache": k_cache, "k": k}
    if v_cache is not None or v is not None:  # None for only one is refused
        tensors = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}  # type: ignore[dict-item]
    _check_tensors(tensors, sequences)
    _, view = sequences.describe_with_view(k, k_cache, k_cache, names=("k", "k_cache", "k_cache"), rows="new tokens")
    _check_sizes(tensors)
    rows = {name: x.unsqueeze(0) if x.dim() == 3 else x for name, x in tensors.items()}
    write = CacheWrite(
        rows["k_cache"], rows.get("v_cache"), rows["k"], rows.get("v"), view.bounds, view.block_table, sequences.layout
    )
    if values_can_be_read(write.bounds):
        _check_places(write)
    OPERATOR(*write)


def _check_tensors(tensors: dict[str, Tensor], sequences: Sequences) -> None:
    """Refuse tensors of another type, dtype or device, tensors with a gradient, and caches that overlap in memory."""
    k_cache = tensors["k_cache"]
    for name, x in tensors.items():
        check_tensor(name, x)
        if x.dtype not in FLOAT_DTYPES:
            raise TypeError(f"{name} has dtype {dtype_name(x.dtype)}; it needs float16, bfloat16, float32 or float64")
        check_dtype(name, x, k_cache.dtype, "k_cache")
        check_device(name, x.device, sequences.device, "sequences")
        if torch.is_grad_enabled() and x.requires_grad:
            raise ValueError(
                f"{name} requires grad; what is written to a cache has no gradient (call under torch.no_grad())"
            )
        if name.endswith("_cache") and _overlaps(x):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} and strides {x.stride()}; it needs memory of its own for each value"
            )


def _overlaps(x: Tensor) -> bool:
    """Return whether elements of a tensor overlap in memory; in a compiler only strides of 0 are detected."""
    dims = [(stride, n) for n, stride in zip(x.shape, x.stride(), strict=True) if n > 1]
    if torch.compiler.is_compiling() or x.numel() == 0:
        return any(stride == 0 for stride, _ in dims)
    reach = 0  # of the dims with smaller strides
    for stride, n in sorted(dims):
        if stride <= reach:
            return True
        reach += (n - 1) * stride
    return False


def _check_sizes(tensors: dict[str, Tensor]) -> None:
    """Refuse sizes of k, v and the caches that differ from one another."""
    for values, keys in (("v", "k"), ("v_cache", "k_cache")):
        if values in tensors and tensors[values].shape[:-1] != tensors[keys].shape[:-1]:
            raise ValueError(
                f"{values} has shape {tuple(tensors[values].shape)}; but for the last size it needs that of {keys}, "
                f"{tuple(tensors[keys].shape)}"
            )
    for name in ("k", "v") if "v" in tensors else ("k",):
        new, cache = tensors[name], tensors[f"{name}_cache"]
        if new.shape[-2:] != cache.shape[-2:]:
            raise ValueError(
                f"{name} has {new.shape[-2]} heads of {new.shape[-1]}; it needs those of {name}_cache, "
                f"{cache.shape[-2]} of {cache.shape[-1]}"
            )


def _check_places(write: CacheWrite) -> None:
    """Refuse, on a CPU, tokens without a row in the cache, and two tokens that go to the same row."""
    for s, (_, tokens, _, keys) in enumerate(listed(write.bounds)):
        if tokens > keys:
            raise ValueError(
                f"sequence {s} has {tokens} new tokens and {keys} keys; seqlens_k needs to count the new tokens"
            )
    if write.is_empty:
        return
    is_written, entry, row = map(listed, places(write))
    taken = Counter((e, r) for e, r, written in zip(entry, row, is_written, strict=True) if written)
    for (page, slot), count in taken.items():
        if count > 1:
            raise ValueError(
                f"{count} new tokens go to row {slot} of page {page}; block_table needs a page for each of them"
            )


class CacheWrite(NamedTuple):
    """One write of new keys and values: all tensors 4-D, sizes and dtypes checked, any strides.

    Caches are (S, Lk, Hk, ·), (1, Tk, Hk, ·), or in pages (pages, page_size, Hk, ·); k and v are (S, L, Hk, ·) or
    (1, T, Hk, ·). v_cache and v are None for a cache of keys only. `bounds` and `block_table` come from a
    `SequenceView`; its queries are the new tokens. Entries of the table may be wrong, and a sequence may have more new
    tokens than keys: a writer must not write outside of the caches then.
    """

    k_cache: Tensor
    v_cache: Tensor | None
    k: Tensor
    v: Tensor | None
    bounds: Tensor
    block_table: Tensor | None
    layout: Layout

    @property
    def packs_tokens(self) -> bool:
        return self.layout in PACKED_QUERIES

    @property
    def packs_keys(self) -> bool:
        return self.layout == "packed"

    @property
    def is_empty(self) -> bool:
        """Whether there are no tokens to write, or no rows to write to."""
        return self.k.numel() == 0 or self.k_cache.numel() == 0 or self.bounds.shape[0] == 0


def places(write: CacheWrite) -> tuple[Tensor, Tensor, Tensor]:
    """Find the target of each row of k: (is_written, entry of the cache, row of the entry), or (False, 0, 0)."""
    own, token, is_token = token_places(write.bounds, write.k.shape[0], write.k.shape[1], write.packs_tokens)
    _, tokens, first, keys = write.bounds.long()[own].unbind(1)
    place = keys - tokens + token
    is_written = is_token & (place >= 0)
    place = torch.where(is_written, place, 0)
    entry = torch.zeros_like(own) if write.packs_keys else own
    row = first + place
    if write.block_table is not None:
        pages, page_size = write.k_cache.shape[:2]
        entry = write.block_table[own, place // page_size].long().clamp(0, pages - 1)
        row = place % page_size
    return is_written, torch.where(is_written, entry, 0), torch.where(is_written, row, 0)


def write_by_pytorch(write: CacheWrite) -> None:
    """Write by `index_put_`, without waiting for the device."""
    is_written, entry, row = places(write)
    # Sizes may not depend on values. So each row that is not to be written repeats the first row that is; if there is
    # none, all rows write back the values of the cache.
    leader = is_written.int().argmax()
    source = torch.where(is_written, torch.arange(len(entry), device=entry.device), leader)
    entry, row = entry[source], row[source]
    for cache, new in ((write.k_cache, write.k), (write.v_cache, write.v)):
        if cache is None or new is None:
            continue
        values = torch.where(is_written[leader], new.flatten(0, 1)[source], cache[entry, row])
        cache.index_put_((entry, row), values)


Writer = Callable[[CacheWrite], None]
_find_faster: Callable[[CacheWrite], Writer | None] = lambda write: None


def register(find_faster: Callable[[CacheWrite], Writer | None]) -> None:
    """Set the function that returns the writer of a `CacheWrite`, or None for `write_by_pytorch`."""
    global _find_faster
    _find_faster = find_faster


def _write(*operands: Any) -> None:
    write = CacheWrite(*operands)
    if not write.is_empty:
        (_find_faster(write) or write_by_pytorch)(write)


OPERATOR = define(
    "append_to_cache",
    "(Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor k, Tensor? v, Tensor bounds, Tensor? block_table, str layout) "
    "-> ()",
    _write,
    lambda *_: None,
)
