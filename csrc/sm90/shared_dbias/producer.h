// The producer: one warp hands out work and has tensors copied.
#pragma once

#include "storage.h"

namespace flash_dmattn {

// This block's part of an operand, for all blocks that need the same: those whose ranks are bits of the mask.
template <int kPanels, int kParts>
__device__ __forceinline__ void copy_part(uint8_t* to, const CUtensorMap* map, uint64_t* full, int part, uint16_t ranks,
                                          int row, int head, int batch) {
  constexpr int kRows = kTile / kParts;
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    uint8_t* const rows = to + (panel * kTile + part * kRows) * kRowBytes;
    const int column = panel * kPanelColumns;
    if constexpr (kParts == 1) {
      copy_tensor(rows, map, full, column, row, head, batch);
    } else {
      copy_tensor_to_blocks(rows, map, full, ranks, column, row + part * kRows, head, batch);
    }
  }
}

// Of one head, what there is to copy.
struct Sources {
  int batch, head, head_k;
};

__device__ __forceinline__ Sources of_lane(const Sources& sources, int lane) {
  constexpr unsigned kAll = 0xffffffffu;
  return {__shfl_sync(kAll, sources.batch, lane), __shfl_sync(kAll, sources.head, lane),
          __shfl_sync(kAll, sources.head_k, lane)};
}

// The operands of one product, and a number of each row; by a whole warp. The slot is empty once it is so in all blocks
// that this one copies to.
template <int kPanels, class Traits>
__device__ __forceinline__ void fill_slot(const SharedDbiasParams& p, SharedDbiasStorage<Traits>& shared,
                                          Ring<Traits::kSlots>& ring, const CUtensorMap* rows, const CUtensorMap* keys,
                                          const float* numbers, const DbiasWork& work, const Sources& sources,
                                          int rank) {
  // A bit for each rank of a row of the patch, and of a column.
  constexpr Patch kPatch = Traits::kPatch;
  constexpr uint16_t kRowOfRanks = (1 << kPatch.k) - 1, kColumnOfRanks = kPatch.q == 1 ? 1 : 1 | 1 << kPatch.k;
  const int patch_row = rank / kPatch.k, patch_column = rank % kPatch.k;
  uint64_t* full = &shared.slot_full[ring.stage];
  barrier_wait(&shared.slot_empty[ring.stage], ring.phase ^ 1);
  if (threadIdx.x == 0) {
    const int row = work.block_q * kTile, key = work.block_k * kTile;
    // Beyond the last tile any numbers will do: its rows are not stored.
    const int64_t first = (static_cast<int64_t>(sources.batch) * p.num_heads + sources.head) * p.tiles_q +
                          min(work.block_q, p.tiles_q - 1);
    barrier_arrive_expect(full, 2 * kPanels * Traits::kPanelBytes);
    copy_part<kPanels, kPatch.k>(shared.rows[ring.stage], rows, full, patch_column,
                                 kRowOfRanks << patch_row * kPatch.k, row, sources.head, sources.batch);
    copy_part<kPanels, kPatch.q>(shared.keys[ring.stage], keys, full, patch_row, kColumnOfRanks << patch_column, key,
                                 sources.head_k, sources.batch);
    copy_floats(shared.numbers[ring.stage], numbers + first * kTile, kTile, full);
  }
  ring.advance();
}

// The next patch, for all blocks of the cluster: the first one takes it from the counter.
template <class Traits>
__device__ __forceinline__ int next_patch(const SharedDbiasParams& p, SharedDbiasStorage<Traits>& shared, int rank,
                                          uint32_t& phase) {
  constexpr unsigned kAll = 0xffffffffu;
  const int lane = threadIdx.x;
  int next = 0;
  if (rank == 0) {
    if (lane == 0) next = atomicAdd(p.next, 1);
    next = __shfl_sync(kAll, next, 0);
  }
  if constexpr (Traits::kCluster > 1) {
    if (rank == 0) {
      barrier_wait_in_cluster(&shared.next_empty, phase ^ 1);
      if (lane > 0 && lane < Traits::kCluster) {
        store_in_cluster(&shared.next, lane, next);
        barrier_arrive_in_cluster(&shared.next_full, lane);
      }
    } else {
      barrier_wait_in_cluster(&shared.next_full, phase);
      next = shared.next;
      __syncwarp();
      if (lane == 0) barrier_arrive_in_cluster(&shared.next_empty, 0);
    }
    phase ^= 1;
  }
  return next;
}

// By the first warp: each lane looks up the tiles of the patch for one of 32 heads, and the first one has operands
// copied. All blocks of a cluster walk the same heads: of a tile that is empty where another is not, all is forbidden.
template <class Traits>
__device__ __forceinline__ void copy_heads(const SharedDbiasParams& p, SharedDbiasStorage<Traits>& shared, int rank) {
  constexpr unsigned kAll = 0xffffffffu;
  const int lane = threadIdx.x;
  if (lane == 0) {
    prefetch_tensor_map(&p.q);
    prefetch_tensor_map(&p.k);
    prefetch_tensor_map(&p.v);
    prefetch_tensor_map(&p.dout);
    prefetch_tensor_map(&p.bias);
  }
  Ring<Traits::kSlots> ring;
  Ring<Traits::kBiasStages> ring_bias;
  Ring<2> ring_work;
  uint32_t phase_next = 0;
  for (;;) {
    const int index = next_patch(p, shared, rank, phase_next);
    DbiasItem item;
    item.exists = index < p.total;
    item.work = dbias_work_at<Traits>(p, item.exists ? index : 0, rank);
    constexpr Patch kPatch = Traits::kPatch;
    const int first_q = item.work.block_q - rank / kPatch.k, first_k = item.work.block_k - rank % kPatch.k;
    const int places = item.exists ? p.heads_summed : 1;
    bool has_bias = false;
#pragma unroll 1
    for (int first = 0; first < places; first += kHeadsOfItem) {
      const Head own = summed_head(p, item.work, min(first + lane, places - 1));
      const Sources sources{own.batch, own.head, own.head / p.queries_per_group};
      bool is_visited = false, is_full = false;
      if (item.exists && first + lane < places) {
#pragma unroll
        for (int other = 0; other < Traits::kCluster; ++other) {
          const TileClass found = class_of<Traits>(p, first_q + other / kPatch.k, first_k + other % kPatch.k, own);
          is_visited |= found != TileClass::kEmpty;
          is_full |= other == rank && found == TileClass::kFull;
        }
      }
      item.visited = __ballot_sync(kAll, is_visited);
      item.edges = __ballot_sync(kAll, is_visited && !is_full);
      item.first_place = first;
      item.is_first = first == 0;
      item.is_last = first + kHeadsOfItem >= places;
      item.takes_bias = !has_bias && item.visited != 0;
      has_bias |= item.takes_bias;
      item.frees_bias = has_bias && item.is_last;
      barrier_wait(&shared.work_empty[ring_work.stage], ring_work.phase ^ 1);
      if (lane == 0) {
        shared.work[ring_work.stage] = item;
        barrier_arrive(&shared.work_full[ring_work.stage]);
      }
      ring_work.advance();
      if (item.takes_bias) {
        barrier_wait(&shared.bias_empty[ring_bias.stage], ring_bias.phase ^ 1);
        if (lane == 0) {
          copy_panels<Traits::kBiasPanels, kTile>(
              shared.bias[ring_bias.stage], &p.bias, &shared.bias_full[ring_bias.stage], item.work.block_k * kTile,
              item.work.block_q * kTile, item.work.first_head / p.heads_per_bias,
              p.bias_has_batch ? item.work.batch : 0);
        }
        ring_bias.advance();
      }
#pragma unroll 1
      for (uint32_t left = item.visited; left != 0; left &= left - 1) {
        const Sources next = of_lane(sources, __ffs(left) - 1);
        fill_slot<Traits::kPanels>(p, shared, ring, &p.q, &p.k, p.lse, item.work, next, rank);
        fill_slot<Traits::kPanelsV>(p, shared, ring, &p.dout, &p.v, p.delta, item.work, next, rank);
      }
    }
    if (!item.exists) return;
  }
}

}  // namespace flash_dmattn
