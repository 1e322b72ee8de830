// The tile scheduler: decodes the number of a work tile to its keys, and to the heads and query blocks that these walk.
#pragma once

#include "../operands.h"
#include "../sections.h"
#include "accumulators.h"
#include "launch.h"

namespace flash_dmattn {

// A work tile: one key block and the first of its query heads.
template <bool kHasSequences>
struct KeyWorkTile : OfSequence<kHasSequences> {
  int batch, head, block_k;
  int part;            // of the walk
  bool is_full_group;  // all heads of a group, or one
};

// Whether the walks of some mask are too long for groups.
__device__ __forceinline__ bool has_long_walks(const BackwardParams& p) {
  uint32_t any_long = 0;
#pragma unroll 8
  for (int mask = 0; mask < p.masks; mask += 4) any_long |= reinterpret_cast<const uint32_t*>(p.has_long)[mask / 4];
  return any_long != 0;
}

// `num_works`: of a call with sequences, the work tiles of a key head. `has_long`: some walk is too long for groups.
template <class Traits>
__device__ __forceinline__ KeyWorkTile<Traits::kHasSequences> decode_key_work_tile(const BackwardParams& p, int index,
                                                                                   int num_works, bool has_long) {
  KeyWorkTile<Traits::kHasSequences> work;
  if constexpr (Traits::kHasSequences) {
    if (num_works == 0) {  // no tile to decode
      work.head = 0;
      return work;
    }
    const SequenceWork decoded = decode_sequence_work(p.sequences, index, num_works, p.num_heads / p.heads_per_group);
    work.sequence = load_sequence(p.sequences, decoded.number);
    work.batch = decoded.number;
    work.head = decoded.head * p.heads_per_group;
    work.block_k = decoded.block;
    work.part = 0;
    work.is_full_group = true;
    return work;
  }
  const int group = p.heads_per_group, full_group_pairs = has_long ? 0 : p.full_group_pairs;
  const int full_group_tiles = full_group_pairs * p.full_groups.rows;
  work.is_full_group = index < full_group_tiles;
  const int heads = work.is_full_group ? group : 1;
  const int tiles = p.num_heads / heads;  // of a key block in a batch entry
  const Sections& of = work.is_full_group ? p.full_groups : has_long ? p.all_heads : p.single_heads;
  const auto [pair_of_kind, block] = place_of(of, work.is_full_group ? index : index - full_group_tiles);
  // Pairs are counted for this kind, each of a batch entry and `heads` query heads.
  const int pair = pair_of_kind + (work.is_full_group ? 0 : full_group_pairs * group);
  work.block_k = block / p.walk_parts;  // under causality the longest first
  work.part = block - work.block_k * p.walk_parts;
  if (p.dq_semaphore != nullptr) work.block_k = p.blocks_k - 1 - work.block_k;
  if constexpr (Traits::kHasMask && !Traits::kSumsDbias) {
    if (p.has_group != nullptr && !work.is_full_group) {  // heads of a group are neighbours, of batch entries too
      const int pair_k = pair / group, heads_k = p.num_heads / group;
      const int outer = pair_k / (p.batch_is_inner ? p.batch : heads_k);
      const int inner = pair_k - outer * (p.batch_is_inner ? p.batch : heads_k);
      work.batch = p.batch_is_inner ? inner : outer;
      work.head = (p.batch_is_inner ? outer : inner) * group + pair - pair_k * group;
      work.is_full_group = p.has_group[(pair_k * p.blocks_k + work.block_k) * (Traits::kBlockN / kAccumRows)];
      return work;
    }
  }
  int in_batch;  // the tile's number in its batch entry
  if (p.batch_is_inner) {
    in_batch = pair / p.batch;
    work.batch = pair - in_batch * p.batch;
  } else {
    work.batch = pair / tiles;
    in_batch = pair - work.batch * tiles;
  }
  work.head = in_batch * heads;
  return work;
}

// The query blocks, of kBlockM queries, that attend some key of the work tile, in the order they are walked.
template <class Traits>
struct QueryWalk {
  int steps;
  // With a mask: the column list of the key tile. Partial tiles come last or, in an ordered list, lack kFullTile.
  const int32_t* list;
  int num_full;
  // Without: blocks [start, start + steps); those in [start_inside, stop_inside) need no masking.
  int start, start_inside, stop_inside;

  static constexpr int kBlocksPerTile = kTile / Traits::kBlockM,  // with a mask
                        kKeyBlocksPerTile = kTile / Traits::kBlockN;

  template <class Work>
  __device__ __forceinline__ static QueryWalk of(const BackwardParams& p, const Work& work) {
    QueryWalk walk;
    if constexpr (Traits::kHasMask) {
      const int tiles_k = (p.seqlen_k + kTile - 1) / kTile, tiles_q = (p.seqlen_q + kTile - 1) / kTile;
      const int tile_k = work.block_k / kKeyBlocksPerTile;
      const int32_t* list = list_of(p.mask.lists, mask_of(p.mask.heads, work), tiles_k, tile_k, tiles_q);
      walk.num_full = list[0];
      walk.steps = (walk.num_full + list[1]) * kBlocksPerTile;
      walk.list = list + 2;
      if constexpr (kKeyBlocksPerTile > 1) {
        // A block beyond the last key walks its tile's list only if the order is fixed: its releases are counted.
        if (work.block_k * Traits::kBlockN >= p.seqlen_k && p.dq_semaphore == nullptr) walk.steps = 0;
      }
    } else {
      const int first_key = work.block_k * Traits::kBlockN, end = first_key + Traits::kBlockN;
      const Extent of = extent_of(p, work);
      const int first = max(first_key - of.high, 0);
      const int last = min(min(end, of.seqlen_k) - 1 - of.low, of.seqlen_q - 1);
      walk.start = first / Traits::kBlockM;
      walk.steps = last < first ? 0 : last / Traits::kBlockM + 1 - walk.start;
      if constexpr (kKeyBlocksPerTile > 1) {
        if (first_key >= of.seqlen_k) walk.steps = 0;
      }
      walk.start_inside = (max(end - 1 - of.high, 0) + Traits::kBlockM - 1) / Traits::kBlockM;
      // A key block beyond the last key needs masking everywhere.
      walk.stop_inside = end > of.seqlen_k ? 0 : max(first_key - of.low + 1, 0) / Traits::kBlockM;
      // A bias by position may have anything, NaN too, behind the last query of a sequence.
      if constexpr (Traits::kHasSequences) walk.stop_inside = min(walk.stop_inside, of.seqlen_q / Traits::kBlockM);
    }
    return walk;
  }

  // Reduces the walk to one of the equal parts of its tiles, or to nothing where there are fewer parts.
  __device__ __forceinline__ void keep_part(int part, int walk_tiles) {
    const int tiles = steps / kBlocksPerTile, parts = (tiles + walk_tiles - 1) / walk_tiles;
    const int begin = part < parts ? tiles * part / parts : 0, end = part < parts ? tiles * (part + 1) / parts : 0;
    list += begin;
    num_full -= begin;
    steps = (end - begin) * kBlocksPerTile;
  }

  // The query block of a step, and whether some key may be masked for one of its queries.
  __device__ __forceinline__ int at(int step, bool& needs_mask) const {
    if constexpr (Traits::kHasMask) {
      const int position = step / kBlocksPerTile, tile = list[position];
      needs_mask = position >= num_full && !(tile & kFullTile);
      return (tile & ~kFullTile) * kBlocksPerTile + step % kBlocksPerTile;
    } else {
      const int block = start + step;
      needs_mask = block < start_inside || block >= stop_inside;
      return block;
    }
  }
};

// How many key blocks add to the query block of a step before this one: the blocks of later keys that walk it.
template <class Traits, class Work>
__device__ __forceinline__ int count_predecessors(const BackwardParams& p, const Work& work, int step, int block) {
  if constexpr (Traits::kHasMask) {
    const int tiles_k = (p.seqlen_k + kTile - 1) / kTile, tiles_q = (p.seqlen_q + kTile - 1) / kTile;
    constexpr int kBlocks = QueryWalk<Traits>::kKeyBlocksPerTile;
    const int64_t list = mask_of(p.mask.heads, work) * tiles_k + work.block_k / kBlocks;
    const int32_t* predecessors = p.mask_predecessors + list * tiles_q;
    const int tiles = predecessors[step / QueryWalk<Traits>::kBlocksPerTile];
    return tiles * kBlocks + kBlocks - 1 - work.block_k % kBlocks;
  } else {
    // The last key block that the block's last query attends.
    const Extent of = extent_of(p, work);
    const int query = min((block + 1) * Traits::kBlockM, of.seqlen_q) - 1;
    return min(query + of.high, of.seqlen_k - 1) / Traits::kBlockN - work.block_k;
  }
}

// Whether a thread of its own finds work tiles. Where two warps serve dbias and its bias, none is left: the thread that
// loads finds them.
template <class Traits>
constexpr bool kHasScheduler = !Traits::kStoresDbias && !Traits::kSumsDbias;

// A work tile for one query head, as the producer hands it to the other warps.
template <class Traits>
struct KeyWorkItem : OfSequence<Traits::kHasSequences> {
  bool is_valid;           // false after the last
  bool is_first, is_last;  // of the tile's heads
  bool is_full_group;      // as in KeyWorkTile
  int batch, head, block_k;
  QueryWalk<Traits> walk;
};

// Whether the lse of a row of the call is great. All threads of both consumers look at a part of great_rows, while the
// first keys are loaded. The thread that finds work tiles has no registers for it.
template <class Traits>
__device__ __forceinline__ bool has_great_rows(const BackwardParams& p, uint32_t (&seen)[4 * Traits::kConsumers], int group,
                                               int warp, int lane) {
  int64_t tiles = static_cast<int64_t>(p.batch) * p.num_heads * ((p.seqlen_q + kTile - 1) / kTile);
  if constexpr (Traits::kHasSequences) tiles = static_cast<int64_t>(p.num_heads) * p.sequences.padded_tiles;
  uint32_t any = 0;
#pragma unroll 4
  for (int64_t tile = 128 * group + 32 * warp + lane; tile < tiles; tile += 128 * Traits::kConsumers) {
    any |= p.great_rows[tile];
  }
  any = __any_sync(0xffffffffu, any != 0);
  if (lane == 0) seen[4 * group + warp] = any;
  named_barrier_sync(kGreatRowsBarrier, 128 * Traits::kConsumers);
#pragma unroll
  for (uint32_t one : seen) any |= one;
  return any != 0;
}

// Calls `consume` with whether the lse of a row of the call is great, and with the place of the thread: a number of its
// consumer, its warp and lane. std::true_type and std::false_type have loops over all work tiles that share no register. A
// second main loop inside of one left the first too few, and so does a place that both loops know. For two kernels it is the
// other way round: a bool where diagonals of a wide head are summed, and the same place where a warpgroup sums dbias.
template <class Traits, class F>
__device__ __forceinline__ void choose_great(const BackwardParams& p, uint32_t (&seen)[4 * Traits::kConsumers], int group,
                                             int warp, int lane, F consume) {
  if constexpr (Traits::kBias == BackwardBias::kRelativeSum && Traits::kD > 64) {
    return consume(has_great_rows<Traits>(p, seen, group, warp, lane), group, warp, lane);
  } else if constexpr (Traits::kBias != BackwardBias::kNone) {
    // ptxas takes a float below 0 as unlikely, and so places this loop behind the other one, whose instructions then are
    // near each other.
    const int great = __shfl_sync(0xffffffffu, has_great_rows<Traits>(p, seen, group, warp, lane) ? -1 : 0, 0);
    if (__int_as_float(great & 0xbf800000) < 0.0f) {
      if constexpr (Traits::kSumsDbias) return consume(std::true_type{}, group, warp, lane);
      asm volatile("" : "+r"(group), "+r"(warp), "+r"(lane));
      return consume(std::true_type{}, __shfl_sync(0xffffffffu, group, 0), __shfl_sync(0xffffffffu, warp, 0), lane);
    }
  }
  consume(std::false_type{}, group, warp, lane);
}

// Query blocks of a head that there is room for.
template <class Traits>
__device__ __forceinline__ int query_blocks(const BackwardParams& p) {
  if constexpr (Traits::kTurnsDq) return (p.seqlen_q + Traits::kBlockM - 1) / Traits::kBlockM;
  return (p.seqlen_q + kTile - 1) / kTile * (kTile / Traits::kBlockM);
}

// Where lse and delta of an item's queries begin.
template <class Traits>
__device__ __forceinline__ int64_t first_padded_row_of(const BackwardParams& p, const KeyWorkItem<Traits>& item) {
  if constexpr (Traits::kTurnsDq) {
    const int64_t head = static_cast<int64_t>(item.batch) * p.num_heads + item.head;
    return head * query_blocks<Traits>(p) * Traits::kBlockM;
  }
  return first_padded_tile_of(p, item) * kTile;
}

// The accumulator of a consumer's share of dq of a query block: contiguous, as its threads hold it (accumulators.h).
template <class Traits>
__device__ __forceinline__ float* dq_sums_of(const BackwardParams& p, const KeyWorkItem<Traits>& item, int block,
                                             int group) {
  constexpr int kBlockM = Traits::kBlockM, kDqColumns = Traits::kDqColumns;
  if constexpr (Traits::kTurnsDq) {
    const int64_t head = static_cast<int64_t>(item.batch) * p.num_heads + item.head;
    return p.dq_sums + ((head * query_blocks<Traits>(p) + block) * 2 + group) * kTurnedFloats;
  }
  const int tiles_q = (p.seqlen_q + kTile - 1) / kTile;
  const int row = block * (kBlockM / 64) + (kBlockM == 128 ? group : 0);
  const int panel = Traits::kPanels >= 2 ? group : 0;
  const int first = kBlockM == 64 && kDqColumns < kAccumColumns ? group * (kDqColumns / 8) : 0;
  const int64_t head = static_cast<int64_t>(item.batch) * p.num_heads + item.head;
  // Not by first_padded_tile_of in dense calls: ptxas would schedule the mainloop worse.
  const int64_t tile = Traits::kHasSequences ? 2 * first_padded_tile_of(p, item) : head * 2 * tiles_q;
  return p.dq_sums + ((tile + row) * Traits::kPanels + panel) * kAccumFloats<Traits::kD> + accum_offset(first, 0);
}

}  // namespace flash_dmattn
