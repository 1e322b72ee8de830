// Dropout of probabilities: which are kept, as flash_dmattn/reference/dropout.py has it.
//
// A call of Philox serves two queries and two keys that are 8 apart. A thread has all four in its fragment, with
// queries in rows or in columns.
#pragma once

#include <cstdint>

#include "../params.h"

namespace flash_dmattn {

// The four words of Philox4x32-7. Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
__device__ __forceinline__ void philox(uint32_t key_a, uint32_t key_b, uint32_t a, uint32_t b, uint32_t c, uint32_t d,
                                       uint32_t (&words)[4]) {
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    const uint64_t x = uint64_t{0xD2511F53u} * a, y = uint64_t{0xCD9E8D57u} * c;
    a = static_cast<uint32_t>(y >> 32) ^ b ^ key_a;
    b = static_cast<uint32_t>(y);
    c = static_cast<uint32_t>(x >> 32) ^ d ^ key_b;
    d = static_cast<uint32_t>(x);
    key_a += 0x9E3779B9u;
    key_b += 0xBB67AE85u;
  }
  words[0] = a, words[1] = b, words[2] = c, words[3] = d;
}

// The counter of a query or a key: its number without its bit 3.
__device__ __forceinline__ uint32_t dropout_counter(int number) { return number / 16 * 8 + number % 8; }

// Which scores of a thread are kept, a bit for each: kCount of them, 16 columns after the other, as an accumulator of a
// product has them. `row` and `column` are the first of each that the thread has, neither with bit 3.
template <int kCount, bool kRowsAreQueries>
__device__ __forceinline__ void find_kept(uint32_t (&kept)[kCount / 32], const DropoutParams& p, int entry, int head,
                                          int row, int column) {
  // Loaded each time: no registers are left to keep them in.
  const uint64_t second = static_cast<uint64_t>(p.key[1]);
  const uint32_t key_a = static_cast<uint32_t>(p.key[0]), key_b = static_cast<uint32_t>(second);
  if (second >> 32 != 0) {  // a part of a call: what follows says where it begins
    const uint64_t tile = static_cast<uint64_t>(p.key[2]), batch = static_cast<uint64_t>(p.key[3]);
    row += static_cast<int>(kRowsAreQueries ? tile : tile >> 32);
    column += static_cast<int>(kRowsAreQueries ? tile >> 32 : tile);
    head += static_cast<int>(batch);
    entry += static_cast<int>(batch >> 32);
  }
  const uint32_t row_counter = dropout_counter(row), column_counter = dropout_counter(column);
#pragma unroll
  for (int w = 0; w < kCount / 32; ++w) {
    // A round adds 8 bits at the top and moves older ones down: in the end it is bit 8 (i % 4) + 4 half + 2 r + e.
    uint32_t bits = 0;
    // A loop: ptxas would have several calls under way, and spill what the products have summed.
#pragma unroll 1
    for (int i = 4 * w; i < 4 * w + 4; ++i) {
      bits >>= 8;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint32_t other = column_counter + 8 * i + e;
        uint32_t words[4];
        philox(key_a, key_b, kRowsAreQueries ? other : row_counter, kRowsAreQueries ? row_counter : other, head, entry, words);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const uint32_t word = words[kRowsAreQueries ? 2 * r + half : 2 * half + r];
            bits |= word >= p.threshold ? 1u << (24 + 4 * half + 2 * r + e) : 0u;
          }
        }
      }
    }
    kept[w] = bits;
  }
}

template <int kWords>
__device__ __forceinline__ bool is_kept(const uint32_t (&kept)[kWords], int i) {
  return kept[i / 32] >> (i % 32) & 1u;
}

}  // namespace flash_dmattn
