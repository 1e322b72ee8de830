// The forward kernels of calls with sequences, for one dtype and one pair of head dims. instantiate.cu has the kernels
// of dense calls.
#include "../../dispatch.h"
#include "forward.h"

namespace flash_dmattn {
namespace {

constexpr int kD = FLASH_DMATTN_HEAD_DIM, kDv = FLASH_DMATTN_HEAD_DIM_V;

template <int kConsumers, bool kHasPages = false>
cudaError_t launch_with(const ForwardParams& params, const ForwardVariant& variant, int blocks, cudaStream_t stream) {
  return with_one_of<Bias::kTile, Bias::kVector, Bias::kNone>(variant.bias, [&](auto form) {
    constexpr Bias kBias = decltype(form)::value;
    const auto launch = [&](auto max_scores) {
      using Traits = ForwardTraits<FLASH_DMATTN_ELEMENT, kD, kDv, kBias, MaskForm::kNone, kConsumers, true, kHasPages,
                                   false, false, decltype(max_scores)::value>;
      return launch_forward_kernel<Traits>(params, blocks, stream);
    };
    if constexpr (has_max_scores_kernels(kBias, MaskForm::kNone) && !kHasPages) {
      if (variant.has_max_scores) return launch(std::true_type{});
    }
    return launch(std::false_type{});
  });
}

}  // namespace

template <>
cudaError_t launch_forward_sequences<FLASH_DMATTN_ELEMENT, kD, kDv>(const ForwardParams& params,
                                                                    const ForwardVariant& variant, int blocks,
                                                                    cudaStream_t stream) {
  if (variant.has_pages) return launch_with<2, true>(params, variant, blocks, stream);
  if constexpr (sequences_consumers(kD, kDv, kQueriesOfThree, false) == 3) {
    if (sequences_consumers(kD, kDv, variant.queries, false) == 3) {
      return launch_with<3>(params, variant, blocks, stream);
    }
  }
  return launch_with<2>(params, variant, blocks, stream);
}

}  // namespace flash_dmattn
