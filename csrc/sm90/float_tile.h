// Reads of a tile of bias in fp32: panels of 32 keys, whose rows of 128 bytes TMA has swizzled. Lanes of one load find
// their values in different banks. backward/key_consumer.h reads tiles for scores whose rows are keys.
#pragma once

#include "../device/pipeline.h"

namespace flash_dmattn {

// For scores whose rows are queries. The tile has so many rows.
template <int kRows>
struct FloatTile {
  static constexpr int kColumns = kRowBytes / 4, kPairs = kColumns / 8;  // of a panel

  // Where the thread's first load of a row is, counted from the tile. Lanes of two neighbouring rows would share banks: in
  // odd rows they load the second half of a panel first.
  __device__ __forceinline__ static uint32_t first_of(int row, int lane) {
    const int chunk = lane % 4 / 2 ^ row % 8 ^ (row % 2 == 1 ? 4 : 0);
    return row * kRowBytes + (chunk << 4) + lane % 2 * 8;
  }

  // Calls use(c, r, pair) with the values of the thread's row r, 8 r behind the first, in its columns of the c-th 8.
  template <int kAllColumns, class Use>
  __device__ __forceinline__ static void for_each_pair(uint32_t first, bool is_odd, Use use) {
#pragma unroll
    for (int panel = 0; panel < kAllColumns / kColumns; ++panel) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint32_t words[kPairs][2];
#pragma unroll
        for (int c = 0; c < kPairs; ++c) {
          ld_shared_v2(words[c][0], words[c][1], (first ^ c * 32) + (panel * kRows + 8 * r) * kRowBytes);
        }
#pragma unroll
        for (int c = 0; c < kPairs; ++c) {
          const auto value = [&](int e) { return __uint_as_float(is_odd ? words[c ^ 2][e] : words[c][e]); };
          use(panel * kPairs + c, r, make_float2(value(0), value(1)));
        }
      }
    }
  }
};

}  // namespace flash_dmattn
