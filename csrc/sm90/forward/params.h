// The arguments of the forward kernel.
#pragma once

#include <cstdint>

#include <cuda.h>

#include "../../params.h"
#include "../../sections.h"
#include "../sequences/params.h"

namespace flash_dmattn {

// The forward pass. Kernels of calls with sequences read no batch, seqlen_q, seqlen_k, low and high.
struct ForwardParams : AttentionSizes {
  // The band, low <= j - i <= high; both in [-Lq, Lk]. i is the row >> group_shift: 2^group_shift rows that follow each
  // other are heads of a query, which out and lse have apart. So seqlen_q counts rows, and num_heads heads of rows.
  int low, high, group_shift;
  // TMA descriptors, innermost dim first: (D, Lq, Hq, B), but (D, Hq, Lq, B) with a group_shift; (D, Lk, Hk, B),
  // (Dv, Lk, Hk, B), and (Lk, Lq, Hbias, Bbias) for a bias that is read as tiles.
  CUtensorMap q, k, v, bias;
  void* out;   // (B, Lq, Hq, Dv), entry by entry; in one, rows and heads are so many vectors of Dv apart
  int out_row_step, out_head_step;
  // (B, Hq, Lq), contiguous, natural logarithm; wide, of calls with a bias, it is of join_lse in operands.h, else fp32.
  void* lse;
  bool has_wide_lse;

  // Kernels without a bias: a score is scale * f(q k), and scale is positive. f(x) is softcap * tanh(pre_scale * x) with a
  // softcap, pre_scale * x if only pre_scale is set, and x otherwise.
  // Kernels with a bias: a score is factor * f(q k) + bias, and scale is 1. f(x) is tanh(pre_scale * x) with a softcap,
  // which is the factor then, and x otherwise.
  float scale, inverse_scale, factor, inverse_factor, softcap, pre_scale;
  bool transforms;  // f(x) is not x

  MaskTiles mask;          // with lists of rows
  BiasValues bias_values;  // of every kind of bias; its data is read where it is not read as tiles
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

  SequenceParams sequences;

  DropoutParams dropout;

  Distances distances;  // of a bias that is read as a window

  float* max_scores;  // the largest score of each row, where lse lies, of kernels with kHasMaxScores
};

}  // namespace flash_dmattn
