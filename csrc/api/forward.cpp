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
#include "tensor_map.h"
#include "work.h"

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

// Writes out and lse. mask is {} or (bits, row_lists) of a TileMask; low and high are the band where there is none.
void forward(Tensor q, Tensor k, Tensor v, std::vector<Tensor> mask, std::optional<Tensor> bias, Tensor out, Tensor lse,
             int64_t low, int64_t high, double softmax_scale, double softcap) {
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
  params.total = static_cast<int>(pairs * blocks_q);
  const bool has_bias_tiles = form == Bias::kTile || form == Bias::kStrided;
  const bool shares_over_batch =
      sizes.batch > 1 && ((has_bias_tiles && !params.bias_has_batch) || (has_mask && !params.mask_has_batch));
  params.batch_is_inner = shares_over_batch;
  // Keys and values of the heads of a section.
  const int64_t group_bytes = sizes.seqlen_k * (sizes.head_dim + sizes.head_dim_v) * 2;
  const int64_t unit_pairs = shares_over_batch ? sizes.batch : sizes.num_heads / sizes.num_heads_k;
  const int64_t unit_bytes = shares_over_batch ? group_bytes * sizes.batch : group_bytes;
  const int64_t units = std::max<int64_t>(1, kSectionBytes / std::max<int64_t>(1, unit_bytes));
  params.section = static_cast<int>(std::min(pairs, units * unit_pairs));

  const int blocks = static_cast<int>(std::min<int64_t>(params.total, multiprocessors(kName, device.index)));
  const bool even = !has_mask && low <= -sizes.seqlen_q && high >= sizes.seqlen_k;
  Tensor next;
  if (!even && params.total > blocks) {
    next = work_counter(kName, q, device.stream);
    params.next = static_cast<int*>(next.mutable_data_ptr());
  }
  check(unit.launch(params, form, has_mask, blocks, device.stream), kName, "launching the kernel");
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(flash_dmattn, m) {
  m.def(
      "cuda_forward_kernel(Tensor q, Tensor k, Tensor v, Tensor[] mask, Tensor? bias, Tensor(a!) out, Tensor(b!) lse, "
      "int low, int high, float softmax_scale, float softcap) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CUDA, m) { m.impl("cuda_forward_kernel", TORCH_BOX(&forward)); }
STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CPU, m) { m.impl("cuda_forward_kernel", TORCH_BOX(&forward)); }

}  // namespace flash_dmattn
