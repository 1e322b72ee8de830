// The gradient of a bias by distance: adds the sums along diagonals and the sums of flat tiles in one order, and rounds
// once.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../kernel_launch.h"
#include "launch.h"

namespace flash_dmattn {
namespace {

constexpr int kThreads = 256;
static_assert(kThreads == kDiagonalFloats);

// A thread has one value. Places beyond the values are added by all threads of the block that has the value.
struct DiagonalSums {
  const AddDiagonalsParams& p;
  const int owner;

  // The place of the first distance of a diagonal.
  __device__ int first_place_of(int diagonal) const { return p.distances.origin + diagonal * kTile - (kTile - 1); }

  // The sum of all chunks for the distance y of a diagonal.
  __device__ float at(int diagonal, int y) const {
    const int64_t rows = static_cast<int64_t>(p.owners) * p.diagonals;
    const float* from =
        p.slots + (static_cast<int64_t>(owner) * p.diagonals + diagonal - p.first_diagonal) * kDiagonalFloats + y;
    float sum = 0.0f;
#pragma unroll 4
    for (int chunk = 0; chunk < p.chunks; ++chunk) sum += from[chunk * rows * kDiagonalFloats];
    return sum;
  }

  // The sum for one place, which at most two diagonals have.
  __device__ float of_place(int place) const {
    const int last = p.first_diagonal + p.diagonals - 1;
    const int above = place - p.distances.origin + kTile - 1;  // distances from diagonal 0's first one on
    const int highest = above >= 0 ? above / kTile : -1 - (-1 - above) / kTile;
    float sum = 0.0f;
    for (int diagonal = max(highest - 1, p.first_diagonal); diagonal <= min(highest, last); ++diagonal) {
      const int y = place - first_place_of(diagonal);
      if (y < kDiagonalFloats - 1) sum += at(diagonal, y);
    }
    return sum;
  }

  // The thread's share of the sum before the values (side 0) or behind them.
  __device__ float beyond(int side) const {
    const int y = threadIdx.x;
    float sum = 0.0f;
    for (int i = 0; i < p.diagonals; ++i) {
      const int diagonal = side == 0 ? p.first_diagonal + i : p.first_diagonal + p.diagonals - 1 - i;
      const int first = first_place_of(diagonal), place = first + y;
      if (side == 0 ? first >= 0 : first + kDiagonalFloats - 2 < p.distances.number) break;
      const bool is_beyond = side == 0 ? place < 0 : place >= p.distances.number;
      if (is_beyond && y < kDiagonalFloats - 1) sum += at(diagonal, y);
    }
    if (p.flat_sums == nullptr) return sum;
    const int entry = owner / p.dbias_heads, first_head = (owner - entry * p.dbias_heads) * p.heads_per_dbias;
    const int entries = p.heads_summed / p.heads_per_dbias, count = p.heads_per_dbias * p.sums_of_head;
    for (int e = 0; e < entries; ++e) {
      const int64_t head = static_cast<int64_t>(entry + e) * p.num_heads + first_head;
      const float2* from = p.flat_sums + head * p.sums_of_head;
#pragma unroll 4
      for (int i = threadIdx.x; i < count; i += kThreads) sum += side == 0 ? from[i].x : from[i].y;
    }
    return sum;
  }
};

__device__ float sum_of_block(float x) {
  __shared__ float sums[kThreads];
  __syncthreads();
  sums[threadIdx.x] = x;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  __syncthreads();
  return sums[0];
}

__global__ void __launch_bounds__(kThreads) add_diagonals_kernel(const __grid_constant__ AddDiagonalsParams p) {
  griddep_wait();
  griddep_launch_dependents();
  const int blocks = (p.distances.number + kThreads - 1) / kThreads, owner = blockIdx.x / blocks;
  const int first = (blockIdx.x - owner * blocks) * kThreads, place = first + threadIdx.x;
  const int last = p.distances.number - 1;
  const DiagonalSums diagonals{p, owner};
  float sum = place <= last ? diagonals.of_place(place) : 0.0f;
  if (p.clamps) {
#pragma unroll 1
    for (int side = 0; side < 2; ++side) {
      const int end = side == 0 ? 0 : last;
      if (end < first || end >= first + kThreads) continue;
      const float all = sum_of_block(diagonals.beyond(side));
      if (place == end) sum += all;
    }
  }
  if (place > last) return;
  const int64_t to = static_cast<int64_t>(owner) * p.distances.number + place;
  if (p.dtype == BiasDtype::kFloat32) {
    static_cast<float*>(p.dvalues)[to] = sum;
  } else if (p.dtype == BiasDtype::kFloat16) {
    static_cast<__half*>(p.dvalues)[to] = __float2half(sum);
  } else {
    static_cast<__nv_bfloat16*>(p.dvalues)[to] = __float2bfloat16(sum);
  }
}

}  // namespace

cudaError_t launch_add_diagonals(const AddDiagonalsParams& params, cudaStream_t stream) {
  const int64_t blocks = (params.distances.number + kThreads - 1) / kThreads;
  return KernelLaunch(blocks * params.owners, kThreads, stream).run(add_diagonals_kernel, params);
}

}  // namespace flash_dmattn
