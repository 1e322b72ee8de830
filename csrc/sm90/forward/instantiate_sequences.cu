// The forward kernels of calls with sequences, for one dtype and one pair of head dims. instantiate.cu has the kernels
// of dense calls.
#include "../../dispatch.h"
#include "forward.h"

namespace flash_dmattn {
namespace {

constexpr int kD = FLASH_DMATTN_HEAD_DIM, kDv = FLASH_DMATTN_HEAD_DIM_V;

template <int kConsumers, bool kHasPages = false>
cudaError_t launch_with(const ForwardParams& params, Bias bias, int blocks, cudaStream_t stream) {
  return with_one_of<Bias::kTile, Bias::kVector, Bias::kNone>(bias, [&](auto form) {
    using Traits =
        ForwardTraits<FLASH_DMATTN_ELEMENT, kD, kDv, decltype(form)::value, MaskForm::kNone, kConsumers, true, kHasPages>;
    return launch_forward_kernel<Traits>(params, blocks, stream);
  });
}

}  // namespace

template <>
cudaError_t launch_forward_sequences<FLASH_DMATTN_ELEMENT, kD, kDv>(const ForwardParams& params,
                                                                    const ForwardVariant& variant, int blocks,
                                                                    cudaStream_t stream) {
  if (variant.has_pages) return launch_with<2, true>(params, variant.bias, blocks, stream);
  if constexpr (sequences_consumers(kD, kDv, kQueriesOfThree, false) == 3) {
    if (sequences_consumers(kD, kDv, variant.queries, false) == 3) {
      return launch_with<3>(params, variant.bias, blocks, stream);
    }
  }
  return launch_with<2>(params, variant.bias, blocks, stream);
}

}  // namespace flash_dmattn
