// Prepares a pass of a call with sequences. One block of threads lists the work tiles: blocks of queries, or of keys, of
// all sequences, longest walk first. The other blocks write the rows that no sequence has. Both are one kernel, because
// the host takes some 4 us for a launch (docs/notes/sequences.md).
#include <algorithm>

#include "../kernel_launch.h"
#include "launch.h"
#include "sequence.h"

namespace flash_dmattn {
namespace {

constexpr int kThreads = 1024, kBuckets = kThreads;

// The sum of the values of all threads before this one, and of all.
__device__ __forceinline__ int sum_before(int value, int (&warp_sums)[32], int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto scan_warp = [&](int sum) {
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, distance);
      if (lane >= distance) sum += other;
    }
    return sum;
  };
  const int with_own = scan_warp(value);
  __syncthreads();  // the sums of the call before have been read
  if (lane == 31) warp_sums[warp] = with_own;
  __syncthreads();
  const int up_to = scan_warp(warp_sums[lane]);
  total = __shfl_sync(0xffffffffu, up_to, 31);
  const int before_warp = __shfl_sync(0xffffffffu, up_to, (warp + 31) % 32);
  return (warp == 0 ? 0 : before_warp) + with_own - value;
}

// How many tiles of the other side a block of one side walks.
__device__ __forceinline__ int count_steps(const Sequence& of, bool by_keys, int rows, int block) {
  const int begin = block * rows;
  int first, last;
  if (by_keys) {
    first = max(begin - of.high, 0);
    last = min(min(begin + rows, of.seqlen_k) - 1 - of.low, of.seqlen_q - 1);
  } else {
    first = max(begin + of.low, 0);
    last = min(min(begin + rows, of.seqlen_q) - 1 + of.high, of.seqlen_k - 1);
  }
  return last < first ? 0 : last / kTile + 1 - first / kTile;
}

// A prefix sum over sequences, and a counting sort of the tiles by the length of their walks. Where additions have an
// order, a tile waits for the tiles of later keys of its sequence. They have to come before it, so there is no sort then.
__device__ __forceinline__ void list_works(const ListWorksParams& p) {
  __shared__ int buckets[kBuckets], warp_sums[32];
  const int thread = threadIdx.x;
  buckets[thread] = 0;

  // The number of the first tile of each sequence.
  int total = 0;
  for (int from = 0; from < p.number; from += kThreads) {
    const int s = from + thread;
    const int4 bounds = s < p.number ? p.sequences.bounds[s] : make_int4(0, 0, 0, 0);
    int round_total;
    const int before = sum_before(((p.by_keys ? bounds.w : bounds.y) + p.rows - 1) / p.rows, warp_sums, round_total);
    if (s < p.number) p.firsts[s] = total + before;
    total += round_total;
  }
  if (p.sequence_of_tile != nullptr) {
    for (int tile = thread; tile < p.sequences.padded_tiles; tile += kThreads) p.sequence_of_tile[tile] = -1;
  }
  __syncthreads();
  if (p.sequence_of_tile != nullptr) {
    // A warp for each sequence: one may have most of the tiles.
    for (int s = thread / 32; s < p.number; s += kThreads / 32) {
      const Sequence of = load_sequence(p.sequences, s);
      const int first = first_padded_tile(of, s), tiles = (of.seqlen_q + kTile - 1) / kTile;
      for (int tile = thread % 32; tile < tiles; tile += 32) p.sequence_of_tile[first + tile] = s;
    }
  }

  // The bucket of a tile: the longest walks come first.
  const int most = ((p.by_keys ? p.sequences.most_q : p.sequences.most_k) + kTile - 1) / kTile + 1;
  const int steps_of_bucket = (most + kBuckets - 1) / kBuckets;
  const auto for_each_tile = [&](auto f) {
    for (int tile = thread; tile < total; tile += kThreads) {
      int low = 0, high = p.number - 1;  // the last sequence that starts at this tile or before it
      while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (p.firsts[middle] <= tile) {
          low = middle;
        } else {
          high = middle - 1;
        }
      }
      const Sequence of = load_sequence(p.sequences, low);
      const int block = tile - p.firsts[low];
      const int steps = count_steps(of, p.by_keys, p.rows, block) / steps_of_bucket;
      f(low, block, kBuckets - 1 - min(steps, kBuckets - 1));
    }
  };
  if (p.is_ordered) {
    for_each_tile([&](int s, int block, int) {
      const int end = s + 1 < p.number ? p.firsts[s + 1] : total;
      p.works[end - 1 - block] = make_int2(s, block);
    });
  } else {
    for_each_tile([&](int, int, int bucket) { atomicAdd(&buckets[bucket], 1); });
    __syncthreads();
    int all;
    const int start = sum_before(buckets[thread], warp_sums, all);
    buckets[thread] = start;
    __syncthreads();
    for_each_tile([&](int s, int block, int bucket) { p.works[atomicAdd(&buckets[bucket], 1)] = make_int2(s, block); });
  }
  if (thread > 0) return;
  *p.num_works = total;
  if (p.counter != nullptr) *p.counter = 0;
}

// The rows of no sequence: between two, before the first, behind the last, and unused ends of slots. A gap is shared by
// as many of the `warps` as there are for each, so that one long gap has them all.
__device__ __forceinline__ void fill_gaps(const FillGapsParams& p, int number, const int4* bounds, int warp, int warps) {
  const int lane = threadIdx.x % 32;
  const auto range_of = [&](int s, bool are_keys) {
    const int4 of = bounds[s];
    return are_keys ? make_int2(of.z, of.w) : make_int2(of.x, of.y);
  };
  const int most_gaps = number + 1, shares = max(1, warps / (most_gaps * p.tensors));
  for (int64_t at = warp; at < static_cast<int64_t>(most_gaps) * p.tensors * shares; at += warps) {
    const int share = static_cast<int>(at % shares), gap_of_tensor = static_cast<int>(at / shares);
    const int gap = gap_of_tensor / p.tensors, tensor = gap_of_tensor % p.tensors;
    const GapsOf& of = p.of[tensor];
    int begin = 0, end = of.rows;
    int64_t entry = 0;
    if (of.packs_rows) {
      if (gap > 0) {
        const int2 before = range_of(gap - 1, of.are_keys);
        begin = before.x + before.y;
      }
      if (gap < number) end = range_of(gap, of.are_keys).x;
    } else {
      if (gap == number) continue;  // a gap for each slot
      begin = range_of(gap, of.are_keys).y;
      entry = gap;
    }
    const int64_t chunks = static_cast<int64_t>(end - begin) * of.chunks;
    uint4* const to = static_cast<uint4*>(of.x) + (entry * of.rows + begin) * of.chunks;
    for (int64_t chunk = share * 32 + lane; chunk < chunks; chunk += shares * 32) to[chunk] = make_uint4(0, 0, 0, 0);
    if (p.lse == nullptr || tensor > 0) continue;
    for (int head = 0; head < p.num_heads; ++head) {
      const int64_t row = (entry * p.num_heads + head) * of.rows;
      for (int i = begin + share * 32 + lane; i < end; i += shares * 32) {
        if (p.has_wide_lse) {
          static_cast<double*>(p.lse)[row + i] = -INFINITY;
        } else {
          static_cast<float*>(p.lse)[row + i] = -INFINITY;
        }
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads) prepare_kernel(const __grid_constant__ PrepareParams p) {
  griddep_wait();
  if (blockIdx.x == 0) {
    list_works(p.list);
  } else {
    constexpr int kWarps = kThreads / 32;
    fill_gaps(p.gaps, p.list.number, p.list.sequences.bounds, (blockIdx.x - 1) * kWarps + threadIdx.x / 32,
              (gridDim.x - 1) * kWarps);
  }
}

}  // namespace

cudaError_t launch_prepare(const PrepareParams& params, int num_sms, cudaStream_t stream) {
  const int blocks = params.gaps.tensors == 0 ? 1 : std::max(num_sms, 2);
  return KernelLaunch(blocks, kThreads, stream).run(prepare_kernel, params);
}

}  // namespace flash_dmattn
