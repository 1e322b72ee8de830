// The named barriers of the backward kernels, behind those of the turns (pipeline.h).
#pragma once

namespace flash_dmattn {

// One for each consumer of: leave to add to sums in device memory, and that it has.
constexpr int kMayAddBarrier = 3, kHasAddedBarrier = 5;
// Where both consumers meet to add up what they have summed for a bias per key.
constexpr int kKeySumsBarrier = 7;

}  // namespace flash_dmattn
