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

template <class T>
struct ForwardRoles : KernelRoles {
  using Traits = T;
  using Storage = ForwardStorage<Traits>;

  __device__ __forceinline__ static void init(const ForwardParams&, Storage& shared) {
    constexpr int kConsumerWarps = 4 * Traits::kConsumers * kArrivalsOfWarp;
    constexpr int kProducerWarps = (Traits::kProducesBias + Traits::kHasPages) * kArrivalsOfWarp;  // beside load_tiles
    init_barriers(shared.q_full, 1);
    init_barriers(shared.q_empty, kConsumerWarps);
    init_barriers(shared.k_full, 1);
    init_barriers(shared.k_empty, kConsumerWarps);
    init_barriers(shared.v_full, 1);
    init_barriers(shared.v_empty, kConsumerWarps);
    init_barriers(shared.bias_full, Traits::kWarpWritesBias ? kArrivalsOfWarp : 1);
    init_barriers(shared.bias_empty, kConsumerWarps);
    init_barriers(shared.work_full, 1);
    init_barriers(shared.work_empty, kConsumerWarps + kProducerWarps + 1);
    barrier_init(&shared.work_wanted, 1);
  }

  __device__ __forceinline__ static void produce(const ForwardParams& p, Storage& shared, int warp) {
    if (warp == 0) {
      if (threadIdx.x == 0) load_tiles<Traits>(p, shared);
    } else if (Traits::kProducesBias && warp == 1) {
      produce_bias<Traits>(p, shared);
    } else if (Traits::kHasPages && warp == 2) {
      if constexpr (Traits::kHasPages) load_pages<Traits>(p, shared);
    } else if (warp == 3) {
      if (threadIdx.x % 32 == 0) schedule<Traits>(p, shared);
    }
  }

  __device__ __forceinline__ static void consume(const ForwardParams& p, Storage& shared, int group) {
    consume_forward<Traits>(p, shared, group);
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) forward_kernel(const __grid_constant__ ForwardParams p) {
  run_roles<ForwardRoles<Traits>>(p);
}

template <class Traits>
cudaError_t launch_forward_kernel(const ForwardParams& params, int blocks, cudaStream_t stream) {
  return launch_persistent<ForwardRoles<Traits>>(forward_kernel<Traits>, params, blocks, stream);
}

}  // namespace flash_dmattn
