// Accumulator fragments of wgmma: which elements a thread holds, and exchanges within a quad, the four threads of a
// row.
//
// Lane n of a warp with 16 rows holds rows n / 4 and n / 4 + 8, and columns 2 (n % 4) and 2 (n % 4) + 1 of every 8:
// element 4 c + 2 r + e is row n / 4 + 8 r, column 8 c + 2 (n % 4) + e.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace flash_dmattn {

constexpr float kLog2e = 1.4426950408889634f;

__device__ __forceinline__ uint32_t pack(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ uint32_t pack(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ float2 unpack(uint32_t pair, __nv_bfloat16) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
__device__ __forceinline__ float2 unpack(uint32_t pair, __half) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}

// Masks the scores of the thread's row r but for columns `from` to `to`, counted from the thread's first.
template <int kCount>
__device__ __forceinline__ void keep_columns(float (&scores)[kCount], int r, int from, int to) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const int at = i / 2 * 8 + i % 2;
    float& score = scores[4 * (i / 2) + 2 * r + i % 2];
    score = at >= from && at <= to ? score : -INFINITY;
  }
}

// Maximum and sum over a quad.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Transposes 4 x 4 words: word k of lane l of a quad becomes word l of lane k.
__device__ __forceinline__ void quad_transpose(uint32_t& w0, uint32_t& w1, uint32_t& w2, uint32_t& w3, int lane) {
  const bool odd = lane & 1, high = lane & 2;
  auto swap = [](uint32_t& low, uint32_t& up, bool sends_low, int distance) {
    const uint32_t received = __shfl_xor_sync(0xffffffffu, sends_low ? low : up, distance);
    (sends_low ? low : up) = received;
  };
  swap(w0, w1, odd, 1);
  swap(w2, w3, odd, 1);
  swap(w0, w2, high, 2);
  swap(w1, w3, high, 2);
}

// Stores the thread's row r of a fragment of kCount elements in 16 bits, 16 bytes at a time. `pack_pair` converts
// elements i and i + 1. Columns from `columns` on are left out, and the whole row where it does not exist. The forward
// and the shared_dbias kernel have stores of their own, for which ptxas spills less.
template <int kCount, class Element, class F>
__device__ __forceinline__ void store_row(Element* row, int r, bool exists, int columns, int lane, F pack_pair) {
#pragma unroll
  for (int c = 0; c < kCount / 16; ++c) {
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) words[w] = pack_pair(4 * (4 * c + w) + 2 * r);
    quad_transpose(words[0], words[1], words[2], words[3], lane);
    const int column = 8 * (4 * c + lane % 4);
    if (exists && column < columns) {
      *reinterpret_cast<uint4*>(row + column) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

}  // namespace flash_dmattn
