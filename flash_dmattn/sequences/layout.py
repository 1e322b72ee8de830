"""`Sequences`: the layout of the sequences of a batch: packed one after another, padded, or with keys in pages."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..definition import is_of_transform, listed, outside_of_transforms
from ..problem import (
    RANKS,
    Layout,
    SequenceSpec,
    SequenceView,
    bounded,
    check_strided,
    check_tensor,
    counts_changes,
    is_int,
    keywords_only,
    values_can_be_read,
)

# The fields of `Sequences` that are tensors.
_TENSORS = ("cu_seqlens_q", "cu_seqlens_k", "seqlens_q", "seqlens_k", "block_table")
# The most views that one object caches, for example for caches of several lengths; the bounds of each are int32 (S, 4).
_MAX_VIEWS = 8
_NAMES = ("q", "k", "v")


@dataclass(frozen=True, eq=False, repr=False)
class Sequences:
    """The layout of the S sequences of a batch. Create it once per batch, and pass it to `attention` in all layers.

    Use `Sequences.packed`, `Sequences.padded` or `Sequences.paged`. Its tensors are on the device of q. It keeps the
    caller's tensors, int32 or int64, without a copy: a change in place takes effect at the next call.

    Kernels need a table of these tensors, which is computed at the first call, and again after a change:

    * torch counts changes of a tensor, except in inference mode and in memory that NumPy or another process uses, too.
    * For such tensors, values are compared on a CPU; on a GPU the table is computed at each call.
    * A GPU kernel of another library may change a tensor without being counted: create new `Sequences` then.

    Attributes:
        layout: "packed", "padded", "paged", or "paged_packed" if the queries of a paged batch are packed.
        cu_seqlens_q, cu_seqlens_k: (S + 1,), where each packed sequence begins, and where the last one ends; or None.
        seqlens_q, seqlens_k: (S,), number of used tokens of each slot; None for all.
        block_table: (S, P), entry (s, j // page_size) is the page of key j of sequence s; None without pages.
        max_seqlen_q, max_seqlen_k: bounds on the lengths, or None.
    """

    layout: Layout
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqlens_q: Tensor | None = None
    seqlens_k: Tensor | None = None
    block_table: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    _views: dict[Any, tuple[list[Any], SequenceSpec, SequenceView]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.layout, str):
            raise TypeError(
                f"layout is a {type(self.layout).__name__}; call Sequences.packed, Sequences.padded or Sequences.paged"
            )

    @staticmethod
    def packed(
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor | None = None,
        *,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        seqlens_q: Tensor | None = None,
        seqlens_k: Tensor | None = None,
    ) -> Sequences:
        """Describe sequences packed one after another: q (Tq, Hq, D), k (Tk, Hk, D), v (Tk, Hk, Dv).

        Args:
            cu_seqlens_q: (S + 1,), int32 or int64, ascending: sequence s has the queries from `cu_seqlens_q[s]` up to
                `cu_seqlens_q[s + 1]`.
            cu_seqlens_k: the same for the keys; by default `cu_seqlens_q`.
            max_seqlen_q, max_seqlen_k: bounds on the lengths, as Python ints. Without a mask they do not change a bit
                of the result. A mask or a bias by position needs them, because they are its sizes. Without
                cu_seqlens_k, max_seqlen_k is max_seqlen_q by default.
            seqlens_q, seqlens_k: (S,), number of used tokens of each sequence, its first ones; later ones are ignored.

        Raises:
            TypeError: an argument has the wrong type or dtype.
            ValueError: shapes or devices differ, or a bound is negative; on a CPU also if `cu_seqlens` do not ascend
                from 0, or a length is negative or above its bound.

        >>> import torch, flash_dmattn
        >>> two = flash_dmattn.Sequences.packed(torch.tensor([0, 3, 8]))
        >>> q, k, v = torch.randn(3, 8, 2, 16)
        >>> out = flash_dmattn.attention(q, k, v, is_causal=True, sequences=two)
        >>> alone = flash_dmattn.attention(q[None, 3:], k[None, 3:], v[None, 3:], is_causal=True)
        >>> torch.allclose(out[3:], alone[0], atol=1e-6)
        True
        """
        if cu_seqlens_k is None and max_seqlen_k is None and seqlens_k is None:
            max_seqlen_k, seqlens_k = max_seqlen_q, seqlens_q
        tensors = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        tensors |= {"seqlens_q": seqlens_q, "seqlens_k": seqlens_k}
        _check_integers(tensors, "cu_seqlens_q")
        if cu_seqlens_k is None:
            cu_seqlens_k = cu_seqlens_q
        return _checked(
            Sequences("packed", cu_seqlens_q, cu_seqlens_k, seqlens_q, seqlens_k, None, max_seqlen_q, max_seqlen_k)
        )

    @staticmethod
    @keywords_only
    def padded(*, seqlens_q: Tensor | None = None, seqlens_k: Tensor) -> Sequences:
        """Describe sequences that each fill the front of a slot: q (S, Lq, Hq, D), k (S, Lk, Hk, D), v (S, Lk, Hk, Dv).

        Causality and windows align the last used query with the last used key.

        Args:
            seqlens_q: (S,), int32 or int64: number of used queries of each slot; None for all Lq.
            seqlens_k: (S,), number of used keys of each slot.

        Raises:
            TypeError: an argument has the wrong type or dtype.
            ValueError: shapes or devices differ; on a CPU also if a length is negative.

        >>> import torch, flash_dmattn
        >>> q, k, v = torch.randn(2, 1, 4, 16), torch.randn(2, 9, 4, 16), torch.randn(2, 9, 4, 16)
        >>> used = flash_dmattn.Sequences.padded(seqlens_k=torch.tensor([9, 4]))  # keys 4 to 8 of slot 1 are unused
        >>> out = flash_dmattn.attention(q, k, v, sequences=used)
        >>> torch.allclose(out[1:], flash_dmattn.attention(q[1:], k[1:, :4], v[1:, :4]), atol=1e-6)
        True
        """
        _check_integers({"seqlens_q": seqlens_q, "seqlens_k": seqlens_k}, "seqlens_k")
        return _checked(Sequences("padded", seqlens_q=seqlens_q, seqlens_k=seqlens_k))

    @staticmethod
    def paged(
        block_table: Tensor,
        seqlens_k: Tensor,
        *,
        cu_seqlens_q: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
    ) -> Sequences:
        """Describe keys in pages: k (pages, page_size, Hk, D), v (pages, page_size, Hk, Dv); no gradients.

        Queries are (S, Lq, Hq, D), or packed, (Tq, Hq, D), with `cu_seqlens_q`.

        Args:
            block_table: (S, P), int32 or int64: key j of sequence s is row j % page_size of page
                block_table[s, j // page_size].
            seqlens_k: (S,), number of keys of each sequence, the keys of its queries included.
            cu_seqlens_q: as for `packed`.
            max_seqlen_q, max_seqlen_k: bounds on the lengths, as Python ints; max_seqlen_k is P * page_size by
                default. They decide which kernels run, and so how results are rounded.

        Raises:
            TypeError: an argument has the wrong type or dtype.
            ValueError: shapes or devices differ, or a bound is negative; on a CPU also if a length is negative or
                above its bound.

        >>> import torch, flash_dmattn
        >>> pool_k, pool_v = torch.randn(2, 6, 16, 4, 32)  # 6 pages of 16 keys
        >>> cache = flash_dmattn.Sequences.paged(torch.tensor([[5, 0], [2, 2]]), torch.tensor([20, 7]))
        >>> q = torch.randn(2, 1, 8, 32)
        >>> out = flash_dmattn.attention(q, pool_k, pool_v, sequences=cache)
        >>> k, v = (torch.cat([x[5], x[0, :4]])[None] for x in (pool_k, pool_v))
        >>> torch.allclose(out[:1], flash_dmattn.attention(q[:1], k, v), atol=1e-6)
        True
        """
        tensors = {"block_table": block_table, "seqlens_k": seqlens_k, "cu_seqlens_q": cu_seqlens_q}
        _check_integers(tensors, "block_table", "seqlens_k")
        layout: Layout = "paged" if cu_seqlens_q is None else "paged_packed"
        return _checked(Sequences(layout, cu_seqlens_q, None, None, seqlens_k, block_table, max_seqlen_q, max_seqlen_k))

    @property
    def number(self) -> int:
        """The number of sequences, S."""
        if self.cu_seqlens_q is not None:
            return self.cu_seqlens_q.shape[0] - 1
        assert self.seqlens_k is not None
        return self.seqlens_k.shape[0]

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        one = self.seqlens_k if self.cu_seqlens_q is None else self.cu_seqlens_q
        assert one is not None
        return one.device

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        # Not by `getattr`, which is slower: every call needs them.
        tables = (self.cu_seqlens_q, self.cu_seqlens_k, self.seqlens_q, self.seqlens_k, self.block_table)
        return tuple([x for x in tables if x is not None])

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Sequences:
        """Copy the sequences to a device, as `torch.Tensor.to` does.

        >>> import torch
        >>> from flash_dmattn import Sequences
        >>> Sequences.packed(torch.tensor([0, 3, 8])).to("cpu").number
        2
        """
        tensors: dict[str, Any] = {name: getattr(self, name) for name in _TENSORS}
        moved = {name: x.to(device, non_blocking=non_blocking) for name, x in tensors.items() if x is not None}
        return replace(self, **moved)

    def __reduce__(self) -> tuple[object, ...]:
        # For pickle, copy and `torch.save`. `_views` is left out: it is valid for the versions of these tensors only.
        tensors = (getattr(self, name) for name in _TENSORS)
        return Sequences, (self.layout, *tensors, self.max_seqlen_q, self.max_seqlen_k)

    def __repr__(self) -> str:
        # Not the values: printing them waits for the device.
        bounds = f"max_seqlen_q={self.max_seqlen_q}, max_seqlen_k={self.max_seqlen_k}"
        return f"Sequences(layout={self.layout!r}, number={self.number}, {bounds}, device={str(self.device)!r})"

    def describe(
        self, q: Tensor, k: Tensor, v: Tensor, *, names: tuple[str, str, str] = _NAMES, rows: str = "queries"
    ) -> SequenceSpec:
        """Describe a call with these sequences.

        Args:
            q, k, v: of the call; for `append_to_cache` the new keys and the cache.
            names, rows: the names of q, k and v, and of the rows of q, for messages.

        Raises:
            ValueError: q, k or v do not have the shape that the layout needs, or are on another device.
        """
        rank_q, rank_k = RANKS[self.layout]
        for name, x, rank, shape in zip(names, (q, k, v), (rank_q, rank_k, rank_k), _SHAPES[self.layout], strict=True):
            check_tensor(name, x)
            if x.dim() != rank:
                raise ValueError(
                    f"{name} has {x.dim()} dimensions, shape {tuple(x.shape)}; with "
                    f"{self.layout.partition('_')[0]} sequences it needs {rank}, {shape.format(rows)}"
                )
        if self.device != q.device:
            raise ValueError(f"sequences are on {self.device}; they need to be on the device of q, {q.device}")
        paged = self.block_table is not None
        for name, x, has_slots in ((names[0], q, rank_q == 4), (names[1], k, rank_k == 4 and not paged)):
            if has_slots and x.shape[0] != self.number:
                raise ValueError(f"{name} has {x.shape[0]} entries; it needs one for each sequence, {self.number}")
        rows_q, page_size = q.shape[-3], k.shape[1] if paged else 0
        rows_k = k.shape[-3]
        if self.block_table is not None:
            rows_k = self.block_table.shape[1] * page_size if k.shape[0] > 0 else 0  # without pages there are no keys
        return self.describe_rows(rows_q, rows_k, page_size)

    def describe_rows(self, rows_q: int, rows_k: int, page_size: int = 0) -> SequenceSpec:
        """Describe a call by the rows of q, `q.shape[-3]`, and of k (with pages, the keys in one row of the table)."""
        packs_q, packs_k = self.cu_seqlens_q is not None, self.cu_seqlens_k is not None
        return SequenceSpec(
            self.layout,
            self.number,
            rows_q,
            rows_k,
            rows_q if self.max_seqlen_q is None else self.max_seqlen_q,
            rows_k if self.max_seqlen_k is None else self.max_seqlen_k,
            (not packs_q or self.max_seqlen_q is not None, not packs_k or self.max_seqlen_k is not None),
            page_size,
        )

    def make_bounds(self, spec: SequenceSpec) -> Tensor:
        """Compute the bounds of a `SequenceView`, int32 (S, 4); they are within q, k and v whatever the tensors hold.

        It does not wait for a GPU, because no value is copied to the CPU.
        """
        queries = (self.cu_seqlens_q, self.seqlens_q, spec.rows_q, spec.max_seqlen_q)
        keys = (self.cu_seqlens_k, self.seqlens_k, spec.rows_k, spec.max_seqlen_k)
        first, lengths = _safe_bounds(*queries, spec.number, self.device)
        # Self-attention. Not in a compiler, which would specialise the graph on whether the sizes are equal.
        is_one_side = queries[0] is keys[0] and queries[1] is keys[1] and not torch.compiler.is_compiling()
        if is_one_side and queries[2:] == keys[2:]:
            return torch.stack((first, lengths, first, lengths), 1)
        return torch.stack((first, lengths, *_safe_bounds(*keys, spec.number, self.device)), 1)

    def describe_with_view(
        self, q: Tensor, k: Tensor, v: Tensor, *, names: tuple[str, str, str] = _NAMES, rows: str = "queries"
    ) -> tuple[SequenceSpec, SequenceView]:
        """Describe a call as `describe` does; return also the tensors for kernels, if possible from an earlier layer.

        It does not wait for a GPU.
        """
        tensors = self._tensors
        first = tensors[0]
        # Fake tensors have no values to compare. `describe` refuses wrong types.
        is_plain = type(first) is Tensor and isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
        # A captured CUDA graph has to compute the view from the tensors at every replay. A compiler cannot trace the
        # check whether a capture is running.
        is_traced = not is_plain or torch.compiler.is_compiling()
        if is_traced or (first.is_cuda and torch.cuda.is_current_stream_capturing()):
            spec = self.describe(q, k, v, names=names, rows=rows)
            return spec, self._make_view(spec)
        if is_of_transform(*tensors):
            spec = self.describe(q, k, v, names=names, rows=rows)
            return spec, self._check_and_make_view(spec, k, names)
        # Tensors that inference mode makes cannot be saved for a backward pass.
        slot = (q.shape, k.shape, v.shape, q.device, torch.is_inference_mode_enabled())
        kept = self._views.get(slot)
        if kept is not None and _are_as_before(tensors, kept[0]):
            return kept[1:]
        spec = self.describe(q, k, v, names=names, rows=rows)
        with outside_of_transforms():
            states = list(map(_state, tensors))  # before values are used: a change in between is then noticed
            view = self._check_and_make_view(spec, k, names)
        if kept is None and len(self._views) >= _MAX_VIEWS:
            for oldest in tuple(self._views)[:1]:  # a copy, because another thread may add one
                self._views.pop(oldest, None)
        self._views[slot] = states, spec, view
        return spec, view

    def _check_and_make_view(self, spec: SequenceSpec, k: Tensor, names: tuple[str, str, str]) -> SequenceView:
        if self.device.type == "cpu":
            self._check_values(spec, k.shape[0], names[:2])
        return self._make_view(spec)

    def _make_view(self, spec: SequenceSpec) -> SequenceView:
        table = self.block_table
        if table is not None:
            table = table.to(torch.int32)
            # Kernels require unit stride in a row of the table.
            table = table if table.stride(1) == 1 else table.contiguous()
        return SequenceView(self.make_bounds(spec), table)

    def check(self, q: Tensor | None = None, k: Tensor | None = None) -> None:
        """Check the values as a call on a CPU does, and refuse wrong ones; it waits for the device.

        On a GPU a call does not check values: with wrong ones results are wrong, but no memory fault occurs.

        Args:
            q, k: of a call, to compare the values with their sizes, too.

        Raises:
            ValueError: a sequence has a negative length, is longer than its slot or its bound, or reaches past q or
                k; or a page does not exist.
        """
        spec, pages = None, 0
        if q is not None and k is not None:
            spec, pages = self.describe(q, k, k), k.shape[0]
        self._check_values(spec, pages)

    def _check_values(
        self, spec: SequenceSpec | None = None, pages: int = 0, names: tuple[str, str] = ("q", "k")
    ) -> None:
        """Refuse values that contradict one another or, with `spec`, the sizes of q and k; `names` are for messages."""
        rows_q, rows_k = (None, None) if spec is None else (spec.rows_q, spec.rows_k)
        _check_side("q", self.cu_seqlens_q, self.seqlens_q, rows_q, self.max_seqlen_q, names[0])
        lengths = _check_side("k", self.cu_seqlens_k, self.seqlens_k, rows_k, self.max_seqlen_k, names[1])
        if self.block_table is not None and spec is not None:
            for s, (row, n) in enumerate(zip(listed(self.block_table), lengths, strict=True)):
                for page in row[: -(-n // max(spec.page_size, 1))]:
                    if not 0 <= page < pages:
                        raise ValueError(
                            f"block_table names page {page} for sequence {s}; {names[1]} has {pages} pages"
                        )


torch.serialization.add_safe_globals([Sequences])  # `torch.load` calls it, see `__reduce__`


def check_and_describe(
    sequences: Sequences, q: Tensor, k: Tensor, v: Tensor, mask: object
) -> tuple[SequenceSpec, SequenceView]:
    """Check q, k, v and the mask of a call with sequences; return the spec and the view of the sequences."""
    if not isinstance(sequences, Sequences):
        raise TypeError(
            f"sequences is a {type(sequences).__name__}; it needs to be a flash_dmattn.Sequences, as Sequences.packed "
            "makes one"
        )
    # Compared by identity: equal sizes do not imply equal values, and comparing values would wait for a GPU.
    prepared_for = getattr(mask, "sequences", None)
    if prepared_for is not None and prepared_for is not sequences:
        raise ValueError(
            "mask was prepared for other Sequences than those of the call; it needs the same object: pass "
            "sequences=mask.sequences, or prepare it anew"
        )
    for name, x in zip(_NAMES, (q, k, v), strict=True):
        if type(x) is not Tensor or x.layout is not torch.strided:
            check_strided(name, x)
    return sequences.describe_with_view(q, k, v)


_SLOTS, _TOKENS = "(sequences, {}, heads, head_dim)", "({} of all sequences, heads, head_dim)"
_PAGES = "(pages, page_size, heads, head_dim)"
# Shapes of q, k and v, for messages. Braces are replaced by the name of rows.
_SHAPES = {
    "packed": (_TOKENS, *[_TOKENS.format("keys")] * 2),
    "padded": (_SLOTS, *[_SLOTS.format("keys")] * 2),
    "paged": (_SLOTS, _PAGES, _PAGES),
    "paged_packed": (_TOKENS, _PAGES, _PAGES),
}


def _state(x: Tensor) -> int | Tensor | None:
    """Return a state that differs if x has changed: its version, or a copy, or None if a copy would be on a GPU."""
    if counts_changes(x):
        return x._version
    return x.clone() if x.device.type == "cpu" else None


def _are_as_before(tensors: tuple[Tensor, ...], states: list[int | Tensor | None]) -> bool:
    """Return whether no tensor has changed since its state was taken; False if that is unknown."""
    for x, state in zip(tensors, states, strict=True):
        if counts_changes(x):
            if isinstance(state, Tensor) or x._version != state:
                return False
        elif not (isinstance(state, Tensor) and torch.equal(x, state)):
            return False
    return True


def _check_integers(tensors: dict[str, Tensor | None], *required: str) -> None:
    """Refuse tensors of another type, rank or device, and a required one that is None."""
    device = None
    for name, x in tensors.items():
        if x is None and name not in required:
            continue
        check_tensor(name, x, "an int32 or int64 torch.Tensor")
        assert x is not None
        if x.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} has dtype {str(x.dtype).removeprefix('torch.')}; it needs int32 or int64")
        rank = 2 if name == "block_table" else 1
        if x.dim() != rank:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it needs {rank} dimension{'s' * (rank > 1)}")
        if device is not None and x.device != device:
            raise ValueError(f"{name} is on {x.device}; it needs to be where the others are, on {device}")
        device = x.device


def _checked(sequences: Sequences) -> Sequences:
    """Check sizes and bounds, and on a CPU also values; return the sequences, with bounds as Python ints."""
    for name in ("max_seqlen_q", "max_seqlen_k"):
        bound = getattr(sequences, name)
        if bound is None:
            continue
        if not is_int(bound):
            raise TypeError(f"{name} is a {type(bound).__name__}; it needs to be an int")
        if bound < 0:
            raise ValueError(f"{name} is {bound}; it needs to be at least 0")
        if not isinstance(bound, (int, torch.SymInt)):  # a number of NumPy
            changes: dict[str, Any] = {name: bounded(bound)}
            sequences = replace(sequences, **changes)
    if sequences.cu_seqlens_q is not None and sequences.cu_seqlens_q.shape[0] == 0:
        raise ValueError("cu_seqlens_q has shape (0,); it needs one entry more than there are sequences")
    number = sequences.number
    for name in _TENSORS:
        x = getattr(sequences, name)
        if x is None:
            continue
        wanted = number + int(name.startswith("cu_"))  # torch.compile cannot add a bool to a size
        if x.shape[0] != wanted:
            raise ValueError(f"{name} has {x.shape[0]} entries; of {number} sequences it needs {wanted}")
    if all(map(values_can_be_read, sequences._tensors)):
        sequences._check_values()
    return sequences


def _safe_bounds(
    cu_seqlens: Tensor | None, used: Tensor | None, rows: int, most: int, number: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the first query, or key, of each sequence and their number: int32, within the rows of the tensor."""
    limit = min(rows, most)
    if used is not None:
        used = used.clamp(0, limit).to(torch.int32)  # clamped first, because int64 may not fit in int32
    if cu_seqlens is None:
        first = torch.zeros(number, dtype=torch.int32, device=device)
        return first, torch.full_like(first, limit) if used is None else used
    # Made ascending, because kernels search them for the sequence of a row.
    edges = cu_seqlens.clamp(0, rows).to(torch.int32).cummax(0).values
    first, lengths = edges[:-1], edges[1:] - edges[:-1]
    return first, lengths.clamp(max=limit) if used is None else torch.minimum(lengths, used)


def _check_side(
    side: str, cu_seqlens: Tensor | None, used: Tensor | None, rows: int | None, most: int | None, tensor: str
) -> list[int]:
    """Check the values for queries, side "q", or keys, "k"; return the lengths, [] if all slots are full.

    `tensor` is the name of q or k in messages.
    """
    lengths: list[int] = []
    slots: list[int] | None = None
    if cu_seqlens is not None:
        name, edges = f"cu_seqlens_{side}", listed(cu_seqlens)
        if edges[0] != 0:
            raise ValueError(
                f"{name} begins with {edges[0]}; it needs to begin with 0: where sequences begin, no lengths"
            )
        for s, (start, end) in enumerate(pairwise(edges)):
            if end < start:
                raise ValueError(f"{name} falls from {start} to {end} at sequence {s}; it needs to ascend")
        if rows is not None and edges[-1] > rows:
            raise ValueError(f"{name} ends with {edges[-1]}; {tensor} has {rows} tokens")
        lengths = slots = [end - start for start, end in pairwise(edges)]
    if used is not None:
        lengths = listed(used)
        for s, n in enumerate(lengths):
            slot = rows if slots is None else slots[s]
            if n < 0 or (slot is not None and n > slot):
                limit = "" if slot is None else f", and at most the {slot} of its slot"
                raise ValueError(f"seqlens_{side} is {n} for sequence {s}; it needs at least 0{limit}")
    for s, n in enumerate(lengths):
        if most is not None and n > most:
            tokens = "queries" if side == "q" else "keys"
            raise ValueError(f"sequence {s} has {n} {tokens}; max_seqlen_{side} says at most {most}")
    return lengths


class TokenPlaces(NamedTuple):
    """The sequence of each row of a tensor (S, L, ...) or (1, T, ...), with all rows flattened.

    Attributes:
        sequence: int64 (rows,), the sequence; an arbitrary existing one for a row of no sequence.
        place: int64 (rows,), the index of the row in that sequence; negative or too large if it is no token of it.
        is_used: bool (rows,), whether the row is a token of the sequence.
    """

    sequence: Tensor
    place: Tensor
    is_used: Tensor


def token_places(bounds: Tensor, entries: int, rows: int, is_packed: bool) -> TokenPlaces:
    """Find the sequence of each query (entries, rows, ...) by the bounds of a `SequenceView`, (S, 4); S >= 1."""
    row = torch.arange(entries * rows, device=bounds.device)
    if is_packed:
        firsts = bounds[:, 0].long()
        # The last sequence that begins at or before the row: an empty one begins at the same row as the next.
        sequence = (torch.searchsorted(firsts, row, right=True) - 1).clamp(min=0)
        place = row - firsts[sequence]
    else:
        sequence, place = row // rows, row % rows
    return TokenPlaces(sequence, place, (place >= 0) & (place < bounds[sequence, 1]))
