// Arithmetic of sizes and grids. Includes no CUDA, no torch.
#pragma once

#include <cstdint>
#include <limits>

namespace flash_dmattn {

constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
// Rounds down, also below 0.
inline int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }

}  // namespace flash_dmattn
