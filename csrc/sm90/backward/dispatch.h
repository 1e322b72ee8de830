// The variant of a backward kernel: run-time values to compile-time values.
#pragma once

#include <type_traits>

#include "../../dispatch.h"
#include "launch.h"

namespace flash_dmattn {

// Calls f with integral constants for the kind of bias (any but kTileSum) and for whether there is a mask.
template <class F>
cudaError_t with_backward_form(BackwardBias bias, bool has_mask, F f) {
  return with_bool(has_mask, [&](auto has_mask_) {
    const auto call = [&](auto form) { return f(form, has_mask_); };
    if (bias == BackwardBias::kTile) return call(std::integral_constant<BackwardBias, BackwardBias::kTile>{});
    if (bias == BackwardBias::kTileStore) return call(std::integral_constant<BackwardBias, BackwardBias::kTileStore>{});
    if (bias == BackwardBias::kVector) return call(std::integral_constant<BackwardBias, BackwardBias::kVector>{});
    return call(std::integral_constant<BackwardBias, BackwardBias::kNone>{});
  });
}

}  // namespace flash_dmattn
