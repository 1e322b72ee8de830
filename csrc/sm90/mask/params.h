// The arguments of the kernels of masks. B and H are the batch entries and the heads of the mask.
#pragma once

#include <cstddef>
#include <cstdint>

#include <vector_types.h>

#include "../../params.h"

namespace flash_dmattn {

// Packs a bool mask: its bits, and the class of each tile (empty, partial or full).
struct PackMaskParams {
  const uint8_t* mask;  // (B, H, Lq, Lk), any strides; 0 is False, any other byte True
  int32_t* bits;        // (B, H, Lq, 4 Tk), contiguous, aligned to 16 bytes
  uint8_t* classes;     // (B, H, Tq, Tk), contiguous
  int64_t stride_b, stride_h, stride_q, stride_k;
  int num_heads, seqlen_q, seqlen_k;
  int tiles_q, tiles_k;
  int strips;     // blocks along the keys
  int low, high;  // the band: low <= j - i <= high, both in [-Lq, Lk]
};

// Lists the tiles of each row and of each column that are not empty.
struct ListTilesParams {
  const uint8_t* classes;  // (B, H, Tq, Tk), contiguous, or (B, H, Tk, Tq) if columns are
  bool columns_are_contiguous;
  int32_t* row_lists;      // (B, H, Tq, 2 + Tk), contiguous
  int32_t* col_lists;      // (B, H, Tk, 2 + Tq), contiguous
  int64_t heads;           // B * H
  int64_t num_rows;        // of a launch, the row lists, which come first
  int64_t num_lists;       // of a launch
  int tiles_q, tiles_k;
};

// Causal top-k over one score per key, as intervals. All arrays are contiguous, (heads, Lk) but for thresholds.
struct TopkParams {
  const int32_t* keys;   // in the order of the scores; the lowest for what is not allowed
  int32_t* stops;        // scratch
  uint64_t* thresholds;  // scratch, (heads, chunks)
  // Scratch, (heads, segments, k) if there are several segments: the best of each, and of all before it.
  int32_t* best_of_segments;
  int32_t* survivors;
  int32_t* start;
  int32_t* stop;
  int64_t total;  // heads * Lk
  int k, local, seqlen_q, seqlen_k;
  int chunks, chunk_keys;
  int segments, segment_keys;  // whole chunks
};

// Codes of intervals, (heads, Lk), in whose order keys come: by head, dead keys last, similar intervals side by side.
struct KeyCodesParams {
  const int32_t* start;
  const int32_t* stop;
  uint32_t* codes;
  int32_t* keys;  // the key that each code is of
  int64_t total;  // heads * Lk
  int seqlen_q, seqlen_k;
};

// A stable sort of keys by the lowest `bits` of their codes.
struct SortCodesParams {
  const uint32_t* codes;
  uint32_t* sorted_codes;
  const int32_t* keys;
  int32_t* order;
  void* scratch;
  size_t scratch_bytes;
  int total, bits;
};

// Makes the form of an interval mask that the kernels walk: bounds by place, and the class of each tile.
struct IntervalTilesParams {
  const int32_t* start;  // (B, H, Lk), contiguous
  const int32_t* stop;   // (B, H, Lk), contiguous
  const int32_t* order;  // (B, H, Lk), contiguous; null where places are keys
  int2* bounds;          // (B, H, 128 Tk), contiguous
  uint8_t* classes;      // (B, H, Tk, Tq), contiguous
  int seqlen_q, seqlen_k, tiles_q, tiles_k;
};

// Lanes that copy a row of k or v.
constexpr int kGatherLanes = 8;

// Gathers k and v in an order of keys, and a bias per key in fp32. Heads of the bias' result share heads of the bias and of
// the order.
struct GatherKeysParams {
  struct Tensor {
    const void* from;  // (B, L, H, D), rows aligned to 16 bytes
    void* to;          // (B, length, H, D), contiguous
    int64_t stride_b, stride_l, stride_h;  // of `from`, in bytes
    int chunks;        // of 16 bytes in a row
  };
  Tensor k, v;
  PlacesOfKeys places;
  int64_t rows;  // B * length * H
  int num_heads;
  BiasValues bias;     // without values if there is none
  float* placed_bias;  // (bias_batch, bias_heads, length), contiguous
  int bias_batch, bias_heads;
  MaskHeads bias_masks;
  int32_t* cleared;  // set to 0; of floats, too, since 0 has no other bits
  int64_t num_cleared;
};

// Packs a bool mask with one row for all queries as an interval mask, and gathers what a call reads in its order. Or lists
// of tiles of a mask of all keys, as far as blocks of tiles are listed.
struct KeyMaskParams {
  const uint8_t* mask;  // (B, H, 1, Lk), any strides; 0 is False, any other byte True; null for all keys
  int64_t stride_b, stride_h, stride_k;
  bool has_batch;      // whether there are several B
  bool is_wide;        // rows start and end on 16 bytes and keys have unit stride
  int32_t* start;      // (B, H, Lk), contiguous
  int32_t* stop;       // (B, H, Lk), contiguous
  int32_t* order;      // (B, H, Lk), contiguous; null where places are keys
  int2* bounds;        // (B, H, 128 Tk), contiguous
  int32_t* row_lists;  // (B, H, Tq, 2 + Tk), contiguous
  int32_t* col_lists;  // (B, H, Tk, 2 + Tq), contiguous
  int num_heads, seqlen_q, seqlen_k, tiles_q, tiles_k;
  int low, high;               // the band: low <= j - i <= high, both in [-Lq, Lk]
  int first_seen, end_of_seen; // the keys that the band leaves to some query
  int blocks;                  // of a mask
  int32_t* counters;           // set to 0
  int num_counters;
  // With an order: k and v of all batch entries that read a mask, and all heads; null without.
  GatherKeysParams::Tensor k, v;
  int batch, num_heads_k;
  // The same of a bias per key; null without.
  BiasValues bias;
  float* placed_bias;  // (bias_batch, bias_heads, Lk), contiguous
  int bias_batch, bias_heads;
  // (B, H, num_lists, list_size), the blocks of keys of each block of queries, ascending, then -1; null for all tiles
  const int32_t* blocks_listed;
  int num_lists, list_size;
  int block_tiles_q, block_tiles_k;  // tiles of a block
};

// Bits of an interval mask, as a packed mask has them.
struct IntervalBitsParams {
  const int2* bounds;  // (B, H, 128 Tk), contiguous
  int32_t* bits;       // (B, H, Lq, 4 Tk), contiguous
  int seqlen_q, tiles_q, tiles_k;
};

}  // namespace flash_dmattn
