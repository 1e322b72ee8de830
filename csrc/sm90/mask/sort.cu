// The sort of an order of keys, by the radix sort of CUB, which comes with nvcc.
#include <cub/device/device_radix_sort.cuh>

#include "mask.h"

namespace flash_dmattn {

cudaError_t sort_codes(const SortCodesParams& p, cudaStream_t stream) {
  size_t bytes = p.scratch_bytes;
  return cub::DeviceRadixSort::SortPairs(p.scratch, bytes, p.codes, p.sorted_codes, p.keys, p.order, p.total, 0, p.bits,
                                         stream);
}

cudaError_t size_of_sort(SortCodesParams& p) {
  p.scratch = nullptr;  // asks for the size
  return cub::DeviceRadixSort::SortPairs(p.scratch, p.scratch_bytes, p.codes, p.sorted_codes, p.keys, p.order, p.total,
                                         0, p.bits);
}

}  // namespace flash_dmattn
