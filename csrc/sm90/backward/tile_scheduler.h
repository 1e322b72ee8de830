// What a block works on: a block of keys, a mask tile, a half of one or two of them, and the queries of one head that
// walk them.
#pragma once

#include "../operands.h"
#include "launch.h"

namespace flash_dmattn {

// What is at a place in the order of work: a block of keys, and the first of its query heads.
struct KeyWork {
  int batch, head, block_k;
  bool is_whole;  // whether it has all heads of a group, or one
};

__device__ __forceinline__ KeyWork key_work_at(const BackwardParams& p, int index) {
  const int group = p.queries_per_group, whole = p.whole_pairs * p.blocks_k;
  KeyWork work;
  work.is_whole = index < whole;
  const int heads = work.is_whole ? group : 1, works = p.num_heads / heads;  // of a batch entry and a block
  // Pairs of batch and so many heads.
  const int start = work.is_whole ? 0 : p.whole_pairs * group, end = work.is_whole ? p.whole_pairs : p.batch * works;
  const int in_section = work.is_whole ? p.whole_section : p.section;
  const int from = work.is_whole ? index : index - whole;
  const int section = from / (in_section * p.blocks_k), place = from - section * in_section * p.blocks_k;
  const int first = start + section * in_section;
  const int width = min(in_section, end - first);
  work.block_k = place / width;  // under causality the longest first
  const int pair = first + place - work.block_k * width;
  if (p.dq_turns != nullptr) work.block_k = p.blocks_k - 1 - work.block_k;
  int unit;  // the works of a batch entry, counted
  if (p.batch_is_inner) {
    unit = pair / p.batch;
    work.batch = pair - unit * p.batch;
  } else {
    work.batch = pair / works;
    unit = pair - work.batch * works;
  }
  work.head = unit * heads;
  return work;
}

// The blocks of kRows queries that attend some of the kKeys keys of the work, in the order of the walk.
template <class Traits>
struct QueryWalk {
  int steps;
  // Under a mask of tiles: the list of the column of tiles, whose partial tiles come last, or have no kFullTile.
  const int32_t* list;
  int num_full;
  // Else: the blocks [start, start + steps); those in [start_inside, stop_inside) are free of edges.
  int start, start_inside, stop_inside;

  static constexpr int kBlocksPerTile = kTile / Traits::kRows, kKeyBlocksPerTile = kTile / Traits::kKeys;

  template <class Work>
  __device__ __forceinline__ static QueryWalk of(const BackwardParams& p, const Work& work) {
    QueryWalk walk;
    if constexpr (Traits::kHasMask) {
      const int tiles_k = (p.seqlen_k + kTile - 1) / kTile, tiles_q = (p.seqlen_q + kTile - 1) / kTile;
      const int tile_k = work.block_k / kKeyBlocksPerTile;
      const int32_t* list = p.mask_lists + (mask_of(p, work) * tiles_k + tile_k) * (2 + tiles_q);
      walk.num_full = __ldg(list);
      walk.steps = (walk.num_full + __ldg(list + 1)) * kBlocksPerTile;
      walk.list = list + 2;
      if constexpr (kKeyBlocksPerTile > 1) {
        // A block beyond the last key walks its tile's list only where its turns are counted.
        if (work.block_k * Traits::kKeys >= p.seqlen_k && p.dq_turns == nullptr) walk.steps = 0;
      }
    } else {
      const int first_key = work.block_k * Traits::kKeys, end = first_key + Traits::kKeys;
      const int first = max(first_key - p.high, 0);
      const int last = min(min(end, p.seqlen_k) - 1 - p.low, p.seqlen_q - 1);
      walk.start = first / Traits::kRows;
      walk.steps = last < first ? 0 : last / Traits::kRows + 1 - walk.start;
      if constexpr (kKeyBlocksPerTile > 1) {
        if (first_key >= p.seqlen_k) walk.steps = 0;
      }
      walk.start_inside = (max(end - 1 - p.high, 0) + Traits::kRows - 1) / Traits::kRows;
      // A block of keys that is not whole has an edge everywhere.
      walk.stop_inside = end > p.seqlen_k ? 0 : max(first_key - p.low + 1, 0) / Traits::kRows;
    }
    return walk;
  }

  // The block of a step, and whether a query of it may be forbidden some key.
  __device__ __forceinline__ int at(int step, bool& has_edge) const {
    if constexpr (Traits::kHasMask) {
      const int place = step / kBlocksPerTile, tile = __ldg(list + place);
      has_edge = place >= num_full && !(tile & kFullTile);
      return (tile & ~kFullTile) * kBlocksPerTile + step % kBlocksPerTile;
    } else {
      const int block = start + step;
      has_edge = block < start_inside || block >= stop_inside;
      return block;
    }
  }
};

// How many blocks of keys add before the work to the block of a step: those of later keys that have it in their walk.
template <class Traits, class Work>
__device__ __forceinline__ int blocks_before(const BackwardParams& p, const Work& work, int step, int block) {
  if constexpr (Traits::kHasMask) {
    const int tiles_k = (p.seqlen_k + kTile - 1) / kTile, tiles_q = (p.seqlen_q + kTile - 1) / kTile;
    constexpr int kBlocks = QueryWalk<Traits>::kKeyBlocksPerTile;
    const int32_t* turns = p.mask_turns + (mask_of(p, work) * tiles_k + work.block_k / kBlocks) * tiles_q;
    const int tiles = __ldg(turns + step / QueryWalk<Traits>::kBlocksPerTile);
    return tiles * kBlocks + kBlocks - 1 - work.block_k % kBlocks;
  } else {
    // The last whose first key is in reach of the last query.
    const int query = min((block + 1) * Traits::kRows, p.seqlen_q) - 1;
    return min(query + p.high, p.seqlen_k - 1) / Traits::kKeys - work.block_k;
  }
}

// What the thread that hands out work tells the others: the keys, and one head of queries that walk them.
template <class Traits>
struct KeyItem {
  bool exists;  // false after the last
  bool is_first, is_last;  // of the heads of these keys
  bool is_whole;           // KeyWork's
  int batch, head, block_k;
  QueryWalk<Traits> walk;
};

}  // namespace flash_dmattn
