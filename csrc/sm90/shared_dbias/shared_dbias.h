// dbias of a bias per query and key that several attention heads share: persistent and warp-specialised, a producer
// warp and two consumer warpgroups, one tile of dbias at a time.
//
//     p = exp2(scale log2(e) q k^T + bias log2(e) - lse),  dp = dout v^T,  dbias = the sum over heads of p (dp - delta)
//
// With a softcap softcap tanh(scale q k^T / softcap) replaces scale q k^T; dbias does not include the slope of tanh.
//
// A tile stays in registers, in fp32, while the heads that share it are visited. If dbias has few tiles, several blocks
// share the heads of one tile. Each leaves the sums of its chunk in a slot, and the kernel of add_chunks.cu adds the
// slots in their order. So dbias is rounded once, is always the same, and needs no atomics. The price: two products for
// each head are computed a second time.
#pragma once

#include "../persistent.h"
#include "consumer.h"
#include "launch.h"
#include "producer.h"
#include "storage.h"

namespace flash_dmattn {

template <class T>
struct SharedDbiasRoles : KernelRoles {
  using Traits = T;
  using Storage = SharedDbiasStorage<Traits>;

  __device__ __forceinline__ static void init(const SharedDbiasParams&, Storage& shared) {
    constexpr int kConsumerWarps = 4 * Traits::kConsumers * kArrivalsOfWarp;
    init_barriers(shared.slot_full, 3);  // two operands and row_stats
    init_barriers(shared.slot_empty, kConsumerWarps);
    init_barriers(shared.bias_full, 1);
    init_barriers(shared.bias_empty, kConsumerWarps);
    init_barriers(shared.work_full, 1);
    init_barriers(shared.work_empty, kConsumerWarps);
  }

  __device__ __forceinline__ static void produce(const SharedDbiasParams& p, Storage& shared, int /*warp*/) {
    if (threadIdx.x < 32) load_heads<Traits>(p, shared);
  }

  __device__ __forceinline__ static void consume(const SharedDbiasParams& p, Storage& shared, int group) {
    sum_heads<Traits>(p, shared, group);
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    shared_dbias_kernel(const __grid_constant__ SharedDbiasParams p) {
  run_roles<SharedDbiasRoles<Traits>>(p);
}

template <class Traits>
cudaError_t launch_shared_dbias_kernel(const SharedDbiasParams& params, int blocks, cudaStream_t stream) {
  return launch_persistent<SharedDbiasRoles<Traits>>(shared_dbias_kernel<Traits>, params, blocks, stream);
}

}  // namespace flash_dmattn
