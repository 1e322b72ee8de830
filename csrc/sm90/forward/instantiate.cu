// The forward kernels of one dtype and one pair of head dims, a kernel instance. The build compiles this file once for
// each, chosen by FLASH_DMATTN_ELEMENT, FLASH_DMATTN_HEAD_DIM and FLASH_DMATTN_HEAD_DIM_V.
#include "../../dispatch.h"
#include "forward.h"

namespace flash_dmattn {
namespace {

template <Bias kBias, MaskForm kMask>
using Traits = ForwardTraits<FLASH_DMATTN_ELEMENT, FLASH_DMATTN_HEAD_DIM, FLASH_DMATTN_HEAD_DIM_V, kBias, kMask>;

// Calls f with the traits of the kernel that serves a call.
template <class F>
auto with_traits(Bias bias, MaskForm mask, F f) {
  return with_mask_form(mask, [&](auto form) {
    constexpr MaskForm kMask = decltype(form)::value;
    if constexpr (kMask != MaskForm::kIntervals) {
      if (bias == Bias::kTile) return f(Traits<Bias::kTile, kMask>{});
      if (bias == Bias::kStrided) return f(Traits<Bias::kStrided, kMask>{});
    }
    if (bias == Bias::kVector) return f(Traits<Bias::kVector, kMask>{});
    return f(Traits<Bias::kNone, kMask>{});
  });
}

}  // namespace

template <>
cudaError_t launch_forward<FLASH_DMATTN_ELEMENT, FLASH_DMATTN_HEAD_DIM, FLASH_DMATTN_HEAD_DIM_V>(
    const ForwardParams& params, Bias bias, MaskForm mask, int blocks, cudaStream_t stream) {
  return with_traits(bias, mask,
                     [&](auto traits) { return launch_forward_kernel<decltype(traits)>(params, blocks, stream); });
}

template <>
ForwardTile forward_tile<FLASH_DMATTN_ELEMENT, FLASH_DMATTN_HEAD_DIM, FLASH_DMATTN_HEAD_DIM_V>(Bias bias,
                                                                                               MaskForm mask) {
  return with_traits(bias, mask, [](auto traits) {
    using Of = decltype(traits);
    return ForwardTile{Of::kBlockM, Of::kBlockN, Of::kSplitKv ? kSplitFloats<Of> : 0,
                       Of::kSplitKv ? kSplitWarps<Of> : 0};
  });
}

}  // namespace flash_dmattn
