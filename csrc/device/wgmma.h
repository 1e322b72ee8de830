// Products of a warpgroup: descriptors of operands in shared memory.
#pragma once

#include "ptx.h"
#include "wgmma_instructions.h"

namespace flash_dmattn {

// Shared memory holds a tile as panels of 64 columns, rows of 128 bytes, swizzled as the copy engine's 128-byte mode
// does: the 16-byte chunk c of row r lies at chunk c ^ (r % 8). A panel starts on 1024 bytes.
constexpr int kPanelColumns = 64;
constexpr int kRowBytes = 128;
constexpr int kSwizzleBytes = 8 * kRowBytes;

// Bits 0-13 address, 16-29 leading offset, 32-45 stride offset, all in 16 bytes; 62-63 the swizzle, 1 for 128 bytes.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, int leading_bytes) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(leading_bytes >> 4) << 16 |
         static_cast<uint64_t>(kSwizzleBytes >> 4) << 32 | uint64_t{1} << 62;
}

// Columns are the dimension that is summed over: step k of 16 columns of a tile of kRows rows, from its first row on.
template <int kRows>
__device__ __forceinline__ uint64_t step_by_columns(uint64_t tile, int k) {
  constexpr int kSteps = kPanelColumns / 16;
  return tile + static_cast<uint64_t>((k / kSteps * kRows * kRowBytes + k % kSteps * 32) >> 4);
}

// Rows are the dimension that is summed over: step k of 16 rows.
__device__ __forceinline__ uint64_t step_by_rows(uint64_t tile, int k) {
  return tile + static_cast<uint64_t>((k * 16 * kRowBytes) >> 4);
}

}  // namespace flash_dmattn
