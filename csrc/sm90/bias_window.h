// The window of a bias by distance: the values of a tile's differences of key and query, in fp32 in shared memory.
#pragma once

#include "bias_forms.h"
#include "operands.h"

namespace flash_dmattn {

// Scores have so many rows and columns. Value i is of column - row = i - (kRows - 1): the first one is of the last row and
// the first column. Places of the values ascend where rows are queries, and descend where rows are keys.
template <int kRows, int kColumns, bool kRowsAreKeys = false>
struct BiasWindow : WindowLayout<kRows, kColumns> {
  using Layout = WindowLayout<kRows, kColumns>;
  using Layout::kSecondCopy, Layout::kValues;

  // The place of the first value of a tile. Another order of these sums is other machine code.
  __device__ __forceinline__ static int first_place(const Distances& of, int first_query, int first_key) {
    if constexpr (kRowsAreKeys) return of.origin + (first_key + kRows) - 1 - first_query;
    return of.origin + first_key - (first_query + kRows - 1);
  }

  // Whether all values are one.
  __device__ __forceinline__ static bool is_flat(const Distances& of, int first) {
    static_assert(!kRowsAreKeys);
    return first + kValues - 1 <= of.lowest || first >= of.highest;
  }

  // Writes values from the first on, as one warp; a flat window needs no others. value_at(0, place) returns one. The second
  // copy begins with the second value, so that any two neighbours start on 8 bytes in one of them.
  template <class F>
  __device__ __forceinline__ static void write(float* to, const Distances& of, int first, int count, F value_at) {
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < count; i += 32) {
      const int place = min(max(kRowsAreKeys ? first - i : first + i, of.lowest), of.highest);
      const float value = place >= 0 && place < of.number ? value_at(0, place) : 0.0f;
      to[i] = value;
      if (i > 0) to[kSecondCopy + i - 1] = value;
    }
  }

  // Where the first two values of a row of the lane lie, in floats.
  __device__ __forceinline__ static int pair_of(int row, int lane) {
    const int i = kRows - 1 - row + 2 * (lane % 4);
    return i % 2 == 0 ? i : kSecondCopy + i - 1;
  }

  // Calls use(c, pairs) with the values of the thread's two rows in its columns of the c-th 8. load(c) loads the c-th pair of
  // the second row. The first row, 8 before it, has the values of the next 8 columns.
  template <class Load, class Use>
  __device__ __forceinline__ static void for_each_pair(Load load, Use use) {
    float2 pairs[2];
    pairs[1] = load(0);
#pragma unroll
    for (int c = 0; c < kColumns / 8; ++c) {
      pairs[0] = load(c + 1);
      use(c, pairs);
      pairs[1] = pairs[0];
    }
  }
};

}  // namespace flash_dmattn
