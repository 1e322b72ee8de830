// Pipelines: stages of shared memory that one warp fills while others read; and the ping-pong barrier.
#pragma once

#include <type_traits>

#include "ptx.h"
#include "wgmma.h"

namespace flash_dmattn {

// A position in a circular buffer of stages, with the phase of its barriers (CUTLASS's PipelineState).
template <int kStages>
struct PipelineState {
  int stage = 0;
  uint32_t phase = 0;

  // stages: how many there are, if some are not used.
  __device__ __forceinline__ void advance(int stages = kStages) {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Work tiles that the producer may have handed out while others still read the first of them.
constexpr int kWorkStages = 3;

// Hands a work tile to the other warps, as one thread.
template <class Storage, int kStages, class Item>
__device__ __forceinline__ void hand_out(Storage& shared, PipelineState<kStages>& pipe, const Item& item) {
  barrier_wait(&shared.work_empty[pipe.stage], pipe.phase ^ 1);
  shared.work[pipe.stage] = item;
  barrier_arrive(&shared.work_full[pipe.stage]);
  pipe.advance();
}

// Waits for the next work tile, as a whole warp. It may be read until release_work_tile.
template <class Storage, int kStages>
__device__ __forceinline__ const auto& get_work_tile(Storage& shared, const PipelineState<kStages>& pipe) {
  barrier_wait(&shared.work_full[pipe.stage], pipe.phase);
  return shared.work[pipe.stage];
}

template <class Storage, int kStages>
__device__ __forceinline__ void release_work_tile(Storage& shared, PipelineState<kStages>& pipe) {
  barrier_arrive_of_warp(&shared.work_empty[pipe.stage]);
  pipe.advance();
}

// Ping-pong scheduling of two consumers: one issues its matrix products while the other does its softmax. Each waits on
// a named barrier of its own, which the other fills.
constexpr int kPingPongBarrier = 1;  // 0 is __syncthreads

struct PingPong {
  const int group;  // the number of the consumer, 0 or 1

  __device__ __forceinline__ void wait() const { named_barrier_sync(kPingPongBarrier + group, 2 * 128); }
  __device__ __forceinline__ void pass() const { named_barrier_arrive(kPingPongBarrier + (group ^ 1), 2 * 128); }

  // The first consumer goes first: the second fills its barrier.
  __device__ __forceinline__ void start() const {
    if (group == 1) named_barrier_arrive(kPingPongBarrier, 2 * 128);
  }
  // No consumer may exit while an arrival is outstanding: the first takes the last one.
  __device__ __forceinline__ void end() const {
    if (group == 0) named_barrier_sync(kPingPongBarrier, 2 * 128);
  }
};

// Coordinates of rows in a descriptor whose dims are columns, rows, heads and entries.
struct RowAt {
  int row, entry;
};

// The same in a descriptor of rank 5, ragged or with a dim of size 1 between heads and entries (api/tensor_map.h).
struct RaggedRowAt {
  int row, shift, entry;
};

__device__ __forceinline__ void tma_load_box(uint8_t* to, const CUtensorMap* map, uint64_t* full, int column,
                                             const RowAt& at, int head) {
  tma_load_4d(to, map, full, column, at.row, head, at.entry);
}
__device__ __forceinline__ void tma_load_box(uint8_t* to, const CUtensorMap* map, uint64_t* full, int column,
                                             const RaggedRowAt& at, int head) {
  tma_load_5d(to, map, full, column, at.row, head, at.shift, at.entry);
}

__device__ __forceinline__ void tma_store_box(const CUtensorMap* map, const uint8_t* from, int column, const RowAt& at,
                                              int head) {
  tma_store_4d(map, from, column, at.row, head, at.entry);
}
__device__ __forceinline__ void tma_store_box(const CUtensorMap* map, const uint8_t* from, int column,
                                              const RaggedRowAt& at, int head) {
  tma_store_5d(map, from, column, at.row, head, at.shift, at.entry);
}

// Loads kPanels panels of kColumns columns and `kRows` rows, with one arrival at the barrier. With kOnce the data is read
// once, so L2 need not keep it.
template <int kPanels, int kRows, bool kOnce = false, int kColumns = kPanelColumns, class At>
__device__ __forceinline__ void tma_load_panels(uint8_t* to, const CUtensorMap* map, uint64_t* full, int first_column,
                                                const At& at, int head) {
  barrier_arrive_expect_tx(full, kPanels * kRows * kRowBytes);
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    uint8_t* const start = to + panel * kRows * kRowBytes;
    const int column = first_column + panel * kColumns;
    if constexpr (kOnce && std::is_same_v<At, RowAt>) {
      tma_load_4d_evict_first(start, map, full, column, at.row, head, at.entry);
    } else {
      tma_load_box(start, map, full, column, at, head);
    }
  }
}

// Loads `count` floats, with one arrival at the barrier.
__device__ __forceinline__ void bulk_load_floats(float* to, const float* from, int count, uint64_t* full) {
  barrier_arrive_expect_tx(full, count * 4);
  bulk_load(to, from, count * 4, full);
}

}  // namespace flash_dmattn
