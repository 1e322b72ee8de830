// dbias of a bias per query and key that several attention heads share: the part of the backward pass with its own
// kernel.
#pragma once

#include <cstdint>
#include <vector>

#include <torch/csrc/stable/tensor.h>

#include "../sm90/shared_dbias/launch.h"
#include "call.h"
#include "common.h"

namespace flash_dmattn {

// The inputs. mask is {} or (bits, row_lists, col_lists); low and high are the band if there is no mask; lse and delta
// are those of BackwardParams.
struct SharedDbiasCall {
  const torch::stable::Tensor &dout, &q, &k, &v, &bias;
  const std::vector<torch::stable::Tensor>& mask;
  const float *lse, *delta;
  int64_t low, high;
  double softmax_scale, softcap;
};

// Writes all of dbias: contiguous, in the dtype of q, rows of a multiple of 8 keys. `launch` belongs to the kernel
// instance that serves the call.
void store_shared_dbias(const char* op, decltype(&launch_shared_dbias<__half, 64, 64>) launch,
                        const CurrentDevice& device, const Sizes& sizes, const SharedDbiasCall& call,
                        const torch::stable::Tensor& dbias);

}  // namespace flash_dmattn
