// The backward operator: turns the tensors from flash_dmattn/backends/cuda/backend.py into params and launches the kernels.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include <cuda_runtime_api.h>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "../sm90/backward/launch.h"
#include "backward_rows.h"
#include "backward_schedule.h"
#include "bias.h"
#include "build_instances.h"  // written by the build
#include "call.h"
#include "common.h"
#include "sections.h"
#include "shared_dbias.h"
#include "tensor_map.h"
#include "tile_scheduler.h"

namespace flash_dmattn {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr const char* kName = "cuda_backward_kernel";
// A section if the order of additions is fixed: more heads at a time mean fewer key blocks of one head that wait for
// each other. Under a mask at least kOrderedHeads; without one, where blocks come in their order, as many as
// kOrderedBytes of L2 hold.
constexpr int64_t kOrderedHeads = 8, kOrderedBytes = 36 << 20;

// The kernels of one dtype and one pair of head dims; `rows` and `sums` depend on the dtype only.
struct KernelInstance {
  decltype(&launch_backward_main<__half, 64, 64>) main;
  decltype(&launch_backward_rows<__half>) rows;
  decltype(&launch_backward_sums<__half>) sums;
  SharedDbiasKernels shared_dbias;
  int64_t head_dim, head_dim_v;
};

// The smallest kernel instance whose head dims hold those of the call.
KernelInstance instance_for(ScalarType dtype, int64_t head_dim, int64_t head_dim_v) {
#define FLASH_DMATTN_INSTANCE(element, scalar, d, dv)                     \
  if (dtype == ScalarType::scalar && head_dim <= d && head_dim_v <= dv) { \
    return {&launch_backward_main<element, d, dv>,                        \
            &launch_backward_rows<element>,                               \
            &launch_backward_sums<element>,                               \
            {&launch_shared_dbias<element, d, dv>,                        \
             &launch_add_chunks<element>},                                \
            d,                                                            \
            dv};                                                          \
  }
  FLASH_DMATTN_INSTANCES(FLASH_DMATTN_INSTANCE)
#undef FLASH_DMATTN_INSTANCE
  CHECK_ARGUMENT(false, "the extension was not built for gradients of head dims ", head_dim, " and ", head_dim_v,
                 " (v) of this dtype");
}

// Chooses how the main kernel reads the bias. A bias per query only changes lse, which the kernel of the rows handles.
BackwardBias describe_bias(const Tensor& bias, const Tensor& q, DbiasWriter writer, bool sums_dbias) {
  if (sums_dbias) {
    CHECK_ARGUMENT(is_broadcast(bias, 2), "dbias_sums are of a bias of one value per key, and bias has one per query");
    return BackwardBias::kVector;
  }
  const bool is_per_score = !is_broadcast(bias, 2) && !is_broadcast(bias, 3);
  CHECK_ARGUMENT(is_per_score || writer == DbiasWriter::kNone, "dbias is of a bias of one value per query and key");
  if (!is_per_score) return is_broadcast(bias, 3) ? BackwardBias::kNone : BackwardBias::kVector;
  CHECK_ARGUMENT(bias.scalar_type() == q.scalar_type(), "bias of one value per query and key needs the dtype of q");
  switch (writer) {
    case DbiasWriter::kMain:
      return BackwardBias::kTileStore;
    case DbiasWriter::kClusters:
      return BackwardBias::kTileSum;
    default:
      return BackwardBias::kTile;
  }
}

// Makes params read column lists in ascending order, with each tile's predecessors; the returned tensor holds them.
Tensor order_lists(const std::vector<Tensor>& mask, const Tensor& q, int64_t tiles_q, int64_t tiles_k,
                   BackwardParams& params, cudaStream_t stream) {
  OrderListsParams order{};
  order.row_lists = static_cast<const int32_t*>(mask[1].const_data_ptr());
  order.col_lists = static_cast<const int32_t*>(mask[2].const_data_ptr());
  order.num_lists = mask[2].size(0) * mask[2].size(1) * tiles_k;
  order.tiles_q = static_cast<int>(tiles_q);
  order.tiles_k = static_cast<int>(tiles_k);
  const int64_t length = order.num_lists * (2 + tiles_q + tiles_q);
  const Tensor lists = torch::stable::new_empty(q, {&length, 1}, ScalarType::Int);
  order.ordered = static_cast<int32_t*>(lists.mutable_data_ptr());
  order.predecessors = order.ordered + order.num_lists * (2 + tiles_q);
  check(launch_order_lists(order, stream), kName, "launching the kernel of the lists");
  params.mask_lists = order.ordered;
  params.mask_predecessors = order.predecessors;
  return lists;
}

// One allocation for several arrays of floats, each starting on a cache line of 128 bytes. Misaligned accumulators cost
// 2 % (docs/notes/cuda_tried.md, "Backward kernel").
struct Scratch {
  int64_t length = 0;

  // Reserves `count` floats and returns where they start.
  int64_t add(int64_t count) {
    const int64_t start = length;
    length += ceil_div(count, 32) * 32;
    return start;
  }
};

// What the kernel of the sums converts to results.
struct Postprocess {
  BackwardSumsParams params{};
  int count = 0;
  int64_t tiles = 0;

  static void describe(BackwardSumsParams::Result& it, const Tensor& result, const float* sums, int64_t rows_per_pair,
                       double factor) {
    it.sums = sums;
    it.out = result.mutable_data_ptr();
    it.batch = static_cast<int>(result.size(0));
    it.seqlen = static_cast<int>(result.size(1));
    it.num_heads = static_cast<int>(result.size(2));
    it.rows_per_pair = static_cast<int>(rows_per_pair);
    it.columns = static_cast<int>(result.size(3));
    it.factor = static_cast<float>(factor);
  }

  // Adds dq whose tiles are turned: in its place among the results there is none, a kernel of its own converts it.
  void add_turned(const Tensor& dq, const float* sums, int64_t pairs, int64_t rows_per_pair, double factor) {
    describe(params.turned, dq, sums, rows_per_pair, factor);
    params.turned.tiles = pairs * (rows_per_pair / kTurnedBlockM) * 2;
    params.results[count++].tiles = tiles;
  }

  // Adds a result of `pairs` (batch, head) pairs, from first_pair on, with so many accumulator rows each. Adds nothing
  // if it is not wanted or not accumulated (sums is null).
  void add(const std::optional<Tensor>& result, const float* sums, int64_t first_pair, int64_t pairs,
           int64_t rows_per_pair, int64_t columns, double factor, bool batch_is_inner, bool is_of_keys = false) {
    BackwardSumsParams::Result& it = params.results[count++];
    if (sums != nullptr) {
      describe(it, *result, sums, rows_per_pair, factor);
      it.tile_columns = accum_columns(static_cast<int>(columns));
      it.panels = static_cast<int>(columns) / it.tile_columns;
      tiles += pairs * (rows_per_pair / kAccumRows) * it.panels;
      it.first_pair = static_cast<int>(first_pair);
      it.batch_is_inner = batch_is_inner;
      it.is_by_place = is_of_keys && params.places.order != nullptr;
      it.lacks_groups = is_of_keys && params.has_group != nullptr;
    }
    it.tiles = tiles;
  }
};

// Writes the gradients that are given, all contiguous but dbias where the main kernel stores it, (B, Hq, Lq, Lk) in a
// larger tensor. dbias, of a bias per query and key, has its dtype; it may have fewer heads or batch entries, and is
// written whole. dbias_sums (B, Hq, Lk), of a bias per key, is fp32. mask is {}, or (bits, row_lists, col_lists) of a
// TileMask, or (bounds, row_lists, col_lists) of an IntervalMask, with key_order if k, v and a bias per key are in its
// order; dk, dv and dbias_sums are in the order of keys, and dbias_sums starts as zeros then. low and high are the band if
// there is no mask. delta (B, Hq, Lq) is of every row, for gradients that are made outside; alone it takes
// the kernel of the rows and no other. num_dbias_chunks: into how many chunks the shared_dbias kernel parts what it sums; 0
// lets schedule_dbias choose.
void backward(Tensor dout, std::optional<Tensor> dlse, Tensor q, Tensor k, Tensor v, std::vector<Tensor> mask,
              std::optional<Tensor> key_order, std::optional<Tensor> bias, Tensor out, Tensor lse,
              std::optional<Tensor> dq, std::optional<Tensor> dk, std::optional<Tensor> dv, std::optional<Tensor> dbias,
              std::optional<Tensor> dbias_sums, std::optional<Tensor> delta, int64_t low, int64_t high,
              double softmax_scale, double softcap, bool deterministic, int64_t num_dbias_chunks,
              std::optional<Tensor> dropout_key, double dropout_p) {
  const Sizes sizes = sizes_of(kName, q, k, v);
  const KernelInstance instance = instance_for(q.scalar_type(), sizes.head_dim, sizes.head_dim_v);
  CHECK_ARGUMENT(sizes.head_dim_v <= kMaxRowColumns, "rows of out have ", sizes.head_dim_v, " columns, more than ",
                 kMaxRowColumns);
  CHECK_ARGUMENT(dq.has_value() || !(key_order.has_value() && deterministic),
                 "dq is needed with key_order in a fixed order: its semaphores order the sums of dk and dv");
  CHECK_ARGUMENT(bias.has_value() || !(dbias.has_value() || dbias_sums.has_value()), "there is no bias for a dbias");

  const int64_t tiles_q = ceil_div(sizes.seqlen_q, kTile), tiles_k = ceil_div(sizes.seqlen_k, kTile);
  const int64_t pairs = sizes.batch * sizes.num_heads, pairs_k = sizes.batch * sizes.num_heads_k;
  CHECK_ARGUMENT(pairs * tiles_q <= kMaxInt / 4, "there are more than 2^29 tiles of queries");
  CHECK_ARGUMENT(pairs_k * tiles_k <= kMaxInt / 4, "there are more than 2^29 tiles of keys");

  BackwardParams params{};
  BackwardRowsParams rows = describe_rows(kName, sizes, q, out, dout, lse, dlse, delta, dq, dk, dv);
  BackwardBias form = BackwardBias::kNone;
  const MaskForm of_mask = checked_mask_form(kName, mask, true, sizes, q);
  if (bias.has_value()) check_bias(kName, *bias, sizes, q);
  if (dbias.has_value()) {
    check_dims(kName, *dbias, "dbias", {bias->size(0), bias->size(1), sizes.seqlen_q, sizes.seqlen_k}, q);
    check_dtype(kName, *dbias, "dbias", q.scalar_type());
  }
  if (dbias_sums.has_value()) {
    check_array(kName, *dbias_sums, "dbias_sums", {sizes.batch, sizes.num_heads, sizes.seqlen_k}, ScalarType::Float, q);
  }
  const bool has_mask = of_mask != MaskForm::kNone, is_banded = has_band(sizes, low, high);
  BackwardCall call{};
  call.batch = sizes.batch;
  call.num_heads = sizes.num_heads;
  call.num_heads_k = sizes.num_heads_k;
  call.seqlen_q = sizes.seqlen_q;
  call.seqlen_k = sizes.seqlen_k;
  call.head_dim = instance.head_dim;
  call.head_dim_v = instance.head_dim_v;
  if (dbias.has_value()) {
    call.dbias_batch = dbias->size(0);
    call.dbias_heads = dbias->size(1);
  }
  if (has_mask) call.mask_batch = mask[0].size(0);
  call.has_key_order = key_order.has_value();
  call.is_banded = is_banded;
  call.has_softcap = softcap > 0 || dropout_key.has_value();  // neither has kernels of two key tiles or of clusters
  call.is_deterministic = deterministic;
  call.needs_dq = dq.has_value();
  call.needs_dk_or_dv = dk.has_value() || dv.has_value();

  const CurrentDevice device(kName, q);  // before the TMA descriptors, whose encoder needs its context
  const int num_sms = sm_count(kName, device.index);
  DbiasWriter writer = dbias_writer(call);
  int clusters = 0;
  if (writer == DbiasWriter::kClusters) {
    static_assert(kMaxCluster >= 8);
    check(count_clusters(device.index, static_cast<int>(sizes.batch), clusters), kName, "asking for clusters");
    if (clusters == 0) writer = DbiasWriter::kSharedDbias;
  }
  if (writer == DbiasWriter::kClusters || writer == DbiasWriter::kSharedDbias) {
    CHECK_ARGUMENT(dbias->is_contiguous(), "dbias needs to be contiguous");
  }
  if (bias.has_value()) {
    form = describe_bias(*bias, q, writer, dbias_sums.has_value());
    CHECK_ARGUMENT(of_mask != MaskForm::kIntervals || form == BackwardBias::kNone || form == BackwardBias::kVector,
                   "a bias per query and key needs bits of a mask");
    if (form == BackwardBias::kNone) {
      set_bias(kName, *bias, sizes.num_heads, rows);
    } else {
      set_bias(kName, *bias, sizes.num_heads, params);
    }
  }

  set_sizes(sizes, params);
  params.head_dim = static_cast<int>(sizes.head_dim);
  params.softmax_scale = static_cast<float>(softmax_scale);
  set_softcap(softmax_scale, softcap, params);
  CHECK_ARGUMENT(!(softcap > 0 && dropout_key.has_value()), "there is no kernel with dropout and a softcap");
  set_dropout(kName, dropout_key, dropout_p, instance.head_dim, instance.head_dim_v, q, params);
  set_band(sizes, low, high, params);
  call.low = params.low;
  call.high = params.high;
  if (has_mask) {
    set_mask(of_mask, mask[0], mask[2], sizes, params);
    call.groups_share_mask = params.heads_per_mask % params.heads_per_group == 0;
    if (key_order.has_value()) {
      CHECK_ARGUMENT(of_mask == MaskForm::kIntervals && call.groups_share_mask,
                     "key_order is of an interval mask that all heads of a group share");
      check_array(kName, *key_order, "key_order", {mask[0].size(0), mask[0].size(1), sizes.seqlen_k}, ScalarType::Int, q);
      params.key_order = static_cast<const int32_t*>(key_order->const_data_ptr());
    }
  }

  const bool has_bias_tiles =
      form == BackwardBias::kTile || form == BackwardBias::kTileStore || form == BackwardBias::kTileSum;
  call.shares_over_batch = shares_over_batch(params, has_bias_tiles, has_mask);
  call.has_key_bias = form == BackwardBias::kVector;
  const BackwardSchedule schedule = schedule_backward(call, writer, num_sms);
  const int block_n = schedule.block_n;
  const bool turns_dq = has_turned_dq(instance.head_dim, instance.head_dim_v) && form == BackwardBias::kNone && !has_mask &&
                        softcap <= 0 && !dropout_key.has_value() && dq.has_value() && !schedule.completes_dq &&
                        !schedule.is_ordered && (!is_banded || shortens_rows(sizes, low, high)) &&
                        mean_walk(call) >= kLeastTurnedWalk;
  const int block_m = turns_dq ? kTurnedBlockM : backward_block_m(instance.head_dim, instance.head_dim_v, block_n);
  const int64_t blocks_k = schedule.blocks_k;
  params.q = rows_map(kName, q, "q", block_m);
  params.k = rows_map(kName, k, "k", block_n);
  params.v = rows_map(kName, v, "v", block_n);
  params.dout = rows_map(kName, dout, "dout", block_m);
  if (has_bias_tiles) params.bias = scores_map(kName, *bias, "bias", block_m);
  if (form == BackwardBias::kTileStore) {
    check_stored_dbias(kName, *dbias);
    params.dbias = scores_map(kName, *dbias, "dbias", block_m);
  }
  params.dk = data_of(dk);
  params.dv = data_of(dv);
  params.dbias_sums = data_of<float>(dbias_sums);
  params.cluster = 1;
  if (writer == DbiasWriter::kClusters) {
    params.cluster = static_cast<int>(sizes.batch);
    params.summed_dbias = dbias->mutable_data_ptr();
  }

  // The work tiles, and how they are scheduled.
  const bool is_ordered = schedule.is_ordered;
  const auto accumulated = [](int head_dim) {
    return ceil_div(head_dim, accum_columns(head_dim)) * accum_columns(head_dim);
  };
  const int64_t dq_columns = accumulated(instance.head_dim), dv_columns = accumulated(instance.head_dim_v);
  CHECK_ARGUMENT(schedule.num_work_tiles <= kMaxInt / 2, "there are more than 2^30 tiles of work");
  params.blocks_k = static_cast<int>(blocks_k);
  params.batch_is_inner = schedule.batch_is_inner;
  const int64_t summed_pairs = schedule.summed_pairs, first_summed_pair = pairs_k - summed_pairs;
  params.full_group_pairs = static_cast<int>(schedule.full_group_pairs);
  params.first_summed_pair = static_cast<int>(first_summed_pair);
  params.walk_parts = static_cast<int>(schedule.walk_parts);
  params.walk_tiles = static_cast<int>(schedule.walk_tiles);
  params.num_work_tiles = static_cast<int>(schedule.num_work_tiles);
  // The sections of so many pairs, for tiles of `heads` query heads: q, dout and the accumulators of dq fit in L2.
  const bool rows_shrink = !is_ordered && params.key_order == nullptr && shortens_rows(sizes, low, high);
  const auto sections = [&](int64_t count, int64_t heads) {
    const int64_t row_bytes = (sizes.head_dim + sizes.head_dim_v) * 2 + (dq.has_value() ? dq_columns * 4 : 0);
    const int64_t work_bytes = heads * sizes.seqlen_q * row_bytes;
    const int64_t least_when_ordered = has_mask ? kOrderedHeads : std::max<int64_t>(kOrderedBytes / work_bytes, 2);
    const int64_t section =
        schedule.is_head_by_head ? 1 : std::max<int64_t>(kSectionBytes / work_bytes, is_ordered ? least_when_ordered : 1);
    // The tiles of a cluster are batch entries of the same head, so a section holds whole clusters. Where blocks decide, it
    // holds whole groups if it has room for one.
    const bool holds_groups = schedule.blocks_decide && heads == 1 && section >= params.heads_per_group;
    const int64_t together = holds_groups ? params.heads_per_group : params.cluster;
    return sections_of(count, blocks_k * schedule.walk_parts, ceil_div(section, together) * together, together,
                       rows_shrink, num_sms);
  };
  params.full_groups = sections(schedule.full_group_pairs, params.heads_per_group);
  params.single_heads = sections(schedule.single_heads, 1);
  if (schedule.blocks_decide) params.all_heads = sections(pairs, 1);
  const int blocks = std::min(params.num_work_tiles, clusters > 0 ? clusters * params.cluster : num_sms);
  const bool runs_main_kernel = call.needs_dq || call.needs_dk_or_dv || dbias_sums.has_value() ||
                                (dbias.has_value() && writer != DbiasWriter::kSharedDbias);
  DbiasSchedule of_dbias{};
  if (writer == DbiasWriter::kSharedDbias) of_dbias = schedule_dbias(call, num_dbias_chunks, num_sms);
  const bool hands_out = schedule.blocks_decide || (schedule.tiles_differ && params.num_work_tiles > blocks);
  const bool needs_counter = runs_main_kernel && (is_ordered || hands_out);

  // Scratch memory: lse in base 2 and delta, slots of dbias, then everything that starts as zeros.
  const int64_t rows_of_head = turns_dq ? ceil_div(sizes.seqlen_q, block_m) * block_m : tiles_q * kTile;
  const int64_t padded_rows = pairs * rows_of_head, summed_rows = summed_pairs * blocks_k * block_n;
  const int64_t blocks_q = padded_rows / block_m;
  Scratch scratch;
  scratch.add(2 * padded_rows);
  const int64_t masks = schedule.blocks_decide ? (params.mask_has_batch ? sizes.batch : 1) * params.mask_heads : 0;
  const int64_t has_long_at = scratch.add(ceil_div(masks, 4));
  const int64_t has_group_at =
      scratch.add(schedule.blocks_decide ? ceil_div(pairs_k * tiles_k * (kTile / kAccumRows), 4) : 0);
  const int64_t slots_at = scratch.add(of_dbias.has_slots ? of_dbias.chunks * of_dbias.slot_floats : 0);
  const int64_t dbias_counter_at = scratch.add(writer == DbiasWriter::kSharedDbias ? 1 : 0);
  const int64_t counter_at = scratch.add(needs_counter ? 1 : 0),
                dq_semaphore_at = scratch.add(is_ordered ? blocks_q : 0);
  const int64_t dkv_semaphore_at = scratch.add(is_ordered ? summed_pairs * blocks_k : 0);
  const bool sums_dq = dq.has_value() && !schedule.completes_dq;
  const int64_t dq_at = scratch.add(sums_dq ? padded_rows * dq_columns : 0);
  const int64_t keys_at = scratch.length;
  const int64_t dk_at = scratch.add(dk.has_value() ? summed_rows * dq_columns : 0);
  const int64_t dv_at = scratch.add(dv.has_value() ? summed_rows * dv_columns : 0);
  const Tensor memory = torch::stable::new_empty(q, {&scratch.length, 1}, ScalarType::Float);
  float* const start = static_cast<float*>(memory.mutable_data_ptr());
  rows.lse_log2 = start;
  rows.delta = start + padded_rows;
  rows.padded_rows = static_cast<int>(rows_of_head);
  rows.cleared = start + dbias_counter_at;
  const bool clears_some = params.key_order != nullptr || schedule.blocks_decide;  // of dk's and dv's sums
  rows.zeros = ((clears_some ? keys_at : scratch.length) - dbias_counter_at) / 4;
  params.lse = rows.lse_log2;
  params.delta = rows.delta;
  if (needs_counter) params.tile_counter = reinterpret_cast<int*>(start + counter_at);
  if (is_ordered) params.dq_semaphore = reinterpret_cast<int*>(start + dq_semaphore_at);
  if (sums_dq) params.dq_sums = start + dq_at;
  if (schedule.completes_dq) params.dq = dq->mutable_data_ptr();
  const bool sums_dk = dk.has_value() && summed_pairs > 0, sums_dv = dv.has_value() && summed_pairs > 0;
  if (sums_dk) params.dk_sums = start + dk_at;
  if (sums_dv) params.dv_sums = start + dv_at;
  const int masks_heads_k = has_mask ? params.heads_per_mask / params.heads_per_group : 0;  // key heads that share one
  if (params.key_order != nullptr) {
    rows.places = {params.key_order, params.mask_bounds, params.seqlen_k, static_cast<int>(tiles_k),
                   masks_heads_k,    params.mask_heads,  params.mask_has_batch};
  }
  if (schedule.blocks_decide) {
    rows.group_walks = {reinterpret_cast<uint8_t*>(start + has_group_at),
                        reinterpret_cast<uint8_t*>(start + has_long_at),
                        static_cast<int>(masks),
                        params.mask_lists,
                        static_cast<int>(tiles_k),
                        static_cast<int>(tiles_q),
                        masks_heads_k,
                        params.mask_heads,
                        params.mask_has_batch,
                        static_cast<int>(schedule.short_walk),
                        params.full_group_pairs,
                        static_cast<int>(schedule.share)};
    params.has_group = rows.group_walks.has_group;
    params.has_long = rows.group_walks.has_long;
    params.masks = rows.group_walks.masks;
  }
  if (clears_some) {
    rows.sums[0] = params.dk_sums;
    rows.sums[1] = params.dv_sums;
    rows.floats[0] = static_cast<int>(kAccumRows * dq_columns);
    rows.floats[1] = static_cast<int>(kAccumRows * dv_columns);
    rows.row_blocks = static_cast<int>(blocks_k * block_n / kAccumRows);
    rows.num_heads_k = static_cast<int>(sizes.num_heads_k);
    rows.batch_is_inner = params.batch_is_inner;
  }
  if (is_ordered && (sums_dk || sums_dv)) params.dkv_semaphore = reinterpret_cast<int*>(start + dkv_semaphore_at);

  // Before the first kernel, not between two: a memset would keep the next kernel from starting early.
  if (clusters > 0 && (has_mask || is_banded)) {
    const size_t bytes = static_cast<size_t>(dbias->numel()) * dbias->element_size();
    check(cudaMemsetAsync(params.summed_dbias, 0, bytes, device.stream), kName, "clearing dbias");
  }
  if (writer == DbiasWriter::kMain && (is_banded || has_mask)) {
    ClearDbiasParams cleared{};
    set_cleared(*dbias, cleared);
    cleared.number = params.batch;
    cleared.num_heads = params.num_heads;
    cleared.rows = params.seqlen_q;
    cleared.columns = params.seqlen_k;
    cleared.low = params.low;
    cleared.high = params.high;
    if (has_mask) {
      cleared.mask_lists = static_cast<const int32_t*>(mask[1].const_data_ptr());
      cleared.heads_per_mask = params.heads_per_mask;
      cleared.mask_heads = params.mask_heads;
      cleared.mask_has_batch = params.mask_has_batch;
    }
    check(launch_clear_dbias(cleared, device.stream), kName, "launching the kernel that clears dbias");
  }
  Tensor ordered_lists;
  if (is_ordered && has_mask) ordered_lists = order_lists(mask, q, tiles_q, tiles_k, params, device.stream);
  check(instance.rows(rows, device.stream), kName, "launching the kernel of the rows");
  if (writer == DbiasWriter::kSharedDbias) {
    float* const slots = of_dbias.has_slots ? start + slots_at : nullptr;
    int* const dbias_counter = reinterpret_cast<int*>(start + dbias_counter_at);
    const SharedDbiasCall shared{dout,         q,     k,             v,   *bias, mask,          params.lse,
                                 params.delta, slots, dbias_counter, low, high,  softmax_scale, softcap, nullptr,
                                 params.dropout};
    store_shared_dbias(kName, instance.shared_dbias, device, sizes, shared, of_dbias, *dbias);
  }
  if (!runs_main_kernel) return;
  check(instance.main(params, form, of_mask, block_n, turns_dq, blocks, device.stream), kName, "launching the kernel");

  Postprocess postprocess;
  postprocess.params.places = rows.places;
  postprocess.params.has_group = params.has_group;
  if (turns_dq) {
    postprocess.add_turned(*dq, params.dq_sums, pairs, rows_of_head, softmax_scale);
  } else {
    postprocess.add(dq, params.dq_sums, 0, pairs, rows_of_head, dq_columns, softmax_scale, false);
  }
  postprocess.add(dk, params.dk_sums, first_summed_pair, summed_pairs, blocks_k * block_n, dq_columns, softmax_scale,
                  params.batch_is_inner, /*is_of_keys=*/true);
  const double of_dv = params.dropout.key != nullptr ? params.dropout.scale : 1.0;
  postprocess.add(dv, params.dv_sums, first_summed_pair, summed_pairs, blocks_k * block_n, dv_columns, of_dv,
                  params.batch_is_inner, /*is_of_keys=*/true);
  if (postprocess.tiles > 0 || turns_dq)
    check(instance.sums(postprocess.params, device.stream), kName, "launching the kernel of the sums");
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(flash_dmattn, m) {
  m.def(
      "cuda_backward_kernel(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor[] mask, Tensor? key_order, "
      "Tensor? bias, Tensor out, Tensor lse, Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv, Tensor(d!)? dbias, "
      "Tensor(e!)? dbias_sums, Tensor(f!)? delta, int low, int high, float softmax_scale, float softcap, "
      "bool deterministic, int num_dbias_chunks, Tensor? dropout_key, float dropout_p) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CUDA, m) { m.impl("cuda_backward_kernel", TORCH_BOX(&backward)); }
STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CPU, m) { m.impl("cuda_backward_kernel", TORCH_BOX(&backward)); }

}  // namespace flash_dmattn
