// The forward kernels of calls with sequences, of one dtype and one pair of head dims, as instantiate.cu has those of
// dense calls.
#include "forward.h"

namespace flash_dmattn {

template <>
cudaError_t launch_forward_sequences<FLASH_DMATTN_ELEMENT, FLASH_DMATTN_HEAD_DIM, FLASH_DMATTN_HEAD_DIM_V>(
    const ForwardParams& params, Bias bias, int blocks, cudaStream_t stream) {
  const auto launch = [&](auto form) {
    // Two consumers, so that a work tile is a tile of kTile queries.
    using Traits = ForwardTraits<FLASH_DMATTN_ELEMENT, FLASH_DMATTN_HEAD_DIM, FLASH_DMATTN_HEAD_DIM_V,
                                 decltype(form)::value, MaskForm::kNone, kTile / 64, true>;
    return launch_forward_kernel<Traits>(params, blocks, stream);
  };
  if (bias == Bias::kTile) return launch(std::integral_constant<Bias, Bias::kTile>{});
  if (bias == Bias::kVector) return launch(std::integral_constant<Bias, Bias::kVector>{});
  return launch(std::integral_constant<Bias, Bias::kNone>{});
}

}  // namespace flash_dmattn
