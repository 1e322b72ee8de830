// The arguments of every kernel.
#pragma once

#include <cstdint>

#include <cuda.h>

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

enum class BiasDtype { kFloat32, kFloat16, kBFloat16 };

// Hq / Hk query and key-value heads, D / Dv head dims of q, k and of v. A band allows key j to query i where
// low <= j - i <= high.
struct ForwardParams {
  // (D, Lq, Hq, B), (D, Lk, Hk, B), (Dv, Lk, Hk, B) and, of a bias tile, (Lk, Lq, Hbias, Bbias), innermost first.
  CUtensorMap q, k, v, bias;
  void* out;   // (B, Lq, Hq, Dv), contiguous
  float* lse;  // (B, Hq, Lq), contiguous, natural logarithm

  int batch, num_heads, seqlen_q, seqlen_k, head_dim_v;
  int queries_per_group;   // Hq / Hk
  int low, high;           // the band, both in [-Lq, Lk]

  // Scores are scale * f(q k), plus bias. f(x) = x where softcap and pre_scale are 0, softcap * tanh(pre_scale * x)
  // where softcap is positive, pre_scale * x otherwise; scale is positive.
  float scale, inverse_scale, softcap, pre_scale;
  bool transforms;  // whether f is not x

  // A mask of tiles; heads_per_mask: the query heads that share one.
  const int32_t* mask_bits;   // (Bm, Hm, Lq, 4 Tk)
  const int32_t* mask_lists;  // (Bm, Hm, Tq, 2 + Tk)
  int heads_per_mask, mask_heads;
  bool mask_has_batch;

  // A bias that is not copied as tiles, its strides in elements of bias_dtype, 0 where one value serves every index.
  const void* bias_values;
  int64_t bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k;
  BiasDtype bias_dtype;
  // Of any bias: the query heads that share one, and whether batches have their own.
  int heads_per_bias;
  bool bias_has_batch;
  bool bias_is_per_query;  // one value per query, which moves lse alone

  // The order of work: sections of this many (batch, head) pairs, in each the last rows of all first.
  int section, blocks_q, total;
  bool batch_is_inner;  // batch entries of a head follow each other; else heads of a batch entry
  int* next;  // counts the work handed out beyond the first per block; null to share it out evenly

  // Pieces of work from the one of this number on are handed out in parts, each a share of the keys; total counts them.
  int whole, parts;     // parts of such a piece; 1 where there is none
  float* part_results;  // (pieces split, parts, ForwardTile::part_floats), as csrc/sm90/forward/parts.h has them
  int* part_arrivals;   // (pieces split, warps that consume), zeros
};

// The backward pass. dq is summed in fp32, in pieces of 64 queries and 64 columns that lie as the matrix instructions
// hold them (`csrc/sm90/backward/pieces.h`); lse and delta have rows for whole tiles of queries.
struct BackwardParams {
  // (D, Lq, Hq, B), (D, Lk, Hk, B), (Dv, Lk, Hk, B), (Dv, Lq, Hq, B) and, of tiles of bias and dbias, (Lk, Lq, Hbias,
  // Bbias), innermost first.
  CUtensorMap q, k, v, dout, bias, dbias;
  void* dk;           // (B, Lk, Hk, D), contiguous; null where it is not needed
  void* dv;           // (B, Lk, Hk, Dv), contiguous; null where it is not needed
  // (pairs, blocks_k, kKeys / 64, panels of D, 4096), zeros, of those pairs of batch and head of k whose query heads
  // are works of their own; null where there are none, or it is not needed.
  float* dk_sums;
  float* dv_sums;     // the same of Dv
  float* dq_sums;     // (B, Hq, 2 Tq, panels of D, 4096), zeros; null where dq is not needed
  int* dq_turns;      // (B, Hq, blocks of queries), zeros: how many blocks of keys have added to a block; null where
                      // they need not take turns
  int* key_turns;     // (B, Hk, blocks_k), zeros: how many heads of a group have added to dk_sums and dv_sums of a
                      // block of keys; null without dq_turns or those sums
  float* dbias_sums;  // (B, Hq, Lk), of a bias per key; null where it is not needed
  void* summed_dbias;  // (1, Hq, Lq, Lk), contiguous, Lk a multiple of 8, of a bias that batch entries share; else null
  int cluster;         // blocks that sum it, one of each batch entry; else 1
  const float* lse;    // (B, Hq, 128 Tq), in base 2; +inf for an empty row and beyond the last
  const float* delta;  // (B, Hq, 128 Tq)

  int batch, num_heads, seqlen_q, seqlen_k, head_dim, head_dim_v;
  int queries_per_group;  // Hq / Hk
  int low, high;          // the band, both in [-Lq, Lk]
  float softmax_scale;

  // A mask of tiles; heads_per_mask: the query heads that share one.
  const int32_t* mask_bits;       // (Bm, Hm, Lq, 4 Tk)
  const int32_t* mask_lists;      // (Bm, Hm, Tk, 2 + Tq), of columns; where tiles of keys take turns, `ordered` below
  const int32_t* mask_turns;      // (Bm, Hm, Tk, Tq), `turns` below; null where they do not
  int heads_per_mask, mask_heads;
  bool mask_has_batch;

  // A bias per key, its strides in elements of bias_dtype, 0 where one value serves every index.
  const void* bias_values;
  int64_t bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k;
  BiasDtype bias_dtype;
  // Of any bias: the query heads that share one, and whether batches have their own.
  int heads_per_bias;
  bool bias_has_batch;

  // The order of work. A work is a block of keys, a tile, two, or half of one (of the last tile too, where it may be
  // empty), and the query heads that walk them: of the first `whole_pairs` pairs of batch and head of k all of a group,
  // of the others one. Both come in sections of so many pairs of batch and heads, in each the first keys of all first,
  // or the last where blocks of keys take turns.
  int whole_pairs, whole_section, section, blocks_k, total;
  bool batch_is_inner;  // batch entries of a head follow each other; else heads of a batch entry
  // Counts the work handed out, without the first of each block where tiles need not take turns; null to share it out
  // evenly.
  int* next;

  // Scores are softcap * tanh(pre_scale * q k), plus bias, the numbers of ForwardParams; 0 without a softcap.
  float softcap, pre_scale;
};

// Before the backward pass whose tiles of keys take turns: lists of columns in which the tiles of queries ascend.
struct OrderListsParams {
  const int32_t* row_lists;  // (Bm, Hm, Tq, 2 + Tk)
  const int32_t* col_lists;  // (Bm, Hm, Tk, 2 + Tq)
  int32_t* ordered;          // (Bm, Hm, Tk, 2 + Tq): 0, how many, and the tiles that are not empty
  int32_t* turns;            // (Bm, Hm, Tk, Tq), for each of them: how many tiles of later keys its row has
  int64_t num_lists;         // Bm * Hm * Tk
  int tiles_q, tiles_k;
};

// The gradient of a bias per query and key, where several heads of attention share one of its values.
struct SharedDbiasParams {
  // (D, Lq, Hq, B), (D, Lk, Hk, B), (Dv, Lk, Hk, B), (Dv, Lq, Hq, B) and (Lk, Lq, Hbias, Bbias), innermost first.
  CUtensorMap q, k, v, dout, bias;
  void* dbias;         // (Bd, Hd, Lq, Lk), contiguous, Lk a multiple of 8
  const float* lse;    // (B, Hq, 128 Tq), in base 2; +inf for an empty row and beyond the last
  const float* delta;  // (B, Hq, 128 Tq)

  int batch, num_heads, seqlen_q, seqlen_k, head_dim_v;
  int queries_per_group;  // Hq / Hk
  int low, high;          // the band, both in [-Lq, Lk]
  float softmax_scale;

  // A mask of tiles; heads_per_mask: the query heads that share one.
  const int32_t* mask_bits;   // (Bm, Hm, Lq, 4 Tk)
  const int32_t* mask_lists;  // (Bm, Hm, Tq, 2 + Tk)
  int heads_per_mask, mask_heads;
  bool mask_has_batch;

  // The bias, which may be expanded where dbias is not: the query heads that share one, and whether batches have their
  // own.
  int heads_per_bias;
  bool bias_has_batch;

  // The query heads that share a head of dbias, Hq / Hd, and how many heads are summed there, over all batch entries.
  int dbias_heads, heads_per_dbias, heads_summed;

  int tiles_q, tiles_k, total;
  int* next;  // counts the tiles handed out beyond the first of each block; null where there are no others

  float softcap, pre_scale;  // as in BackwardParams
};

// Before the backward pass: lse in base 2, delta = rowsum(dout * out) - dlse, and zeros for what is added to.
struct BackwardRowsParams {
  const void* out;    // (B, Lq, Hq, Dv), contiguous
  const void* dout;   // (B, Lq, Hq, Dv), rows on 16 bytes
  const float* lse;   // (B, Hq, Lq), contiguous
  const float* dlse;  // (B, Hq, Lq), any strides; null for zeros
  int64_t dout_stride_b, dout_stride_q, dout_stride_h;
  int64_t dlse_stride_b, dlse_stride_h, dlse_stride_q;
  // A bias of one value per query, which moves lse; null for none.
  const void* bias_values;
  int64_t bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k;
  BiasDtype bias_dtype;
  int heads_per_bias;
  bool bias_has_batch;
  float* lse_log2;  // (B, Hq, 128 Tq)
  float* delta;     // (B, Hq, 128 Tq)
  int batch, num_heads, seqlen_q, head_dim_v;
  // Zeros are written there, sixteen bytes for each of `zeros`.
  void* cleared;
  int64_t zeros;
};

// After it: dq, and dk and dv of groups, from their sums, in the dtype of q.
struct BackwardSumsParams {
  struct Result {
    const float* sums;  // (pairs, rows_per_pair / 64, panels, 4096)
    void* out;          // (B, L, H, columns), contiguous
    int64_t pieces;     // of all pairs, and of the results before this one
    // Sums are of the pairs of batch and head from this one on; batch entries of a head follow each other, or heads of
    // a batch entry do.
    int first_pair;
    bool batch_is_inner;
    int batch, num_heads, seqlen, rows_per_pair, columns, panels;
    float factor;
  };
  static constexpr int kResults = 3;
  Result results[kResults];  // those that are not wanted have no pieces of their own
};

}  // namespace flash_dmattn
