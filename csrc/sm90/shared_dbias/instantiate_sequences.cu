// The shared_dbias kernels of calls with sequences, for one dtype and one pair of head dims. instantiate.cu has the
// kernels of dense calls.
#include "shared_dbias.h"

namespace flash_dmattn {

template <>
cudaError_t launch_shared_dbias_sequences<FLASH_DMATTN_ELEMENT, FLASH_DMATTN_HEAD_DIM, FLASH_DMATTN_HEAD_DIM_V>(
    const SharedDbiasParams& params, bool has_mask, int blocks, cudaStream_t stream) {
  if (has_mask) return cudaErrorInvalidValue;
  using Traits =
      SharedDbiasTraits<FLASH_DMATTN_ELEMENT, FLASH_DMATTN_HEAD_DIM, FLASH_DMATTN_HEAD_DIM_V, false, false, true>;
  return launch_shared_dbias_kernel<Traits>(params, blocks, stream);
}

}  // namespace flash_dmattn
