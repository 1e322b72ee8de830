// The forward kernels of calls with sequences, of one dtype and one pair of head dims, as instantiate.cu has those of
// dense calls.
#include "forward.h"

namespace flash_dmattn {
namespace {

constexpr int kD = FLASH_DMATTN_HEAD_DIM, kDv = FLASH_DMATTN_HEAD_DIM_V;

template <int kConsumers, bool kHasPages = false>
cudaError_t launch_with(const ForwardParams& params, Bias bias, int blocks, cudaStream_t stream) {
  const auto launch = [&](auto form) {
    using Traits =
        ForwardTraits<FLASH_DMATTN_ELEMENT, kD, kDv, decltype(form)::value, MaskForm::kNone, kConsumers, true, kHasPages>;
    return launch_forward_kernel<Traits>(params, blocks, stream);
  };
  if (bias == Bias::kTile) return launch(std::integral_constant<Bias, Bias::kTile>{});
  if (bias == Bias::kVector) return launch(std::integral_constant<Bias, Bias::kVector>{});
  return launch(std::integral_constant<Bias, Bias::kNone>{});
}

}  // namespace

template <>
cudaError_t launch_forward_sequences<FLASH_DMATTN_ELEMENT, kD, kDv>(const ForwardParams& params, Bias bias, int block_m,
                                                                    int blocks, cudaStream_t stream) {
  if (params.sequences.block_table != nullptr) return launch_with<2, true>(params, bias, blocks, stream);
  if constexpr (sequences_block_m(kD, kDv, kQueriesOfThree, false) == 192) {
    if (block_m == 192) return launch_with<3>(params, bias, blocks, stream);
  }
  return launch_with<2>(params, bias, blocks, stream);
}

}  // namespace flash_dmattn
