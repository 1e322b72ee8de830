// The variant of a backward kernel: run-time values to compile-time values.
#pragma once

#include <type_traits>

#include "../../dispatch.h"
#include "launch.h"

namespace flash_dmattn {

// Calls f with integral constants for the kind of bias (any but kTileSum) and for the form of the mask.
template <class F>
cudaError_t with_backward_form(BackwardBias bias, MaskForm mask, F f) {
  return with_mask_form(mask, [&](auto mask_form) {
    const auto call = [&](auto form) { return f(form, mask_form); };
    if constexpr (decltype(mask_form)::value != MaskForm::kIntervals) {
      if (bias == BackwardBias::kTile) return call(std::integral_constant<BackwardBias, BackwardBias::kTile>{});
      if (bias == BackwardBias::kTileStore)
        return call(std::integral_constant<BackwardBias, BackwardBias::kTileStore>{});
    }
    if (bias == BackwardBias::kVector) return call(std::integral_constant<BackwardBias, BackwardBias::kVector>{});
    return call(std::integral_constant<BackwardBias, BackwardBias::kNone>{});
  });
}

}  // namespace flash_dmattn
