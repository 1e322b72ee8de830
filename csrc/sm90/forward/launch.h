// The launch of the forward kernels, for those who do not compile them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "../../params.h"

namespace flash_dmattn {

enum class Bias {
  kNone,    // none, or one value per query, which moves lse alone
  kTile,    // one value per query and key, in the dtype of q, copied as tiles
  kVector,  // one value per key, of any dtype and stride
  kStrided  // one value per query and key, of any dtype and strides: slower, but never refused and never copied
};

// Defined for the dtypes and head dims that the extension is built with. Returns the error of the launch, which is on
// the current device; pieces come in parts where params.parts is not 1.
template <class T, int kHeadDim, int kHeadDimV>
cudaError_t launch_forward(const ForwardParams& params, Bias bias, bool has_mask, int blocks, cudaStream_t stream);

// Rows of out that a block computes at a time, and keys of a tile. Where its keys may come in parts, what a part leaves
// behind, and the warps that do; else 0.
struct ForwardTile {
  int rows, keys;
  int part_floats, part_warps;
};
template <class T, int kHeadDim, int kHeadDimV>
ForwardTile forward_tile(Bias bias, bool has_mask);

}  // namespace flash_dmattn
