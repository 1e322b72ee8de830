"""The launch plan of the gradients of wide heads: chunks of stored pairs, and the products that read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from flash_dmattn.gradients import key_gradient
from flash_dmattn.problem import MaskView

from .bias_forms import KEY_SUM, STORE
from .kernel_launch import Descriptor, Launch, by_name
from .pair_products import pair_columns_kernel, pair_rows_kernel, pair_sums_kernel
from .pairs import pairs_kernel
from .plan import Call, classes_of, read_of, row_strides
from .tile_ops import KEYS
from .tile_table import pair_tiles

# Pairs of a chunk take at most this much memory, unless one tile of queries of one head takes more.
SPACE = 512 * 2**20
# A launch of fewer programs for each SM leaves some idle: under a causal band programs differ much.
PROGRAMS_PER_SM = 2
_KEYS_OF_SUMS = 128  # keys of a program that adds sums of ds


class Chunks(NamedTuple):
    """The chunks of a call: each has `members` query heads of each of `owners`, and `lines` lines of each head."""

    owners: int
    members: int
    lines: int

    @property
    def slots(self) -> int:
        """Return the query heads of a chunk."""
        return self.owners * self.members

    def places(self, first_owner: int, end_owner: int, group: int, lines: int) -> Iterator[tuple[int, int, int, int]]:
        """List what kernels read of each chunk of some owners: first_owner, end_owner, first_member, first_line."""
        for first_member in range(0, group, self.members):
            for first_line in range(0, lines, self.lines):
                yield first_owner, end_owner, first_member, first_line


def chunks_of(owners: int, group: int, lines: int, line_bytes: int, enough: int, tile: int, split: bool) -> Chunks:
    """Choose the chunks of a call of `lines`, a multiple of `tile`, for each query head.

    From `enough` owners on programs keep all SMs busy. With `split` members of an owner must not share a sum.
    """
    fit = SPACE // max(1, lines * line_bytes)
    if fit == 0:
        most = max(1, SPACE // (tile * line_bytes)) * tile
        number = triton.cdiv(lines, most)
        return Chunks(1, 1, triton.cdiv(triton.cdiv(lines, number), tile) * tile)
    if not split and fit // group >= min(owners, enough):
        return Chunks(min(owners, fit // group), group, lines)
    taken = min(owners, fit, enough)
    return Chunks(taken, 1 if split else min(group, fit // taken), lines)


def plan_pairs(
    call: Call, dout: Tensor, need_q: bool, need_k: bool, need_v: bool, dbias_kind: int
) -> Callable[..., tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]]:
    """Plan dq, dk, dv, and the gradient of a bias of one value per key, or per score of every head:
    run(read, mask, sink, bounds, dropout).

    The rows of no sequence are left as they are.
    """
    shape, values, num_heads_k = call.shape, call.values(), call.num_heads_k
    tiles = pair_tiles(call.arch)
    block_m, block_n = tiles.pairs.block_m, tiles.pairs.block_n
    layout = values["layout"]
    is_dense = layout is None
    group, repeat = shape.group, call.flags.bias_repeat
    has_key_mask = call.mask_kind == KEYS.value
    per_key, stored = dbias_kind == KEY_SUM.value, dbias_kind == STORE.value
    entries, key_rows = (shape.batch, shape.seqlen_k) if is_dense else (1, call.k.shape[0] * layout.rows_k)
    lines = triton.cdiv(shape.seqlen_q if is_dense else call.q.shape[0] * layout.rows_q, block_m) * block_m
    number = 1 if is_dense else layout.number
    pitch = triton.cdiv(shape.seqlen_k, block_n) * block_n
    owners = entries * num_heads_k

    # A chunk may have some of the lines or of the members of an owner. Then parts of dk and dv are added in fp32. So
    # they are with kept keys of each query head, because members then have other keys.
    needs_ds = need_q or need_k
    line_bytes = pitch * (call.q.element_size() * (int(need_v) + int(needs_ds)) + (1 if per_key else 0))
    tiles_of_key_head, search_k = call.tiles_of_keys(tiles.product.block_m)
    programs = tiles_of_key_head * triton.cdiv(max(shape.head_dim, shape.head_dim_v), tiles.columns)
    enough = triton.cdiv(PROGRAMS_PER_SM * call.num_sms, programs)
    split = has_key_mask and group > 1 and call.mask.tensors[0].shape[1] == shape.num_heads
    chunks = chunks_of(owners, group, lines, line_bytes, enough, block_m, split)
    cut, adds = chunks.lines < lines, chunks.lines < lines or chunks.members < group
    if adds:  # a block of owners is then of one entry, whose sums are copied at once
        chunks = chunks._replace(owners=min(chunks.owners, num_heads_k))
    blocks = [
        (entry * num_heads_k + first, min(entry * num_heads_k + first + chunks.owners, (entry + 1) * num_heads_k))
        for entry in range(entries)
        for first in range(0, num_heads_k, chunks.owners)
    ]
    if not adds:
        blocks = [(first, min(first + chunks.owners, owners)) for first in range(0, owners, chunks.owners)]

    tiles_m, search_q = call.tiles_of_queries(block_m)
    if is_dense:
        tiles_m = chunks.lines // block_m
    parts = tiles_m if is_dense else lines // block_m + number
    tma = is_dense and call.tma(call.q, call.k, call.v, dout) and not has_key_mask
    own: dict[str, Any] = {"members": chunks.members, "lines": chunks.lines, "pitch": pitch}

    def rows_of(slot: int, x: Tensor, rows: int, columns: int) -> list[Descriptor]:
        return [call.rows_descriptor(slot, x, rows, columns)] if tma else []

    def pairs_of(slot: int, rows: int, columns: int) -> list[Descriptor]:
        strides = [chunks.lines * pitch, pitch, 1]
        sizes = [chunks.slots, chunks.lines, pitch]
        return [Descriptor(slot, sizes, strides, [1, rows, columns])] if tma else []

    descriptors = [
        *rows_of(0, call.q, block_m, tiles.depth),
        *rows_of(1, call.k, block_n, tiles.depth),
        *rows_of(2, call.v, block_n, tiles.depth),
        *rows_of(4, dout, block_m, tiles.depth),
        *(pairs_of(12, block_m, block_n) if need_v else []),
        *(pairs_of(13, block_m, block_n) if needs_ds else []),
    ]
    make = call.launch(
        pairs_kernel,
        chunks.slots * tiles_m * triton.cdiv(shape.seqlen_k, block_n),
        tiles.pairs,
        descriptors,
        **own,
        **row_strides(dout=dout),
        parts=parts,
        DEPTH=tiles.depth,
        PAD_D=shape.head_dim % tiles.depth != 0,
        PAD_DV=shape.head_dim_v % tiles.depth != 0,
        TMA=tma,
        WIDE=call.wide(call.q, call.k, call.v, dout),
        EDGES=call.edges(shape.seqlen_k % block_n),
        SEARCH=search_q,
        EQUAL_DIMS=shape.head_dim == shape.head_dim_v,
        STORE_P=need_v,
        STORE_DS=needs_ds,
        DBIAS=dbias_kind,
    )
    rows_launch = call.launch(
        pair_rows_kernel,
        chunks.slots * tiles_m * triton.cdiv(shape.head_dim, tiles.columns),
        tiles.product,
        [
            *pairs_of(0, block_m, tiles.product.block_n),
            *rows_of(1, call.k, tiles.product.block_n, tiles.columns),
        ],
        **own,
        COLUMNS=tiles.columns,
        PAD_D=shape.head_dim % tiles.columns != 0,
        TMA=tma,
        WIDE=call.wide(call.k),
        SEARCH=search_q,
    )

    def columns_launch(x: Tensor, factor: float) -> Launch:
        width, tile = x.shape[3], tiles.product._replace(block_m=tiles.product.block_n, block_n=tiles.product.block_m)
        return call.launch(
            pair_columns_kernel,
            chunks.owners * tiles_of_key_head * triton.cdiv(width, tiles.columns),
            tile,
            [*pairs_of(0, tile.block_m, tile.block_n), *rows_of(1, x, tile.block_m, tiles.columns)],
            **own,
            x_strides=row_strides(x=x)["x_strides"],
            mask_strides=call.mask_strides(columns=True),
            factor=factor,
            width=width,
            key_rows=key_rows,
            COLUMNS=tiles.columns,
            PAD=width % tiles.columns != 0,
            TMA=tma,
            WIDE=call.wide(x),
            SEARCH=search_k,
            CUT=cut,
            ADD=adds,
        )

    dk_launch = columns_launch(call.q, call.flags.softmax_scale)
    dv_launch = columns_launch(dout, 1.0 if call.dropout is None else call.dropout.scale)
    sums_launch = Launch(
        pair_sums_kernel,
        chunks.slots * number * triton.cdiv(shape.seqlen_k, _KEYS_OF_SUMS),
        by_name(pair_sums_kernel, values, members=chunks.members, parts=parts, BLOCK_M=block_m, BLOCK=_KEYS_OF_SUMS),
    )
    num_pairs = chunks.slots * chunks.lines * pitch
    size_parts = chunks.slots * parts * shape.seqlen_k
    sums_shape = call.key_sums_shape(shape.num_heads)
    # Kernels write no gradient of keys that a key mask drops, and no ds of tiles where no query sees a key.
    empty = torch.zeros if has_key_mask and not adds else torch.empty
    empty_scores = torch.zeros if not is_dense or call.edges(0) else torch.empty
    places = [(block, tuple(chunks.places(*block, group, lines))) for block in blocks]

    def run(
        read: tuple[Any, ...], mask: MaskView, sink: Tensor | None, bounds: Tensor | None, dropout: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        q, k, v, bias, dout = read[:5]
        device, dtype = q.device, q.dtype
        dq = torch.empty(q.shape, dtype=dtype, device=device) if need_q else None
        dk = empty(k.shape, dtype=dtype, device=device) if need_k else None
        dv = empty(v.shape, dtype=dtype, device=device) if need_v else None
        dbias = empty_scores(bias.shape, dtype=bias.dtype, device=device) if stored else None
        p_pairs = torch.empty(num_pairs, dtype=dtype, device=device) if need_v else None
        ds_pairs = torch.empty(num_pairs, dtype=dtype, device=device) if needs_ds else None
        key_parts = sums = None
        if per_key:
            key_parts = torch.empty(size_parts, dtype=torch.float32, device=device)
            sums = torch.zeros(sums_shape, dtype=torch.float32, device=device)
        by_rows, by_columns = read_of(mask), read_of(mask, columns=True)
        products = ((dk, ds_pairs, q, dk_launch), (dv, p_pairs, dout, dv_launch))
        for (first_owner, end_owner), chunks_of_block in places:
            made = [dx for dx, *_ in products]
            if adds:
                made = [None if dx is None else _zeros(dx, (end_owner - first_owner) * key_rows) for dx in made]
            for place in chunks_of_block:
                if key_parts is not None:
                    key_parts.zero_()
                read_pairs = (*by_rows, classes_of(mask), p_pairs, ds_pairs, dbias, key_parts, sink, bounds, dropout)
                make(*read, *read_pairs, *place)
                if dq is not None:
                    rows_launch(ds_pairs, k, *by_rows, dq, bounds, *place)
                for dx, (_, pairs, x, launch) in zip(made, products, strict=True):
                    if dx is not None:
                        launch(pairs, x, *by_columns, dx, bounds, *place)
                if key_parts is not None:
                    sums_launch(key_parts, sums, bounds, *place)
            if adds:
                entry, first = divmod(first_owner, num_heads_k)
                for total, (dx, *_) in zip(made, products, strict=True):
                    if dx is not None and total is not None:
                        owned = dx.flatten(0, 1)[entry * key_rows :, first : first + end_owner - first_owner]
                        owned[:key_rows].copy_(total.view(-1, key_rows, dx.shape[3]).transpose(0, 1))
        if per_key:
            dbias = key_gradient(bias, sums, num_heads_k, repeat if is_dense else 1)
        return dq, dk, dv, dbias

    return run


def _zeros(like: Tensor, rows: int) -> Tensor:
    return torch.zeros(rows, like.shape[3], dtype=torch.float32, device=like.device)
