// The backward operator of calls with sequences: turns the tensors from flash_dmattn/backends/cuda/sequences.py into
// params and launches the kernels.
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
#include "sequences.h"
#include "shared_dbias.h"
#include "tensor_map.h"
#include "tile_scheduler.h"

namespace flash_dmattn {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr const char* kName = "cuda_backward_sequences";

struct KernelInstance {
  decltype(&launch_backward_sequences<__half, 64, 64>) main;
  decltype(&launch_backward_rows<__half>) rows;
  decltype(&launch_few_keys<__half>) few_keys;
  decltype(&launch_backward_sums<__half>) sums;
  SharedDbiasKernels shared_dbias;
  int64_t head_dim, head_dim_v;
};

// The smallest kernel instance whose head dims hold those of the call.
KernelInstance instance_for(ScalarType dtype, int64_t head_dim, int64_t head_dim_v) {
#define FLASH_DMATTN_INSTANCE(element, scalar, d, dv)                     \
  if (dtype == ScalarType::scalar && head_dim <= d && head_dim_v <= dv) { \
    return {&launch_backward_sequences<element, d, dv>,                   \
            &launch_backward_rows<element>,                               \
            &launch_few_keys<element>,                                    \
            &launch_backward_sums<element>,                               \
            {&launch_shared_dbias_sequences<element, d, dv>,              \
             &launch_add_chunks<element>},                                \
            d,                                                            \
            dv};                                                          \
  }
  FLASH_DMATTN_SEQUENCES_INSTANCES(FLASH_DMATTN_INSTANCE)
#undef FLASH_DMATTN_INSTANCE
  CHECK_ARGUMENT(false, "the extension was not built for sequences of head dims ", head_dim, " and ", head_dim_v,
                 " (v) of this dtype");
  return {};
}

FewKeysParams::Rows rows_of(const Tensor& x) { return {x.const_data_ptr(), x.stride(0), x.stride(1), x.stride(2)}; }

// What sums delta of sequences of few keys.
FewKeysParams describe_few_keys(const BackwardRowsParams& rows, const BackwardParams& params, const Tensor& q,
                                const Tensor& k, const Tensor& v, const Tensor& dout) {
  FewKeysParams few{};
  few.q = rows_of(q);
  few.k = rows_of(k);
  few.v = rows_of(v);
  few.dout = rows_of(dout);
  few.dlse = rows.dlse;
  few.dlse_stride_b = rows.dlse_stride_b;
  few.dlse_stride_h = rows.dlse_stride_h;
  few.dlse_stride_q = rows.dlse_stride_q;
  few.lse = rows.lse_log2;
  few.delta = rows.delta;
  few.row_delta = rows.row_delta;
  few.bias_values = params.bias_values;
  few.bias_stride_b = params.bias_stride_b;
  few.bias_stride_h = params.bias_stride_h;
  few.bias_stride_q = params.bias_stride_q;
  few.bias_stride_k = params.bias_stride_k;
  few.bias_dtype = params.bias_dtype;
  few.heads_per_bias = params.heads_per_bias;
  few.bias_has_batch = params.bias_has_batch;
  few.num_heads = params.num_heads;
  few.heads_per_group = params.heads_per_group;
  few.head_dim = params.head_dim;
  few.head_dim_v = params.head_dim_v;
  few.softmax_scale = params.softmax_scale;
  few.sequences = params.sequences;
  return few;
}

// Writes the gradients that are given, all contiguous and of all rows. dbias, of a bias per query and key, is stored
// whole, by the main kernel if it has one for each sequence and query head. dbias_sums, of a bias per key, is fp32,
// (1, Hq, Tk) of packed keys or (S, Hq, most_k), and starts as zeros. delta has the shape of lse; alone it
// takes no main kernel. The other arguments are those of the forward operator.
void backward(Tensor dout, std::optional<Tensor> dlse, Tensor q, Tensor k, Tensor v, Tensor bounds,
              std::optional<Tensor> bias, Tensor out, Tensor lse, std::optional<Tensor> dq, std::optional<Tensor> dk,
              std::optional<Tensor> dv, std::optional<Tensor> dbias, std::optional<Tensor> dbias_sums,
              std::optional<Tensor> delta, bool is_packed, int64_t bias_packing, int64_t most_q, int64_t most_k,
              int64_t left, int64_t right, double softmax_scale, int64_t num_dbias_chunks) {
  const Sizes sizes = sizes_of(kName, q, k, v);
  const KernelInstance instance = instance_for(q.scalar_type(), sizes.head_dim, sizes.head_dim_v);
  BackwardParams params{};
  params.sequences = sequence_params(kName, {bounds, is_packed, bias_packing, most_q, most_k, left, right}, sizes, bias, q);
  SequenceParams& of = params.sequences;
  const int64_t number = bounds.size(0);
  if (dbias.has_value() && bias.has_value()) {
    check_array(kName, *dbias, "dbias", {bias->size(0), bias->size(1), bias->size(2), bias->size(3)}, q.scalar_type(), q);
  }
  if (dbias_sums.has_value()) {
    const bool packs_keys = bias_packing == kPackedKeys;
    check_array(kName, *dbias_sums, "dbias_sums",
                {packs_keys ? 1 : number, sizes.num_heads, packs_keys ? sizes.seqlen_k : of.most_k}, ScalarType::Float, q);
  }
  // Whether dbias has a place of its own for each score.
  const bool stores_dbias = dbias.has_value() && dbias->size(1) == sizes.num_heads &&
                            (bias_packing == kPackedQueries || dbias->size(0) == number) &&
                            dbias->size(3) % kDbiasColumns == 0;
  const bool shares_dbias = dbias.has_value() && !stores_dbias;
  const bool runs_main_kernel = dq.has_value() || dk.has_value() || dv.has_value() || stores_dbias ||
                                dbias_sums.has_value();
  BackwardRowsParams rows = describe_rows(kName, sizes, q, out, dout, lse, dlse, delta, dq, dk, dv);
  set_sizes(sizes, params);
  params.head_dim = static_cast<int>(sizes.head_dim);
  params.softmax_scale = static_cast<float>(softmax_scale);
  params.cluster = 1;

  BackwardBias form = BackwardBias::kNone;
  bool is_per_query = false;
  if (bias.has_value()) {
    is_per_query = is_broadcast(*bias, 3);
    if (!is_per_query && is_broadcast(*bias, 2)) {
      form = BackwardBias::kVector;
    } else if (!is_per_query) {
      CHECK_ARGUMENT(can_copy_tiles(*bias, q), "bias per query and key needs rows that TMA can read, in the dtype of q");
      form = stores_dbias ? BackwardBias::kTileStore : BackwardBias::kTile;
    }
    if (is_per_query) {
      set_bias(kName, *bias, sizes.num_heads, rows);
    } else {
      set_bias(kName, *bias, sizes.num_heads, params);
    }
  }
  CHECK_ARGUMENT(!dbias.has_value() || form == BackwardBias::kTile || form == BackwardBias::kTileStore,
                 "dbias is of a bias per query and key");
  CHECK_ARGUMENT(!shares_dbias || bias_packing == kByPosition, "heads share dbias of packed queries");
  CHECK_ARGUMENT(!dbias_sums.has_value() || form == BackwardBias::kVector, "dbias_sums are of a bias per key");

  const CurrentDevice device(kName, q);  // before the TMA descriptors, whose encoder needs its context
  const int block_m = backward_block_m(instance.head_dim, instance.head_dim_v, kTile);
  params.q = ragged_rows_map(kName, q, "q", block_m);
  params.k = ragged_rows_map(kName, k, "k", kTile);
  params.v = ragged_rows_map(kName, v, "v", kTile);
  params.dout = ragged_rows_map(kName, dout, "dout", block_m);
  const auto scores = [&](const Tensor& x, const char* name) {
    return of.bias_packs_queries ? ragged_scores_map(kName, x, name, block_m)
                                 : scores_by_position_map(kName, x, name, block_m);
  };
  if (form == BackwardBias::kTile || form == BackwardBias::kTileStore) params.bias = scores(*bias, "bias");
  if (stores_dbias) {
    check_stored_dbias(kName, *dbias);
    params.dbias = scores(*dbias, "dbias");
  }
  params.dk = data_of(dk);
  params.dv = data_of(dv);
  params.dbias_sums = data_of<float>(dbias_sums);

  // Works, and sections of key heads whose q, dout and sums of dq fit in L2.
  const int64_t all_q = sizes.batch * sizes.seqlen_q, all_k = sizes.batch * sizes.seqlen_k;
  const int64_t tiles = most_blocks(number, all_k, of.most_k, kTile), padded_tiles = all_q / kTile + number;
  CHECK_ARGUMENT(padded_tiles * sizes.num_heads <= kMaxInt / 4, "there are more than 2^29 tiles of queries");
  CHECK_ARGUMENT(tiles * sizes.num_heads_k <= kMaxInt / 4, "there are more than 2^29 tiles of keys");
  const Tensor works = list_works(kName, q, number, true, kTile, tiles, padded_tiles, of, nullptr, device.stream);
  const int64_t columns = accum_columns(static_cast<int>(instance.head_dim));
  const int64_t dq_columns = ceil_div(instance.head_dim, columns) * columns;
  const int64_t row_bytes = (sizes.head_dim + sizes.head_dim_v) * 2 + (dq.has_value() ? dq_columns * 4 : 0);
  const int64_t head_bytes = all_q * row_bytes * params.heads_per_group;
  of.section = static_cast<int>(std::clamp<int64_t>(kSectionBytes / head_bytes, 1, sizes.num_heads_k));

  // Scratch memory: lse in base 2 and delta, then what starts as zeros: the counter of work tiles, and sums of dq.
  const int64_t padded_rows = sizes.num_heads * padded_tiles * kTile, counter_at = 2 * padded_rows;
  const int64_t dq_at = counter_at + 32, slots_at = dq_at + (dq.has_value() ? padded_rows * dq_columns : 0);
  DbiasSchedule of_dbias{};
  Sizes by_position = sizes;
  if (shares_dbias) {
    by_position.batch = number;
    by_position.seqlen_q = bias->size(2);
    by_position.seqlen_k = bias->size(3);
    BackwardCall call{};
    call.batch = number;
    call.num_heads = sizes.num_heads;
    call.seqlen_q = by_position.seqlen_q;
    call.seqlen_k = by_position.seqlen_k;
    call.dbias_batch = dbias->size(0);
    call.dbias_heads = dbias->size(1);
    of_dbias = schedule_dbias(call, num_dbias_chunks, sm_count(kName, device.index));
  }
  const int64_t length = slots_at + (of_dbias.has_slots ? of_dbias.chunks * of_dbias.slot_floats : 0);
  const Tensor memory = torch::stable::new_empty(q, {&length, 1}, ScalarType::Float);
  float* const start = static_cast<float*>(const_cast<void*>(memory.const_data_ptr()));
  rows.lse_log2 = start;
  rows.delta = start + padded_rows;
  rows.cleared = start + counter_at;
  rows.zeros = (slots_at - counter_at) / 4;
  rows.sequences = of;
  if (is_packed) rows.dout_stride_b = rows.dlse_stride_b = 0;
  params.lse = rows.lse_log2;
  params.delta = rows.delta;
  int* const counters = reinterpret_cast<int*>(start + counter_at);
  params.tile_counter = counters;
  if (dq.has_value()) params.dq_sums = start + dq_at;
  if (stores_dbias) {
    ClearDbiasParams cleared{};
    set_cleared(*dbias, cleared);
    if (of.bias_packs_queries) cleared.stride_b = 0;
    cleared.number = static_cast<int>(number);
    cleared.num_heads = static_cast<int>(sizes.num_heads);
    cleared.rows = static_cast<int>(dbias->size(2));
    cleared.columns = static_cast<int>(dbias->size(3));
    cleared.sequences = of;
    cleared.packs_rows = of.bias_packs_queries;
    check(launch_clear_dbias(cleared, device.stream), kName, "launching the kernel that clears dbias");
  }
  check(instance.rows(rows, device.stream), kName, "launching the kernel of the rows");
  check(instance.few_keys(describe_few_keys(rows, params, q, k, v, dout), device.stream), kName,
        "launching the kernel of few keys");
  if (shares_dbias) {
    const std::vector<Tensor> no_mask;
    float* const slots = of_dbias.has_slots ? start + slots_at : nullptr;
    const SharedDbiasCall shared{dout,       q,     k,            v, *bias, no_mask,       rows.lse_log2,
                                 rows.delta, slots, counters + 1, 0, 0,     softmax_scale, 0.0, &of};
    store_shared_dbias(kName, instance.shared_dbias, device, by_position, shared, of_dbias, *dbias);
  }
  if (runs_main_kernel) {
    const int blocks = static_cast<int>(std::min<int64_t>(tiles * sizes.num_heads_k, sm_count(kName, device.index)));
    check(instance.main(params, form, blocks, device.stream), kName, "launching the kernel");
  }
  if (dq.has_value()) {
    BackwardSumsParams sums{};
    sums.sequences = of;
    BackwardSumsParams::Result& it = sums.results[0];
    it.tile_columns = static_cast<int>(columns);
    it.panels = static_cast<int>(dq_columns / columns);
    it.tiles = sizes.num_heads * padded_tiles * (kTile / kAccumRows) * it.panels;
    it.sums = params.dq_sums;
    it.out = dq->mutable_data_ptr();
    it.batch = 1;
    it.num_heads = static_cast<int>(sizes.num_heads);
    it.rows_per_pair = static_cast<int>(padded_tiles * kTile);
    it.columns = static_cast<int>(sizes.head_dim);
    it.factor = params.softmax_scale;
    sums.results[1].tiles = sums.results[2].tiles = it.tiles;
    check(instance.sums(sums, device.stream), kName, "launching the kernel of the sums");
    fill_gaps(kName, *dq, false, nullptr, of, number, device.stream);
  }
  if (dk.has_value()) fill_gaps(kName, *dk, true, nullptr, of, number, device.stream);
  if (dv.has_value()) fill_gaps(kName, *dv, true, nullptr, of, number, device.stream);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(flash_dmattn, m) {
  m.def(
      "cuda_backward_sequences(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor bounds, Tensor? bias, "
      "Tensor out, Tensor lse, Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv, Tensor(d!)? dbias, "
      "Tensor(e!)? dbias_sums, Tensor(f!)? delta, bool is_packed, int bias_packing, int most_q, int most_k, int left, "
      "int right, float softmax_scale, int num_dbias_chunks) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CUDA, m) { m.impl("cuda_backward_sequences", TORCH_BOX(&backward)); }
STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CPU, m) { m.impl("cuda_backward_sequences", TORCH_BOX(&backward)); }

}  // namespace flash_dmattn
