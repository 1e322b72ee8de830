// Run-time values to compile-time values.
#pragma once

#include <type_traits>

#include "params.h"

namespace flash_dmattn {

// Calls f with std::true_type or std::false_type.
template <class F>
auto with_bool(bool value, F f) {
  return value ? f(std::true_type{}) : f(std::false_type{});
}

// Calls f with an integral constant.
template <class F>
auto with_mask_form(MaskForm form, F f) {
  if (form == MaskForm::kTiles) return f(std::integral_constant<MaskForm, MaskForm::kTiles>{});
  if (form == MaskForm::kIntervals) return f(std::integral_constant<MaskForm, MaskForm::kIntervals>{});
  return f(std::integral_constant<MaskForm, MaskForm::kNone>{});
}

}  // namespace flash_dmattn
