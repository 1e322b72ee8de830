// The launch of the kernel of a shared bias' gradient, for those who do not compile it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "../../params.h"

namespace flash_dmattn {

// Defined for the dtypes and head dims of the backward kernels. Returns the error of the launch, which is on the
// current device; lse and delta have been written by launch_backward_rows.
template <class T, int kHeadDim, int kHeadDimV>
cudaError_t launch_shared_dbias(const SharedDbiasParams& params, bool has_mask, int blocks, cudaStream_t stream);

}  // namespace flash_dmattn
