// The producer warpgroup: one thread hands out work tiles, one loads operands by TMA; one warp loads the bias, one stores
// dbias.
#pragma once

#include "../../device/pipeline.h"
#include "../bias_window.h"
#include "named_barriers.h"
#include "cluster.h"
#include "tile_scheduler.h"

namespace flash_dmattn {

// Makes blocks take no work tile before number `next`. The counter begins behind the tiles that blocks begin with.
__device__ __forceinline__ void skip_to(const BackwardParams& p, int next) {
  atomicMax(p.tile_counter, next - static_cast<int>(gridDim.x));
}

// Makes all blocks go on with the next head, where a section is one head and key block `index` has no walk. In an order
// of keys live keys come first, so no later key block has a walk either.
__device__ __forceinline__ void leave_head(const BackwardParams& p, int index) {
  if (p.single_heads.width > 1 || p.tile_counter == nullptr) return;
  const int rows = p.single_heads.rows;
  skip_to(p, (index / rows + 1) * rows);
}

// Makes blocks go on after the tiles of a group's other heads, where these follow tile `index`, the first head's.
__device__ __forceinline__ void skip_others(const BackwardParams& p, int index, const Sections& of) {
  if (p.tile_counter == nullptr || of.width % p.heads_per_group != 0) return;
  skip_to(p, index + p.heads_per_group);
}

// Calls `handle` for each item of the block's work tiles, and for one more, which is not valid, as one thread.
template <class Traits, class Storage, class Handle>
__device__ __forceinline__ void find_items(const BackwardParams& p, Storage& shared, Handle handle) {
  [[maybe_unused]] int num_works = 0;
  int num_work_tiles = p.num_work_tiles;
  if constexpr (Traits::kHasSequences) {
    num_works = *p.sequences.num_works;
    num_work_tiles = num_works * (p.num_heads / p.heads_per_group);
  }
  bool has_long = false;
  if constexpr (Traits::kHasMask && !Traits::kSumsDbias) {
    has_long = p.has_group != nullptr && p.full_group_pairs > 0 && has_long_walks(p);
    if (has_long) num_work_tiles = p.batch * p.num_heads * p.blocks_k;
  }

  // A cluster takes one work tile for each of its blocks at a time.
  const int cluster = Traits::kSumsDbias ? p.cluster : 1, rank = Traits::kSumsDbias ? cluster_rank() : 0;
  const int takers = gridDim.x / cluster;
  [[maybe_unused]] uint32_t next_phase = 0;
  const auto take = [&] {
    if constexpr (Traits::kSumsDbias) {
      return next_tile_of_cluster(p, shared, next_phase);
    } else {
      return atomicAdd(p.tile_counter, 1);
    }
  };
  // With a fixed order of additions every tile comes from the counter, even a block's first. So a tile that others wait
  // for is always held by a block that runs. Otherwise the first needs no counter.
  const bool is_ordered = p.dq_semaphore != nullptr;
  const int skipped = is_ordered ? 0 : takers;
  const auto next_after = [&](int index) { return p.tile_counter != nullptr ? take() + skipped : index + takers; };
  for (int index = is_ordered ? take() : blockIdx.x / cluster;; index = next_after(index)) {
    KeyWorkItem<Traits> item;
    const int tile_index = index * cluster + rank;
    item.is_valid = tile_index < num_work_tiles;
    if (!item.is_valid) {
      handle(item);
      return;
    }
    const auto work = decode_key_work_tile<Traits>(p, tile_index, num_works, has_long);
    if constexpr (Traits::kHasMask && !Traits::kSumsDbias) {
      if (p.has_group != nullptr && work.is_full_group) {
        if (work.head % p.heads_per_group != 0) continue;  // the first head's tile has it
        if (has_long) {
          skip_others(p, tile_index, p.all_heads);
        } else if (tile_index >= p.full_group_pairs * p.full_groups.rows) {
          skip_others(p, tile_index, p.single_heads);
        }
      }
    }
    const int members = work.is_full_group ? p.heads_per_group : 1;
#pragma unroll 1
    for (int member = 0; member < members; ++member) {
      item.is_first = member == 0;
      item.is_last = member == members - 1;
      item.is_full_group = work.is_full_group;
      item.batch = work.batch;
      if constexpr (Traits::kHasSequences) item.sequence = work.sequence;
      item.head = work.head + member;
      item.block_k = work.block_k;
      item.walk = QueryWalk<Traits>::of(p, item);
      if constexpr (Traits::kHasIntervals) {
        // Sums of a tile of dead keys alone are neither cleared nor read. All heads of the group leave it, so that none
        // waits for another's turn to add.
        if (p.key_order != nullptr && item.walk.steps == 0) {
          if (p.walk_tiles > 0) leave_head(p, tile_index);
          break;
        }
        if (p.walk_tiles > 0) {
          item.walk.keep_part(work.part, p.walk_tiles);
          if (item.walk.steps == 0) break;
        }
      }
      handle(item);
    }
  }
}

// Loads the operands of items, as one thread.
template <class Traits, class Storage>
struct OperandLoader {
  // So many steps before the last one of a work tile is loaded, the next tile is looked for. Earlier it would wait, while
  // another block may be idle.
  static constexpr int kStepsAhead = 2;

  const BackwardParams& p;
  Storage& shared;
  PipelineState<Traits::kStages> pipe;
  PipelineState<Traits::kKeyStages> pipe_keys;

  __device__ __forceinline__ void prefetch_maps() const {
    prefetch_tensor_map(&p.q);
    prefetch_tensor_map(&p.k);
    prefetch_tensor_map(&p.v);
    prefetch_tensor_map(&p.dout);
  }

  // Calls `want_next` when the next item should be looked for.
  template <class Want>
  __device__ __forceinline__ void load(const KeyWorkItem<Traits>& item, Want want_next) {
    constexpr int kBlockM = Traits::kBlockM;
    if (item.is_first) {
      const int stage = pipe_keys.stage, head_k = item.head / p.heads_per_group;
      const auto key = key_at(p, item, item.block_k * Traits::kBlockN);
      uint64_t* full = &shared.keys_full[stage];
      barrier_wait(&shared.keys_empty[stage], pipe_keys.phase ^ 1);
      tma_load_panels<Traits::kPanels, Traits::kBlockN>(shared.k[stage], &p.k, full, 0, key, head_k);
      tma_load_panels<Traits::kPanelsV, Traits::kBlockN>(shared.v[stage], &p.v, full, 0, key, head_k);
      pipe_keys.advance();
    }
    const int64_t rows = first_padded_row_of(p, item);
    const QueryWalk<Traits> walk = item.walk;  // a copy: a load is issued as soon as its stage is free
    if (walk.steps < kStepsAhead) want_next();
#pragma unroll 1
    for (int step = 0; step < walk.steps; ++step) {
      if (step == walk.steps - kStepsAhead) want_next();
      bool needs_mask;
      const int row = walk.at(step, needs_mask) * kBlockM;
      const auto at = query_at(p, item, row);
      uint64_t* full = &shared.q_full[pipe.stage];
      barrier_wait(&shared.q_empty[pipe.stage], pipe.phase ^ 1);
      tma_load_panels<Traits::kPanels, kBlockM>(shared.q[pipe.stage], &p.q, full, 0, at, item.head);
      bulk_load_floats(shared.lse[pipe.stage], p.lse + rows + row, kBlockM, full);
      full = &shared.dout_full[pipe.stage];
      barrier_wait(&shared.dout_empty[pipe.stage], pipe.phase ^ 1);
      tma_load_panels<Traits::kPanelsV, kBlockM>(shared.dout[pipe.stage], &p.dout, full, 0, at, item.head);
      bulk_load_floats(shared.delta[pipe.stage], p.delta + rows + row, kBlockM, full);
      pipe.advance();
    }
  }
};

// Hands items to the other warps, as one thread, which finds the next ones while the others work.
template <class Traits, class Storage>
__device__ __forceinline__ void schedule(const BackwardParams& p, Storage& shared) {
  PipelineState<kWorkStages> pipe_work;
  PipelineState<1> pipe_wanted;
  find_items<Traits>(p, shared, [&](const KeyWorkItem<Traits>& item) {
    hand_out(shared, pipe_work, item);
    if (!item.is_valid || !item.is_last || p.tile_counter == nullptr) return;
    barrier_wait(&shared.work_wanted, pipe_wanted.phase);
    pipe_wanted.advance();
  });
}

template <class Traits, class Storage>
__device__ __forceinline__ void load_operands(const BackwardParams& p, Storage& shared) {
  OperandLoader<Traits, Storage> loader{p, shared, {}, {}};
  PipelineState<kWorkStages> pipe_work;
  loader.prefetch_maps();
  if constexpr (kHasScheduler<Traits>) {
    for (;;) {
      const KeyWorkItem<Traits>& item = get_work_tile(shared, pipe_work);
      if (!item.is_valid) return;
      loader.load(item, [&] {
        if (item.is_last && p.tile_counter != nullptr) barrier_arrive(&shared.work_wanted);
      });
      barrier_arrive(&shared.work_empty[pipe_work.stage]);
      pipe_work.advance();
    }
  } else {
    find_items<Traits>(p, shared, [&](const KeyWorkItem<Traits>& item) {
      hand_out(shared, pipe_work, item);
      if (item.is_valid) loader.load(item, [] {});
    });
  }
}

// Loads the bias of each query block, as one warp.
template <class Traits, class Storage>
__device__ __forceinline__ void load_bias(const BackwardParams& p, Storage& shared) {
  constexpr int kColumns = Traits::kBiasColumns;
  constexpr int kPanels = Traits::kBlockN / Traits::kKeyTiles / kColumns;
  PipelineState<Traits::kBiasStages> pipe;
  PipelineState<kWorkStages> pipe_work;
  for (;;) {
    const KeyWorkItem<Traits>& item = get_work_tile(shared, pipe_work);
    if (!item.is_valid) return;
    const int head = item.head / p.bias_values.heads_per_bias;
#pragma unroll 1
    for (int step = 0; step < item.walk.steps; ++step) {
      bool needs_mask;
      const auto at = score_at(p, item, item.walk.at(step, needs_mask) * Traits::kBlockM, p.bias_values.has_batch);
#pragma unroll
      for (int tile = 0; tile < Traits::kKeyTiles; ++tile) {
        barrier_wait(&shared.bias_empty[pipe.stage], pipe.phase ^ 1);
        if (threadIdx.x % 32 == 0) {
          tma_load_panels<kPanels, Traits::kBlockM, false, kColumns>(
              shared.bias[pipe.stage], &p.bias, &shared.bias_full[pipe.stage],
              item.block_k * Traits::kBlockN + tile * kTile, at, head);
        }
        pipe.advance();
      }
    }
    release_work_tile(shared, pipe_work);
  }
}

// Writes the window of each query block, as one warp.
template <class Traits, class Storage>
__device__ __forceinline__ void write_windows(const BackwardParams& p, Storage& shared) {
  using Window = BiasWindow<Traits::kBlockN, Traits::kBlockM, true>;
  PipelineState<Traits::kBiasStages> pipe;
  PipelineState<kWorkStages> pipe_work;
  for (;;) {
    const KeyWorkItem<Traits>& item = get_work_tile(shared, pipe_work);
    if (!item.is_valid) return;
#pragma unroll 1
    for (int step = 0; step < item.walk.steps; ++step) {
      bool needs_mask;
      const int first_row = item.walk.at(step, needs_mask) * Traits::kBlockM;
      // A copy, to be loaded before the item: see first_place.
      const int first = Window::first_place(Distances(p.distances), first_row, item.block_k * Traits::kBlockN);
      barrier_wait(&shared.bias_empty[pipe.stage], pipe.phase ^ 1);
      float* to = reinterpret_cast<float*>(shared.bias[pipe.stage]);
      with_bias(p, item, [&](auto bias) { Window::write(to, p.distances, first, Window::kValues, bias); });
      barrier_arrive_of_warp(&shared.bias_full[pipe.stage]);
      pipe.advance();
    }
    release_work_tile(shared, pipe_work);
  }
}

// Stores dbias of each query block, as one warp: ds as the consumers leave it in shared memory, or dbias where it has
// overwritten the bias.
template <class Traits, class Storage>
__device__ __forceinline__ void store_dbias(const BackwardParams& p, Storage& shared) {
  constexpr int kColumns = Traits::kBiasColumns;
  PipelineState<Traits::kDsStages> pipe;
  PipelineState<Traits::kBiasStages> pipe_bias;
  PipelineState<kWorkStages> pipe_work;
  for (;;) {
    const KeyWorkItem<Traits>& item = get_work_tile(shared, pipe_work);
    if (!item.is_valid) return;
#pragma unroll 1
    for (int step = 0; step < item.walk.steps; ++step) {
      bool needs_mask;
      const auto at = score_at(p, item, item.walk.at(step, needs_mask) * Traits::kBlockM, true);
#pragma unroll
      for (int tile = 0; tile < Traits::kKeyTiles; ++tile) {
        barrier_wait(&shared.ds_full[pipe.stage], pipe.phase);
        if (threadIdx.x % 32 == 0) {
          const uint8_t* dbias = Traits::kReplacesBias ? shared.bias[pipe_bias.stage] : shared.ds[pipe.stage];
          const int key = item.block_k * Traits::kBlockN + tile * kTile;
#pragma unroll
          for (int panel = 0; panel < Traits::kBlockN / Traits::kKeyTiles / kColumns; ++panel) {
            tma_store_box(&p.dbias, dbias + panel * Traits::kBlockM * kRowBytes, key + panel * kColumns, at,
                          item.head);
          }
          tma_store_commit_and_wait_read();
        }
        barrier_arrive_of_warp(Traits::kReplacesBias ? &shared.bias_empty[pipe_bias.stage]
                                                     : &shared.ds_empty[pipe.stage]);
        pipe.advance();
        pipe_bias.advance();
      }
    }
    release_work_tile(shared, pipe_work);
  }
}

// A semaphore in device memory that orders additions: it is ready once `before` others have released it.
struct Semaphore {
  int* count;
  int before;

  // Called by a whole warp.
  __device__ __forceinline__ bool is_ready() const {
    return __any_sync(0xffffffffu, threadIdx.x % 32 == 0 && ld_acquire(count) == before);
  }
  __device__ __forceinline__ void release() const {
    if (threadIdx.x % 32 == 0) red_release(count, 1);
  }
};

template <class Traits>
__device__ __forceinline__ void let_add() {
  for (int group = 0; group < Traits::kConsumers; ++group) named_barrier_arrive(kMayAddBarrier + group, 128 + 32);
}

template <class Traits>
__device__ __forceinline__ void wait_until_added() {
  for (int group = 0; group < Traits::kConsumers; ++group) named_barrier_sync(kHasAddedBarrier + group, 128 + 32);
}

// The semaphore of a step of the work tile; after the last step, the semaphore of its head's additions to dk and dv.
template <class Traits>
__device__ __forceinline__ Semaphore semaphore_of(const BackwardParams& p, const KeyWorkItem<Traits>& item, int step) {
  const int64_t head = static_cast<int64_t>(item.batch) * p.num_heads + item.head;
  if (step == item.walk.steps) {
    return {p.dkv_semaphore + head / p.heads_per_group * p.blocks_k + item.block_k, item.head % p.heads_per_group};
  }
  bool needs_mask;
  const int block = item.walk.at(step, needs_mask);
  int64_t first_block = head * query_blocks<Traits>(p);
  if constexpr (Traits::kHasSequences) first_block = first_padded_tile_of(p, item) * (kTile / Traits::kBlockM);
  return {p.dq_semaphore + first_block + block, count_predecessors<Traits>(p, item, step, block)};
}

// Fixes the order of additions, as one warp: key blocks add to dq from the last keys to the first, then the heads of a
// group add to dk and dv, the first one first. All key blocks walk ascending queries, and behind a band later keys
// start at later queries, so blocks that run together reach a query block in that order. There is no deadlock: a tile
// only waits for later keys of its head and earlier heads of its keys, and those were scheduled before it.
//
// Releasing takes longer than adding, because it waits until all additions have arrived. So if the next semaphore is
// ready by then, the consumers are told first.
template <class Traits, class Storage>
__device__ __forceinline__ void order_sums(const BackwardParams& p, Storage& shared) {
  PipelineState<kWorkStages> pipe_work;
  for (;;) {
    const KeyWorkItem<Traits>& item = get_work_tile(shared, pipe_work);
    if (!item.is_valid) return;
    const int waits = item.walk.steps + (p.dkv_semaphore != nullptr ? 1 : 0);
    bool is_ready = false;
    Semaphore semaphore, next{};
    if (waits > 0) next = semaphore_of<Traits>(p, item, 0);
#pragma unroll 1
    for (int i = 0; i < waits; ++i) {
      semaphore = next;
      if (!is_ready) {
        while (!semaphore.is_ready()) {
        }
        let_add<Traits>();
      }
      is_ready = false;
      if (i + 1 < waits) {
        next = semaphore_of<Traits>(p, item, i + 1);
        is_ready = next.is_ready();
      }
      wait_until_added<Traits>();
      if (is_ready) let_add<Traits>();
      semaphore.release();
    }
    release_work_tile(shared, pipe_work);
  }
}

// Adds dq of each query block, which consumers have left in shared memory, to its sums, as one warp.
template <class Traits, class Storage>
__device__ __forceinline__ void add_turned_dq(const BackwardParams& p, Storage& shared) {
  PipelineState<1> pipe;
  PipelineState<kWorkStages> pipe_work;
  for (;;) {
    const KeyWorkItem<Traits>& item = get_work_tile(shared, pipe_work);
    if (!item.is_valid) return;
#pragma unroll 1
    for (int step = 0; step < item.walk.steps; ++step) {
      bool needs_mask;
      const int block = item.walk.at(step, needs_mask);
#pragma unroll 1
      for (int group = 0; group < Traits::kConsumers; ++group) {
        barrier_wait(&shared.dq_full[group], pipe.phase);
        if (threadIdx.x % 32 == 0) {
          bulk_add_floats(dq_sums_of(p, item, block, group), shared.dq[group], Traits::kDqBytes);
          tma_store_commit_and_wait_read();
        }
        barrier_arrive_of_warp(&shared.dq_empty[group]);
      }
      pipe.advance();
    }
    release_work_tile(shared, pipe_work);
  }
}

}  // namespace flash_dmattn
