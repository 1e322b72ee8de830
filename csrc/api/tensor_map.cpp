#include "tensor_map.h"

#include <array>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "../sm90/sequences/params.h"
#include "call.h"
#include "common.h"

namespace flash_dmattn {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Asked from the driver at run time: its library is not linked.
Encode encoder(const char* op) {
  static const Encode function = [op] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result);
    CHECK_FOR(op, error == cudaSuccess && result == cudaDriverEntryPointSuccess,
              "the driver has no cuTensorMapEncodeTiled; it needs to be of CUDA 12.0 or later");
    return reinterpret_cast<Encode>(entry);
  }();
  return function;
}

// The descriptor of a tensor of 16 bits or fp32. Dims and strides (in elements) are innermost first. A box has 128 bytes of
// columns, and so many places of the next two dims.
template <size_t kRank>
CUtensorMap tensor_map(const char* op, const Tensor& x, const char* name, std::array<int64_t, kRank> sizes,
                       std::array<int64_t, kRank> strides, int rows, CUtensorMapL2promotion promotion,
                       int outer_rows = 1) {
  CHECK_FOR(op, strides[0] == 1 || sizes[0] == 1, name, " has no unit stride in its last dim");
  const int64_t value_bytes = x.element_size();
  cuuint64_t dims[kRank], bytes[kRank - 1];
  cuuint32_t box[kRank], steps[kRank];
  for (size_t dim = 0; dim < kRank; ++dim) {
    dims[dim] = static_cast<cuuint64_t>(sizes[dim]);
    box[dim] = static_cast<cuuint32_t>(dim == 0 ? 128 / value_bytes : dim == 1 ? rows : dim == 2 ? outer_rows : 1);
    steps[dim] = 1;
    if (dim == 0) continue;
    // The stride of a dim of size 1 is never taken, so any valid one will do.
    bytes[dim - 1] = sizes[dim] == 1 ? 16 : static_cast<cuuint64_t>(strides[dim] * value_bytes);
    CHECK_FOR(op, bytes[dim - 1] % 16 == 0 && bytes[dim - 1] > 0, name, " has a stride of ", strides[dim],
              " elements; TMA takes positive multiples of ", 16 / value_bytes);
  }
  auto* const data = const_cast<void*>(x.const_data_ptr());
  CHECK_FOR(op, reinterpret_cast<uintptr_t>(data) % 16 == 0, name, " does not start on 16 bytes");
  const auto dtype = x.scalar_type() == ScalarType::Float  ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                     : x.scalar_type() == ScalarType::Half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                           : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  CUtensorMap map;
  const CUresult result = encoder(op)(&map, dtype, kRank, data, dims, bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                      CU_TENSOR_MAP_SWIZZLE_128B, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  CHECK_FOR(op, result == CUDA_SUCCESS, "cuTensorMapEncodeTiled refused ", name, " with error ",
            static_cast<int>(result));
  return map;
}

// A descriptor of rows that lie `stride` elements apart.
CUtensorMap ragged_map(const char* op, const Tensor& x, const char* name, int64_t columns, int64_t stride, int64_t heads,
                       int64_t head_stride, int rows, CUtensorMapL2promotion promotion) {
  constexpr int64_t kMost = 0x7fff0000;  // no coordinate is more
  return tensor_map<5>(op, x, name, {columns, kRaggedRows, heads, kMost, kMost},
                       {x.stride(3), stride, head_stride, kRaggedWrap - stride, stride}, rows, promotion);
}

}  // namespace

CUtensorMap rows_map(const char* op, const Tensor& x, const char* name, int rows, bool is_alone) {
  return tensor_map<4>(op, x, name, {x.size(3), x.size(1), x.size(2), x.size(0)},
                       {x.stride(3), x.stride(1), x.stride(2), x.stride(0)}, rows,
                       is_alone ? CU_TENSOR_MAP_L2_PROMOTION_L2_64B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

CUtensorMap group_rows_map(const char* op, const Tensor& x, const char* name, int rows, int shift) {
  return tensor_map<4>(op, x, name, {x.size(3), x.size(2), x.size(1), x.size(0)},
                       {x.stride(3), x.stride(2), x.stride(1), x.stride(0)}, 1 << shift,
                       CU_TENSOR_MAP_L2_PROMOTION_L2_256B, rows >> shift);
}

// A row of a box is 128 bytes, so L2 is told to fetch 128 bytes at a time: faster than 256
// (docs/notes/cuda_tried.md, "Forward kernel", "Bias").
CUtensorMap scores_map(const char* op, const Tensor& x, const char* name, int rows) {
  const int64_t heads = is_broadcast(x, 1) ? 1 : x.size(1), batches = is_broadcast(x, 0) ? 1 : x.size(0);
  return tensor_map<4>(op, x, name, {x.size(3), x.size(2), heads, batches},
                       {x.stride(3), x.stride(2), x.stride(1), x.stride(0)}, rows, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

CUtensorMap ragged_rows_map(const char* op, const Tensor& x, const char* name, int rows) {
  const int64_t entries = x.size(0);
  const int64_t stride = x.size(1) > 1 ? x.stride(1) : entries > 1 ? x.stride(0) : (x.size(3) + 7) / 8 * 8;
  CHECK_FOR(op, entries == 1 || x.stride(0) == x.size(1) * stride, name, " has entries ", x.stride(0),
            " elements apart; they need to follow each other");
  return ragged_map(op, x, name, x.size(3), stride, x.size(2), x.stride(2), rows, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

CUtensorMap pages_map(const char* op, const Tensor& x, const char* name, int rows) {
  return ragged_map(op, x, name, x.size(3), x.stride(1), x.size(2), x.stride(2), rows,
                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

CUtensorMap ragged_scores_map(const char* op, const Tensor& x, const char* name, int rows) {
  const int64_t heads = is_broadcast(x, 1) ? 1 : x.size(1);
  const int64_t stride = x.size(2) > 1 ? x.stride(2) : (x.size(3) + 7) / 8 * 8;
  return ragged_map(op, x, name, x.size(3), stride, heads, x.stride(1), rows, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

CUtensorMap scores_by_position_map(const char* op, const Tensor& x, const char* name, int rows) {
  const int64_t heads = is_broadcast(x, 1) ? 1 : x.size(1), entries = is_broadcast(x, 0) ? 1 : x.size(0);
  return tensor_map<5>(op, x, name, {x.size(3), x.size(2), heads, 1, entries},
                       {x.stride(3), x.stride(2), x.stride(1), 0, x.stride(0)}, rows,
                       CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

}  // namespace flash_dmattn
