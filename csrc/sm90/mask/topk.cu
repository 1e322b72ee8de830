// Causal top-k over one score per key, as intervals: what each key is kept for, and a code for its place.
//
// A prefix keeps its k best keys, and a better key that comes never leaves, so a key is kept from its own position until
// k better ones have come: its stop. Keys are cut into chunks. The threshold of a chunk is the k-th best of all keys up
// to its end; what is kept before the chunk and falls below that threshold, or comes in the chunk and does, stops in the
// chunk. Those are at most twice as many keys as the chunk has, so each is compared with all of the chunk.
//
// Keys compare by score, then the earlier one is better: both fit 64 bits, the position negated in the lower half.
#include "../kernel_launch.h"
#include "mask.h"

namespace flash_dmattn {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kDigitBits = 11, kDigits = 1 << kDigitBits;  // 11, 11 and 10 bits of a score

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

// A block finds the threshold of a chunk: the least ranked key that a prefix up to its end keeps, 0 where it keeps all.
// The k-th greatest score is found digit by digit, by counting those that share the digits found so far.
__global__ void __launch_bounds__(kThreads) topk_thresholds_kernel(const __grid_constant__ TopkParams p) {
  griddep_wait();
  __shared__ int counts[kDigits];
  __shared__ int of_warps[kWarps];
  __shared__ uint32_t found_digit;
  __shared__ int found_left;
  const int64_t head = blockIdx.x / p.chunks;
  const int chunk = static_cast<int>(blockIdx.x - head * p.chunks);
  const int first = chunk * p.chunk_keys, end = min(first + p.chunk_keys, p.seqlen_k);
  const int32_t* keys = p.keys + head * p.seqlen_k;
  for (int j = first + threadIdx.x; j < end; j += kThreads) p.stops[head * p.seqlen_k + j] = p.seqlen_k;
  if (end < p.k) {
    if (threadIdx.x == 0) p.thresholds[blockIdx.x] = 0;
    return;
  }
  uint32_t prefix = 0;  // the digits found
  int left = p.k;       // which of the keys that share them, from the greatest
  int shift = 32;
#pragma unroll 1
  for (const int bits : {11, 11, 10}) {
    for (int d = threadIdx.x; d < kDigits; d += kThreads) counts[d] = 0;
    __syncthreads();
    const int above = shift;
    shift -= bits;
    for (int j = threadIdx.x; j < end; j += kThreads) {
      const uint32_t score = ordered(keys[j]);
      if (above == 32 || score >> above == prefix) atomicAdd(&counts[score >> shift & ((1u << bits) - 1)], 1);
    }
    __syncthreads();
    // A thread has two digits, the greater one second.
    const int low = counts[2 * threadIdx.x], high = counts[2 * threadIdx.x + 1];
    int total;
    const int greater = count_after(low + high, of_warps, total);
    if (greater < left && greater + high >= left) {
      found_digit = 2 * threadIdx.x + 1;
      found_left = left - greater;
    } else if (greater + high < left && greater + high + low >= left) {
      found_digit = 2 * threadIdx.x;
      found_left = left - greater - high;
    }
    __syncthreads();
    prefix = prefix << bits | found_digit;
    left = found_left;
    __syncthreads();
  }
  // Of the keys with that score the earliest `left` are kept.
#pragma unroll 1
  for (int start = 0; start < end; start += kThreads) {
    const int j = start + threadIdx.x;
    const bool is_equal = j < end && ordered(keys[j]) == prefix;
    int total;
    const int after = count_after(is_equal, of_warps, total);
    const int which = total - after;  // this one and those before
    if (is_equal && which == left) p.thresholds[blockIdx.x] = ranked(keys[j], j);
    if (total >= left) return;  // all threads alike
    left -= total;
  }
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
  for (int j = threadIdx.x; j < first; j += kThreads) {
    const uint64_t of_key = ranked(keys[j], j);
    if (of_key >= before && of_key < after) leaving[atomicAdd(&num_leaving, 1)] = of_key;
  }
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
  p.codes[at] = static_cast<int32_t>(code + static_cast<uint32_t>(at / p.seqlen_k) * 2 * kDead);
}

int64_t blocks_for(int64_t total) { return (total + kThreads - 1) / kThreads; }

}  // namespace

cudaError_t launch_topk(const TopkParams& params, cudaStream_t stream) {
  const int64_t heads = params.total / params.seqlen_k;
  cudaError_t error = KernelLaunch(heads * params.chunks, kThreads, stream).run(topk_thresholds_kernel, params);
  if (error != cudaSuccess) return error;
  error = KernelLaunch(heads * params.chunks, kThreads, stream).run(topk_stops_kernel, params);
  if (error != cudaSuccess) return error;
  return KernelLaunch(blocks_for(params.total), kThreads, stream).run(topk_intervals_kernel, params);
}

cudaError_t launch_key_codes(const KeyCodesParams& params, cudaStream_t stream) {
  return KernelLaunch(blocks_for(params.total), kThreads, stream).run(key_codes_kernel, params);
}

}  // namespace flash_dmattn
