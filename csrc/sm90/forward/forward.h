// The forward kernel: persistent and warp-specialised, a producer warpgroup and two to four consumer warpgroups.
//
//     out = softmax(scale * f(q k^T) + bias) v over the keys allowed, lse = log of the softmax's denominator
//
// Sources: FlashAttention (arXiv:2205.14135) for the online softmax; FlashAttention-3 (arXiv:2407.08608), sections 3.1
// and 3.2, for overlapping products and softmax.
#pragma once

#include "../persistent.h"
#include "consumer.h"
#include "launch.h"
#include "producer.h"
#include "storage.h"

namespace flash_dmattn {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) forward_kernel(const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<ForwardStorage<Traits>*>(memory);
  constexpr int kArrivals = 4 * Traits::kConsumers * kArrivalsOfWarp;  // all consumer warps
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Traits::kQueryStages; ++stage) {
      barrier_init(&shared.q_full[stage], 1);
      barrier_init(&shared.q_empty[stage], kArrivals);
    }
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      barrier_init(&shared.k_full[stage], 1);
      barrier_init(&shared.k_empty[stage], kArrivals);
      barrier_init(&shared.v_full[stage], 1);
      barrier_init(&shared.v_empty[stage], kArrivals);
    }
    for (int stage = 0; stage < Traits::kBiasStages; ++stage) {
      barrier_init(&shared.bias_full[stage], Traits::kBias == Bias::kVector ? kArrivalsOfWarp : 1);
      barrier_init(&shared.bias_empty[stage], kArrivals);
    }
    for (int stage = 0; stage < kWorkStages; ++stage) {
      barrier_init(&shared.work_full[stage], 1);
      constexpr int kWarps = Traits::kProducesBias + Traits::kHasPages;  // of the producer, that read work tiles
      barrier_init(&shared.work_empty[stage], kArrivals + kArrivalsOfWarp * kWarps + 1);  // and load_tiles
    }
    barrier_init(&shared.work_wanted, 1);
    fence_barrier_init();
  }
  griddep_wait();
  __syncthreads();

  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // uniform, and the compiler can tell
  if (warpgroup == 0) {
    setmaxnreg_dec<Traits::kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp == 0) {
      if (threadIdx.x == 0) load_tiles<Traits>(p, shared);
    } else if (Traits::kProducesBias && warp == 1) {
      produce_bias<Traits>(p, shared);
    } else if (Traits::kHasPages && warp == 2) {
      if constexpr (Traits::kHasPages) load_pages<Traits>(p, shared);
    } else if (warp == 3) {
      if (threadIdx.x % 32 == 0) schedule<Traits>(p, shared);
    }
  } else {
    setmaxnreg_inc<Traits::kConsumerRegisters>();
    consume<Traits>(p, shared, warpgroup - 1);
  }
}

template <class Traits>
cudaError_t launch_forward_kernel(const ForwardParams& params, int blocks, cudaStream_t stream) {
  return launch_persistent<Traits, ForwardStorage<Traits>>(forward_kernel<Traits>, params, blocks, stream);
}

}  // namespace flash_dmattn
