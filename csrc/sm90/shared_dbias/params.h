// The arguments of the shared_dbias kernel, and of the kernel that adds its chunks.
#pragma once

#include <cstdint>

#include <cuda.h>

#include "../../params.h"
#include "../sequences/params.h"

namespace flash_dmattn {

// dbias of a bias per query and key that several attention heads share; or the sums of ds along diagonals, for the
// gradient of a bias by distance. A tile of dbias is then a diagonal of tiles of scores.
struct SharedDbiasParams : AttentionSizes {
  int low, high;  // as in ForwardParams
  // TMA descriptors, innermost dim first: (D, Lq, Hq, B), (D, Lk, Hk, B), (Dv, Lk, Hk, B), (Dv, Lq, Hq, B),
  // (Lk, Lq, Hbias, Bbias).
  CUtensorMap q, k, v, dout, bias;
  void* dbias;         // (Bd, Hd, Lq, Lk), contiguous, Lk a multiple of 8; not written if there are slots
  // (chunks, Bd, Hd, Lq, slot_columns), the sums of each chunk; null if dbias is written. A dbias in fp32 is a slot itself
  // then. By distance
  // (chunks, Bd, Hd, diagonals, kDiagonalFloats).
  float* slots;
  const float* lse;    // (B, Hq, 128 Tq), base 2; +inf for empty rows and for padding, -inf in great ones
  const float2* split_lse;  // as in BackwardParams
  const float* delta;  // (B, Hq, 128 Tq)
  float softmax_scale;

  MaskTiles mask;          // bits, with lists of rows
  BiasValues bias_values;  // may be expanded where dbias is not; its data is read as tiles, in fp32 by kernels of their own

  // Heads of dbias in a batch entry, query heads that share one (Hq / Hd), and attention heads summed into one over all
  // batch entries.
  int dbias_heads, heads_per_dbias, heads_summed;

  // The heads that are summed into a tile of dbias are shared out over `chunks` work tiles: as many for each, but one
  // more for the first ones. 1 without slots, or where they only have another length of rows than dbias.
  int chunks;
  int64_t slot_floats;  // of one chunk
  int slot_columns;     // Lk, rounded up to a multiple of 8

  int tiles_q, tiles_k;
  int dbias_tiles, num_work_tiles;  // Bd * Hd * Tq * Tk, and that times chunks
  int* tile_counter;  // dynamic scheduling: tiles taken beyond each block's first; null if there are no more

  float softcap, pre_scale;  // as in BackwardParams

  // As in ForwardParams. With sequences batch, seqlen_q and seqlen_k are the sizes of a bias by position.
  SequenceParams sequences;

  DropoutParams dropout;

  // For a bias by distance, whose work tiles are so many diagonals from the first on; else without values. The number of a
  // diagonal is the tile of keys minus the tile of queries.
  Distances distances;
  int first_diagonal, diagonals;
};

// The distances of a tile, and a place that is always 0.
constexpr int kDiagonalFloats = 2 * kTile;

// dbias from the slots of the shared_dbias kernel.
struct AddChunksParams {
  const float* slots;  // (chunks, rows, slot_columns)
  void* dbias;         // (rows, Lk), contiguous, of the kernel's dtype
  int64_t rows;        // Bd * Hd * Lq
  int chunks, slot_columns, seqlen_k;
  bool stores_fours;   // rows of dbias are a multiple of four keys
};

// The gradient of a bias by distance, from sums along diagonals.
struct AddDiagonalsParams {
  const float* slots;       // as in SharedDbiasParams
  const float2* flat_sums;  // (B, Hq, sums_of_head), as in BackwardParams; null if no tile is flat
  void* dvalues;            // (owners, distances.number), contiguous, of the dtype of the values
  BiasDtype dtype;
  Distances distances;
  bool clamps;              // places beyond the values have the first and the last one
  int owners, chunks, first_diagonal, diagonals;
  int num_heads, dbias_heads, heads_per_dbias, heads_summed;  // as in SharedDbiasParams
  int sums_of_head;
};

}  // namespace flash_dmattn
