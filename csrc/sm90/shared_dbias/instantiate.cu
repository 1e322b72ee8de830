// The shared_dbias kernels of one dtype and one pair of head dims, a kernel instance. The build compiles this file once
// for each, chosen by FLASH_DMATTN_ELEMENT, FLASH_DMATTN_HEAD_DIM and FLASH_DMATTN_HEAD_DIM_V.
#include "../../dispatch.h"
#include "../backward/instances.h"
#include "shared_dbias.h"

namespace flash_dmattn {

template <>
cudaError_t launch_shared_dbias<FLASH_DMATTN_ELEMENT, FLASH_DMATTN_HEAD_DIM, FLASH_DMATTN_HEAD_DIM_V>(
    const SharedDbiasParams& params, bool has_mask, int blocks, cudaStream_t stream) {
  constexpr int kD = FLASH_DMATTN_HEAD_DIM, kDv = FLASH_DMATTN_HEAD_DIM_V;
  return with_bool(has_mask, [&](auto has_mask_) {
    constexpr bool kHasMask = decltype(has_mask_)::value;
    if constexpr (has_dropout_kernels(kD, kDv)) {
      if (params.dropout.key != nullptr) {
        using Traits = SharedDbiasTraits<FLASH_DMATTN_ELEMENT, kD, kDv, kHasMask, false, false, true>;
        return launch_shared_dbias_kernel<Traits>(params, blocks, stream);
      }
    }
    if constexpr (has_window_kernels(kD, kDv)) {
      if (params.distances.number > 0) {
        using Traits = SharedDbiasTraits<FLASH_DMATTN_ELEMENT, kD, kDv, kHasMask, false, false, false, true>;
        return launch_shared_dbias_kernel<Traits>(params, blocks, stream);
      }
    }
    if constexpr (has_float_tile_kernels(kD, kDv)) {
      if (params.bias_values.dtype == BiasDtype::kFloat32) {
        using Traits = SharedDbiasTraits<FLASH_DMATTN_ELEMENT, kD, kDv, kHasMask, false, false, false, false,
                                         Bias::kFloatTile>;
        return launch_shared_dbias_kernel<Traits>(params, blocks, stream);
      }
    }
    return with_bool(params.softcap > 0, [&](auto has_softcap) {
      using Traits = SharedDbiasTraits<FLASH_DMATTN_ELEMENT, kD, kDv, kHasMask, decltype(has_softcap)::value>;
      return launch_shared_dbias_kernel<Traits>(params, blocks, stream);
    });
  });
}

}  // namespace flash_dmattn
