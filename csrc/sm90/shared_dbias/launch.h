// The launch of the kernel of a shared bias' gradient, for those who do not compile it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "../../params.h"

namespace flash_dmattn {

// The tiles of dbias that the blocks of a cluster work at: so many along the queries, and along the keys.
struct Patch {
  int q, k;
};

// Blocks with the same queries copy a part of them each, for all of them, and so do those with the same keys: L2 bounds
// the kernel, and four blocks read half as much of it as alone. But they walk the same heads, those that any of them
// needs, which is no help where a mask leaves other tiles out of each head.
constexpr Patch shared_dbias_patch(bool has_mask) { return has_mask ? Patch{1, 1} : Patch{1, 1}; }

// Defined for the dtypes and head dims of the backward kernels. Returns the error of the launch, which is on the
// current device; lse and delta have been written by launch_backward_rows. `blocks` are those of whole clusters.
template <class T, int kHeadDim, int kHeadDimV>
cudaError_t launch_shared_dbias(const SharedDbiasParams& params, bool has_mask, int blocks, cudaStream_t stream);

}  // namespace flash_dmattn
