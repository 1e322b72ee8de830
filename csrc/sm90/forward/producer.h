// The producer warpgroup: one thread hands out work tiles, one loads q, k and v by TMA; one warp supplies the bias, and
// one loads k and v where they lie in pages.
#pragma once

#include <type_traits>

#include "../bias_window.h"
#include "storage.h"

namespace flash_dmattn {

// Hands work tiles to the other warps, as one thread, which finds the next ones while the others work.
template <class Traits>
__device__ __forceinline__ void schedule(const ForwardParams& p, ForwardStorage<Traits>& shared) {
  PipelineState<kWorkStages> pipe_work;
  PipelineState<1> pipe_wanted;
  [[maybe_unused]] int num_works = 0;
  if constexpr (Traits::kHasSequences) num_works = *p.sequences.num_works;
  int index = blockIdx.x, num_work_tiles = count_work_tiles<Traits::kHasSequences>(p, num_works);
  if constexpr (Traits::kHoldsBias) {  // work tiles that follow each other: most read the bias of the one before
    const int64_t all = num_work_tiles;
    index = static_cast<int>(all * blockIdx.x / gridDim.x);
    num_work_tiles = static_cast<int>(all * (blockIdx.x + 1) / gridDim.x);
  }
  for (;;) {
    WorkItem<Traits> item;
    item.is_valid = index < num_work_tiles;
    if (item.is_valid) item.find(p, index, num_works);
    hand_out(shared, pipe_work, item);
    if (!item.is_valid) return;
    if (p.tile_counter != nullptr) {
      // Not before the loads of this one begin: a tile that is taken too early waits, while another block may be idle.
      barrier_wait(&shared.work_wanted, pipe_wanted.phase);
      pipe_wanted.advance();
      index = atomicAdd(p.tile_counter, 1) + gridDim.x;
    } else {
      index += Traits::kHoldsBias ? 1 : gridDim.x;
    }
  }
}

// Loads q, k and v, as one thread.
template <class Traits>
__device__ __forceinline__ void load_tiles(const ForwardParams& p, ForwardStorage<Traits>& shared) {
  constexpr int kBlockN = Traits::kBlockN;
  prefetch_tensor_map(&p.q);
  prefetch_tensor_map(&p.k);
  prefetch_tensor_map(&p.v);

  PipelineState<Traits::kStages> pipe_k, pipe_v;
  PipelineState<Traits::kQueryStages> pipe_q;
  PipelineState<kWorkStages> pipe_work;
  const auto load_queries = [&](const WorkItem<Traits>& item) {
    if (!item.is_valid || item.walk.steps == 0) return;
    barrier_wait(&shared.q_empty[pipe_q.stage], pipe_q.phase ^ 1);
    auto at = query_at(p, item.work, item.work.first_row);
    int head = item.work.head;
    if constexpr (Traits::kHasGroups) {
      if (p.group_shift > 0) {  // heads come before queries in the descriptor
        at.row = item.work.head << p.group_shift;
        head = item.work.first_row >> p.group_shift;
      }
    }
    tma_load_panels<Traits::kPanels, Traits::kBlockM>(shared.q[pipe_q.stage], &p.q, &shared.q_full[pipe_q.stage], 0, at,
                                                      head);
    pipe_q.advance();
  };

  // With another stage for q, q of the next work tile is loaded early: when consumers have begun this tile.
  constexpr bool kIsEarly = Traits::kQueryStages > 1;
  const WorkItem<Traits>* item = &get_work_tile(shared, pipe_work);
  load_queries(*item);
  while (item->is_valid) {
    if (p.tile_counter != nullptr) barrier_arrive(&shared.work_wanted);
    // Copies of the item: a load is issued as soon as its stage is free. The item itself, in `stage`, is free when the last
    // load has begun, and `item` then points to the next one.
    const auto work = item->work;
    const Walk<Traits> walk = item->walk;
    const int head_k = work.head / p.heads_per_group, steps = walk.steps;

    // In the order in which consumers need them: the keys of a step before the values of the step before.
    int block = 0;
    const auto load_step = [&](int step) {
      if constexpr (Traits::kHasPages) return;
      const auto at_of_step_before = key_at(p, work, block * kBlockN);
      if (step < steps) {
        bool needs_mask;
        block = walk.at(step, needs_mask);
        const auto at = key_at(p, work, block * kBlockN);
        barrier_wait(&shared.k_empty[pipe_k.stage], pipe_k.phase ^ 1);
        tma_load_panels<Traits::kPanels, kBlockN>(shared.k[pipe_k.stage], &p.k, &shared.k_full[pipe_k.stage], 0, at,
                                                  head_k);
        pipe_k.advance();
      }
      if (step > 0) {
        barrier_wait(&shared.v_empty[pipe_v.stage], pipe_v.phase ^ 1);
        tma_load_panels<Traits::kPanelsV, kBlockN>(shared.v[pipe_v.stage], &p.v, &shared.v_full[pipe_v.stage], 0,
                                                   at_of_step_before, head_k);
        pipe_v.advance();
      }
    };

    int step = 0;
    const int steps_before_next = kIsEarly ? min(Traits::kStages, steps) : steps;
#pragma unroll 1
    for (; step <= steps_before_next; ++step) load_step(step);
    const int stage = pipe_work.stage;
    pipe_work.advance();
    const WorkItem<Traits>& next = get_work_tile(shared, pipe_work);
    load_queries(next);
    if constexpr (kIsEarly) {
#pragma unroll 1
      for (; step <= steps; ++step) load_step(step);
    }
    barrier_arrive(&shared.work_empty[stage]);
    item = &next;
  }
}

// Loads k and v in pages, as one warp: each lane finds and loads boxes of its own, so that one wait for the table
// serves all.
template <class Traits>
__device__ __forceinline__ void load_pages(const ForwardParams& p, ForwardStorage<Traits>& shared) {
  const int lane = threadIdx.x % 32, boxes = kTile / p.sequences.page_box;
  PipelineState<Traits::kStages> pipe_k, pipe_v;
  PipelineState<kWorkStages> pipe_work;
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

// Supplies the bias of each key block, as one warp: tiles by TMA, other operands as fp32.
template <class Traits>
__device__ __forceinline__ void produce_bias(const ForwardParams& p, ForwardStorage<Traits>& shared) {
  constexpr int kBlockN = Traits::kBlockN, kPerLane = kBlockN / 32;
  const int lane = threadIdx.x % 32;
  const bool is_read_once = p.bias_values.heads_per_bias == 1 && (p.bias_values.has_batch || p.batch == 1);
  int held_head = -1, held_rows = -1;
  PipelineState<Traits::kBiasStages> pipe;
  PipelineState<kWorkStages> pipe_work;
  for (;;) {
    const WorkItem<Traits>& item = get_work_tile(shared, pipe_work);
    if (!item.is_valid) return;
    const auto& work = item.work;
    const Walk<Traits>& walk = item.walk;
    const int head = work.head / p.bias_values.heads_per_bias;
    const bool is_held = Traits::kHoldsBias && head == held_head && work.block_q == held_rows;
    held_head = head, held_rows = work.block_q;
#pragma unroll 1
    for (int step = 0; step < walk.steps; ++step) {
      bool needs_mask;
      const int first_key = walk.at(step, needs_mask) * kBlockN;
      if constexpr (Traits::kHasBiasTiles) {
        barrier_wait(&shared.bias_empty[pipe.stage], pipe.phase ^ 1);
        if (lane == 0) {
          const auto at = score_at(p, work, work.first_row, p.bias_values.has_batch);
          const auto copy = [&](auto once) {
            tma_load_panels<kBlockN / Traits::kBiasColumns, Traits::kBlockM, decltype(once)::value, Traits::kBiasColumns>(
                shared.bias[pipe.stage], &p.bias, &shared.bias_full[pipe.stage], first_key, at, head);
          };
          // A bias that is read once would drive k and v out of L2 (docs/notes/cuda_tried.md, "Forward kernel").
          if (is_held) {
            barrier_arrive(&shared.bias_full[pipe.stage]);
          } else if (is_read_once) {
            copy(std::true_type{});
          } else {
            copy(std::false_type{});
          }
        }
      } else if constexpr (Traits::kHasBiasWindow) {
        using Window = BiasWindow<Traits::kBlockM, kBlockN>;
        const int first = Window::first_place(p.distances, work.first_row, first_key);
        const int count = Window::is_flat(p.distances, first) ? 1 : Window::kValues;
        barrier_wait(&shared.bias_empty[pipe.stage], pipe.phase ^ 1);
        float* to = reinterpret_cast<float*>(shared.bias[pipe.stage]);
        with_bias(p, work, [&](auto bias) { Window::write(to, p.distances, first, count, bias); });
        barrier_arrive_of_warp(&shared.bias_full[pipe.stage]);
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
        for (int i = 0; i < kPerLane; ++i) to[i * 32 + lane] = values[i];
        barrier_arrive_of_warp(&shared.bias_full[pipe.stage]);
      }
      pipe.advance(bias_stages(walk));
    }
    release_work_tile(shared, pipe_work);
  }
}

}  // namespace flash_dmattn
