// Matrix descriptors of wgmma: operands in shared memory.
#pragma once

#include "ptx.h"
#include "wgmma_instructions.h"

namespace flash_dmattn {

// A tile in shared memory is a sequence of panels of 64 columns. A panel has rows of 128 bytes and TMA's 128-byte
// swizzle: the 16-byte chunk c of row r lies at chunk c ^ (r % 8). A panel starts on 1024 bytes.
constexpr int kPanelColumns = 64;
constexpr int kRowBytes = 128;
constexpr int kSwizzleBytes = 8 * kRowBytes;

// Bits 0-13 address, 16-29 leading offset, 32-45 stride offset, all in units of 16 bytes; 62-63 swizzle mode, 1 for 128
// bytes.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, int leading_bytes) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(leading_bytes >> 4) << 16 |
         static_cast<uint64_t>(kSwizzleBytes >> 4) << 32 | uint64_t{1} << 62;
}

// The descriptor for the k-th 16 columns of a tile of kRows rows, if K runs along the columns (K-major).
template <int kRows>
__device__ __forceinline__ uint64_t advance_k_major(uint64_t tile, int k) {
  constexpr int kSteps = kPanelColumns / 16;
  return tile + static_cast<uint64_t>((k / kSteps * kRows * kRowBytes + k % kSteps * 32) >> 4);
}

// The descriptor for the k-th 16 rows, if K runs along the rows (M- or N-major).
__device__ __forceinline__ uint64_t advance_mn_major(uint64_t tile, int k) {
  return tile + static_cast<uint64_t>((k * 16 * kRowBytes) >> 4);
}

}  // namespace flash_dmattn
