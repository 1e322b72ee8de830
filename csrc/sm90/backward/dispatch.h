// The variant of a backward kernel: run-time values to compile-time values.
#pragma once

#include <type_traits>

#include "../../dispatch.h"
#include "launch.h"

namespace flash_dmattn {

// Calls f with an integral constant for the kind of bias: any but kTileSum, and but kinds with a window or with tiles in
// fp32.
template <MaskForm kMask, class F>
cudaError_t with_backward_bias(BackwardBias bias, F f) {
  using Of = BackwardBias;
  if constexpr (kMask == MaskForm::kIntervals) {
    return with_one_of<Of::kVector, Of::kNone>(bias, f);
  } else {
    return with_one_of<Of::kTile, Of::kTileStore, Of::kVector, Of::kNone>(bias, f);
  }
}

// The same for a bias that is read as a window. The return type is not deduced: that would compile the kernels for all head
// dims, because a caller that is no template compiles what `if constexpr` leaves out.
template <class F>
cudaError_t with_window_bias(BackwardBias bias, F f) {
  return with_one_of<BackwardBias::kRelativeSum, BackwardBias::kRelative>(bias, f);
}

// The same for a bias that is read as tiles in fp32.
template <class F>
cudaError_t with_float_bias(BackwardBias bias, F f) {
  return with_one_of<BackwardBias::kFloatTileStore, BackwardBias::kFloatTile>(bias, f);
}

// As with_backward_bias, with another constant for the form of the mask.
template <class F>
cudaError_t with_backward_form(BackwardBias bias, MaskForm mask, F f) {
  return with_mask_form(mask, [&](auto mask_form) {
    return with_backward_bias<decltype(mask_form)::value>(bias, [&](auto form) { return f(form, mask_form); });
  });
}

}  // namespace flash_dmattn
