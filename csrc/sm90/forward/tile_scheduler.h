// What a block works on: which rows of which head, and which blocks of keys those rows walk.
#pragma once

#include "../operands.h"

namespace flash_dmattn {

struct Work {
  int batch, head, first_row, block_q;
};

__device__ __forceinline__ Work work_at(const ForwardParams& p, int index, int rows) {
  const int per_section = p.section * p.blocks_q;
  const int section = index / per_section, place = index - section * per_section;
  const int first = section * p.section;
  const int width = min(p.section, p.batch * p.num_heads - first);
  const int row = place / width, pair = first + place - row * width;
  Work work;
  work.block_q = p.blocks_q - 1 - row;  // under causality the longest first
  work.first_row = work.block_q * rows;
  if (p.batch_is_inner) {
    work.head = pair / p.batch;
    work.batch = pair - work.head * p.batch;
  } else {
    work.batch = pair / p.num_heads;
    work.head = pair - work.batch * p.num_heads;
  }
  return work;
}

// The blocks of kKeys keys that some row of the work attends, in the order of the walk.
template <class Traits>
struct Walk {
  int steps;
  // Under a mask of tiles: the list of the row of tiles, whose partial tiles come last; they are walked first.
  const int32_t* list;
  int num_full;
  // Else: the blocks [stop - steps, stop), walked downwards; those in [start_inside, stop_inside) are free of edges.
  int stop, start_inside, stop_inside;

  static constexpr int kBlocksPerTile = kTile / Traits::kKeys;

  __device__ __forceinline__ static Walk of(const ForwardParams& p, const Work& work) {
    Walk walk;
    if constexpr (Traits::kHasMask) {
      const int tiles_k = (p.seqlen_k + kTile - 1) / kTile, tiles_q = (p.seqlen_q + kTile - 1) / kTile;
      const int32_t* list = p.mask_lists + (mask_of(p, work) * tiles_q + work.block_q) * (2 + tiles_k);
      walk.num_full = __ldg(list);
      walk.steps = (walk.num_full + __ldg(list + 1)) * kBlocksPerTile;
      walk.list = list + 2;
    } else {
      const int last_row = min(work.first_row + Traits::kRows, p.seqlen_q) - 1;
      const int first_key = max(work.first_row + p.low, 0), last_key = min(last_row + p.high, p.seqlen_k - 1);
      walk.steps = last_key < first_key ? 0 : last_key / Traits::kKeys + 1 - first_key / Traits::kKeys;
      walk.stop = last_key / Traits::kKeys + 1;
      walk.start_inside = (max(last_row + p.low, 0) + Traits::kKeys - 1) / Traits::kKeys;
      walk.stop_inside = max(min(work.first_row + p.high, p.seqlen_k - 1) + 1, 0) / Traits::kKeys;
    }
    return walk;
  }

  // Has the walk be one of `parts` shares of its steps: of tiles, where a mask has lists of those.
  __device__ __forceinline__ void keep_part(int part, int parts) {
    const int each = Traits::kHasMask ? kBlocksPerTile : 1;
    const int all = steps / each, even = all / parts, more = all - even * parts;  // the first have one more
    const int count = even + (part < more), before = even * part + min(part, more);
    if constexpr (Traits::kHasMask) {
      const int after = all - before - count;  // a list is walked from its end
      list += after;
      num_full -= after;
    } else {
      stop -= before;
    }
    steps = count * each;
  }

  // The block of a step, and whether a key of it may be forbidden.
  __device__ __forceinline__ int at(int step, bool& has_edge) const {
    if constexpr (Traits::kHasMask) {
      const int place = steps / kBlocksPerTile - 1 - step / kBlocksPerTile;
      has_edge = place >= num_full;
      return __ldg(list + place) * kBlocksPerTile + (kBlocksPerTile - 1 - step % kBlocksPerTile);
    } else {
      const int block = stop - 1 - step;
      has_edge = block < start_inside || block >= stop_inside;
      return block;
    }
  }
};

// Which part of a piece, counted over all parts; negative for a whole piece, as they all are without parts.
template <bool kSplits>
struct ItemPart {};
template <>
struct ItemPart<true> {
  int part;
};

// What the thread that hands out work tells the others of one piece, or of one part.
template <class Traits>
struct Item : ItemPart<Traits::kSplits> {
  bool exists;  // false after the last
  Work work;
  Walk<Traits> walk;
};

}  // namespace flash_dmattn
