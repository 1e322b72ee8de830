// The base of the consumers of both backward kernels: a warpgroup has the scores of 64 keys and of a block's queries.
//
// Scores have keys as rows and queries as columns. p and ds in 16 bits are wgmma operands as they lie in registers;
// they go to shared memory transposed.
//
// With a softcap a score stays tanh until dp is there. p and the slope of tanh are then computed from it together, so
// that they need no registers of their own; there are none left.
#pragma once

#include <cfloat>

#include "../../device/fragments.h"
#include "../../device/philox.h"
#include "../../device/pipeline.h"
#include "../../device/ptx.h"
#include "../../device/softcap.h"
#include "../operands.h"
#include "accumulators.h"
#include "tile_scheduler.h"

namespace flash_dmattn {

template <class Traits, class Storage>
struct KeyConsumer {
  using Element = typename Traits::Element;
  static constexpr int kD = Traits::kD, kDv = Traits::kDv, kBlockM = Traits::kBlockM;
  static constexpr int kScores = kBlockM / 2;  // of a thread
  static constexpr int kSteps = kBlockM / 16;  // of 16 queries
  static constexpr bool kHasBias = Traits::kBias != BackwardBias::kNone;
  static constexpr bool kHasKeyBias = is_per_key(form_of(Traits::kBias));
  static constexpr bool kHasFloatTiles = has_float_tiles(form_of(Traits::kBias));
  static constexpr bool kSumsKeys = kHasKeyBias || sums_flat_tiles(Traits::kBias);
  using Scores = float[kScores];
  using Operand = uint32_t[kSteps][4];  // scores in 16 bits, as a matrix instruction reads them

  const BackwardParams& p;
  Storage& shared;
  const int group, warp, lane;  // which consumer, so which 64 keys of a key tile; which warp of it
  const int key_stage;          // the pipeline stage of k and v
  float key_bias[2];            // the bias of the thread's two keys

  __device__ __forceinline__ static int first_key(const KeyWorkItem<Traits>& item) {
    return item.block_k * Traits::kBlockN;
  }
  // The thread's key r of a key tile, counted from the block's first key.
  __device__ __forceinline__ int key_of_block(int r, int tile = 0) const {
    return tile * kTile + group * 64 + warp * 16 + lane / 4 + 8 * r;
  }

  // --- products -------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void start_scores(Scores& scores, int stage, int tile = 0) {
    const int first = tile * kTile + group * 64;
    const uint64_t k = matrix_descriptor(shared_address(shared.k[key_stage]) + first * kRowBytes, 16);
    const uint64_t q = matrix_descriptor(shared_address(shared.q[stage]), 16);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kD / 16; ++i) {
      Wgmma<Element, kBlockM>::run(scores, advance_k_major<Traits::kBlockN>(k, i), advance_k_major<kBlockM>(q, i),
                                   i > 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void start_dp(Scores& dp, int stage, int tile = 0) {
    const int first = tile * kTile + group * 64;
    const uint64_t v = matrix_descriptor(shared_address(shared.v[key_stage]) + first * kRowBytes, 16);
    const uint64_t dout = matrix_descriptor(shared_address(shared.dout[stage]), 16);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kDv / 16; ++i) {
      Wgmma<Element, kBlockM>::run(dp, advance_k_major<Traits::kBlockN>(v, i), advance_k_major<kBlockM>(dout, i),
                                   i > 0);
    }
    wgmma_commit();
  }

  // --- scores ---------------------------------------------------------------------------------------------------

  // Mask bits of the warp's keys: word t is for query 32 t + lane of the block. With an interval mask, the queries of
  // the block that see the thread's two keys: for each key a byte for the first query and a byte for the end.
  using Words = uint32_t[Traits::kHasIntervals ? 1 : kBlockM / 32];

  __device__ __forceinline__ void load_mask_words(Words& words, const KeyWorkItem<Traits>& item, int block) {
    const int64_t row_words = (p.seqlen_k + kTile - 1) / kTile * kTileWords;
    if constexpr (Traits::kHasIntervals) {
      const int64_t mask = mask_of(p.mask.heads, item);
      const int2* bounds = p.mask.bounds + mask * row_words * kWord + first_key(item) + key_of_block(0);
      const int2 two[2] = {bounds[0], bounds[8]};
      const auto in_block = [&](int query) {
        return static_cast<uint32_t>(min(max(query - block * kBlockM, 0), kBlockM));
      };
      words[0] = in_block(two[0].x) | in_block(two[0].y) << 8 | in_block(two[1].x) << 16 | in_block(two[1].y) << 24;
    } else if constexpr (Traits::kHasMask) {
      const int64_t first = mask_of(p.mask.heads, item) * p.seqlen_q;
      const int word = item.block_k * (Traits::kBlockN / kWord) + group * 2 + warp / 2;
#pragma unroll
      for (int t = 0; t < kBlockM / 32; ++t) {
        // A row beyond the last takes the bits of the last; its lse masks it.
        const int row = min(block * kBlockM + 32 * t + lane, p.seqlen_q - 1);
        words[t] = p.mask.bits[(first + row) * row_words + word];
      }
    }
  }

  __device__ __forceinline__ void apply_mask(Scores& scores, const Words& words, const KeyWorkItem<Traits>& item,
                                             int block, int tile = 0) {
    if constexpr (Traits::kHasIntervals) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int query = 2 * (lane % 4);
        const int from = static_cast<int>(words[0] >> 16 * r & 0xffu) - query;
        const int end = static_cast<int>(words[0] >> (16 * r + 8) & 0xffu) - query;
        keep_columns(scores, r, from, end - 1);
      }
    } else if constexpr (Traits::kHasMask) {
      const int shift = warp % 2 * 16 + lane / 4;
#pragma unroll
      for (int c = 0; c < kBlockM / 8; ++c) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const uint32_t word = __shfl_sync(0xffffffffu, words[c / 4], 8 * (c % 4) + 2 * (lane % 4) + e) >> shift;
          scores[4 * c + e] = word & 1u ? scores[4 * c + e] : -INFINITY;
          scores[4 * c + 2 + e] = word & 1u << 8 ? scores[4 * c + 2 + e] : -INFINITY;
        }
      }
    } else {
      const Extent of = extent_of(p, item);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int key = first_key(item) + key_of_block(r, tile);
        const int query = block * kBlockM + 2 * (lane % 4);
        if constexpr (Traits::kHasSequences) {
          const int last = min(key - of.low, of.seqlen_q - 1) - query;
          keep_columns(scores, r, key - of.high - query, key < of.seqlen_k ? last : -1);
        } else {  // not by extent_of, as in add_dq
          keep_columns(scores, r, key - p.high - query, key < p.seqlen_k ? key - p.low - query : -1);
        }
      }
    }
  }

  // Offset of the lane's row of the four matrices of step 0 in a tile of scores: 16 queries by the warp's 16 keys.
  __device__ __forceinline__ uint32_t matrices_offset() const {
    const int row = lane % 8, matrix = lane / 8, chunk = 2 * warp + matrix % 2;
    return group * kBlockM * kRowBytes + (matrix / 2 * 8 + row) * kRowBytes + ((chunk ^ row) << 4);
  }

  // The same of the lane's first value in a tile of fp32, whose panels have 32 keys.
  __device__ __forceinline__ uint32_t floats_offset() const {
    const int row = 2 * (lane % 4), chunk = warp % 2 * 4 + lane / 16;
    return (2 * group + warp / 2) * kBlockM * kRowBytes + row * kRowBytes + ((chunk ^ row) << 4) + lane / 4 % 4 * 4;
  }

  // Where the value of query e and key r of the c-th 8 queries lies, by the place of the first one. Lanes of a load have 8
  // neighbouring keys of 4 queries: all banks.
  __device__ __forceinline__ static uint32_t place_of_float(uint32_t first, int c, int r, int e) {
    return (first ^ (e << 4 | r << 5)) + (8 * c + e) * kRowBytes;
  }

  // Pairs of 16-bit values, or floats.
  static constexpr int kBiasWords = kHasFloatTiles ? 8 : 4;
  using BiasWords = uint32_t[kSteps][kBiasWords];

  __device__ __forceinline__ uint32_t bias_offset() const { return kHasFloatTiles ? floats_offset() : matrices_offset(); }

  // Loads the bias of the i-th 16 queries; `tile` is the address of what the lane reads in step 0.
  __device__ __forceinline__ void read_sixteen(BiasWords& bias, int i, uint32_t tile) {
    if constexpr (kHasFloatTiles) {
#pragma unroll
      for (int w = 0; w < kBiasWords; ++w) {
        bias[i][w] = __float_as_uint(ld_shared(place_of_float(tile, 2 * i + w / 4, w / 2 % 2, w % 2)));
      }
    } else {
      ldmatrix_x4_trans(bias[i], tile + i * 16 * kRowBytes);
    }
  }

  // Loads the block's tile of bias; the caller waits and signals.
  __device__ __forceinline__ void read_bias(BiasWords& bias, int stage) {
    const uint32_t tile = shared_address(shared.bias[stage]) + matrices_offset();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) read_sixteen(bias, i, tile);
  }

  // Gives the thread's two scores of the c-th 8 queries their exponents, where lse may be great. Loads wait for each other,
  // so that ptxas keeps few registers for them.
  __device__ __forceinline__ void finish_great(float (&two)[2], float2 bias, float factor, const KeyWorkItem<Traits>& item,
                                               int block, int c) const {
    const float2* const lse = p.split_lse + first_padded_tile_of(p, item) * kTile + block * kBlockM;
    const float4 both = *reinterpret_cast<const float4*>(lse + 2 * (lane % 4) + 8 * c);
    two[0] = great_exponent(two[0], factor, bias.x, make_float2(both.x, both.y));
    two[1] = great_exponent(two[1], factor, bias.y, make_float2(both.z, both.w));
  }

  // The bias of two scores of the thread's key r.
  __device__ __forceinline__ float2 bias_of(const BiasWords& bias, int c, int r) const {
    if constexpr (kHasFloatTiles) {
      const uint32_t* const two = bias[c / 2] + c % 2 * 4 + 2 * r;
      return make_float2(__uint_as_float(two[0]), __uint_as_float(two[1]));
    } else if constexpr (Traits::kHasBiasTiles) {
      return unpack(bias[c / 2][c % 2 * 2 + r], Element{});
    }
    return kHasKeyBias ? make_float2(key_bias[r], key_bias[r]) : make_float2(0.0f, 0.0f);
  }

  // The summands of two scores of the thread's key r, in units of log2: bias minus lse of their queries.
  __device__ __forceinline__ float2 added(float2 lse, const BiasWords& bias, int c, int r) const {
    float2 add = make_float2(-lse.x, -lse.y);
    if constexpr (Traits::kHoldsProbs) add = make_float2(kLift - lse.x, kLift - lse.y);
    if constexpr (Traits::kHasBiasTiles || kHasKeyBias) {
      const float2 values = bias_of(bias, c, r);
      add.x = fmaf(values.x, kLog2e, add.x);
      add.y = fmaf(values.y, kLog2e, add.y);
    }
    // With a softcap masked keys are already -inf, and adding an overflow to +inf would give NaN.
    if constexpr ((Traits::kHasBiasTiles || kHasKeyBias) && Traits::kHasSoftcap) {
      add = make_float2(fminf(add.x, FLT_MAX), fminf(add.y, FLT_MAX));
    }
    return add;
  }

  // Turns products into scores minus lse, in units of log2. kGreat: rows of the item may have a great lse.
  template <bool kGreat>
  __device__ __forceinline__ void finish_scores(Scores& scores, int stage, const BiasWords& bias,
                                                const KeyWorkItem<Traits>& item, int block) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) finish_sixteen<kGreat>(i, scores, stage, bias, item, block);
  }

  // The same for the i-th 16 queries.
  template <bool kGreat>
  __device__ __forceinline__ void finish_sixteen(int i, Scores& scores, int stage, const BiasWords& bias,
                                                 const KeyWorkItem<Traits>& item, int block) {
    if constexpr (kGreat) {
#pragma unroll
      for (int c = 2 * i; c < 2 * i + 2; ++c) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float(&two)[2] = *reinterpret_cast<float(*)[2]>(&scores[4 * c + 2 * r]);
          finish_great(two, bias_of(bias, c, r), p.softmax_scale, item, block, c);
        }
      }
      return;
    }
    const float scale = p.softmax_scale * kLog2e;
    const float* lse = shared.lse[stage] + 2 * (lane % 4);
#pragma unroll
    for (int c = 2 * i; c < 2 * i + 2; ++c) {
      const float2 pair = *reinterpret_cast<const float2*>(lse + 8 * c);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 add = added(pair, bias, c, r);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[4 * c + 2 * r + e];
          score = fmaf(score, scale, e == 0 ? add.x : add.y);
        }
      }
    }
  }

  // Which scores of a block are kept, found before dp takes its registers.
  using Kept = uint32_t[Traits::kHasDropout ? kScores / 32 : 1];

  __device__ __forceinline__ void find_kept_of(Kept& kept, const KeyWorkItem<Traits>& item, int block) const {
    if constexpr (Traits::kHasDropout) {
      find_kept<kScores, false>(kept, p.dropout, item.batch, item.head, first_key(item) + key_of_block(0),
                                block * kBlockM + 2 * (lane % 4));
    }
  }

  // Marks p of what is dropped by its sign, which takes no registers of its own.
  __device__ __forceinline__ static void mark_dropped(Scores& exps, const Kept& kept) {
    if constexpr (Traits::kHasDropout) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) exps[i] = is_kept(kept, i) ? exps[i] : -exps[i];
    }
  }

  // dp - delta of a score whose p may be marked, and its p as dv needs it, up to the scale of what is kept.
  __device__ __forceinline__ float dp_minus_delta(float exp, float dp, float delta) const {
    if constexpr (!Traits::kHasDropout) return dp - delta;
    return exp > 0.0f ? fmaf(dp, p.dropout.scale, -delta) : -delta;
  }
  __device__ __forceinline__ static float kept_p(float exp) { return Traits::kHasDropout ? fmaxf(exp, 0.0f) : exp; }
  __device__ __forceinline__ static float whole_p(float exp) { return Traits::kHasDropout ? fabsf(exp) : exp; }

  // Converts p and ds to 16-bit operands, two scores at a time, so that the registers of p and dp suffice. `sums` is ds
  // summed before rounding, where kSumsKeys: of the thread's two keys, over its queries. The caller must add it to
  // shared memory at once. If it stayed in a register, ptxas would delay the sum to the next block and keep all of ds
  // alive. `dbias`: where ds overwrites a bias in fp32, its tile, as read_sixteen takes it.
  __device__ __forceinline__ void finish_ds(const Scores& exps, const Scores& dp, int stage, Operand& probs,
                                            Operand& ds, float (&sums)[2], uint32_t dbias = 0) {
    const float* delta = shared.delta[stage] + 2 * (lane % 4);
    sums[0] = sums[1] = 0.0f;
#pragma unroll
    for (int c = 0; c < kBlockM / 8; ++c) {
      const float2 pair = *reinterpret_cast<const float2*>(delta + 8 * c);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = 4 * c + 2 * r;
        const float low = dp_minus_delta(exps[i], dp[i], pair.x), high = dp_minus_delta(exps[i + 1], dp[i + 1], pair.y);
        const float p_low = whole_p(exps[i]), p_high = whole_p(exps[i + 1]);
        probs[c / 2][c % 2 * 2 + r] = pack(kept_p(exps[i]), kept_p(exps[i + 1]), Element{});
        ds[c / 2][c % 2 * 2 + r] = pack(p_low * low, p_high * high, Element{});
        if constexpr (kHasFloatTiles && Traits::kReplacesBias) {
          st_shared(place_of_float(dbias, c, r, 0), p_low * low);
          st_shared(place_of_float(dbias, c, r, 1), p_high * high);
        }
        // Not from the rounded products: that takes two more registers than there are.
        if constexpr (kSumsKeys) sums[r] = fmaf(p_low, low, fmaf(p_high, high, sums[r]));
      }
    }
  }

  // finish_ds in two parts, where p has no 32 bits until dp is there. The first, before dp is started, holds p in fp16, as
  // many times larger as fp16 allows: its 11 bits round p less than ds is rounded, down to 2^-29.
  static constexpr float kLift = 15.0f, kLowered = 1.0f / 32768;

  __device__ __forceinline__ static void hold_probs(const Scores& exps, Operand& held) {
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      uint32_t& word = held[i / 8][i % 8 / 2];
      word = pack_saturated(exps[i], exps[i + 1]);  // p above 1 is the rounding of huge scores
      asm volatile("" : "+r"(word)::"memory");
    }
  }

  __device__ __forceinline__ void finish_held(const Operand& held, const Scores& dp, int stage, Operand& probs,
                                              Operand& ds) const {
    const float* delta = shared.delta[stage] + 2 * (lane % 4);
#pragma unroll
    for (int c = 0; c < kBlockM / 8; ++c) {
      const float2 pair = *reinterpret_cast<const float2*>(delta + 8 * c);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = 4 * c + 2 * r;
        const float2 exps = unpack(held[c / 2][c % 2 * 2 + r], __half{});
        const float low = exps.x * kLowered, high = exps.y * kLowered;
        probs[c / 2][c % 2 * 2 + r] = pack(low, high, Element{});
        ds[c / 2][c % 2 * 2 + r] = pack(low * (dp[i] - pair.x), high * (dp[i + 1] - pair.y), Element{});
      }
    }
  }

  using Quarter = uint32_t[4];  // of an operand or a tile of bias: 16 queries

  // With a softcap: finish_scores, p and finish_ds in one, for the i-th 16 queries, whose scores cap_scores has left as
  // tanh. ds includes the slope of tanh; the gradients of a bias do not: dbias, where it overwrites the bias, and
  // `sums`. lse and delta point to the values of the thread's first query.
  template <bool kGreat>
  __device__ __forceinline__ void finish_capped(int i, const Scores& tanhs, const Scores& dp, float cap,
                                                const float* lse, const float* delta, const BiasWords& bias,
                                                const KeyWorkItem<Traits>& item, int block, Quarter& probs, Quarter& ds,
                                                Quarter& dbias, float (&sums)[2]) const {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int c = 2 * i + w / 2, r = w % 2, at = 4 * c + 2 * r;
      const float2 delta_pair = *reinterpret_cast<const float2*>(delta + 8 * c);
      float exponents[2] = {tanhs[at], tanhs[at + 1]};
      if constexpr (kGreat) {
        finish_great(exponents, bias_of(bias, c, r), p.softcap, item, block, c);
        // A hidden key stays hidden beside a bias that is NaN; `added` has a number there.
        for (int n = 0; n < 2; ++n) exponents[n] = tanhs[at + n] == -INFINITY ? -INFINITY : exponents[n];
      } else {
        const float2 add = added(*reinterpret_cast<const float2*>(lse + 8 * c), bias, c, r);
        exponents[0] = fmaf(exponents[0], cap, add.x), exponents[1] = fmaf(exponents[1], cap, add.y);
      }
      const float p_low = exp2_approx(exponents[0]), p_high = exp2_approx(exponents[1]);
      const float low = dp[at] - delta_pair.x, high = dp[at + 1] - delta_pair.y;
      const float ds_low = p_low * low, ds_high = p_high * high;
      probs[w] = pack(p_low, p_high, Element{});
      ds[w] = pack(ds_low * slope_of_tanh(tanhs[at]), ds_high * slope_of_tanh(tanhs[at + 1]), Element{});
      if constexpr (Traits::kReplacesBias) dbias[w] = pack(ds_low, ds_high, Element{});
      if constexpr (kHasKeyBias) sums[r] = fmaf(p_low, low, fmaf(p_high, high, sums[r]));
    }
  }

  // Writes scores in 16 bits to a tile (queries, keys) of shared memory.
  __device__ __forceinline__ void write_transposed(const Operand& x, uint8_t* to) {
    const uint32_t tile = shared_address(to) + matrices_offset();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) stmatrix_x4_trans(x[i], tile + i * 16 * kRowBytes);
  }

  // --- blocks of the walk -----------------------------------------------------------------------------------------

  // The query block of a step, and its mask bits if it needs masking.
  struct Block {
    int index;
    bool needs_mask;
    Words words;
  };

  __device__ __forceinline__ void find_block(Block& block, const KeyWorkItem<Traits>& item, int step) {
    block.index = item.walk.at(step, block.needs_mask);
    if (block.needs_mask) load_mask_words(block.words, item, block.index);
  }

  // With a softcap: waits for scores and dp, which have been started in this order, and leaves tanh in place of scores,
  // -inf for masked keys. The first wait keeps ptxas from moving tanh before the start of dp.
  __device__ __forceinline__ void cap_scores(Scores& scores, Scores& dp, const Block& block,
                                             const KeyWorkItem<Traits>& item) {
    wgmma_wait<1>();
    wgmma_fence_operand(scores);
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores[i] = tanh_exact(p.pre_scale * scores[i]);
    if (block.needs_mask) apply_mask(scores, block.words, item, block.index);
    wgmma_wait<0>();
    wgmma_fence_operand(dp);
  }

  // --- epilogue ---------------------------------------------------------------------------------------------------

  // The accumulator that a work tile adds to; null if the tile has the whole group and stores its result.
  __device__ __forceinline__ static float* sums_of(const KeyWorkItem<Traits>& item, float* sums) {
    return item.is_full_group ? nullptr : sums;
  }

  // Stores dk or dv, (B, Lk, Hk, columns), or adds to its accumulator. The branch must be on the pointer: with one on
  // the item, or with a larger item, ptxas schedules the mainloop worse (docs/notes/cuda_tried.md, "Backward kernel").
  template <int kCount>
  __device__ __forceinline__ void epilogue(const float (&x)[kCount], void* to, float* sums, int columns, float factor,
                                           const KeyWorkItem<Traits>& item, int tile = 0) {
    const int heads_k = p.num_heads / p.heads_per_group, head_k = item.head / p.heads_per_group;
    if (sums != nullptr) {
      constexpr int kColumns = kCount * 2, kFloats = kAccumFloats<kColumns>;
      constexpr int kPanels = (kColumns + kAccumColumns - 1) / kAccumColumns;
      constexpr int kAccumRowBlocks = Traits::kBlockN / kAccumRows;
      // The pair's number, as decode_key_work_tile counts.
      const int pair = p.batch_is_inner ? head_k * p.batch + item.batch : item.batch * heads_k + head_k;
      const int64_t block = static_cast<int64_t>(pair - p.first_summed_pair) * p.blocks_k + item.block_k;
      float* accum = sums + (block * kAccumRowBlocks + tile * (kTile / kAccumRows) + group) * kPanels * kFloats;
#pragma unroll
      for (int c = 0; c < kCount / 4; ++c) {
        red_add_v4(accum + c / 8 * kFloats + accum_offset(c % 8, threadIdx.x % 128), x[4 * c], x[4 * c + 1],
                   x[4 * c + 2], x[4 * c + 3]);
      }
      return;
    }
    if (to == nullptr) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = first_key(item) + key_of_block(r, tile);
      Element* row = static_cast<Element*>(to) +
                     ((first_key_of(p, item) + key) * heads_k + head_k) * columns;
      store_row<kCount>(row, r, key < seqlen_k_of(p, item), columns, lane,
                        [&](int i) { return pack(x[i] * factor, x[i + 1] * factor, Element{}); });
    }
  }

  // Stores the sum of a place. In an order of keys, adds it to the sum of the key: several work tiles have shares of
  // it.
  __device__ __forceinline__ void store_key_sum(float* sums, const KeyWorkItem<Traits>& item, int place, float sum) {
    if constexpr (Traits::kHasIntervals) {
      if (p.key_order != nullptr) {
        atomicAdd(sums + p.key_order[mask_of(p.mask.heads, item) * p.seqlen_k + place], sum);
        return;
      }
    }
    sums[place] = sum;
  }

  __device__ __forceinline__ void load_key_bias(const KeyWorkItem<Traits>& item) {
    if constexpr (kHasKeyBias) {
      const int last_key = extent_of(p, item).seqlen_k - 1;
      with_bias(p, item, [&](auto bias) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          key_bias[r] = bias(0, min(first_key(item) + key_of_block(r), last_key));
        }
      });
    }
  }
};

}  // namespace flash_dmattn
