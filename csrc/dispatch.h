// Run-time values to compile-time values.
#pragma once

#include <type_traits>

namespace flash_dmattn {

// Calls f with std::true_type or std::false_type.
template <class F>
auto with_bool(bool value, F f) {
  return value ? f(std::true_type{}) : f(std::false_type{});
}

}  // namespace flash_dmattn
