// Causal top-k over one score per key, as intervals: what each key is kept for, and a code for its place.
//
// A prefix keeps its k best keys, and a better key that comes never leaves, so a key is kept from its own position until
// k better ones have come: its stop. Keys are cut into chunks. The threshold of a chunk is the k-th best of all keys up
// to its end; what is kept before the chunk and falls below that threshold, or comes in the chunk and does, stops in the
// chunk. Those are at most twice as many keys as the chunk has, so each is compared with all of the chunk.
//
// Long rows are cut into segments too. What a prefix of whole segments does not keep nobody keeps later, so a chunk
// reads the survivors of the segments before its own, and what came since.
//
// Keys compare by score, then the earlier one is better: both fit 64 bits, the position negated in the lower half.
#include "../kernel_launch.h"
#include "mask.h"

namespace flash_dmattn {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits;  // of a score; four of them
constexpr int kAtOnce = 4;                                 // loads of a thread that are under way together

// Scores in an order of unsigned integers.
__device__ __forceinline__ uint32_t ordered(int32_t key) { return static_cast<uint32_t>(key) ^ 0x80000000u; }
__device__ __forceinline__ uint64_t ranked(int32_t key, int position) {
  return static_cast<uint64_t>(ordered(key)) << 32 | ~static_cast<uint32_t>(position);
}

// The sum of `count` over the threads after this one, and in `total` that over all.
__device__ __forceinline__ int count_after(int count, int (&of_warps)[kWarps], int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int upto = count;  // over this lane and those before
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, upto, distance);
    if (lane >= distance) upto += other;
  }
  __syncthreads();  // the array may still be read for the call before
  if (lane == 31) of_warps[warp] = upto;
  __syncthreads();
  int before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    before += w < warp ? of_warps[w] : 0;
    total += of_warps[w];
  }
  return total - before - upto;
}

// The keys of a prefix that may be among its k best: survivors of the segments before, and all keys from `first` on.
struct Prefix {
  const int32_t* keys;  // of the head
  const int32_t* survivors;
  int num_survivors, first, count;

  __device__ __forceinline__ int position(int i) const {
    return i < num_survivors ? survivors[i] : first + i - num_survivors;
  }
};

// The keys of a head before `end`, which lies in the segment of position `inside`, or right behind it.
__device__ __forceinline__ Prefix prefix_of(const TopkParams& p, int64_t head, int inside, int end) {
  const int segment = inside / p.segment_keys, first = segment * p.segment_keys;
  const int survivors = segment == 0 ? 0 : p.k;
  return {p.keys + head * p.seqlen_k, p.survivors + (head * p.segments + segment) * p.k, survivors, first,
          survivors + end - first};
}

// Calls take(key, position) for every key of a prefix.
template <class Take>
__device__ __forceinline__ void for_each(const Prefix& prefix, const Take& take) {
  for (int start = threadIdx.x; start < prefix.count; start += kAtOnce * kThreads) {
    int32_t key[kAtOnce];
    int position[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int i = start + u * kThreads;
      if (i < prefix.count) key[u] = prefix.keys[position[u] = prefix.position(i)];
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (start + u * kThreads < prefix.count) take(key[u], position[u]);
    }
  }
}

struct SelectShared {
  int counts[kDigits * 32];  // a counter of each digit for each lane: lanes neither collide nor share a bank
  int of_warps[kWarps];
  uint32_t digit;
  int left;
  uint64_t threshold;
};

// The rank of the k-th best key of a prefix, which has as many. Its score is found digit by digit, by counting the keys
// that share the digits found so far.
__device__ __forceinline__ uint64_t select(const Prefix& prefix, int k, SelectShared& shared) {
  uint32_t found = 0;  // the digits found
  int left = k;        // which of the keys that share them, from the greatest
#pragma unroll 1
  for (int shift = 32 - kDigitBits; shift >= 0; shift -= kDigitBits) {
    for (int i = threadIdx.x; i < kDigits * 32; i += kThreads) shared.counts[i] = 0;
    __syncthreads();
    for_each(prefix, [&](int32_t key, int) {
      const uint32_t digits = ordered(key) >> shift;
      if (digits >> kDigitBits == found) atomicAdd(&shared.counts[digits % kDigits * 32 + threadIdx.x % 32], 1);
    });
    __syncthreads();
    // Four threads share the counters of a digit, turned so that those of a warp lie in different banks.
    const int digit = threadIdx.x / 4, quarter = threadIdx.x % 4;
    int count = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) count += shared.counts[digit * 32 + quarter * 8 + (i + digit) % 8];
    count += __shfl_xor_sync(0xffffffffu, count, 1);
    count += __shfl_xor_sync(0xffffffffu, count, 2);
    if (quarter != 0) count = 0;
    int total;
    const int greater = count_after(count, shared.of_warps, total);
    if (greater < left && greater + count >= left) {
      shared.digit = digit;
      shared.left = left - greater;
    }
    __syncthreads();
    found = found << kDigitBits | shared.digit;
    left = shared.left;
    __syncthreads();
  }
  // Of the keys with that score the earliest `left` are kept.
#pragma unroll 1
  for (int start = 0;; start += kThreads) {
    const int i = start + threadIdx.x, position = i < prefix.count ? prefix.position(i) : 0;
    const bool is_equal = i < prefix.count && ordered(prefix.keys[position]) == found;
    int total;
    const int after = count_after(is_equal, shared.of_warps, total);
    if (is_equal && total - after == left) shared.threshold = ranked(prefix.keys[position], position);
    if (total >= left) break;  // all threads alike
    left -= total;
  }
  __syncthreads();
  return shared.threshold;
}

// A block finds what survives a prefix of whole segments, in the order of positions.
__global__ void __launch_bounds__(kThreads) topk_survivors_kernel(const __grid_constant__ TopkParams p) {
  griddep_wait();
  __shared__ SelectShared shared;
  const int64_t head = blockIdx.x / (p.segments - 1);
  const int segment = static_cast<int>(blockIdx.x - head * (p.segments - 1)) + 1;
  const Prefix prefix{p.keys + head * p.seqlen_k, nullptr, 0, 0, segment * p.segment_keys};
  const uint64_t threshold = select(prefix, p.k, shared);
  int32_t* survivors = p.survivors + (head * p.segments + segment) * p.k;
  int before = 0;
#pragma unroll 1
  for (int start = 0; start < prefix.count; start += kThreads) {
    const int position = start + threadIdx.x;
    const bool survives = position < prefix.count && ranked(prefix.keys[position], position) >= threshold;
    int total;
    const int after = count_after(survives, shared.of_warps, total);
    if (survives) survivors[before + total - after - 1] = position;
    before += total;
  }
}

// A block finds the threshold of a chunk: the least ranked key that a prefix up to its end keeps, 0 where it keeps all.
__global__ void __launch_bounds__(kThreads) topk_thresholds_kernel(const __grid_constant__ TopkParams p) {
  griddep_wait();
  __shared__ SelectShared shared;
  const int64_t head = blockIdx.x / p.chunks;
  const int chunk = static_cast<int>(blockIdx.x - head * p.chunks);
  const int first = chunk * p.chunk_keys, end = min(first + p.chunk_keys, p.seqlen_k);
  for (int j = first + threadIdx.x; j < end; j += kThreads) p.stops[head * p.seqlen_k + j] = p.seqlen_k;
  uint64_t threshold = 0;
  if (end >= p.k) threshold = select(prefix_of(p, head, first, end), p.k, shared);
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
  for_each(prefix_of(p, head, first, first), [&](int32_t key, int position) {
    const uint64_t of_key = ranked(key, position);
    if (of_key >= before && of_key < after) leaving[atomicAdd(&num_leaving, 1)] = of_key;
  });
  __syncthreads();
  const int leave = num_leaving, free = max(p.k - first, 0);
  for (int i = threadIdx.x; i < leave + count; i += kThreads) {
    const uint64_t of_key = i < leave ? leaving[i] : coming[i - leave];
    if (of_key >= after) continue;
    int wanted = free + (i < leave);  // better keys that have to come
    for (int other = 0; other < leave; ++other) wanted += leaving[other] < of_key;
    int at = 0;
    if (wanted > 0) {
      for (;; ++at) {
        wanted -= coming[at] > of_key;
        if (wanted == 0) break;
      }
    }
    const int position = static_cast<int>(~static_cast<uint32_t>(of_key));
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
    error = KernelLaunch(heads * (params.segments - 1), kThreads, stream).run(topk_survivors_kernel, params);
    if (error != cudaSuccess) return error;
  }
  error = KernelLaunch(heads * params.chunks, kThreads, stream).run(topk_thresholds_kernel, params);
  if (error != cudaSuccess) return error;
  error = KernelLaunch(heads * params.chunks, kThreads, stream).run(topk_stops_kernel, params);
  if (error != cudaSuccess) return error;
  return KernelLaunch(blocks_for(params.total), kThreads, stream).run(topk_intervals_kernel, params);
}

cudaError_t launch_key_codes(const KeyCodesParams& params, cudaStream_t stream) {
  return KernelLaunch(blocks_for(params.total), kThreads, stream).run(key_codes_kernel, params);
}

}  // namespace flash_dmattn
