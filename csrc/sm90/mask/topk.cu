// Causal top-k over one score per key, as intervals: what each key is kept for, and a code for its place.
//
// A prefix keeps its k best keys, and a better key that comes never leaves, so a key is kept from its own position
// until k better ones have come: its stop. Keys are cut into chunks. The threshold of a chunk is the k-th best of all
// keys up to its end. A key stops in the chunk if it falls below that threshold, and was kept before the chunk or comes
// in it. These are at most twice as many keys as the chunk has, so each is compared with all of the chunk.
//
// Long rows are cut into segments too. A key that is not among the best of its segment, or of all segments up to its
// own, is never kept later. So a chunk reads the survivors of the segments before its own, and the keys since.
//
// Keys compare by score, then the earlier one is better: both fit 64 bits, the position negated in the lower half.
#include "../kernel_launch.h"
#include "mask.h"

namespace flash_dmattn {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;

// Scores in an order of unsigned integers.
__device__ __forceinline__ uint32_t ordered(int32_t key) { return static_cast<uint32_t>(key) ^ 0x80000000u; }
__device__ __forceinline__ uint64_t ranked(int32_t key, int position) {
  return static_cast<uint64_t>(ordered(key)) << 32 | ~static_cast<uint32_t>(position);
}

// The sum of `count` over the threads after this one, and in `total` that over all.
__device__ __forceinline__ int count_after(int count, int (&warp_sums)[kWarps], int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int upto = count;  // over this lane and those before
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, upto, distance);
    if (lane >= distance) upto += other;
  }
  __syncthreads();  // the array may still be read for the call before
  if (lane == 31) warp_sums[warp] = upto;
  __syncthreads();
  int before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    before += w < warp ? warp_sums[w] : 0;
    total += warp_sums[w];
  }
  return total - before - upto;
}

// The keys of a prefix that may be among its k best, in the order of positions: keys of a list, and then keys of a
// second list or all keys from `first` on.
struct Prefix {
  const int32_t* keys;  // of the head
  const int32_t* listed;
  const int32_t* rest;  // null for all
  int num_listed, first, count;

  __device__ __forceinline__ int position(int i) const {
    if (i < num_listed) return listed[i];
    i -= num_listed;
    return rest == nullptr ? first + i : rest[i];
  }
};

// The keys of a head before `end`, which lies in the segment of position `inside`, or right behind it.
__device__ __forceinline__ Prefix prefix_of(const TopkParams& p, int64_t head, int inside, int end) {
  const int segment = inside / p.segment_keys, first = segment * p.segment_keys;
  const int survivors = segment == 0 ? 0 : p.k;
  return {p.keys + head * p.seqlen_k, p.survivors + (head * p.segments + segment) * p.k, nullptr, survivors, first,
          survivors + end - first};
}

struct SelectShared {
  int warp_sums[2][kWarps];
  int scan[kWarps];
  unsigned long long least;
};

// The sum over all threads. `turn` alternates, so that one array is written while the other may still be read.
__device__ __forceinline__ int sum_of_block(int count, SelectShared& shared, int& turn) {
  turn ^= 1;
  const int warp_sum = __reduce_add_sync(0xffffffffu, count);
  if (threadIdx.x % 32 == 0) shared.warp_sums[turn][threadIdx.x / 32] = warp_sum;
  __syncthreads();
  return __reduce_add_sync(0xffffffffu, shared.warp_sums[turn][threadIdx.x % 32]);
}

// The rank of the k-th best key of a prefix, which has as many. Its score is found bit by bit, by counting what is not
// below a guess. A thread holds up to kHeld keys in registers, and reads the others every time.
template <int kHeld>
__device__ __forceinline__ uint64_t select(const Prefix& prefix, int k, SelectShared& shared) {
  uint32_t held[kHeld];  // 0, the lowest, past the end
#pragma unroll
  for (int u = 0; u < kHeld; ++u) {
    const int i = u * kThreads + threadIdx.x;
    held[u] = i < prefix.count ? ordered(prefix.keys[prefix.position(i)]) : 0;
  }
  const auto for_rest = [&](const auto& take) {
    for (int i = kHeld * kThreads + threadIdx.x; i < prefix.count; i += kThreads) {
      take(ordered(prefix.keys[prefix.position(i)]), i);
    }
  };
  int turn = 0;
  uint32_t score = 0;           // no fewer than k keys have it or more
  int at_least = prefix.count;  // how many do
  if (threadIdx.x == 0) shared.least = ~0ull;
  __syncthreads();
#pragma unroll 1
  for (uint32_t bit = 1u << 31; bit != 0 && at_least != k; bit >>= 1) {
    const uint32_t guess = score | bit;
    int count = 0;
#pragma unroll
    for (int u = 0; u < kHeld; ++u) count += held[u] >= guess;
    for_rest([&](uint32_t other, int) { count += other >= guess; });
    count = sum_of_block(count, shared, turn);
    if (count >= k) {
      score = guess;
      at_least = count;
    }
  }
  int end = prefix.count;  // keys with that score are kept before it
  if (at_least != k) {
    // Too many have that score itself: the earliest are kept.
    int above = 0;
#pragma unroll
    for (int u = 0; u < kHeld; ++u) above += held[u] > score;
    for_rest([&](uint32_t other, int) { above += other > score; });
    const int wanted = k - sum_of_block(above, shared, turn);
    int low = 0;  // fewer are before it
#pragma unroll 1
    while (low + 1 < end) {
      const int middle = low + (end - low) / 2;
      int count = 0;
#pragma unroll
      for (int u = 0; u < kHeld; ++u) {
        count += held[u] == score && u * kThreads + static_cast<int>(threadIdx.x) < middle;
      }
      for_rest([&](uint32_t other, int i) { count += other == score && i < middle; });
      (sum_of_block(count, shared, turn) >= wanted ? end : low) = middle;
    }
  }
  // The lowest rank that is kept.
  unsigned long long least = ~0ull;
  const auto keep = [&](uint32_t value, int i) {
    if (i >= prefix.count || value < score || (value == score && i >= end)) return;
    least = min(least, static_cast<unsigned long long>(value) << 32 | ~static_cast<uint32_t>(prefix.position(i)));
  };
#pragma unroll
  for (int u = 0; u < kHeld; ++u) keep(held[u], u * kThreads + threadIdx.x);
  for_rest(keep);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    least = min(least, __shfl_xor_sync(0xffffffffu, least, distance));
  }
  if (threadIdx.x % 32 == 0) atomicMin(&shared.least, least);
  __syncthreads();
  const uint64_t threshold = shared.least;
  __syncthreads();  // before the next one writes there
  return threshold;
}

// Writes the positions of the keys of a prefix that are not below a threshold, in their order.
__device__ __forceinline__ void write_survivors(const Prefix& prefix, uint64_t threshold, int32_t* survivors,
                                                SelectShared& shared) {
  int before = 0;
#pragma unroll 1
  for (int start = 0; start < prefix.count; start += kThreads) {
    const int i = start + threadIdx.x, position = i < prefix.count ? prefix.position(i) : 0;
    const bool survives = i < prefix.count && ranked(prefix.keys[position], position) >= threshold;
    int total;
    const int after = count_after(survives, shared.scan, total);
    if (survives) survivors[before + total - after - 1] = position;
    before += total;
  }
}

// A block finds the best of a segment, which has as many keys; of the first they are the survivors already.
__global__ void __launch_bounds__(kThreads, 1) topk_segments_kernel(const __grid_constant__ TopkParams p) {
  griddep_wait();
  __shared__ SelectShared shared;
  const int64_t head = blockIdx.x / (p.segments - 1);
  const int segment = static_cast<int>(blockIdx.x - head * (p.segments - 1)), first = segment * p.segment_keys;
  const Prefix keys{p.keys + head * p.seqlen_k, nullptr, nullptr, 0, first, p.segment_keys};
  const uint64_t threshold = select<16>(keys, p.k, shared);
  int32_t* const to = segment == 0 ? p.survivors + (head * p.segments + 1) * p.k
                                   : p.best_of_segments + (head * p.segments + segment) * p.k;
  write_survivors(keys, threshold, to, shared);
}

// A block finds what survives of all segments before each one of a head.
template <int kHeld>
__global__ void __launch_bounds__(kThreads, 1) topk_survivors_kernel(const __grid_constant__ TopkParams p) {
  griddep_wait();
  __shared__ SelectShared shared;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * p.segments;
#pragma unroll 1
  for (int segment = 1; segment + 1 < p.segments; ++segment) {
    const int32_t* const survivors = p.survivors + (first + segment) * p.k;
    const Prefix keys{p.keys + static_cast<int64_t>(blockIdx.x) * p.seqlen_k,
                      survivors,
                      p.best_of_segments + (first + segment) * p.k,
                      p.k,
                      0,
                      2 * p.k};
    const uint64_t threshold = select<kHeld>(keys, p.k, shared);
    write_survivors(keys, threshold, p.survivors + (first + segment + 1) * p.k, shared);
    __syncthreads();  // what was written is read
  }
}

// A block finds the threshold of a chunk: the least ranked key that a prefix up to its end keeps, 0 where it keeps all.
template <int kHeld>
__global__ void __launch_bounds__(kThreads, 1) topk_thresholds_kernel(const __grid_constant__ TopkParams p) {
  griddep_wait();
  __shared__ SelectShared shared;
  const int64_t head = blockIdx.x / p.chunks;
  const int chunk = static_cast<int>(blockIdx.x - head * p.chunks);
  const int first = chunk * p.chunk_keys, end = min(first + p.chunk_keys, p.seqlen_k);
  for (int j = first + threadIdx.x; j < end; j += kThreads) p.stops[head * p.seqlen_k + j] = p.seqlen_k;
  uint64_t threshold = 0;
  if (end >= p.k) threshold = select<kHeld>(prefix_of(p, head, first, end), p.k, shared);
  if (threadIdx.x == 0) p.thresholds[blockIdx.x] = threshold;
}

// A block finds the stops that lie in a chunk.
__global__ void __launch_bounds__(kThreads) topk_stops_kernel(const __grid_constant__ TopkParams p) {
  griddep_wait();
  __shared__ uint64_t leaving[kMostChunkKeys], coming[kMostChunkKeys];
  __shared__ int num_leaving;
  const int64_t head = blockIdx.x / p.chunks;
  const int chunk = static_cast<int>(blockIdx.x - head * p.chunks);
  const int first = chunk * p.chunk_keys, count = min(p.chunk_keys, p.seqlen_k - first);
  const int32_t* keys = p.keys + head * p.seqlen_k;
  const uint64_t before = chunk == 0 ? 0 : p.thresholds[blockIdx.x - 1], after = p.thresholds[blockIdx.x];
  if (after == 0) return;  // fewer than k keys so far: all stay
  if (threadIdx.x == 0) num_leaving = 0;
  for (int i = threadIdx.x; i < count; i += kThreads) coming[i] = ranked(keys[first + i], first + i);
  __syncthreads();
  const Prefix prefix = prefix_of(p, head, first, first);
#pragma unroll 4
  for (int i = threadIdx.x; i < prefix.count; i += kThreads) {
    const int position = prefix.position(i);
    const uint64_t rank = ranked(prefix.keys[position], position);
    if (rank >= before && rank < after) leaving[atomicAdd(&num_leaving, 1)] = rank;
  }
  __syncthreads();
  const int leave = num_leaving, free = max(p.k - first, 0);
  for (int i = threadIdx.x; i < leave + count; i += kThreads) {
    const uint64_t rank = i < leave ? leaving[i] : coming[i - leave];
    if (rank >= after) continue;
    int wanted = free + (i < leave);  // better keys that have to come
#pragma unroll 8
    for (int other = 0; other < leave; ++other) wanted += leaving[other] < rank;
    int at = 0;
    if (wanted > 0) {
      constexpr int kStep = 8;  // loads do not wait for the count before
      for (int better = 0; at + kStep <= count; at += kStep, wanted -= better) {
        better = 0;
#pragma unroll
        for (int u = 0; u < kStep; ++u) better += coming[at + u] > rank;
        if (better >= wanted) break;
      }
      for (;; ++at) {
        wanted -= coming[at] > rank;
        if (wanted == 0) break;
      }
    }
    const int position = static_cast<int>(~static_cast<uint32_t>(rank));
    p.stops[head * p.seqlen_k + position] = max(first + at, position);
  }
}

// The interval of each key. In rows of queries the last key stands at the last query.
__global__ void __launch_bounds__(kThreads) topk_intervals_kernel(const __grid_constant__ TopkParams p) {
  griddep_wait();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= p.total) return;
  const int position = static_cast<int>(at % p.seqlen_k), shift = p.seqlen_q - p.seqlen_k;
  const int stop = max(p.stops[at], position + min(p.local, p.seqlen_k - position));
  int2 interval = make_int2(min(max(position + shift, 0), p.seqlen_q), min(max(stop + shift, 0), p.seqlen_q));
  const bool is_dead = p.keys[at] == INT32_MIN || interval.x >= interval.y;
  if (is_dead) interval = make_int2(0, 0);
  p.start[at] = interval.x;
  p.stop[at] = interval.y;
}

// As hilbert_codes of flash_dmattn/masks/prepared/interval_order.py.
__device__ __forceinline__ uint32_t hilbert_code(uint32_t x, uint32_t y) {
  uint32_t code = 0;
#pragma unroll
  for (int bit = kCurveBits - 1; bit >= 0; --bit) {
    const uint32_t right = x >> bit & 1, upper = y >> bit & 1;
    code = code << 2 | ((3 * right) ^ upper);
    const uint32_t flip = (right & (1 - upper)) * ((1u << bit) - 1);
    x ^= flip;
    y ^= flip;
    if (upper == 0) {
      const uint32_t swapped = x;
      x = y;
      y = swapped;
    }
  }
  return code;
}

__global__ void __launch_bounds__(kThreads) key_codes_kernel(const __grid_constant__ KeyCodesParams p) {
  griddep_wait();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= p.total) return;
  const int start = p.start[at], stop = p.stop[at];
  constexpr uint32_t kDead = 1u << 2 * kCurveBits;
  const auto cut = [&](int row) {
    return static_cast<uint32_t>((static_cast<int64_t>(row) << kCurveBits) / (p.seqlen_q + 1));
  };
  const uint32_t code = start < stop ? hilbert_code(cut(start), cut(stop)) : kDead;
  const int64_t head = at / p.seqlen_k;
  p.codes[at] = code + static_cast<uint32_t>(head) * 2 * kDead;
  p.keys[at] = static_cast<int32_t>(at - head * p.seqlen_k);
}

int64_t blocks_for(int64_t total) { return (total + kThreads - 1) / kThreads; }

}  // namespace

cudaError_t launch_topk(const TopkParams& params, cudaStream_t stream) {
  const int64_t heads = params.total / params.seqlen_k;
  cudaError_t error = cudaSuccess;
  if (params.segments > 1) {
    error = KernelLaunch(heads * (params.segments - 1), kThreads, stream).run(topk_segments_kernel, params);
    if (error != cudaSuccess) return error;
  }
  if (params.segments > 2) {
    const auto kernel = params.k <= 4 * kThreads ? &topk_survivors_kernel<8> : &topk_survivors_kernel<32>;
    error = KernelLaunch(heads, kThreads, stream).run(kernel, params);
    if (error != cudaSuccess) return error;
  }
  const int longest = params.segments > 1 ? params.k + params.segment_keys : params.seqlen_k;
  const auto thresholds = longest <= 8 * kThreads    ? &topk_thresholds_kernel<8>
                          : longest <= 16 * kThreads ? &topk_thresholds_kernel<16>
                          : longest <= 20 * kThreads ? &topk_thresholds_kernel<20>
                                                     : &topk_thresholds_kernel<32>;
  error = KernelLaunch(heads * params.chunks, kThreads, stream).run(thresholds, params);
  if (error != cudaSuccess) return error;
  error = KernelLaunch(heads * params.chunks, kThreads, stream).run(topk_stops_kernel, params);
  if (error != cudaSuccess) return error;
  return KernelLaunch(blocks_for(params.total), kThreads, stream).run(topk_intervals_kernel, params);
}

cudaError_t launch_key_codes(const KeyCodesParams& params, cudaStream_t stream) {
  return KernelLaunch(blocks_for(params.total), kThreads, stream).run(key_codes_kernel, params);
}

}  // namespace flash_dmattn
