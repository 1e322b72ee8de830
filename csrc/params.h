// The arguments of every kernel.
#pragma once

#include <cstdint>

#include <cuda.h>
#include <vector_types.h>

#include "sections.h"
#include "tile.h"

namespace flash_dmattn {

// Shapes: B batch, H heads, Lq / Lk query and key lengths, Tq / Tk = ceil(Lq / 128), ceil(Lk / 128). Sizes and counts
// fit int32; every offset is 64 bits.
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
  int32_t* of_segments;
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

// A stable sort of keys by their codes, of which the lowest `bits` count.
struct SortCodesParams {
  const uint32_t* codes;
  uint32_t* sorted_codes;
  const int32_t* keys;
  int32_t* order;
  void* scratch;
  size_t scratch_bytes;
  int total, bits;
};

enum class BiasDtype { kFloat32, kFloat16, kBFloat16 };

// What the kernels walk of an interval mask: bounds by place, and the class of each tile.
struct IntervalTilesParams {
  const int32_t* start;  // (B, H, Lk), contiguous
  const int32_t* stop;   // (B, H, Lk), contiguous
  const int32_t* order;  // (B, H, Lk), contiguous; null where places are keys
  int2* bounds;          // (B, H, 128 Tk), contiguous
  uint8_t* classes;      // (B, H, Tk, Tq), contiguous
  int seqlen_q, seqlen_k, tiles_q, tiles_k;
};

// k and v by place.
struct GatherKeysParams {
  struct Rows {
    const void* from;  // (B, L, H, D), rows aligned to 16 bytes
    void* to;          // (B, L, H, D), contiguous
    int64_t stride_b, stride_l, stride_h;  // of `from`, in bytes
    int chunks;        // of 16 bytes in a row
  };
  Rows k, v;
  const int32_t* order;  // (Bm, Hm, L)
  const int2* bounds;    // (Bm, Hm, 128 T)
  int64_t rows;          // B * L * H
  int seqlen, num_heads, tiles;
  int heads_per_mask, mask_heads;
  bool mask_has_batch;
};

// A bias per key by place, in fp32. Heads of the result share those of bias and of order.
struct GatherBiasParams {
  const void* values;
  int64_t stride_b, stride_h, stride_k;  // of values, in elements; 0 where one value serves every index
  BiasDtype dtype;
  float* to;             // (batch, heads, L), contiguous
  const int32_t* order;  // (Bm, Hm, L)
  int64_t total;         // batch * heads * L
  int seqlen, heads;
  int heads_per_bias, heads_per_mask, mask_heads;
  bool mask_has_batch;
};

// Bits of an interval mask, as a packed mask has them.
struct IntervalBitsParams {
  const int2* bounds;  // (B, H, 128 Tk), contiguous
  int32_t* bits;       // (B, H, Lq, 4 Tk), contiguous
  int seqlen_q, tiles_q, tiles_k;
};

// The smallest page of keys that kernels read.
constexpr int kLeastPage = 16;

// Rows of a ragged TMA descriptor (api/tensor_map.h).
constexpr int kRaggedRows = 1 << 30;

// Sequences of many lengths, S of them, whose rows lie in entries of q and k: one entry of all tokens (packed), or one for
// each sequence.
struct SequenceParams {
  const int4* bounds;  // (S): first and number of queries, first and number of keys; within an entry
  bool packs_queries, packs_keys;
  int rows_q, rows_k;  // of an entry
  int most_q, most_k;  // no sequence has more
  int left, right;     // the window about the last diagonal of each sequence; not negative
  // Whether rows of a bias are those of packed queries, or its columns packed keys; else both are places in a sequence.
  bool bias_packs_queries, bias_packs_keys;
  int padded_tiles;  // of queries of all sequences, padded to whole tiles of each: at most this many
  // The work tiles of a head, longest first: a sequence and a block of it. Sections have so many heads.
  const int2* works;
  const int* num_works;
  int section;
  // The sequence of each padded tile, -1 for none; only of the backward pass.
  const int* sequence_of_tile;
  // Keys in pages, of the forward pass alone: (S), rows of `table_stride`, entry j / page_size is the page of key j. Null
  // without. A page is page_rows_k rows of k behind the one before it, page_rows_v of v. A box of a TMA descriptor has
  // page_box rows, and no box lies in two pages.
  const int* block_table;
  int64_t table_stride;
  int table_columns, pages, page_size, page_box, page_rows_k, page_rows_v;
};

// What lists the work tiles of a head: blocks of queries, or of keys. Writes SequenceParams' arrays.
struct ListWorksParams {
  SequenceParams sequences;
  int number;   // S
  bool by_keys;
  int rows;     // of a block
  int* firsts;  // scratch, (S)
  int2* works;
  int* num_works;
  int* counter;           // set to 0; null if not needed
  int* sequence_of_tile;  // null if not needed
};

// What writes the rows of no sequence: zeros, and -inf to lse.
struct FillGapsParams {
  const int4* bounds;
  int number;  // S
  bool of_keys, packs_rows;
  int rows;         // of an entry
  int chunks;       // of 16 bytes in a row of x
  void* x;          // (entries, rows, chunks)
  float* lse;       // (entries, num_heads, rows); null for none
  int num_heads;
};

// What writes zeros to a stored dbias where the main kernel has no tile; columns are a multiple of 8, of 16 bits.
struct ClearDbiasParams {
  void* x;                   // (number, num_heads, rows, columns), or (num_heads, rows, columns) of packed queries
  int64_t stride_b, stride_h, stride_q;  // of x, in 16 bytes; of entries 0 if queries are packed
  int number, num_heads;     // number: entries, or sequences
  int rows, columns;
  int low, high;             // the band of dense calls
  SequenceParams sequences;  // without bounds in dense calls
  bool packs_rows;           // rows are those of packed queries
  int shares;                // blocks of threads that share the rows of an entry and a head; set by the launch
  // Of a mask, which then says it all: (Bm, Hm, Tq, 2 + Tk), lists of rows. Null without.
  const int32_t* mask_lists;
  int heads_per_mask, mask_heads;
  bool mask_has_batch;
};

// Dropout of probabilities: flash_dmattn/reference/dropout.py says which are kept.
struct DropoutParams {
  const int64_t* key;  // (2); null for none
  uint32_t threshold;  // what is kept has a word of at least this
  float scale;         // and is multiplied by this
};

// How a mask is read: not at all, as bits, or as the queries that see each key, [x, y) of its bounds.
enum class MaskForm { kNone, kTiles, kIntervals };

// Shapes: Hq / Hk query and key-value heads, D / Dv head dims of q, k and of v. The band lets query i attend key j
// where low <= j - i <= high.
struct ForwardParams {
  // TMA descriptors, innermost dim first: (D, Lq, Hq, B), (D, Lk, Hk, B), (Dv, Lk, Hk, B), and (Lk, Lq, Hbias, Bbias)
  // for a bias that is read as tiles.
  CUtensorMap q, k, v, bias;
  void* out;   // (B, Lq, Hq, Dv), entry by entry; in one, rows and heads are so many vectors of Dv apart
  int out_row_step, out_head_step;
  float* lse;  // (B, Hq, Lq), contiguous, natural logarithm

  int batch, num_heads, seqlen_q, seqlen_k, head_dim_v;
  int heads_per_group;  // Hq / Hk
  int low, high;        // the band, both in [-Lq, Lk]

  // A score is scale * f(q k) + bias, and scale is positive. f(x) is softcap * tanh(pre_scale * x) with a softcap,
  // pre_scale * x if only pre_scale is set, and x otherwise.
  float scale, inverse_scale, softcap, pre_scale;
  bool transforms;  // f(x) is not x

  // The mask, by tiles; heads_per_mask query heads share one.
  const int32_t* mask_bits;   // (Bm, Hm, Lq, 4 Tk), for MaskForm::kTiles
  const int2* mask_bounds;    // (Bm, Hm, 128 Tk), for MaskForm::kIntervals
  const int32_t* mask_lists;  // (Bm, Hm, Tq, 2 + Tk)
  int heads_per_mask, mask_heads;
  bool mask_has_batch;

  // A bias that is not read as tiles. Strides count elements of bias_dtype; 0 where one value serves every index.
  const void* bias_values;
  int64_t bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k;
  BiasDtype bias_dtype;
  // For every kind of bias: heads_per_bias query heads share one; bias_has_batch says whether batch entries have their
  // own.
  int heads_per_bias;
  bool bias_has_batch;
  bool bias_is_per_query;  // one value per query: it changes lse only

  Sections sections;  // of (batch, head) pairs; rows are blocks of queries, from the last on
  int blocks_q, num_work_tiles;
  bool batch_is_inner;  // batch entries of a head are neighbours; else heads of a batch entry are
  int* tile_counter;    // dynamic scheduling: tiles taken beyond each block's first; null for static

  // Split-KV: every work tile from number `unsplit_tiles` on is handed out num_splits times, each time with a share of
  // its keys. num_work_tiles counts those.
  int unsplit_tiles, num_splits;  // 1 without splits
  float* split_results;           // (split tiles, num_splits, ForwardTile::split_floats): see forward/split_kv.h
  int* split_arrivals;            // (split tiles, consumer warps), zeros

  // One more logit in every row of a head, without a value; null for none.
  const void* sink;  // (Hq), contiguous
  BiasDtype sink_dtype;

  SequenceParams sequences;  // of calls with sequences, whose kernels read no batch, seqlen_q, seqlen_k, low and high

  DropoutParams dropout;
};

// The backward pass. Gradients that several blocks add to are summed in fp32, in accumulator tiles of 64 x 64
// (sm90/backward/accumulators.h). lse and delta are padded to whole tiles of queries.
struct BackwardParams {
  // TMA descriptors, innermost dim first: (D, Lq, Hq, B), (D, Lk, Hk, B), (Dv, Lk, Hk, B), (Dv, Lq, Hq, B), and
  // (Lk, Lq, Hbias, Bbias) for tiles of bias and dbias.
  CUtensorMap q, k, v, dout, bias, dbias;
  void* dk;  // (B, Lk, Hk, D), contiguous; null if not needed
  void* dv;  // (B, Lk, Hk, Dv), contiguous; null if not needed
  // (pairs, blocks_k, kBlockN / 64, panels of D, 64 rows of a panel), zeros: for the (batch, key head) pairs whose query
  // heads are work tiles of their own. Null if there are none, or if the gradient is not needed.
  float* dk_sums;
  float* dv_sums;      // the same for Dv
  float* dq_sums;      // (B, Hq, 2 Tq, panels of D, 64 rows of a panel), zeros; null if not needed, or if dq is given.
                       // Turned: (B, Hq, blocks of 80 queries, 2, 64 columns of them)
  void* dq;            // (B, Lq, Hq, D), contiguous, if a work tile has all keys; else null
  int* dq_semaphore;   // (B, Hq, blocks of queries), zeros: how many key blocks have added to a query block; null if
                       // the order of additions is free
  int* dkv_semaphore;  // (B, Hk, blocks_k), zeros: how many heads of a group have added to a key block's dk_sums and
                       // dv_sums; null without dq_semaphore or those sums
  float* dbias_sums;   // (B, Hq, Lk), for a bias per key; null if not needed
  void* summed_dbias;  // (1, Hq, Lq, Lk), contiguous, Lk a multiple of 8, of a bias that batch entries share; else null
  int cluster;         // blocks in a cluster: one per batch entry where they sum dbias, else 1
  const float* lse;    // (B, Hq, padded_rows), base 2; +inf for empty rows and for padding
  const float* delta;  // (B, Hq, padded_rows), of BackwardRowsParams

  int batch, num_heads, seqlen_q, seqlen_k, head_dim, head_dim_v;
  int heads_per_group;  // Hq / Hk
  int low, high;        // the band, both in [-Lq, Lk]
  float softmax_scale;

  // The mask, by tiles, as in ForwardParams.
  const int32_t* mask_bits;          // (Bm, Hm, Lq, 4 Tk), for MaskForm::kTiles
  const int2* mask_bounds;           // (Bm, Hm, 128 Tk), for MaskForm::kIntervals
  // The key at each place of k, v and the bias, where those are in an order of their own; else null. dk, dv and
  // dbias_sums are in the order of keys.
  const int32_t* key_order;          // (Bm, Hm, Lk)
  const int32_t* mask_lists;         // (Bm, Hm, Tk, 2 + Tq), lists of columns; `ordered` below if the order is fixed
  const int32_t* mask_predecessors;  // (Bm, Hm, Tk, Tq), `predecessors` below; null if the order is free
  int heads_per_mask, mask_heads;
  bool mask_has_batch;

  // A bias per key. Strides count elements of bias_dtype; 0 where one value serves every index.
  const void* bias_values;
  int64_t bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k;
  BiasDtype bias_dtype;
  // For every kind of bias: heads_per_bias query heads share one; bias_has_batch says whether batch entries have their
  // own.
  int heads_per_bias;
  bool bias_has_batch;

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
  // Where blocks decide, under a mask that heads of a group share. Null: the host has decided.
  const uint8_t* has_group;  // for each 64 keys of each pair: in the work of single heads the first has the whole group
  // For each of `masks` masks, and zeros up to a multiple of 4: some walk is too long for a group. Then no pair has full
  // groups, and all are in `all_heads`.
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

// dbias of a bias per query and key that several attention heads share.
struct SharedDbiasParams {
  // TMA descriptors, innermost dim first: (D, Lq, Hq, B), (D, Lk, Hk, B), (Dv, Lk, Hk, B), (Dv, Lq, Hq, B),
  // (Lk, Lq, Hbias, Bbias).
  CUtensorMap q, k, v, dout, bias;
  void* dbias;         // (Bd, Hd, Lq, Lk), contiguous, Lk a multiple of 8; not written if there are slots
  float* slots;        // (chunks, Bd, Hd, Lq, slot_columns), the sums of each chunk; null if dbias is written
  const float* lse;    // (B, Hq, 128 Tq), base 2; +inf for empty rows and for padding
  const float* delta;  // (B, Hq, 128 Tq)

  int batch, num_heads, seqlen_q, seqlen_k, head_dim_v;
  int heads_per_group;  // Hq / Hk
  int low, high;        // the band, both in [-Lq, Lk]
  float softmax_scale;

  // The mask, packed as tiles; heads_per_mask query heads share one.
  const int32_t* mask_bits;   // (Bm, Hm, Lq, 4 Tk)
  const int32_t* mask_lists;  // (Bm, Hm, Tq, 2 + Tk)
  int heads_per_mask, mask_heads;
  bool mask_has_batch;

  // The bias; it may be expanded where dbias is not. heads_per_bias query heads share one; bias_has_batch says whether
  // batch entries have their own.
  int heads_per_bias;
  bool bias_has_batch;

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

  // As in ForwardParams; batch, seqlen_q and seqlen_k are those of a bias by position then.
  SequenceParams sequences;

  DropoutParams dropout;
};

// dbias from the slots of the shared_dbias kernel.
struct AddChunksParams {
  const float* slots;  // (chunks, rows, slot_columns)
  void* dbias;         // (rows, Lk), contiguous
  int64_t rows;        // Bd * Hd * Lq
  int chunks, slot_columns, seqlen_k;
  bool stores_fours;   // rows of dbias start on 8 bytes
};

// Rows that are places of an order of keys, live keys first, in accumulators of (batch, key head) pairs. Those of tiles
// of dead keys alone are neither cleared nor read.
struct PlacesOfKeys {
  const int32_t* order;  // (Bm, Hm, length); null where rows are keys
  const int2* bounds;    // (Bm, Hm, 128 tiles)
  int length, tiles;
  int heads_per_mask, mask_heads;  // key heads
  bool mask_has_batch;
};

// Which key blocks have work tiles of whole groups, under a mask that the heads of a group share: walks differ, and the
// host does not know them.
struct GroupWalks {
  uint8_t *has_group, *has_long;  // results, as in BackwardParams; null where the host decides
  int masks;
  const int32_t* lists;  // (Bm, Hm, tiles, 2 + tiles_q), of the mask's columns
  int tiles, tiles_q;
  int heads_per_mask, mask_heads;  // key heads
  bool mask_has_batch;
  // Those with walks of up to short_walk tiles of queries, if most of the mask's are. Of the first full_group_pairs pairs
  // all, but for walks more than `share` times as long as the mask's on the mean, those of no tiles left out.
  int short_walk, full_group_pairs, share;
};

// The kernel before the backward kernel: lse in base 2, delta = rowsum(dout * out) - dlse, and zeros for accumulators.
struct BackwardRowsParams {
  const void* out;    // (B, Lq, Hq, Dv), contiguous
  const void* dout;   // (B, Lq, Hq, Dv), rows aligned to 16 bytes
  const float* lse;   // (B, Hq, Lq), contiguous
  const float* dlse;  // (B, Hq, Lq), any strides; null for zeros
  int64_t dout_stride_b, dout_stride_q, dout_stride_h;
  int64_t dlse_stride_b, dlse_stride_h, dlse_stride_q;
  // A bias per query, which changes lse; null for none.
  const void* bias_values;
  int64_t bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k;
  BiasDtype bias_dtype;
  int heads_per_bias;
  bool bias_has_batch;
  float* lse_log2;   // (B, Hq, padded_rows)
  float* delta;      // (B, Hq, padded_rows)
  int padded_rows;   // Lq in whole tiles of 128, or in whole blocks of queries; not of calls with sequences
  float* row_delta;  // (B, Hq, Lq), the same for the caller; null if not needed
  int batch, num_heads, seqlen_q, head_dim_v;
  // Memory to clear: `zeros` times 16 bytes.
  void* cleared;
  int64_t zeros;
  // Accumulators of dk and dv of which not all are cleared: of places those of live keys, else those that single heads
  // add to. `floats` for each 64 rows, `row_blocks` times for each (batch, key head) pair. Neither places nor group
  // walks: there are none. Null: this one is not needed.
  PlacesOfKeys places;
  GroupWalks group_walks;
  float* sums[2];
  int floats[2];
  int row_blocks, num_heads_k;
  bool batch_is_inner;

  SequenceParams sequences;  // as in ForwardParams; padded rows are its padded tiles
};

// delta of sequences of few keys, summed from scores. In the place of what the kernel before wrote.
struct FewKeysParams {
  struct Rows {
    const void* data;
    int64_t stride_b, stride_l, stride_h;  // in elements
  };
  Rows q, k, v, dout;
  const float* dlse;  // as in BackwardRowsParams; null for zeros
  int64_t dlse_stride_b, dlse_stride_h, dlse_stride_q;
  const float* lse;  // (Hq, 128 padded_tiles), base 2
  float* delta;      // (Hq, 128 padded_tiles)
  float* row_delta;  // as in BackwardRowsParams
  // A bias, but for one value per query, which lse does not have any more. Null for none.
  const void* bias_values;
  int64_t bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k;
  BiasDtype bias_dtype;
  int heads_per_bias;
  bool bias_has_batch;
  int num_heads, heads_per_group, head_dim, head_dim_v;
  float softmax_scale;
  SequenceParams sequences;
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
    bool is_by_place;  // rows are those of `places`, and out is in the order of keys
    bool lacks_groups;  // rows of has_group are in out already
  };
  Result turned;  // of dq, where its tiles are turned: 64 columns of 80 queries; rows_per_pair is a multiple of 80
  static constexpr int kResults = 3;
  SequenceParams sequences;  // of calls with sequences, which have one result: rows are padded tiles of queries
  PlacesOfKeys places;
  const uint8_t* has_group;  // as in BackwardParams
  Result results[kResults];  // a result that is not wanted has no tiles of its own
};

}  // namespace flash_dmattn
