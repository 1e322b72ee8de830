// The backward kernels of calls with sequences, of one dtype and one pair of head dims, as instantiate.cu has those of
// dense calls.
#include "backward.h"

namespace flash_dmattn {

template <>
cudaError_t launch_backward_sequences<FLASH_DMATTN_ELEMENT, FLASH_DMATTN_HEAD_DIM, FLASH_DMATTN_HEAD_DIM_V>(
    const BackwardParams& params, BackwardBias bias, int blocks, cudaStream_t stream) {
  const auto launch = [&](auto form) {
    using Traits = BackwardTraits<FLASH_DMATTN_ELEMENT, FLASH_DMATTN_HEAD_DIM, FLASH_DMATTN_HEAD_DIM_V,
                                  decltype(form)::value, MaskForm::kNone, false, kTile, true>;
    return launch_backward_kernel<Traits>(params, blocks, stream);
  };
  switch (bias) {
    case BackwardBias::kTile:
      return launch(std::integral_constant<BackwardBias, BackwardBias::kTile>{});
    case BackwardBias::kTileStore:
      return launch(std::integral_constant<BackwardBias, BackwardBias::kTileStore>{});
    case BackwardBias::kVector:
      return launch(std::integral_constant<BackwardBias, BackwardBias::kVector>{});
    default:
      return launch(std::integral_constant<BackwardBias, BackwardBias::kNone>{});
  }
}

}  // namespace flash_dmattn
