// Run-time values to compile-time values.
#pragma once

#include <type_traits>

#include "params.h"
#include "sm90/bias_forms.h"

namespace flash_dmattn {

// Calls f with std::true_type or std::false_type.
template <class F>
auto with_bool(bool value, F f) {
  return value ? f(std::true_type{}) : f(std::false_type{});
}

// Calls f with the constant that equals `value`; the last constant stands for any other value.
template <auto kFirst, auto... kOthers, class F>
auto with_one_of(decltype(kFirst) value, F f) {
  if constexpr (sizeof...(kOthers) > 0) {
    if (value != kFirst) return with_one_of<kOthers...>(value, f);
  }
  return f(std::integral_constant<decltype(kFirst), kFirst>{});
}

template <class F>
auto with_mask_form(MaskForm form, F f) {
  return with_one_of<MaskForm::kTiles, MaskForm::kIntervals, MaskForm::kNone>(form, f);
}

// For the form of a bias that dense kernels of such head dims read beside such a mask, any but tiles in fp32.
template <int kHeadDim, int kHeadDimV, MaskForm kMask, class F>
auto with_bias_form(Bias bias, F f) {
  if constexpr (kMask == MaskForm::kIntervals) {
    return with_one_of<Bias::kVector, Bias::kNone>(bias, f);
  } else if constexpr (has_window_kernels(kHeadDim, kHeadDimV)) {
    return with_one_of<Bias::kTile, Bias::kStrided, Bias::kVector, Bias::kRelative, Bias::kNone>(bias, f);
  } else {
    return with_one_of<Bias::kTile, Bias::kStrided, Bias::kVector, Bias::kNone>(bias, f);
  }
}

}  // namespace flash_dmattn
