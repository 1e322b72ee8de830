// The backward kernel for head dims above 128: persistent and warp-specialised, a producer warpgroup and two consumer
// warpgroups, with work tiles of 64 keys. ../backward/backward.h has the formulas; docs/notes/cuda_bounds.md has
// what bounds the kernel, "Head dims above 128".
#pragma once

#include "../backward/roles.h"
#include "consumer.h"
#include "storage.h"

namespace flash_dmattn {

template <class Traits>
struct WideBackwardRoles : BackwardRoles<Traits, WideBackwardStorage<Traits>> {
  __device__ __forceinline__ static void consume(const BackwardParams& p, WideBackwardStorage<Traits>& shared,
                                                 int group) {
    if (group == 0) {
      consume_wide_backward<0>(p, shared);
    } else {
      consume_wide_backward<1>(p, shared);
    }
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) wide_backward_kernel(const __grid_constant__ BackwardParams p) {
  run_roles<WideBackwardRoles<Traits>>(p);
}

template <class Traits>
cudaError_t launch_wide_backward_kernel(const BackwardParams& params, int blocks, cudaStream_t stream) {
  return launch_persistent<WideBackwardRoles<Traits>>(wide_backward_kernel<Traits>, params, blocks, stream);
}

}  // namespace flash_dmattn
