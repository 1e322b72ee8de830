// dbias of a bias per query and key that several attention heads share: the part of the backward pass with its own
// kernel.
#pragma once

#include <cstdint>
#include <vector>

#include <torch/csrc/stable/tensor.h>

#include "../sm90/shared_dbias/launch.h"
#include "backward_schedule.h"
#include "call.h"
#include "common.h"

namespace flash_dmattn {

// The kernels that write such a dbias, of one kernel instance.
struct SharedDbiasKernels {
  decltype(&launch_shared_dbias<__half, 64, 64>) sum;  // or that of calls with sequences
  decltype(&launch_add_chunks<__half>) add;
};

// The inputs. mask is {} or (bits, row_lists, col_lists); low and high are the band if there is no mask; lse and delta
// are those of BackwardParams. Scratch memory: slots, which are not cleared, if the schedule has any; and a counter that
// starts as 0.
struct SharedDbiasCall {
  const torch::stable::Tensor &dout, &q, &k, &v, &bias;
  const std::vector<torch::stable::Tensor>& mask;
  const float *lse, *delta;
  float* slots;
  int* tile_counter;
  int64_t low, high;
  double softmax_scale, softcap;
  const SequenceParams& sequences;  // without bounds in dense calls; else sizes count positions of a bias
  DropoutParams dropout;
};

// Writes all of dbias: contiguous, in the dtype of q, from slots unless its rows are a multiple of 8 keys.
void store_shared_dbias(const char* op, const SharedDbiasKernels& kernels, const CurrentDevice& device,
                        const Sizes& sizes, const SharedDbiasCall& call, const DbiasSchedule& schedule,
                        const torch::stable::Tensor& dbias);

}  // namespace flash_dmattn
