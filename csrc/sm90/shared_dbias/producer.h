// The producer: one warp hands out work and has tensors copied.
#pragma once

#include "storage.h"

namespace flash_dmattn {

// Of one head, what there is to copy.
struct Sources {
  int batch, head, head_k;
};

__device__ __forceinline__ Sources of_lane(const Sources& sources, int lane) {
  constexpr unsigned kAll = 0xffffffffu;
  return {__shfl_sync(kAll, sources.batch, lane), __shfl_sync(kAll, sources.head, lane),
          __shfl_sync(kAll, sources.head_k, lane)};
}

// The operands of one product, a slot for every kSlotPanels panels of them, each with a number of each row; the first
// lane of the warp waits and has them copied.
template <int kPanels, class Traits, int kFirst = 0>
__device__ __forceinline__ void fill_slots(const SharedDbiasParams& p, SharedDbiasStorage<Traits>& shared,
                                           Ring<Traits::kSlots>& ring, const CUtensorMap* rows, const CUtensorMap* keys,
                                           const float* numbers, const DbiasWork& work, const Sources& sources) {
  constexpr int kCopied = kPanels - kFirst < Traits::kSlotPanels ? kPanels - kFirst : Traits::kSlotPanels;
  if (threadIdx.x == 0) {
    uint64_t* full = &shared.slot_full[ring.stage];
    barrier_wait(&shared.slot_empty[ring.stage], ring.phase ^ 1);
    const int64_t head = static_cast<int64_t>(sources.batch) * p.num_heads + sources.head;
    copy_panels<kCopied, kTile>(shared.rows[ring.stage], rows, full, kFirst * kPanelColumns, work.block_q * kTile,
                                sources.head, sources.batch);
    copy_panels<kCopied, kTile>(shared.keys[ring.stage], keys, full, kFirst * kPanelColumns, work.block_k * kTile,
                                sources.head_k, sources.batch);
    copy_floats(shared.numbers[ring.stage], numbers + (head * p.tiles_q + work.block_q) * kTile, kTile, full);
  }
  ring.advance();
  if constexpr (kFirst + kCopied < kPanels) {
    fill_slots<kPanels, Traits, kFirst + kCopied>(p, shared, ring, rows, keys, numbers, work, sources);
  }
}

// By the first warp: each lane looks up the tile for one of 32 heads, and the first one has operands copied.
template <class Traits>
__device__ __forceinline__ void copy_heads(const SharedDbiasParams& p, SharedDbiasStorage<Traits>& shared) {
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
  for (int index = blockIdx.x;;) {
    DbiasItem item;
    item.exists = index < p.total;
    item.work = dbias_work_at(p, item.exists ? index : 0);
    const int places = item.exists ? p.heads_summed : 1;
    bool has_bias = false;
#pragma unroll 1
    for (int first = 0; first < places; first += kHeadsOfItem) {
      const Head own = summed_head(p, item.work, min(first + lane, places - 1));
      const Sources sources{own.batch, own.head, own.head / p.queries_per_group};
      TileClass found = TileClass::kEmpty;
      if (item.exists && first + lane < places) {
        found = class_of<Traits>(p, item.work.block_q, item.work.block_k, own);
      }
      item.visited = __ballot_sync(kAll, found != TileClass::kEmpty);
      item.edges = __ballot_sync(kAll, found == TileClass::kPartial);
      item.first_place = first;
      item.is_first = first == 0;
      item.is_last = first + kHeadsOfItem >= places;
      item.takes_bias = !has_bias && item.visited != 0;
      has_bias |= item.takes_bias;
      item.frees_bias = has_bias && item.is_last;
      if (lane == 0) {
        barrier_wait(&shared.work_empty[ring_work.stage], ring_work.phase ^ 1);
        shared.work[ring_work.stage] = item;
        barrier_arrive(&shared.work_full[ring_work.stage]);
      }
      ring_work.advance();
      if (item.takes_bias) {
        if (lane == 0) {
          barrier_wait(&shared.bias_empty[ring_bias.stage], ring_bias.phase ^ 1);
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
        fill_slots<Traits::kPanels, Traits>(p, shared, ring, &p.q, &p.k, p.lse, item.work, next);
        fill_slots<Traits::kPanelsV, Traits>(p, shared, ring, &p.dout, &p.v, p.delta, item.work, next);
      }
    }
    if (!item.exists) return;
    int handed_out = 0;
    if (lane == 0 && p.next != nullptr) handed_out = atomicAdd(p.next, 1);
    index = gridDim.x + __shfl_sync(kAll, handed_out, 0);
  }
}

}  // namespace flash_dmattn
