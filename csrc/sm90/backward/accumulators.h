// How sums of dq, dk and dv lie in device memory: pieces of 64 rows and 64 columns, as a warpgroup's threads hold them.
#pragma once

#include "launch.h"

namespace flash_dmattn {

// Four sums of a thread: its two rows and two columns of the c-th 8 columns; see device/fragments.h.
__device__ __forceinline__ int place_in_piece(int c, int thread) { return (c * 128 + thread) * 4; }

}  // namespace flash_dmattn
