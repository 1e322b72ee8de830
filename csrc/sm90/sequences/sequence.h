// Where the rows of a work tile lie, in calls with sequences and in dense calls.
#pragma once

#include <type_traits>

#include "../../device/pipeline.h"
#include "params.h"

namespace flash_dmattn {

// The rows of a sequence, counted over all entries of q and of k, and its band.
struct Sequence {
  int first_q, seqlen_q, first_k, seqlen_k;
  int low, high;
};

// A base of work tiles: what a call with sequences adds to them.
template <bool kHasSequences>
struct OfSequence {};
template <>
struct OfSequence<true> {
  Sequence sequence;
};

template <class Work>
constexpr bool kIsOfSequence = std::is_base_of_v<OfSequence<true>, Work>;

__device__ __forceinline__ Sequence load_sequence(const SequenceParams& p, int number) {
  const int4 bounds = p.bounds[number];
  Sequence of;
  of.first_q = p.packs_queries ? bounds.x : number * p.rows_q;
  of.seqlen_q = bounds.y;
  of.first_k = p.packs_keys ? bounds.z : number * p.rows_k;
  of.seqlen_k = bounds.w;
  const int diagonal = of.seqlen_k - of.seqlen_q;
  of.low = max(diagonal - p.left, -of.seqlen_q);
  of.high = min(diagonal + p.right, of.seqlen_k);
  return of;
}

// The tile of 128 queries at which a sequence starts, in arrays whose rows are padded to whole tiles. No two overlap.
__device__ __forceinline__ int first_padded_tile(const Sequence& of, int number) { return of.first_q / kTile + number; }

// The limits that mask the scores of a work tile.
struct Extent {
  int seqlen_q, seqlen_k, low, high;
};

template <class Params, class Work>
__device__ __forceinline__ Extent extent_of(const Params& p, const Work& work) {
  if constexpr (kIsOfSequence<Work>) {
    const Sequence& of = work.sequence;
    return {of.seqlen_q, of.seqlen_k, of.low, of.high};
  } else {
    return {p.seqlen_q, p.seqlen_k, p.low, p.high};
  }
}

template <class Params, class Work>
__device__ __forceinline__ int seqlen_q_of(const Params& p, const Work& work) {
  if constexpr (kIsOfSequence<Work>) {
    return work.sequence.seqlen_q;
  } else {
    return p.seqlen_q;
  }
}

template <class Params, class Work>
__device__ __forceinline__ int seqlen_k_of(const Params& p, const Work& work) {
  if constexpr (kIsOfSequence<Work>) {
    return work.sequence.seqlen_k;
  } else {
    return p.seqlen_k;
  }
}

// The first row of a work tile's entry, or of its sequence, among all rows of q and of k.
template <class Params, class Work>
__device__ __forceinline__ int64_t first_query_of(const Params& p, const Work& work) {
  if constexpr (kIsOfSequence<Work>) {
    return work.sequence.first_q;
  } else {
    return static_cast<int64_t>(work.batch) * p.seqlen_q;
  }
}

template <class Params, class Work>
__device__ __forceinline__ int64_t first_key_of(const Params& p, const Work& work) {
  if constexpr (kIsOfSequence<Work>) {
    return work.sequence.first_k;
  } else {
    return static_cast<int64_t>(work.batch) * p.seqlen_k;
  }
}

// The number of the first query of a head in lse as the caller has it, (B, Hq, Lq) or (1, Hq, Tq).
template <class Params, class Work>
__device__ __forceinline__ int64_t first_lse_of(const Params& p, const Work& work) {
  if constexpr (kIsOfSequence<Work>) {
    const SequenceParams& of = p.sequences;
    if (of.packs_queries) return static_cast<int64_t>(work.head) * of.rows_q + work.sequence.first_q;
    return (static_cast<int64_t>(work.batch) * p.num_heads + work.head) * of.rows_q;
  } else {
    return (static_cast<int64_t>(work.batch) * p.num_heads + work.head) * p.seqlen_q;
  }
}

// The number of the first tile of a head in arrays whose rows are padded to whole tiles of queries.
template <class Params, class Work>
__device__ __forceinline__ int64_t first_padded_tile_of(const Params& p, const Work& work) {
  if constexpr (kIsOfSequence<Work>) {
    return static_cast<int64_t>(work.head) * p.sequences.padded_tiles + first_padded_tile(work.sequence, work.batch);
  } else {
    const int tiles_q = (p.seqlen_q + kTile - 1) / kTile;
    return (static_cast<int64_t>(work.batch) * p.num_heads + work.head) * tiles_q;
  }
}

// The number of the first key of a head in sums of ds over queries, (B, Hq, Lk), (1, Hq, Tk), or (S, Hq, most_k).
template <class Params, class Work>
__device__ __forceinline__ int64_t first_key_sum_of(const Params& p, const Work& work) {
  if constexpr (kIsOfSequence<Work>) {
    const SequenceParams& of = p.sequences;
    if (of.bias_packs_keys) return static_cast<int64_t>(work.head) * of.rows_k + work.sequence.first_k;
    return (static_cast<int64_t>(work.batch) * p.num_heads + work.head) * of.most_k;
  } else {
    return (static_cast<int64_t>(work.batch) * p.num_heads + work.head) * p.seqlen_k;
  }
}

// Row i of n rows from `first` on in a ragged descriptor, whose hardware ends where the sequence does.
__device__ __forceinline__ RaggedRowAt ragged_row_at(int first, int number, int row) {
  return {kRaggedRows - number + row, kRaggedRows, first + number};
}

// The coordinates of a row of q, or of k, in their descriptors.
template <class Params, class Work>
__device__ __forceinline__ auto query_at(const Params& p, const Work& work, int row) {
  if constexpr (kIsOfSequence<Work>) {
    return ragged_row_at(work.sequence.first_q, work.sequence.seqlen_q, row);
  } else {
    return RowAt{row, work.batch};
  }
}

template <class Params, class Work>
__device__ __forceinline__ auto key_at(const Params& p, const Work& work, int row) {
  if constexpr (kIsOfSequence<Work>) {
    return ragged_row_at(work.sequence.first_k, work.sequence.seqlen_k, row);
  } else {
    return RowAt{row, work.batch};
  }
}

// The coordinates of the i-th box of a block of keys, in its page of k or of v, whose pages are `page_rows` rows apart.
// Keys after the last of the sequence are outside. A wrong entry of the table is clamped to some page.
__device__ __forceinline__ RaggedRowAt key_in_page(const SequenceParams& p, const Sequence& of, int number, int first_key,
                                                   int i, int page_rows) {
  const int first_column = first_key / p.page_size, column = first_column + i;
  const int row = first_key - first_column * p.page_size;  // not 0 in pages of more than a block alone
  const int page = p.block_table[number * p.table_stride + min(column, p.table_columns - 1)];
  const int left = of.seqlen_k - column * p.page_size;
  return ragged_row_at(min(max(page, 0), p.pages - 1) * page_rows, min(max(left, 0), p.page_size), row);
}

// The coordinates of a tile of a bias, or of dbias.
template <class Params, class Work>
__device__ __forceinline__ auto score_at(const Params& p, const Work& work, int row, bool has_entries) {
  const int entry = has_entries ? work.batch : 0;
  if constexpr (kIsOfSequence<Work>) {
    return p.sequences.bias_packs_queries ? query_at(p, work, row) : RaggedRowAt{row, 0, entry};
  } else {
    return RowAt{row, entry};
  }
}

// Where a bias that is not read as tiles starts for a work tile, beyond its entry and its head.
template <class Params, class Work>
__device__ __forceinline__ int64_t first_bias_of(const Params& p, const Work& work) {
  if constexpr (kIsOfSequence<Work>) {
    const SequenceParams& of = p.sequences;
    return (of.bias_packs_queries ? work.sequence.first_q * p.bias_values.stride_q : 0) +
           (of.bias_packs_keys ? work.sequence.first_k * p.bias_values.stride_k : 0);
  } else {
    return 0;
  }
}

// A work tile of a call with sequences: a block of a sequence, and one of `heads` heads. The tiles of a section of
// heads come together, so that its keys stay in L2; within a section the longest come first, of all sequences.
struct SequenceWork {
  int number, block, head;
};

__device__ __forceinline__ SequenceWork decode_sequence_work(const SequenceParams& p, int index, int num_works,
                                                             int heads) {
  const int per_section = p.section * num_works;
  const int section = index / per_section, position = index - section * per_section;
  const int first = section * p.section, width = min(p.section, heads - first);
  const int row = position / width;
  const int2 work = p.works[row];
  return {work.x, work.y, first + position - row * width};
}

}  // namespace flash_dmattn
