// The host's part of tile scheduling: the number of SMs, and counters for dynamic scheduling.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include <cuda_runtime_api.h>

#include <torch/csrc/stable/tensor.h>

#include "common.h"

namespace flash_dmattn {

// The number of SMs. Asked once: the query takes as long as encoding a TMA descriptor. Two threads that ask at the same
// time write the same value.
inline int sm_count(const char* op, int device) {
  static std::array<std::atomic<int>, 64> known{};
  std::atomic<int>& count = known[static_cast<size_t>(device) % known.size()];
  if (count == 0) {
    int found = 0;
    check(cudaDeviceGetAttribute(&found, cudaDevAttrMultiProcessorCount, device), op, "asking for multiprocessors");
    count = found;
  }
  return count;
}

// Counters set to 0, on the device of `like`. They live as long as the tensor that is returned.
inline torch::stable::Tensor zero_counters(const char* op, const torch::stable::Tensor& like, int64_t count,
                                           cudaStream_t stream) {
  torch::stable::Tensor counters = empty(like, {count}, torch::headeronly::ScalarType::Int);
  check(cudaMemsetAsync(counters.mutable_data_ptr(), 0, count * sizeof(int), stream), op, "clearing counters");
  return counters;
}

}  // namespace flash_dmattn
