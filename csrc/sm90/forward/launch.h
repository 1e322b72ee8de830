// The forward kernels' interface for code that does not compile them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "../../params.h"

namespace flash_dmattn {

enum class Bias {
  kNone,    // no bias, or one value per query, which changes lse only
  kTile,    // one value per query and key, in the dtype of q, loaded as tiles by TMA
  kVector,  // one value per key, of any dtype and stride
  kStrided  // one value per query and key, any dtype and strides: slower, but needs no copy
};

// Defined for the dtypes and head dims of the build. Beside an interval mask the bias is kNone or kVector. Launches on
// the current device and returns the launch's error.
template <class T, int kHeadDim, int kHeadDimV>
cudaError_t launch_forward(const ForwardParams& params, Bias bias, MaskForm mask, int blocks, cudaStream_t stream);

// The tile of a work tile: block_m queries and block_n keys at a time. With split-KV, the floats that a split leaves in
// device memory and the warps that write them; 0 if the kernel has no split-KV.
struct ForwardTile {
  int block_m, block_n;
  int split_floats, split_warps;
};
template <class T, int kHeadDim, int kHeadDimV>
ForwardTile forward_tile(Bias bias, MaskForm mask);

}  // namespace flash_dmattn
