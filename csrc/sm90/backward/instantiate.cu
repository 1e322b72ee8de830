// The backward kernels of one dtype and one pair of head dims, a kernel instance. The build compiles this file once for
// each, chosen by FLASH_DMATTN_ELEMENT, FLASH_DMATTN_HEAD_DIM and FLASH_DMATTN_HEAD_DIM_V.
#include "backward.h"
#include "dispatch.h"

namespace flash_dmattn {

// A template, so that head dims without such kernels make none; of Element too, or units of two dtypes would share one.
template <class Element, int kD, int kDv>
cudaError_t launch_two_key_tiles(const BackwardParams& params, BackwardBias bias, int blocks, cudaStream_t stream) {
  if constexpr (has_two_key_tiles(kD, kDv)) {
    static_assert(has_float_tile_kernels(kD, kDv));
    if (has_float_tiles(form_of(bias))) {
      return with_float_bias(bias, [&](auto form) {
        using Traits = BackwardTraits<Element, kD, kDv, decltype(form)::value, MaskForm::kNone, false, 2 * kTile>;
        return launch_backward_kernel<Traits>(params, blocks, stream);
      });
    }
    return with_one_of<BackwardBias::kTileStore, BackwardBias::kTile, BackwardBias::kNone>(bias, [&](auto form) {
      using Traits = BackwardTraits<Element, kD, kDv, decltype(form)::value, MaskForm::kNone, false, 2 * kTile>;
      return launch_backward_kernel<Traits>(params, blocks, stream);
    });
  }
  return cudaErrorInvalidValue;
}

template <>
cudaError_t launch_backward_main<FLASH_DMATTN_ELEMENT, FLASH_DMATTN_HEAD_DIM, FLASH_DMATTN_HEAD_DIM_V>(
    const BackwardParams& params, BackwardBias bias, MaskForm mask, int block_n, bool turns_dq, int blocks,
    cudaStream_t stream) {
  using Element = FLASH_DMATTN_ELEMENT;
  constexpr int kD = FLASH_DMATTN_HEAD_DIM, kDv = FLASH_DMATTN_HEAD_DIM_V;
  if (block_n > kTile) return launch_two_key_tiles<Element, kD, kDv>(params, bias, blocks, stream);
  if (bias == BackwardBias::kTileSum) {
    return with_bool(mask != MaskForm::kNone, [&](auto has_mask) {
      constexpr MaskForm kMask = decltype(has_mask)::value ? MaskForm::kTiles : MaskForm::kNone;
      using Traits = BackwardTraits<Element, kD, kDv, BackwardBias::kTileSum, kMask, false>;
      return launch_backward_kernel<Traits>(params, blocks, stream);
    });
  }
  // Forms whose kernels have no softcap and no dropout.
  [[maybe_unused]] const auto launch_plain = [&](auto form) {
    return with_bool(mask != MaskForm::kNone, [&](auto has_mask) {
      constexpr MaskForm kMask = decltype(has_mask)::value ? MaskForm::kTiles : MaskForm::kNone;
      using Traits = BackwardTraits<Element, kD, kDv, decltype(form)::value, kMask, false>;
      return launch_backward_kernel<Traits>(params, blocks, stream);
    });
  };
  if constexpr (has_window_kernels(kD, kDv)) {
    if (has_window(form_of(bias))) return with_window_bias(bias, launch_plain);
  }
  if constexpr (has_float_tile_kernels(kD, kDv)) {
    if (has_float_tiles(form_of(bias))) return with_float_bias(bias, launch_plain);
  }
  if constexpr (has_dropout_kernels(kD, kDv)) {
    if (params.dropout.key != nullptr) {
      return with_backward_form(bias, mask, [&](auto form, auto mask_form) {
        using Traits = BackwardTraits<Element, kD, kDv, decltype(form)::value, decltype(mask_form)::value, false, kTile,
                                      false, true>;
        return launch_backward_kernel<Traits>(params, blocks, stream);
      });
    }
  }
  if constexpr (has_turned_dq(kD, kDv)) {
    if (turns_dq) {
      using Traits = BackwardTraits<Element, kD, kDv, BackwardBias::kNone, MaskForm::kNone, false, kTile, false, false,
                                    kTurnedBlockM>;
      return launch_backward_kernel<Traits>(params, blocks, stream);
    }
  }
  return with_bool(params.softcap > 0, [&](auto has_softcap) {
    return with_backward_form(bias, mask, [&](auto form, auto mask_form) {
      using Traits = BackwardTraits<Element, kD, kDv, decltype(form)::value, decltype(mask_form)::value,
                                    decltype(has_softcap)::value>;
      return launch_backward_kernel<Traits>(params, blocks, stream);
    });
  });
}

}  // namespace flash_dmattn
