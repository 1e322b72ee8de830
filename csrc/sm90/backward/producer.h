// The producer: one thread hands out work and has tensors copied; one warp has the bias copied, one stores dbias.
#pragma once

#include "../../device/pipeline.h"
#include "named_barriers.h"
#include "cluster.h"
#include "tile_scheduler.h"

namespace flash_dmattn {

template <class Traits, class Storage>
__device__ __forceinline__ void copy_operands(const BackwardParams& p, Storage& shared) {
  constexpr int kRows = Traits::kRows;
  prefetch_tensor_map(&p.q);
  prefetch_tensor_map(&p.k);
  prefetch_tensor_map(&p.v);
  prefetch_tensor_map(&p.dout);
  const int padded_rows = (p.seqlen_q + kTile - 1) / kTile * kTile;

  Ring<Traits::kStages> ring;
  Ring<2> ring_work;
  Ring<Traits::kKeyStages> ring_keys;
  // A cluster takes a work for each of its blocks at once.
  const int cluster = Traits::kSumsDbias ? p.cluster : 1, rank = Traits::kSumsDbias ? cluster_rank() : 0;
  const int takers = gridDim.x / cluster;
  [[maybe_unused]] uint32_t next_phase = 0;
  const auto take = [&] {
    if constexpr (Traits::kSumsDbias) {
      return next_of_cluster(p, shared, next_phase);
    } else {
      return atomicAdd(p.next, 1);
    }
  };
  // Where blocks of keys take turns every work comes from the counter, the first too: one that is waited for is then
  // held by a block that runs. Else the first is at hand.
  const bool takes_turns = p.dq_turns != nullptr;
  const int skipped = takes_turns ? 0 : takers;
  for (int index = takes_turns ? take() : blockIdx.x / cluster;;) {
    KeyItem<Traits> item;
    const int place = index * cluster + rank;
    item.exists = place < p.total;
    const KeyWork work = key_work_at(p, item.exists ? place : 0);
    const int members = item.exists && work.is_whole ? p.queries_per_group : 1;
    const int head_k = work.head / p.queries_per_group;
#pragma unroll 1
    for (int member = 0; member < members; ++member) {
      item.is_first = member == 0;
      item.is_last = member == members - 1;
      item.is_whole = work.is_whole;
      item.batch = work.batch;
      item.head = work.head + member;
      item.block_k = work.block_k;
      if (item.exists) item.walk = QueryWalk<Traits>::of(p, item);
      barrier_wait(&shared.work_empty[ring_work.stage], ring_work.phase ^ 1);
      shared.work[ring_work.stage] = item;
      barrier_arrive(&shared.work_full[ring_work.stage]);
      ring_work.advance();
      if (!item.exists) return;
      if (item.is_first) {
        const int stage = ring_keys.stage, key = work.block_k * Traits::kKeys;
        uint64_t* full = &shared.keys_full[stage];
        barrier_wait(&shared.keys_empty[stage], ring_keys.phase ^ 1);
        copy_panels<Traits::kPanels, Traits::kKeys>(shared.k[stage], &p.k, full, 0, key, head_k, work.batch);
        copy_panels<Traits::kPanelsV, Traits::kKeys>(shared.v[stage], &p.v, full, 0, key, head_k, work.batch);
        ring_keys.advance();
      }
      const int64_t rows = (static_cast<int64_t>(item.batch) * p.num_heads + item.head) * padded_rows;
#pragma unroll 1
      for (int step = 0; step < item.walk.steps; ++step) {
        bool has_edge;
        const int row = item.walk.at(step, has_edge) * kRows;
        uint64_t* full = &shared.q_full[ring.stage];
        barrier_wait(&shared.q_empty[ring.stage], ring.phase ^ 1);
        copy_panels<Traits::kPanels, kRows>(shared.q[ring.stage], &p.q, full, 0, row, item.head, item.batch);
        copy_floats(shared.lse[ring.stage], p.lse + rows + row, kRows, full);
        full = &shared.dout_full[ring.stage];
        barrier_wait(&shared.dout_empty[ring.stage], ring.phase ^ 1);
        copy_panels<Traits::kPanelsV, kRows>(shared.dout[ring.stage], &p.dout, full, 0, row, item.head, item.batch);
        copy_floats(shared.delta[ring.stage], p.delta + rows + row, kRows, full);
        ring.advance();
      }
    }
    index = p.next != nullptr ? take() + skipped : index + takers;
  }
}

// The bias of each block of queries, by one warp.
template <class Traits, class Storage>
__device__ __forceinline__ void copy_bias(const BackwardParams& p, Storage& shared) {
  constexpr int kPanels = Traits::kKeys / Traits::kKeyTiles / kPanelColumns;
  Ring<Traits::kBiasStages> ring;
  Ring<2> ring_work;
  for (;;) {
    const KeyItem<Traits>& item = take_work(shared, ring_work);
    if (!item.exists) return;
    const int head = item.head / p.heads_per_bias, batch = p.bias_has_batch ? item.batch : 0;
#pragma unroll 1
    for (int step = 0; step < item.walk.steps; ++step) {
      bool has_edge;
      const int row = item.walk.at(step, has_edge) * Traits::kRows;
#pragma unroll
      for (int tile = 0; tile < Traits::kKeyTiles; ++tile) {
        barrier_wait(&shared.bias_empty[ring.stage], ring.phase ^ 1);
        if (threadIdx.x % 32 == 0) {
          copy_panels<kPanels, Traits::kRows>(shared.bias[ring.stage], &p.bias, &shared.bias_full[ring.stage],
                                              item.block_k * Traits::kKeys + tile * kTile, row, head, batch);
        }
        ring.advance();
      }
    }
    give_back_work(shared, ring_work);
  }
}

// dbias of each block of queries, by one warp, as the consumers leave ds in shared memory, or with it, in place of the
// bias.
template <class Traits, class Storage>
__device__ __forceinline__ void store_dbias(const BackwardParams& p, Storage& shared) {
  Ring<Traits::kDsStages> ring;
  Ring<Traits::kBiasStages> ring_bias;
  Ring<2> ring_work;
  for (;;) {
    const KeyItem<Traits>& item = take_work(shared, ring_work);
    if (!item.exists) return;
#pragma unroll 1
    for (int step = 0; step < item.walk.steps; ++step) {
      bool has_edge;
      const int row = item.walk.at(step, has_edge) * Traits::kRows;
#pragma unroll
      for (int tile = 0; tile < Traits::kKeyTiles; ++tile) {
        barrier_wait(&shared.ds_full[ring.stage], ring.phase);
        if (threadIdx.x % 32 == 0) {
          const uint8_t* dbias = Traits::kReplacesBias ? shared.bias[ring_bias.stage] : shared.ds[ring.stage];
          const int key = item.block_k * Traits::kKeys + tile * kTile;
#pragma unroll
          for (int panel = 0; panel < Traits::kKeys / Traits::kKeyTiles / kPanelColumns; ++panel) {
            store_tensor(&p.dbias, dbias + panel * Traits::kRows * kRowBytes, key + panel * kPanelColumns, row,
                         item.head, item.batch);
          }
          wait_for_stores_to_read();
        }
        barrier_arrive_of_warp(Traits::kReplacesBias ? &shared.bias_empty[ring_bias.stage]
                                                     : &shared.ds_empty[ring.stage]);
        ring.advance();
        ring_bias.advance();
      }
    }
    give_back_work(shared, ring_work);
  }
}

// A place in an order of additions, in device memory: whose turn it is once so many others have added.
struct Turn {
  int* count;
  int before;

  // By a whole warp.
  __device__ __forceinline__ bool has_come() const {
    return __any_sync(0xffffffffu, threadIdx.x % 32 == 0 && load_acquired(count) == before);
  }
  __device__ __forceinline__ void pass() const {
    if (threadIdx.x % 32 == 0) add_released(count, 1);
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

// The turn of a step of the work; of the step behind the last, that of its head to add to dk and dv.
template <class Traits>
__device__ __forceinline__ Turn turn_of(const BackwardParams& p, const KeyItem<Traits>& item, int step) {
  const int64_t head = static_cast<int64_t>(item.batch) * p.num_heads + item.head;
  if (step == item.walk.steps) {
    return {p.key_turns + head / p.queries_per_group * p.blocks_k + item.block_k, item.head % p.queries_per_group};
  }
  const int blocks = (p.seqlen_q + kTile - 1) / kTile * (kTile / Traits::kRows);
  bool has_edge;
  const int block = item.walk.at(step, has_edge);
  return {p.dq_turns + head * blocks + block, blocks_before<Traits>(p, item, step, block)};
}

// Has the blocks of keys add to dq in a fixed order, the last keys first, by one warp, and then the heads of a group to
// dk and dv, the first first. They walk ascending queries, and of a band those of the last keys start at the last
// queries: those that run at the same time come to a block of queries in their order. A work waits for later keys of
// its head and for earlier heads of its keys, which were handed out before it, so there is always one that waits for
// none.
//
// To tell others takes longer than to add, for it waits until all additions have arrived: where the next turn has come
// by then, the consumers learn of that first.
template <class Traits, class Storage>
__device__ __forceinline__ void order_sums(const BackwardParams& p, Storage& shared) {
  Ring<2> ring_work;
  for (;;) {
    const KeyItem<Traits>& item = take_work(shared, ring_work);
    if (!item.exists) return;
    const int turns = item.walk.steps + (p.key_turns != nullptr ? 1 : 0);
    bool has_come = false;
    Turn turn, next{};
    if (turns > 0) next = turn_of<Traits>(p, item, 0);
#pragma unroll 1
    for (int i = 0; i < turns; ++i) {
      turn = next;
      if (!has_come) {
        while (!turn.has_come()) {
        }
        let_add<Traits>();
      }
      has_come = false;
      if (i + 1 < turns) {
        next = turn_of<Traits>(p, item, i + 1);
        has_come = next.has_come();
      }
      wait_until_added<Traits>();
      if (has_come) let_add<Traits>();
      turn.pass();
    }
    give_back_work(shared, ring_work);
  }
}

}  // namespace flash_dmattn
