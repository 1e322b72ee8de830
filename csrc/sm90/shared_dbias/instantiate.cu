// The kernels of a shared bias' gradient of one dtype and one pair of head dims. The build compiles this file once for
// each of them, and says which by FLASH_DMATTN_ELEMENT, FLASH_DMATTN_HEAD_DIM and FLASH_DMATTN_HEAD_DIM_V.
#include <type_traits>

#include "../../dispatch.h"
#include "shared_dbias.h"

namespace flash_dmattn {

template <>
cudaError_t launch_shared_dbias<FLASH_DMATTN_ELEMENT, FLASH_DMATTN_HEAD_DIM, FLASH_DMATTN_HEAD_DIM_V>(
    const SharedDbiasParams& params, bool has_mask, int blocks, cudaStream_t stream) {
  const auto launch = [&](auto has_softcap) {
    return with_bool(has_mask, [&](auto has_mask_) {
      using Traits = SharedDbiasTraits<FLASH_DMATTN_ELEMENT, FLASH_DMATTN_HEAD_DIM, FLASH_DMATTN_HEAD_DIM_V,
                                       decltype(has_mask_)::value, decltype(has_softcap)::value>;
      return launch_shared_dbias_kernel<Traits>(params, blocks, stream);
    });
  };
  // Softcap ends at 128, as in the backward kernel beside it.
  if constexpr (FLASH_DMATTN_HEAD_DIM <= 128 && FLASH_DMATTN_HEAD_DIM_V <= 128) {
    if (params.softcap > 0) return launch(std::true_type{});
  }
  return launch(std::false_type{});
}

}  // namespace flash_dmattn
