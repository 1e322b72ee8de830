// The backward kernels of calls with sequences, for one dtype and one pair of head dims. instantiate.cu has the kernels
// of dense calls.
#include "backward.h"
#include "dispatch.h"

namespace flash_dmattn {

template <>
cudaError_t launch_backward_sequences<FLASH_DMATTN_ELEMENT, FLASH_DMATTN_HEAD_DIM, FLASH_DMATTN_HEAD_DIM_V>(
    const BackwardParams& params, BackwardBias bias, MaskForm /*mask*/, int /*block_n*/, bool /*turns_dq*/, int blocks,
    cudaStream_t stream) {
  return with_backward_bias<MaskForm::kNone>(bias, [&](auto form) {
    using Traits = BackwardTraits<FLASH_DMATTN_ELEMENT, FLASH_DMATTN_HEAD_DIM, FLASH_DMATTN_HEAD_DIM_V,
                                  decltype(form)::value, MaskForm::kNone, false, kTile, true>;
    return launch_backward_kernel<Traits>(params, blocks, stream);
  });
}

}  // namespace flash_dmattn
