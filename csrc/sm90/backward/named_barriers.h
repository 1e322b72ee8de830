// The named barriers of the backward kernels, numbered after the two of the ping-pong (pipeline.h).
#pragma once

namespace flash_dmattn {

// Fixed order of additions, one for each consumer: it may add to device memory; it has added.
constexpr int kMayAddBarrier = 3, kHasAddedBarrier = 5;
// Both consumers meet here to combine their sums for a bias per key.
constexpr int kKeySumsBarrier = 7;
// Both consumers have looked for rows whose lse is great.
constexpr int kGreatRowsBarrier = 8;

}  // namespace flash_dmattn
