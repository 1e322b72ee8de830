// The work tiles of a call with sequences: blocks of queries, or of keys, of all sequences, longest walk first.
// One block of threads: a prefix sum over sequences, and a counting sort of the tiles by the length of their walks.
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

__global__ void __launch_bounds__(kThreads) list_works_kernel(const __grid_constant__ ListWorksParams p) {
  __shared__ int buckets[kBuckets], warp_sums[32];
  griddep_wait();
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
  for_each_tile([&](int, int, int bucket) { atomicAdd(&buckets[bucket], 1); });
  __syncthreads();
  int all;
  const int start = sum_before(buckets[thread], warp_sums, all);
  buckets[thread] = start;
  __syncthreads();
  for_each_tile([&](int s, int block, int bucket) { p.works[atomicAdd(&buckets[bucket], 1)] = make_int2(s, block); });
  if (thread > 0) return;
  *p.num_works = total;
  if (p.counter != nullptr) *p.counter = 0;
}

}  // namespace

cudaError_t launch_list_works(const ListWorksParams& params, cudaStream_t stream) {
  return KernelLaunch(1, kThreads, stream).run(list_works_kernel, params);
}

}  // namespace flash_dmattn
