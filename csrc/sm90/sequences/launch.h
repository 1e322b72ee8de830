// A call with sequences launches these kernels besides the attention kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "params.h"

namespace flash_dmattn {

// Launched on the current device; each returns the launch's error.
cudaError_t launch_prepare(const PrepareParams& params, int num_sms, cudaStream_t stream);

// With at most so many keys the rounding of out to 16 bits shows in the gradients: delta is summed from scores instead.
constexpr int kFewKeys = 64;
template <class T>
cudaError_t launch_few_keys(const FewKeysParams& params, cudaStream_t stream);

}  // namespace flash_dmattn
