"""`PreparedMask`: a mask that is converted once to the form that kernels use, for any number of calls."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ...definition import listed
from ...problem import (
    MaskChoice,
    MaskForm,
    MaskView,
    SequenceSpec,
    bounded,
    causal_window,
    check_device,
    check_flag,
    check_scores,
    check_type,
    check_window,
    collapse,
    find_packing,
    make_band,
    merge,
    values_can_be_read,
)
from ...sequences.layout import Sequences
from .. import _restore
from ..arguments import (
    DIMS,
    INTEGER_DTYPES,
    IntsLike,
    align_heads,
    bool_mask,
    common_shape,
    float_scores,
    integer,
    integer_tensor,
    pair,
)
from ..blocks import MaskStats, check_blocks, expand_blocks
from ..builders import Device, document_pair, same_document
from ..topk import ScoresByRows, select, topk_arguments
from .intervals import live_keys, order_saves, places_for, reorder_pays
from .lists import best, keys_seen, ordered, seen_blocks
from .operators import (
    interval_walk,
    one_row_form,
    pack_for_sequences,
    packer_for,
    prepared_view,
    run_mask_intervals,
    run_score_keys,
    run_topk_intervals,
)
from .packing import MaskPacking, pack_rows, pack_tree, pack_words, refuse_mapped

if TYPE_CHECKING:
    from typing_extensions import Self

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Words = Callable[[int, int], Tensor]  # (start, stop) -> packed rows, for `pack_rows`
Shape = tuple[int, int, int, int]
Fields = dict[str, Any]


@dataclass(frozen=True, eq=False, repr=False)
class PreparedMask(ABC):
    """A mask in the form that kernels use, for any number of calls. Create it by one of the classmethods `from_...`.

    Pass it to `attention` instead of a bool mask. The classmethod chooses how it is stored: `form` is "tiles", "keys",
    "intervals" or "lists", and with sequences "sequence_tiles" or "tree".

    Attributes:
        is_causal, window_size: the band that is part of it, bottom-right aligned; -1 is unlimited on that side.
        one_row: whether it was made from a mask with one row for all queries, apart from the causal or window band.
            Some kernels then process more queries at once.
        sequences: the `Sequences` object that calls have to pass with it; None for other masks.
        view: its form and its tensors, for kernel backends.
    """

    form: ClassVar[MaskForm]
    _classes: ClassVar[dict[str, type[PreparedMask]]] = {}
    _tensor_names: ClassVar[tuple[str, ...]]

    is_causal: bool = field(default=False, kw_only=True)
    window_size: tuple[int, int] = field(default=(-1, -1), kw_only=True)
    one_row: bool = field(default=False, kw_only=True, repr=False)
    # Not part of `_call_key`, which would keep their tensors alive; validation compares them with the call's sequences.
    sequences: Sequences | None = field(default=None, kw_only=True, repr=False, compare=False)
    view: MaskView = field(init=False)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._tensor_names = tuple(n for n, kind in inspect.get_annotations(cls).items() if kind == "Tensor")
        if cls._tensor_names:
            PreparedMask._classes[cls.form] = cls

    def __post_init__(self) -> None:
        tensors = tuple([getattr(self, name) for name in self._tensor_names])
        object.__setattr__(self, "view", MaskView(self.form, tensors))

    @classmethod
    def from_mask(
        cls,
        mask: Tensor,
        *,
        seqlen_q: int | None = None,
        seqlen_k: int | None = None,
        is_causal: bool = False,
        window_size: tuple[int, int] | None = None,
        reorder: bool | None = None,
        as_tiles: bool = False,
        find_intervals: bool = False,
        sequences: Sequences | None = None,
    ) -> PreparedMask:
        """Convert a bool mask, with causality and window, to the form that kernels use.

        Its method `dense` returns `mask & causal_mask(Lq, Lk) & sliding_window_mask(Lq, Lk, window_size)`. Kernels of
        the CUDA extension or of Triton convert it on a GPU, PyTorch elsewhere, with the same result. Only
        `find_intervals` waits for the device. Expanded dims (stride 0) count as size 1 and are never materialised.

        A mask with one row for all queries is stored as intervals, or as keys for up to 15 queries. Both need O(Lk)
        memory plus lists of tiles, with or without a band. Any other mask is stored as tiles, in Lq * Lk / 8 bytes per
        head; tiles outside the band are skipped.

        With `sequences` the mask has one of the shapes of a mask in `attention` with sequences: by position, packed
        rows or packed keys. The band applies to each sequence. The result has max_seqlen_k / 8 bytes per query and
        head, and is for calls with the same `Sequences` object. Triton converts it on NVIDIA GPUs, PyTorch elsewhere.

        Args:
            mask: bool tensor of 2 dims or more, read from the right as (*batch, Hm, Lq or 1, Lk or 1), any strides. Hm
                may be 1, Hk or Hq, and is kept. Leading dims, each 1 or as in the calls, are folded into one batch
                dim; the `batch_dims` of the result keeps them.
            seqlen_q, seqlen_k: number of queries and keys; needed if the mask has size 1 for all of them. They are
                always needed with `sequences`: `q.shape[-3]` and `k.shape[-3]`, or with pages
                `block_table.shape[1] * page_size`.
            is_causal: hide keys after i + Lk - Lq.
            window_size: `(left, right)` keys around i + Lk - Lq; -1 is unlimited on that side.
            reorder: for a mask with one row, put kept keys first, so that kernels visit only these; each call then
                copies k and v. Use it if kept keys are scattered, not for padding. By default from 4096 queries on,
                where the copy is cheap compared with the call.
            as_tiles: store a mask with one row for 16 queries or more as tiles. It is faster for calls with a bias of
                one value per query and key: kernels then load bits, which they would otherwise compute from intervals
                in each pass.
            find_intervals: store a mask that depends on the query as intervals if it has them: if, within the band,
                the queries of each key are consecutive, as in causal top-k by one score per key, windows, documents or
                prefixes. `reorder` applies then: by default keys are ordered if the tiles that this saves outweigh its
                cost in a forward pass. The program waits for the answer, once; a CUDA graph cannot capture that, and
                `torch.compile` breaks its graph for it.
            sequences: the sequences of the calls; `reorder` and `find_intervals` are refused with them.

        Returns:
            PreparedMask. Its form is "sequence_tiles" with sequences; "intervals" or "keys" if the mask has one row for
            all queries; "intervals" if `find_intervals` has found them; else "tiles".

        Raises:
            TypeError: not a bool tensor, or a length, flag or window of another type.
            ValueError: another rank, lengths that are missing or differ from the mask, a negative window, both
                `as_tiles` and `find_intervals`.

        Example:
            >>> from flash_dmattn.masks import PreparedMask, padding_mask
            >>> prepared = PreparedMask.from_mask(torch.rand(2, 4, 300, 200) < 0.5, is_causal=True)
            >>> prepared.bits.shape, prepared.classes.shape
            (torch.Size([2, 4, 300, 8]), torch.Size([2, 4, 3, 2]))
            >>> PreparedMask.from_mask(padding_mask([3, 5], 6), seqlen_q=6).kept.tolist()
            [[[0, 1, 2, 6, 6, 6]], [[0, 1, 2, 3, 4, 6]]]
            >>> PreparedMask.from_mask(torch.ones(3, 3, dtype=torch.bool).tril(), find_intervals=True).start.tolist()
            [[[0, 1, 2]]]
        """
        if check_flag("find_intervals", find_intervals) and (check_flag("as_tiles", as_tiles) or sequences is not None):
            other = "with sequences" if sequences is not None else "with as_tiles=True"
            raise ValueError(f"find_intervals is True; {other} it needs to be False")
        if sequences is not None:
            if reorder is not None:
                raise ValueError(f"reorder is {reorder}; with sequences it needs to be None")
            mask4 = bool_mask("mask", mask)
            spec = _sequence_spec("mask", mask, sequences, seqlen_q, seqlen_k)
            packing = find_packing("mask", mask.shape, spec)
            check_scores("mask", mask4.shape, packing, spec, None)
            return cls._packed(mask4, packing, sequences, spec, _band_fields(is_causal, window_size))
        mask, leading = _folded(mask)
        mask4 = bool_mask("mask", mask)
        if mask.dim() < 2:
            raise ValueError(
                f"mask has shape {tuple(mask.shape)} ({mask.dim()}-D); it needs 2 dims or more, the last two of "
                f"them (seqlen_q, seqlen_k); pass mask[None] for keys"
            )
        seqlen_q = _full_length("seqlen_q", "row", mask4.size(2), seqlen_q)
        seqlen_k = _full_length("seqlen_k", "column", mask4.size(3), seqlen_k)
        limits = _band_fields(is_causal, window_size)
        choice = one_row_form(seqlen_q, None if reorder is None else check_flag("reorder", reorder))
        if check_flag("as_tiles", as_tiles) and choice.form == "intervals":
            choice = MaskChoice("tiles")
        numbers = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, **limits, "leading": leading}
        view = prepared_view(mask4, seqlen_q, seqlen_k, causal_window(**limits), choice)
        if find_intervals and view.form == "tiles":
            refuse_mapped("find_intervals=True", view.tensors[0], "leave it out")
            tensors = _recognise_intervals(view, seqlen_q, seqlen_k, reorder)
            if tensors is not None:
                return cls._made("intervals", tensors, **numbers)
        return cls._made(view.form, view.tensors, **numbers, one_row=collapse(mask4).size(2) == 1)

    @classmethod
    def from_blocks(
        cls,
        block_mask: Tensor,
        block_size: int | tuple[int, int],
        seqlen_q: int,
        seqlen_k: int,
        *,
        is_causal: bool = False,
        window_size: tuple[int, int] | None = None,
    ) -> PreparedMask:
        """Prepare a block mask.

        Equivalent to `PreparedMask.from_mask(expand_blocks(block_mask, block_size, seqlen_q, seqlen_k),
        seqlen_q=seqlen_q, seqlen_k=seqlen_k, is_causal=is_causal, window_size=window_size)`. Keys are packed once for
        each row of blocks.

        Args:
            block_mask: bool tensor of 2 to 4 dims, (..., ceil(seqlen_q / bq) or 1, ceil(seqlen_k / bk) or 1).
            block_size: tokens per block, one int or (bq, bk); multiples of 128 are best, because kernels use tiles of
                128 x 128.
            seqlen_q, seqlen_k: number of queries and keys.
            is_causal, window_size: the band, as in `from_mask`.

        Returns:
            PreparedMask, of tiles. If one row of blocks is for all queries, see `from_mask` for masks with one row.

        Raises:
            TypeError: `block_mask` is not bool, or a size is not an int.
            ValueError: the number of blocks is neither 1 nor the number that the lengths need.

        Example:
            >>> from flash_dmattn.masks import PreparedMask
            >>> PreparedMask.from_blocks(torch.eye(3, dtype=torch.bool), 128, 384, 384).classes[0, 0].tolist()
            [[2, 0, 0], [0, 2, 0], [0, 0, 2]]
        """
        blocks = collapse(bool_mask("block_mask", block_mask))
        block_q, block_k = size = pair("block_size", block_size, 1)
        if blocks.size(2) == 1:
            mask = expand_blocks(blocks, size, seqlen_q, seqlen_k)
            return cls.from_mask(
                mask, seqlen_q=seqlen_q, seqlen_k=seqlen_k, is_causal=is_causal, window_size=window_size
            )
        check_blocks(block_mask, "seqlen_q", blocks.size(2), seqlen_q, block_q)

        def words(start: int, stop: int) -> Tensor:
            rows = blocks[:, :, start // block_q : -(-stop // block_q)]
            keys = expand_blocks(rows, (1, block_k), rows.size(2), seqlen_k).expand(-1, -1, -1, seqlen_k)
            block_of_row = torch.arange(start, stop, device=blocks.device) // block_q - start // block_q
            return pack_words(keys).index_select(2, block_of_row)

        shape = (blocks.size(0), blocks.size(1), seqlen_q, seqlen_k)
        return cls._tiled(words, shape, blocks.device, _band_fields(is_causal, window_size))

    @classmethod
    def from_mask_mod(
        cls,
        mask_mod: MaskMod,
        seqlen_q: int,
        seqlen_k: int,
        *,
        batch_size: int = 1,
        num_heads: int = 1,
        is_causal: bool = False,
        window_size: tuple[int, int] | None = None,
        device: Device = None,
    ) -> PreparedMask:
        """Prepare the mask of a `mask_mod` of FlexAttention, in blocks of queries.

        Equivalent to `PreparedMask.from_mask(create_mask(mask_mod, batch_size, num_heads, seqlen_q, seqlen_k, device),
        is_causal=is_causal, window_size=window_size)`, without an (Lq, Lk) tensor. The function is called now, for each
        block, so later changes of tensors that it uses have no effect.

        Args:
            mask_mod: a function of 4 int64 scalars, the batch, head, query and key. It returns a bool scalar, True if
                the pair is allowed, and runs inside `torch.vmap`, as in FlexAttention.
            seqlen_q, seqlen_k: number of queries and keys.
            batch_size, num_heads: of the calls, for a function that uses b or h; 1 is enough for any other.
            is_causal, window_size: the band, as in `from_mask`.
            device: the device of the function's tensors, on which it runs, and of the result.

        Returns:
            PreparedMask. Its batch, heads or rows have size 1 if the function does not use b, h or q_idx.

        Raises:
            TypeError: `mask_mod` is no function, or returns anything but a bool tensor; sizes are not integer.
            ValueError: a size below 0, or `mask_mod` returns more than a scalar.

        Example:
            >>> from flash_dmattn.masks import PreparedMask
            >>> mask = PreparedMask.from_mask_mod(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, 384, 384)
            >>> mask.classes[0, 0].tolist()
            [[1, 0, 0], [2, 1, 0], [2, 2, 1]]
        """
        if not callable(mask_mod):
            raise TypeError(f"mask_mod is a {type(mask_mod).__name__}; it needs to be a function (b, h, q_idx, kv_idx)")
        sizes = {"batch_size": batch_size, "num_heads": num_heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
        batches, heads, queries, keys = (
            torch.arange(integer(name, size), device=device) for name, size in sizes.items()
        )
        if 0 in sizes.values():  # torch.vmap may refuse an empty dim
            nothing = torch.zeros(1, 1, dtype=torch.bool, device=device)
            return cls.from_mask(
                nothing, seqlen_q=seqlen_q, seqlen_k=seqlen_k, is_causal=is_causal, window_size=window_size
            )

        def allowed_pair(*position: Tensor) -> Tensor:
            made: Any = mask_mod(*position)
            if not isinstance(made, Tensor):
                raise TypeError(f"mask_mod returns a {type(made).__name__}; it needs to return a bool tensor")
            if made.dtype != torch.bool:
                raise TypeError(f"mask_mod returns {made.dtype}; it needs to return bool")
            if made.dim() > 0:
                raise ValueError(f"mask_mod returns shape {tuple(made.shape)}; it needs to return a scalar")
            return made

        allowed: Callable[..., Tensor] = allowed_pair
        for dim in (3, 2, 1, 0):
            allowed = torch.vmap(allowed, in_dims=tuple(0 if place == dim else None for place in range(4)))
        corner = allowed(batches, heads, queries[:2], keys[:2])
        batch, num_heads, rows, _ = collapse(corner).shape  # vmap expands the dims that the function does not depend on
        if rows == 1:
            one_row = allowed(batches[:batch], heads[:num_heads], queries[:1], keys)
            return cls.from_mask(
                one_row, seqlen_q=seqlen_q, seqlen_k=seqlen_k, is_causal=is_causal, window_size=window_size
            )

        def words(start: int, stop: int) -> Tensor:
            return pack_words(allowed(batches[:batch], heads[:num_heads], queries[start:stop], keys))

        return cls._tiled(
            words, (batch, num_heads, seqlen_q, seqlen_k), queries.device, _band_fields(is_causal, window_size)
        )

    @classmethod
    def from_documents(
        cls,
        ids: IntsLike,
        ids_k: IntsLike | None = None,
        *,
        is_causal: bool = False,
        window_size: tuple[int, int] | None = None,
    ) -> PreparedMask:
        """Prepare the mask of packed documents: each query attends to the keys of its document.

        Equivalent to `PreparedMask.from_mask(document_mask(ids, ids_k), is_causal=is_causal, window_size=window_size)`,
        for two queries or more.

        Args:
            ids: integer tensor or list, (Lq,) or (B, Lq), for instance from `document_ids`. Negative ids are padding.
            ids_k: the document of each key, (Lk,) or (B, Lk); `ids` by default.
            is_causal, window_size: the band, as in `from_mask`.

        Returns:
            PreparedMask, of tiles, with batch size B if ids or ids_k have a batch dim.

        Raises:
            TypeError: ids are not integer.
            ValueError: ids have another rank, or two different batch sizes.

        Example:
            >>> from flash_dmattn.masks import PreparedMask, document_ids
            >>> PreparedMask.from_documents(document_ids([128, 256])).classes[0, 0].tolist()
            [[2, 0, 0], [0, 2, 2], [0, 2, 2]]
        """
        ids_q, keys = document_pair(ids, ids_k)

        def words(start: int, stop: int) -> Tensor:
            return pack_words(same_document(ids_q[:, start:stop], keys))

        shape = (max(ids_q.size(0), keys.size(0)), 1, ids_q.size(1), keys.size(1))
        return cls._tiled(words, shape, ids_q.device, _band_fields(is_causal, window_size))

    @classmethod
    def from_intervals(
        cls,
        start: IntsLike,
        stop: IntsLike,
        seqlen_q: int,
        *,
        is_causal: bool = False,
        window_size: tuple[int, int] | None = None,
        reorder: bool = False,
        compact: bool = False,
    ) -> PreparedMask:
        """Prepare the mask in which key j is visible to the queries `start[j] <= i < stop[j]`.

        Equivalent to `PreparedMask.from_mask(mask, is_causal=is_causal, window_size=window_size)` with::

            i = torch.arange(seqlen_q)[:, None]
            mask = (i >= start[..., None, :]) & (i < stop[..., None, :])

        No (Lq, Lk) tensor is allocated: the work is per interval and per tile of 128 x 128. Only `compact` waits for
        the device.

        Args:
            start, stop: integer tensors or lists of 1 to 3 dims, read from the right as (Bm, Hm, Lk), and broadcast
                against each other: Bm is 1 or the batch size, Hm is 1, Hk or Hq. Values are clamped to 0 to `seqlen_q`;
                a key with `start >= stop` is hidden from all queries.
            seqlen_q: number of queries.
            is_causal, window_size: the band, as in `from_mask`; it is folded in.
            reorder: put keys with similar intervals side by side, so that kernels visit a smaller number of tiles. Use
                it if visible keys are scattered among hidden ones, as in `from_topk`, not for windows or documents.
            compact: with `reorder`, leave hidden keys out of the order, as in `from_topk`.

        Returns:
            PreparedMask, of intervals.

        Raises:
            TypeError: `start` or `stop` is not integer, or a length, flag or window of another type.
            ValueError: another rank, shapes that do not broadcast, two devices, a negative length or window, `compact`
                without `reorder`.

        Source: Wang et al., "FlashMask: Efficient and Rich Mask Extension of FlashAttention", 2024, which describes
            masks by the hidden rows of each column.

        Example:
            >>> from flash_dmattn.masks import PreparedMask
            >>> PreparedMask.from_intervals([0, 1, 0], [4, 2, 0], 4).dense()[0, 0].int()
            tensor([[1, 0, 0],
                    [1, 1, 0],
                    [1, 0, 0],
                    [1, 0, 0]], dtype=torch.int32)
        """
        begins, ends = integer_tensor("start", start, (1, 2, 3)), integer_tensor("stop", stop, (1, 2, 3))
        check_device("stop", ends.device, begins.device, "start")
        # In int64, so that small dtypes neither overflow nor refuse the limits.
        begins, ends = (collapse(x[(None,) * (3 - x.dim())], dims=(0, 1)).long() for x in (begins, ends))
        for dim, name in ((0, DIMS[0]), (1, DIMS[1]), (2, DIMS[3])):
            if begins.size(dim) != ends.size(dim) and 1 not in (begins.size(dim), ends.size(dim)):
                raise ValueError(
                    f"stop has {name} = {ends.size(dim)} (shape {tuple(ends.shape)}) and start has {begins.size(dim)} "
                    f"(shape {tuple(begins.shape)}); they need to be equal, or one of them 1"
                )
        begins, ends = torch.broadcast_tensors(begins, ends)
        seqlen_q, seqlen_k = integer("seqlen_q", seqlen_q), begins.size(2)
        limits = _band_fields(is_causal, window_size)
        reorder = check_flag("reorder", reorder)
        _check_compact(compact, reorder)
        # Intervals are cut to the band, and to rows that exist.
        band = make_band(seqlen_q, seqlen_k, causal_window(**limits))
        if band is not None:
            keys = torch.arange(seqlen_k, device=begins.device)
            begins, ends = begins.maximum(keys - band.high), ends.minimum(keys - band.low + 1)
        begins, ends = begins.clamp(0, seqlen_q), ends.clamp(0, seqlen_q)
        dead = begins >= ends
        begins, ends = (x.masked_fill(dead, 0).to(torch.int32).contiguous() for x in (begins, ends))
        return cls._of_intervals(begins, ends, seqlen_q, reorder, compact, limits)

    @classmethod
    def from_topk(
        cls,
        scores: Tensor,
        k: int,
        *,
        is_causal: bool = False,
        mask: Tensor | None = None,
        seqlen_q: int | None = None,
        local: int = 0,
        reorder: bool | None = None,
        compact: bool = False,
    ) -> PreparedMask:
        """Prepare the mask of the `k` highest scored keys of every query, from one score per key.

        Equivalent to `PreparedMask.from_mask(topk_mask(scores, k, is_causal=is_causal, mask=mask, seqlen_q=seqlen_q),
        is_causal=is_causal)`, ties, NaN and -inf included. As the prefix grows, a key stays among the best until k
        better ones have come, so one interval of queries keeps it. Intervals need O(Lk log Lk) time and O(Lk) memory,
        and lists of tiles 8 bytes for each 128 x 128 pairs. Only `compact` waits for the device.

        Args:
            scores: float tensor of 1 to 4 dims, read from the right as (B or 1, H or 1, 1, Lk): one score per key for
                all queries. H is 1, Hk or Hq. It gets no gradient.
            k: number of keys to keep, >= 1; may exceed Lk.
            is_causal: whether query i is only allowed the keys j <= i + Lk - Lq.
            mask: bool tensor broadcastable to (B, H, 1, Lk), True = allowed, the same for all queries.
            seqlen_q: number of queries; Lk by default. Decoding one query with a cache needs `seqlen_q=1`.
            local: a causal query also keeps the allowed ones of the last `local` keys up to its position, in addition
                to the k: `topk_mask(...) | sliding_window_mask(Lq, Lk, (local - 1, 0)) & mask`.
            reorder: put keys with similar intervals side by side, so that kernels visit a smaller number of tiles. By
                default if that is expected to save more time than it costs: see "Order" in docs/prepared_masks.md. Only
                sizes decide: the heads of `scores` count as the heads of the call, and a backward pass is expected if
                `scores` need a gradient.
            compact: order the keys, and leave hidden ones out of the order. With independent scores only about
                k * (1 + ln(Lk / k)) keys are visible to some query: at 1M keys and k = 1024 lists of tiles are a
                hundred times smaller, and so are the copies of k and v, and the sums of their gradients, in each call.
                The program waits for that number, once; a CUDA graph cannot capture that, and `torch.compile` breaks
                its graph for it. If more than half of the keys are visible to some query, none is left out.

        Returns:
            PreparedMask, of intervals, with the batch size and heads of scores and mask.

        Raises:
            TypeError: `scores` is not float, `mask` is not bool, `k` or `local` is not an int, or a flag is no bool.
            ValueError: `scores` or `mask` depends on the query, k < 1, `local` without `is_causal`, `compact` with
                `reorder=False`, shapes that do not broadcast.

        Source: the dynamic mask of "Trainable Dynamic Mask Sparse Attention", 2025, as intervals.

        Example:
            >>> from flash_dmattn.masks import PreparedMask
            >>> prepared = PreparedMask.from_topk(torch.tensor([3.0, 1.0, 2.0, 2.0]), 2, is_causal=True)
            >>> prepared.start.tolist(), prepared.stop.tolist()
            ([[[0, 1, 2, 0]]], [[[4, 2, 4, 0]]])
            >>> prepared.dense()[0, 0].int()
            tensor([[1, 0, 0, 0],
                    [1, 1, 0, 0],
                    [1, 0, 1, 0],
                    [1, 0, 1, 0]], dtype=torch.int32)
        """
        limits = _topk_limits(k, is_causal, local)
        k, local = bounded(k), bounded(local)
        if reorder is not None:
            check_flag("reorder", reorder)
        _check_compact(compact, reorder)
        values, allowed, seqlen_q = topk_arguments(scores, mask, seqlen_q)
        for name, x in (("scores", values), ("mask", allowed)):
            if x is not None and x.size(2) != 1:
                raise ValueError(
                    f"{name} has {x.size(2)} rows (as 4-D, shape {tuple(x.shape)}); it needs one for all queries; "
                    "what depends on the query makes no intervals: use PreparedMask.from_mask(topk_mask(...))"
                )
        keys = run_score_keys(values, allowed)
        batch, heads, seqlen_k = keys.shape
        if reorder is None and compact:
            reorder = True
        if reorder is None:
            has_backward = scores.requires_grad and torch.is_grad_enabled()
            reorder = reorder_pays(
                batch * heads, seqlen_q, seqlen_k, k + local, is_causal=is_causal, has_backward=has_backward
            )
        if is_causal:
            start, stop = run_topk_intervals(keys, k, seqlen_q, local)
        else:
            stop = (select(keys, k) * seqlen_q).to(torch.int32)
            start = torch.zeros_like(stop)
        return cls._of_intervals(start, stop, seqlen_q, reorder, compact, limits)

    @classmethod
    def from_lists(
        cls,
        index: Tensor,
        *,
        seqlen_k: int,
        seqlen_q: int | None = None,
        block_size: int | tuple[int, int] = 1,
        is_causal: bool = False,
        window_size: tuple[int, int] | None = None,
        sequences: Sequences | None = None,
    ) -> PreparedMask:
        """Prepare the mask in which each query attends to the keys, or the blocks of keys, of its list.

        Equivalent to `PreparedMask.from_mask(mask, is_causal=is_causal, window_size=window_size)` with::

            chosen = torch.zeros(Bm, Hm, R, blocks + 1, dtype=torch.bool)
            chosen.scatter_(3, torch.where(index < 0, blocks, index), True)  # the last column is for -1
            mask = expand_blocks(chosen[..., :blocks], block_size, seqlen_q, seqlen_k)

        No (Lq, Lk) tensor is allocated, neither here nor by calls. The order of a list, and repeated keys, do not
        change the result. Keys that the band hides are allowed in a list, and stay hidden.

        With `sequences` entries are positions in their sequence, from 0, for packed, padded and paged keys alike, and
        the band applies to each sequence. The result is for calls with the same `Sequences` object.

        Args:
            index: integers of 2 dims or more, read from the right as (*batch, Hm, R, K), any strides: a list of K keys
                or blocks for each of R = ceil(seqlen_q / block_q) blocks of queries; -1 for no key. Hm is 1, Hk or Hq.
                Leading dims fold as in `from_mask`. With sequences it is (Hm, queries of all sequences, K) if queries
                are packed, else (sequences or 1, Hm, seqlen_q, K).
            seqlen_k: number of keys; with sequences `k.shape[-3]`, or with pages `block_table.shape[1] * page_size`.
            seqlen_q: number of queries; needed if lists are for blocks of them.
            block_size: queries of a list, and keys of a block, as one int or (block_q, block_k). With sequences each
                query needs one list, so block_q is 1.
            is_causal, window_size: the band, as in `from_mask`.
            sequences: the sequences of the calls.

        Returns:
            PreparedMask, of the form "lists".

        Raises:
            TypeError: `index` is not an integer tensor, or a length, flag or window of another type.
            ValueError: another rank or number of lists, lists for blocks of queries with sequences, or, on a CPU, an
                entry below -1 or after the last block. On an accelerator entries are not checked, and such an entry
                counts as -1.

        Sources: DeepSeek-AI, "DeepSeek-V3.2", 2025 (single keys); Yuan et al., "Native Sparse Attention", 2025 (blocks
            of keys); Lu et al., "MoBA: Mixture of Block Attention for Long-Context LLMs", 2025.

        Example:
            >>> from flash_dmattn.masks import PreparedMask
            >>> index = torch.tensor([[0, -1], [3, 0], [1, 1], [3, 2]])
            >>> PreparedMask.from_lists(index, seqlen_k=4, is_causal=True).dense()[0, 0].int()
            tensor([[1, 0, 0, 0],
                    [1, 0, 0, 0],
                    [0, 1, 0, 0],
                    [0, 0, 1, 1]], dtype=torch.int32)
        """
        blocks, limits = pair("block_size", block_size, 1), _band_fields(is_causal, window_size)
        if not isinstance(index, Tensor) or index.dtype not in INTEGER_DTYPES:
            has = f"dtype {index.dtype}" if isinstance(index, Tensor) else f"type {type(index).__name__}"
            raise TypeError(f"index has {has}; it needs to be an integer torch.Tensor, -1 for no key")
        if index.dim() < 2:
            raise ValueError(f"index has shape {tuple(index.shape)}; it needs 2 dims or more, the last two (R, K)")
        index, leading = _folded(index)
        index = collapse(index, dims=range(index.dim() - 2))[(None,) * (4 - index.dim())]
        window, numbers = causal_window(**limits), {"block_size": blocks, **limits}
        if sequences is not None:
            if blocks[0] != 1:
                raise ValueError(f"block_size[0] is {blocks[0]}; with sequences each query has a list of its own, 1")
            seqlen_q = index.shape[2] if seqlen_q is None else seqlen_q
            spec = _sequence_spec("index", index, sequences, seqlen_q, seqlen_k)
            lengths = _lengths_of_lists("index", index.shape[2], blocks, spec.rows_q, spec.max_seqlen_k)
            bounds, entries = sequences.make_bounds(spec), 1 if spec.packs_queries else spec.number
            if index.shape[0] not in (1, entries):
                raise ValueError(f"index has a batch of {index.shape[0]}; with these sequences it needs {entries}")
            if values_can_be_read(index):
                last = keys_seen(bounds, spec, (-1, -1)).high[:, None, :, None]
                # Rows without keys may list any.
                check_entries(index, torch.where(last < 0, lengths[1] - 1, last) // blocks[1])
            seen = keys_seen(bounds, spec, window)
            low, high = (torch.div(x[:, None], blocks[1], rounding_mode="floor") for x in (seen.low, seen.high))
            numbers |= {"sequences": sequences, "spec": spec}
            index = index.expand(entries, -1, -1, -1)
        else:
            lengths = _lengths_of_lists("index", index.shape[2], blocks, seqlen_q, integer("seqlen_k", seqlen_k))
            if values_can_be_read(index):
                last = index.new_full((1, 1, 1, 1), -(-lengths[1] // blocks[1]) - 1, dtype=torch.int64)
                check_entries(index, last)
            numbers |= {"leading": leading}
            low, high = seen_blocks(blocks, lengths, make_band(*lengths, window), index.device)
        tensors = ordered(index, -(-lengths[1] // blocks[1]), low, high)
        return cls._made("lists", tensors, seqlen_q=lengths[0], seqlen_k=lengths[1], **numbers)

    @classmethod
    def from_topk_lists(
        cls,
        scores: Tensor | ScoresByRows,
        k: int,
        *,
        seqlen_q: int | None = None,
        seqlen_k: int | None = None,
        block_size: int | tuple[int, int] = 1,
        is_causal: bool = False,
        mask: Tensor | None = None,
        local: int = 0,
        sequences: Sequences | None = None,
    ) -> PreparedMask:
        """Prepare the mask of the `k` best scored keys, or blocks of keys, of each query or block of queries, as lists.

        With single keys it is equal to `PreparedMask.from_mask(topk_mask(scores, k, is_causal=is_causal, mask=mask))`.
        Scores are computed for chunks of queries, so `IndexScores` never become an (Lq, Lk) tensor. Lists are
        ascending, without a sort. It does not wait for the device.

        With packed `sequences` scores are of all queries and all keys. Each query gets a list of keys of its sequence,
        numbered from 0 as in `from_lists`; scores of other sequences' keys are computed and ignored.

        Args:
            scores: float, read from the right as (*batch, H, R or 1, N), without a gradient here; or `IndexScores`. R
                is the number of blocks of queries, N of blocks of keys. -inf forbids; NaN ranks below every number;
                of equal scores the earliest key comes first.
            k: number of chosen keys or blocks, at least 1.
            seqlen_q, seqlen_k: number of queries and keys; needed if a block has more than one, and seqlen_q also if
                scores have one row for all queries.
            block_size: queries of a list, and keys of a block, as one int or (block_q, block_k).
            is_causal: a block may be chosen if the last query of the list may see its first key; calls hide its later
                keys.
            mask: bool, broadcastable to the scores: the blocks that may be chosen. Both have 4 dims at most then.
            local: a list also gets the last `local` blocks that its last query may see.
            sequences: the sequences of the calls, packed; blocks then are single keys.

        Returns:
            PreparedMask, of the form "lists", with min(k + local, N) entries. Its `keys` are ascending, so that
            `scores.gather(-1, lists.keys.clamp(min=0).long())` are values for `biases.ListBias`.

        Raises:
            TypeError: `scores` is not float, `mask` not bool, or `k` or a length is not an int.
            ValueError: k < 1, shapes that do not broadcast or differ from the lengths, `local` without causality,
                sequences that are not packed.

        Example:
            >>> from flash_dmattn.masks import PreparedMask
            >>> PreparedMask.from_topk_lists(torch.tensor([[3.0, 1, 2, 2]]), 2, seqlen_q=4, is_causal=True).keys[0, 0]
            tensor([[ 0, -1],
                    [ 0,  1],
                    [ 0,  2],
                    [ 0,  2]], dtype=torch.int32)
        """
        blocks, limits = pair("block_size", block_size, 1), _topk_limits(k, is_causal, local)
        allowed, leading = None if mask is None else bool_mask("mask", mask), None
        if not isinstance(scores, Tensor) and hasattr(scores, "batch_dims"):
            one, heads, batch = scores.q, 1, math.prod(scores.batch_dims)
            rows, number = scores.q.shape[-3], scores.k.shape[-2]
            leading = scores.batch_dims if len(scores.batch_dims) > 1 else None
        else:
            folded: Any = scores
            if mask is None:
                folded, leading = _folded(folded)
            values = collapse(float_scores(folded), dims=(0, 1, 2))
            if allowed is not None:
                values, allowed = align_heads([values, collapse(allowed)], ["scores", "mask"])
            one, scores = values, values
            batch, heads, rows, number = values.shape
        if allowed is not None:
            check_device("mask", allowed.device, one.device, "scores")
            shape = common_shape([allowed, allowed.new_empty(batch, heads, rows, number)], ["mask", "scores"])
            if shape[3] != number:
                raise ValueError(f"mask has {allowed.shape[3]} keys, scores {number}; mask needs 1 or as many keys")
            batch, heads, rows, _ = shape
        if rows == 1 and seqlen_q is not None:
            rows = -(-integer("seqlen_q", seqlen_q) // blocks[0])
        if seqlen_k is None:
            if blocks[1] > 1:
                raise ValueError(f"seqlen_k is None; with blocks of {blocks[1]} keys it needs to be their number")
            seqlen_k = number
        lengths = _lengths_of_lists("scores", rows, blocks, seqlen_q, integer("seqlen_k", seqlen_k))
        if number != -(-seqlen_k // blocks[1]):
            raise ValueError(
                f"scores have {number} columns; they need {-(-seqlen_k // blocks[1])}, a block of {blocks[1]} of "
                f"{seqlen_k} keys each"
            )
        window, sizes = causal_window(**limits), (batch, heads, rows, number)
        numbers = {"seqlen_q": lengths[0], "seqlen_k": lengths[1], "block_size": blocks, **limits}
        if sequences is None:
            low, high = seen_blocks(blocks, lengths, make_band(*lengths, window), one.device)
            tensors = best(scores, allowed, low, high, sizes, k, local)
            return cls._made("lists", tensors, **numbers, leading=leading)
        spec = _sequence_spec("scores", one, sequences, *lengths)
        if spec.layout != "packed" or blocks != (1, 1) or batch != 1:
            raise ValueError(
                f"scores have a batch of {batch}, for blocks {blocks} of {spec.layout} sequences; they need a batch of "
                "1, single keys and packed sequences"
            )
        _, _, first, low, high = (x[0] for x in keys_seen(sequences.make_bounds(spec), spec, window))
        low, high = low + first, torch.where(high < 0, -1, high + first)
        keys, count, slots = best(scores, allowed, low, high, sizes, k, local)
        keys = torch.where(keys < 0, -1, keys - first[:, None].to(torch.int32))
        numbers |= {"seqlen_k": spec.max_seqlen_k, "sequences": sequences, "spec": spec}
        return cls._made("lists", (keys, count, slots), **numbers)

    @classmethod
    def from_tree(cls, tree: Tensor) -> PreparedMask:
        """Pack trees of draft tokens, for `attention(..., mask, sequences=...)`: one mask for all layers.

        The last n keys of a sequence are its new tokens, the queries of the call. The result is equal to a mask of all
        keys, without its memory::

            mask = torch.ones(n, Lk, dtype=torch.bool)  # for one sequence: every earlier key is visible
            mask[:, Lk - n :] = tree

        Args:
            tree: bool (S or 1, n, n): whether query i of a sequence attends to its new token j; a first size of 1 is
                one tree for all. n is max_seqlen_q of the calls; a shorter sequence uses the first rows and columns.

        Returns:
            PreparedMask, of the form "tree", of n * n / 8 bytes for each tree.

        Raises:
            TypeError: not a bool tensor.
            ValueError: another rank, or a number of columns other than rows.

        Example:
            >>> from flash_dmattn.masks import PreparedMask
            >>> chain = torch.ones(1, 4, 4, dtype=torch.bool).tril()  # the same as is_causal
            >>> PreparedMask.from_tree(chain).bits.flatten().tolist()
            [1, 3, 7, 15]
        """
        bool_mask("tree", tree)
        if tree.dim() != 3 or tree.shape[1] != tree.shape[2]:
            raise ValueError(
                f"tree has shape {tuple(tree.shape)}; it needs to be (sequences or 1, new tokens, new tokens)"
            )
        return cls._made("tree", (pack_tree(tree),))

    @classmethod
    def from_ragged(
        cls,
        flat: Tensor,
        sequences: Sequences,
        *,
        seqlen_q: int,
        seqlen_k: int,
        is_causal: bool = False,
        window_size: tuple[int, int] | None = None,
    ) -> PreparedMask:
        """Pack a mask in which the (query, key) pairs of all sequences follow one another, for all layers of a model.

        Equivalent to, for packed queries and keys::

            mask = torch.zeros(heads, seqlen_q, max_seqlen_k, dtype=torch.bool)
            start = 0
            for s, (n, m) in enumerate(zip(lengths_q, lengths_k)):
                mask[:, cu_seqlens_q[s] : cu_seqlens_q[s] + n, :m] = flat[:, start : start + n * m].view(-1, n, m)
                start += n * m
            PreparedMask.from_mask(mask, sequences=sequences, ...)

        Args:
            flat: bool (N,) or (H, N), where N is the sum of Lq_s * Lk_s over sequences: all rows of the first sequence,
                then all rows of the second, and so on. H is 1, Hk or Hq.
            sequences: the `Sequences` object of the calls.
            seqlen_q, seqlen_k, is_causal, window_size: as in `from_mask(mask, sequences=sequences)`.

        Returns:
            PreparedMask, of the form "sequence_tiles".

        Raises:
            TypeError: not a bool tensor, not `Sequences`.
            ValueError: another rank, or, on a CPU, another number of pairs. On an accelerator pairs are not counted:
                missing ones get wrong values, but memory outside of `flat` is never accessed.

        Source: Ye et al., FlashInfer, 2025, where `custom_mask` has the flat form.

        >>> import torch
        >>> from flash_dmattn import Sequences
        >>> from flash_dmattn.masks import PreparedMask
        >>> documents = Sequences.packed(torch.tensor([0, 1, 3]), max_seqlen_q=2)
        >>> flat = torch.tensor([True] + [True, False, True, True])  # 1 x 1 and 2 x 2
        >>> PreparedMask.from_ragged(flat, documents, seqlen_q=3, seqlen_k=3).unpacked()[0, 0].int().tolist()
        [[1, 0], [1, 0], [1, 1]]
        """
        mask4 = bool_mask("flat", flat)
        spec = _sequence_spec("flat", flat, sequences, seqlen_q, seqlen_k)
        if flat.dim() not in (1, 2):
            raise ValueError(f"flat has shape {tuple(flat.shape)}; it needs to be (pairs,) or (heads, pairs)")
        if values_can_be_read(flat):
            bounds = sequences.make_bounds(spec)
            pairs = int((bounds[:, 1].long() * bounds[:, 3]).sum())
            if flat.shape[-1] != pairs:
                raise ValueError(f"flat has {flat.shape[-1]} pairs; it needs {pairs}, queries times keys of sequences")
        return cls._packed(mask4.transpose(1, 2), "ragged", sequences, spec, _band_fields(is_causal, window_size))

    @classmethod
    def _made(cls, form: MaskForm, tensors: Sequence[Tensor], **others: Any) -> PreparedMask:
        kind = cls._classes[form]
        values: dict[str, Any] = {**dict(zip(kind._tensor_names, tensors, strict=True)), **others}
        return kind(**values)

    @classmethod
    def _of_intervals(
        cls, start: Tensor, stop: Tensor, seqlen_q: int, reorder: bool, compact: bool, limits: Fields
    ) -> PreparedMask:
        seqlen_k = start.size(2)
        if compact:
            refuse_mapped("compact=True", start, "leave it out")
        places = places_for(int(live_keys(start, stop)), seqlen_k) if compact else None  # which waits for the device
        tensors = start, stop, *interval_walk(start, stop, seqlen_q, reorder, places)
        return cls._made("intervals", tensors, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **limits)

    @classmethod
    def _tiled(cls, words: Words, shape: Shape, device: torch.device, limits: Fields) -> PreparedMask:
        bits, classes = pack_rows(words, shape, make_band(*shape[2:], causal_window(**limits)), device)
        tensors = bits, classes, *packer_for(bits).list_tiles(classes)
        return cls._made("tiles", tensors, seqlen_q=shape[2], seqlen_k=shape[3], **limits)

    @classmethod
    def _packed(
        cls, mask: Tensor, packing: MaskPacking, sequences: Sequences, spec: SequenceSpec, limits: Fields
    ) -> PreparedMask:
        tensors = pack_for_sequences(mask, sequences.make_bounds(spec), packing, spec, causal_window(**limits))
        return cls._made("sequence_tiles", tensors, sequences=sequences, spec=spec, **limits)

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the bool tensor that it is equal to: (Bm, Hm, Lq or 1, Lk), or (S or 1, n, n) for trees."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The fields that are tensors, in their order."""
        return self.view.tensors

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self.view.tensors[0].device

    @cached_property
    def _call_key(self) -> tuple[object, ...]:
        """Its part of the key of a call in the cache of plans: all except values of tensors; hashable."""
        values = (getattr(self, field.name) for field in _fields(self) if field.compare)
        return self.form, *((x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else x for x in values)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """Copy the mask to a device; return itself if it is there already, as `torch.Tensor.to` does.

        Its `sequences` are copied, too: pass `mask.sequences` of the result to calls.

        >>> import torch
        >>> from flash_dmattn.masks import PreparedMask
        >>> PreparedMask.from_mask(torch.ones(8, 8, dtype=torch.bool), is_causal=True).to("cpu")
        PreparedMask(form='tiles', shape=(1, 1, 8, 8), is_causal=True, window_size=(-1, -1), seqlen_q=8, device='cpu')
        """
        moved = [x.to(device, non_blocking=non_blocking) for x in self.tensors]
        if all(x is own for x, own in zip(moved, self.tensors, strict=True)):
            return self
        if self.sequences is None:
            return self._with_tensors(moved)
        return self._with_tensors(moved, sequences=self.sequences.to(device, non_blocking=non_blocking))

    def _with_tensors(self, tensors: Sequence[Tensor], **others: Any) -> Self:
        """Replace the tensors, in the order of the property `tensors`, and other fields by name."""
        changes: dict[str, Any] = {**dict(zip(self._tensor_names, tensors, strict=True)), **others}
        return replace(self, **changes)

    @abstractmethod
    def unpacked(self) -> Tensor:
        """Return the equal bool tensor of `shape`, contiguous, band included."""

    def dense(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return query rows `start` to `stop` of the bool mask, band included: (Bm, Hm, stop - start, Lk)."""
        return self.unpacked()[..., start:stop, :]

    @abstractmethod
    def stats(self) -> MaskStats:
        """Count density, active and full tiles of 128 x 128, and empty rows, band included; it waits for the device.

        It differs from `mask_stats` in one point: a last tile of less than 128 keys is never full, because kernels mask
        its end.
        """

    def __reduce__(self) -> tuple[object, ...]:
        # For pickle, copy and `torch.save`: only the fields, because cached values may be for another device.
        return _restore, (self.form, {field.name: getattr(self, field.name) for field in _fields(self)})

    def __repr__(self) -> str:
        # Without the values of tensors: printing them waits for the device, and there may be millions.
        values = {field.name: getattr(self, field.name) for field in _fields(self) if field.repr}
        shown = [f"{n}={x}" for n, x in values.items() if x is not None and not isinstance(x, Tensor)]
        first, last = f"form={self.form!r}, shape={self.shape}", f"device={str(self.device)!r}"
        return f"PreparedMask({', '.join([first, *shown, last])})"


def _fields(mask: PreparedMask) -> list[Any]:
    """Return the fields of a mask that are arguments of its class; `view` is derived from them."""
    return [each for each in fields(mask) if each.init]


def _band_fields(is_causal: bool, window_size: tuple[int, int] | None) -> dict[str, Any]:
    """Check the band; return it as fields of a mask."""
    return {"is_causal": check_flag("is_causal", is_causal), "window_size": check_window(window_size)}


def _topk_limits(k: int, is_causal: bool, local: int) -> dict[str, Any]:
    """Check the arguments of a top-k selection; return its band as fields of a mask."""
    integer("k", k, 1)
    if integer("local", local) and not is_causal:
        raise ValueError(f"local is {local} and is_causal is False; local keys are the last of a causal prefix")
    return _band_fields(is_causal, None)


def _folded(x: Any) -> tuple[Any, tuple[int, ...] | None]:
    """Fold the leading dims of a tensor with more than 4 dims into one batch dim; return also these dims, or None."""
    if not isinstance(x, Tensor) or x.dim() <= 4:
        return x, None
    x = collapse(x, dims=range(x.dim() - 3))
    return merge(x, x.dim() - 3), tuple(x.shape[:-3])


def _full_length(name: str, what: str, size: int, length: int | None) -> int:
    """Return the number of queries, or keys, of a mask, from the size of its dim and from the argument."""
    if length is None:
        if size == 1:
            raise ValueError(f"mask has one {what} for all; {name} is None; it needs to be their number")
        return size
    if size not in (1, integer(name, length)):
        raise ValueError(f"mask has {size} {what}s and {name} is {length}; they need to be equal, or the mask needs 1")
    return length


def _lengths_of_lists(
    name: str, lists: int, block_size: tuple[int, int], seqlen_q: int | None, seqlen_k: int
) -> tuple[int, int]:
    """Return the number of queries and of keys of a mask of lists; refuse another number of lists than they need."""
    block_q = block_size[0]
    if seqlen_q is None:
        if block_q > 1:
            raise ValueError(f"seqlen_q is None; with lists for {block_q} queries it needs to be their number")
        seqlen_q = lists
    if lists != -(-integer("seqlen_q", seqlen_q) // block_q):
        raise ValueError(
            f"{name} has {lists} lists and seqlen_q is {seqlen_q}; it needs {-(-seqlen_q // block_q)} lists, one for "
            f"{block_q} {'query' if block_q == 1 else 'queries'} each"
        )
    return seqlen_q, seqlen_k


def check_entries(index: torch.Tensor, last: torch.Tensor) -> None:
    """Refuse an entry of lists (Bm, Hm, R, K) that is below -1 or past the last block of its list."""
    index = index.long()  # -1 is a large number in uint8
    wrong = (index < -1) | (index > last)
    if bool(wrong.any()):
        place = tuple(listed(wrong.nonzero()[0]))
        limit = int(last.expand(index.shape)[place])
        raise ValueError(f"index has an entry {int(index[place])}; each needs to be -1 or from 0 to {limit}")


def _check_compact(compact: bool, reorder: bool | None) -> None:
    if check_flag("compact", compact) and reorder is False:
        raise ValueError("compact is True and reorder is False; only an order of keys has places to leave out")


def _sequence_spec(
    name: str, mask: Tensor, sequences: Sequences, seqlen_q: int | None, seqlen_k: int | None
) -> SequenceSpec:
    """Describe the sequences of a mask for calls with these lengths, and check that they are on the mask's device."""
    check_type("sequences", sequences, Sequences, "a flash_dmattn.Sequences")
    if seqlen_q is None:
        raise ValueError("seqlen_q is None; with sequences it needs to be q.shape[-3]")
    if seqlen_k is None:
        raise ValueError(
            "seqlen_k is None; with sequences it needs to be k.shape[-3], of pages block_table.shape[1] * page_size"
        )
    check_device(name, mask.device, sequences.device, "sequences")
    return sequences.describe_rows(integer("seqlen_q", seqlen_q), integer("seqlen_k", seqlen_k))


def _recognise_intervals(view: MaskView, seqlen_q: int, seqlen_k: int, reorder: bool | None) -> Sequence[Tensor] | None:
    """Return the tensors of the `IntervalMask` equal to tiles; None if the queries of some key are not consecutive.

    The answer depends on values, so it waits for the device, once. The counts of live keys, pairs and tiles are copied
    with it: they decide how long an order of keys is and, if `reorder` is None, whether it is worth its cost.
    """
    bits, _, row_lists, _ = view.tensors
    start, stop, numbers = run_mask_intervals(bits, row_lists, seqlen_k)
    has_several, live, pairs, active = listed(numbers)
    if has_several:
        return None
    if reorder is None:
        kept = pairs / max(1, start.size(0) * start.size(1) * seqlen_q)
        reorder = kept > 0 and order_saves(active, pairs, kept, has_backward=False)
    return start, stop, *interval_walk(start, stop, seqlen_q, reorder, places_for(live, seqlen_k))
