// tanh for the softcap. Every pass uses the same function, so that p of the backward pass agrees with lse.
#pragma once

#include "fragments.h"
#include "ptx.h"

namespace flash_dmattn {

// tanh(x) as (1 - e) / (1 + e), e = exp(-2 |x|), which cannot overflow.
__device__ __forceinline__ float tanh_exact(float x) {
  const float e = exp2_approx(-2.0f * kLog2e * fabsf(x));
  return copysignf((1.0f - e) * reciprocal_approx(1.0f + e), x);
}

// Its derivative, with an error of 2^-23 as in the plain formula. It is 0 for -inf, which marks a masked key.
__device__ __forceinline__ float slope_of_tanh(float tanh) { return __saturatef(fmaf(-tanh, tanh, 1.0f)); }

}  // namespace flash_dmattn
