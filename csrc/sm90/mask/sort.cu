// The sort of an order of keys, by the radix sort of CUB, which comes with nvcc.
#include <cub/device/device_radix_sort.cuh>

#include "mask.h"

namespace flash_dmattn {

cudaError_t sort_codes(SortCodesParams& p, cudaStream_t stream) {
  return cub::DeviceRadixSort::SortPairs(p.scratch, p.scratch_bytes, p.codes, p.sorted_codes, p.keys, p.order, p.total,
                                         0, p.bits, stream);
}

}  // namespace flash_dmattn
