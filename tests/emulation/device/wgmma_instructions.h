// csrc/device/wgmma_instructions.h for the emulated GPU: the same methods.
#pragma once

#include "../cuda_functions.h"

namespace flash_dmattn {

template <class T, int kN>
struct Wgmma {
  static_assert(kN % 8 == 0 && kN <= 256);
  static constexpr bool kIsHalf = std::is_same_v<T, __half>;

  static void run(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate) {
    emulation::issue_product(kN, kIsHalf, false, false, d, nullptr, a, b, accumulate);
  }
  static void run_a_transposed(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate) {
    emulation::issue_product(kN, kIsHalf, true, false, d, nullptr, a, b, accumulate);
  }
  static void run_b_transposed(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate) {
    emulation::issue_product(kN, kIsHalf, false, true, d, nullptr, a, b, accumulate);
  }
  static void run_ab_transposed(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate) {
    emulation::issue_product(kN, kIsHalf, true, true, d, nullptr, a, b, accumulate);
  }
  static void run(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
    emulation::issue_product(kN, kIsHalf, false, true, d, a, 0, b, accumulate);
  }
};

}  // namespace flash_dmattn
