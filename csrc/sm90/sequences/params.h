// The arguments that calls with sequences add, and the arguments of their own kernels.
#pragma once

#include <cstdint>

#include <vector_types.h>

#include "../../params.h"

namespace flash_dmattn {

// The smallest page of keys that kernels read.
constexpr int kLeastPage = 16;

// Rows of a ragged TMA descriptor (api/tensor_map.h).
constexpr int kRaggedRows = 1 << 30;

// Sequences of many lengths, S of them, whose rows lie in entries of q and k: one entry of all tokens (packed), or one
// for each sequence.
struct SequenceParams {
  const int4* bounds;  // (S): first and number of queries, first and number of keys; within an entry
  bool packs_queries, packs_keys;
  int rows_q, rows_k;  // of an entry
  int most_q, most_k;  // no sequence has more
  int left, right;     // the window about the last diagonal of each sequence; not negative
  // Whether rows of a bias are packed queries, or its columns packed keys; else both are positions in a sequence.
  bool bias_packs_queries, bias_packs_keys;
  int padded_tiles;  // of queries of all sequences, padded to whole tiles of each: at most this many
  // The work tiles of a head, longest first: a sequence and a block of it. Sections have so many heads.
  const int2* works;
  const int* num_works;
  int section;
  // The sequence of each padded tile, -1 for none; only of the backward pass.
  const int* sequence_of_tile;
  // Keys in pages, of the forward pass alone: (S), rows of `table_stride`, entry j / page_size is the page of key j.
  // Null without. A page is page_rows_k rows of k behind the one before it, page_rows_v of v. A box of a TMA descriptor
  // has page_box rows, and no box lies in two pages.
  const int* block_table;
  int64_t table_stride;
  int table_columns, pages, page_size, page_box, page_rows_k, page_rows_v;
};

// Lists the work tiles of a head, blocks of queries or of keys. Writes the arrays of SequenceParams.
struct ListWorksParams {
  SequenceParams sequences;
  int number;   // S
  bool by_keys;
  bool is_ordered;  // the last block of a sequence first, else the longest walks of all sequences
  int rows;     // of a block
  int* firsts;  // scratch, (S)
  int2* works;
  int* num_works;
  int* counter;           // set to 0; null if not needed
  int* sequence_of_tile;  // null if not needed
};

struct GapsOf {
  void* x;     // (entries, rows, chunks)
  int rows;    // of an entry
  int chunks;  // of 16 bytes in a row
  bool are_keys, packs_rows;
};

// Writes the rows that belong to no sequence: zeros to at most three tensors, and -inf to lse.
struct FillGapsParams {
  int tensors;
  GapsOf of[3];
  void* lse;  // (entries, num_heads, rows) of the first tensor, fp32 or fp64; null for none
  bool has_wide_lse;
  int num_heads;
};

struct PrepareParams {
  ListWorksParams list;
  FillGapsParams gaps;
};

// Sums delta of sequences of few keys from scores, in the place of what the kernel of the rows wrote.
struct FewKeysParams : AttentionSizes {
  int head_dim;
  Rows q, k, v, dout;
  RowValues dlse;    // null for zeros
  const float* lse;  // (Hq, 128 padded_tiles), base 2
  const float2* split_lse;  // as in BackwardParams
  float* delta;      // (Hq, 128 padded_tiles)
  float* row_delta;  // the same for the caller, (1, Hq, Tq) or (S, Hq, Lq); null if not needed
  BiasValues bias_values;  // not one value per query, which lse does not contain any more
  float softmax_scale;
  SequenceParams sequences;
};

}  // namespace flash_dmattn
