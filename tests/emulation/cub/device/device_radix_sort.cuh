// The one function of CUB that csrc calls, on a machine without a GPU.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include <cuda_runtime_api.h>

namespace cub {

struct DeviceRadixSort {
  template <class Key, class Value, class Number>
  static cudaError_t SortPairs(void* scratch, size_t& scratch_bytes, const Key* keys, Key* sorted_keys,
                               const Value* values, Value* sorted_values, Number total, int first_bit, int last_bit,
                               cudaStream_t = nullptr) {
    if (scratch == nullptr) {
      scratch_bytes = 1;
      return cudaSuccess;
    }
    const auto bits = [&](Number i) {
      return (static_cast<uint64_t>(keys[i]) & ((uint64_t{1} << last_bit) - 1)) >> first_bit;
    };
    std::vector<Number> order(total);
    std::iota(order.begin(), order.end(), Number{0});
    std::stable_sort(order.begin(), order.end(), [&](Number i, Number j) { return bits(i) < bits(j); });
    for (Number i = 0; i < total; ++i) {
      sorted_keys[i] = keys[order[i]];
      sorted_values[i] = values[order[i]];
    }
    return cudaSuccess;
  }
};

}  // namespace cub
