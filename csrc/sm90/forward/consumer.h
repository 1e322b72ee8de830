// A consumer warpgroup: computes 64 rows of out.
#pragma once

#include <type_traits>

#include "../../device/fragments.h"
#include "../../device/philox.h"
#include "../../device/softcap.h"
#include "../bias_window.h"
#include "../float_tile.h"
#include "split_kv.h"
#include "storage.h"

namespace flash_dmattn {

template <class Traits>
struct Consumer : LargestScores<Traits::kHasMaxScores> {
  using Element = typename Traits::Element;
  using Work = WorkTile<Traits::kHasSequences>;
  static constexpr int kD = Traits::kD, kDv = Traits::kDv, kBlockN = Traits::kBlockN;
  static constexpr int kScores = kBlockN / 2, kOut = kDv / 2;  // of a thread
  static constexpr int kWords = kBlockN / kWord;
  using Window = BiasWindow<Traits::kBlockM, kBlockN>;

  const ForwardParams& p;
  ForwardStorage<Traits>& shared;
  const int group, lane, row_of_warp;  // which consumer; the first of the thread's two rows within the work tile
  const int query_stage;
  float (&out)[kOut];
  // row_max: what is subtracted from scores, the greatest of them or up to kSlack less; 0 in a row without a key so far.
  float row_max[2], row_sum[2];
  float threshold[2];  // only a score above it makes row_max grow: -inf in a row without a key so far
  bool has_negative, is_great;  // some row of the warp compares negative bits; see softmax
  // Kernels with a bias have no registers and no time for either: there each step raises row_max of a row whose threshold is
  // negative, or NaN, as it is of great rows.
  static constexpr bool kComparesNegative = Traits::kBias == Bias::kNone;

  // Offset of the thread's row of the warp's first four bias matrices, in a panel of the bias tile; or of its first two
  // values of a window.
  const uint32_t bias_offset;

  // A key block that needs masking: bits of the thread's two rows, or of an interval mask the rows of the lane's keys.
  static constexpr int kMaskRows = Traits::kHasOneMaskRow ? 1 : 2;
  // Constant: masks come from the packing kernels, which never let the next kernel start early.
  using MaskWords = std::conditional_t<Traits::kHasIntervals, KeyRows<kBlockN>, RowBits<kMaskRows, kWords, true>>;
  // Whether registers are left to load it while its scores are computed. One row of bits, which all warps read, is
  // near.
  static constexpr bool kLoadsMaskEarly = Traits::kHasIntervals || !Traits::kHasOneMaskRow || Traits::kIsNarrow;

  __device__ __forceinline__ void start_scores(float (&scores)[kScores], int stage) {
    const uint64_t q = matrix_descriptor(shared_address(shared.q[query_stage]) + group * 64 * kRowBytes, 16);
    const uint64_t k = matrix_descriptor(shared_address(shared.k[stage]), 16);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kD / 16; ++i) {
      Wgmma<Element, kBlockN>::run(scores, advance_k_major<Traits::kBlockM>(q, i), advance_k_major<kBlockN>(k, i),
                                   i > 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void start_out(const uint32_t (&probs)[kBlockN / 16][4], int stage, bool accumulate) {
    const uint64_t v = matrix_descriptor(shared_address(shared.v[stage]), kBlockN * kRowBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBlockN / 16; ++i) {
      Wgmma<Element, kDv>::run(out, probs[i], advance_mn_major(v, i), accumulate || i > 0);
    }
    wgmma_commit();
  }

  // Where the mask bits of the thread's two rows start. A row beyond the last takes the bits of the last row; one row
  // for all queries is the first.
  __device__ __forceinline__ void find_mask_rows(const Work& work, const int32_t* (&rows)[2]) {
    if constexpr (Traits::kHasMask && !Traits::kHasIntervals) {
      const int64_t words = (p.seqlen_k + kTile - 1) / kTile * kTileWords;
      const int64_t mask = mask_of(p.mask.heads, work);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = Traits::kHasOneMaskRow ? 0 : min(work.first_row + row_of_warp + 8 * r, p.seqlen_q - 1);
        rows[r] = p.mask.bits + (mask * p.seqlen_q + row) * words;
      }
    }
  }

  __device__ __forceinline__ void load_mask_words(MaskWords& mask_words, const int32_t* const (&rows)[2],
                                                  const Work& work, int block) {
    if constexpr (Traits::kHasIntervals) {
      const int64_t tiles_k = (p.seqlen_k + kTile - 1) / kTile;
      mask_words.load(p.mask.bounds + mask_of(p.mask.heads, work) * tiles_k * kTile + block * kBlockN,
                      work.first_row + row_of_warp - lane / 4);
    } else if constexpr (Traits::kHasMask) {
#pragma unroll
      for (int r = 0; r < kMaskRows; ++r) mask_words.load(r, rows[r] + block * kWords);
    }
  }

  __device__ __forceinline__ void apply_mask(float (&scores)[kScores], MaskWords& mask_words,
                                             const int32_t* const (&rows)[2], const Work& work, int block) {
    if constexpr (!kLoadsMaskEarly) load_mask_words(mask_words, rows, work, block);
    if constexpr (Traits::kHasMask) {
      mask_words.apply(scores);
    } else {
      const int column = 2 * (lane % 4);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Extent of = extent_of(p, work);
        const int row = (work.first_row + row_of_warp + 8 * r) >> p.group_shift;
        const int from = row + of.low - block * kBlockN - column;
        const int to = min(row + of.high, of.seqlen_k - 1) - block * kBlockN - column;
        keep_columns(scores, r, from, to);
      }
    }
  }

  // The bias of a step as it lies in shared memory: pairs of 16-bit values for kTile, floats for kVector.
  static constexpr int kBiasWords = kBlockN / 4;
  using BiasWords = uint32_t[kBiasWords];

  __device__ __forceinline__ void load_bias(BiasWords& bias, PipelineState<Traits::kBiasStages>& pipe,
                                            const Walk<Traits>& walk) {
    barrier_wait(&shared.bias_full[pipe.stage], pipe.phase);
    if constexpr (Traits::kHasBiasTiles) {
      const uint32_t first = shared_address(shared.bias[pipe.stage]) + bias_offset;
#pragma unroll
      for (int c = 0; c < kBlockN / 16; ++c) {
        // Two chunks of 16 bytes further; the swizzle makes that an xor.
        ldmatrix_x4(reinterpret_cast<uint32_t (&)[4]>(bias[4 * c]),
                    (first ^ (c % 4 * 32)) + c / 4 * (Traits::kBlockM * kRowBytes));
      }
    } else {
      const uint32_t start = shared_address(shared.bias[pipe.stage]) + lane % 4 * 8;
#pragma unroll
      for (int c = 0; c < kBlockN / 8; ++c) ld_shared_v2(bias[2 * c], bias[2 * c + 1], start + c * 32);
    }
    barrier_arrive_of_warp(&shared.bias_empty[pipe.stage]);
    pipe.advance(bias_stages(walk));
  }

  __device__ __forceinline__ void add_bias(float (&scores)[kScores], const BiasWords& bias) {
    if constexpr (Traits::kHasBiasTiles) {
#pragma unroll
      for (int i = 0; i < kBiasWords; ++i) {
        const float2 pair = unpack(bias[i], Element{});
        scores[2 * i] = fmaf(scores[2 * i], p.factor, pair.x);
        scores[2 * i + 1] = fmaf(scores[2 * i + 1], p.factor, pair.y);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        scores[i] = fmaf(scores[i], p.factor, __uint_as_float(bias[2 * (i / 4) + i % 2]));
      }
    }
  }

  // Adds a tile in fp32, which is loaded a panel at a time: there are no registers for all of it.
  __device__ __forceinline__ void add_float_tile(float (&scores)[kScores], PipelineState<Traits::kBiasStages>& pipe,
                                                 const Walk<Traits>& walk) {
    using Tile = FloatTile<Traits::kBlockM>;
    barrier_wait(&shared.bias_full[pipe.stage], pipe.phase);
    const uint32_t first = shared_address(shared.bias[pipe.stage]) + bias_offset;
    Tile::template for_each_pair<kBlockN>(first, lane / 4 % 2 == 1, [&](int c, int r, float2 pair) {
      float* const two = scores + 4 * c + 2 * r;
      two[0] = fmaf(two[0], p.factor, pair.x);
      two[1] = fmaf(two[1], p.factor, pair.y);
    });
    barrier_arrive_of_warp(&shared.bias_empty[pipe.stage]);
    pipe.advance(bias_stages(walk));
  }

  // A score is unit * score + value with these, once `softmax` has added them: a tile may be flat.
  struct Flat {
    float value = 0.0f, unit = 1.0f, inverse_unit = 1.0f;
  };

  // Adds the values of a window. If it is flat, returns its value instead, for `softmax` to add.
  __device__ __forceinline__ Flat add_window(float (&scores)[kScores], PipelineState<Traits::kBiasStages>& pipe,
                                             const Walk<Traits>& walk, const Work& work, int block) {
    const int first = Window::first_place(p.distances, work.first_row, block * kBlockN);
    const uint32_t start = shared_address(shared.bias[pipe.stage]);
    Flat flat;
    barrier_wait(&shared.bias_full[pipe.stage], pipe.phase);
    const auto load = [](uint32_t from) {
      uint32_t pair[2];
      ld_shared_v2(pair[0], pair[1], from);
      return make_float2(__uint_as_float(pair[0]), __uint_as_float(pair[1]));
    };
    if (Window::is_flat(p.distances, first)) {
      flat = {load(start).x, p.factor, p.inverse_factor};
      if (!(p.factor > 0)) add_flat(scores, flat);  // else the greatest product has the greatest score
    } else {
      const auto load_pair = [&](int c) { return load(start + bias_offset + c * 32); };
      Window::for_each_pair(load_pair, [&](int c, const float2(&pairs)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float* const two = scores + 4 * c + 2 * r;
          two[0] = fmaf(two[0], p.factor, pairs[r].x);
          two[1] = fmaf(two[1], p.factor, pairs[r].y);
        }
      });
    }
    barrier_arrive_of_warp(&shared.bias_empty[pipe.stage]);
    pipe.advance(bias_stages(walk));
    return flat;
  }

  __device__ __forceinline__ void add_flat(float (&scores)[kScores], Flat& flat) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores[i] = fmaf(scores[i], flat.unit, flat.value);
    flat = {};
  }

  // Turns products into scores in units of p.scale: applies f and adds the bias, but for what it returns. With a bias a
  // score is rounded once, as in the backward kernels: there p = exp(score - lse) is right beside a bias of any size.
  __device__ __forceinline__ Flat finish_scores(float (&scores)[kScores], const Work& work, int block, BiasWords& bias,
                                                PipelineState<Traits::kBiasStages>& pipe, const Walk<Traits>& walk) {
    if (p.transforms) {
      if (p.softcap > 0) {
        const float cap = Traits::kBias == Bias::kNone ? p.softcap : 1.0f;  // else p.factor
#pragma unroll
        for (int i = 0; i < kScores; ++i) scores[i] = cap * tanh_exact(p.pre_scale * scores[i]);
      } else {
#pragma unroll
        for (int i = 0; i < kScores; ++i) scores[i] *= p.pre_scale;
      }
    }
    if constexpr (Traits::kHasBiasWindow) return add_window(scores, pipe, walk, work, block);
    if constexpr (Traits::kHasFloatTiles) {
      add_float_tile(scores, pipe, walk);
    } else if constexpr (Traits::kProducesBias && !Traits::kHasBiasWindow) {
      if constexpr (!Traits::kLoadsBiasEarly) load_bias(bias, pipe, walk);
      add_bias(scores, bias);
    }
    if constexpr (Traits::kBias == Bias::kStrided) {
      const int first_key = block * kBlockN + 2 * (lane % 4);
      with_bias(p, work, [&](auto bias) {
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
          // Beyond the end any value will do: the row is not stored, the key is masked.
          const int row = min(work.first_row + row_of_warp + i / 2 % 2 * 8, p.seqlen_q - 1);
          const int key = min(first_key + i / 4 * 8 + i % 2, p.seqlen_k - 1);
          scores[i] = fmaf(scores[i], p.factor, bias(row, key));
        }
      });
    }
    return {};
  }

  // Whether a score of the thread's row r is above a bound, or is NaN. Compares the bits of floats as integers, of which
  // the GPU compares three in one instruction. The greatest float has the greatest bits, signed, if it is positive, and
  // the least bits, unsigned, if all are negative: each comparison is right on its side of 0. A negative NaN is left out;
  // its probability tells.
  //
  // The largest score so far is not above the bound. So with kHasMaxScores a comparison begins with it, and leaves the
  // largest score in its place with no instruction more, if all lie on its side of 0. There the largest and not the bound
  // chooses the side, and 0 after negative scores is above any bound: `raise_maxima` then finds the largest score.
  __device__ __forceinline__ float largest_or(int r, float other) const {
    if constexpr (Traits::kHasMaxScores) return this->largest[r];
    return other;
  }
  __device__ __forceinline__ bool exceeds_positive(const float (&scores)[kScores], int r, float bound) {
    int top = __float_as_int(largest_or(r, scores[2 * r]));
#pragma unroll
    for (int c = 0; c < kScores / 4; ++c) {
      top = max(max(top, __float_as_int(scores[4 * c + 2 * r])), __float_as_int(scores[4 * c + 2 * r + 1]));
    }
    if constexpr (Traits::kHasMaxScores) this->largest[r] = __int_as_float(top);
    return !(__int_as_float(top) <= bound);
  }
  __device__ __forceinline__ bool exceeds_negative(const float (&scores)[kScores], int r, float bound) {
    unsigned top = __float_as_uint(largest_or(r, scores[2 * r]));
#pragma unroll
    for (int c = 0; c < kScores / 4; ++c) {
      top = min(min(top, __float_as_uint(scores[4 * c + 2 * r])), __float_as_uint(scores[4 * c + 2 * r + 1]));
    }
    if constexpr (Traits::kHasMaxScores) {
      this->largest[r] = __uint_as_float(top);
      return top < max(__float_as_uint(bound), __float_as_uint(-0.0f) + 1);
    }
    return top < __float_as_uint(bound);
  }

  // Whether a rounded shift would be wrong by up to 2^-14, half of what fp16 rounds p by, or more.
  __device__ __forceinline__ bool has_great_shift(float maximum) const {
    constexpr float kGreatShift = 1024.0f;
    return fabsf(maximum * (p.scale * kLog2e)) > kGreatShift;
  }

  // Online softmax of a step. row_max is subtracted before the exponential; it is raised only when some score of the row
  // exceeds it by more than kSlack (in powers of 2). Only then must out and row_sum be rescaled, and only if the warp has
  // such a row do the threads of a quad exchange maxima. The warp votes on what it computes and not on any value: a row's
  // bits are the same beside all others. Probabilities reach 2^kSlack, which fp32 and the 16-bit types can hold. Returns
  // whether out must be rescaled.
  // Source: FlashAttention-4's conditional rescaling.
  //
  // The subtraction is part of an fma with a rounded shift. All p of a row then have the rounding error of the shift as a
  // factor, which the sum takes out, but for the 16-bit rounding of p. In a great row, where the error would show, scores
  // and row_max are subtracted exactly.
  __device__ __forceinline__ bool softmax(float (&scores)[kScores], float (&rescale)[2], Flat flat) {
    float bound[2], shift[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      bound[r] = threshold[r];
      shift[r] = row_max[r] * (p.scale * kLog2e);
      if constexpr (Traits::kHasBiasWindow) {
        bound[r] = (threshold[r] - flat.value) * flat.inverse_unit;
        shift[r] = fmaf(flat.value, -kLog2e, shift[r]);
      }
    }
    bool is_above = false;
    if (!kComparesNegative || !has_negative) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        is_above |= exceeds_positive(scores, r, bound[r]);
        if constexpr (!kComparesNegative) is_above |= !(bound[r] >= 0.0f);
      }
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        is_above |= largest_or(r, bound[r]) < 0.0f ? exceeds_negative(scores, r, bound[r])
                                                   : exceeds_positive(scores, r, bound[r]);
      }
    }
    const bool needs_rescale = __any_sync(0xffffffffu, is_above);
    if (needs_rescale || (kComparesNegative && is_great)) {
      if constexpr (Traits::kHasBiasWindow) add_flat(scores, flat);
      if (needs_rescale) raise_maxima(scores, rescale);
      float subtracted[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const bool is_great_row = has_great_shift(row_max[r]);
        shift[r] = is_great_row ? 0.0f : row_max[r] * (p.scale * kLog2e);
        subtracted[r] = is_great_row ? row_max[r] : 0.0f;
      }
      if (is_great) {
#pragma unroll
        for (int i = 0; i < kScores; ++i) scores[i] -= subtracted[i / 2 % 2];
      }
    }
    const float scale = (Traits::kHasBiasWindow ? flat.unit : p.scale) * kLog2e;
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores[i] = exp2_approx(fmaf(scores[i], scale, -shift[i / 2 % 2]));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) sum += scores[4 * (i / 2) + 2 * r + i % 2];
      row_sum[r] += sum;
    }
    return needs_rescale;
  }

  // Kernels with kHasMaxScores tell of NaN, others leave it out.
  __device__ __forceinline__ static float larger(float x, float y) {
    if constexpr (Traits::kHasMaxScores) return max_or_nan(x, y);
    return fmaxf(x, y);
  }
  __device__ __forceinline__ static float quad_larger(float x) {
    x = larger(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return larger(x, __shfl_xor_sync(0xffffffffu, x, 2));
  }

  // Raises row_max to the greatest score so far, with all that follows from it.
  __device__ __forceinline__ void raise_maxima(const float (&scores)[kScores], float (&rescale)[2]) {
    constexpr float kSlack = 8.0f;
    constexpr float kAlwaysExceeded = NAN;
    const float scale = p.scale * kLog2e;
    bool is_negative = false, has_great = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float before = threshold[r] == -INFINITY ? -INFINITY : row_max[r];
      float top = largest_or(r, before);
#pragma unroll
      for (int c = 0; c < kScores / 4; ++c) {
        top = larger(top, larger(scores[4 * c + 2 * r], scores[4 * c + 2 * r + 1]));
      }
      top = quad_larger(top);
      if constexpr (Traits::kHasMaxScores) this->largest[r] = top + 0.0f;  // not -0, which has negative bits
      const bool raises = !(top <= threshold[r]);  // not because another row does
      // A row with no key so far has a row_sum of 0, and out may be rescaled by anything.
      rescale[r] = raises ? exp2_approx((before - top) * scale) : 1.0f;
      row_sum[r] *= rescale[r];
      if (raises) {
        row_max[r] = top;
        threshold[r] = fmaf(kSlack / kLog2e, p.inverse_scale, top);
      }
      is_negative |= largest_or(r, threshold[r]) < 0.0f;
      const bool is_great_row = has_great_shift(row_max[r]);
      has_great |= is_great_row;
      if (!kComparesNegative && is_great_row) threshold[r] = kAlwaysExceeded;
    }
    has_negative = __any_sync(0xffffffffu, is_negative);
    is_great = __any_sync(0xffffffffu, has_great);
  }

  // Drops probabilities of a block; the epilogue scales what is kept. row_sum has all of them.
  __device__ __forceinline__ void drop(float (&probs)[kScores], const Work& work, int block) {
    if constexpr (Traits::kHasDropout) {
      uint32_t kept[kScores / 32];
      find_kept<kScores, true>(kept, p.dropout, work.batch, work.head, work.first_row + row_of_warp,
                               block * kBlockN + 2 * (lane % 4));
#pragma unroll
      for (int i = 0; i < kScores; ++i) probs[i] = is_kept(kept, i) ? probs[i] : 0.0f;
    }
  }

  __device__ __forceinline__ static void to_operand(const float (&scores)[kScores],
                                                    uint32_t (&probs)[kBlockN / 16][4]) {
#pragma unroll
    for (int i = 0; i < kBlockN / 16; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) probs[i][e] = pack(scores[8 * i + 2 * e], scores[8 * i + 2 * e + 1], Element{});
    }
  }

  __device__ __forceinline__ void rescale_out(const float (&rescale)[2]) {
#pragma unroll
    for (int i = 0; i < kOut; ++i) out[i] *= rescale[i / 2 % 2];
  }

  // Takes the sink of a head into the maxima and sums of rows, and returns what remains of the keys. Once per work tile,
  // after its splits are combined. `top`: natural, -inf in a row without a key.
  __device__ __forceinline__ void join_sink(int head, float (&top)[2], float (&sum)[2], float (&factor)[2]) {
    const float sink = load_float(p.sink, p.sink_dtype, head);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float keys = top[r];
      top[r] = fmaxf(keys, sink);
      if (top[r] == -INFINITY) continue;  // neither a key nor a sink
      const float share = exp2_approx((keys - top[r]) * kLog2e);
      sum[r] = fmaf(sum[r], share, exp2_approx((sink - top[r]) * kLog2e));
      factor[r] = share;
    }
  }

  // lse and the factor of out of the thread's rows, of calls with a sink or a wide lse.
  __device__ __forceinline__ void finish_rows(const Work& work, double (&lse)[2], float (&factor)[2]) {
    const bool per_query = Traits::kBias == Bias::kNone && p.bias_is_per_query;
    float top[2], sum[2], bias[2] = {0.0f, 0.0f};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = quad_sum(row_sum[r]);
      top[r] = sum[r] == 0.0f ? -INFINITY : row_max[r] * p.scale;
      factor[r] = sum[r] == 0.0f ? 0.0f : 1.0f;
      const int row = work.first_row + row_of_warp + 8 * r;
      if (per_query && row < seqlen_q_of(p, work)) with_bias(p, work, [&](auto bias_at) { bias[r] = bias_at(row, 0); });
    }
    if (p.sink != nullptr) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {  // the sink competes with scores that have the bias
        if (top[r] != -INFINITY) top[r] += bias[r];
        bias[r] = 0.0f;
      }
      join_sink(work.head, top, sum, factor);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool is_empty = top[r] == -INFINITY || bias[r] == -INFINITY;
      const float small = bias[r] == 0.0f ? log_approx(sum[r]) : top[r] + log_approx(sum[r]);
      lse[r] = is_empty ? -INFINITY : join_lse(bias[r] == 0.0f ? top[r] : bias[r], small);
      // bias - bias: NaN where the bias of a row is NaN or +inf, and its probabilities with it.
      factor[r] = is_empty ? 0.0f : factor[r] * reciprocal_approx(sum[r]) + (bias[r] - bias[r]);
    }
  }

  // Writes the largest scores of the thread's rows, as natural scores without the sink.
  __device__ __forceinline__ void store_max_scores(const Work& work, int64_t first_lse, int64_t lse_step) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = quad_larger(this->largest[r]);
      // A sum of NaN tells of the negative NaN that comparisons leave out; with a score of inf it tells nothing.
      const float sum = quad_sum(row_sum[r]);
      if (sum != sum && top != INFINITY) top = NAN;
      const bool exists = work.first_row + row_of_warp + 8 * r < seqlen_q_of(p, work);
      if (exists && lane % 4 == 0) p.max_scores[first_lse + r * lse_step] = top * p.scale;
    }
  }

  // Writes out and lse of the work tile.
  __device__ __forceinline__ void epilogue(const WorkItem<Traits>& item) {
    const Work& work = item.work;
    const int first_row = work.first_row + row_of_warp, seqlen_q = seqlen_q_of(p, work);
    float lse[2], factor[2];
    double wide_lse[2];
    if (p.sink == nullptr && !p.has_wide_lse) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // A row is empty where no key added to its sum; a sum of NaN is none of these.
        const float sum = quad_sum(row_sum[r]);
        lse[r] = sum == 0.0f ? -INFINITY : fmaf(row_max[r], p.scale, log_approx(sum));
        factor[r] = sum == 0.0f ? 0.0f : reciprocal_approx(sum);
      }
    } else {
      finish_rows(work, wide_lse, factor);
      lse[0] = static_cast<float>(wide_lse[0]), lse[1] = static_cast<float>(wide_lse[1]);
    }
    if constexpr (Traits::kHasDropout) factor[0] *= p.dropout.scale, factor[1] *= p.dropout.scale;
    const int64_t row_step = static_cast<int64_t>(p.out_row_step) * p.head_dim_v;
    // The thread's second row, 8 behind the first, is of the same query or of the same head.
    const int shift = Traits::kHasGroups ? p.group_shift : 0;
    const int query = row_of_warp >> shift, head = row_of_warp & ((1 << shift) - 1), queries = p.seqlen_q >> shift;
    const int64_t head_step = static_cast<int64_t>(p.out_head_step) * p.head_dim_v;
    const int64_t lse_step = shift > 3 ? 8 * static_cast<int64_t>(queries) : 8 >> shift;
    const int64_t out_step = shift > 3 ? 8 * head_step : (8 >> shift) * row_step;
    const int64_t first_lse = item.first_lse + query + static_cast<int64_t>(head) * queries;
    if constexpr (Traits::kHasMaxScores) store_max_scores(work, first_lse, lse_step);
    Element* const out_to =
        static_cast<Element*>(p.out) + item.first_out + query * row_step + head * head_step + 8 * (lane % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool exists = first_row + 8 * r < seqlen_q;
      if (exists && lane % 4 == 0) {
        if (p.has_wide_lse) {
          static_cast<double*>(p.lse)[first_lse + r * lse_step] = wide_lse[r];
        } else {
          static_cast<float*>(p.lse)[first_lse + r * lse_step] = lse[r];
        }
      }
#pragma unroll
      for (int c = 0; c < kDv / 32; ++c) {
        uint32_t words[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const int i = 4 * (4 * c + w) + 2 * r;
          // Not 0 * x: out is undefined for a row that attends nothing.
          words[w] = factor[r] == 0.0f ? 0u : pack(out[i] * factor[r], out[i + 1] * factor[r], Element{});
        }
        quad_transpose(words[0], words[1], words[2], words[3], lane);
        if (exists && 8 * (4 * c + lane % 4) < p.head_dim_v) {
          st_global_v4(out_to + r * out_step + 32 * c, words);
        }
      }
    }
  }

  // Ping-pong scheduling: one consumer issues its products while the others do their softmax.
  __device__ __forceinline__ void pingpong_wait() { named_barrier_sync(kPingPongBarrier + group, 2 * 128); }
  __device__ __forceinline__ void pingpong_pass() {
    named_barrier_arrive(kPingPongBarrier + (group + 1 == Traits::kConsumers ? 0 : group + 1), 2 * 128);
  }

  // The loop over key blocks. While a step's scores are computed, the probabilities of the step before are multiplied
  // by v.
  __device__ __forceinline__ void mainloop(const Work& work, const Walk<Traits>& walk,
                                           PipelineState<Traits::kStages>& pipe_k,
                                           PipelineState<Traits::kStages>& pipe_v,
                                           PipelineState<Traits::kBiasStages>& pipe_bias) {
    float rescale[2];
    uint32_t probs[kBlockN / 16][4];
    const int32_t* bits[2];
    find_mask_rows(work, bits);
    {
      float scores[kScores];
      bool needs_mask;
      const int block = walk.at(0, needs_mask);
      MaskWords mask_words;
      if (kLoadsMaskEarly && needs_mask) load_mask_words(mask_words, bits, work, block);
      barrier_wait(&shared.k_full[pipe_k.stage], pipe_k.phase);
      start_scores(scores, pipe_k.stage);
      BiasWords bias;
      if constexpr (Traits::kLoadsBiasEarly) load_bias(bias, pipe_bias, walk);
      wgmma_wait<0>();
      wgmma_fence_operand(scores);
      barrier_arrive_of_warp(&shared.k_empty[pipe_k.stage]);  // per warp: its rows of the product are done
      const Flat flat = finish_scores(scores, work, block, bias, pipe_bias, walk);
      if (needs_mask) apply_mask(scores, mask_words, bits, work, block);
      softmax(scores, rescale, flat);  // nothing to rescale yet
      drop(scores, work, block);
      to_operand(scores, probs);
      pipe_k.advance();
    }
#pragma unroll 1
    for (int step = 1; step < walk.steps; ++step) {
      float scores[kScores];
      bool needs_mask;
      const int block = walk.at(step, needs_mask);
      MaskWords mask_words;
      if (kLoadsMaskEarly && needs_mask) load_mask_words(mask_words, bits, work, block);
      barrier_wait(&shared.k_full[pipe_k.stage], pipe_k.phase);
      pingpong_wait();
      start_scores(scores, pipe_k.stage);
      barrier_wait(&shared.v_full[pipe_v.stage], pipe_v.phase);
      start_out(probs, pipe_v.stage, step > 1);
      if constexpr (!Traits::kPingPongAfterBias) pingpong_pass();
      BiasWords bias;
      if constexpr (Traits::kLoadsBiasEarly) load_bias(bias, pipe_bias, walk);
      wgmma_wait<1>();
      wgmma_fence_operand(scores);
      barrier_arrive_of_warp(&shared.k_empty[pipe_k.stage]);
      const Flat flat = finish_scores(scores, work, block, bias, pipe_bias, walk);
      if constexpr (Traits::kPingPongAfterBias) {
        wgmma_fence_operand(scores);
        pingpong_pass();
      }
      if (needs_mask) apply_mask(scores, mask_words, bits, work, block);
      const bool needs_rescale = softmax(scores, rescale, flat);
      drop(scores, work, block);
      wgmma_wait<0>();
      wgmma_fence_operand(out);
      barrier_arrive_of_warp(&shared.v_empty[pipe_v.stage]);
      to_operand(scores, probs);
      if (needs_rescale) rescale_out(rescale);
      pipe_k.advance();
      pipe_v.advance();
    }
    barrier_arrive_of_warp(&shared.q_empty[query_stage]);
    barrier_wait(&shared.v_full[pipe_v.stage], pipe_v.phase);
    start_out(probs, pipe_v.stage, walk.steps > 1);
    wgmma_wait<0>();
    wgmma_fence_operand(out);
    barrier_arrive_of_warp(&shared.v_empty[pipe_v.stage]);
    pipe_v.advance();
  }

  // In the place of `mainloop` if the consumer's rows are all beyond the last: takes part in the barriers alone, which
  // leaves the SM to the others.
  __device__ __forceinline__ void skip(const Walk<Traits>& walk, PipelineState<Traits::kStages>& pipe_k,
                                       PipelineState<Traits::kStages>& pipe_v,
                                       PipelineState<Traits::kBiasStages>& pipe_bias) {
#pragma unroll 1
    for (int step = 0; step < walk.steps; ++step) {
      barrier_wait(&shared.k_full[pipe_k.stage], pipe_k.phase);
      barrier_arrive_of_warp(&shared.k_empty[pipe_k.stage]);
      pipe_k.advance();
      if (step > 0) {
        pingpong_wait();
        pingpong_pass();
      }
      if constexpr (Traits::kProducesBias) {
        barrier_wait(&shared.bias_full[pipe_bias.stage], pipe_bias.phase);
        barrier_arrive_of_warp(&shared.bias_empty[pipe_bias.stage]);
        pipe_bias.advance(bias_stages(walk));
      }
      barrier_wait(&shared.v_full[pipe_v.stage], pipe_v.phase);
      barrier_arrive_of_warp(&shared.v_empty[pipe_v.stage]);
      pipe_v.advance();
    }
    barrier_arrive_of_warp(&shared.q_empty[query_stage]);
  }
};

// Consumer::bias_offset: rows 0 to 7 and 8 to 15 of two neighbouring chunks of 16 bytes. In a tile of fp32: the first
// values of the thread's first row. In a window: the first value of the thread's second row.
template <class Traits>
__device__ __forceinline__ uint32_t make_bias_offset(int group) {
  const int lane = threadIdx.x % 32, row = group * 64 + threadIdx.x % 128 / 32 * 16 + lane % 16;
  uint32_t offset = row * kRowBytes + ((lane / 16 ^ row % 8) << 4);
  if constexpr (Traits::kHasFloatTiles) {
    offset = FloatTile<Traits::kBlockM>::first_of(row - lane % 16 + lane / 4, lane);
  }
  if constexpr (Traits::kHasBiasWindow) {
    const int second_row = group * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4 + 8;
    offset = 4 * Consumer<Traits>::Window::pair_of(second_row, lane);
  }
  asm volatile("" : "+r"(offset));  // else ptxas computes it again in each step
  return offset;
}

template <class Traits>
__device__ __forceinline__ void consume_forward(const ForwardParams& p, ForwardStorage<Traits>& shared, int group) {
  const int lane = threadIdx.x % 32;
  const int row_of_warp = group * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
  PipelineState<Traits::kStages> pipe_k, pipe_v;
  PipelineState<Traits::kQueryStages> pipe_q;
  PipelineState<Traits::kBiasStages> pipe_bias;
  PipelineState<kWorkStages> pipe_work;
  // The first consumer goes first: the last one fills its barrier.
  if (group == Traits::kConsumers - 1) named_barrier_arrive(kPingPongBarrier, 2 * 128);
  const uint32_t bias_offset = make_bias_offset<Traits>(group);
  for (;;) {
    const WorkItem<Traits>& item = get_work_tile(shared, pipe_work);
    if (!item.is_valid) break;
    const auto& work = item.work;
    // A copy, where there are registers for it.
    std::conditional_t<(Traits::kDv > 128), const Walk<Traits>&, const Walk<Traits>> walk = item.walk;
    float out[Traits::kDv / 2];
    Consumer<Traits> consumer{
        {},          p,           shared,       group,        lane,         row_of_warp,
        pipe_q.stage, out,         {0.0f, 0.0f}, {0.0f, 0.0f}, {-INFINITY, -INFINITY},
        true,        false,        bias_offset};
    const bool has_rows = work.first_row + group * 64 < seqlen_q_of(p, work);
    if (walk.steps > 0) {
      barrier_wait(&shared.q_full[pipe_q.stage], pipe_q.phase);
      if (has_rows) {
        consumer.mainloop(work, walk, pipe_k, pipe_v, pipe_bias);
      } else {
        consumer.skip(walk, pipe_k, pipe_v, pipe_bias);
      }
      pipe_q.advance();
    }
    bool has_result = has_rows;
    if constexpr (Traits::kSplitKv) {
      if (item.split >= 0) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (consumer.threshold[r] == -INFINITY) consumer.row_max[r] = -INFINITY;
        }
        has_result = combine_splits<Traits>(p, item.split, work.first_row + row_of_warp, out, consumer.row_max,
                                            consumer.row_sum, consumer);
      }
    }
    if (has_result) consumer.epilogue(item);
    release_work_tile(shared, pipe_work);
  }
  // No consumer may exit while an arrival is outstanding: the first takes the last one.
  if (group == 0) named_barrier_sync(kPingPongBarrier, 2 * 128);
}

}  // namespace flash_dmattn
