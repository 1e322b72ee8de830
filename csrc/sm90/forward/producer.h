// The producer warpgroup: one thread schedules tiles and loads q, k and v by TMA; one warp supplies the bias, and one loads k
// and v where they lie in pages.
#pragma once

#include <type_traits>

#include "../operands.h"
#include "storage.h"

namespace flash_dmattn {

template <class Traits>
__device__ __forceinline__ void load_tiles(const ForwardParams& p, ForwardStorage<Traits>& shared) {
  constexpr int kBlockN = Traits::kBlockN;
  prefetch_tensor_map(&p.q);
  prefetch_tensor_map(&p.k);
  prefetch_tensor_map(&p.v);

  PipelineState<Traits::kStages> pipe_k, pipe_v;
  PipelineState<Traits::kQueryStages> pipe_q;
  PipelineState<2> pipe_work;
  [[maybe_unused]] int num_works = 0;
  if constexpr (Traits::kHasSequences) num_works = *p.sequences.num_works;
  const int num_work_tiles = count_work_tiles<Traits::kHasSequences>(p, num_works);
  for (int index = blockIdx.x;;) {
    WorkItem<Traits> item;
    item.is_valid = index < num_work_tiles;
    if (item.is_valid) {
      if constexpr (Traits::kSplitKv) {
        item.split = index - p.unsplit_tiles;
        const int tile_index = item.split < 0 ? index : p.unsplit_tiles + item.split / p.num_splits;
        item.work = decode_work_tile<Traits::kHasSequences>(p, tile_index, Traits::kBlockM, num_works);
        item.walk = Walk<Traits>::of(p, item.work);
        if (item.split >= 0) item.walk.keep_split(item.split % p.num_splits, p.num_splits);
      } else {
        item.work = decode_work_tile<Traits::kHasSequences>(p, index, Traits::kBlockM, num_works);
        item.walk = Walk<Traits>::of(p, item.work);
      }
      item.walk.skip_empty_half(p, item.work);
    }
    barrier_wait(&shared.work_empty[pipe_work.stage], pipe_work.phase ^ 1);
    shared.work[pipe_work.stage] = item;
    barrier_arrive(&shared.work_full[pipe_work.stage]);
    pipe_work.advance();
    if (!item.is_valid) return;
    // Asked for now, so that the answer is there when this tile's loads have been issued.
    const int next = p.tile_counter != nullptr ? atomicAdd(p.tile_counter, 1) + gridDim.x : index + gridDim.x;
    const auto& work = item.work;
    const Walk<Traits>& walk = item.walk;
    const int head_k = work.head / p.heads_per_group;

    auto copy_keys = [&](int block) {
      if constexpr (Traits::kHasPages) return;
      barrier_wait(&shared.k_empty[pipe_k.stage], pipe_k.phase ^ 1);
      const auto at = key_at(p, work, block * kBlockN);
      tma_load_panels<Traits::kPanels, kBlockN>(shared.k[pipe_k.stage], &p.k, &shared.k_full[pipe_k.stage], 0, at,
                                                head_k);
      pipe_k.advance();
    };
    auto copy_values = [&](int block) {
      if constexpr (Traits::kHasPages) return;
      barrier_wait(&shared.v_empty[pipe_v.stage], pipe_v.phase ^ 1);
      const auto at = key_at(p, work, block * kBlockN);
      tma_load_panels<Traits::kPanelsV, kBlockN>(shared.v[pipe_v.stage], &p.v, &shared.v_full[pipe_v.stage], 0, at,
                                                 head_k);
      pipe_v.advance();
    };

    if (walk.steps > 0) {
      bool needs_mask;
      int block = walk.at(0, needs_mask);
      barrier_wait(&shared.q_empty[pipe_q.stage], pipe_q.phase ^ 1);
      const auto at = query_at(p, work, work.first_row);
      tma_load_panels<Traits::kPanels, Traits::kBlockM>(shared.q[pipe_q.stage], &p.q, &shared.q_full[pipe_q.stage], 0,
                                                        at, work.head);
      pipe_q.advance();
      copy_keys(block);
      // In the order in which consumers need them: the keys of a step before the values of the step before.
#pragma unroll 1
      for (int step = 1; step < walk.steps; ++step) {
        const int next_block = walk.at(step, needs_mask);
        copy_keys(next_block);
        copy_values(block);
        block = next_block;
      }
      copy_values(block);
    }
    index = next;
  }
}

// Loads k and v in pages, as one warp: each lane finds and loads boxes of its own, so that one wait for the table serves all.
template <class Traits>
__device__ __forceinline__ void load_pages(const ForwardParams& p, ForwardStorage<Traits>& shared) {
  const int lane = threadIdx.x % 32, boxes = kTile / p.sequences.page_box;
  PipelineState<Traits::kStages> pipe_k, pipe_v;
  PipelineState<2> pipe_work;
  for (;;) {
    const WorkItem<Traits>& item = get_work_tile(shared, pipe_work);
    if (!item.is_valid) return;
    const Sequence of = item.work.sequence;
    const int number = item.work.batch, head_k = item.work.head / p.heads_per_group;
    const Walk<Traits>& walk = item.walk;
    const auto load = [&](auto panels, uint8_t* to, const CUtensorMap* map, uint64_t* full, int block, int page_rows) {
      constexpr int kPanels = decltype(panels)::value;
      if (lane == 0) barrier_arrive_expect_tx(full, kPanels * kTile * kRowBytes);
      __syncwarp();
      for (int i = lane; i < boxes * kPanels; i += 32) {
        const int box = i / kPanels, panel = i % kPanels;
        const auto at = key_in_page(p.sequences, of, number, block * kTile, box, page_rows);
        tma_load_box(to + (panel * kTile + box * p.sequences.page_box) * kRowBytes, map, full, panel * kPanelColumns, at,
                     head_k);
      }
    };
    const auto load_keys = [&](int block) {
      barrier_wait(&shared.k_empty[pipe_k.stage], pipe_k.phase ^ 1);
      load(std::integral_constant<int, Traits::kPanels>{}, shared.k[pipe_k.stage], &p.k, &shared.k_full[pipe_k.stage],
           block, p.sequences.page_rows_k);
      pipe_k.advance();
    };
    // In the order of load_tiles: the keys of a step before the values of the step before.
#pragma unroll 1
    for (int step = 0; step <= walk.steps; ++step) {
      bool needs_mask;
      if (step < walk.steps) load_keys(walk.at(step, needs_mask));
      if (step == 0) continue;
      barrier_wait(&shared.v_empty[pipe_v.stage], pipe_v.phase ^ 1);
      load(std::integral_constant<int, Traits::kPanelsV>{}, shared.v[pipe_v.stage], &p.v, &shared.v_full[pipe_v.stage],
           walk.at(step - 1, needs_mask), p.sequences.page_rows_v);
      pipe_v.advance();
    }
    release_work_tile(shared, pipe_work);
  }
}

// Supplies the bias of each key block, as one warp: tiles by TMA; a bias per key as fp32, divided by the scale.
template <class Traits>
__device__ __forceinline__ void produce_bias(const ForwardParams& p, ForwardStorage<Traits>& shared) {
  constexpr int kBlockN = Traits::kBlockN, kPerLane = kBlockN / 32;
  const int lane = threadIdx.x % 32;
  const bool is_read_once = p.heads_per_bias == 1 && (p.bias_has_batch || p.batch == 1);
  PipelineState<Traits::kBiasStages> pipe;
  PipelineState<2> pipe_work;
  for (;;) {
    const WorkItem<Traits>& item = get_work_tile(shared, pipe_work);
    if (!item.is_valid) return;
    const auto& work = item.work;
    const Walk<Traits>& walk = item.walk;
#pragma unroll 1
    for (int step = 0; step < walk.steps; ++step) {
      bool needs_mask;
      const int first_key = walk.at(step, needs_mask) * kBlockN;
      if constexpr (Traits::kBias == Bias::kTile) {
        barrier_wait(&shared.bias_empty[pipe.stage], pipe.phase ^ 1);
        if (lane == 0) {
          const auto at = score_at(p, work, work.first_row, p.bias_has_batch);
          const auto copy = [&](auto once) {
            tma_load_panels<kBlockN / kPanelColumns, Traits::kBlockM, decltype(once)::value>(
                shared.bias[pipe.stage], &p.bias, &shared.bias_full[pipe.stage], first_key, at,
                work.head / p.heads_per_bias);
          };
          // A bias that is read once would drive k and v out of L2 (docs/notes/cuda_tried.md, "Forward kernel").
          if (is_read_once) {
            copy(std::true_type{});
          } else {
            copy(std::false_type{});
          }
        }
      } else {
        float values[kPerLane];
        const int last_key = extent_of(p, work).seqlen_k - 1;
        with_bias(p, work, [&](auto bias) {
#pragma unroll
          for (int i = 0; i < kPerLane; ++i) values[i] = bias(0, min(first_key + i * 32 + lane, last_key));
        });
        barrier_wait(&shared.bias_empty[pipe.stage], pipe.phase ^ 1);
        float* to = reinterpret_cast<float*>(shared.bias[pipe.stage]);
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) to[i * 32 + lane] = values[i] * p.inverse_scale;
        barrier_arrive_of_warp(&shared.bias_full[pipe.stage]);
      }
      pipe.advance();
    }
    release_work_tile(shared, pipe_work);
  }
}

}  // namespace flash_dmattn
