"""The launch plan of a backward pass: which kernels make the requested gradients, and their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from flash_dmattn.gradients import key_gradient, new_like, query_gradient
from flash_dmattn.problem import Gradients, MaskView, NeedsGrad, bias_class
from flash_dmattn.problem.inputs import Saved
from flash_dmattn.reference.entropy import NOTHING_SENT, SentEntropy, delta_of_sink
from flash_dmattn.reference.sinks import row_delta, sink_gradient

from .backward_bias import backward_bias_kernel
from .backward_delta import delta_kernel
from .backward_diagonals import backward_diagonals_kernel
from .backward_gather import backward_gather_kernel
from .backward_keys import backward_keys_kernel
from .backward_product import backward_product_kernel
from .backward_queries import backward_queries_kernel
from .bias_forms import BANDED, BY_QUERY, CLAMPED, ENDS, KEY_SUM, NO_DBIAS, P_SUM, ROW_BIAS, STORE
from .kernel_launch import Descriptor, Launch, by_name
from .plan import LEAST_TO_PACK, Call, classes_of, num_kv_splits, read_of, row_strides
from .plan_packed import plan_pieces
from .plan_pairs import plan_pairs
from .plan_slots import PROGRAMS_WITH_SLOTS, chunks_of, empty_slots, most_slots, plan_sum
from .sequences import NO_SEQUENCES
from .tile_ops import BAND, KEYS, TILES, Shape
from .tile_table import Tile

# Parts of dk and dv that are optional take at most this much memory.
MAX_PARTS_BYTES = 64 * 2**20
# A sum over a batch is added up as on a GPU of so many SMs, where it must not depend on the GPU.
SMS_OF_SUMS = 132
# Rows of a program of the delta kernel; and of one that only converts lse to base 2.
_DELTA_BLOCK, _FEW_KEYS_BLOCK = 32, 1024
_GATHER_BLOCK = 32  # keys of a program that adds parts
# A mask has words of 32 keys, so the tiles of a diagonal, which are square, have that many at least.
_LEAST_DIAGONAL = 32


def plan_backward(call: Call, dout: Tensor, dlse: Tensor | None, needs_grad: NeedsGrad) -> Callable[..., Gradients]:
    """Plan the gradients of one class of calls: run(saved, dout, dlse, sent), `sent` as for `launch.backward`."""
    need_q, need_k, need_v, need_bias, need_sink = needs_grad
    call.packed = frozenset(("q", "k", "v", "dout") if call.packs_pieces(LEAST_TO_PACK) else ())
    bias, shape, num_heads_k, repeat = call.bias, call.shape, call.num_heads_k, call.flags.bias_repeat
    per_row = per_key = per_score = stored = product = False
    by_distance = need_bias and call.extent is not None
    if need_bias and bias is not None and not by_distance:
        dbias_class = bias_class(bias.shape)
        per_row, per_key, per_score = (dbias_class == name for name in ("query", "key", "score"))
        stored = per_score and bias.shape[:2] == (shape.batch, shape.num_heads)
        # dq may be a product of the stored ds. Not with a softcap, because ds is stored without its slope; and not if
        # ds is stored in another 16-bit dtype than q, k and v have.
        product = (
            not call.invariant and stored and call.flags.softcap == 0 and bias.dtype in (call.q.dtype, torch.float32)
        )
    delta_of = plan_delta(call, dout, dlse, call.has_few_keys)
    has_ends = by_distance and call.bias_kind == CLAMPED.value
    by_query = by_distance and call.bias_kind == BANDED.value  # a rule refuses values that heads or entries share
    dbias_kind = (
        KEY_SUM if per_key else STORE if stored else ENDS if has_ends else BY_QUERY if by_query else NO_DBIAS
    ).value
    pairs_of = keys_of = sums_of = queries_of = product_of = None
    needs_keys = need_k or need_v or per_key or stored or has_ends or by_query
    if call.has_wide_heads:  # a rule refuses the gradient of a bias by distance
        if need_q or needs_keys:
            pairs_of = plan_pairs(call, dout, need_q, need_k, need_v, dbias_kind)
    else:
        # Where calls with sequences have to get the same bits, the sums of each query head have a launch of their own.
        apart = call.invariant and per_key and shape.group > 1
        if apart:
            sums_of = plan_keys(call, dout, False, False, dbias_kind, shape.num_heads)
            dbias_kind, needs_keys = NO_DBIAS.value, need_k or need_v
        owners = num_heads_k if apart else None
        keys_of = plan_keys(call, dout, need_k, need_v, dbias_kind, owners) if needs_keys else None
        queries_of = plan_queries(call, dout) if need_q and not product else None
        product_of = plan_product(call, bias) if need_q and product and bias is not None else None
    bias_of = plan_bias(call, dout, bias) if per_score and not stored and bias is not None else None
    diagonals_of = plan_diagonals(call, dout, bias) if by_distance and not by_query and bias is not None else None
    reads_rows = any(each is not None for each in (keys_of, sums_of, queries_of, bias_of, diagonals_of))
    pack = plan_pieces(call.precision, call.k, call.v, call.q, dout) if call.packed and reads_rows else None
    has_few_keys, new_q = call.has_few_keys, new_like(call.q.shape, call.q.stride())

    def run(saved: Saved, dout: Tensor, dlse: Tensor | None, sent: SentEntropy = NOTHING_SENT) -> Gradients:
        (q, k, v, mask, bias, sink, _, dropout), out, lse = saved
        read = (q, k, v, bias, dout, *delta_of(saved, dout, dlse), sent.gradient)
        if pack is not None:
            packed_k, packed_v, packed_q, packed_dout = pack(k, v, q, dout)
            read = (packed_q, packed_k, packed_v, bias, packed_dout, *read[5:])
        delta = read[-2]
        read_sink = sink if has_few_keys else None
        if has_few_keys and sink is not None and (need_sink or per_row):
            delta = row_delta(dout, out, dlse, lse)
        delta = delta_of_sink(delta, sent.gradient, sink, lse)
        dq = dk = dv = dbias = None
        if pairs_of is not None:
            dq, dk, dv, dbias = pairs_of(read, mask, read_sink, None, dropout)
        if keys_of is not None:
            dk, dv, dbias = keys_of(read, mask, read_sink, None, dropout, None, (k, v))
        if sums_of is not None:
            dbias = sums_of(read, mask, read_sink, None, dropout, None)[2]
        if queries_of is not None:
            dq = new_q(q)
            queries_of(read, mask, read_sink, None, dropout, dq)
        elif product_of is not None:
            dq = product_of(q, read[1], dbias, mask)
        if diagonals_of is not None:
            dbias = diagonals_of(read, mask, read_sink, dropout, dbias)
        elif bias_of is not None:
            dbias = bias_of(read, mask, read_sink, None, dropout)
        elif per_row and bias is not None:
            dbias = query_gradient(bias, sent.own(dlse), lse, num_heads_k, repeat, sink, delta)
        if sink is None:
            return dq, dk, dv, dbias
        return dq, dk, dv, dbias, sink_gradient(sink, lse, delta) if need_sink else None

    return run


def plan_key_sums(call: Call, dout: Tensor) -> Callable[..., Gradients]:
    """Plan the gradient of v of a call with `Flags.sums`: run(saved, dout, dlse, sent); dlse and `sent` do not count.

    The weights of queries take the place of dlse, so that minus delta is the weight of a row that has keys. One weight
    of all queries is a factor of the sums, and the kernel reads no weights.
    """
    columns, num_heads_k, has_few_keys = call.shape.head_dim_v, call.num_heads_k, call.has_few_keys
    is_factor = not any(dout.stride()[:3]) and columns == 1
    call.packed = frozenset(("q", "k") if call.packs_pieces(LEAST_TO_PACK) else ())
    delta_of = plan_delta(call, dout, None if is_factor else _weights_of(dout), True)
    keys_of = plan_keys(call, dout, False, False, P_SUM.value, call.shape.num_heads if columns > 1 else None)
    pack = plan_pieces(call.precision, call.k, call.q) if call.packed else None

    def run(saved: Saved, dout: Tensor, dlse: Tensor | None, sent: SentEntropy = NOTHING_SENT) -> Gradients:
        (q, k, v, mask, bias, sink, sequences, dropout), *_ = saved
        rows = delta_of(saved, dout, None if is_factor else _weights_of(dout))
        if pack is not None:
            k, q = pack(k, q)
        bounds = None if sequences is None else sequences.bounds
        read = (q, k, v, bias, dout, *rows[:2], None if is_factor else rows[2], None)
        sums = keys_of(read, mask, sink if has_few_keys else None, bounds, dropout, None)[2]
        assert sums is not None
        sums = sums * dout[0, 0, 0] if is_factor else sums
        dv = sums.unflatten(1, (num_heads_k, sums.shape[1] // num_heads_k))
        if dv.shape[2] != columns:  # each head has a mask of its own
            dv = dv.sum(2, keepdim=True)
        return None, None, dv.permute(0, 3, 1, 2).to(v.dtype, memory_format=torch.contiguous_format), None, None

    return run


def _weights_of(dout: Tensor) -> Tensor:
    """Return the weights (B, Hq, Lq) of queries, each in the column of dout that its head has in the group."""
    columns = dout.shape[3]
    if columns == 1:
        return dout[..., 0].transpose(1, 2)
    own = torch.arange(dout.shape[2], device=dout.device) % columns
    return dout.gather(3, own[:, None].expand(*dout.shape[:3], 1)).squeeze(3).transpose(1, 2)


def plan_delta(
    call: Call, dout: Tensor, dlse: Tensor | None, few_keys: bool, rows: Shape | None = None
) -> Callable[..., tuple[Tensor, Tensor | None, Tensor]]:
    """Plan what backward kernels read of each row, lse, in two numbers where it is in fp64, and
    delta = rowsum(dout * out) - dlse: run(saved, dout, dlse).

    Args:
        few_keys: whether the kernels that read delta compute the sum.
        rows: for calls with sequences whose rows are all treated alike: the shape of all rows.
    """
    block = _DELTA_BLOCK if rows is None else _FEW_KEYS_BLOCK
    values, (tiles, search) = call.values(), call.tiles_of_queries(block)
    if rows is not None:
        values |= {"shape": rows, "SEQUENCES": NO_SEQUENCES.value}
        tiles, search = triton.cdiv(rows.seqlen_q, block) * rows.batch, False
    rest = by_name(
        delta_kernel,
        values,
        **row_strides(dout=dout),
        dlse_strides=(0, 0, 0) if dlse is None else tuple(dlse.stride()),
        BLOCK_M=block,
        HAS_DLSE=dlse is not None,
        FEW_KEYS=few_keys,
        SEARCH=search,
    )
    launch = Launch(delta_kernel, tiles * call.shape.num_heads, rest)

    is_biased, has_row_bias = call.is_biased, call.bias_kind == ROW_BIAS.value

    def run(saved: Saved, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        x, out, lse = saved
        bounds = None if x.sequences is None else x.sequences.bounds
        row_lse, delta = (torch.empty(lse.shape, dtype=torch.float32, device=lse.device) for _ in range(2))
        pairs = None
        if is_biased and lse.dtype == torch.float64:
            pairs = torch.empty(lse.shape, dtype=torch.int64, device=lse.device)
        launch(dout, out, dlse, lse, x.bias if has_row_bias else None, row_lse, pairs, delta, bounds)
        return row_lse, pairs, delta

    return run


def plan_keys(
    call: Call,
    dout: Tensor,
    need_k: bool,
    need_v: bool,
    dbias_kind: int,
    owners: int | None = None,
    one_pass: bool = False,
) -> Callable[..., tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """Plan dk, dv, and a gradient of the bias, with or without sequences: run(read, mask, sink, bounds, dropout, dq).

    The bias has one value per key, per score of every head, or per query and distance of every head. Other biases by
    distance get the sums of their two ends alone, fp32 (B, owners, 2). Under P_SUM the third result are the sums of p,
    fp32 (B, owners, Lk), with the entries and the rows of k. With `one_pass` the kernel also makes dq. It
    leaves rows of no sequence as they are.
    """
    shape, bias, num_heads_k = call.shape, call.bias, call.num_heads_k
    repeat, is_dense = call.flags.bias_repeat, call.flags.sequences is None
    sums_p = dbias_kind == P_SUM.value
    tile = call.tile("sums" if sums_p else "keys")
    has_key_mask = call.mask_kind == KEYS.value
    stored, has_ends, by_query = (dbias_kind == kind.value for kind in (STORE, ENDS, BY_QUERY))
    per_key = dbias_kind in (KEY_SUM.value, P_SUM.value)
    # A bias with a head for each query head needs sums for each of them. A key mask with such heads has other keys for
    # each. Then owners are query heads.
    summed_bias = bias if dbias_kind == KEY_SUM.value or has_ends else None
    read_by_head = (summed_bias, call.mask.tensors[0] if has_key_mask else None)
    by_query_head = shape.group > 1 and any(x is not None and x.shape[1] == shape.num_heads for x in read_by_head)
    by_query_head = by_query_head and owners is None
    owners = owners or (shape.num_heads if by_query_head else num_heads_k)
    tiles, search = call.tiles_of_keys(tile.block_n)  # of one entry, or of all sequences
    entries = shape.batch if is_dense else 1
    blocks, grid_tiles = triton.cdiv(shape.seqlen_q, tile.block_m), tiles
    if is_dense and not call.invariant:
        # Sums of p run two programs to an SM, and a part of them is one number for each key.
        grid_tiles *= num_kv_splits(tiles * entries * owners, blocks, (4 if sums_p else 1) * call.num_sms)
    num_parts = shape.batch * owners * grid_tiles * tile.block_n
    width = 1 if sums_p else shape.head_dim + shape.head_dim_v
    small = num_parts * width * 4 <= MAX_PARTS_BYTES
    # A key mask may keep few keys. With parts, programs whose keys are dropped share the queries of the kept ones.
    adds_parts = by_query_head or grid_tiles > tiles or (has_key_mask and small)

    tma = shape.seqlen_q > 2 * tile.block_m and call.tma(call.q)
    dout_tma = tma and not sums_p and call.tma(dout)
    bias_tma = tma and call.bias_tma()
    descriptors = []
    if tma:
        descriptors.append(call.rows_descriptor(0, call.q, tile.block_m, call.block_d))
    if dout_tma:
        descriptors.append(call.rows_descriptor(4, dout, tile.block_m, call.block_dv))
    if bias_tma and bias is not None:
        descriptors.append(call.bias_descriptor(3, bias, tile))
    dbias_tma = stored and bias is not None and tma and not has_key_mask and _rows_fit_tma(bias)
    if dbias_tma and bias is not None:
        descriptors.append(_dbias_descriptor(13, bias, tile))
    launch = call.launch(
        backward_keys_kernel,
        grid_tiles * entries * owners,
        tile,
        descriptors,
        **call.row_strides(dout=dout),
        bias_strides=call.bias_strides(bias_tma),
        mask_strides=call.mask_strides(columns=True),
        owners=owners,
        grid_tiles=grid_tiles,
        TMA=tma,
        DOUT_TMA=dout_tma,
        BIAS_TMA=bias_tma,
        WIDE=call.wide(call.q, dout),
        PRECISION=call.precision_of("keys"),
        NEED_K=need_k,
        NEED_V=need_v,
        DBIAS=dbias_kind,
        PARTS=adds_parts,
        DBIAS_TMA=dbias_tma,
        EDGES=call.edges(shape.seqlen_q % tile.block_m or shape.seqlen_k % tile.block_n),
        SEARCH=search,
        ONE_PASS=one_pass,
        INVARIANT=call.invariant,
    )
    gather = None
    if adds_parts:
        rest = by_name(
            backward_gather_kernel,
            call.values(),
            owners=owners,
            grid_tiles=grid_tiles,
            BLOCK=_GATHER_BLOCK,
            BLOCK_N=tile.block_n,
            NEED_K=need_k,
            NEED_V=need_v,
            NEED_BIAS=per_key,
        )
        programs = triton.cdiv(shape.seqlen_k, _GATHER_BLOCK) * shape.batch * num_heads_k
        gather = Launch(backward_gather_kernel, programs, rest)
    # Keys that a key mask drops have zero gradients. Without parts no kernel writes these, and no kernel ever writes
    # their columns of a dbias of scores, so both begin as zeros.
    zeros = has_key_mask and not adds_parts
    new_sums = torch.zeros if zeros or not is_dense else torch.empty
    sums_shape = (call.k.shape[0], owners, call.k.shape[1]) if sums_p else call.key_sums_shape(owners)
    new_k, new_v = (new_like(x.shape, x.stride(), zeros) for x in (call.k, call.v))
    new_bias = None
    if bias is not None and (stored or by_query):
        new_bias = new_like(bias.shape, bias.stride(), by_query or has_key_mask or not is_dense)

    def run(
        read: tuple[Any, ...],
        mask: MaskView,
        sink: Tensor | None,
        bounds: Tensor | None,
        dropout: Tensor | None,
        dq: Tensor | None,
        like: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        k, v = like or read[1:3]  # what dk and dv are like, where `read` has pieces
        bias = read[3]
        dk = new_k(k) if need_k else None
        dv = new_v(v) if need_v else None
        dbias = new_bias(bias) if new_bias is not None else None
        sums = ends = None
        if has_ends:
            ends = torch.zeros(
                (2, shape.batch, owners, grid_tiles * tile.block_n), dtype=torch.float32, device=k.device
            )
        if per_key:
            sums = new_sums(sums_shape, dtype=torch.float32, device=k.device)
        if gather is not None:
            dims = (shape.head_dim if need_k else 0, shape.head_dim_v if need_v else 0, 1 if per_key else 0)
            pieces = [torch.empty(num_parts * n, dtype=torch.float32, device=k.device) if n else None for n in dims]
            made = (*pieces[:2], dbias if new_bias is not None else ends if has_ends else pieces[2])
            launch(*read, *read_of(mask, columns=True), *made, sink, bounds, dropout, dq)
            gather(*pieces, *read_of(mask), dk, dv, sums)
        else:
            made = (dk, dv, dbias if new_bias is not None else ends if has_ends else sums)
            launch(*read, *read_of(mask, columns=True), *made, sink, bounds, dropout, dq)
        if ends is not None:
            dbias = ends.sum(3).permute(1, 2, 0)
        if sums is not None:
            dbias = sums if sums_p else key_gradient(bias, sums, num_heads_k, repeat)
        return dk, dv, dbias

    return run


def _rows_fit_tma(dbias: Tensor) -> bool:
    # The gradient is contiguous, so only the length of its rows matters.
    return dbias.shape[3] * dbias.element_size() % 16 == 0


def _dbias_descriptor(slot: int, bias: Tensor, tile: Tile) -> Descriptor:
    _, heads, seqlen_q, seqlen_k = bias.shape
    strides = [heads * seqlen_q * seqlen_k, seqlen_q * seqlen_k, seqlen_k, 1]
    return Descriptor(slot, list(bias.shape), strides, [1, 1, tile.block_m, tile.block_n])


def plan_queries(call: Call, dout: Tensor) -> Callable[..., None]:
    """Plan dq, with ds computed again, with or without sequences: run(read, mask, sink, bounds, dropout, dq)."""
    tile = call.tile("queries")
    tma, bias_tma, descriptors = call.key_descriptors(tile)
    tiles, search = call.tiles_of_queries(tile.block_m)
    launch = call.launch(
        backward_queries_kernel,
        tiles * call.shape.num_heads,
        tile,
        descriptors,
        **call.row_strides(dout=dout),
        bias_strides=call.bias_strides(bias_tma),
        TMA=tma,
        BIAS_TMA=bias_tma,
        WIDE=call.wide(call.k, call.v),
        EDGES=call.edges(call.shape.seqlen_k % tile.block_n),
        SEARCH=search,
        INVARIANT=call.invariant,
    )
    return lambda read, mask, sink, bounds, dropout, dq: launch(*read, *read_of(mask), dq, sink, bounds, dropout)


def plan_product(call: Call, like: Tensor) -> Callable[..., Tensor]:
    """Plan dq as a product of k and the ds that dbias, a tensor like `like`, holds: run(q, k, dbias, mask)."""
    shape, tile = call.shape, call.tile("product")
    # Without lists of tiles the kernel reads every block of the band: dbias is zero where a mask leaves pairs out.
    mask_kind = TILES.value if call.mask_kind == TILES.value else BAND.value
    tma = shape.seqlen_k > 2 * tile.block_n and call.tma(call.k)
    dbias_tma = tma and _rows_fit_tma(like)
    descriptors = []
    if tma:
        descriptors.append(call.rows_descriptor(0, call.k, tile.block_n, call.block_d))
    if dbias_tma:
        descriptors.append(_dbias_descriptor(1, like, tile))
    launch = call.launch(
        backward_product_kernel,
        triton.cdiv(shape.seqlen_q, tile.block_m) * shape.batch * shape.num_heads,
        tile,
        descriptors,
        MASK=mask_kind,
        TMA=tma,
        BIAS_TMA=dbias_tma,
        WIDE=call.wide(call.k),
    )

    new_q = new_like(call.q.shape, call.q.stride())

    def run(q: Tensor, k: Tensor, dbias: Tensor, mask: MaskView) -> Tensor:
        dq = new_q(q)
        launch(k, dbias, *(read_of(mask) if mask_kind == TILES.value else (None, None)), dq)
        return dq

    return run


def plan_bias(call: Call, dout: Tensor, bias: Tensor) -> Callable[..., Tensor]:
    """Plan the gradient of a bias of one value per score that entries, sequences or heads share:
    run(read, mask, sink, bounds, dropout)."""
    shape, tile = call.shape, call.tile("bias")
    tma = call.tma(call.q, call.k, call.v, dout)
    descriptors = []
    if tma:
        descriptors.append(call.rows_descriptor(0, call.q, tile.block_m, call.block_d))
        descriptors.append(call.rows_descriptor(1, call.k, tile.block_n, call.block_d))
        descriptors.append(call.rows_descriptor(2, call.v, tile.block_n, call.block_dv))
        descriptors.append(call.rows_descriptor(4, dout, tile.block_m, call.block_dv))
    packs_rows = call.flags.bias_packing == "queries"
    tiles_m, search = triton.cdiv(shape.seqlen_q, tile.block_m), False
    if packs_rows:
        tiles_m, search = call.tiles_of_queries(tile.block_m)
    tiles, owners = tiles_m * triton.cdiv(shape.seqlen_k, tile.block_n), bias.shape[0] * bias.shape[1]
    num_sms = SMS_OF_SUMS if call.invariant else call.num_sms
    members = (1 if packs_rows else shape.batch) * shape.num_heads // owners
    chunk, slots = chunks_of(members, tiles * owners, num_sms, most_slots(bias.numel()))
    launch = call.launch(
        backward_bias_kernel,
        tiles * owners * slots,
        tile,
        descriptors,
        **call.row_strides(dout=dout),
        bias_batch=bias.shape[0],
        bias_heads=bias.shape[1],
        chunk=chunk,
        TMA=tma,
        WIDE=call.wide(call.q, call.k, call.v, dout),
        PACKED_ROWS=packs_rows,
        SEARCH=search,
    )
    add, empty = plan_sum(slots, bias), torch.zeros if packs_rows else torch.empty
    new_bias = new_like(bias.shape, bias.stride(), packs_rows)

    def run(
        read: tuple[Any, ...], mask: MaskView, sink: Tensor | None, bounds: Tensor | None, dropout: Tensor | None
    ) -> Tensor:
        dbias = new_bias(read[3])
        sums = empty_slots(slots, dbias, empty)
        launch(*read, *read_of(mask), classes_of(mask), sums, sink, bounds, dropout)
        add(sums, dbias)
        return dbias

    return run


def plan_diagonals(call: Call, dout: Tensor, values: Tensor) -> Callable[..., Tensor]:
    """Plan the gradient of a bias by distance: run(read, mask, sink, dropout, ends), `ends` as from `plan_keys`.

    The kernel sums the distances between the ends of a clamped bias, and all others of one that does not clamp.
    """
    shape, flags, tile = call.shape, call.flags, call.tile("bias")
    block = max(_LEAST_DIAGONAL, min(tile.block_m, tile.block_n))
    number, shift, has_ends = values.shape[3], shape.seqlen_k - shape.seqlen_q, call.bias_kind == CLAMPED.value
    low, high = (1, number - 2) if has_ends else (0, number - 1)
    first, last = (
        max(low - flags.zero + shift, 1 - shape.seqlen_q),
        min(high - flags.zero + shift, shape.seqlen_k - 1),
    )
    first = max(first, shift - shape.left) if call.band[0] else first
    last = min(last, shift + shape.right) if call.band[1] else last
    # Tile m of the queries and tile m + diagonal of the keys have key - query from block * diagonal - (block - 1) on.
    first_diagonal = -(-(first - (block - 1)) // block)
    diagonals = (last + block - 1) // block - first_diagonal + 1 if first <= last else 0
    owners = values.shape[0] * values.shape[1]
    tiles = min(triton.cdiv(shape.seqlen_q, block), triton.cdiv(shape.seqlen_k, block))
    steps = tiles * shape.batch * shape.num_heads // owners
    parts = max(1, min(PROGRAMS_WITH_SLOTS * call.num_sms // max(owners * diagonals, 1), steps))
    tma = call.tma(call.q, call.k, call.v, dout)
    descriptors = []
    if tma:
        descriptors.append(call.rows_descriptor(0, call.q, block, call.block_d))
        descriptors.append(call.rows_descriptor(1, call.k, block, call.block_d))
        descriptors.append(call.rows_descriptor(2, call.v, block, call.block_dv))
        descriptors.append(call.rows_descriptor(4, dout, block, call.block_dv))
    launch = call.launch(
        backward_diagonals_kernel,
        owners * diagonals * parts,
        tile._replace(block_m=block, block_n=block),
        descriptors,
        **call.row_strides(dout=dout),
        bias_batch=values.shape[0],
        bias_heads=values.shape[1],
        first_diagonal=first_diagonal,
        diagonals=diagonals,
        parts=parts,
        EDGES=call.edges(shape.seqlen_q % block or shape.seqlen_k % block),
        TMA=tma,
        WIDE=call.wide(call.q, call.k, call.v, dout),
    )
    begin = flags.zero - shift + first_diagonal * block - (block - 1)  # the place of the first sum among the values
    start, stop = max(begin, low), min(begin + (diagonals + 1) * block, high + 1)

    def run(
        read: tuple[Any, ...], mask: MaskView, sink: Tensor | None, dropout: Tensor | None, ends: Tensor | None
    ) -> Tensor:
        values = read[3]
        total = torch.zeros((*values.shape[:2], 1, number), dtype=torch.float32, device=values.device)
        if diagonals > 0:
            sums = torch.empty(
                (parts, *values.shape[:2], diagonals, 2 * block), dtype=torch.float32, device=values.device
            )
            launch(*read, *read_of(mask), classes_of(mask), sums, sink, dropout)
            rows = sums.sum(0)
            # Each distance is in the right half of one diagonal of tiles and in the left half of the next.
            halves = (rows[..., :block].flatten(2), rows[..., block:].flatten(2))
            strip = F.pad(halves[0], (0, block)) + F.pad(halves[1], (block, 0))
            total[:, :, 0, start:stop] = strip[..., start - begin : stop - begin]
        if ends is not None:
            tails = key_gradient(total[..., :1].expand(-1, -1, -1, 2), ends, call.num_heads_k, flags.bias_repeat)
            total[..., 0] += tails[..., 0]
            total[..., -1] += tails[..., 1]
        return total.to(values.dtype)

    return run
