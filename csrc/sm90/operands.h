// Mask and bias of a work tile: where they lie, and plain loads of a bias. Also lse of rows whose bias may be great.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../device/fragments.h"
#include "sequences/sequence.h"

namespace flash_dmattn {

// The unit of log_sum in join_lse.
__device__ __forceinline__ double log_sum_unit(float max) {
  return fabsf(max) > 0x1p31f ? fabsf(max) * 0x1p-31 : 1.0;
}

// lse of a row, from its maximum and the log of its sum. A float cannot hold both next to a bias of -1e9: p would not be
// normalised in the backward pass. A double does, up to maxima of 2^31. The steps of floats beyond are greater than any
// log of a sum, which goes into the bits below them: rounded to a float, lse is the maximum.
__device__ __forceinline__ double join_lse(float max, float log_sum) {
  return fabsf(max) == INFINITY ? max + log_sum : max + log_sum * log_sum_unit(max);
}

// The same in two floats, whose difference from a score is right: (score - high) - low.
struct SplitLse {
  float high, low;
};

__device__ __forceinline__ SplitLse split_lse(double lse) {
  const float high = static_cast<float>(lse);
  if (fabsf(high) == INFINITY) return {high, 0.0f};
  double low = lse - high;
  if (fabsf(high) > 0x1p31f) low /= log_sum_unit(high);  // a hundred instructions, which the unit 1 does not need
  return {high, static_cast<float>(low)};
}

// fp32 has steps of 2^-14 and more for an lse above this, by which p would be wrong.
constexpr float kGreatLse = 512.0f;

// The exponent of p, in base 2, where lse is great: x is high and y low of SplitLse, the latter in base 2. The score is
// rounded as in the forward pass. In case the products differ in their last bits, p is at most 1. NaN stays NaN.
__device__ __forceinline__ float great_exponent(float product, float factor, float bias, float2 lse) {
  const float exponent = fmaf(fmaf(product, factor, bias) - lse.x, kLog2e, -lse.y);
  return exponent > 0.0f ? 0.0f : exponent;
}

// A head, for functions that take a work tile.
struct HeadAt {
  int batch, head;
};

// The index of the work tile's mask, counted over batch entries and heads.
template <class Work>
__device__ __forceinline__ int64_t mask_of(const MaskHeads& of, const Work& work) {
  return static_cast<int64_t>(of.has_batch ? work.batch : 0) * of.mask_heads + work.head / of.heads_per_mask;
}

// The list of line `line` of a mask, a row of tiles or a column (mask/list.cu): the numbers of full and of partial
// tiles, then the tiles. A mask has `lines` lines of `length` tiles.
template <class Entry>
__device__ __forceinline__ Entry* list_of(Entry* lists, int64_t mask, int lines, int line, int length) {
  return lists + (mask * lines + line) * (2 + length);
}

// For scores whose rows are queries: bits of a thread's rows of a packed mask, kWords words each. With one row for all
// queries both rows of the thread read it. kIsConstant: no kernel writes masks while this one runs, so __ldg reads them.
template <int kRows, int kWords, bool kIsConstant>
struct RowBits {
  uint32_t words[kRows][kWords];

  // bits: of row r of the thread and the first of the keys.
  __device__ __forceinline__ void load(int r, const int32_t* bits) {
    if constexpr (kWords == 4) {
      const int4 four = read(reinterpret_cast<const int4*>(bits));
      words[r][0] = four.x, words[r][1] = four.y, words[r][2] = four.z, words[r][3] = four.w;
    } else {
      const int2 two = read(reinterpret_cast<const int2*>(bits));
      words[r][0] = two.x, words[r][1] = two.y;
    }
  }

  template <class T>
  static __device__ __forceinline__ T read(const T* from) {
    if constexpr (kIsConstant) {
      return __ldg(from);
    } else {
      return *from;
    }
  }

  __device__ __forceinline__ void apply(float (&scores)[16 * kWords]) const {
    const int column = 2 * (threadIdx.x % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        // The thread's keys are two neighbours in each 8 of the word. The product moves their bits to bits 24 to 31,
        // which ptxas moves to predicates together; no two partial products meet.
        const uint32_t bits = (words[r % kRows][w] >> column & 0x03030303u) * 0x01041040u;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float& score = scores[4 * (4 * w + i / 2) + 2 * r + i % 2];
          score = bits & 1u << (24 + i) ? score : -INFINITY;
        }
      }
    }
  }
};

// The same of an interval mask: the rows of a warp, of 16, that see the keys of a block
// that needs masking. For two neighbouring keys 16 bits each; pair `lane + 32 i` of the block is in `pairs[i]`.
template <int kBlockN>
struct KeyRows {
  uint32_t pairs[kBlockN / 64];

  // bounds: for the keys from the block's first on; first_row: the first of the warp.
  __device__ __forceinline__ void load(const int2* bounds, int first_row) {
    const auto rows_of = [&](int start, int stop) {
      return (1u << min(max(stop - first_row, 0), 16)) - (1u << min(max(start - first_row, 0), 16));
    };
#pragma unroll
    for (int i = 0; i < kBlockN / 64; ++i) {
      // By __ldg: masks come from kernels that never let the next one start early.
      const int4 two = __ldg(reinterpret_cast<const int4*>(bounds) + threadIdx.x % 32 + 32 * i);
      pairs[i] = rows_of(two.x, two.y) | rows_of(two.z, two.w) << 16;
    }
  }

  __device__ __forceinline__ void apply(float (&scores)[kBlockN / 2]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < kBlockN / 16; ++t) {
      // In each of two times 8 keys the thread has two neighbours. Its rows are lane / 4 and the row 8 further on.
      // All their bits meet in one byte, as in RowBits.
      uint32_t two[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int pair = 4 * (2 * t + e);
        two[e] = __shfl_sync(0xffffffffu, pairs[pair / 32], pair % 32 + lane % 4) >> lane / 4;
      }
      const uint32_t bits = ((two[0] & 0x01010101u) | (two[1] << 1 & 0x02020202u)) * 0x01041040u;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& score = scores[4 * (2 * t + i % 2) + 2 * (i / 2 % 2) + i / 4];
        score = bits & 1u << (24 + i) ? score : -INFINITY;
      }
    }
  }
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// An element of an array, in fp32.
__device__ __forceinline__ float load_float(const void* values, BiasDtype dtype, int index) {
  if (dtype == BiasDtype::kFloat32) return static_cast<const float*>(values)[index];
  if (dtype == BiasDtype::kFloat16) return to_float(static_cast<const __half*>(values)[index]);
  return to_float(static_cast<const __nv_bfloat16*>(values)[index]);
}

// For a bias that is not loaded by TMA: calls `use` with a function that returns its value at (query, key), in fp32.
template <class Params, class Work, class F>
__device__ __forceinline__ void with_bias(const Params& p, const Work& work, F use) {
  const BiasValues& bias = p.bias_values;
  const int64_t start = (bias.has_batch ? work.batch : 0) * bias.stride_b +
                        work.head / bias.heads_per_bias * bias.stride_h + first_bias_of(p, work);
  auto with = [&](auto* values) {
    values += start;
    use([=](int query, int key) { return to_float(values[query * bias.stride_q + key * bias.stride_k]); });
  };
  if (bias.dtype == BiasDtype::kFloat32) {
    with(static_cast<const float*>(bias.data));
  } else if (bias.dtype == BiasDtype::kFloat16) {
    with(static_cast<const __half*>(bias.data));
  } else {
    with(static_cast<const __nv_bfloat16*>(bias.data));
  }
}

}  // namespace flash_dmattn
