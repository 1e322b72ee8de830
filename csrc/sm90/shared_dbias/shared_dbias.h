// dbias of a bias per query and key that several attention heads share: persistent and warp-specialised, a producer
// warp and two consumer warpgroups, one tile of dbias at a time.
//
//     p = exp2(scale log2(e) q k^T + bias log2(e) - lse),  dp = dout v^T,  dbias = the sum over heads of p (dp - delta)
//
// With a softcap softcap tanh(scale q k^T / softcap) replaces scale q k^T; dbias does not include the slope of tanh.
//
// A tile stays in registers, in fp32, while the heads that share it are visited. If dbias has few tiles, several blocks
// share the heads of one: each leaves the sums of its chunk in a slot, and the kernel of add_chunks.cu adds the slots in
// their order. So dbias is rounded once, is always the same, and needs no atomics. The price: two products for each head
// are computed a second time.
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
  constexpr int kArrivals = 4 * Traits::kConsumers * kArrivalsOfWarp;  // all consumer warps
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < Traits::kSlots; ++slot) {
      barrier_init(&shared.slot_full[slot], 3);  // two operands and row_stats
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
    fence_barrier_init();
  }
  griddep_wait();
  __syncthreads();

  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // uniform, and the compiler can tell
  if (warpgroup == 0) {
    setmaxnreg_dec<Traits::kProducerRegisters>();
    if (threadIdx.x < 32) load_heads<Traits>(p, shared);
  } else {
    setmaxnreg_inc<Traits::kConsumerRegisters>();
    sum_heads<Traits>(p, shared, warpgroup - 1);
  }
}

template <class Traits>
cudaError_t launch_shared_dbias_kernel(const SharedDbiasParams& params, int blocks, cudaStream_t stream) {
  return launch_persistent<Traits, SharedDbiasStorage<Traits>>(shared_dbias_kernel<Traits>, params, blocks, stream);
}

}  // namespace flash_dmattn
