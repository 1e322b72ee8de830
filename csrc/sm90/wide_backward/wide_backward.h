// The backward kernel for head dims above 128, persistent: a producer warpgroup and two consumers share blocks of 64
// keys until there is none. What it computes stands in ../backward/backward.h.
//
// What bounds it at D256, of a block of 64 keys and 64 queries, 10.5 MFLOP and 2560 clocks of the tensor cores:
// operands of its products are 2048 clocks of shared memory, copies into it 512, p and ds 128, additions to dq up to
// 512 more, if they pass there; through L2 come 64 KB of q and dout, and 64 KB of additions to dq, 80 FLOP a byte,
// half of what the kernel of 128 keys has at D128.
#pragma once

#include "../backward/producer.h"
#include "../persistent.h"
#include "consumer.h"
#include "storage.h"

namespace flash_dmattn {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    wide_backward_kernel(const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<WideBackwardStorage<Traits>*>(memory);
  constexpr int kOfOne = 4 * kArrivalsOfWarp, kOfBoth = 2 * kOfOne;  // arrivals of all warps of a consumer
  const bool takes_turns = p.dq_turns != nullptr;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Traits::kKeyStages; ++stage) {
      barrier_init(&shared.keys_full[stage], 2);  // k and v
      barrier_init(&shared.keys_empty[stage], kOfBoth);
    }
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      barrier_init(&shared.q_full[stage], 2);  // q and lse
      barrier_init(&shared.q_empty[stage], kOfBoth);
      barrier_init(&shared.dout_full[stage], 2);  // dout and delta
      barrier_init(&shared.dout_empty[stage], kOfBoth);
    }
    for (int stage = 0; stage < Traits::kScoreStages; ++stage) {
      barrier_init(&shared.ds_full[stage], kOfOne);
      barrier_init(&shared.ds_empty[stage], kOfBoth + kArrivalsOfWarp * Traits::kStoresDbias);
      barrier_init(&shared.bias_full[stage], 1);
      barrier_init(&shared.bias_empty[stage], kOfOne);  // of the one that multiplies p, which lies there
    }
    for (int stage = 0; stage < 2; ++stage) {
      barrier_init(&shared.work_full[stage], 1);
      barrier_init(&shared.work_empty[stage],
                   kOfBoth + kArrivalsOfWarp * (Traits::kHasBiasTiles + Traits::kStoresDbias + takes_turns));
    }
    barrier_init_fence();
  }
  wait_for_kernel_before();
  if (p.dq_sums != nullptr) let_next_kernel_start();  // the kernel of the sums
  __syncthreads();

  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // the same for all, and known to be
  if (warpgroup == 0) {
    registers_release<Traits::kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp == 0) {
      if (threadIdx.x == 0) copy_operands<Traits>(p, shared);
    } else if (Traits::kHasBiasTiles && warp == 1) {
      copy_bias<Traits>(p, shared);
    } else if (Traits::kStoresDbias && warp == 2) {
      store_dbias<Traits>(p, shared);
    } else if (warp == 3 && takes_turns) {
      order_sums<Traits>(p, shared);
    }
  } else {
    registers_acquire<Traits::kConsumerRegisters>();
    if (warpgroup == 1) {
      consume_wide_backward<0>(p, shared);
    } else {
      consume_wide_backward<1>(p, shared);
    }
  }
}

template <class Traits>
cudaError_t launch_wide_backward_kernel(const BackwardParams& params, int blocks, cudaStream_t stream) {
  return launch_persistent<Traits, WideBackwardStorage<Traits>>(wide_backward_kernel<Traits>, params, blocks, stream);
}

}  // namespace flash_dmattn
