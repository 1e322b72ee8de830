// Mask and bias of a work tile: where they lie, and plain loads of a bias.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../params.h"

namespace flash_dmattn {

// The index of the work tile's mask, counted over batch entries and heads.
template <class Params, class Work>
__device__ __forceinline__ int64_t mask_of(const Params& p, const Work& work) {
  return static_cast<int64_t>(p.mask_has_batch ? work.batch : 0) * p.mask_heads + work.head / p.heads_per_mask;
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// For a bias that is not loaded by TMA: calls `use` with a function that returns its value at (query, key), in fp32.
template <class Params, class Work, class F>
__device__ __forceinline__ void with_bias(const Params& p, const Work& work, F use) {
  const int64_t start =
      (p.bias_has_batch ? work.batch : 0) * p.bias_stride_b + work.head / p.heads_per_bias * p.bias_stride_h;
  auto with = [&](auto* values) {
    values += start;
    use([=](int query, int key) { return to_float(values[query * p.bias_stride_q + key * p.bias_stride_k]); });
  };
  if (p.bias_dtype == BiasDtype::kFloat32) {
    with(static_cast<const float*>(p.bias_values));
  } else if (p.bias_dtype == BiasDtype::kFloat16) {
    with(static_cast<const __half*>(p.bias_values));
  } else {
    with(static_cast<const __nv_bfloat16*>(p.bias_values));
  }
}

}  // namespace flash_dmattn
