// The parts of a piece of work whose keys are shared by several blocks: what each leaves behind, and how the last one
// makes the piece of them.
//
// A warp has rows of its own, so warps join by themselves: each leaves its sums in device memory and counts itself
// there; the one that comes last reads those of all parts, in the order of the keys and its own among them, so that
// the result is the same whichever was the last.
//
// Source: Flash-Decoding's split keys (https://pytorch.org/blog/flash-decoding); the last one to arrive as in stream-K
// (arXiv:2301.03598).
#pragma once

#include "../../device/fragments.h"
#include "../../device/ptx.h"
#include "traits.h"

namespace flash_dmattn {

// Of a part, fours as the threads hold them: first maximum and sum of the thread's two rows, then its elements of out.
template <class Traits>
constexpr int kPartWarps = 4 * Traits::kConsumers;
template <class Traits>
constexpr int kPartFloats = (1 + Traits::kDv / 8) * 4 * 32 * kPartWarps<Traits>;

// `row`: the first of the thread's two rows. out, row_max and row_sum are those of the part, and then, where it returns
// true, of the piece; where it returns false another warp has the rows, or there are none.
template <class Traits>
__device__ __forceinline__ bool join_parts(const ForwardParams& p, int part, int row, float (&out)[Traits::kDv / 2],
                                           float (&row_max)[2], float (&row_sum)[2]) {
  constexpr int kFours = Traits::kDv / 8, kThreads = 32 * kPartWarps<Traits>;
  const int thread = threadIdx.x - 128, lane = threadIdx.x % 32;
  if (__shfl_sync(0xffffffffu, row, 0) >= p.seqlen_q) return false;
  const bool exists = row < p.seqlen_q;

  const int piece = part / p.parts;
  float* const parts = p.part_results + static_cast<int64_t>(piece) * p.parts * kPartFloats<Traits>;
  if (exists) {
    float* const own = parts + static_cast<int64_t>(part - piece * p.parts) * kPartFloats<Traits> + thread * 4;
    *reinterpret_cast<float4*>(own) = make_float4(row_max[0], row_max[1], row_sum[0], row_sum[1]);
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      *reinterpret_cast<float4*>(own + (1 + i) * kThreads * 4) =
          make_float4(out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3]);
    }
  }
  __syncwarp();
  int arrived = 0;
  if (lane == 0) arrived = add_and_return(p.part_arrivals + piece * kPartWarps<Traits> + thread / 32, 1);
  __syncwarp();  // what follows the count for one lane follows it for all
  arrived = __shfl_sync(0xffffffffu, arrived, 0);
  if (arrived != p.parts - 1) return false;

  // Threads without a row read what those of the warp's first row have left, so that the warp stays together.
  const float* const first = parts + (exists ? thread : thread - lane + lane % 4) * 4;
  const float scale = p.scale * kLog2e;
  row_max[0] = row_max[1] = -INFINITY;
#pragma unroll 4
  for (int i = 0; i < p.parts; ++i) {
    const float2 top = *reinterpret_cast<const float2*>(first + static_cast<int64_t>(i) * kPartFloats<Traits>);
    row_max[0] = fmaxf(row_max[0], top.x);
    row_max[1] = fmaxf(row_max[1], top.y);
  }
  row_sum[0] = row_sum[1] = 0.0f;
#pragma unroll
  for (int i = 0; i < 4 * kFours; ++i) out[i] = 0.0f;
#pragma unroll 1
  for (int i = 0; i < p.parts; ++i) {
    const float* from = first + static_cast<int64_t>(i) * kPartFloats<Traits>;
    const float4 sums = *reinterpret_cast<const float4*>(from);
    // A part in which a row attends nothing has no maximum, and in out, where it has no keys at all, anything.
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
        const float of_row = factor[e / 2];
        out[4 * c + e] = of_row == 0.0f ? out[4 * c + e] : fmaf(values[e], of_row, out[4 * c + e]);
      }
    }
  }
  return true;
}

}  // namespace flash_dmattn
