// The producer: one warp schedules tiles and loads operands by TMA.
#pragma once

#include "storage.h"

namespace flash_dmattn {

// Where one head's operands lie.
struct Sources {
  int batch, head, head_k;
};

__device__ __forceinline__ Sources of_lane(const Sources& sources, int lane) {
  constexpr unsigned kAll = 0xffffffffu;
  return {__shfl_sync(kAll, sources.batch, lane), __shfl_sync(kAll, sources.head, lane),
          __shfl_sync(kAll, sources.head_k, lane)};
}

// Loads the operands of one product, by the warp's first lane: a slot for every kSlotPanels panels, each with row_stats
// of its rows.
template <int kPanels, class Traits, int kFirst = 0>
__device__ __forceinline__ void fill_slots(const SharedDbiasParams& p, SharedDbiasStorage<Traits>& shared,
                                           PipelineState<Traits::kSlots>& pipe, const CUtensorMap* rows,
                                           const CUtensorMap* keys, const float* row_stats, const DbiasWorkTile& work,
                                           const Sources& sources) {
  constexpr int kCopied = kPanels - kFirst < Traits::kSlotPanels ? kPanels - kFirst : Traits::kSlotPanels;
  if (threadIdx.x == 0) {
    uint64_t* full = &shared.slot_full[pipe.stage];
    barrier_wait(&shared.slot_empty[pipe.stage], pipe.phase ^ 1);
    const int64_t head = static_cast<int64_t>(sources.batch) * p.num_heads + sources.head;
    tma_load_panels<kCopied, kTile>(shared.rows[pipe.stage], rows, full, kFirst * kPanelColumns, work.block_q * kTile,
                                    sources.head, sources.batch);
    tma_load_panels<kCopied, kTile>(shared.keys[pipe.stage], keys, full, kFirst * kPanelColumns, work.block_k * kTile,
                                    sources.head_k, sources.batch);
    bulk_load_floats(shared.row_stats[pipe.stage], row_stats + (head * p.tiles_q + work.block_q) * kTile, kTile, full);
  }
  pipe.advance();
  if constexpr (kFirst + kCopied < kPanels) {
    fill_slots<kPanels, Traits, kFirst + kCopied>(p, shared, pipe, rows, keys, row_stats, work, sources);
  }
}

// By the first warp: each lane looks up the tile for one of 32 heads; the first lane loads.
template <class Traits>
__device__ __forceinline__ void load_heads(const SharedDbiasParams& p, SharedDbiasStorage<Traits>& shared) {
  constexpr unsigned kAll = 0xffffffffu;
  const int lane = threadIdx.x;
  if (lane == 0) {
    prefetch_tensor_map(&p.q);
    prefetch_tensor_map(&p.k);
    prefetch_tensor_map(&p.v);
    prefetch_tensor_map(&p.dout);
    prefetch_tensor_map(&p.bias);
  }
  PipelineState<Traits::kSlots> pipe;
  PipelineState<Traits::kBiasStages> pipe_bias;
  PipelineState<2> pipe_work;
  for (int index = blockIdx.x;;) {
    DbiasWorkItem item;
    item.is_valid = index < p.num_work_tiles;
    item.work = decode_dbias_work_tile(p, item.is_valid ? index : 0);
    int first = start_of_chunk(p, item.work.chunk);
    const int stop = item.is_valid ? start_of_chunk(p, item.work.chunk + 1) : first + 1;
    bool has_bias = false;
    item.is_first = true;
#pragma unroll 1
    for (; first < stop; first += kHeadsOfItem) {
      const Head own = summed_head(p, item.work, min(first + lane, stop - 1));
      const Sources sources{own.batch, own.head, own.head / p.heads_per_group};
      TileClass found = TileClass::kEmpty;
      if (item.is_valid && first + lane < stop) {
        found = class_of<Traits>(p, item.work.block_q, item.work.block_k, own);
      }
      item.visited = __ballot_sync(kAll, found != TileClass::kEmpty);
      item.partial = __ballot_sync(kAll, found == TileClass::kPartial);
      item.first_index = first;
      item.is_last = first + kHeadsOfItem >= stop;
      item.takes_bias = !has_bias && item.visited != 0;
      has_bias |= item.takes_bias;
      item.frees_bias = has_bias && item.is_last;
      if (lane == 0) {
        barrier_wait(&shared.work_empty[pipe_work.stage], pipe_work.phase ^ 1);
        shared.work[pipe_work.stage] = item;
        barrier_arrive(&shared.work_full[pipe_work.stage]);
      }
      item.is_first = false;
      pipe_work.advance();
      if (item.takes_bias) {
        if (lane == 0) {
          barrier_wait(&shared.bias_empty[pipe_bias.stage], pipe_bias.phase ^ 1);
          tma_load_panels<Traits::kBiasPanels, kTile>(
              shared.bias[pipe_bias.stage], &p.bias, &shared.bias_full[pipe_bias.stage], item.work.block_k * kTile,
              item.work.block_q * kTile, item.work.first_head / p.heads_per_bias,
              p.bias_has_batch ? item.work.batch : 0);
        }
        pipe_bias.advance();
      }
#pragma unroll 1
      for (uint32_t left = item.visited; left != 0; left &= left - 1) {
        const Sources head = of_lane(sources, __ffs(left) - 1);
        fill_slots<Traits::kPanels, Traits>(p, shared, pipe, &p.q, &p.k, p.lse, item.work, head);
        fill_slots<Traits::kPanelsV, Traits>(p, shared, pipe, &p.dout, &p.v, p.delta, item.work, head);
      }
    }
    if (!item.is_valid) return;
    int handed_out = 0;
    if (lane == 0 && p.tile_counter != nullptr) handed_out = atomicAdd(p.tile_counter, 1);
    index = gridDim.x + __shfl_sync(kAll, handed_out, 0);
  }
}

}  // namespace flash_dmattn
