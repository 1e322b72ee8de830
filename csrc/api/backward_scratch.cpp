// How the blocks of a backward pass share its work, and the scratch memory that they need.
#include <algorithm>
#include <cstdint>

#include <torch/csrc/stable/tensor.h>

#include "../sections.h"
#include "backward.h"
#include "common.h"
#include "sequences.h"

namespace flash_dmattn {
namespace {

// A section if the order of additions is fixed: more heads at a time mean fewer key blocks of one head that wait for
// each other. Under a mask at least kOrderedHeads; without one, where blocks come in their order, as many as
// kOrderedBytes of L2 hold.
constexpr int64_t kOrderedHeads = 8, kOrderedBytes = 36 << 20;

}  // namespace

// --- work tiles ---------------------------------------------------------------------------------------------------

// Bytes of q, dout and the accumulators of dq in a row.
int64_t BackwardPass::row_bytes() const {
  return (sizes.head_dim + sizes.head_dim_v) * 2 + (args.dq.has_value() ? dq_columns * 4 : 0);
}

// Sets the work tiles of a dense call, and their order.
void BackwardPass::schedule_tiles() {
  call.shares_over_batch = shares_over_batch(params, has_bias_tiles(), has_mask);
  call.has_key_bias = bias_form == BackwardBias::kVector;
  call.has_bias = bias_form != BackwardBias::kNone;
  schedule = schedule_backward(call, writer, num_sms);
  turns_dq = has_turned_dq(kernels.head_dim, kernels.head_dim_v) && bias_form == BackwardBias::kNone && !has_mask &&
             args.softcap <= 0 && !args.dropout_key.has_value() && args.dq.has_value() && !schedule.completes_dq &&
             !schedule.is_ordered && (!is_banded || shortens_rows(sizes, args.low, args.high)) &&
             mean_walk(call) >= kLeastTurnedWalk;
  block_m = turns_dq ? kTurnedBlockM : backward_block_m(kernels.head_dim, kernels.head_dim_v, schedule.block_n);
  pairs = sizes.batch * sizes.num_heads;
  rows_of_pair = turns_dq ? ceil_div(sizes.seqlen_q, block_m) * block_m : tiles_q * kTile;
  CHECK_FOR(op, schedule.num_work_tiles <= kMaxInt / 2, "there are more than 2^30 tiles of work");
  params.blocks_k = static_cast<int>(schedule.blocks_k);
  params.batch_is_inner = schedule.batch_is_inner;
  params.full_group_pairs = static_cast<int>(schedule.full_group_pairs);
  params.first_summed_pair = static_cast<int>(pairs_k - schedule.summed_pairs);
  params.walk_parts = static_cast<int>(schedule.walk_parts);
  params.walk_tiles = static_cast<int>(schedule.walk_tiles);
  params.num_work_tiles = static_cast<int>(schedule.num_work_tiles);
  params.full_groups = sections(schedule.full_group_pairs, params.heads_per_group);
  params.single_heads = sections(schedule.single_heads, 1);
  if (schedule.blocks_decide) params.all_heads = sections(pairs, 1);
  blocks = std::min(params.num_work_tiles, clusters > 0 ? clusters * static_cast<int>(sizes.batch) : num_sms);
}

// The sections of so many pairs, for tiles of `heads` query heads: q, dout and the accumulators of dq fit in L2.
Sections BackwardPass::sections(int64_t count, int64_t heads) const {
  const bool is_ordered = schedule.is_ordered;
  const bool rows_shrink = !is_ordered && params.key_order == nullptr && shortens_rows(sizes, args.low, args.high);
  const int64_t work_bytes = heads * sizes.seqlen_q * row_bytes();
  const int64_t least_when_ordered = has_mask ? kOrderedHeads : std::max<int64_t>(kOrderedBytes / work_bytes, 2);
  const int64_t section =
      schedule.is_head_by_head ? 1 : std::max<int64_t>(kSectionBytes / work_bytes, is_ordered ? least_when_ordered : 1);
  // The tiles of a cluster are batch entries of the same head, so a section holds whole clusters. Where blocks decide,
  // it holds whole groups if it has room for one.
  const bool holds_groups = schedule.blocks_decide && heads == 1 && section >= params.heads_per_group;
  const int64_t together = holds_groups                       ? params.heads_per_group
                           : writer == DbiasWriter::kClusters ? sizes.batch
                                                              : 1;
  return sections_of(count, schedule.blocks_k * schedule.walk_parts, ceil_div(section, together) * together, together,
                     rows_shrink, num_sms);
}

// Sets the work tiles of a call with sequences, and sections of key heads whose q, dout and sums of dq fit in L2.
void BackwardPass::list_tiles() {
  SequenceParams& of = params.sequences;
  schedule.block_n = kTile;
  schedule.is_ordered = args.invariant && args.dq.has_value();
  block_m = backward_block_m(kernels.head_dim, kernels.head_dim_v, kTile);
  const int64_t all_q = sizes.batch * sizes.seqlen_q, all_k = sizes.batch * sizes.seqlen_k;
  const int64_t tiles = most_blocks(entries, all_k, of.most_k, kTile), padded_tiles = all_q / kTile + entries;
  check_counts(padded_tiles * sizes.num_heads, tiles * sizes.num_heads_k);
  pairs = sizes.num_heads;
  rows_of_pair = padded_tiles * kTile;
  blocks = static_cast<int>(std::min<int64_t>(tiles * sizes.num_heads_k, num_sms));
  FillGapsParams gaps{};
  const auto add = [&](const std::optional<Tensor>& x, bool are_keys) {
    if (x.has_value()) gaps.of[gaps.tensors++] = gaps_of(*x, are_keys, of);
  };
  add(args.dq, false);
  add(args.dk, true);
  add(args.dv, true);
  works = list_works(op, args.q, entries, true, kTile, tiles, padded_tiles, gaps, num_sms, of, nullptr, stream,
                     schedule.is_ordered);
  const int64_t head_bytes = all_q * row_bytes() * params.heads_per_group;
  of.section = static_cast<int>(std::clamp<int64_t>(kSectionBytes / head_bytes, 1, sizes.num_heads_k));
}

// --- memory -------------------------------------------------------------------------------------------------------

// The arrays of one allocation of floats: where each starts, on a cache line of 128 bytes. Misaligned accumulators cost
// 2 % (docs/notes/cuda_tried.md, "Backward kernel").
struct BackwardPass::Layout {
  int64_t rows, split_lse, great_rows, has_long, has_group, slots, flat_sums;
  // The others start as zeros, but for dk and dv where only some of their rows are cleared.
  int64_t dbias_counter, counter, dq_semaphore, dkv_semaphore, dq, dk, dv;
  int64_t length = 0;
  int64_t masks = 0;

  // Reserves `count` floats and returns where they start.
  int64_t reserve(int64_t count) {
    const int64_t start = length;
    length += ceil_div(count, 32) * 32;
    return start;
  }
};

BackwardPass::Layout BackwardPass::lay_out() const {
  const bool is_ordered = schedule.is_ordered, is_shared = writer == DbiasWriter::kSharedDbias || summed.count() > 0;
  const bool hands_out = schedule.blocks_decide || (schedule.tiles_differ && params.num_work_tiles > blocks);
  const bool needs_counter = sequences != nullptr || (runs_main_kernel && (is_ordered || hands_out));
  const bool sums_dq = args.dq.has_value() && !schedule.completes_dq;
  const int64_t padded_rows = pairs * rows_of_pair, blocks_q = padded_rows / block_m;
  const int64_t summed_rows = schedule.summed_pairs * schedule.blocks_k * schedule.block_n;
  const MaskHeads& heads = params.mask.heads;
  Layout at{};
  at.masks = schedule.blocks_decide ? (heads.has_batch ? sizes.batch : 1) * heads.mask_heads : 0;
  at.rows = at.reserve(2 * padded_rows);
  at.split_lse = at.reserve(bias_form == BackwardBias::kNone ? 0 : 2 * padded_rows);
  at.great_rows = at.reserve(bias_form == BackwardBias::kNone ? 0 : padded_rows / kTile);
  at.has_long = at.reserve(ceil_div(at.masks, 4));
  at.has_group = at.reserve(schedule.blocks_decide ? ceil_div(pairs_k * tiles_k * (kTile / kAccumRows), 4) : 0);
  at.slots = at.reserve(dbias_schedule.has_slots ? dbias_schedule.chunks * dbias_schedule.slot_floats : 0);
  at.flat_sums = at.reserve(sums_flat_tiles(bias_form) ? pairs * schedule.blocks_k * kFlatSums * 2 : 0);
  at.dbias_counter = at.reserve(is_shared ? 1 : 0);
  at.counter = at.reserve(needs_counter ? 1 : 0);
  at.dq_semaphore = at.reserve(is_ordered ? blocks_q : 0);
  at.dkv_semaphore = at.reserve(is_ordered ? schedule.summed_pairs * schedule.blocks_k : 0);
  at.dq = at.reserve(sums_dq ? padded_rows * dq_columns : 0);
  at.dk = at.reserve(args.dk.has_value() ? summed_rows * dq_columns : 0);
  at.dv = at.reserve(args.dv.has_value() ? summed_rows * dv_columns : 0);
  return at;
}

// Allocates the scratch memory, and points the kernels to what they need of it.
void BackwardPass::allocate() {
  const Layout at = lay_out();
  memory = empty(args.q, {at.length}, torch::headeronly::ScalarType::Float);
  float* const start = static_cast<float*>(memory.mutable_data_ptr());
  // Null for an array that nothing was reserved for.
  const auto floats = [&](int64_t from, int64_t end) { return end > from ? start + from : nullptr; };
  const auto ints = [&](int64_t from, int64_t end) { return reinterpret_cast<int*>(floats(from, end)); };
  rows.lse_log2 = start;
  rows.delta = start + pairs * rows_of_pair;
  rows.padded_rows = static_cast<int>(rows_of_pair);
  rows.sequences = params.sequences;
  params.lse = rows.lse_log2;
  params.delta = rows.delta;
  rows.split_lse = reinterpret_cast<float2*>(floats(at.split_lse, at.great_rows));
  rows.great_rows = reinterpret_cast<uint8_t*>(floats(at.great_rows, at.has_long));
  params.split_lse = rows.split_lse;
  params.great_rows = reinterpret_cast<const uint32_t*>(rows.great_rows);
  slots = floats(at.slots, at.flat_sums);
  params.flat_sums = reinterpret_cast<float2*>(floats(at.flat_sums, at.dbias_counter));
  dbias_counter = ints(at.dbias_counter, at.counter);
  params.tile_counter = ints(at.counter, at.dq_semaphore);
  params.dq_semaphore = ints(at.dq_semaphore, at.dkv_semaphore);
  params.dq_sums = floats(at.dq, at.dk);
  params.dk_sums = floats(at.dk, at.dv);
  params.dv_sums = floats(at.dv, at.length);
  if (params.dk_sums != nullptr || params.dv_sums != nullptr) params.dkv_semaphore = ints(at.dkv_semaphore, at.dq);
  if (schedule.completes_dq) params.dq = args.dq->mutable_data_ptr();
  choose_what_to_clear(at, start);
}

// Has the kernel of the rows clear memory: everything from the counters on, but of dk's and dv's sums only what single
// heads or live keys add to.
void BackwardPass::choose_what_to_clear(const Layout& at, float* start) {
  const bool clears_some = params.key_order != nullptr || schedule.blocks_decide;  // of dk's and dv's sums
  rows.cleared = start + at.dbias_counter;
  rows.zeros = ((clears_some ? at.dk : at.length) - at.dbias_counter) / 4;
  if (!clears_some) return;
  MaskHeads key_heads = params.mask.heads;
  key_heads.heads_per_mask /= params.heads_per_group;
  if (params.key_order != nullptr) {
    rows.places = {params.key_order, params.mask.bounds, params.seqlen_k, static_cast<int>(tiles_k), key_heads};
  }
  if (schedule.blocks_decide) {
    auto* const has_group = reinterpret_cast<uint8_t*>(start + at.has_group);
    auto* const has_long = reinterpret_cast<uint8_t*>(start + at.has_long);
    params.has_group = has_group;
    params.has_long = has_long;
    params.masks = static_cast<int>(at.masks);
    rows.group_walks = {has_group, has_long, params.masks, params.mask.lists, static_cast<int>(tiles_k),
                        static_cast<int>(tiles_q), key_heads, static_cast<int>(schedule.short_walk),
                        params.full_group_pairs, static_cast<int>(schedule.share)};
  }
  rows.sums[0] = params.dk_sums;
  rows.sums[1] = params.dv_sums;
  rows.floats[0] = static_cast<int>(kAccumRows * dq_columns);
  rows.floats[1] = static_cast<int>(kAccumRows * dv_columns);
  rows.row_blocks = static_cast<int>(schedule.blocks_k * schedule.block_n / kAccumRows);
  rows.num_heads_k = static_cast<int>(sizes.num_heads_k);
  rows.batch_is_inner = params.batch_is_inner;
}

}  // namespace flash_dmattn
