// dbias of a bias per query and key: which kernel writes it, zeros where the main kernel stores no tile, and the launch
// of the shared_dbias kernel. It also sums ds along diagonals, for a bias by distance.
#include <algorithm>
#include <cstdint>

#include <cuda_runtime_api.h>

#include <torch/csrc/stable/tensor.h>

#include "backward.h"
#include "common.h"
#include "sequences.h"
#include "tensor_map.h"

namespace flash_dmattn {

using torch::stable::Tensor;

// The sizes of the scores that dbias has places for.
Sizes BackwardPass::dbias_sizes() const {
  Sizes score_sizes = sizes;
  if (sequences != nullptr) {
    score_sizes.batch = entries;
    score_sizes.seqlen_q = args.bias->size(2);
    score_sizes.seqlen_k = args.bias->size(3);
  }
  return score_sizes;
}

void BackwardPass::choose_writer(int device) {
  const bool has_dbias = args.dbias.has_value() && !has_dvalues();
  const Sizes counted = has_dbias ? dbias_sizes() : sizes;
  call.batch = counted.batch;
  call.num_heads = sizes.num_heads;
  call.num_heads_k = sizes.num_heads_k;
  call.seqlen_q = counted.seqlen_q;
  call.seqlen_k = counted.seqlen_k;
  call.head_dim = kernels.head_dim;
  call.head_dim_v = kernels.head_dim_v;
  if (has_dbias) {
    call.dbias_batch = args.dbias->size(0);
    call.dbias_heads = args.dbias->size(1);
  }
  if (has_mask) call.mask_batch = args.mask[0].size(0);
  call.has_key_order = args.key_order.has_value();
  call.is_banded = is_banded;
  call.takes_plain_kernels = args.softcap > 0 || args.dropout_key.has_value() || args.outside != kNotByDistance;
  call.is_deterministic = args.deterministic;
  call.is_invariant = args.invariant;
  call.has_float_dbias = has_dbias && args.dbias->scalar_type() == torch::headeronly::ScalarType::Float;
  call.needs_dq = args.dq.has_value();
  call.needs_dk_or_dv = args.dk.has_value() || args.dv.has_value();
  const SequenceParams& of = params.sequences;
  if (sequences == nullptr) {
    writer = dbias_writer(call);
  } else if (args.dbias.has_value()) {
    // The main kernel, if dbias has a place of its own for each score.
    const bool has_places = args.dbias->size(1) == sizes.num_heads &&
                            (of.bias_packs_queries || args.dbias->size(0) == entries) &&
                            args.dbias->size(3) % kDbiasColumns == 0;
    writer = has_places ? DbiasWriter::kMain : DbiasWriter::kSharedDbias;
  }
  if (writer == DbiasWriter::kClusters) {
    static_assert(kMaxCluster >= 8);
    check(count_clusters(device, static_cast<int>(sizes.batch), clusters), op, "asking for clusters");
    if (clusters == 0) writer = DbiasWriter::kSharedDbias;
  }
  CHECK_FOR(op,
            writer == DbiasWriter::kNone || (sequences == nullptr && writer == DbiasWriter::kMain) ||
                args.dbias->is_contiguous(),
            "dbias needs to be contiguous");
  CHECK_FOR(op, writer == DbiasWriter::kNone || writer == DbiasWriter::kMain || args.dbias->size(3) == counted.seqlen_k,
            "dbias has rows of ", args.dbias->size(3), " keys; they need ", counted.seqlen_k);
  CHECK_FOR(op, writer != DbiasWriter::kSharedDbias || !(of.bias_packs_queries || of.bias_packs_keys),
            "heads share dbias of packed queries");
  runs_main_kernel = call.needs_dq || call.needs_dk_or_dv || args.dbias_sums.has_value() ||
                     (has_dbias && writer != DbiasWriter::kSharedDbias);
  if (writer == DbiasWriter::kSharedDbias) dbias_schedule = schedule_dbias(call, args.num_dbias_chunks, num_sms);
}

// Writes zeros where the main kernel stores no tile of dbias.
void BackwardPass::clear_dbias() const {
  const bool leaves_some = has_mask || is_banded || sequences != nullptr;
  // Before the first kernel, not between two: a memset would keep the next kernel from starting early.
  if (clusters > 0 && leaves_some) {
    const size_t bytes = static_cast<size_t>(args.dbias->numel()) * args.dbias->element_size();
    check(cudaMemsetAsync(params.summed_dbias, 0, bytes, stream), op, "clearing dbias");
  }
  if (writer != DbiasWriter::kMain || !leaves_some) return;
  const Tensor& dbias = *args.dbias;
  ClearDbiasParams cleared{};
  cleared.packs_rows = params.sequences.bias_packs_queries;
  cleared.x = dbias.mutable_data_ptr();
  const int64_t chunk = 16 / static_cast<int64_t>(dbias.element_size());
  cleared.is_float = dbias.scalar_type() == torch::headeronly::ScalarType::Float;
  cleared.stride_b = cleared.packs_rows ? 0 : dbias.stride(0) / chunk;
  cleared.stride_h = dbias.stride(1) / chunk;
  cleared.stride_q = dbias.stride(2) / chunk;
  cleared.number = static_cast<int>(entries);
  cleared.num_heads = params.num_heads;
  cleared.rows = static_cast<int>(dbias.size(2));
  cleared.columns = static_cast<int>(dbias.size(3));
  cleared.low = params.low;
  cleared.high = params.high;
  cleared.sequences = params.sequences;
  if (has_mask) cleared.mask = mask_tiles(args.mask, args.mask[1], sizes);
  check(launch_clear_dbias(cleared, stream), op, "launching the kernel that clears dbias");
}

// Writes all of a dbias that heads share: contiguous, in the dtype of the bias, from slots unless its rows are a multiple
// of 8 keys.
void BackwardPass::store_shared_dbias() const {
  const Tensor& dbias = *args.dbias;
  const DbiasSchedule& by = dbias_schedule;
  const Sizes scores = dbias_sizes();
  const int64_t entries_of_dbias = dbias.size(0), heads = dbias.size(1);
  CHECK_FOR(op, (entries_of_dbias == 1 || entries_of_dbias == scores.batch) && scores.num_heads % heads == 0,
            "dbias has ", entries_of_dbias, " batch entries and ", heads, " heads; it needs 1 or ", scores.batch,
            ", and a divisor of ", scores.num_heads);
  CHECK_FOR(op, by.dbias_tiles <= kMaxInt / 2 / by.chunks, "dbias has more than 2^30 tiles");
  CHECK_FOR(op, mask_form != MaskForm::kIntervals, "a bias per query and key needs bits of a mask");
  SharedDbiasParams shared = summed_operands(scores);
  shared.bias = scores_map(op, *args.bias, "bias", kTile);
  shared.dbias = dbias.mutable_data_ptr();
  if (call.has_float_dbias && !by.has_slots) shared.slots = static_cast<float*>(shared.dbias);
  shared.dbias_heads = static_cast<int>(heads);
  shared.heads_per_dbias = static_cast<int>(scores.num_heads / heads);
  shared.slot_columns = static_cast<int>(by.slot_columns);
  launch_shared_dbias(shared);
  if (by.has_slots) add_chunks(shared);
}

// Describes the call and its schedule to the kernel, but not dbias.
SharedDbiasParams BackwardPass::summed_operands(const Sizes& scores) const {
  const DbiasSchedule& by = dbias_schedule;
  SharedDbiasParams shared{};
  set_sizes(scores, shared);
  set_band(scores, args.low, args.high, shared);
  shared.sequences = params.sequences;
  shared.q = map_rows(op, args.q, "q", kTile, params.sequences);
  shared.k = map_rows(op, args.k, "k", kTile, params.sequences);
  shared.v = map_rows(op, args.v, "v", kTile, params.sequences);
  shared.dout = map_rows(op, args.dout, "dout", kTile, params.sequences);
  shared.bias_values = params.bias_values;
  if (has_mask) shared.mask = mask_tiles(args.mask, args.mask[1], scores);
  shared.slots = slots;
  shared.lse = params.lse;
  shared.split_lse = params.split_lse;
  shared.delta = params.delta;
  shared.softmax_scale = params.softmax_scale;
  shared.softcap = params.softcap;
  shared.pre_scale = params.pre_scale;
  shared.dropout = params.dropout;
  shared.heads_summed = static_cast<int>(by.heads_summed);
  shared.chunks = static_cast<int>(by.chunks);
  shared.slot_floats = by.slot_floats;
  shared.tiles_q = static_cast<int>(ceil_div(scores.seqlen_q, kTile));
  shared.tiles_k = static_cast<int>(ceil_div(scores.seqlen_k, kTile));
  shared.dbias_tiles = static_cast<int>(by.dbias_tiles);
  shared.num_work_tiles = static_cast<int>(by.dbias_tiles * by.chunks);
  return shared;
}

void BackwardPass::launch_shared_dbias(SharedDbiasParams& shared) const {
  const int blocks_of_dbias = std::min(shared.num_work_tiles, num_sms);
  // Dynamic even if all tiles are alike: static scheduling is slower
  // (docs/notes/cuda_tried.md, "shared_dbias kernel").
  if (shared.num_work_tiles > blocks_of_dbias) shared.tile_counter = dbias_counter;
  check(kernels.shared_dbias(shared, has_mask, blocks_of_dbias, stream), op, "launching the kernel of dbias");
}

// A bias by distance: which diagonals of tiles are summed, and whether the main kernel sums flat tiles.
void BackwardPass::describe_diagonals() {
  const Distances& of = params.distances;
  const Tensor& dvalues = *args.dbias;
  const Diagonals crossing = diagonals_between(of.lowest + int64_t{1} - of.origin, of.highest - int64_t{1} - of.origin);
  params.first_diagonal = static_cast<int>(crossing.first);
  params.last_diagonal = static_cast<int>(crossing.last);
  Diagonals visible{1 - tiles_q, tiles_k - 1};
  if (!has_mask) visible = visible.within(diagonals_between(params.low, params.high));
  summed = crossing.within(visible);
  const bool has_flat = visible.count() > summed.count();
  if (args.outside == kClamps && has_flat) {
    bias_form = BackwardBias::kRelativeSum;
    runs_main_kernel = true;
  }
  dbias_schedule = schedule_diagonals(call, dvalues.size(0), dvalues.size(1), summed.count(), kDiagonalFloats,
                                      args.num_dbias_chunks, num_sms);
  CHECK_FOR(op, dbias_schedule.dbias_tiles * std::max<int64_t>(dbias_schedule.chunks, 1) <= kMaxInt / 2,
            "a bias by distance has more than 2^30 diagonals of tiles");
}

// Sums ds along the diagonals of tiles that are not flat.
void BackwardPass::sum_diagonals() const {
  SharedDbiasParams shared = summed_operands(sizes);
  shared.dbias_heads = static_cast<int>(args.dbias->size(1));
  shared.heads_per_dbias = static_cast<int>(sizes.num_heads / args.dbias->size(1));
  shared.distances = params.distances;
  shared.first_diagonal = static_cast<int>(summed.first);
  shared.diagonals = static_cast<int>(summed.count());
  launch_shared_dbias(shared);
}

// Writes the gradient of a bias by distance.
void BackwardPass::store_dvalues() const {
  const Tensor& dvalues = *args.dbias;
  AddDiagonalsParams added{};
  added.slots = slots;
  added.flat_sums = params.flat_sums;
  added.dvalues = dvalues.mutable_data_ptr();
  added.dtype = float_dtype(op, dvalues, "dbias");
  added.distances = params.distances;
  added.clamps = args.outside == kClamps;
  added.owners = static_cast<int>(dvalues.size(0) * dvalues.size(1));
  added.chunks = static_cast<int>(dbias_schedule.chunks);
  added.first_diagonal = static_cast<int>(summed.first);
  added.diagonals = static_cast<int>(summed.count());
  added.num_heads = params.num_heads;
  added.dbias_heads = static_cast<int>(dvalues.size(1));
  added.heads_per_dbias = static_cast<int>(sizes.num_heads / dvalues.size(1));
  added.heads_summed = static_cast<int>(dbias_schedule.heads_summed);
  added.sums_of_head = static_cast<int>(schedule.blocks_k) * kFlatSums;
  check(launch_add_diagonals(added, stream), op, "launching the kernel that adds diagonals");
}

// Adds what the chunks have left in slots.
void BackwardPass::add_chunks(const SharedDbiasParams& from) const {
  AddChunksParams added{};
  added.slots = from.slots;
  added.dbias = from.dbias;
  added.rows = args.dbias->size(0) * args.dbias->size(1) * from.seqlen_q;
  added.chunks = from.chunks;
  added.slot_columns = from.slot_columns;
  added.seqlen_k = from.seqlen_k;
  added.stores_fours = from.seqlen_k % 4 == 0;
  const auto launch = call.has_float_dbias ? &launch_add_chunks<float> : kernels.add_chunks;
  check(launch(added, stream), op, "launching the kernel that adds chunks of dbias");
}

}  // namespace flash_dmattn
