// Stages of shared memory that copies fill while others are read.
#pragma once

#include "ptx.h"
#include "wgmma.h"

namespace flash_dmattn {

// The place in a ring of stages.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// The next piece of work, for a whole warp, to be read until the warp gives it back.
template <class Storage>
__device__ __forceinline__ const auto& take_work(Storage& shared, const Ring<2>& ring) {
  barrier_wait(&shared.work_full[ring.stage], ring.phase);
  return shared.work[ring.stage];
}

template <class Storage>
__device__ __forceinline__ void give_back_work(Storage& shared, Ring<2>& ring) {
  barrier_arrive_of_warp(&shared.work_empty[ring.stage]);
  ring.advance();
}

// Turns of two consumers: one issues its products while the other is at its scores. Each has a named barrier, this one
// or the next, which the other fills.
constexpr int kTurnBarrier = 1;  // 0 is __syncthreads

struct Turns {
  const int group;  // which of them

  __device__ __forceinline__ void wait() const { named_barrier_sync(kTurnBarrier + group, 2 * 128); }
  __device__ __forceinline__ void pass() const { named_barrier_arrive(kTurnBarrier + (group ^ 1), 2 * 128); }

  // The first consumer has the first turn: its barrier is filled by the other.
  __device__ __forceinline__ void start() const {
    if (group == 1) named_barrier_arrive(kTurnBarrier, 2 * 128);
  }
  // Nobody leaves with an arrival of the other outstanding: the last turn passed is taken by the first.
  __device__ __forceinline__ void end() const {
    if (group == 0) named_barrier_sync(kTurnBarrier, 2 * 128);
  }
};

// One panel of 64 columns after another, `kRows` rows each; one arrival at the barrier, with their bytes. What is read
// once L2 need not keep.
template <int kPanels, int kRows, bool kOnce = false>
__device__ __forceinline__ void copy_panels(uint8_t* to, const CUtensorMap* map, uint64_t* full, int first_column,
                                            int row, int head, int batch) {
  barrier_arrive_expect(full, kPanels * kRows * kRowBytes);
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    uint8_t* const start = to + panel * kRows * kRowBytes;
    const int column = first_column + panel * kPanelColumns;
    if constexpr (kOnce) {
      copy_tensor_once(start, map, full, column, row, head, batch);
    } else {
      copy_tensor(start, map, full, column, row, head, batch);
    }
  }
}

// A vector of `count` floats; one arrival at the barrier, with its bytes.
__device__ __forceinline__ void copy_floats(float* to, const float* from, int count, uint64_t* full) {
  barrier_arrive_expect(full, count * 4);
  copy_bytes(to, from, count * 4, full);
}

}  // namespace flash_dmattn
