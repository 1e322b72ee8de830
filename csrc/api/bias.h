// How a bias (B, H, Lq, Lk) lies in memory, as the kernels are told.
#pragma once

#include <cstdint>
#include <optional>

#include <torch/csrc/stable/tensor.h>

#include "../sm90/forward/params.h"
#include "common.h"

namespace flash_dmattn {

// Whether one value serves every index of the dim.
inline bool is_broadcast(const torch::stable::Tensor& x, int dim) { return x.size(dim) == 1 || x.stride(dim) == 0; }

// Whether TMA can read tiles of the bias: rows of unit stride that start on 16 bytes, in the dtype of q.
inline bool can_copy_tiles(const torch::stable::Tensor& bias, const torch::stable::Tensor& q) {
  bool can = bias.scalar_type() == q.scalar_type() && bias.stride(3) == 1;
  can &= reinterpret_cast<uintptr_t>(bias.const_data_ptr()) % 16 == 0;
  for (int dim = 0; dim < 3; ++dim) can &= is_broadcast(bias, dim) || bias.stride(dim) % 8 == 0;
  return can;
}

// The dtype of a bias or a sink.
inline BiasDtype float_dtype(const char* op, const torch::stable::Tensor& x, const char* name) {
  using torch::headeronly::ScalarType;
  const ScalarType dtype = x.scalar_type();
  CHECK_FOR(op, dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16, name,
            " needs to be float32, float16 or bfloat16");
  return dtype == ScalarType::Float  ? BiasDtype::kFloat32
         : dtype == ScalarType::Half ? BiasDtype::kFloat16
                                     : BiasDtype::kBFloat16;
}

// The stride the kernels use: 0 where one value serves every index.
inline int64_t bias_stride(const torch::stable::Tensor& bias, int dim) {
  return is_broadcast(bias, dim) ? 0 : bias.stride(dim);
}

// A bias of so many query heads, as kernels read it.
inline BiasValues bias_values(const char* op, const torch::stable::Tensor& bias, int64_t num_heads) {
  const int64_t heads_per_bias = is_broadcast(bias, 1) ? num_heads : num_heads / bias.size(1);
  return {bias.const_data_ptr(), bias_stride(bias, 0), bias_stride(bias, 1), bias_stride(bias, 2), bias_stride(bias, 3),
          float_dtype(op, bias, "bias"), static_cast<int>(heads_per_bias), !is_broadcast(bias, 0)};
}

// Sets a sink, (Hq), contiguous, in fp32 or 16 bits.
inline void set_sink(const char* op, const std::optional<torch::stable::Tensor>& sink, int64_t num_heads,
                     const torch::stable::Tensor& q, ForwardParams& params) {
  if (!sink.has_value()) return;
  check_dims(op, *sink, "sink", {num_heads}, q);
  CHECK_FOR(op, sink->is_contiguous(), "sink needs to be contiguous");
  params.sink = sink->const_data_ptr();
  params.sink_dtype = float_dtype(op, *sink, "sink");
}

}  // namespace flash_dmattn
