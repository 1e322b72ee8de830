"""The forward kernel: each program computes out and lse of one tile of queries of one head.

With s the scores, over tiles j of keys (Dao, FlashAttention-2, algorithm 1)::

    m' = max(m, rowmax(s_j));  p = exp(s_j - m');  c = exp(m - m');  l = l * c + rowsum(p);  acc = acc * c + p @ v_j
    out = acc / l;  lse = m + log(l)

The entropy of a row is log(l) - t / l, with t = (t + (m - m') l) * c + rowsum(p * (s_j - m')) along the same steps.

Without a bias s is in base 2. With one it is natural, and lse is in fp64: next to a bias of 1e9 fp32 would lose log(l).

The sink of a head is one more score of every row, without a value; it comes last, after a bias of one value per query.

Tiles that need no mask check come first, in a loop without mask code. A second loop has the tiles at an edge of the
band, and the partial tiles of a mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bias_forms import (
    ROW_BIAS,
    add_bias,
    bias_from,
    bias_vector,
    block_of_run,
    flat_blocks,
    flat_value,
    row_values,
    values_of_tile,
)
from .dropout import is_kept
from .pieces import add_product, load_pieces, product_of_rows, split
from .scores import (
    add_spread,
    entropy_of,
    entropy_with_sink,
    exp_of,
    fold,
    folded_log_sums,
    largest_of,
    log_sums,
    masked_scores,
    scaled,
    sum_in_any_order,
)
from .sequences import (
    NO_SEQUENCES,
    bounds_of,
    entry_of_tile,
    load_keys,
    mask_from,
    pages_from,
    place_of,
    rows_from,
    tiles_of_queries,
)
from .tile_ops import (
    BAND,
    DENSE,
    EDGE,
    INSIDE,
    KEYS,
    LN2,
    LOG2E,
    LOWEST,
    NEAR,
    TILE,
    TILES,
    TREE,
    block_at,
    blocks_in_order,
    join_sink,
    keys_of_queries,
    load_tile,
    mask_head,
    places_before,
    store_lse,
)
from .tree_mask import keys_of_trees


@triton.jit
def load_key_pieces(
    x, table, layout, strides, batch, b, h, place, keys, num_keys, dims, num_dims,
    SEQUENCES: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr,
    WIDE: tl.constexpr, CHECK_KEYS: tl.constexpr, PAD: tl.constexpr, PRECISION: tl.constexpr, column,
):  # fmt: skip
    """Load the rows of a block of keys as pieces, wherever they lie."""
    if SEQUENCES == NO_SEQUENCES and PRECISION != "ieee" and PRECISION != "tf32":
        return load_pieces(
            x, strides, batch, b, h, place, keys, num_keys, dims, num_dims,
            BLOCK_N, BLOCK_D, TMA, WIDE, CHECK_KEYS, PAD, PRECISION,
        )  # fmt: skip
    else:
        tile = load_keys(
            x, table, layout, strides, b, h, place, keys, num_keys, dims, num_dims,
            SEQUENCES, PAGE, BLOCK_N, BLOCK_D, TMA, WIDE, CHECK_KEYS, PAD, column,
        )  # fmt: skip
        return split(tile, PRECISION)


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    bias,
    mask_data,
    mask_index,
    out,
    lse,
    sink,
    bounds,
    table,
    dropout_key,
    largest,
    entropy,
    q_strides,
    k_strides,
    v_strides,
    bias_strides,
    mask_strides,
    shape,
    scale,
    softcap,
    splits,
    sink_of_head,
    sink_of_row,
    layout,
    dropout,
    extent,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    MASK: tl.constexpr,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    PAD_D: tl.constexpr,
    PAD_DV: tl.constexpr,
    TMA: tl.constexpr,
    ROWS_TMA: tl.constexpr,
    BIAS_TMA: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    NEGATIVE: tl.constexpr,
    EDGES: tl.constexpr,
    STAGES: tl.constexpr,
    EDGE_STAGES: tl.constexpr,
    HAS_SINK: tl.constexpr,
    SEQUENCES: tl.constexpr,
    SEARCH: tl.constexpr,
    PAGE: tl.constexpr,
    GROUPED: tl.constexpr,
    DROPOUT: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    ONE_LOOP: tl.constexpr,
    FLAT: tl.constexpr,
    OVERLAP: tl.constexpr,
    COLUMN_PARTS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Compute out and lse of one tile of queries.

    out (B, Lq, Hq, Dv) and lse (B, Hq, Lq) are contiguous. `scale` is the absolute value of `score_scale` of `Call`.
    The sink of a row is at `sink_of_head` and `sink_of_row` times its indices. `largest` and `entropy`, like lse, get
    the largest score and the entropy of each row where they are not None.

    With SPLIT_KEYS (split-KV) there are `splits` lses, and outs in fp32, one for each share of the keys; the combine
    kernel adds the sink.

    With SEQUENCES a program has queries of one sequence. `bounds` says where sequences lie and how long they are,
    `table` which pages their keys are in. The kernel moves every pointer to the first row of the sequence, and goes on
    as for a call of this sequence alone. With GROUPED a tile has all queries of a sequence, for all heads of a group,
    as its rows, so that the group reads its keys once.

    With DROPOUT p is dropped before it is multiplied by v, with the key at `dropout_key` and the numbers of `dropout`.

    With HEADS_FIRST out is (B, Hq, Lq, Dv). With ONE_LOOP all blocks go through the loop with mask code, so that there
    is no second loop that waits for its first loads. With OVERLAP the next kernel may start before this one has ended
    (programmatic dependent launch); it waits before it reads.

    With FLAT blocks whose scores all get one value of the bias have a loop of their own: see `flat_blocks`.

    With SPAN above 0 the bits of a row depend on the row alone: docs/invariance.md. Each span of so many keys is an
    online softmax of its own, blocks ascend, and `fold` adds the spans in their order. With SPLIT_KEYS a program has
    one span; out, lse and `largest` get its sums as they are, for the fold kernel.

    With COLUMN_PARTS above 1 so many programs compute the same scores, and each has BLOCK_DV columns of v and of out.
    """
    scale = tl.cast(scale, tl.float32)  # Inductor passes floats as fp64
    softcap = tl.cast(softcap, tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    column = 0
    if COLUMN_PARTS > 1:
        column = program % COLUMN_PARTS * BLOCK_DV
        program = program // COLUMN_PARTS
    most = shape.seqlen_q * (shape.group if GROUPED else 1)
    tiles = tiles_of_queries(most, layout, SEQUENCES, SEARCH, BLOCK_M)
    head = program // tiles
    part = 0
    if SPLIT_KEYS:
        part = head % splits
        head = head // splits
    own, tile, h = entry_of_tile(program % tiles, head, bounds, most, shape, layout, SEQUENCES, SEARCH, BLOCK_M)
    first_q, first_k, shape = bounds_of(own, bounds, shape, SEQUENCES)
    tiles_m = tl.cdiv(shape.seqlen_q * (shape.group if GROUPED else 1), BLOCK_M)
    if SEQUENCES != NO_SEQUENCES:
        if tile >= tiles_m:
            return
    at = place_of(own, first_q, first_k, shape, layout, SEQUENCES)
    b = at.b
    h_k = h // shape.group
    if GROUPED:
        h_k = head
        h = head * shape.group + tl.arange(0, BLOCK_M) % shape.group
    statistics = (at.b_q * shape.num_heads + h) * at.entry_rows + at.first_q
    q = rows_from(q, q_strides, at.first_q, SEQUENCES)
    k = rows_from(k, k_strides, at.first_k, SEQUENCES)
    v = rows_from(v, v_strides, at.first_k, SEQUENCES)
    bias = bias_from(bias, bias_strides, at, layout, SEQUENCES, BIAS, BIAS_TMA)
    mask_data, mask_index = mask_from(mask_data, mask_index, mask_strides, at, at.row_q, layout, SEQUENCES, MASK)
    table = pages_from(table, at, layout, SEQUENCES)

    first = (tiles_m - 1 - tile) * BLOCK_M  # under a causal band the longest rows start first
    rows = first + tl.arange(0, BLOCK_M)
    if GROUPED:
        rows = rows // shape.group
        first = first // shape.group
        last = shape.seqlen_q - 1
    else:
        last = tl.minimum(first + BLOCK_M, shape.seqlen_q) - 1
    dims = tl.arange(0, BLOCK_D)
    dims_v = column + tl.arange(0, BLOCK_DV)
    if GROUPED:
        q_rows = q + at.b_q * q_strides.batch + rows.to(tl.int64) * q_strides.row + h.to(tl.int64) * q_strides.head
        is_value = (rows < shape.seqlen_q)[:, None] & (dims < shape.head_dim)[None, :]
        q_tile = tl.load(q_rows[:, None] + dims[None, :], mask=is_value, other=0.0)
    else:
        q_tile = load_tile(
            q, q_strides, at.b_q, h, first, rows, shape.seqlen_q, dims, shape.head_dim,
            BLOCK_M, BLOCK_D, ROWS_TMA, True, True, PAD_D,
        )  # fmt: skip
    if NEGATIVE:
        # Exact. The scale is then >= 0, so that the largest product of a row is also its largest score.
        q_tile = -q_tile
    q_pieces = split(q_tile, PRECISION)
    BIASED: tl.constexpr = BIAS > ROW_BIAS
    bias_head, vector = bias_vector(bias, bias_strides, b, h, rows, shape, BIAS, 1)
    data, index = mask_head(mask_data, mask_index, mask_strides, b, h_k * shape.group if GROUPED else h, MASK)
    if MASK == TREE:
        walk, start, inside, before, after = keys_of_trees(
            first, last, rows, data, mask_strides.row, shape, LEFT, BLOCK_N
        )
    else:
        walk, start, inside, before, after = keys_of_queries(
            first, last, index, mask_strides, shape, MASK, LEFT, RIGHT, BLOCK_N
        )

    near = 0
    if FLAT:
        flat = flat_blocks(bias_head, bias_strides, first, start, inside, shape, extent, BLOCK_M, BLOCK_N, BIAS, 1)
        near = flat.near
    if ONE_LOOP and MASK != TILES:
        start, inside, before, after = start - before, 0, 0, inside + before + after
    if SPLIT_KEYS and SPAN == 0:  # shares count the blocks of both loops, so that they differ by one block at most
        begin_part = (inside + before + after) * part // splits
        end_part = (inside + before + after) * (part + 1) // splits

    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    spread = tl.zeros([BLOCK_M], tl.float32)
    acc_o = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    total_max, total_sum, total_o = row_max, row_sum, acc_o
    first_span, end_span = 0, 1
    if SPAN > 0:
        if MASK == TILES:
            start, after, before, inside = 0, before, 0, 0
            listed = after // (TILE // BLOCK_N)
            end_span = tl.cdiv(shape.seqlen_k, SPAN)
        else:
            first_span, end_span = (start - before) * BLOCK_N // SPAN, tl.cdiv((start + inside + after) * BLOCK_N, SPAN)
        if SPLIT_KEYS:
            first_span, end_span = tl.maximum(first_span, part), tl.minimum(end_span, part + 1)
    FIRST_PHASE: tl.constexpr = EDGE if ONE_LOOP else NEAR if FLAT or (SPAN > 0 and LEFT) else INSIDE
    for span in range(first_span, end_span):  # one turn, which the compiler removes, without spans
        if SPAN > 0:
            low, high = span * (SPAN // BLOCK_N), (span + 1) * (SPAN // BLOCK_N)
            if MASK == TILES:
                low, high = 0, after
                if shape.seqlen_k > SPAN:
                    low = places_before(walk, listed, span * (SPAN // TILE)) * (TILE // BLOCK_N)
                    high = places_before(walk, listed, (span + 1) * (SPAN // TILE)) * (TILE // BLOCK_N)
            row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
            row_sum = tl.zeros([BLOCK_M], tl.float32)
            acc_o = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        for phase in tl.static_range(FIRST_PHASE, EDGE + 1 if EDGES else EDGE):
            begin = 0
            steps = near if phase == NEAR else inside - near if phase == INSIDE else before + after
            if SPAN > 0:
                begin, steps = blocks_in_order(phase, low, high, start, inside, before, after)
            elif SPLIT_KEYS:
                earlier = 0 if phase == NEAR else near if phase == INSIDE else inside
                begin = tl.minimum(tl.maximum(begin_part - earlier, 0), steps)
                steps = tl.minimum(tl.maximum(end_part - earlier, 0), steps)
            for step in tl.range(begin, steps, num_stages=EDGE_STAGES if phase == EDGE else STAGES):
                IS_EDGE: tl.constexpr = phase == EDGE or (SPAN > 0 and phase == NEAR)
                IS_FLAT: tl.constexpr = FLAT and phase == INSIDE
                block = step
                if FLAT and phase != EDGE:
                    block = block_of_run(step, flat, IS_FLAT)
                if SPAN > 0 and MASK != TILES:
                    place = tl.multiple_of(step * BLOCK_N, BLOCK_N)
                else:
                    place = block_at(block, walk, start, inside, before, phase == EDGE, MASK, BLOCK_N)
                keys = place + tl.arange(0, BLOCK_N)
                if MASK == KEYS:
                    keys = tl.load(data + keys, mask=keys < shape.seqlen_k, other=shape.seqlen_k)
                if not IS_FLAT:
                    window = values_of_tile(
                        bias_head, bias_strides, first, place, shape, extent, BLOCK_M, BLOCK_N, BIAS, MASK == KEYS
                    )
                k_pieces = load_key_pieces(
                    k, table, layout, k_strides, shape.batch, at.b_k, h_k, place, keys, shape.seqlen_k,
                    dims, shape.head_dim, SEQUENCES, PAGE, BLOCK_N, BLOCK_D, TMA, WIDE, IS_EDGE, PAD_D, PRECISION, 0,
                )  # fmt: skip
                s = product_of_rows(q_pieces, k_pieces, PRECISION)
                s, factor, _slope = scaled(s, scale, softcap, SOFTCAP, BIASED)
                # With spans products are masked, not scores, so that blocks inside and at an edge round alike.
                MAKES_SCORES: tl.constexpr = BIASED or (SPAN == 0 and (SOFTCAP or phase == EDGE))
                if MAKES_SCORES and not IS_FLAT:
                    s = add_bias(
                        s, factor, bias, bias_head, vector, window, bias_strides, b, h, first + at.bias_row, place,
                        rows, keys, shape, extent, BLOCK_M, BLOCK_N, BIAS, 1, BIAS_TMA, WIDE, GROUPED, MASK == KEYS,
                    )  # fmt: skip
                if IS_EDGE:
                    s = masked_scores(
                        s, mask_data if GROUPED and MASK == DENSE else data, mask_strides, b, h, place, rows, keys,
                        shape, BLOCK_M, BLOCK_N, MASK, LEFT, RIGHT, 1, GROUPED,
                    )  # fmt: skip
                # Triton would choose the layout of a tile, and with it the order of a sum, by how these are loaded.
                ON_CORES: tl.constexpr = PRECISION == "ieee" and q_tile.dtype == tl.float32
                IN_ANY_ORDER: tl.constexpr = SPAN > 0 and (BIASED or MASK != BAND or ON_CORES)
                if IS_FLAT:
                    value = flat_value(step, flat)
                    new_max = tl.maximum(row_max, tl.max(s, 1) * factor + value)
                    shift = (new_max - value) * LOG2E
                    shift = tl.where(shift == float("-inf"), LOWEST, shift)
                    exponent = s * (factor * LOG2E) - shift[:, None]  # one fma
                    p = tl.math.exp2(exponent)
                    exponent = exponent * LN2
                elif MAKES_SCORES:
                    new_max = tl.maximum(row_max, tl.max(s, 1))
                    exponent = s - new_max[:, None]
                    p = exp_of(exponent, BIASED)
                else:
                    new_max = tl.maximum(row_max, tl.max(s, 1) * factor)
                    if SPAN > 0:
                        exponent = tl.fma(s, factor, -new_max[:, None])
                    else:
                        exponent = s * factor - new_max[:, None]  # one fma
                    p = tl.math.exp2(exponent)
                rescale = exp_of(row_max - new_max, BIASED)
                if entropy is not None:
                    spread = add_spread(spread, row_sum, row_max - new_max, rescale, p, exponent)
                if IN_ANY_ORDER and BIASED:
                    row_sum = tl.fma(row_sum, rescale, sum_in_any_order(p, exp_of(tl.max(s, 1) - new_max, True)))
                elif IN_ANY_ORDER:
                    largest_p = tl.math.exp2(tl.fma(tl.max(s, 1), factor, -new_max))
                    row_sum = tl.fma(row_sum, rescale, sum_in_any_order(p, largest_p))
                elif SPAN > 0:
                    row_sum = tl.fma(row_sum, rescale, tl.sum(p, 1))
                else:
                    row_sum = row_sum * rescale + tl.sum(p, 1)
                if DROPOUT:
                    kept = is_kept(
                        dropout_key, dropout, b, h, first, place, rows, keys, BLOCK_M, BLOCK_N, MASK == KEYS, 1
                    )
                    p = tl.where(kept, p, 0.0)
                acc_o = acc_o * rescale[:, None]
                v_pieces = load_key_pieces(
                    v, table, layout, v_strides, shape.batch, at.b_k, h_k, place, keys, shape.seqlen_k,
                    dims_v, shape.head_dim_v, SEQUENCES, PAGE, BLOCK_N, BLOCK_DV, TMA, WIDE, IS_EDGE, PAD_DV,
                    PRECISION, column,
                )  # fmt: skip
                acc_o = add_product(acc_o, p, v_pieces, PRECISION)
                row_max = new_max
        if SPAN > 0:
            if SPLIT_KEYS:
                total_max, total_sum, total_o = row_max, row_sum, acc_o
            else:
                total_max, total_sum, total_o = fold(total_max, total_sum, total_o, row_max, row_sum, acc_o, BIASED)
    if SPAN > 0:
        row_max, row_sum, acc_o = total_max, total_sum, total_o

    row_bias = row_values(bias, bias_strides, b, h, rows, shape, BIAS)
    if SPAN > 0:
        great, small, total = folded_log_sums(row_max, row_sum, BIASED)
    else:
        great, small, total = log_sums(row_max, row_sum, row_bias, BIAS)
    row_ok = rows < shape.seqlen_q
    first_row = at.row_q
    if SPLIT_KEYS:
        before = part.to(tl.int64) * at.all_rows
        first_row += before
        statistics += before * shape.num_heads
    line = statistics + rows if HEADS_FIRST else (first_row + rows) * shape.num_heads + h
    out_rows = out + line[:, None] * shape.head_dim_v + dims_v[None, :]
    stored = row_ok[:, None] & (dims_v < shape.head_dim_v)[None, :]
    if DROPOUT:
        acc_o = acc_o * tl.cast(dropout.scale, tl.float32)
    if entropy is not None:
        own_entropy = entropy_of(row_sum, spread, row_bias, BIAS)
    if HAS_SINK:
        logits = tl.load(sink + h * sink_of_head + rows * sink_of_row, mask=row_ok, other=float("-inf"))
        great, small, share = join_sink(great, small, logits.to(tl.float32))
        acc_o = acc_o * share[:, None]
        if entropy is not None:
            own_entropy = entropy_with_sink(own_entropy, great, small, logits.to(tl.float32), share)
    if SPAN > 0 and SPLIT_KEYS:
        great, small = row_max, tl.zeros_like(row_max)
    else:
        acc_o = acc_o / total[:, None]
    tl.store(out_rows, acc_o.to(out.dtype.element_ty), mask=stored)
    if COLUMN_PARTS > 1:
        row_ok = row_ok & (column == 0)  # one of them stores what all have
    if SPAN > 0 and SPLIT_KEYS:
        tl.store(largest + statistics + rows, row_sum, mask=row_ok)
    elif largest is not None:
        tl.store(largest + statistics + rows, largest_of(row_max, row_sum, row_bias, BIAS), mask=row_ok)
    if entropy is not None:
        tl.store(entropy + statistics + rows, own_entropy, mask=row_ok)
    store_lse(lse + statistics + rows, great, small, row_ok)
