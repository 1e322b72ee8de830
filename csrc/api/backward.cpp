// The backward operators, of dense calls and of calls with sequences: turn the tensors from flash_dmattn/backends/cuda into
// params and launch the kernels.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include <cuda_runtime_api.h>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "../sm90/backward/launch.h"
#include "backward_schedule.h"
#include "bias.h"
#include "build_instances.h"  // written by the build
#include "call.h"
#include "common.h"
#include "sections.h"
#include "sequences.h"
#include "shared_dbias.h"
#include "tensor_map.h"
#include "tile_scheduler.h"

namespace flash_dmattn {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A section if the order of additions is fixed: more heads at a time mean fewer key blocks of one head that wait for
// each other. Under a mask at least kOrderedHeads; without one, where blocks come in their order, as many as
// kOrderedBytes of L2 hold.
constexpr int64_t kOrderedHeads = 8, kOrderedBytes = 36 << 20;

// The kernels of one dtype and one pair of head dims; `rows`, `few_keys` and `sums` depend on the dtype only.
struct KernelInstance {
  ScalarType dtype;
  int64_t head_dim, head_dim_v;
  decltype(&launch_backward_main<__half, 64, 64>) main;
  decltype(&launch_backward_rows<__half>) rows;
  decltype(&launch_few_keys<__half>) few_keys;
  decltype(&launch_backward_sums<__half>) sums;
  SharedDbiasKernels shared_dbias;
};

template <class Element>
constexpr KernelInstance instance_of(ScalarType dtype, int64_t head_dim, int64_t head_dim_v,
                                     decltype(KernelInstance::main) main, decltype(SharedDbiasKernels::sum) sum) {
  return {dtype,
          head_dim,
          head_dim_v,
          main,
          &launch_backward_rows<Element>,
          &launch_few_keys<Element>,
          &launch_backward_sums<Element>,
          {sum, &launch_add_chunks<Element>}};
}

#define FLASH_DMATTN_INSTANCE(element, scalar, d, dv)                                        \
  instance_of<element>(ScalarType::scalar, d, dv, &launch_backward_main<element, d, dv>,     \
                       &launch_shared_dbias<element, d, dv>),
constexpr std::initializer_list<KernelInstance> kInstances{FLASH_DMATTN_INSTANCES(FLASH_DMATTN_INSTANCE)};
#undef FLASH_DMATTN_INSTANCE
#define FLASH_DMATTN_INSTANCE(element, scalar, d, dv)                                        \
  instance_of<element>(ScalarType::scalar, d, dv, &launch_backward_sequences<element, d, dv>, \
                       &launch_shared_dbias_sequences<element, d, dv>),
constexpr std::initializer_list<KernelInstance> kSequencesInstances{
    FLASH_DMATTN_SEQUENCES_INSTANCES(FLASH_DMATTN_INSTANCE)};
#undef FLASH_DMATTN_INSTANCE

// Arguments of the operators.
struct BackwardArguments {
  const char* op;
  const Tensor& dout;
  const std::optional<Tensor>& dlse;
  const Tensor &q, &k, &v;
  const std::optional<Tensor>& bias;
  const Tensor &out, &lse;
  const std::optional<Tensor>&dq, &dk, &dv, &dbias, &dbias_sums, &delta;
  double softmax_scale;
  int64_t num_dbias_chunks;
  const SequenceCall* sequences = nullptr;  // null in a dense call; the members below are for dense calls alone
  std::vector<Tensor> mask{};
  std::optional<Tensor> key_order{};
  int64_t low = 0, high = 0;
  double softcap = 0;
  bool deterministic = false;
  std::optional<Tensor> dropout_key{};
  double dropout_p = 0;
};

template <class T = void>
T* data_of(const std::optional<Tensor>& x) {
  return x.has_value() ? static_cast<T*>(x->mutable_data_ptr()) : nullptr;
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

// A call, and what its steps find out; `run` has their order.
struct BackwardPass {
  const BackwardArguments& a;
  const char* const op = a.op;
  const SequenceCall* const sequences = a.sequences;
  const Sizes sizes = sizes_of(op, a.q, a.k, a.v);
  const KernelInstance& instance =
      sequences == nullptr ? instance_for(op, kInstances, "gradients of ", a.q.scalar_type(), sizes)
                           : instance_for(op, kSequencesInstances, "sequences of ", a.q.scalar_type(), sizes);
  const bool has_mask = !a.mask.empty(), is_banded = sequences == nullptr && has_band(sizes, a.low, a.high);
  const int64_t tiles_q = ceil_div(sizes.seqlen_q, kTile), tiles_k = ceil_div(sizes.seqlen_k, kTile);
  const int64_t pairs_k = sizes.batch * sizes.num_heads_k;
  const int64_t entries = sequences == nullptr ? sizes.batch : sequences->bounds.size(0);  // or sequences
  const int64_t dq_columns = accumulated(instance.head_dim), dv_columns = accumulated(instance.head_dim_v);

  BackwardParams params{};
  BackwardRowsParams rows{};
  SequenceParams& of = params.sequences;
  MaskForm mask_form = MaskForm::kNone;
  BackwardBias form = BackwardBias::kNone;
  BackwardCall call{};
  DbiasWriter writer = DbiasWriter::kNone;
  BackwardSchedule schedule{};
  DbiasSchedule dbias_schedule{};
  bool turns_dq = false, runs_main_kernel = false;
  int num_sms = 0, clusters = 0, block_m = 0, blocks = 0;
  cudaStream_t stream = nullptr;
  // Pairs of a batch entry and a query head, of a call with sequences query heads, and the padded rows of each.
  int64_t pairs = 0, rows_of_pair = 0;
  Tensor works, memory, ordered_lists;
  float* slots = nullptr;
  int* dbias_counter = nullptr;

  static int64_t accumulated(int64_t head_dim) {
    const int64_t columns = accum_columns(static_cast<int>(head_dim));
    return ceil_div(head_dim, columns) * columns;
  }

  // The sizes of the scores that dbias, of a bias per query and key, has places for.
  Sizes dbias_sizes() const {
    Sizes of_dbias = sizes;
    if (sequences != nullptr) {
      of_dbias.batch = entries;
      of_dbias.seqlen_q = a.bias->size(2);
      of_dbias.seqlen_k = a.bias->size(3);
    }
    return of_dbias;
  }

  // --- arguments --------------------------------------------------------------------------------------------------

  void check_arguments() {
    CHECK_FOR(op, sizes.head_dim_v <= kMaxRowColumns, "rows of out have ", sizes.head_dim_v, " columns, more than ",
              kMaxRowColumns);
    CHECK_FOR(op, a.dq.has_value() || !(a.key_order.has_value() && a.deterministic),
              "dq is needed with key_order in a fixed order: its semaphores order the sums of dk and dv");
    CHECK_FOR(op, a.bias.has_value() || !(a.dbias.has_value() || a.dbias_sums.has_value()),
              "there is no bias for a dbias");
    if (sequences != nullptr) {
      of = sequence_params(op, *sequences, sizes, a.bias, a.q);
    } else {
      check_counts(sizes.batch * sizes.num_heads * tiles_q, pairs_k * tiles_k);
    }
    describe_rows();
    mask_form = checked_mask_form(op, a.mask, true, sizes, a.q);
    if (a.bias.has_value() && sequences == nullptr) check_bias(op, *a.bias, sizes, a.q);
    if (a.dbias.has_value()) {
      const Sizes of_dbias = dbias_sizes();
      check_dims(op, *a.dbias, "dbias", {a.bias->size(0), a.bias->size(1), of_dbias.seqlen_q, of_dbias.seqlen_k}, a.q);
      check_dtype(op, *a.dbias, "dbias", a.q.scalar_type());
    }
    if (a.dbias_sums.has_value()) {
      const bool has_all_keys = sequences == nullptr || of.bias_packs_keys;
      check_array(op, *a.dbias_sums, "dbias_sums",
                  {of.bias_packs_keys ? 1 : entries, sizes.num_heads, has_all_keys ? sizes.seqlen_k : of.most_k},
                  ScalarType::Float, a.q);
    }
  }

  void check_counts(int64_t tiles_of_queries, int64_t tiles_of_keys) const {
    CHECK_FOR(op, tiles_of_queries <= kMaxInt / 4, "there are more than 2^29 tiles of queries");
    CHECK_FOR(op, tiles_of_keys <= kMaxInt / 4, "there are more than 2^29 tiles of keys");
  }

  // Checks the arguments that have a row for each query, and the gradients that have rows of q, k and v.
  void describe_rows() {
    const auto [batch, seqlen_q, seqlen_k, heads, heads_k, head_dim, head_dim_v] = sizes;
    const ScalarType dtype = a.q.scalar_type();
    check_array(op, a.out, "out", {batch, seqlen_q, heads, head_dim_v}, dtype, a.q);
    check_array(op, a.lse, "lse", {batch, heads, seqlen_q}, ScalarType::Float, a.q);
    check_dims(op, a.dout, "dout", {batch, seqlen_q, heads, head_dim_v}, a.q);
    check_dtype(op, a.dout, "dout", dtype);
    if (a.dq.has_value()) check_array(op, *a.dq, "dq", {batch, seqlen_q, heads, head_dim}, dtype, a.q);
    if (a.dk.has_value()) check_array(op, *a.dk, "dk", {batch, seqlen_k, heads_k, head_dim}, dtype, a.q);
    if (a.dv.has_value()) check_array(op, *a.dv, "dv", {batch, seqlen_k, heads_k, head_dim_v}, dtype, a.q);
    // Packed rows have one entry, which no stride leads to.
    const bool has_entries = sequences == nullptr || !sequences->is_packed;
    rows.out = a.out.const_data_ptr();
    rows.dout = rows_of(a.dout);
    rows.lse = static_cast<const float*>(a.lse.const_data_ptr());
    if (!has_entries) rows.dout.stride_b = 0;
    if (a.dlse.has_value()) {
      check_dims(op, *a.dlse, "dlse", {batch, heads, seqlen_q}, a.q);
      check_dtype(op, *a.dlse, "dlse", ScalarType::Float);
      rows.dlse = {static_cast<const float*>(a.dlse->const_data_ptr()), has_entries ? a.dlse->stride(0) : 0,
                   a.dlse->stride(1), a.dlse->stride(2)};
    }
    set_sizes(sizes, rows);
    if (a.delta.has_value()) check_array(op, *a.delta, "delta", {batch, heads, seqlen_q}, ScalarType::Float, a.q);
    rows.row_delta = data_of<float>(a.delta);  // where the caller gets delta of every row
  }

  // --- dbias and bias ---------------------------------------------------------------------------------------------

  void choose_writer(int device) {
    const Sizes of_call = a.dbias.has_value() ? dbias_sizes() : sizes;
    call.batch = of_call.batch;
    call.num_heads = sizes.num_heads;
    call.num_heads_k = sizes.num_heads_k;
    call.seqlen_q = of_call.seqlen_q;
    call.seqlen_k = of_call.seqlen_k;
    call.head_dim = instance.head_dim;
    call.head_dim_v = instance.head_dim_v;
    if (a.dbias.has_value()) {
      call.dbias_batch = a.dbias->size(0);
      call.dbias_heads = a.dbias->size(1);
    }
    if (has_mask) call.mask_batch = a.mask[0].size(0);
    call.has_key_order = a.key_order.has_value();
    call.is_banded = is_banded;
    call.has_softcap = a.softcap > 0 || a.dropout_key.has_value();  // neither has kernels of two key tiles or of clusters
    call.is_deterministic = a.deterministic;
    call.needs_dq = a.dq.has_value();
    call.needs_dk_or_dv = a.dk.has_value() || a.dv.has_value();
    if (sequences == nullptr) {
      writer = dbias_writer(call);
    } else if (a.dbias.has_value()) {
      // The main kernel, if dbias has a place of its own for each score.
      const bool has_places = a.dbias->size(1) == sizes.num_heads &&
                              (of.bias_packs_queries || a.dbias->size(0) == entries) &&
                              a.dbias->size(3) % kDbiasColumns == 0;
      writer = has_places ? DbiasWriter::kMain : DbiasWriter::kSharedDbias;
    }
    if (writer == DbiasWriter::kClusters) {
      static_assert(kMaxCluster >= 8);
      check(count_clusters(device, static_cast<int>(sizes.batch), clusters), op, "asking for clusters");
      if (clusters == 0) writer = DbiasWriter::kSharedDbias;
    }
    CHECK_FOR(op,
              writer == DbiasWriter::kNone || (sequences == nullptr && writer == DbiasWriter::kMain) ||
                  a.dbias->is_contiguous(),
              "dbias needs to be contiguous");
    CHECK_FOR(op, writer != DbiasWriter::kSharedDbias || !(of.bias_packs_queries || of.bias_packs_keys),
              "heads share dbias of packed queries");
    runs_main_kernel = call.needs_dq || call.needs_dk_or_dv || a.dbias_sums.has_value() ||
                       (a.dbias.has_value() && writer != DbiasWriter::kSharedDbias);
    if (writer == DbiasWriter::kSharedDbias) dbias_schedule = schedule_dbias(call, a.num_dbias_chunks, num_sms);
  }

  bool has_bias_tiles() const { return form != BackwardBias::kNone && form != BackwardBias::kVector; }

  // Chooses how the main kernel reads the bias. A bias per query only changes lse, which the kernel of the rows handles.
  void describe_bias() {
    if (!a.bias.has_value()) return;
    const Tensor& bias = *a.bias;
    const bool is_per_score = !is_broadcast(bias, 2) && !is_broadcast(bias, 3);
    if (a.dbias_sums.has_value()) {
      CHECK_FOR(op, is_broadcast(bias, 2),
                "dbias_sums are of a bias of one value per key, and bias has one per query");
      form = BackwardBias::kVector;
    } else if (!is_per_score) {
      CHECK_FOR(op, writer == DbiasWriter::kNone, "dbias is of a bias of one value per query and key");
      form = is_broadcast(bias, 3) ? BackwardBias::kNone : BackwardBias::kVector;
    } else {
      CHECK_FOR(op, bias.scalar_type() == a.q.scalar_type(),
                "bias of one value per query and key needs the dtype of q");
      CHECK_FOR(op, sequences == nullptr || can_copy_tiles(bias, a.q),
                "bias per query and key needs rows that TMA can read, in the dtype of q");
      form = writer == DbiasWriter::kMain       ? BackwardBias::kTileStore
             : writer == DbiasWriter::kClusters ? BackwardBias::kTileSum
                                                : BackwardBias::kTile;
    }
    CHECK_FOR(op, mask_form != MaskForm::kIntervals || !has_bias_tiles(),
              "a bias per query and key needs bits of a mask");
    (form == BackwardBias::kNone ? rows.bias_values : params.bias_values) = bias_values(op, bias, sizes.num_heads);
  }

  // --- what is computed -------------------------------------------------------------------------------------------

  void describe_scores() {
    set_sizes(sizes, params);
    params.softmax_scale = static_cast<float>(a.softmax_scale);
    set_softcap(a.softmax_scale, a.softcap, params);
    CHECK_FOR(op, !(a.softcap > 0 && a.dropout_key.has_value()), "there is no kernel with dropout and a softcap");
    set_dropout(op, a.dropout_key, a.dropout_p, instance.head_dim, instance.head_dim_v, a.q, params);
    set_band(sizes, a.low, a.high, params);
    call.low = params.low;
    call.high = params.high;
    if (!has_mask) return;
    params.mask = mask_tiles(a.mask, a.mask[2], sizes);
    call.groups_share_mask = params.mask.heads.heads_per_mask % params.heads_per_group == 0;
    if (!a.key_order.has_value()) return;
    CHECK_FOR(op, mask_form == MaskForm::kIntervals && call.groups_share_mask,
              "key_order is of an interval mask that all heads of a group share");
    check_array(op, *a.key_order, "key_order", {a.mask[0].size(0), a.mask[0].size(1), sizes.seqlen_k}, ScalarType::Int,
                a.q);
    params.key_order = static_cast<const int32_t*>(a.key_order->const_data_ptr());
  }

  void describe_operands() {
    params.q = map_rows(op, a.q, "q", block_m, of);
    params.k = map_rows(op, a.k, "k", schedule.block_n, of);
    params.v = map_rows(op, a.v, "v", schedule.block_n, of);
    params.dout = map_rows(op, a.dout, "dout", block_m, of);
    if (has_bias_tiles()) params.bias = map_scores(op, *a.bias, "bias", block_m, of);
    if (form == BackwardBias::kTileStore) {
      // It may lie in a larger tensor, if its rows are whole pieces of 16 bytes.
      for (int dim = 0; dim < 3; ++dim) {
        CHECK_FOR(op, a.dbias->size(dim) == 1 || a.dbias->stride(dim) > 0, "dbias has one place for all of dim ", dim);
      }
      CHECK_FOR(op, a.dbias->size(3) % 8 == 0, "rows of dbias have ", a.dbias->size(3),
                " keys; they need a multiple of 8");
      params.dbias = map_scores(op, *a.dbias, "dbias", block_m, of);
    }
    params.dk = data_of(a.dk);
    params.dv = data_of(a.dv);
    params.dbias_sums = data_of<float>(a.dbias_sums);
    params.cluster = 1;
    if (writer == DbiasWriter::kClusters) {
      params.cluster = static_cast<int>(sizes.batch);
      params.summed_dbias = a.dbias->mutable_data_ptr();
    }
  }

  // --- work tiles -------------------------------------------------------------------------------------------------

  // Bytes of q, dout and the accumulators of dq in a row.
  int64_t row_bytes() const {
    return (sizes.head_dim + sizes.head_dim_v) * 2 + (a.dq.has_value() ? dq_columns * 4 : 0);
  }

  // The work tiles of a dense call, and how they are scheduled.
  void schedule_tiles() {
    call.shares_over_batch = shares_over_batch(params, has_bias_tiles(), has_mask);
    call.has_key_bias = form == BackwardBias::kVector;
    schedule = schedule_backward(call, writer, num_sms);
    turns_dq = has_turned_dq(instance.head_dim, instance.head_dim_v) && form == BackwardBias::kNone && !has_mask &&
               a.softcap <= 0 && !a.dropout_key.has_value() && a.dq.has_value() && !schedule.completes_dq &&
               !schedule.is_ordered && (!is_banded || shortens_rows(sizes, a.low, a.high)) &&
               mean_walk(call) >= kLeastTurnedWalk;
    block_m = turns_dq ? kTurnedBlockM : backward_block_m(instance.head_dim, instance.head_dim_v, schedule.block_n);
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
  Sections sections(int64_t count, int64_t heads) const {
    const bool is_ordered = schedule.is_ordered;
    const bool rows_shrink = !is_ordered && params.key_order == nullptr && shortens_rows(sizes, a.low, a.high);
    const int64_t work_bytes = heads * sizes.seqlen_q * row_bytes();
    const int64_t least_when_ordered = has_mask ? kOrderedHeads : std::max<int64_t>(kOrderedBytes / work_bytes, 2);
    const int64_t section =
        schedule.is_head_by_head ? 1 : std::max<int64_t>(kSectionBytes / work_bytes, is_ordered ? least_when_ordered : 1);
    // The tiles of a cluster are batch entries of the same head, so a section holds whole clusters. Where blocks decide, it
    // holds whole groups if it has room for one.
    const bool holds_groups = schedule.blocks_decide && heads == 1 && section >= params.heads_per_group;
    const int64_t together = holds_groups                       ? params.heads_per_group
                             : writer == DbiasWriter::kClusters ? sizes.batch
                                                                : 1;
    return sections_of(count, schedule.blocks_k * schedule.walk_parts, ceil_div(section, together) * together, together,
                       rows_shrink, num_sms);
  }

  // The work tiles of a call with sequences, and sections of key heads whose q, dout and sums of dq fit in L2.
  void list_tiles() {
    schedule.block_n = kTile;
    block_m = backward_block_m(instance.head_dim, instance.head_dim_v, kTile);
    const int64_t all_q = sizes.batch * sizes.seqlen_q, all_k = sizes.batch * sizes.seqlen_k;
    const int64_t tiles = most_blocks(entries, all_k, of.most_k, kTile), padded_tiles = all_q / kTile + entries;
    check_counts(padded_tiles * sizes.num_heads, tiles * sizes.num_heads_k);
    pairs = sizes.num_heads;
    rows_of_pair = padded_tiles * kTile;
    blocks = static_cast<int>(std::min<int64_t>(tiles * sizes.num_heads_k, num_sms));
    works = list_works(op, a.q, entries, true, kTile, tiles, padded_tiles, of, nullptr, stream);
    const int64_t head_bytes = all_q * row_bytes() * params.heads_per_group;
    of.section = static_cast<int>(std::clamp<int64_t>(kSectionBytes / head_bytes, 1, sizes.num_heads_k));
  }

  // --- memory -----------------------------------------------------------------------------------------------------

  // Scratch memory: lse in base 2 and delta, slots of dbias, then everything that starts as zeros.
  void allocate() {
    const bool is_ordered = schedule.is_ordered, is_shared = writer == DbiasWriter::kSharedDbias;
    const bool hands_out = schedule.blocks_decide || (schedule.tiles_differ && params.num_work_tiles > blocks);
    const bool needs_counter = sequences != nullptr || (runs_main_kernel && (is_ordered || hands_out));
    const bool sums_dq = a.dq.has_value() && !schedule.completes_dq;
    const int64_t padded_rows = pairs * rows_of_pair, blocks_q = padded_rows / block_m;
    const int64_t summed_rows = schedule.summed_pairs * schedule.blocks_k * schedule.block_n;
    const int64_t masks = schedule.blocks_decide ? (params.mask.heads.has_batch ? sizes.batch : 1) * params.mask.heads.mask_heads : 0;
    Scratch scratch;
    scratch.add(2 * padded_rows);
    const int64_t has_long_at = scratch.add(ceil_div(masks, 4));
    const int64_t has_group_at =
        scratch.add(schedule.blocks_decide ? ceil_div(pairs_k * tiles_k * (kTile / kAccumRows), 4) : 0);
    const int64_t slots_at =
        scratch.add(dbias_schedule.has_slots ? dbias_schedule.chunks * dbias_schedule.slot_floats : 0);
    const int64_t dbias_counter_at = scratch.add(is_shared ? 1 : 0);
    const int64_t counter_at = scratch.add(needs_counter ? 1 : 0);
    const int64_t dq_semaphore_at = scratch.add(is_ordered ? blocks_q : 0);
    const int64_t dkv_semaphore_at = scratch.add(is_ordered ? schedule.summed_pairs * schedule.blocks_k : 0);
    const int64_t dq_at = scratch.add(sums_dq ? padded_rows * dq_columns : 0);
    const int64_t keys_at = scratch.length;
    const int64_t dk_at = scratch.add(a.dk.has_value() ? summed_rows * dq_columns : 0);
    const int64_t dv_at = scratch.add(a.dv.has_value() ? summed_rows * dv_columns : 0);
    memory = empty(a.q, {scratch.length}, ScalarType::Float);
    float* const start = static_cast<float*>(memory.mutable_data_ptr());
    rows.lse_log2 = start;
    rows.delta = start + padded_rows;
    rows.padded_rows = static_cast<int>(rows_of_pair);
    rows.cleared = start + dbias_counter_at;
    rows.sequences = of;
    const bool clears_some = params.key_order != nullptr || schedule.blocks_decide;  // of dk's and dv's sums
    rows.zeros = ((clears_some ? keys_at : scratch.length) - dbias_counter_at) / 4;
    params.lse = rows.lse_log2;
    params.delta = rows.delta;
    if (dbias_schedule.has_slots) slots = start + slots_at;
    dbias_counter = reinterpret_cast<int*>(start + dbias_counter_at);
    if (needs_counter) params.tile_counter = reinterpret_cast<int*>(start + counter_at);
    if (is_ordered) params.dq_semaphore = reinterpret_cast<int*>(start + dq_semaphore_at);
    if (sums_dq) params.dq_sums = start + dq_at;
    if (schedule.completes_dq) params.dq = a.dq->mutable_data_ptr();
    const bool sums_dk = a.dk.has_value() && schedule.summed_pairs > 0;
    const bool sums_dv = a.dv.has_value() && schedule.summed_pairs > 0;
    if (sums_dk) params.dk_sums = start + dk_at;
    if (sums_dv) params.dv_sums = start + dv_at;
    if (is_ordered && (sums_dk || sums_dv)) params.dkv_semaphore = reinterpret_cast<int*>(start + dkv_semaphore_at);
    MaskHeads key_heads = params.mask.heads;
    key_heads.heads_per_mask /= params.heads_per_group;
    if (params.key_order != nullptr) {
      rows.places = {params.key_order, params.mask.bounds, params.seqlen_k, static_cast<int>(tiles_k), key_heads};
    }
    if (schedule.blocks_decide) {
      auto* const has_group = reinterpret_cast<uint8_t*>(start + has_group_at);
      auto* const has_long = reinterpret_cast<uint8_t*>(start + has_long_at);
      params.has_group = has_group;
      params.has_long = has_long;
      params.masks = static_cast<int>(masks);
      rows.group_walks = {has_group, has_long, params.masks, params.mask.lists, static_cast<int>(tiles_k),
                          static_cast<int>(tiles_q), key_heads, static_cast<int>(schedule.short_walk),
                          params.full_group_pairs, static_cast<int>(schedule.share)};
    }
    if (clears_some) {
      rows.sums[0] = params.dk_sums;
      rows.sums[1] = params.dv_sums;
      rows.floats[0] = static_cast<int>(kAccumRows * dq_columns);
      rows.floats[1] = static_cast<int>(kAccumRows * dv_columns);
      rows.row_blocks = static_cast<int>(schedule.blocks_k * schedule.block_n / kAccumRows);
      rows.num_heads_k = static_cast<int>(sizes.num_heads_k);
      rows.batch_is_inner = params.batch_is_inner;
    }
  }

  // --- kernels ----------------------------------------------------------------------------------------------------

  // Writes zeros where the main kernel stores no tile of dbias.
  void clear_dbias() const {
    const bool leaves_some = has_mask || is_banded || sequences != nullptr;
    // Before the first kernel, not between two: a memset would keep the next kernel from starting early.
    if (clusters > 0 && leaves_some) {
      const size_t bytes = static_cast<size_t>(a.dbias->numel()) * a.dbias->element_size();
      check(cudaMemsetAsync(params.summed_dbias, 0, bytes, stream), op, "clearing dbias");
    }
    if (writer != DbiasWriter::kMain || !leaves_some) return;
    ClearDbiasParams cleared{};
    cleared.x = a.dbias->mutable_data_ptr();
    cleared.stride_b = of.bias_packs_queries ? 0 : a.dbias->stride(0) / 8;
    cleared.stride_h = a.dbias->stride(1) / 8;
    cleared.stride_q = a.dbias->stride(2) / 8;
    cleared.number = static_cast<int>(entries);
    cleared.num_heads = params.num_heads;
    cleared.rows = static_cast<int>(a.dbias->size(2));
    cleared.columns = static_cast<int>(a.dbias->size(3));
    cleared.low = params.low;
    cleared.high = params.high;
    cleared.sequences = of;
    cleared.packs_rows = of.bias_packs_queries;
    if (has_mask) cleared.mask = mask_tiles(a.mask, a.mask[1], sizes);
    check(launch_clear_dbias(cleared, stream), op, "launching the kernel that clears dbias");
  }

  // Makes params read column lists in ascending order, with each tile's predecessors.
  void order_lists() {
    OrderListsParams order{};
    order.row_lists = static_cast<const int32_t*>(a.mask[1].const_data_ptr());
    order.col_lists = static_cast<const int32_t*>(a.mask[2].const_data_ptr());
    order.num_lists = a.mask[2].size(0) * a.mask[2].size(1) * tiles_k;
    order.tiles_q = static_cast<int>(tiles_q);
    order.tiles_k = static_cast<int>(tiles_k);
    ordered_lists = empty(a.q, {order.num_lists * (2 + tiles_q + tiles_q)}, ScalarType::Int);
    order.ordered = static_cast<int32_t*>(ordered_lists.mutable_data_ptr());
    order.predecessors = order.ordered + order.num_lists * (2 + tiles_q);
    check(launch_order_lists(order, stream), op, "launching the kernel of the lists");
    params.mask.lists = order.ordered;
    params.mask_predecessors = order.predecessors;
  }

  // Sums delta of sequences of few keys.
  void sum_delta() const {
    FewKeysParams few{};
    set_sizes(sizes, few);
    few.q = rows_of(a.q);
    few.k = rows_of(a.k);
    few.v = rows_of(a.v);
    few.dout = rows_of(a.dout);
    few.dlse = rows.dlse;
    few.lse = rows.lse_log2;
    few.delta = rows.delta;
    few.row_delta = rows.row_delta;
    few.bias_values = params.bias_values;
    few.softmax_scale = params.softmax_scale;
    few.sequences = of;
    check(instance.few_keys(few, stream), op, "launching the kernel of few keys");
  }

  // Converts what was summed to results.
  void store_sums() const {
    BackwardSumsParams sums{};
    sums.sequences = of;
    sums.places = rows.places;
    sums.has_group = params.has_group;
    const auto describe = [](BackwardSumsParams::Result& it, const Tensor& result, const float* from,
                             int64_t rows_per_pair, double factor) {
      it.sums = from;
      it.out = result.mutable_data_ptr();
      it.batch = static_cast<int>(result.size(0));
      it.seqlen = static_cast<int>(result.size(1));
      it.num_heads = static_cast<int>(result.size(2));
      it.rows_per_pair = static_cast<int>(rows_per_pair);
      it.columns = static_cast<int>(result.size(3));
      it.factor = static_cast<float>(factor);
    };
    int64_t tiles = 0;
    // Adds nothing if the result is not wanted or not accumulated (`from` is null).
    const auto add = [&](BackwardSumsParams::Result& it, const std::optional<Tensor>& result, const float* from,
                         bool is_of_keys, int64_t columns, double factor) {
      if (from != nullptr) {
        const int64_t rows_per_pair = is_of_keys ? schedule.blocks_k * schedule.block_n : rows_of_pair;
        describe(it, *result, from, rows_per_pair, factor);
        it.tile_columns = accum_columns(static_cast<int>(columns));
        it.panels = static_cast<int>(columns) / it.tile_columns;
        tiles += (is_of_keys ? schedule.summed_pairs : pairs) * (rows_per_pair / kAccumRows) * it.panels;
        it.first_pair = is_of_keys ? params.first_summed_pair : 0;
        it.batch_is_inner = is_of_keys && params.batch_is_inner;
        it.is_by_place = is_of_keys && rows.places.order != nullptr;
        it.lacks_groups = is_of_keys && params.has_group != nullptr;
      }
      it.tiles = tiles;
    };
    if (turns_dq) {  // a kernel of its own converts it
      describe(sums.turned, *a.dq, params.dq_sums, rows_of_pair, a.softmax_scale);
      sums.turned.tiles = pairs * (rows_of_pair / kTurnedBlockM) * 2;
    }
    add(sums.results[0], a.dq, turns_dq ? nullptr : params.dq_sums, false, dq_columns, a.softmax_scale);
    add(sums.results[1], a.dk, params.dk_sums, true, dq_columns, a.softmax_scale);
    const double of_dv = params.dropout.key != nullptr ? params.dropout.scale : 1.0;
    add(sums.results[2], a.dv, params.dv_sums, true, dv_columns, of_dv);
    if (tiles > 0 || turns_dq) check(instance.sums(sums, stream), op, "launching the kernel of the sums");
  }

  void run() {
    check_arguments();
    const CurrentDevice device(op, a.q);  // before the TMA descriptors, whose encoder needs its context
    stream = device.stream;
    num_sms = sm_count(op, device.index);
    choose_writer(device.index);
    describe_bias();
    describe_scores();
    if (sequences == nullptr) {
      schedule_tiles();
    } else {
      list_tiles();
    }
    describe_operands();
    allocate();

    clear_dbias();
    if (schedule.is_ordered && has_mask) order_lists();
    check(instance.rows(rows, stream), op, "launching the kernel of the rows");
    if (sequences != nullptr) sum_delta();
    if (writer == DbiasWriter::kSharedDbias) {
      const SharedDbiasCall shared{a.dout, a.q, a.k, a.v, *a.bias, a.mask, params.lse, params.delta, slots,
                                   dbias_counter, a.low, a.high, a.softmax_scale, a.softcap, of, params.dropout};
      store_shared_dbias(op, instance.shared_dbias, device, dbias_sizes(), shared, dbias_schedule, *a.dbias);
    }
    if (!runs_main_kernel) return;
    check(instance.main(params, form, mask_form, schedule.block_n, turns_dq, blocks, stream), op,
          "launching the kernel");
    store_sums();
    if (sequences == nullptr) return;
    if (a.dq.has_value()) fill_gaps(op, *a.dq, false, nullptr, of, entries, stream);
    if (a.dk.has_value()) fill_gaps(op, *a.dk, true, nullptr, of, entries, stream);
    if (a.dv.has_value()) fill_gaps(op, *a.dv, true, nullptr, of, entries, stream);
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
void backward_kernel(Tensor dout, std::optional<Tensor> dlse, Tensor q, Tensor k, Tensor v, std::vector<Tensor> mask,
                     std::optional<Tensor> key_order, std::optional<Tensor> bias, Tensor out, Tensor lse,
                     std::optional<Tensor> dq, std::optional<Tensor> dk, std::optional<Tensor> dv,
                     std::optional<Tensor> dbias, std::optional<Tensor> dbias_sums, std::optional<Tensor> delta,
                     int64_t low, int64_t high, double softmax_scale, double softcap, bool deterministic,
                     int64_t num_dbias_chunks, std::optional<Tensor> dropout_key, double dropout_p) {
  const BackwardArguments arguments{"cuda_backward_kernel", dout, dlse, q, k, v, bias, out, lse, dq, dk, dv, dbias,
                                    dbias_sums, delta, softmax_scale, num_dbias_chunks, nullptr, std::move(mask),
                                    std::move(key_order), low, high, softcap, deterministic, std::move(dropout_key),
                                    dropout_p};
  BackwardPass{arguments}.run();
}

// Writes the gradients that are given, all contiguous and of all rows. dbias, of a bias per query and key, is stored
// whole, by the main kernel if it has one for each sequence and query head. dbias_sums, of a bias per key, is fp32,
// (1, Hq, Tk) of packed keys or (S, Hq, most_k), and starts as zeros. delta has the shape of lse; alone it
// takes no main kernel. The other arguments are those of the forward operator.
void backward_sequences(Tensor dout, std::optional<Tensor> dlse, Tensor q, Tensor k, Tensor v, Tensor bounds,
                        std::optional<Tensor> bias, Tensor out, Tensor lse, std::optional<Tensor> dq,
                        std::optional<Tensor> dk, std::optional<Tensor> dv, std::optional<Tensor> dbias,
                        std::optional<Tensor> dbias_sums, std::optional<Tensor> delta, bool is_packed,
                        int64_t bias_packing, int64_t most_q, int64_t most_k, int64_t left, int64_t right,
                        double softmax_scale, int64_t num_dbias_chunks) {
  const std::optional<Tensor> no_table;
  const SequenceCall sequences{bounds, no_table, is_packed, bias_packing, most_q, most_k, left, right};
  const BackwardArguments arguments{"cuda_backward_sequences", dout, dlse, q, k, v, bias, out, lse, dq, dk, dv, dbias,
                                    dbias_sums, delta, softmax_scale, num_dbias_chunks, &sequences};
  BackwardPass{arguments}.run();
}

template <class Library>
void implement(Library& m) {
  m.impl("cuda_backward_kernel", TORCH_BOX(&backward_kernel));
  m.impl("cuda_backward_sequences", TORCH_BOX(&backward_sequences));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(flash_dmattn, m) {
  m.def(
      "cuda_backward_kernel(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor[] mask, Tensor? key_order, "
      "Tensor? bias, Tensor out, Tensor lse, Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv, Tensor(d!)? dbias, "
      "Tensor(e!)? dbias_sums, Tensor(f!)? delta, int low, int high, float softmax_scale, float softcap, "
      "bool deterministic, int num_dbias_chunks, Tensor? dropout_key, float dropout_p) -> ()");
  m.def(
      "cuda_backward_sequences(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor bounds, Tensor? bias, "
      "Tensor out, Tensor lse, Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv, Tensor(d!)? dbias, "
      "Tensor(e!)? dbias_sums, Tensor(f!)? delta, bool is_packed, int bias_packing, int most_q, int most_k, int left, "
      "int right, float softmax_scale, int num_dbias_chunks) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CUDA, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CPU, m) { implement(m); }

}  // namespace flash_dmattn
