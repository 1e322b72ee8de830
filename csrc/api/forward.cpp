// The operator of the forward pass, as torch sees it: what flash_dmattn/backends/cuda.py has prepared becomes params.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include <cuda_runtime_api.h>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "../sm90/forward/launch.h"
#include "bias.h"
#include "build_units.h"  // written by the build
#include "call.h"
#include "common.h"
#include "num_splits.h"
#include "tensor_map.h"
#include "tile_scheduler.h"

namespace flash_dmattn {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr const char* kName = "cuda_forward_kernel";

struct Unit {
  decltype(&launch_forward<__half, 64, 64>) launch;
  decltype(&forward_tile<__half, 64, 64>) tile;
};

// The smallest built head dims that hold those of a call.
Unit unit_of(ScalarType dtype, int64_t head_dim, int64_t head_dim_v) {
#define FLASH_DMATTN_UNIT(element, scalar, d, dv)                                 \
  if (dtype == ScalarType::scalar && head_dim <= d && head_dim_v <= dv) {         \
    return {&launch_forward<element, d, dv>, &forward_tile<element, d, dv>};      \
  }
  FLASH_DMATTN_UNITS(FLASH_DMATTN_UNIT)
#undef FLASH_DMATTN_UNIT
  CHECK_ARGUMENT(false, "the extension was not built for head dims ", head_dim, " and ", head_dim_v,
                 " (v) of this dtype");
}

// How the kernel reads a bias, and what it needs for that beside a tensor map.
Bias describe_bias(const Tensor& bias, const Tensor& q, ForwardParams& params) {
  set_bias(kName, bias, q.size(2), params);
  params.bias_is_per_query = is_broadcast(bias, 3);
  if (params.bias_is_per_query) return Bias::kNone;
  if (is_broadcast(bias, 2)) return Bias::kVector;
  return can_copy_tiles(bias, q) ? Bias::kTile : Bias::kStrided;
}

// Blocks of keys of the longest piece of work. How many a mask leaves the host does not know: a quarter is assumed.
int64_t steps_of_piece(const Sizes& sizes, bool has_mask, const ForwardTile& tile, const ForwardParams& params) {
  const int64_t all = ceil_div(sizes.seqlen_k, tile.keys);
  if (has_mask) return ceil_div(all, 4);
  return std::min(all, ceil_div(std::max(tile.rows + params.high - params.low, 0), tile.keys) + 1);
}

// Writes out and lse. mask is {} or (bits, row_lists) of a TileMask; low and high are the band where there is none.
// key_parts: how many blocks share the keys of a piece of work that would leave others without one; 1 for one, 0 for
// what `estimate_key_parts` finds best.
void forward(Tensor q, Tensor k, Tensor v, std::vector<Tensor> mask, std::optional<Tensor> bias, Tensor out, Tensor lse,
             int64_t low, int64_t high, double softmax_scale, double softcap, int64_t key_parts) {
  const Sizes sizes = sizes_of(kName, q, k, v);
  const Unit unit = unit_of(q.scalar_type(), sizes.head_dim, sizes.head_dim_v);

  ForwardParams params{};
  const Bias form = bias.has_value() ? describe_bias(*bias, q, params) : Bias::kNone;
  const bool has_mask = !mask.empty();
  const ForwardTile tile = unit.tile(form, has_mask);

  const CurrentDevice device(kName, q);  // before the maps, whose encoder needs its context

  params.q = rows_map(kName, q, "q", tile.rows);
  params.k = rows_map(kName, k, "k", tile.keys);
  params.v = rows_map(kName, v, "v", tile.keys);
  if (form == Bias::kTile) params.bias = scores_map(kName, *bias, "bias", tile.rows);
  params.out = out.mutable_data_ptr();
  params.lse = static_cast<float*>(lse.mutable_data_ptr());
  set_sizes(sizes, params);
  set_band(sizes, low, high, params);

  // exp2 takes scale * score - scale * max in one instruction, for which scale has to be positive, and 1 / scale is
  // what a bias is multiplied with, for which it must not be tiny.
  constexpr double kLeastScale = 1e-6;
  if (softcap > 0) {
    params.transforms = true;
    params.scale = 1.0f;
    set_softcap(softmax_scale, softcap, params);
  } else if (softmax_scale < kLeastScale) {
    params.transforms = true;
    params.scale = 1.0f;
    params.pre_scale = static_cast<float>(softmax_scale);
  } else {
    params.scale = static_cast<float>(softmax_scale);
  }
  params.inverse_scale = 1.0f / params.scale;
  if (has_mask) {
    CHECK_ARGUMENT(mask.size() == 2, "mask has ", mask.size(), " tensors; it needs bits and lists of rows");
    set_mask(mask[0], mask[1], sizes, params);
  }

  const int64_t pairs = sizes.batch * sizes.num_heads, blocks_q = ceil_div(sizes.seqlen_q, tile.rows);
  CHECK_ARGUMENT(pairs * blocks_q <= kMaxInt / 2, "there are more than 2^30 tiles of rows");
  params.blocks_q = static_cast<int>(blocks_q);
  const bool has_bias_tiles = form == Bias::kTile || form == Bias::kStrided;
  params.batch_is_inner = shares_over_batch(params, has_bias_tiles, has_mask);
  // Keys and values of the heads of a section.
  const int64_t group_bytes = sizes.seqlen_k * (sizes.head_dim + sizes.head_dim_v) * 2;
  const int64_t unit_pairs = params.batch_is_inner ? sizes.batch : sizes.num_heads / sizes.num_heads_k;
  const int64_t unit_bytes = params.batch_is_inner ? group_bytes * sizes.batch : group_bytes;
  const int64_t units = std::max<int64_t>(1, kSectionBytes / std::max<int64_t>(1, unit_bytes));
  params.section = static_cast<int>(std::min(pairs, units * unit_pairs));

  const int processors = multiprocessors(kName, device.index);
  const bool is_banded = has_band(sizes, low, high);
  CHECK_ARGUMENT(key_parts >= 0 && key_parts <= kMaxParts, "key_parts is ", key_parts, "; it may be 0 to ", kMaxParts);
  const int64_t pieces = pairs * blocks_q;
  KeyParts split{pieces, 1};
  if (tile.part_floats > 0) {
    const int64_t steps = steps_of_piece(sizes, has_mask, tile, params);
    split = key_parts == 0 ? estimate_key_parts(pieces, steps, processors, is_banded)
                           : KeyParts{pieces - pieces % processors, key_parts};
  }
  const int64_t pieces_split = split.parts > 1 ? pieces - split.whole : 0;
  params.whole = static_cast<int>(pieces - pieces_split);
  params.parts = pieces_split > 0 ? static_cast<int>(split.parts) : 1;
  params.total = static_cast<int>(params.whole + pieces_split * params.parts);

  const int blocks = std::min(params.total, processors);
  // Work that is alike is shared out evenly.
  const bool counts_work = (has_mask || is_banded) && params.total > blocks;
  Tensor counters, results;
  if (counts_work || pieces_split > 0) {
    counters = zero_counters(kName, q, 1 + pieces_split * tile.part_warps, device.stream);
    int* const first = static_cast<int*>(counters.mutable_data_ptr());
    if (counts_work) params.next = first;
    params.part_arrivals = first + 1;
  }
  if (pieces_split > 0) {
    const int64_t length = pieces_split * params.parts * tile.part_floats;
    results = torch::stable::new_empty(q, {&length, 1}, ScalarType::Float);
    params.part_results = static_cast<float*>(results.mutable_data_ptr());
  }
  check(unit.launch(params, form, has_mask, blocks, device.stream), kName, "launching the kernel");
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(flash_dmattn, m) {
  m.def(
      "cuda_forward_kernel(Tensor q, Tensor k, Tensor v, Tensor[] mask, Tensor? bias, Tensor(a!) out, Tensor(b!) lse, "
      "int low, int high, float softmax_scale, float softcap, int key_parts) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CUDA, m) { m.impl("cuda_forward_kernel", TORCH_BOX(&forward)); }
STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CPU, m) { m.impl("cuda_forward_kernel", TORCH_BOX(&forward)); }

}  // namespace flash_dmattn
