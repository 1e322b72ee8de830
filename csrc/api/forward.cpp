// The forward operator: turns the tensors from flash_dmattn/backends/cuda/backend.py into ForwardParams and launches the
// kernel.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include <cuda_runtime_api.h>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "../sm90/forward/launch.h"
#include "bias.h"
#include "build_instances.h"  // written by the build
#include "call.h"
#include "common.h"
#include "num_splits.h"
#include "sections.h"
#include "tensor_map.h"
#include "tile_scheduler.h"

namespace flash_dmattn {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr const char* kName = "cuda_forward_kernel";

struct KernelInstance {
  decltype(&launch_forward<__half, 64, 64>) launch;
  decltype(&forward_tile<__half, 64, 64>) tile;
  int64_t head_dim, head_dim_v;
};

// The smallest kernel instance whose head dims hold those of the call.
KernelInstance instance_for(ScalarType dtype, int64_t head_dim, int64_t head_dim_v) {
#define FLASH_DMATTN_INSTANCE(element, scalar, d, dv)                        \
  if (dtype == ScalarType::scalar && head_dim <= d && head_dim_v <= dv) {    \
    return {&launch_forward<element, d, dv>, &forward_tile<element, d, dv>, d, dv}; \
  }
  FLASH_DMATTN_INSTANCES(FLASH_DMATTN_INSTANCE)
#undef FLASH_DMATTN_INSTANCE
  CHECK_ARGUMENT(false, "the extension was not built for head dims ", head_dim, " and ", head_dim_v,
                 " (v) of this dtype");
}

// Chooses how the kernel reads the bias, and sets its fields.
Bias describe_bias(const Tensor& bias, const Tensor& q, ForwardParams& params) {
  set_bias(kName, bias, q.size(2), params);
  params.bias_is_per_query = is_broadcast(bias, 3);
  if (params.bias_is_per_query) return Bias::kNone;
  if (is_broadcast(bias, 2)) return Bias::kVector;
  return can_copy_tiles(bias, q) ? Bias::kTile : Bias::kStrided;
}

// Whether blocks keep the bias that batch entries share, for work tiles that follow each other. They have to be many.
bool pays_to_hold_bias(const KernelInstance& instance, Bias form, const Sizes& sizes, const ForwardParams& params,
                       bool has_more, int num_sms) {
  constexpr int64_t kTilesOfBlock = 4;
  if (has_more || params.bias_has_batch || sizes.batch == 1) return false;
  const int64_t least = sizes.batch * sizes.num_heads * ceil_div(sizes.seqlen_q, int64_t{256});
  return least >= kTilesOfBlock * num_sms && can_hold_bias(instance.head_dim, instance.head_dim_v, form,
                                                           static_cast<int>(sizes.seqlen_q), sizes.seqlen_k);
}

// Key blocks that the longest work tile walks. The host does not know how many a mask leaves: it assumes a quarter.
int64_t longest_walk(const Sizes& sizes, bool has_mask, const ForwardTile& tile, const ForwardParams& params) {
  const int64_t all = ceil_div(sizes.seqlen_k, tile.block_n);
  if (has_mask) return ceil_div(all, 4);
  return std::min(all, ceil_div(std::max(tile.block_m + params.high - params.low, 0), tile.block_n) + 1);
}

// out may have rows before heads, as q has, or heads before rows.
void set_out_steps(const Tensor& out, const Sizes& sizes, ForwardParams& params) {
  const bool has_heads_first = !out.is_contiguous();
  CHECK_ARGUMENT(!has_heads_first ||
                     (out.stride(3) == 1 && out.stride(1) == sizes.head_dim_v &&
                      out.stride(2) == sizes.seqlen_q * sizes.head_dim_v &&
                      out.stride(0) == sizes.num_heads * sizes.seqlen_q * sizes.head_dim_v),
                 "out needs to be contiguous as (B, Lq, Hq, Dv) or as (B, Hq, Lq, Dv)");
  params.out_row_step = static_cast<int>(has_heads_first ? 1 : sizes.num_heads);
  params.out_head_step = static_cast<int>(has_heads_first ? sizes.seqlen_q : 1);
}

// Writes out and lse. mask is {}, or (bits, row_lists) of a TileMask, or (bounds, row_lists) of an IntervalMask; low and
// high are the band if there is no mask.
// sink: (Hq), contiguous, in fp32 or 16 bits.
// dropout_key: int64 (2), beside which a bias per query and key needs rows that TMA can read, and there is no softcap.
// num_splits: KV splits of the work tiles of the last wave. 1 for none, 0 to let estimate_num_splits choose.
// one_mask_row: whether the mask lets all queries see the same keys.
void forward(Tensor q, Tensor k, Tensor v, std::vector<Tensor> mask, std::optional<Tensor> bias,
             std::optional<Tensor> sink, Tensor out, Tensor lse, int64_t low, int64_t high, double softmax_scale,
             double softcap, int64_t num_splits, std::optional<Tensor> dropout_key, double dropout_p, bool one_mask_row) {
  const Sizes sizes = sizes_of(kName, q, k, v);
  const KernelInstance instance = instance_for(q.scalar_type(), sizes.head_dim, sizes.head_dim_v);

  check_dims(kName, out, "out", {sizes.batch, sizes.seqlen_q, sizes.num_heads, sizes.head_dim_v}, q);
  check_dtype(kName, out, "out", q.scalar_type());
  check_array(kName, lse, "lse", {sizes.batch, sizes.num_heads, sizes.seqlen_q}, ScalarType::Float, q);
  if (bias.has_value()) check_bias(kName, *bias, sizes, q);
  ForwardParams params{};
  const Bias form = bias.has_value() ? describe_bias(*bias, q, params) : Bias::kNone;
  const bool has_mask = !mask.empty();
  const MaskForm of_mask = checked_mask_form(kName, mask, false, sizes, q);
  CHECK_ARGUMENT(of_mask != MaskForm::kIntervals || form == Bias::kNone || form == Bias::kVector,
                 "a bias per query and key needs bits of a mask");
  set_dropout(kName, dropout_key, dropout_p, instance.head_dim, instance.head_dim_v, q, params);
  const bool has_dropout = params.dropout.key != nullptr;
  CHECK_ARGUMENT(!has_dropout || form != Bias::kStrided, "bias has rows that TMA cannot read; dropout has no kernel for it");
  const CurrentDevice device(kName, q);  // before the TMA descriptors, whose encoder needs its context
  const int num_sms = sm_count(kName, device.index);
  const bool is_banded = has_band(sizes, low, high);
  const bool holds_bias =
      pays_to_hold_bias(instance, form, sizes, params, has_mask || has_dropout || is_banded, num_sms);
  const ForwardTile tile =
      instance.tile(form, of_mask, one_mask_row, holds_bias, static_cast<int>(sizes.seqlen_q), has_dropout);

  // Blocks that keep their bias read the rows of many heads at a time, each at its own place.
  const auto map_rows = [&](const Tensor& x, const char* name, int rows) {
    return rows_map(kName, x, name, rows, holds_bias && x.size(2) * x.size(3) > 128);
  };
  params.q = map_rows(q, "q", tile.block_m);
  params.k = map_rows(k, "k", tile.block_n);
  params.v = map_rows(v, "v", tile.block_n);
  if (form == Bias::kTile) params.bias = scores_map(kName, *bias, "bias", tile.block_m);
  params.out = out.mutable_data_ptr();
  set_out_steps(out, sizes, params);
  params.lse = static_cast<float*>(lse.mutable_data_ptr());
  set_sink(kName, sink, sizes.num_heads, q, params);
  set_sizes(sizes, params);
  set_band(sizes, low, high, params);

  set_scale(softmax_scale, softcap, params);
  if (has_mask) set_mask(of_mask, mask[0], mask[1], sizes, params);

  const int64_t pairs = sizes.batch * sizes.num_heads, blocks_q = ceil_div(sizes.seqlen_q, tile.block_m);
  CHECK_ARGUMENT(pairs * blocks_q <= kMaxInt / 2, "there are more than 2^30 tiles of rows");
  params.blocks_q = static_cast<int>(blocks_q);
  const bool has_bias_tiles = form == Bias::kTile || form == Bias::kStrided;
  params.batch_is_inner = shares_over_batch(params, has_bias_tiles, has_mask);
  // A section's keys and values fit in L2.
  const int64_t group_bytes = sizes.seqlen_k * (sizes.head_dim + sizes.head_dim_v) * 2;
  const int64_t inner_pairs = params.batch_is_inner ? sizes.batch : sizes.num_heads / sizes.num_heads_k;
  const int64_t inner_bytes = params.batch_is_inner ? group_bytes * sizes.batch : group_bytes;
  const int64_t most = kSectionBytes / std::max<int64_t>(1, inner_bytes) * inner_pairs;
  params.sections = sections_of(pairs, blocks_q, most, inner_pairs, shortens_rows(sizes, low, high), num_sms);

  CHECK_ARGUMENT(num_splits >= 0 && num_splits <= kMaxSplits, "num_splits is ", num_splits, "; it may be 0 to ",
                 kMaxSplits);
  const int64_t tiles = pairs * blocks_q;
  KvSplits split{tiles, 1};
  if (tile.split_floats > 0) {
    const int64_t steps = longest_walk(sizes, has_mask, tile, params);
    split = num_splits == 0 ? estimate_num_splits(tiles, steps, num_sms, is_banded)
                            : KvSplits{tiles - tiles % num_sms, num_splits};
  }
  const int64_t tiles_split = split.num_splits > 1 ? tiles - split.unsplit_tiles : 0;
  params.unsplit_tiles = static_cast<int>(tiles - tiles_split);
  params.num_splits = tiles_split > 0 ? static_cast<int>(split.num_splits) : 1;
  params.num_work_tiles = static_cast<int>(params.unsplit_tiles + tiles_split * params.num_splits);

  const int blocks = std::min(params.num_work_tiles, num_sms);
  // Tiles that are alike are scheduled statically.
  const bool needs_counter = (has_mask || is_banded) && params.num_work_tiles > blocks;
  Tensor counters, results;
  if (needs_counter || tiles_split > 0) {
    counters = zero_counters(kName, q, 1 + tiles_split * tile.split_warps, device.stream);
    int* const first = static_cast<int*>(counters.mutable_data_ptr());
    if (needs_counter) params.tile_counter = first;
    params.split_arrivals = first + 1;
  }
  if (tiles_split > 0) {
    const int64_t length = tiles_split * params.num_splits * tile.split_floats;
    results = torch::stable::new_empty(q, {&length, 1}, ScalarType::Float);
    params.split_results = static_cast<float*>(results.mutable_data_ptr());
  }
  check(instance.launch(params, form, of_mask, one_mask_row, holds_bias, blocks, device.stream), kName,
        "launching the kernel");
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(flash_dmattn, m) {
  m.def(
      "cuda_forward_kernel(Tensor q, Tensor k, Tensor v, Tensor[] mask, Tensor? bias, Tensor? sink, Tensor(a!) out, "
      "Tensor(b!) lse, int low, int high, float softmax_scale, float softcap, int num_splits, Tensor? dropout_key, "
      "float dropout_p, bool one_mask_row) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CUDA, m) { m.impl("cuda_forward_kernel", TORCH_BOX(&forward)); }
STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CPU, m) { m.impl("cuda_forward_kernel", TORCH_BOX(&forward)); }

}  // namespace flash_dmattn
