"""The plan of a backward pass: which kernels make the gradients asked for, and what each is launched with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from flash_dmattn.gradients import key_gradient, query_gradient, row_delta, sink_gradient
from flash_dmattn.problem import Gradients, MaskView, NeedsGrad, bias_class

from .backward_bias import backward_bias_kernel
from .backward_delta import delta_kernel
from .backward_gather import backward_gather_kernel
from .backward_keys import KEY_SUM, NO_DBIAS, STORE, backward_keys_kernel
from .backward_product import backward_product_kernel
from .backward_queries import backward_queries_kernel
from .kernel_launch import Descriptor, Launch
from .plan import Call, classes_of, num_kv_splits, read_of, row_strides
from .plan_slots import chunks_of, empty_slots, most_slots, plan_sum
from .tile_ops import BAND, KEYS, NO_SEQUENCES, TILES
from .tile_table import Tile

# From the first to this many keys lie in one tile of every kernel, and delta is taken from what is computed there.
MOST_FEW_KEYS = 32
# Parts of dk and dv that take more memory than this are not made where they can be done without.
MAX_PARTS_BYTES = 64 * 2**20


def plan_backward(call: Call, dout: Tensor, dlse: Tensor | None, needs_grad: NeedsGrad) -> Callable[..., Gradients]:
    """How a class of calls makes its gradients: run(dout, dlse, q, k, v, mask, bias, sink, out, lse, dropout)."""
    need_q, need_k, need_v, need_bias, need_sink = needs_grad
    bias, shape, num_heads_k, repeat = call.bias, call.shape, call.num_heads_k, call.flags.bias_repeat
    per_row = per_key = per_score = stored = product = False
    if need_bias and bias is not None:
        dbias_class = bias_class(bias.shape)
        per_row, per_key, per_score = (dbias_class == name for name in ("query", "key", "score"))
        stored = per_score and bias.shape[:2] == (shape.batch, shape.num_heads)
        # dq is read off a stored ds: not with a softcap, whose slope comes after it, nor where ds is stored in another
        # 16-bit type than that of the products.
        product = stored and call.flags.softcap == 0 and bias.dtype in (call.q.dtype, torch.float32)
    delta_of = plan_delta(call, dout, dlse)
    keys_of = None
    if need_k or need_v or per_key or stored:
        dbias_kind = KEY_SUM if per_key else STORE if stored else NO_DBIAS
        keys_of = plan_keys(call, dout, need_k, need_v, dbias_kind.value)
    queries_of = plan_queries(call, dout) if need_q and not product else None
    product_of = plan_product(call, bias) if need_q and product and bias is not None else None
    bias_of = plan_bias(call, dout, bias) if per_score and not stored and bias is not None else None
    has_few_keys = _has_few_keys(call)

    def run(
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: MaskView,
        bias: Tensor | None,
        sink: Tensor | None,
        out: Tensor,
        lse: Tensor,
        dropout: Tensor | None,
    ) -> Gradients:
        lse_log2, delta = delta_of(dout, out, dlse, lse)
        read = (q, k, v, bias, dout, lse_log2, delta)
        read_sink = sink if has_few_keys else None
        if has_few_keys and sink is not None and (need_sink or per_row):
            delta = row_delta(dout, out, dlse, lse)
        dq = dk = dv = dbias = None
        if keys_of is not None:
            dk, dv, dbias = keys_of(read, mask, read_sink, dropout)
        if queries_of is not None:
            dq = queries_of(read, mask, read_sink, dropout)
        elif product_of is not None:
            dq = product_of(q, k, dbias, mask)
        if bias_of is not None:
            dbias = bias_of(read, mask, read_sink, dropout)
        elif per_row and bias is not None:
            dbias = query_gradient(bias, dlse, lse, num_heads_k, repeat, sink, delta)
        if sink is None:
            return dq, dk, dv, dbias
        return dq, dk, dv, dbias, sink_gradient(sink, lse, delta) if need_sink else None

    return run


def _has_few_keys(call: Call) -> bool:
    return call.shape.seqlen_k <= MOST_FEW_KEYS


def _of_few_keys(call: Call) -> tuple[bool, bool]:
    """FEW_KEYS and HAS_SINK: but for few keys, whose p is normalised again, all that a kernel has of a sink is lse."""
    few = _has_few_keys(call)
    return few, few and call.has_sink


def plan_delta(call: Call, dout: Tensor, dlse: Tensor | None) -> Callable[..., tuple[Tensor, Tensor]]:
    """lse in base 2, and delta = rowsum(dout * out) - dlse."""
    shape, block = call.shape, 32
    strides = (*row_strides(dout), (0, 0, 0) if dlse is None else tuple(dlse.stride()))
    programs = triton.cdiv(shape.seqlen_q, block) * shape.batch * shape.num_heads
    constants = (block, call.block_dv, dlse is not None, _has_few_keys(call), NO_SEQUENCES.value, False)
    launch = Launch(delta_kernel, programs, (*strides, shape, None), constants)

    def run(dout: Tensor, out: Tensor, dlse: Tensor | None, lse: Tensor) -> tuple[Tensor, Tensor]:
        lse_log2, delta = torch.empty_like(lse), torch.empty_like(lse)
        launch(dout, out, dlse, lse, lse_log2, delta, None)
        return lse_log2, delta

    return run


def plan_keys(
    call: Call, dout: Tensor, need_k: bool, need_v: bool, dbias_kind: int
) -> Callable[..., tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """dk, dv, and the gradient of a bias of one value per key, or per score of every head."""
    shape, bias, num_heads_k, tile = call.shape, call.bias, call.num_heads_k, call.tile("keys")
    repeat = call.flags.bias_repeat
    has_key_mask = call.mask_kind == KEYS.value
    per_key, stored = dbias_kind == KEY_SUM.value, dbias_kind == STORE.value
    # A bias with a head for each query head needs its sums apart; a key mask of that kind has other keys for each.
    apart = (bias if per_key else None, call.mask.tensors[0] if has_key_mask else None)
    split = shape.group > 1 and any(x is not None and x.shape[1] == shape.num_heads for x in apart)
    owners = shape.num_heads if split else num_heads_k
    tiles = triton.cdiv(shape.seqlen_k, tile.block_n)
    programs = tiles * shape.batch * owners
    grid_tiles = tiles * num_kv_splits(programs, triton.cdiv(shape.seqlen_q, tile.block_m), call.num_sms)
    num_parts = shape.batch * owners * grid_tiles * tile.block_n
    small = num_parts * (shape.head_dim + shape.head_dim_v) * 4 <= MAX_PARTS_BYTES
    # A key mask may keep few keys, and then the programs of the others help with those.
    parts = split or grid_tiles > tiles or (has_key_mask and small)

    tma = shape.seqlen_q > 2 * tile.block_m and call.tma(call.q, dout)
    bias_tma = tma and call.bias_tma()
    descriptors = []
    if tma:
        descriptors.append(call.rows_descriptor(0, call.q, tile.block_m, call.block_d))
        descriptors.append(call.rows_descriptor(4, dout, tile.block_m, call.block_dv))
    if bias_tma and bias is not None:
        descriptors.append(call.bias_descriptor(3, bias, tile))
    dbias_tma = stored and bias is not None and tma and not has_key_mask and _rows_fit_tma(bias)
    if dbias_tma and bias is not None:
        descriptors.append(_dbias_descriptor(11, bias, tile))
    numbers = (call.bias_strides(bias_tma), call.mask_strides(columns=True), shape, call.scale_log2)
    strides = row_strides(call.q, call.k, call.v, dout)
    constants = (
        *call.constants(tile),
        tma,
        bias_tma,
        call.wide(call.q, dout),
        call.precision_of("keys"),
        need_k,
        need_v,
        dbias_kind,
        parts,
        dbias_tma,
        call.edges(shape.seqlen_q % tile.block_m or shape.seqlen_k % tile.block_n),
        *_of_few_keys(call),
        NO_SEQUENCES.value,
        False,
        call.has_dropout,
        False,
    )
    launch = Launch(
        backward_keys_kernel,
        grid_tiles * shape.batch * owners,
        (*strides, *numbers, call.flags.softmax_scale, call.flags.softcap, owners, grid_tiles, None, call.dropout),
        constants,
        tile.options,
        descriptors,
    )
    block = 32
    gather = Launch(
        backward_gather_kernel,
        triton.cdiv(shape.seqlen_k, block) * shape.batch * num_heads_k,
        (call.mask_strides(), shape, owners, grid_tiles),
        (block, tile.block_n, call.block_d, call.block_dv, call.mask_kind, need_k, need_v, per_key),
    )
    # Keys that a key mask leaves out are zero where no gather writes them, and always are in a dbias of every score.
    empty = torch.zeros if has_key_mask and not parts else torch.empty
    empty_scores = torch.zeros if has_key_mask else torch.empty

    def run(
        read: tuple[Any, ...], mask: MaskView, sink: Tensor | None, dropout: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        _, k, v, bias = read[:4]
        dk = empty(k.shape, dtype=k.dtype, device=k.device) if need_k else None
        dv = empty(v.shape, dtype=v.dtype, device=v.device) if need_v else None
        dbias = empty_scores(bias.shape, dtype=bias.dtype, device=k.device) if stored else None
        sums = None
        if per_key:
            sums = empty((shape.batch, owners, shape.seqlen_k), dtype=torch.float32, device=k.device)
        if parts:
            dims = (shape.head_dim if need_k else 0, shape.head_dim_v if need_v else 0, 1 if per_key else 0)
            pieces = [torch.empty(num_parts * n, dtype=torch.float32, device=k.device) if n else None for n in dims]
            made = (*pieces[:2], dbias if stored else pieces[2])
            launch(*read, *read_of(mask, columns=True), *made, sink, None, dropout, None)
            gather(*pieces, *read_of(mask), dk, dv, sums)
        else:
            launch(*read, *read_of(mask, columns=True), dk, dv, dbias if stored else sums, sink, None, dropout, None)
        if sums is not None:
            dbias = key_gradient(bias, sums, num_heads_k, repeat)
        return dk, dv, dbias

    return run


def _rows_fit_tma(dbias: Tensor) -> bool:
    # Of the contiguous gradient: rows of whole 16 bytes.
    return dbias.shape[3] * dbias.element_size() % 16 == 0


def _dbias_descriptor(slot: int, bias: Tensor, tile: Tile) -> Descriptor:
    _, heads, seqlen_q, seqlen_k = bias.shape
    strides = [heads * seqlen_q * seqlen_k, seqlen_q * seqlen_k, seqlen_k, 1]
    return Descriptor(slot, list(bias.shape), strides, [1, 1, tile.block_m, tile.block_n])


def plan_queries(call: Call, dout: Tensor) -> Callable[..., Tensor]:
    """dq, with ds computed again."""
    shape, tile = call.shape, call.tile("queries")
    tma, bias_tma, descriptors = call.key_descriptors(tile)
    numbers = (call.bias_strides(bias_tma), call.mask_strides(), shape, call.scale_log2)
    numbers = (*numbers, call.flags.softmax_scale, call.flags.softcap)
    wide, edges = call.wide(call.k, call.v), call.edges(shape.seqlen_k % tile.block_n)
    launch = Launch(
        backward_queries_kernel,
        triton.cdiv(shape.seqlen_q, tile.block_m) * shape.batch * shape.num_heads,
        (*row_strides(call.q, call.k, call.v, dout), *numbers, None, call.dropout),
        (
            *call.constants(tile),
            tma,
            bias_tma,
            wide,
            call.precision,
            edges,
            *_of_few_keys(call),
            NO_SEQUENCES.value,
            False,
            call.has_dropout,
        ),
        tile.options,
        descriptors,
    )

    def run(read: tuple[Any, ...], mask: MaskView, sink: Tensor | None, dropout: Tensor | None) -> Tensor:
        dq = torch.empty(read[0].shape, dtype=read[0].dtype, device=read[0].device)
        launch(*read, *read_of(mask), dq, sink, None, dropout)
        return dq

    return run


def plan_product(call: Call, bias: Tensor) -> Callable[..., Tensor]:
    """dq, from ds as dbias holds it."""
    shape, tile = call.shape, call.tile("product")
    # Every block of the band is read under a key mask: what it leaves out is zero, and the rest need not be gathered.
    mask_kind = BAND.value if call.mask_kind == KEYS.value else call.mask_kind
    tma = shape.seqlen_k > 2 * tile.block_n and call.tma(call.k)
    dbias_tma = tma and _rows_fit_tma(bias)
    descriptors = []
    if tma:
        descriptors.append(call.rows_descriptor(0, call.k, tile.block_n, call.block_d))
    if dbias_tma:
        descriptors.append(_dbias_descriptor(1, bias, tile))
    sizes = (tile.block_m, tile.block_n, call.block_d)
    launch = Launch(
        backward_product_kernel,
        triton.cdiv(shape.seqlen_q, tile.block_m) * shape.batch * shape.num_heads,
        (*row_strides(call.k), call.mask_strides(), shape, call.flags.softmax_scale),
        (*sizes, mask_kind, *call.band, call.pads[0], tma, dbias_tma, call.wide(call.k), call.precision),
        tile.options,
        descriptors,
    )

    def run(q: Tensor, k: Tensor, dbias: Tensor, mask: MaskView) -> Tensor:
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        launch(k, dbias, *(read_of(mask) if mask_kind == TILES.value else (None, None)), dq)
        return dq

    return run


def plan_bias(call: Call, dout: Tensor, bias: Tensor) -> Callable[..., Tensor]:
    """The gradient of a bias of one value per score that batch entries or heads share."""
    shape, tile = call.shape, call.tile("bias")
    tma = call.tma(call.q, call.k, call.v, dout)
    descriptors = []
    if tma:
        descriptors.append(call.rows_descriptor(0, call.q, tile.block_m, call.block_d))
        descriptors.append(call.rows_descriptor(1, call.k, tile.block_n, call.block_d))
        descriptors.append(call.rows_descriptor(2, call.v, tile.block_n, call.block_dv))
        descriptors.append(call.rows_descriptor(4, dout, tile.block_m, call.block_dv))
    tiles = triton.cdiv(shape.seqlen_q, tile.block_m) * triton.cdiv(shape.seqlen_k, tile.block_n)
    owners = bias.shape[0] * bias.shape[1]
    chunk, slots = chunks_of(
        shape.batch * shape.num_heads // owners, tiles * owners, call.num_sms, most_slots(bias.numel())
    )
    numbers = (call.bias_strides(), call.mask_strides(), shape, call.scale_log2, call.flags.softcap, *bias.shape[:2])
    launch = Launch(
        backward_bias_kernel,
        tiles * owners * slots,
        (*row_strides(call.q, call.k, call.v, dout), *numbers, chunk, None, call.dropout),
        (
            *call.constants(tile),
            tma,
            call.wide(call.q, call.k, call.v, dout),
            call.precision,
            *_of_few_keys(call),
            NO_SEQUENCES.value,
            *(False, False),
            call.has_dropout,
        ),
        tile.options,
        descriptors,
    )
    add = plan_sum(slots, bias)

    def run(read: tuple[Any, ...], mask: MaskView, sink: Tensor | None, dropout: Tensor | None) -> Tensor:
        bias = read[3]
        dbias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
        sums = empty_slots(slots, dbias)
        launch(*read, *read_of(mask), classes_of(mask), sums, sink, None, dropout)
        add(sums, dbias)
        return dbias

    return run
