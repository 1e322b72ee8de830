// The backward kernels of one dtype and one pair of head dims, the larger above 128: a kernel instance. The build
// compiles this file once for each, chosen by FLASH_DMATTN_ELEMENT, FLASH_DMATTN_HEAD_DIM and FLASH_DMATTN_HEAD_DIM_V.
#include "../backward/backward.h"
#include "../backward/dispatch.h"
#include "wide_backward.h"

namespace flash_dmattn {

// A template, so that head dims without such a kernel make none.
template <class Element, int kD, int kDv>
cudaError_t launch_whole_tile(const BackwardParams& params, int blocks, cudaStream_t stream) {
  if constexpr (has_whole_tile(kD, kDv)) {
    using Traits = BackwardTraits<Element, kD, kDv, BackwardBias::kNone, MaskForm::kNone, false>;
    return launch_backward_kernel<Traits>(params, blocks, stream);
  }
  return cudaErrorInvalidValue;
}

template <>
cudaError_t launch_backward_main<FLASH_DMATTN_ELEMENT, FLASH_DMATTN_HEAD_DIM, FLASH_DMATTN_HEAD_DIM_V>(
    const BackwardParams& params, BackwardBias bias, MaskForm mask, int block_n, bool /*turns_dq*/, int blocks,
    cudaStream_t stream) {
  using Element = FLASH_DMATTN_ELEMENT;
  constexpr int kD = FLASH_DMATTN_HEAD_DIM, kDv = FLASH_DMATTN_HEAD_DIM_V;
  if (block_n == kTile) return launch_whole_tile<Element, kD, kDv>(params, blocks, stream);
  return with_bool(params.softcap > 0, [&](auto has_softcap) {
    return with_backward_form(bias, mask, [&](auto form, auto mask_form) {
      constexpr bool kHasSoftcap = decltype(has_softcap)::value;
      constexpr bool kStores = backward_stores_dbias(kD, kDv, kHasSoftcap);
      if constexpr (decltype(form)::value == BackwardBias::kTileStore && !kStores) {
        return cudaErrorNotSupported;  // nobody calls it
      } else {
        using Traits =
            WideBackwardTraits<Element, kD, kDv, decltype(form)::value, decltype(mask_form)::value, kHasSoftcap>;
        return launch_wide_backward_kernel<Traits>(params, blocks, stream);
      }
    });
  });
}

}  // namespace flash_dmattn
