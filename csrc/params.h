// The arguments of every kernel.
#pragma once

#include <cstdint>

namespace flash_dmattn {

constexpr int kTile = 128;  // queries and keys of a mask tile
constexpr int kWord = 32;   // keys of a word of bits
constexpr int kTileWords = kTile / kWord;

// B batch, H heads, Lq / Lk query and key length, Tq / Tk = ceil(Lq / 128), ceil(Lk / 128); sizes and counts fit int32,
// every offset is 64 bits.
struct PackMaskParams {
  const uint8_t* mask;  // (B, H, Lq, Lk), bytes 0 and 1, any strides
  int32_t* bits;        // (B, H, Lq, 4 Tk), contiguous, on 16 bytes
  uint8_t* classes;     // (B, H, Tq, Tk), contiguous
  int64_t stride_b, stride_h, stride_q, stride_k;
  int num_heads, seqlen_q, seqlen_k;
  int tiles_q, tiles_k;
  int strips;     // blocks along the keys
  int low, high;  // the band: low <= j - i <= high, both in [-Lq, Lk]
};

struct ListTilesParams {
  const uint8_t* classes;  // (B, H, Tq, Tk), contiguous
  int32_t* row_lists;      // (B, H, Tq, 2 + Tk), contiguous
  int32_t* col_lists;      // (B, H, Tk, 2 + Tq), contiguous
  int64_t num_rows;        // B * H * Tq
  int64_t num_lists;       // B * H * (Tq + Tk)
  int tiles_q, tiles_k;
};

}  // namespace flash_dmattn
