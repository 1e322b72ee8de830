// The operator of the forward pass, as torch sees it: what flash_dmattn/backends/cuda.py has prepared becomes params.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "../sm90/forward/launch.h"
#include "build_units.h"  // written by the build
#include "common.h"

namespace flash_dmattn {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr const char* kName = "cuda_forward_kernel";
// Keys and values of the heads that are worked on at a time stay in the 50 MB of L2, with room for q, bias and out.
constexpr int64_t kSectionBytes = 24 << 20;

// One value is read for every index.
bool is_broadcast(const Tensor& x, int dim) { return x.size(dim) == 1 || x.stride(dim) == 0; }

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// From the driver, whose library is not linked.
Encode tensor_map_encoder() {
  static const Encode encoder = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    CHECK_ARGUMENT(error == cudaSuccess && result == cudaDriverEntryPointSuccess,
                   "the driver has no cuTensorMapEncodeTiled; it needs to be of CUDA 12.0 or later");
    return reinterpret_cast<Encode>(found);
  }();
  return encoder;
}

// The map of a tensor of 16-bit values, its dims and strides (in elements) given innermost first. A box is 64 columns
// of `rows` rows, swizzled within its 128-byte rows; what is outside the tensor reads as 0.
CUtensorMap tensor_map(const Tensor& x, const char* name, std::array<int64_t, 4> sizes, std::array<int64_t, 4> strides,
                       int rows) {
  CHECK_ARGUMENT(strides[0] == 1 || sizes[0] == 1, name, " has no unit stride in its last dim");
  cuuint64_t dims[4], bytes[3];
  for (int dim = 0; dim < 4; ++dim) {
    dims[dim] = static_cast<cuuint64_t>(sizes[dim]);
    if (dim == 0) continue;
    // The stride of a dim of size 1 is never taken.
    bytes[dim - 1] = sizes[dim] == 1 ? 16 : static_cast<cuuint64_t>(strides[dim] * 2);
    CHECK_ARGUMENT(bytes[dim - 1] % 16 == 0 && bytes[dim - 1] > 0, name, " has a stride of ", strides[dim],
                   " elements; the copy engine takes positive multiples of 8");
  }
  auto* const data = const_cast<void*>(x.const_data_ptr());
  CHECK_ARGUMENT(reinterpret_cast<uintptr_t>(data) % 16 == 0, name, " does not start on 16 bytes");
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(rows), 1, 1}, steps[4] = {1, 1, 1, 1};
  const auto dtype = x.scalar_type() == ScalarType::Half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                          : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  CUtensorMap map;
  const CUresult result = tensor_map_encoder()(&map, dtype, 4, data, dims, bytes, box, steps,
                                               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  CHECK_ARGUMENT(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled refused ", name, " with error ",
                 static_cast<int>(result));
  return map;
}

// The map of q, k or v, (B, L, H, D).
CUtensorMap rows_map(const Tensor& x, const char* name, int rows) {
  return tensor_map(x, name, {x.size(3), x.size(1), x.size(2), x.size(0)},
                    {x.stride(3), x.stride(1), x.stride(2), x.stride(0)}, rows);
}

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

// Asked for once: it takes as long as encoding a tensor map. Two threads that ask at once write the same.
int multiprocessors(int device) {
  static std::array<std::atomic<int>, 64> known{};
  std::atomic<int>& count = known[static_cast<size_t>(device) % known.size()];
  if (count == 0) {
    int found = 0;
    check(cudaDeviceGetAttribute(&found, cudaDevAttrMultiProcessorCount, device), kName, "asking for multiprocessors");
    count = found;
  }
  return count;
}

// Whether the copy engine can read tiles of a bias: rows of unit stride, on 16 bytes, in the dtype of q.
bool can_copy_tiles(const Tensor& bias, const Tensor& q) {
  bool can = bias.scalar_type() == q.scalar_type() && bias.stride(3) == 1;
  can &= reinterpret_cast<uintptr_t>(bias.const_data_ptr()) % 16 == 0;
  for (int dim = 0; dim < 3; ++dim) can &= is_broadcast(bias, dim) || bias.stride(dim) % 8 == 0;
  return can;
}

// How the kernel reads a bias, and what it needs for that beside a tensor map.
Bias describe_bias(const Tensor& bias, const Tensor& q, ForwardParams& params) {
  const int64_t num_heads = q.size(2);
  const auto stride = [&](int dim) { return is_broadcast(bias, dim) ? 0 : bias.stride(dim); };
  const ScalarType dtype = bias.scalar_type();
  CHECK_ARGUMENT(dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16,
                 "bias needs to be float32, float16 or bfloat16");
  params.bias_values = bias.const_data_ptr();
  params.bias_dtype = dtype == ScalarType::Float  ? BiasDtype::kFloat32
                      : dtype == ScalarType::Half ? BiasDtype::kFloat16
                                                  : BiasDtype::kBFloat16;
  params.bias_stride_b = stride(0);
  params.bias_stride_h = stride(1);
  params.bias_stride_q = stride(2);
  params.bias_stride_k = stride(3);
  params.heads_per_bias = static_cast<int>(is_broadcast(bias, 1) ? num_heads : num_heads / bias.size(1));
  params.bias_has_batch = !is_broadcast(bias, 0);
  params.bias_is_per_query = is_broadcast(bias, 3);
  if (params.bias_is_per_query) return Bias::kNone;
  if (is_broadcast(bias, 2)) return Bias::kVector;
  return can_copy_tiles(bias, q) ? Bias::kTile : Bias::kStrided;
}

// Writes out and lse. mask is {} or (bits, row_lists) of a TileMask; low and high are the band where there is none.
void forward(Tensor q, Tensor k, Tensor v, std::vector<Tensor> mask, std::optional<Tensor> bias, Tensor out, Tensor lse,
             int64_t low, int64_t high, double softmax_scale, double softcap) {
  CHECK_ARGUMENT(q.is_cuda(), "q is not on a CUDA device; the kernel is written for sm_90a");
  const int64_t batch = q.size(0), seqlen_q = q.size(1), num_heads = q.size(2), head_dim = q.size(3);
  const int64_t seqlen_k = k.size(1), num_heads_k = k.size(2), head_dim_v = v.size(3);
  CHECK_ARGUMENT(seqlen_q > 0 && seqlen_k > 0 && batch * num_heads > 0, "there is nothing to attend");
  // Sums of a row, a key and a band stay in int32.
  CHECK_ARGUMENT(seqlen_q + seqlen_k <= kMaxInt / 2, "there are ", seqlen_q,
                 " queries and ", seqlen_k, " keys; together they may be 2^30 - 1");
  CHECK_ARGUMENT(head_dim % 8 == 0 && head_dim_v % 8 == 0, "head dims are ", head_dim, " and ", head_dim_v,
                 " (v); they need to be multiples of 8");
  const Unit unit = unit_of(q.scalar_type(), head_dim, head_dim_v);

  ForwardParams params{};
  const Bias form = bias.has_value() ? describe_bias(*bias, q, params) : Bias::kNone;
  const bool has_mask = !mask.empty();
  const ForwardTile tile = unit.tile(form, has_mask);

  params.q = rows_map(q, "q", tile.rows);
  params.k = rows_map(k, "k", tile.keys);
  params.v = rows_map(v, "v", tile.keys);
  if (form == Bias::kTile) {
    const int64_t heads = is_broadcast(*bias, 1) ? 1 : bias->size(1), batches = is_broadcast(*bias, 0) ? 1 : batch;
    params.bias = tensor_map(*bias, "bias", {seqlen_k, seqlen_q, heads, batches},
                             {bias->stride(3), bias->stride(2), bias->stride(1), bias->stride(0)}, tile.rows);
  }
  params.out = out.mutable_data_ptr();
  params.lse = static_cast<float*>(lse.mutable_data_ptr());
  params.batch = static_cast<int>(batch);
  params.num_heads = static_cast<int>(num_heads);
  params.seqlen_q = static_cast<int>(seqlen_q);
  params.seqlen_k = static_cast<int>(seqlen_k);
  params.head_dim_v = static_cast<int>(head_dim_v);
  params.queries_per_group = static_cast<int>(num_heads / num_heads_k);
  params.low = static_cast<int>(std::clamp(low, -seqlen_q, seqlen_k));
  params.high = static_cast<int>(std::clamp(high, -seqlen_q, seqlen_k));

  // exp2 takes scale * score - scale * max in one instruction, for which scale has to be positive, and 1 / scale is
  // what a bias is multiplied with, for which it must not be tiny.
  constexpr double kLeastScale = 1e-6;
  if (softcap > 0) {
    params.transforms = true;
    params.scale = 1.0f;
    params.softcap = static_cast<float>(softcap);
    params.pre_scale = static_cast<float>(softmax_scale / softcap);
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
    params.mask_bits = static_cast<const int32_t*>(mask[0].const_data_ptr());
    params.mask_lists = static_cast<const int32_t*>(mask[1].const_data_ptr());
    params.mask_heads = static_cast<int>(mask[0].size(1));
    params.heads_per_mask = static_cast<int>(num_heads / mask[0].size(1));
    params.mask_has_batch = mask[0].size(0) > 1;
  }

  const int32_t device = q.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  check(cudaSetDevice(device), kName, "setting the device");  // the static runtime's own; the guard sets torch's

  const int64_t pairs = batch * num_heads, blocks_q = ceil_div(seqlen_q, tile.rows);
  CHECK_ARGUMENT(pairs * blocks_q <= kMaxInt / 2, "there are more than 2^30 tiles of rows");
  params.blocks_q = static_cast<int>(blocks_q);
  params.total = static_cast<int>(pairs * blocks_q);
  const bool has_bias_tiles = form == Bias::kTile || form == Bias::kStrided;
  const bool shares_over_batch =
      batch > 1 && ((has_bias_tiles && !params.bias_has_batch) || (has_mask && !params.mask_has_batch));
  params.batch_is_inner = shares_over_batch;
  const int64_t group = num_heads / num_heads_k;
  const int64_t group_bytes = seqlen_k * (head_dim + head_dim_v) * 2;
  const int64_t unit_pairs = shares_over_batch ? batch : group;
  const int64_t unit_bytes = shares_over_batch ? group_bytes * batch : group_bytes;
  const int64_t units = std::max<int64_t>(1, kSectionBytes / std::max<int64_t>(1, unit_bytes));
  params.section = static_cast<int>(std::min(pairs, units * unit_pairs));

  const int blocks = static_cast<int>(std::min<int64_t>(params.total, multiprocessors(device)));
  const bool even = !has_mask && low <= -seqlen_q && high >= seqlen_k;
  Tensor next;
  if (!even && params.total > blocks) {
    const int64_t one = 1;
    next = torch::stable::new_empty(q, {&one, 1}, ScalarType::Int);
    params.next = static_cast<int*>(next.mutable_data_ptr());
    check(cudaMemsetAsync(params.next, 0, sizeof(int), stream), kName, "clearing the counter of work");
  }
  check(unit.launch(params, form, has_mask, blocks, stream), kName, "launching the kernel");
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
