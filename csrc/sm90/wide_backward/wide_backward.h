// The backward kernel for head dims above 128: persistent and warp-specialised, a producer warpgroup and two consumer
// warpgroups, with work tiles of 64 keys. The formulas are those of ../backward/backward.h; what bounds it is in
// docs/notes/cuda_bounds.md, "Head dims above 128".
#pragma once

#include "../backward/producer.h"
#include "../persistent.h"
#include "consumer.h"
#include "storage.h"

namespace flash_dmattn {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) wide_backward_kernel(const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<WideBackwardStorage<Traits>*>(memory);
  constexpr int kOfOne = 4 * kArrivalsOfWarp, kOfBoth = 2 * kOfOne;  // arrivals of one consumer's warps, of both
  const bool is_ordered = p.dq_semaphore != nullptr;
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
      barrier_init(&shared.bias_empty[stage], kOfOne);  // of the consumer that multiplies p, which overwrites the bias
    }
    for (int stage = 0; stage < 2; ++stage) {
      barrier_init(&shared.work_full[stage], 1);
      barrier_init(&shared.work_empty[stage],
                   kOfBoth + kArrivalsOfWarp * (Traits::kHasBiasTiles + Traits::kStoresDbias + is_ordered));
    }
    fence_barrier_init();
  }
  griddep_wait();
  if (p.dq_sums != nullptr) griddep_launch_dependents();  // the kernel of the sums
  __syncthreads();

  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // uniform, and the compiler can tell
  if (warpgroup == 0) {
    setmaxnreg_dec<Traits::kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp == 0) {
      if (threadIdx.x == 0) load_operands<Traits>(p, shared);
    } else if (Traits::kHasBiasTiles && warp == 1) {
      load_bias<Traits>(p, shared);
    } else if (Traits::kStoresDbias && warp == 2) {
      store_dbias<Traits>(p, shared);
    } else if (warp == 3 && is_ordered) {
      order_sums<Traits>(p, shared);
    }
  } else {
    setmaxnreg_inc<Traits::kConsumerRegisters>();
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
