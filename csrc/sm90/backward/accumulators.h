// Accumulators of dq, dk and dv in device memory: tiles of 64 x 64 floats (64 x 32 at D32), laid out as a warpgroup's
// threads hold them.
#pragma once

#include "launch.h"

namespace flash_dmattn {

// Where a thread's four values of the c-th 8 columns lie: its two rows by its two columns (device/fragments.h).
__device__ __forceinline__ int accum_offset(int c, int thread) { return (c * 128 + thread) * 4; }

// Floats of a turned tile of dq: 64 columns of kTurnedBlockM queries.
constexpr int kTurnedFloats = kAccumColumns * kTurnedBlockM;

}  // namespace flash_dmattn
