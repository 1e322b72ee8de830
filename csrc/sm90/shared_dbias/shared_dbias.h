// The gradient of a bias per query and key that several heads of attention share, persistent: a producer warpgroup and
// two consumers share tiles of dbias until there is none.
//
//     p = exp2(scale log2(e) q k^T + bias log2(e) - lse),  dp = dout v^T,  dbias = the sum over heads of p (dp - delta)
//
// where scale q k^T becomes softcap tanh(scale q k^T / softcap) with a softcap, whose slope dbias does not have.
//
// A tile stays in registers, in fp32, while the heads that share it come one after the other: dbias is written once,
// always the same, and nothing is added in device memory. What that costs are two products for each head, again.
#pragma once

#include "../persistent.h"
#include "consumer.h"
#include "launch.h"
#include "producer.h"
#include "storage.h"

namespace flash_dmattn {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    shared_dbias_kernel(const __grid_constant__ SharedDbiasParams p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<SharedDbiasStorage<Traits>*>(memory);
  constexpr int kArrivals = 4 * Traits::kConsumers * kArrivalsOfWarp;  // of all warps that consume
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < Traits::kSlots; ++slot) {
      barrier_init(&shared.slot_full[slot], 3);  // rows, keys and a number of each row
      barrier_init(&shared.slot_empty[slot], kArrivals);
    }
    for (int stage = 0; stage < Traits::kBiasStages; ++stage) {
      barrier_init(&shared.bias_full[stage], 1);
      barrier_init(&shared.bias_empty[stage], kArrivals);
    }
    for (int stage = 0; stage < 2; ++stage) {
      barrier_init(&shared.work_full[stage], 1);
      barrier_init(&shared.work_empty[stage], kArrivals);
    }
    barrier_init_fence();
  }
  wait_for_kernel_before();
  __syncthreads();

  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // the same for all, and known to be
  if (warpgroup == 0) {
    registers_release<Traits::kProducerRegisters>();
    if (threadIdx.x < 32) copy_heads<Traits>(p, shared);
  } else {
    registers_acquire<Traits::kConsumerRegisters>();
    sum_heads<Traits>(p, shared, warpgroup - 1);
  }
}

template <class Traits>
cudaError_t launch_shared_dbias_kernel(const SharedDbiasParams& params, int blocks, cudaStream_t stream) {
  return launch_persistent<Traits, SharedDbiasStorage<Traits>>(shared_dbias_kernel<Traits>, params, blocks, stream);
}

}  // namespace flash_dmattn
