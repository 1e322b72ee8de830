// How a persistent kernel shares out its pieces of work, and how many blocks there are to take them.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include <cuda_runtime_api.h>

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "common.h"

namespace flash_dmattn {

// What the pieces that are worked on at a time share stays in the 50 MB of L2, with room for what each has of its own.
constexpr int64_t kSectionBytes = 24 << 20;

// Asked for once: it takes as long as encoding a tensor map. Two threads that ask at once write the same.
inline int multiprocessors(const char* op, int device) {
  static std::array<std::atomic<int>, 64> known{};
  std::atomic<int>& count = known[static_cast<size_t>(device) % known.size()];
  if (count == 0) {
    int found = 0;
    check(cudaDeviceGetAttribute(&found, cudaDevAttrMultiProcessorCount, device), op, "asking for multiprocessors");
    count = found;
  }
  return count;
}

// Counters at 0; they lie on the device of `like`, and live as long as what is returned.
inline torch::stable::Tensor zero_counters(const char* op, const torch::stable::Tensor& like, int64_t count,
                                           cudaStream_t stream) {
  torch::stable::Tensor counters = torch::stable::new_empty(like, {&count, 1}, torch::headeronly::ScalarType::Int);
  check(cudaMemsetAsync(counters.mutable_data_ptr(), 0, count * sizeof(int), stream), op, "clearing counters");
  return counters;
}

}  // namespace flash_dmattn
