// The arguments of the backward kernels, and of the kernels before and after them.
#pragma once

#include <cstdint>

#include <cuda.h>

#include "../../params.h"
#include "../../sections.h"
#include "../sequences/params.h"

namespace flash_dmattn {

constexpr int kFlatSums = 8;  // of a key block: one for each warp of consumers

// The backward pass. Gradients that several blocks add to are summed in fp32, in accumulator tiles of 64 x 64
// (sm90/backward/accumulators.h). lse and delta are padded to whole tiles of queries.
struct BackwardParams : AttentionSizes {
  int head_dim;
  int low, high;  // as in ForwardParams
  // TMA descriptors, innermost dim first: (D, Lq, Hq, B), (D, Lk, Hk, B), (Dv, Lk, Hk, B), (Dv, Lq, Hq, B), and
  // (Lk, Lq, Hbias, Bbias) for tiles of bias and dbias.
  CUtensorMap q, k, v, dout, bias, dbias;
  void* dk;  // (B, Lk, Hk, D), contiguous; null if not needed
  void* dv;  // (B, Lk, Hk, Dv), contiguous; null if not needed
  // (pairs, blocks_k, kBlockN / 64, panels of D, 64 rows of a panel), zeros: for the (batch, key head) pairs whose
  // query heads are work tiles of their own. Null if there are none, or if the gradient is not needed.
  float* dk_sums;
  float* dv_sums;      // the same for Dv
  float* dq_sums;      // (B, Hq, 2 Tq, panels of D, 64 rows of a panel), zeros; null if not needed, or if dq is set.
                       // Turned: (B, Hq, blocks of 80 queries, 2, 64 columns of 80 queries)
  void* dq;            // (B, Lq, Hq, D), contiguous, if a work tile has all keys; else null
  int* dq_semaphore;   // (B, Hq, blocks of queries), zeros: how many key blocks have added to a query block; null if
                       // the order of additions is free
  int* dkv_semaphore;  // (B, Hk, blocks_k), zeros: how many heads of a group have added to a key block's dk_sums and
                       // dv_sums; null without dq_semaphore or those sums
  float* dbias_sums;   // (B, Hq, Lk), for a bias per key; null if not needed
  void* summed_dbias;  // (1, Hq, Lq, Lk), contiguous, Lk a multiple of 8, of a bias that batch entries share; else null
  int cluster;         // blocks in a cluster: one per batch entry where they sum dbias, else 1
  const float* lse;    // (B, Hq, padded_rows), base 2; +inf for empty rows and for padding, -inf in great ones
  const float* delta;  // (B, Hq, padded_rows), of BackwardRowsParams
  // For rows whose lse is great, in calls whose kernel has a bias (kGreatLse in operands.h): lse of all rows in two parts,
  // (B, Hq, padded_rows), and for each tile of 128 rows four bytes, of 32 rows each, which are not 0 where one is great.
  const float2* split_lse;
  const uint32_t* great_rows;
  float softmax_scale;

  MaskTiles mask;                    // with lists of columns; `ordered` below if the order of additions is fixed
  const int32_t* mask_predecessors;  // (Bm, Hm, Tk, Tq), `predecessors` below; null if the order is free
  // The key at each place of k, v and the bias, where those are in an order of keys; else null. dk, dv and dbias_sums
  // are in the order of the caller's keys.
  const int32_t* key_order;          // (Bm, Hm, Lk)

  BiasValues bias_values;  // of every kind of bias; its data is read for a bias per key

  // The tile scheduler's order. A work tile is one key block and the query heads that walk it: the whole group for the
  // first full_group_pairs (batch, key head) pairs, one query head for the others. A key block is a mask tile, half of
  // one (the second half of the last tile may be empty) or two. Both kinds come in sections of their own; rows are key
  // blocks, from the first on, or from the last on if the order of additions is fixed.
  Sections full_groups, single_heads;
  int full_group_pairs, blocks_k, num_work_tiles;
  int first_summed_pair;  // dk and dv of the pairs from this one on have sums
  bool batch_is_inner;  // batch entries of a head are neighbours; else heads of a batch entry are
  // A key block has walk_parts work tiles for each head, which share its walk and follow each other: each gets at most
  // walk_tiles tiles of queries, and one that gets none is skipped. 1 and 0 where walks stay whole and none is skipped.
  int walk_parts, walk_tiles;
  // Per-block decision of the schedule, only for masks that the heads of a group share; null when the host decides. For
  // each 64 keys of each pair: the work tile of the group's first head has the whole group, and its other heads have
  // none.
  const uint8_t* has_group;
  // Some walk of a mask is too long for a group: one byte for each of `masks` masks, and zeros up to a multiple of 4.
  // If any is set, no pair has full groups, and all pairs are in `all_heads`.
  const uint8_t* has_long;
  int masks;
  Sections all_heads;
  // Dynamic scheduling: tiles taken, not counting each block's first unless the order is fixed. Null for static
  // scheduling.
  int* tile_counter;

  // With a softcap a score is softcap * tanh(pre_scale * q k) + bias, as in ForwardParams; without one both are 0.
  float softcap, pre_scale;

  SequenceParams sequences;  // as in ForwardParams

  DropoutParams dropout;

  Distances distances;  // as in ForwardParams
  // If a window sums them: the sums of ds over flat tiles, (B, Hq, blocks_k, kFlatSums). x is of the tiles before
  // the values, y of the tiles behind them. Diagonals in this range have no flat tile.
  float2* flat_sums;
  int first_diagonal, last_diagonal;
};

// For a fixed order of additions: column lists whose query tiles ascend. Written before the backward kernel.
struct OrderListsParams {
  const int32_t* row_lists;  // (Bm, Hm, Tq, 2 + Tk)
  const int32_t* col_lists;  // (Bm, Hm, Tk, 2 + Tq)
  int32_t* ordered;          // (Bm, Hm, Tk, 2 + Tq): 0, the count, and the tiles that are not empty
  int32_t* predecessors;     // (Bm, Hm, Tk, Tq): for each of them, the tiles of later keys in its row
  int64_t num_lists;         // Bm * Hm * Tk
  int tiles_q, tiles_k;
};

// Writes zeros to a stored dbias where the main kernel has no tile. Columns are a multiple of 8, of 16 bits or in fp32.
struct ClearDbiasParams {
  void* x;                   // (number, num_heads, rows, columns), or (num_heads, rows, columns) of packed queries
  int64_t stride_b, stride_h, stride_q;  // of x, in 16 bytes; of entries 0 if queries are packed
  int number, num_heads;     // number: entries, or sequences
  int rows, columns;
  int low, high;             // the band of dense calls
  bool is_float;
  SequenceParams sequences;  // without bounds in dense calls
  bool packs_rows;           // rows are packed queries
  int shares;                // blocks of threads that share the rows of an entry and a head; set by the launch
  MaskTiles mask;            // with lists of rows, which then say everything; null for none
};

// Decides which key blocks have work tiles of whole groups, under a mask that the heads of a group share: walks differ,
// and the host does not know them.
struct GroupWalks {
  uint8_t *has_group, *has_long;  // results, as in BackwardParams; null where the host decides
  int masks;
  const int32_t* lists;  // (Bm, Hm, tiles, 2 + tiles_q), of the mask's columns
  int tiles, tiles_q;
  MaskHeads heads;  // of key heads
  // Key blocks whose queries fit into short_walk tiles have whole groups, if most key blocks of the mask are so short.
  // In the first full_group_pairs pairs all key blocks have whole groups, but for walks of more than `share` times the
  // mean walk of the mask, empty walks left out.
  int short_walk, full_group_pairs, share;
};

// The kernel before the backward kernel: lse in base 2, delta = rowsum(dout * out) - dlse, and zeros for accumulators.
struct BackwardRowsParams : AttentionSizes {
  const void* out;         // (B, Lq, Hq, Dv), contiguous
  const void* lse;         // (B, Hq, Lq), contiguous, fp32 or, as ForwardParams says, wide
  bool has_wide_lse;
  Rows dout;               // aligned to 16 bytes
  RowValues dlse;          // null for zeros
  BiasValues bias_values;  // one value per query, which changes lse; null for none
  float* lse_log2;         // (B, Hq, padded_rows)
  float* delta;            // (B, Hq, padded_rows)
  float2* split_lse;       // as in BackwardParams; null if not needed
  uint8_t* great_rows;
  int padded_rows;         // Lq in whole tiles of 128, or in whole blocks of queries; not of calls with sequences
  float* row_delta;        // (B, Hq, Lq), the same for the caller; null if not needed
  // Memory to clear: `zeros` times 16 bytes.
  void* cleared;
  int64_t zeros;
  // Accumulators of dk and dv that are cleared in part: in an order of keys only for live keys, with group walks only
  // where single heads add. Without both, `cleared` has them. An accumulator is null if it is not needed. It has
  // `floats` for each 64 rows, and `row_blocks` times 64 rows for each (batch, key head) pair.
  PlacesOfKeys places;
  GroupWalks group_walks;
  float* sums[2];
  int floats[2];
  int row_blocks, num_heads_k;
  bool batch_is_inner;

  SequenceParams sequences;  // as in ForwardParams; padded rows are its padded tiles
};

// The kernel after the backward kernel: converts accumulated dq, dk and dv to the dtype of q.
struct BackwardSumsParams {
  struct Result {
    const float* sums;  // (pairs, rows_per_pair / 64, panels, 64 * tile_columns)
    void* out;          // (B, L, H, columns), contiguous
    int64_t tiles;      // accumulator tiles of this result and of those before it
    // The first (batch, head) pair that has accumulators, and whether batch entries of a head are neighbours, or heads
    // of a batch entry.
    int first_pair;
    bool batch_is_inner;
    int batch, num_heads, seqlen, rows_per_pair, columns, panels, tile_columns;
    float factor;
    bool is_by_place;   // rows are places, and out is in the caller's order of keys
    bool lacks_groups;  // out has the rows of has_group already
  };
  Result turned;  // of dq, where its tiles are turned: 64 columns of 80 queries; rows_per_pair is a multiple of 80
  static constexpr int kResults = 3;
  SequenceParams sequences;  // of calls with sequences, which have one result: rows are padded tiles of queries
  PlacesOfKeys places;
  const uint8_t* has_group;  // as in BackwardParams
  Result results[kResults];  // a result that is not wanted has no tiles of its own
};

}  // namespace flash_dmattn
