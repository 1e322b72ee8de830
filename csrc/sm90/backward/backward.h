// The backward kernel: persistent and warp-specialised, a producer warpgroup and two consumer warpgroups.
//
//     p = exp2(scale log2(e) q k^T + bias log2(e) - lse),  dp = dout v^T,  ds = p (dp - delta)
//     dv = p^T dout,  dk = scale ds^T q,  dq = scale ds k,  dbias = ds
//
// With a softcap, t = tanh(scale q k^T / softcap):
//
//     p = exp2(softcap log2(e) t + bias log2(e) - lse),  dk = scale (ds (1 - t^2))^T q,  dq = scale ds (1 - t^2) k
//
// If batch entries share a bias, each block of a cluster takes one entry, and together they sum dbias (cluster.h).
//
// Source: FlashAttention-2 (arXiv:2307.08691), section 3.1.2.
#pragma once

#include "consumer.h"
#include "launch.h"
#include "roles.h"
#include "storage.h"

namespace flash_dmattn {

template <class Traits>
struct BackwardKernelRoles : BackwardRoles<Traits, BackwardStorage<Traits>> {
  __device__ __forceinline__ static void consume(const BackwardParams& p, BackwardStorage<Traits>& shared, int group) {
    consume_backward<Traits>(p, shared, group);
  }

  __device__ __forceinline__ static void assist(const BackwardParams& p, BackwardStorage<Traits>& shared) {
    setmaxnreg_dec<Traits::kSumRegisters>();
    sum_dbias<Traits>(p, shared);
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) backward_kernel(const __grid_constant__ BackwardParams p) {
  run_roles<BackwardKernelRoles<Traits>>(p);
}

template <class Traits>
cudaError_t launch_backward_kernel(const BackwardParams& params, int blocks, cudaStream_t stream) {
  return launch_persistent<BackwardKernelRoles<Traits>>(backward_kernel<Traits>, params, blocks, stream, params.cluster);
}

}  // namespace flash_dmattn
