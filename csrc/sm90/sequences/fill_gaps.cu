// Writes the rows of no sequence, of up to three tensors: between two, before the first, behind the last, and unused slots.
#include <algorithm>

#include "../kernel_launch.h"
#include "launch.h"

namespace flash_dmattn {
namespace {

constexpr int kThreads = 256;
constexpr int kShares = 4;  // blocks of threads that share the rows of a gap

__global__ void __launch_bounds__(kThreads) fill_gaps_kernel(const __grid_constant__ FillGapsParams p) {
  griddep_wait();
  const int tensor = blockIdx.x % p.tensors;
  const GapsOf& of = p.of[tensor];
  const int gaps = p.number + of.packs_rows;
  const auto range_of = [&](int s) {
    const int4 bounds = p.bounds[s];
    return of.are_keys ? make_int2(bounds.z, bounds.w) : make_int2(bounds.x, bounds.y);
  };
  for (int at = blockIdx.x / p.tensors; at < gaps * kShares; at += gridDim.x / p.tensors) {
    const int gap = at / kShares, share = at % kShares;
    int begin = 0, end = of.rows;
    int64_t entry = 0;
    if (of.packs_rows) {
      if (gap > 0) begin = range_of(gap - 1).x + range_of(gap - 1).y;
      if (gap < p.number) end = range_of(gap).x;
    } else {
      begin = range_of(gap).y;
      entry = gap;
    }
    const int64_t chunks = static_cast<int64_t>(end - begin) * of.chunks;
    uint4* const to = static_cast<uint4*>(of.x) + (entry * of.rows + begin) * of.chunks;
    for (int64_t chunk = share * kThreads + threadIdx.x; chunk < chunks; chunk += kShares * kThreads) {
      to[chunk] = make_uint4(0, 0, 0, 0);
    }
    if (p.lse == nullptr || tensor > 0) continue;
    for (int head = 0; head < p.num_heads; ++head) {
      float* const row = p.lse + (entry * p.num_heads + head) * of.rows;
      for (int i = begin + share * kThreads + threadIdx.x; i < end; i += kShares * kThreads) row[i] = -INFINITY;
    }
  }
}

}  // namespace

cudaError_t launch_fill_gaps(const FillGapsParams& params, cudaStream_t stream) {
  const int64_t blocks = (static_cast<int64_t>(params.number) + 1) * kShares;
  return KernelLaunch(std::min<int64_t>(blocks, 1 << 16) * params.tensors, kThreads, stream)
      .run(fill_gaps_kernel, params);
}

}  // namespace flash_dmattn
