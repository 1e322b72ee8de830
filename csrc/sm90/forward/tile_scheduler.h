// The tile scheduler: decodes the number of a work tile to its head and rows, and to the key blocks that these walk.
#pragma once

#include "../operands.h"
#include "../sections.h"

namespace flash_dmattn {

template <bool kHasSequences>
struct WorkTile : OfSequence<kHasSequences> {
  int batch, head, first_row, block_q;
};

// The number of work tiles; of a call with sequences `num_works` for each head.
template <bool kHasSequences>
__device__ __forceinline__ int count_work_tiles(const ForwardParams& p, int num_works) {
  return kHasSequences ? num_works * p.num_heads : p.num_work_tiles;
}

template <bool kHasSequences>
__device__ __forceinline__ WorkTile<kHasSequences> decode_work_tile(const ForwardParams& p, int index, int rows,
                                                                    int num_works) {
  WorkTile<kHasSequences> work;
  if constexpr (kHasSequences) {
    const SequenceWork decoded = decode_sequence_work(p.sequences, index, num_works, p.num_heads);
    work.sequence = load_sequence(p.sequences, decoded.number);
    work.batch = decoded.number;
    work.head = decoded.head;
    work.block_q = decoded.block;
    work.first_row = decoded.block * rows;
    return work;
  }
  const auto [pair, row] = place_of(p.sections, index);
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

// The key blocks, of kBlockN keys, that some row of the work tile attends, in the order they are walked.
template <class Traits>
struct Walk {
  int steps;
  // With a mask: the tile's row list, which has partial tiles last; it is walked backwards, partial tiles first.
  const int32_t* list;
  int num_full;
  int skipped;  // 1 if the walk leaves out the half in which it would begin, else 0
  // Without: blocks [stop - steps, stop), walked backwards. Blocks in [start_inside, stop_inside) need no masking.
  int stop, start_inside, stop_inside;

  static constexpr int kBlocksPerTile = kTile / Traits::kBlockN;
  static constexpr bool kSkips = Traits::kHasOneMaskRow && !Traits::kHasIntervals && kBlocksPerTile == 2;

  __device__ __forceinline__ static Walk of(const ForwardParams& p, const WorkTile<Traits::kHasSequences>& work) {
    Walk walk;
    if constexpr (Traits::kHasMask) {
      const int tiles_k = (p.seqlen_k + kTile - 1) / kTile, tiles_q = (p.seqlen_q + kTile - 1) / kTile;
      // A mask with one row for all queries has the same list for each row of tiles.
      const int32_t* list = list_of(p.mask.lists, mask_of(p.mask.heads, work), tiles_q, work.block_q, tiles_k);
      // By __ldg: masks come from the packing kernels, which never let the next kernel start early.
      walk.num_full = __ldg(list);
      walk.steps = (walk.num_full + __ldg(list + 1)) * kBlocksPerTile;
      walk.list = list + 2;
    } else {
      const Extent of = extent_of(p, work);
      const int first = work.first_row >> p.group_shift;
      const int last = (min(work.first_row + Traits::kBlockM, of.seqlen_q) - 1) >> p.group_shift;
      const int first_key = max(first + of.low, 0), last_key = min(last + of.high, of.seqlen_k - 1);
      walk.steps = last_key < first_key ? 0 : last_key / Traits::kBlockN + 1 - first_key / Traits::kBlockN;
      walk.stop = last_key / Traits::kBlockN + 1;
      walk.start_inside = (max(last + of.low, 0) + Traits::kBlockN - 1) / Traits::kBlockN;
      walk.stop_inside = max(min(first + of.high, of.seqlen_k - 1) + 1, 0) / Traits::kBlockN;
    }
    return walk;
  }

  // Reduces the walk to one of num_splits shares of its steps; with a mask, of its tiles.
  __device__ __forceinline__ void keep_split(int split, int num_splits) {
    const int each = Traits::kHasMask ? kBlocksPerTile : 1;
    const int all = steps / each, even = all / num_splits, more = all - even * num_splits;  // the first have one more
    const int count = even + (split < more), before = even * split + min(split, more);
    if constexpr (Traits::kHasMask) {
      // A list is walked from its end: if it has 8 entries, 3 splits have [5, 8), [2, 5) and [0, 2).
      const int after = all - before - count;
      list += after;
      num_full -= after;
    } else {
      stop -= before;
    }
    steps = count * each;
  }

  // Leaves out the first half tile of the walk if no key of it is seen, as where padding begins. Where keys lie
  // otherwise, this one half does not matter.
  __device__ __forceinline__ void skip_empty_half(const ForwardParams& p, const WorkTile<Traits::kHasSequences>& work) {
    if constexpr (kSkips) {
      skipped = 0;
      if (steps == 0) return;
      bool needs_mask;
      const int block = at(0, needs_mask);
      const int64_t words = (p.seqlen_k + kTile - 1) / kTile * kTileWords;
      const int64_t mask = mask_of(p.mask.heads, work);
      const int32_t* bits = p.mask.bits + mask * p.seqlen_q * words + block * (Traits::kBlockN / kWord);
      const int2 half = __ldg(reinterpret_cast<const int2*>(bits));
      skipped = (half.x | half.y) == 0;
      steps -= skipped;
    }
  }

  // The key block of a step, and whether some key of it may be masked.
  __device__ __forceinline__ int at(int step, bool& needs_mask) const {
    if constexpr (Traits::kHasMask) {
      int all = steps;
      if constexpr (kSkips) {
        all += skipped;
        step += skipped;
      }
      const int position = all / kBlocksPerTile - 1 - step / kBlocksPerTile;
      needs_mask = position >= num_full;
      return __ldg(list + position) * kBlocksPerTile + (kBlocksPerTile - 1 - step % kBlocksPerTile);
    } else {
      const int block = stop - 1 - step;
      needs_mask = block < start_inside || block >= stop_inside;
      return block;
    }
  }
};

// The stages of the bias: where a block holds it, one for each of its key blocks, which all work tiles walk alike.
template <class Traits>
__device__ __forceinline__ int bias_stages(const Walk<Traits>& walk) {
  return Traits::kHoldsBias ? walk.steps : Traits::kBiasStages;
}

// Split-KV: which split, counted over all split tiles; negative for an unsplit tile.
template <bool kSplitKv>
struct ItemSplit {};
template <>
struct ItemSplit<true> {
  int split;
};

// A work tile, or a split of one, as the producer hands it to the other warps.
template <class Traits>
struct WorkItem : ItemSplit<Traits::kSplitKv> {
  bool is_valid;  // false after the last
  WorkTile<Traits::kHasSequences> work;
  Walk<Traits> walk;
  int64_t first_out, first_lse;  // where the work tile's first row starts in out, in elements, and in lse

  // Sets the work tile of an index, which is below the number of work tiles.
  __device__ __forceinline__ void find(const ForwardParams& p, int index, int num_works) {
    int tile = index;
    if constexpr (Traits::kSplitKv) {
      this->split = index - p.unsplit_tiles;
      if (this->split >= 0) tile = p.unsplit_tiles + this->split / p.num_splits;
    }
    work = decode_work_tile<Traits::kHasSequences>(p, tile, Traits::kBlockM, num_works);
    walk = Walk<Traits>::of(p, work);
    if constexpr (Traits::kSplitKv) {
      if (this->split >= 0) walk.keep_split(this->split % p.num_splits, p.num_splits);
    }
    walk.skip_empty_half(p, work);
    const int shift = Traits::kHasGroups ? p.group_shift : 0;  // a work tile begins with the first head of a query
    first_lse = first_lse_of(p, work) + (work.first_row >> shift);
    first_out = (first_query_of(p, work) * p.num_heads + static_cast<int64_t>(work.first_row >> shift) * p.out_row_step +
                 static_cast<int64_t>(work.head << shift) * p.out_head_step) *
                p.head_dim_v;
  }
};

}  // namespace flash_dmattn
