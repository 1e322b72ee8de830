"""Faults of csrc/, run on the emulated GPU."""

from __future__ import annotations

from .fault import Fault

_RARE = "tests/test_cuda_rare.py::"
_ARGUMENTS = "tests/test_cuda_arguments.py::"
_PARTS = "tests/test_cuda_parts.py::"
_DBIAS_OUT = "tests/test_cuda_dbias_out.py::"
_SECTIONS = "tests/test_cuda_sections.py::"
_ONE_ROW = "tests/test_cuda_one_mask_row.py::"
_HELD = "tests/test_cuda_held_bias.py::"
_GROUP_WALKS = (
    "tests/test_cuda_backward.py::test_key_blocks_of_whole_groups_under_a_mask[64-steps-none-q-k-v-bias-cuda]",
)
_LONG = ("tests/test_cuda_backward.py::test_long_walks[(2, 2, 128)-(4160, 129)-None-cuda]",)


def _every_gradient(bias: str) -> tuple[str, ...]:
    return (f"{_RARE}test_every_gradient[{bias}-cuda]",)


def _sink(case: str) -> tuple[str, ...]:
    return (f"{_RARE}test_a_sink[{case}-cuda]",)


def _softcap(bias: str) -> tuple[str, ...]:
    return (f"{_RARE}test_a_softcap[{bias}-cuda]",)


def _edges(window: str) -> tuple[str, ...]:
    return (f"{_RARE}test_edges_of_a_window[no bias-{window}-cuda]",)


def _chunks(chunks: int) -> tuple[str, ...]:
    return (f"{_RARE}test_chunks_of_a_shared_gradient[{chunks}-cuda]",)


def _intervals(case: str) -> tuple[str, ...]:
    return (f"{_RARE}test_an_interval_mask[{case}-cuda]",)


def _sequences(case: str) -> tuple[str, ...]:
    return (f"tests/test_cuda_sequences.py::{case}",)


def _pages(case: str) -> tuple[str, ...]:
    return (f"tests/test_cuda_pages.py::{case}",)


FAULTS: tuple[Fault, ...] = (
    # Calls by hand
    Fault(
        "a mask of other queries is taken",
        "csrc/api/call.h",
        "{entries, heads, sizes.seqlen_q, tiles_k * kTileWords}",
        "{entries, heads, allowed.size(2), tiles_k * kTileWords}",
        (f"{_ARGUMENTS}test_each_tensor_changed_alone_is_refused[forward tiles-cuda]",),
    ),
    Fault(
        "lists of columns are not looked at",
        "csrc/api/call.h",
        "  if (has_columns) {",
        "  if (false) {",
        (f"{_ARGUMENTS}test_each_tensor_changed_alone_is_refused[backward by place-cuda]",),
    ),
    Fault(
        "a bias by position of more keys than the longest sequence is taken",
        "csrc/api/sequences.h",
        "one_or(packs_keys ? sizes.seqlen_k : call.most_k)",
        "one_or(packs_keys ? sizes.seqlen_k : bias->size(3))",
        (f"{_ARGUMENTS}test_each_tensor_changed_alone_is_refused[forward padded-cuda]",),
    ),
    Fault(
        "dbias_sums may be of other keys",
        "csrc/api/backward.cpp",
        "has_all_keys ? sizes.seqlen_k : of.most_k}",
        "has_all_keys ? sizes.seqlen_k : a.dbias_sums->size(2)}",
        (f"{_ARGUMENTS}test_each_tensor_changed_alone_is_refused[backward padded-cuda]",),
    ),
    # Packing
    Fault(
        "classes of tiles that do not exist are written, those of the next row",
        "csrc/sm90/mask/pack.cu",
        "tile < p.tiles_k) p.classes[row_of_tiles * p.tiles_k + tile] = 0;",
        "true) p.classes[row_of_tiles * p.tiles_k + tile] = 0;",
        ("tests/test_cuda_pack.py::test_every_size[(2, 2, 300, 1040)]",),
    ),
    Fault(
        "bits of tiles that do not exist are written, those of the next row",
        "csrc/sm90/mask/pack.cu",
        "if (row < p.seqlen_q && tile < p.tiles_k) bits[place]",
        "if (row < p.seqlen_q) bits[place]",
        ("tests/test_cuda_pack.py::test_every_size[(2, 2, 300, 1040)]",),
    ),
    # Pages
    Fault(
        "slots behind the last key of a page are read",
        "csrc/sm90/sequences/sequence.h",
        "min(max(left, 0), p.page_size), row);",
        "p.page_size, row);",
        _pages("test_every_size_of_a_page[64-cuda]"),
    ),
    Fault(
        "pages follow each other",
        "csrc/api/sequences.h",
        "const int64_t rows = pages > 1 ? x.stride(0) / x.stride(1) : page_size;",
        "const int64_t rows = page_size;",
        _pages("test_pools_lie_anyhow[interleaved-cuda]"),
    ),
    Fault(
        "every box of a block is that of its first page",
        "csrc/sm90/sequences/sequence.h",
        "min(column, p.table_columns - 1)];",
        "min(first_column, p.table_columns - 1)];",
        _pages("test_every_size_of_a_page[16-cuda]"),
    ),
    Fault(
        "rows of the table follow each other",
        "csrc/api/sequences.h",
        "params.table_stride = table.size(0) > 1 ? table.stride(0) : 0;",
        "params.table_stride = table.size(1);",
        _pages("test_rows_of_a_table_lie_anyhow[cuda]"),
    ),
    # Dropout
    Fault(
        "what is dropped goes by tiles in the backward pass",
        "csrc/sm90/backward/key_consumer.h",
        "block * kBlockM + 2 * (lane % 4));",
        "2 * (lane % 4));",
        ("tests/test_cuda_dropout.py::test_every_form[plain-cuda]",),
    ),
    Fault(
        "dv is not scaled",
        "csrc/sm90/backward/consumer.h",
        "Traits::kHasDropout ? p.dropout.scale : 1.0f;",
        "1.0f;",
        ("tests/test_cuda_dropout.py::test_every_form[plain-cuda]",),
    ),
    Fault(
        "sums of dv are not scaled",
        "csrc/api/backward.cpp",
        "params.dropout.key != nullptr ? params.dropout.scale : 1.0;",
        "1.0;",
        ("tests/test_cuda_dropout.py::test_every_form[causal-cuda]",),
    ),
    Fault(
        "a shared dbias of the scores that are dropped, too",
        "csrc/sm90/shared_dbias/consumer.h",
        "dp[i] = is_kept(kept, i) ? dp[i] * p.dropout.scale : 0.0f;",
        "dp[i] = dp[i] * p.dropout.scale;",
        ("tests/test_cuda_dropout.py::test_every_form[dbias that entries share-cuda]",),
    ),
    Fault(
        "keys stay in the order of a mask beside dropout",
        "flash_dmattn/backends/cuda/backend.py",
        '"has_dropout": flags.dropout_p > 0}',
        '"has_dropout": False}',
        ("tests/test_cuda_dropout.py::test_interval_masks[in_order-none-cuda]",),
    ),
    # Lists of tiles
    Fault(
        "the last of 32 neighbouring lists is that of the next head",
        "csrc/sm90/mask/list.cu",
        "const int groups = (lists.number + kNeighbours - 1) / kNeighbours;",
        "const int groups = lists.number / kNeighbours + 1;",
        ("tests/test_cuda_pack.py::test_tiles_of_intervals[4096-65536]",),
    ),
    Fault(
        "a tile with a dead place is full",
        "csrc/sm90/mask/intervals.cu",
        "first_stop = min(first_stop, of_place.y);",
        "if (of_place.y > 0) first_stop = min(first_stop, of_place.y);",
        ("tests/test_cuda_pack.py::test_tiles_of_intervals[300-257]",),
    ),
    # Sequences
    Fault(
        "tiles of a sequence of no queries are those of the next",
        "csrc/sm90/sequences/list_works.cu",
        "if (p.firsts[middle] <= tile) {",
        "if (p.firsts[middle] < tile) {",
        _sequences("test_every_bias[none-cuda]"),
    ),
    Fault(
        "padded tiles of two sequences overlap",
        "csrc/sm90/sequences/sequence.h",
        "return of.first_q / kTile + number; }",
        "return of.first_q / kTile; }",
        _sequences("test_every_bias[none-cuda]"),
    ),
    Fault(
        "causality is aligned at the first key",
        "csrc/sm90/sequences/sequence.h",
        "const int diagonal = of.seqlen_k - of.seqlen_q;",
        "const int diagonal = 0;",
        _sequences("test_every_bias[none-cuda]"),
    ),
    Fault(
        "TMA reads on behind the end of a sequence",
        "csrc/sm90/sequences/sequence.h",
        "return {kRaggedRows - number + row, kRaggedRows, first + number};",
        "return {kRaggedRows - number + row - kTile, kRaggedRows, first + number + kTile};",
        _sequences("test_every_bias[none-cuda]"),
    ),
    Fault(
        "a gap begins where the sequence before it does",
        "csrc/sm90/sequences/fill_gaps.cu",
        "if (gap > 0) begin = range_of(gap - 1).x + range_of(gap - 1).y;",
        "if (gap > 0) begin = range_of(gap - 1).x;",
        _sequences("test_every_bias[none-cuda]"),
    ),
    Fault(
        "dbias behind the band keeps what its memory had",
        "csrc/sm90/backward/clear_dbias.cu",
        "clear(to, kept_to, chunks);",
        "clear(to, kept_to, min(kept_to, chunks));",
        ("tests/test_cuda_backward.py::test_dbias_beyond_a_band[64-{'is_causal': True}-cuda]",),
    ),
    Fault(
        "rows of the gap behind a sequence keep what their memory had",
        "csrc/sm90/backward/clear_dbias.cu",
        "    if (entry + 1 < p.number) end = min(end, p.sequences.bounds[entry + 1].x);",
        "    end = min(end, first + of.seqlen_q);",
        _sequences("test_every_number_of_dbias_is_written[{}-packed rows-cuda]"),
    ),
    Fault(
        "the first empty tile of a mask keeps what its memory had",
        "csrc/sm90/backward/clear_dbias.cu",
        "for (int at = list[0] + list[1]; at < tiles_k; ++at) {",
        "for (int at = list[0] + list[1] + 1; at < tiles_k; ++at) {",
        ("tests/test_cuda_backward.py::test_dbias[(2, 2, 64)-B-Hq-Lq-Lk-empty tiles-cuda]",),
    ),
    Fault(
        "zeros behind the band are written to rows that follow each other",
        "csrc/sm90/backward/clear_dbias.cu",
        "uint4* const to = x + row * p.stride_q;",
        "uint4* const to = x + static_cast<int64_t>(row) * chunks;",
        (f"{_DBIAS_OUT}test_every_mask[64-causal-cuda]",),
    ),
    Fault(
        "zeros of empty tiles are written to rows that follow each other",
        "csrc/sm90/backward/clear_dbias.cu",
        "x[row * p.stride_q + chunk]",
        "x[static_cast<int64_t>(row) * chunks + chunk]",
        (f"{_DBIAS_OUT}test_every_mask[64-empty tiles-cuda]",),
    ),
    Fault(
        "zeros are written to heads that follow each other",
        "csrc/api/backward.cpp",
        "cleared.stride_h = a.dbias->stride(1) / 8;",
        "cleared.stride_h = a.dbias->size(2) * a.dbias->stride(2) / 8;",
        (f"{_DBIAS_OUT}test_every_mask[64-empty tiles-cuda]",),
    ),
    Fault(
        "zeros are written to entries that follow each other",
        "csrc/api/backward.cpp",
        "of.bias_packs_queries ? 0 : a.dbias->stride(0) / 8;",
        "of.bias_packs_queries ? 0 : a.dbias->size(1) * a.dbias->stride(1) / 8;",
        (f"{_DBIAS_OUT}test_every_mask[64-causal-cuda]",),
    ),
    Fault(
        "zeros beside packed queries are those of the first head",
        "csrc/api/backward.cpp",
        "cleared.stride_h = a.dbias->stride(1) / 8;",
        "cleared.stride_h = of.bias_packs_queries ? 0 : a.dbias->stride(1) / 8;",
        _sequences("test_every_number_of_dbias_is_written[{}-packed rows-cuda]"),
    ),
    Fault(
        "a dbias of one place for several heads is stored",
        "csrc/api/backward.cpp",
        "a.dbias->size(dim) == 1 || a.dbias->stride(dim) > 0",
        "a.dbias->size(dim) == 1 || a.dbias->stride(dim) >= 0",
        (f"{_DBIAS_OUT}test_what_the_operator_refuses[cuda]",),
    ),
    Fault(
        "a gradient that heads share is stored where it may not be",
        "flash_dmattn/backends/cuda/bias_rows.py",
        " or dbias.shape[:2] != (q.shape[0], q.shape[2]):",
        ":",
        (f"{_DBIAS_OUT}test_a_gradient_of_other_kernels_is_copied",),
    ),
    Fault(
        "what kernels did not store in its place is not copied there",
        "flash_dmattn/operators.py",
        "dbias = dbias_out.copy_(dbias)",
        "dbias = dbias_out",
        (f"{_DBIAS_OUT}test_a_gradient_of_other_kernels_is_copied",),
    ),
    Fault(
        "delta of few keys is without dlse",
        "csrc/sm90/sequences/few_keys.cu",
        "if (p.dlse != nullptr && p.lse[padded + i] != INFINITY) {",
        "if (p.dlse != nullptr && p.lse[padded + i] == INFINITY) {",
        _sequences("test_every_bias[none-cuda]"),
    ),
    Fault(
        "delta of few keys takes the band for none",
        "csrc/sm90/sequences/few_keys.cu",
        "if (i >= rows || key < row + sequence.low || key > row + sequence.high) continue;",
        "if (i >= rows) continue;",
        _sequences("test_padded_entries[none-cuda]"),
    ),
    Fault(
        "dout of packed queries is that of the first ones",
        "csrc/sm90/backward/rows.cu",
        "entry = 0, row_of_entry += work.sequence.first_q;",
        "entry = 0;",
        _sequences("test_every_bias[none-cuda]"),
    ),
    Fault(
        "rows behind the last query of a sequence are not masked",
        "csrc/sm90/backward/tile_scheduler.h",
        "walk.stop_inside = min(walk.stop_inside, of.seqlen_q / Traits::kBlockM);",
        "walk.stop_inside = walk.stop_inside;",
        _sequences("test_a_bias_may_have_anything_behind_a_sequence[of each sequence-cuda]"),
    ),
    Fault(
        "keys behind the last of a sequence count in a shared gradient",
        "csrc/sm90/shared_dbias/consumer.h",
        "to = row < of.seqlen_q ? min(to, of.seqlen_k - 1 - first) : -1;",
        "to = row < of.seqlen_q ? to : -1;",
        _sequences("test_every_bias[shared by all-cuda]"),
    ),
    Fault(
        "sums of packed keys are at the place of the first",
        "csrc/sm90/sequences/sequence.h",
        "return static_cast<int64_t>(work.head) * of.rows_k + work.sequence.first_k;",
        "return static_cast<int64_t>(work.head) * of.rows_k;",
        _sequences("test_every_bias[packed keys-cuda]"),
    ),
    Fault(
        "a bias of packed keys is read from the first",
        "csrc/sm90/sequences/sequence.h",
        "(of.bias_packs_keys ? work.sequence.first_k * p.bias_stride_k : 0);",
        "0;",
        _sequences("test_every_bias[packed keys-cuda]"),
    ),
    # Sinks
    Fault(
        "a sink joins each KV split",
        "csrc/sm90/forward/consumer.h",
        "const float total = keys + exp2_approx((sink - top) * kLog2e);",
        "const float total = keys + p.num_splits * exp2_approx((sink - top) * kLog2e);",
        _sink("no bias-3"),
    ),
    Fault(
        "out keeps the share of the sink",
        "csrc/sm90/forward/consumer.h",
        "factor[r] *= keys / total;",
        "factor[r] *= 1.0f;",
        _sink("no bias-1"),
    ),
    Fault(
        "the dlse of a row without keys is dropped beside its sink",
        "csrc/sm90/backward/rows.cu",
        "if (p.dlse != nullptr) {",
        "if (p.dlse != nullptr && sum != 0.0f) {",
        _sink("no bias-1"),
    ),
    Fault(
        "the caller's delta is that of the first rows alone",
        "csrc/sm90/backward/rows.cu",
        "if (exists && p.row_delta != nullptr) p.row_delta",
        "if (at < kThreads && exists && p.row_delta != nullptr) p.row_delta",
        _sink("alone-1"),
    ),
    # The forward kernel
    Fault(
        "forward: a negative scale taken as a positive one",
        "csrc/api/call.h",
        "} else if (softmax_scale < kLeastScale) {",
        "} else if (softmax_scale >= 0 && softmax_scale < kLeastScale) {",
        (f"{_RARE}test_a_negative_scale[no bias-cuda]",),
    ),
    Fault(
        "forward: a threshold below zero, which no negative score exceeds by its bits",
        "csrc/sm90/forward/consumer.h",
        "threshold[r] = bound >= 0.0f && fabsf(shift[r])",
        "threshold[r] = fabsf(shift[r])",
        (f"{_RARE}test_keys_far_above_a_maximum_that_is_negative[cuda]",),
    ),
    Fault(
        "forward: keys behind the last one are attended",
        "csrc/sm90/forward/consumer.h",
        "const int to = min(row + of.high, of.seqlen_k - 1) - block * kBlockN - column;",
        "const int to = row + of.high - block * kBlockN - column;",
        _every_gradient("no bias"),
    ),
    Fault(
        "forward: a window without its leftmost key",
        "csrc/sm90/forward/consumer.h",
        "const int from = row + of.low - block * kBlockN - column;",
        "const int from = row + of.low + 1 - block * kBlockN - column;",
        _edges("(40, -1)"),
    ),
    Fault(
        "forward: bits of another row",
        "csrc/sm90/forward/consumer.h",
        "const int row = Traits::kHasOneMaskRow ? 0 : min(work.first_row + row_of_warp + 8 * r, p.seqlen_q - 1);",
        "const int row = Traits::kHasOneMaskRow ? 0 : min(work.first_row + row_of_warp + 4 * r, p.seqlen_q - 1);",
        (f"{_RARE}test_a_mask_of_each_head[no bias-cuda]",),
    ),
    Fault(
        "forward: h % Hk in the place of h // G",
        "csrc/sm90/forward/producer.h",
        "const int head_k = work.head / p.heads_per_group, steps",
        "const int head_k = work.head % (p.num_heads / p.heads_per_group), steps",
        _every_gradient("no bias"),
    ),
    Fault(
        "forward: parts of the keys weighed without the scale",
        "csrc/sm90/forward/split_kv.h",
        "exp2_approx((sums.x - row_max[0]) * scale)",
        "exp2_approx(sums.x - row_max[0])",
        (f"{_RARE}test_parts_of_the_keys_weigh_what_they_hold[cuda]",),
    ),
    Fault(
        "forward: a stage of v is waited for in the wrong phase",
        "csrc/sm90/forward/producer.h",
        "barrier_wait(&shared.v_empty[pipe_v.stage], pipe_v.phase ^ 1);\n        tma_load_panels",
        "barrier_wait(&shared.v_empty[pipe_v.stage], pipe_v.phase);\n        tma_load_panels",
        _every_gradient("no bias"),
    ),
    # The backward kernel
    Fault(
        "backward: the tail of keys taken as inside",
        "csrc/sm90/backward/tile_scheduler.h",
        "walk.stop_inside = end > of.seqlen_k ? 0 : max(",
        "walk.stop_inside = max(",
        (f"{_RARE}test_keys_behind_the_last_where_lse_is_far_below_zero[no bias-cuda]",),
    ),
    Fault(
        "dk: causal queries aligned top-left",
        "csrc/sm90/backward/tile_scheduler.h",
        "const int first = max(first_key - of.high, 0);",
        "const int first = max(first_key - (of.high < of.seqlen_k ? 0 : of.high), 0);",
        (f"{_RARE}test_causal_queries_of_another_number_than_keys[(140, 328)-cuda]",),
    ),
    Fault(
        "backward: the last block of queries is left out",
        "csrc/sm90/backward/tile_scheduler.h",
        "last / Traits::kBlockM + 1 - walk.start",
        "last / Traits::kBlockM - walk.start",
        _every_gradient("no bias"),
    ),
    Fault(
        "backward: blocks at the left edge of a window taken as inside",
        "csrc/sm90/backward/tile_scheduler.h",
        "max(first_key - of.low + 1, 0) / Traits::kBlockM;",
        "max(end - of.low, 0) / Traits::kBlockM;",
        _edges("(40, -1)"),
    ),
    Fault(
        "backward: bits of another row",
        "csrc/sm90/backward/key_consumer.h",
        "const int row = min(block * kBlockM + 32 * t + lane, p.seqlen_q - 1);",
        "const int row = min(block * kBlockM + 32 * t + (lane ^ 1), p.seqlen_q - 1);",
        (f"{_RARE}test_a_mask_of_each_head[no bias-cuda]",),
    ),
    Fault(
        "dq and dk without the slope of a softcap",
        "csrc/sm90/backward/key_consumer.h",
        "ds[w] = pack(ds_low * slope_of_tanh(tanhs[at]), ds_high * slope_of_tanh(tanhs[at + 1]), Element{});",
        "ds[w] = pack(ds_low, ds_high, Element{});",
        _softcap("no bias"),
    ),
    Fault(
        "a stored dbias with the slope of a softcap",
        "csrc/sm90/backward/key_consumer.h",
        "dbias[w] = pack(ds_low, ds_high, Element{});",
        "dbias[w] = ds[w];",
        _softcap("per score"),
    ),
    Fault(
        "backward: a tile of bias is read before it has arrived",
        "csrc/sm90/backward/consumer.h",
        "barrier_wait(&shared.bias_full[pipe.stage], pipe.phase);",
        "",
        (f"{_RARE}test_what_is_copied_is_waited_for[cuda]",),
    ),
    Fault(
        "heads of a group add to dk and dv without waiting for their turn",
        "csrc/sm90/backward/consumer.h",
        "if (p.dkv_semaphore != nullptr) named_barrier_sync(kMayAddBarrier + group, 128 + 32);",
        "",
        (f"{_RARE}test_heads_of_a_group_are_summed_in_their_order[cuda]",),
    ),
    Fault(
        "delta without dlse",
        "csrc/sm90/backward/rows.cu",
        "if (p.dlse != nullptr) {",
        "if (false) {",
        _every_gradient("no bias"),
    ),
    Fault(
        "an empty row keeps its lse and dlse",
        "csrc/sm90/backward/rows.cu",
        "if (natural != -INFINITY) {",
        "if (true) {",
        (f"{_RARE}test_the_lse_of_an_empty_row_takes_no_gradient[cuda]",),
    ),
    Fault(
        "dq lacks softmax_scale",
        "csrc/api/backward.cpp",
        "false, dq_columns, a.softmax_scale);",
        "false, dq_columns, 1.0);",
        _every_gradient("no bias"),
    ),
    # The kernel of a shared bias' gradient
    Fault(
        "a shared dbias without the softcap",
        "csrc/sm90/shared_dbias/consumer.h",
        "low = tanh_exact(p.pre_scale * low);",
        "low = p.pre_scale * low;",
        _softcap("shared"),
    ),
    Fault(
        "a shared dbias with softmax_scale, which scores had already",
        "csrc/sm90/shared_dbias/consumer.h",
        "sums[i] = fmaf(scores[i], dp[i]",
        "sums[i] = fmaf(scores[i] * p.softmax_scale, dp[i]",
        _every_gradient("shared"),
    ),
    Fault(
        "shared dbias: the first chunks are not longer by a head",
        "csrc/sm90/shared_dbias/tile_scheduler.h",
        "return chunk * heads + min(chunk, p.heads_summed - heads * p.chunks);",
        "return chunk * heads;",
        _chunks(2),
    ),
    Fault(
        "shared dbias: a chunk starts with the heads of the first",
        "csrc/sm90/shared_dbias/producer.h",
        "int first = start_of_chunk(p, item.work.chunk);",
        "int first = start_of_chunk(p, 0);",
        _chunks(7),
    ),
    Fault(
        "shared dbias: slots of all chunks are one",
        "csrc/sm90/shared_dbias/consumer.h",
        "float* row = p.slots + work.chunk * p.slot_floats",
        "float* row = p.slots",
        _chunks(2),
    ),
    Fault(
        "shared dbias: a chunk of which nothing is visible leaves its slot as it was",
        "csrc/sm90/shared_dbias/consumer.h",
        "if (p.slots != nullptr) {",
        "if (p.slots != nullptr) { if (item.visited == 0) { release_work_tile(shared, pipe_work); continue; }",
        (f"{_RARE}test_chunks_of_which_nothing_is_visible[bias-cuda]",),
    ),
    Fault(
        "shared dbias: chunks are added from the last to the first",
        "csrc/sm90/shared_dbias/add_chunks.cu",
        "const float4 found = slots[chunk * fours + at];",
        "const float4 found = slots[(p.chunks - 1 - chunk) * fours + at];",
        (f"{_RARE}test_chunks_are_added_in_their_order[cuda]",),
    ),
    Fault(
        "shared dbias: the last keys of a row are not stored",
        "csrc/sm90/shared_dbias/add_chunks.cu",
        "if (key + i < p.seqlen_k) values[i]",
        "if (key + 3 < p.seqlen_k) values[i]",
        _chunks(1),
    ),
    Fault(
        "head groups: sums written over dk and dv of whole groups",
        "csrc/sm90/backward/rows.cu",
        "if (p.lacks_groups && params",
        "if (false && params",
        _GROUP_WALKS,
    ),
    Fault(
        "head groups: blocks pass over the tile behind a group's too",
        "csrc/sm90/backward/producer.h",
        "index + p.heads_per_group - static_cast",
        "index + p.heads_per_group + 1 - static_cast",
        _GROUP_WALKS,
    ),
    Fault(
        "head groups: the sums that heads add to are not cleared, but the others",
        "csrc/sm90/backward/rows.cu",
        "if (!is_added_to) continue;",
        "if (is_added_to) continue;",
        _GROUP_WALKS,
    ),
    Fault(
        "shared dbias: slots have rows as long as those of dbias",
        "csrc/api/backward_schedule.h",
        "schedule.slot_columns = ceil_div(call.seqlen_k, kDbiasColumns) * kDbiasColumns;",
        "schedule.slot_columns = call.seqlen_k;",
        _chunks(1),
    ),
    # Masks
    Fault(
        "packing: an empty tile taken as full",
        "csrc/sm90/mask/pack.cu",
        "any == 0 ? 0 : all == kLanes ? 2 : 1",
        "any == 0 ? 2 : all == kLanes ? 2 : 1",
        ("tests/test_cuda_pack.py::test_every_size[(2, 2, 300, 1040)]",),
    ),
    # Head dims of a panel and a half
    Fault(
        "the second consumer adds half of its columns of dq",
        "csrc/sm90/backward/consumer.h",
        "if (c * 8 >= kLastColumns && group == 1) break;",
        "if (c * 16 >= kLastColumns && group == 1) break;",
        (f"{_RARE}test_head_dims_of_a_panel_and_a_half[no bias-96-cuda]",),
    ),
    Fault(
        "sums of dk and dv have whole panels alone",
        "csrc/sm90/backward/key_consumer.h",
        "constexpr int kPanels = (kColumns + kAccumColumns - 1) / kAccumColumns;",
        "constexpr int kPanels = kColumns < kAccumColumns ? 1 : kColumns / kAccumColumns;",
        (f"{_RARE}test_head_dims_of_a_panel_and_a_half[no bias-96-cuda]",),
    ),
    Fault(
        "sums of the last columns are not read",
        "csrc/sm90/backward/rows.cu",
        "min(p.tile_columns, p.columns - panel * kAccumColumns) : 0;",
        "min(p.tile_columns, p.columns / 2 - panel * kAccumColumns) : 0;",
        (f"{_RARE}test_head_dims_of_a_panel_and_a_half[no bias-96-cuda]",),
    ),
    # Interval masks
    Fault(
        "forward: a key is seen by one row more",
        "csrc/sm90/operands.h",
        "(1u << min(max(stop - first_row, 0), 16))",
        "(1u << min(max(stop + 1 - first_row, 0), 16))",
        _intervals("no bias-True-False"),
    ),
    Fault(
        "backward: a key is seen by one row more",
        "csrc/sm90/backward/key_consumer.h",
        "keep_queries(scores, r, from, end - 1);",
        "keep_queries(scores, r, from, end);",
        _intervals("no bias-True-False"),
    ),
    Fault(
        "dk and dv stay in the order of places",
        "csrc/sm90/backward/rows.cu",
        "if (p.is_by_place && row < seqlen) {",
        "if (p.is_by_place && row < 0) {",
        _intervals("no bias-True-False"),
    ),
    Fault(
        "the gradient of a bias per key stays in the order of places",
        "csrc/sm90/backward/key_consumer.h",
        "atomicAdd(sums + p.key_order[mask_of(p, item) * p.seqlen_k + place], sum);",
        "atomicAdd(sums + place, sum);",
        _intervals("per key-True-False"),
    ),
    Fault(
        "keys of an order are copied for the first entry of the batch alone",
        "csrc/api/intervals.cpp",
        "params.rows = k.size(0) * order.size(2) * k.size(2);",
        "params.rows = order.size(2) * k.size(2);",
        (f"{_RARE}test_an_order_of_few_places[no bias-False-cuda]",),
    ),
    Fault(
        "dead keys beside live ones are copied as they are",
        "csrc/sm90/mask/intervals.cu",
        "const bool keeps = is_live(place);",
        "const bool keeps = true;",
        _intervals("no bias-True-False"),
    ),
    Fault(
        "a head is left for the one behind the next",
        "csrc/sm90/backward/producer.h",
        "next_head = (index / rows + 1) * rows;",
        "next_head = (index / rows + 2) * rows;",
        (f"{_RARE}test_heads_end_where_their_live_keys_do[(100, 300)-cuda]",),
    ),
    Fault(
        "the second part of a walk is the first once more",
        "csrc/sm90/backward/tile_scheduler.h",
        "begin = part < parts ? tiles * part / parts : 0",
        "begin = 0",
        (f"{_RARE}test_walks_of_an_interval_mask_that_several_blocks_share[cuda]",),
    ),
    Fault(
        "accumulators of live keys are not cleared",
        "csrc/sm90/backward/rows.cu",
        "if (p.places.order != nullptr || p.group_walks.has_group != nullptr) clear_rows_added_to(p);",
        "",
        _intervals("no bias-True-False"),
    ),
    Fault(
        "a bias per key in the order of keys",
        "csrc/sm90/mask/intervals.cu",
        "p.order[mask * p.seqlen + at % p.seqlen] * p.stride_k",
        "at % p.seqlen * p.stride_k",
        _intervals("per key-True-False"),
    ),
    Fault(
        "a tile whose rows end in it taken as full",
        "csrc/sm90/mask/intervals.cu",
        "last_start <= first && first_stop >= end;",
        "last_start <= first && first_stop > first;",
        ("tests/test_cuda_pack.py::test_tiles_of_intervals[300-257]",),
    ),
    Fault(
        "a key that is not allowed is kept where there is room",
        "csrc/sm90/mask/topk.cu",
        "const bool is_dead = p.keys[at] == INT32_MIN || interval.x >= interval.y;",
        "const bool is_dead = interval.x >= interval.y;",
        ("tests/test_cuda_pack.py::test_top_k_as_intervals[700-ties]",),
    ),
    Fault(
        "what survives of the segments before a key's own is left out",
        "csrc/sm90/mask/topk.cu",
        "const int survivors = segment == 0 ? 0 : p.k;",
        "const int survivors = 0;",
        ("tests/test_cuda_pack.py::test_top_k_of_long_rows[65537-300]",),
    ),
    Fault(
        "the best of a segment are held against those of the first alone",
        "csrc/sm90/mask/topk.cu",
        "const int32_t* const survivors = p.survivors + (first + segment) * p.k;",
        "const int32_t* const survivors = p.survivors + (first + 1) * p.k;",
        ("tests/test_cuda_pack.py::test_top_k_of_long_rows[65537-300]",),
    ),
    Fault(
        "a key leaves when as many better ones have come as there is room for",
        "csrc/sm90/mask/topk.cu",
        "int wanted = free + (i < leave);",
        "int wanted = free;",
        ("tests/test_cuda_pack.py::test_top_k_as_intervals[700-ties]",),
    ),
    Fault(
        "bits of rows that come before those of a key",
        "csrc/sm90/mask/intervals.cu",
        "if (row >= of_key.x && row < of_key.y) words",
        "if (row < of_key.y) words",
        ("tests/test_cuda_pack.py::test_tiles_of_intervals[300-257]",),
    ),
    Fault(
        "a part of the batch reads the entry of the bias before its own",
        "flash_dmattn/backends/cuda/parts.py",
        "at = first // repeat % entries",
        "at = max(0, first // repeat - 1) % entries",
        (f"{_PARTS}test_every_sharing[(1, 1)-(2, 1)-cuda]",),
    ),
    Fault(
        "a gradient of a bias that several parts share is that of the last",
        "flash_dmattn/backends/cuda/parts.py",
        "return entries == p.batch or (",
        "return True or (",
        (f"{_PARTS}test_every_sharing[(2, 1)-(1, 1)-cuda]",),
    ),
    Fault(
        "a gradient that was not stored in its place stays there",
        "flash_dmattn/backends/cuda/parts.py",
        "            with_dbias(found, place)\n",
        "            pass\n",
        (f"{_PARTS}test_every_sharing[(2, 1)-(2, 1)-cuda]",),
    ),
    Fault(
        "heads of a group read the bias of the first",
        "flash_dmattn/problem/leading.py",
        ".squeeze(3) if x.shape[1] == num_heads",
        "[:, :, :1, 0] if x.shape[1] == num_heads",
        ("tests/test_cuda_decoding.py::test_every_mask_and_bias[none-of query heads-whole-cuda]",),
    ),
    Fault(
        "a window of one query leaves the keys before it",
        "flash_dmattn/backends/cuda/group_rows.py",
        "(max(0, band.low), min(seqlen_k, band.high + 1))",
        "(0, min(seqlen_k, band.high + 1))",
        ("tests/test_cuda_decoding.py::test_every_mask_and_bias[none-none-window-cuda]",),
    ),
    Fault(
        "rows come before heads in an out that has heads first",
        "csrc/api/forward.cpp",
        "params.out_row_step = static_cast<int>(has_heads_first ? 1 : sizes.num_heads);",
        "params.out_row_step = static_cast<int>(sizes.num_heads);",
        ("tests/test_cuda_decoding.py::test_every_mask_and_bias[none-none-whole-cuda]",),
    ),
    # Masks with one row for all queries
    Fault(
        "the half of a tile in which keys are seen is left out",
        "csrc/sm90/forward/tile_scheduler.h",
        "skipped = (half.x | half.y) == 0;",
        "skipped = 1;",
        (f"{_ONE_ROW}test_any_keys[cuda-32-1-per score-tiles]",),
    ),
    Fault(
        "a walk without the half in which it would begin ends where it would",
        "csrc/sm90/forward/tile_scheduler.h",
        "if constexpr (kSkips) all += skipped, step += skipped;",
        "if constexpr (kSkips) all += skipped;",
        (f"{_ONE_ROW}test_padding[cuda-32-per score-300]",),
    ),
    Fault(
        "rows of a mask of which each has its own are taken for one",
        "csrc/sm90/forward/instantiate.cu",
        "kMask == MaskForm::kNone || variant.has_one_mask_row ?",
        "true ?",
        (f"{_ONE_ROW}test_rows_of_their_own[cuda-per score]",),
    ),
    Fault(
        "a band beside a mask with one row is forgotten",
        "flash_dmattn/backends/cuda/direct.py",
        "p.flags.one_mask_row and make_band(p.seqlen_q, p.seqlen_k, p.window) is None",
        "p.flags.one_mask_row",
        (f"{_ONE_ROW}test_what_the_kernel_is_told",),
    ),
    Fault(
        "a band beside a mask with one row is forgotten where a call is watched",
        "flash_dmattn/backends/cuda/backend.py",
        "flags.one_mask_row and band is None",
        "flags.one_mask_row",
        (f"{_ONE_ROW}test_what_the_kernel_is_told",),
    ),
    # A bias that stays in shared memory, and the threads that hand out and load work tiles
    Fault(
        "the bias of other rows is taken for the one that is held",
        "csrc/sm90/forward/producer.h",
        "head == held_head && work.block_q == held_rows",
        "head == held_head",
        (f"{_HELD}test_every_bias[(1, 1)-normal-('1', 'Hq', 'Lq', 'Lk')-cuda]",),
    ),
    Fault(
        "the bias of another head is taken for the one that is held",
        "csrc/sm90/forward/producer.h",
        "head == held_head && work.block_q == held_rows",
        "work.block_q == held_rows",
        (f"{_HELD}test_batches[1.4-cuda]",),
    ),
    Fault(
        "stages of a held bias are counted as if all were used",
        "csrc/sm90/forward/tile_scheduler.h",
        "Traits::kHoldsBias ? walk.steps : Traits::kBiasStages",
        "Traits::kBiasStages",
        (f"{_HELD}test_lengths[129-72-cuda]",),
    ),
    Fault(
        "a bias is held beside a band",
        "csrc/api/forward.cpp",
        "sequences != nullptr || has_band(sizes, call.low, call.high);",
        "sequences != nullptr;",
        (f"{_HELD}test_rows_that_see_other_keys[{{'is_causal': True}}-cuda]",),
    ),
    Fault(
        "a bias of every entry is held",
        "csrc/api/forward.cpp",
        "if (has_more || params.bias_has_batch || sizes.batch == 1) return false;",
        "if (has_more || sizes.batch == 1) return false;",
        (f"{_HELD}test_every_bias[(1, 1)-normal-('B', 'Hq', 'Lq', 'Lk')-cuda]",),
    ),
    Fault(
        "lse of a work tile goes where that of the head's first goes",
        "csrc/sm90/forward/tile_scheduler.h",
        "first_lse = first_lse_of(p, work) + work.first_row;",
        "first_lse = first_lse_of(p, work);",
        (f"{_HELD}test_lengths[500-256-cuda]",),
    ),
    # Long walks, and the order of work tiles
    Fault(
        "dq of the second consumer's columns goes where that of the first goes",
        "csrc/sm90/backward/tile_scheduler.h",
        "return p.dq_sums + ((head * query_blocks<Traits>(p) + block) * 2 + group) * kTurnedFloats;",
        "return p.dq_sums + (head * query_blocks<Traits>(p) + block) * 2 * kTurnedFloats;",
        _LONG,
    ),
    Fault(
        "lse and delta of long walks are looked for as if heads had whole tiles of queries",
        "csrc/sm90/backward/tile_scheduler.h",
        "return head * query_blocks<Traits>(p) * Traits::kBlockM;",
        "return head * ((p.seqlen_q + kTile - 1) / kTile * kTile);",
        _LONG,
    ),
    Fault(
        "late rows are taken twice, early ones of the last sections never",
        "csrc/sm90/sections.h",
        "first_row = rows;",
        "first_row = 0;",
        (f"{_SECTIONS}test_every_tile_is_taken_once",),
    ),
    Fault(
        "sections hold what fits in L2, however few tiles that are",
        "csrc/api/sections.h",
        "if (rows_shrink) most = std::max(most, num_sms / std::max<int64_t>(rows, 1));",
        "",
        (f"{_SECTIONS}test_no_sm_waits_long_for_the_last_tile",),
    ),
    Fault(
        "no rows are late",
        "csrc/api/sections.h",
        "rows_shrink ? static_cast<int>(rows / 2) : 0};",
        "0};",
        (f"{_SECTIONS}test_no_sm_waits_long_for_the_last_tile",),
    ),
    Fault(
        "a turned dq is converted as if it were not turned, too",
        "csrc/api/backward.cpp",
        "turns_dq ? nullptr : params.dq_sums",
        "params.dq_sums",
        ("tests/test_cuda_backward.py::test_long_walks[(4, 2, 104)-(4160, 129)-None-cuda]",),
    ),
)
