// The forward kernels of one dtype and one pair of head dims, a kernel instance. The build compiles this file once for
// each, chosen by FLASH_DMATTN_ELEMENT, FLASH_DMATTN_HEAD_DIM and FLASH_DMATTN_HEAD_DIM_V.
#include "../../dispatch.h"
#include "forward.h"

namespace flash_dmattn {
namespace {

template <Bias kBias, bool kHasMask>
using Traits = ForwardTraits<FLASH_DMATTN_ELEMENT, FLASH_DMATTN_HEAD_DIM, FLASH_DMATTN_HEAD_DIM_V, kBias, kHasMask>;

// Calls f with the traits of the kernel that serves a call.
template <class F>
auto with_traits(Bias bias, bool has_mask, F f) {
  return with_bool(has_mask, [&](auto has_mask_) {
    constexpr bool kHasMask = decltype(has_mask_)::value;
    if (bias == Bias::kTile) return f(Traits<Bias::kTile, kHasMask>{});
    if (bias == Bias::kVector) return f(Traits<Bias::kVector, kHasMask>{});
    if (bias == Bias::kStrided) return f(Traits<Bias::kStrided, kHasMask>{});
    return f(Traits<Bias::kNone, kHasMask>{});
  });
}

}  // namespace

template <>
cudaError_t launch_forward<FLASH_DMATTN_ELEMENT, FLASH_DMATTN_HEAD_DIM, FLASH_DMATTN_HEAD_DIM_V>(
    const ForwardParams& params, Bias bias, bool has_mask, int blocks, cudaStream_t stream) {
  return with_traits(bias, has_mask,
                     [&](auto traits) { return launch_forward_kernel<decltype(traits)>(params, blocks, stream); });
}

template <>
ForwardTile forward_tile<FLASH_DMATTN_ELEMENT, FLASH_DMATTN_HEAD_DIM, FLASH_DMATTN_HEAD_DIM_V>(Bias bias,
                                                                                               bool has_mask) {
  return with_traits(bias, has_mask, [](auto traits) {
    using Of = decltype(traits);
    return ForwardTile{Of::kBlockM, Of::kBlockN, Of::kSplitKv ? kSplitFloats<Of> : 0,
                       Of::kSplitKv ? kSplitWarps<Of> : 0};
  });
}

}  // namespace flash_dmattn
