// Split-KV: combines the results of the blocks that share the keys of a work tile.
//
// Warps own rows, so each warp combines its own: it writes its partial result to device memory and increments a
// counter. The warp that finds all others done reads all partial results, in the order of their keys, and combines
// them. So the result does not depend on which one is last.
//
// Sources: Flash-Decoding (https://pytorch.org/blog/flash-decoding); the last one to arrive combines, as in stream-K
// (arXiv:2301.03598).
#pragma once

#include "../../device/fragments.h"
#include "../../device/ptx.h"
#include "traits.h"

namespace flash_dmattn {

// The largest score of each of a thread's two rows so far, among the scores of the thread or of the row; NaN if one is.
// Kernels without kHasMaxScores lack the member, because it would change the order of their code.
template <bool kHasMaxScores>
struct LargestScores {};
template <>
struct LargestScores<true> {
  float largest[2] = {-INFINITY, -INFINITY};
};

// Layout of a split, in fours of floats per thread: first the maxima and sums of its two rows, then its elements of
// out, last its largest scores of both in kernels with kHasMaxScores. The maximum of a row without a key is -inf.
template <class Traits>
constexpr int kSplitWarps = 4 * Traits::kConsumers;
template <class Traits>
constexpr int kSplitFloats = (1 + Traits::kDv / 8 + (Traits::kHasMaxScores ? 1 : 0)) * 4 * 32 * kSplitWarps<Traits>;

// Takes out, row_max and row_sum of the split, and `row`, the first of the thread's two rows. The threads of a row pass one
// row_max, -inf if the row has no key so far, and each its share of row_sum and largest. Returns true in the warp that has
// combined all splits of the work tile; false in the others, and in warps without rows.
template <class Traits>
__device__ __forceinline__ bool combine_splits(const ForwardParams& p, int split, int row,
                                               float (&out)[Traits::kDv / 2], float (&row_max)[2],
                                               float (&row_sum)[2],
                                               LargestScores<Traits::kHasMaxScores>& scores) {
  constexpr int kFours = Traits::kDv / 8, kThreads = 32 * kSplitWarps<Traits>, kLargest = (1 + kFours) * kThreads * 4;
  const int thread = threadIdx.x - 128, lane = threadIdx.x % 32;
  if (__shfl_sync(0xffffffffu, row, 0) >= p.seqlen_q) return false;
  const bool exists = row < p.seqlen_q;  // row + 8 may not: then what it leaves is not read as a result

  const int tile = split / p.num_splits;
  float* const results = p.split_results + static_cast<int64_t>(tile) * p.num_splits * kSplitFloats<Traits>;
  if (exists) {
    float* const own = results + static_cast<int64_t>(split - tile * p.num_splits) * kSplitFloats<Traits> + thread * 4;
    *reinterpret_cast<float4*>(own) = make_float4(row_max[0], row_max[1], row_sum[0], row_sum[1]);
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      *reinterpret_cast<float4*>(own + (1 + i) * kThreads * 4) =
          make_float4(out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3]);
    }
    if constexpr (Traits::kHasMaxScores) {
      *reinterpret_cast<float2*>(own + kLargest) = make_float2(scores.largest[0], scores.largest[1]);
    }
  }
  __syncwarp();
  int arrived = 0;
  if (lane == 0) arrived = atom_add_acq_rel(p.split_arrivals + tile * kSplitWarps<Traits> + thread / 32, 1);
  __syncwarp();  // what follows the atomic in lane 0 follows it in all lanes
  arrived = __shfl_sync(0xffffffffu, arrived, 0);
  if (arrived != p.num_splits - 1) return false;

  // Threads without a row read the results of the warp's first row, so that the warp stays converged.
  const float* const first = results + (exists ? thread : thread - lane + lane % 4) * 4;
  const float scale = p.scale * kLog2e;
  row_max[0] = row_max[1] = -INFINITY;
#pragma unroll 4
  for (int i = 0; i < p.num_splits; ++i) {
    const float2 top = *reinterpret_cast<const float2*>(first + static_cast<int64_t>(i) * kSplitFloats<Traits>);
    row_max[0] = fmaxf(row_max[0], top.x);
    row_max[1] = fmaxf(row_max[1], top.y);
  }
  if constexpr (Traits::kHasMaxScores) {
    scores = {};
#pragma unroll 1
    for (int i = 0; i < p.num_splits; ++i) {
      const float* const from = first + static_cast<int64_t>(i) * kSplitFloats<Traits> + kLargest;
      const float2 top = *reinterpret_cast<const float2*>(from);
      scores.largest[0] = max_or_nan(scores.largest[0], top.x);
      scores.largest[1] = max_or_nan(scores.largest[1], top.y);
    }
  }
  row_sum[0] = row_sum[1] = 0.0f;
#pragma unroll
  for (int i = 0; i < 4 * kFours; ++i) out[i] = 0.0f;
#pragma unroll 1
  for (int i = 0; i < p.num_splits; ++i) {
    const float* from = first + static_cast<int64_t>(i) * kSplitFloats<Traits>;
    const float4 sums = *reinterpret_cast<const float4*>(from);
    // A split without an allowed key for the row has no maximum, and undefined values in out if it has no key block at
    // all.
    const float factor[2] = {sums.x == -INFINITY ? 0.0f : exp2_approx((sums.x - row_max[0]) * scale),
                             sums.y == -INFINITY ? 0.0f : exp2_approx((sums.y - row_max[1]) * scale)};
    row_sum[0] = fmaf(sums.z, factor[0], row_sum[0]);
    row_sum[1] = fmaf(sums.w, factor[1], row_sum[1]);
#pragma unroll
    for (int c = 0; c < kFours; ++c) {
      const float4 four = *reinterpret_cast<const float4*>(from + (1 + c) * kThreads * 4);
      const float values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float row_factor = factor[e / 2];
        out[4 * c + e] = row_factor == 0.0f ? out[4 * c + e] : fmaf(values[e], row_factor, out[4 * c + e]);
      }
    }
  }
  return true;
}

}  // namespace flash_dmattn
