// The producer: one warp schedules tiles and loads operands by TMA.
#pragma once

#include "storage.h"

namespace flash_dmattn {

// The head of another lane.
template <bool kHasSequences>
__device__ __forceinline__ Head<kHasSequences> of_lane(const Head<kHasSequences>& own, int lane) {
  const auto shuffled = [&](int x) { return __shfl_sync(0xffffffffu, x, lane); };
  Head<kHasSequences> head;
  head.batch = shuffled(own.batch);
  head.head = shuffled(own.head);
  if constexpr (kHasSequences) {
    head.sequence.first_q = shuffled(own.sequence.first_q);
    head.sequence.seqlen_q = shuffled(own.sequence.seqlen_q);
    head.sequence.first_k = shuffled(own.sequence.first_k);
    head.sequence.seqlen_k = shuffled(own.sequence.seqlen_k);
  }
  return head;
}

// Loads the operands of one product, by the warp's first lane: a slot for every kSlotPanels panels, each with row_stats
// of its rows.
template <int kPanels, class Traits, int kFirst = 0>
__device__ __forceinline__ void fill_slots(const SharedDbiasParams& p, SharedDbiasStorage<Traits>& shared,
                                           PipelineState<Traits::kSlots>& pipe, const CUtensorMap* rows,
                                           const CUtensorMap* keys, const float* row_stats, const DbiasWorkTile& work,
                                           const Head<Traits::kHasSequences>& head) {
  constexpr int kCopied = kPanels - kFirst < Traits::kSlotPanels ? kPanels - kFirst : Traits::kSlotPanels;
  if (threadIdx.x == 0) {
    uint64_t* full = &shared.slot_full[pipe.stage];
    barrier_wait(&shared.slot_empty[pipe.stage], pipe.phase ^ 1);
    const auto query = query_at(p, head, work.block_q * kTile), key = key_at(p, head, work.block_k * kTile);
    tma_load_panels<kCopied, kTile>(shared.rows[pipe.stage], rows, full, kFirst * kPanelColumns, query, head.head);
    tma_load_panels<kCopied, kTile>(shared.keys[pipe.stage], keys, full, kFirst * kPanelColumns, key,
                                    head.head / p.heads_per_group);
    bulk_load_floats(shared.row_stats[pipe.stage], row_stats + (first_padded_tile_of(p, head) + work.block_q) * kTile,
                     kTile, full);
  }
  pipe.advance();
  if constexpr (kFirst + kCopied < kPanels) {
    fill_slots<kPanels, Traits, kFirst + kCopied>(p, shared, pipe, rows, keys, row_stats, work, head);
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
    if constexpr (!Traits::kSumsDiagonals) prefetch_tensor_map(&p.bias);
  }
  PipelineState<Traits::kSlots> pipe;
  PipelineState<Traits::kBiasStages> pipe_bias;
  PipelineState<2> pipe_work;
  for (int index = blockIdx.x;;) {
    DbiasWorkItem item;
    item.is_valid = index < p.num_work_tiles;
    item.work = decode_dbias_work_tile<Traits>(p, item.is_valid ? index : 0);
    int first = start_of_chunk<Traits>(p, item.work, item.work.chunk);
    const int stop = item.is_valid ? start_of_chunk<Traits>(p, item.work, item.work.chunk + 1) : first + 1;
    bool has_bias = false;
    item.is_first = true;
#pragma unroll 1
    // A chunk without a tile, of a short diagonal, has sums too.
    for (; first < stop || (Traits::kSumsDiagonals && item.is_first); first += kHeadsOfItem) {
      const int position = min(first + lane, stop - 1);
      const auto own = summed_tile<Traits>(p, item.work, position);
      TileClass tile_class = TileClass::kEmpty;
      if (item.is_valid && first + lane < stop) {
        tile_class = class_of<Traits>(p, own);
      }
      item.visited = __ballot_sync(kAll, tile_class != TileClass::kEmpty);
      item.partial = __ballot_sync(kAll, tile_class == TileClass::kPartial);
      item.first_index = first;
      item.is_last = first + kHeadsOfItem >= stop;
      item.takes_bias = !Traits::kSumsDiagonals && !has_bias && item.visited != 0;
      has_bias |= item.takes_bias;
      item.frees_bias = has_bias && item.is_last;
      if (lane == 0) hand_out(shared, pipe_work, item);
      item.is_first = false;
      if (item.takes_bias) {
        if (lane == 0) {
          barrier_wait(&shared.bias_empty[pipe_bias.stage], pipe_bias.phase ^ 1);
          tma_load_panels<Traits::kBiasPanels, kTile, false, Traits::kBiasColumns>(
              shared.bias[pipe_bias.stage], &p.bias, &shared.bias_full[pipe_bias.stage], item.work.block_k * kTile,
              RowAt{item.work.block_q * kTile, p.bias_values.has_batch ? item.work.batch : 0},
              item.work.first_head / p.bias_values.heads_per_bias);
        }
        pipe_bias.advance();
      }
#pragma unroll 1
      for (uint32_t left = item.visited; left != 0; left &= left - 1) {
        const int from = __ffs(left) - 1;
        const auto head = of_lane<Traits::kHasSequences>(own.head, from);
        DbiasWorkTile of = item.work;
        if constexpr (Traits::kSumsDiagonals) {
          of.block_q = __shfl_sync(kAll, own.work.block_q, from);
          of.block_k = __shfl_sync(kAll, own.work.block_k, from);
        }
        fill_slots<Traits::kPanels, Traits>(p, shared, pipe, &p.q, &p.k, p.lse, of, head);
        fill_slots<Traits::kPanelsV, Traits>(p, shared, pipe, &p.dout, &p.v, p.delta, of, head);
      }
    }
    if (!item.is_valid) return;
    int handed_out = 0;
    if (lane == 0 && p.tile_counter != nullptr) handed_out = atomicAdd(p.tile_counter, 1);
    index = gridDim.x + __shfl_sync(kAll, handed_out, 0);
  }
}

}  // namespace flash_dmattn
