// A consumer: a warpgroup that computes 64 rows of out.
#pragma once

#include "../../device/fragments.h"
#include "../../device/softcap.h"
#include "../operands.h"
#include "split_kv.h"
#include "storage.h"

namespace flash_dmattn {

constexpr int kFirstNamedBarrier = 1;  // 0 is __syncthreads

template <class Traits>
struct Consumer {
  using Element = typename Traits::Element;
  static constexpr int kD = Traits::kD, kDv = Traits::kDv, kKeys = Traits::kKeys;
  static constexpr int kScores = kKeys / 2, kOut = kDv / 2;  // of a thread
  static constexpr int kWords = kKeys / kWord;

  const ForwardParams& p;
  ForwardStorage<Traits>& shared;
  const int group, lane, row_of_warp;  // which warpgroup; its row of the work, of the thread's first row
  const int query_stage;
  float (&out)[kOut];
  float row_max[2], row_sum[2];
  float threshold[2];  // a score above it asks for a greater row_max
  // Where the lane's row of the first four matrices of a warp's bias lies in a panel of the tile.
  const uint32_t bias_place;

  // What forbids keys in a block with an edge.
  struct Edge {
    uint32_t words[2][kWords];
  };

  __device__ __forceinline__ void start_scores(float (&scores)[kScores], int stage) {
    const uint64_t q = matrix_descriptor(shared_address(shared.q[query_stage]) + group * 64 * kRowBytes, 16);
    const uint64_t k = matrix_descriptor(shared_address(shared.k[stage]), 16);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kD / 16; ++i) {
      Wgmma<Element, kKeys>::run(scores, step_by_columns<Traits::kRows>(q, i), step_by_columns<kKeys>(k, i), i > 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void start_out(const uint32_t (&probs)[kKeys / 16][4], int stage, bool accumulate) {
    const uint64_t v = matrix_descriptor(shared_address(shared.v[stage]), kKeys * kRowBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      Wgmma<Element, kDv>::run(out, probs[i], step_by_rows(v, i), accumulate || i > 0);
    }
    wgmma_commit();
  }

  // Where the bits of the thread's two rows start; a row beyond the last has those of the last.
  __device__ __forceinline__ void find_bits(const Work& work, const int32_t* (&rows)[2]) {
    if constexpr (Traits::kHasMask) {
      const int64_t words = (p.seqlen_k + kTile - 1) / kTile * kTileWords;
      const int64_t mask = mask_of(p, work);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = min(work.first_row + row_of_warp + 8 * r, p.seqlen_q - 1);
        rows[r] = p.mask_bits + (mask * p.seqlen_q + row) * words;
      }
    }
  }

  __device__ __forceinline__ void load_edge(Edge& edge, const int32_t* const (&rows)[2], int block) {
    if constexpr (Traits::kHasMask) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int32_t* bits = rows[r] + block * kWords;
        if constexpr (kWords == 4) {
          const int4 four = __ldg(reinterpret_cast<const int4*>(bits));
          edge.words[r][0] = four.x, edge.words[r][1] = four.y, edge.words[r][2] = four.z, edge.words[r][3] = four.w;
        } else {
          const int2 two = __ldg(reinterpret_cast<const int2*>(bits));
          edge.words[r][0] = two.x, edge.words[r][1] = two.y;
        }
      }
    }
  }

  __device__ __forceinline__ void forbid(float (&scores)[kScores], const Edge& edge, const Work& work, int block) {
    const int column = 2 * (lane % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (Traits::kHasMask) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          const uint32_t word = edge.words[r][w] >> column;
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const int bit = i / 2 * 8 + i % 2;
            float& score = scores[4 * (4 * w + i / 2) + 2 * r + i % 2];
            score = word & 1u << bit ? score : -INFINITY;
          }
        }
      } else {
        const int row = work.first_row + row_of_warp + 8 * r;
        const int from = row + p.low - block * kKeys - column;
        const int to = min(row + p.high, p.seqlen_k - 1) - block * kKeys - column;
#pragma unroll
        for (int i = 0; i < kScores / 2; ++i) {
          const int at = i / 2 * 8 + i % 2;
          float& score = scores[4 * (i / 2) + 2 * r + i % 2];
          score = at >= from && at <= to ? score : -INFINITY;
        }
      }
    }
  }

  // The bias of a step, as it lies in shared memory: pairs of 16-bit values of kTile, floats for both rows of kVector.
  static constexpr int kBiasWords = kKeys / 4;
  using BiasWords = uint32_t[kBiasWords];

  __device__ __forceinline__ void load_bias(BiasWords& bias, Ring<Traits::kBiasStages>& ring) {
    barrier_wait(&shared.bias_full[ring.stage], ring.phase);
    if constexpr (Traits::kBias == Bias::kTile) {
      const uint32_t first = shared_address(shared.bias[ring.stage]) + bias_place;
#pragma unroll
      for (int c = 0; c < kKeys / 16; ++c) {
        // Two chunks of 16 bytes further, which the swizzle has where these bits say.
        load_matrices(reinterpret_cast<uint32_t(&)[4]>(bias[4 * c]),
                      (first ^ (c % 4 * 32)) + c / 4 * (Traits::kRows * kRowBytes));
      }
    } else {
      const uint32_t start = shared_address(shared.bias[ring.stage]) + lane % 4 * 8;
#pragma unroll
      for (int c = 0; c < kKeys / 8; ++c) load_pair(bias[2 * c], bias[2 * c + 1], start + c * 32);
    }
    barrier_arrive_of_warp(&shared.bias_empty[ring.stage]);
    ring.advance();
  }

  __device__ __forceinline__ void add_bias(float (&scores)[kScores], const BiasWords& bias) {
    if constexpr (Traits::kBias == Bias::kTile) {
#pragma unroll
      for (int i = 0; i < kBiasWords; ++i) {
        const float2 pair = unpack(bias[i], Element{});
        scores[2 * i] = fmaf(pair.x, p.inverse_scale, scores[2 * i]);
        scores[2 * i + 1] = fmaf(pair.y, p.inverse_scale, scores[2 * i + 1]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kScores; ++i) scores[i] += __uint_as_float(bias[2 * (i / 4) + i % 2]);
    }
  }

  // Scores in units of p.scale: f of the product, then the bias over the scale.
  __device__ __forceinline__ void finish_scores(float (&scores)[kScores], const Work& work, int block,
                                                BiasWords& bias, Ring<Traits::kBiasStages>& ring) {
    if (p.transforms) {
      if (p.softcap > 0) {
#pragma unroll
        for (int i = 0; i < kScores; ++i) scores[i] = p.softcap * tanh_exact(p.pre_scale * scores[i]);
      } else {
#pragma unroll
        for (int i = 0; i < kScores; ++i) scores[i] *= p.pre_scale;
      }
    }
    if constexpr (Traits::kSuppliesBias) {
      if constexpr (!Traits::kLoadsBiasEarly) load_bias(bias, ring);
      add_bias(scores, bias);
    }
    if constexpr (Traits::kBias == Bias::kStrided) {
      const int first_key = block * kKeys + 2 * (lane % 4);
      with_bias(p, work, [&](auto bias) {
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
          // Beyond the end any value will do: the row is not stored, the key is forbidden.
          const int row = min(work.first_row + row_of_warp + i / 2 % 2 * 8, p.seqlen_q - 1);
          const int key = min(first_key + i / 4 * 8 + i % 2, p.seqlen_k - 1);
          scores[i] = fmaf(bias(row, key), p.inverse_scale, scores[i]);
        }
      });
    }
  }

  // Scores become probabilities up to the factor of the row, which is exp of what is subtracted: row_max, the greatest
  // score when it was last set. It is set again only when a score of the warp's rows is greater by more than kSlack (in
  // powers of 2): then out and the sum have to be corrected, and the four threads of a row to tell each other their
  // maxima. Probabilities reach 2^kSlack, which neither fp32 nor 16 bits mind. Returns whether out is to be corrected.
  // Source: FlashAttention-4's rule for skipping the correction.
  __device__ __forceinline__ bool softmax(float (&scores)[kScores], float (&correction)[2]) {
    const float scale = p.scale * kLog2e;
    bool exceeds = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // By their bits, as integers: three of those are compared at once. Where a score is positive this is the greatest
      // of them; where none is it is something negative, below every threshold.
      int top = __float_as_int(scores[2 * r]);
#pragma unroll
      for (int c = 0; c < kScores / 4; ++c) {
        top = max(max(top, __float_as_int(scores[4 * c + 2 * r])), __float_as_int(scores[4 * c + 2 * r + 1]));
      }
      exceeds |= !(__int_as_float(top) <= threshold[r]);
    }
    float shift[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) shift[r] = row_max[r] * scale;
    const bool corrects = __any_sync(0xffffffffu, exceeds);
    if (corrects) raise_maxima(scores, correction, shift);
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores[i] = exp2_approx(fmaf(scores[i], scale, -shift[i / 2 % 2]));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) sum += scores[4 * (i / 2) + 2 * r + i % 2];
      row_sum[r] += sum;
    }
    return corrects;
  }

  // Sets row_max, and what goes with it, to the greatest scores so far. `shift` is what is to be subtracted.
  __device__ __forceinline__ void raise_maxima(float (&scores)[kScores], float (&correction)[2], float (&shift)[2]) {
    constexpr float kSlack = 8.0f;
    // Rounded, a great shift leaves the exponent of the maximum above or below 0 by up to 2^-24 of it; rounded to 16
    // bits such a probability is no longer what the sum counts, and a row of one key is not exact.
    constexpr float kGreatShift = 128.0f;
    const float scale = p.scale * kLog2e;
    bool is_great = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = row_max[r];
#pragma unroll
      for (int c = 0; c < kScores / 4; ++c) {
        top = fmaxf(top, fmaxf(scores[4 * c + 2 * r], scores[4 * c + 2 * r + 1]));
      }
      top = max_of_row(top);
      // Of a row of which nothing has been allowed yet both are -inf, and out and the sum are 0.
      correction[r] = top == -INFINITY ? 1.0f : exp2_approx((row_max[r] - top) * scale);
      row_sum[r] *= correction[r];
      row_max[r] = top;
      shift[r] = top == -INFINITY ? 0.0f : top * scale;
      is_great |= fabsf(shift[r]) > kGreatShift;
      // NaN, which every step exceeds, where a negative score may be too great, or a shift is.
      const float bound = top + kSlack / kLog2e * p.inverse_scale;
      threshold[r] = bound >= 0.0f && fabsf(shift[r]) <= kGreatShift ? bound : NAN;
    }
    if (__any_sync(0xffffffffu, is_great)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float top_or_0 = row_max[r] == -INFINITY ? 0.0f : row_max[r];
        shift[r] = 0.0f;
#pragma unroll
        for (int i = 0; i < kScores / 2; ++i) scores[4 * (i / 2) + 2 * r + i % 2] -= top_or_0;
      }
    }
  }

  __device__ __forceinline__ static void to_operand(const float (&scores)[kScores], uint32_t (&probs)[kKeys / 16][4]) {
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) probs[i][e] = pack(scores[8 * i + 2 * e], scores[8 * i + 2 * e + 1], Element{});
    }
  }

  __device__ __forceinline__ void correct_out(const float (&correction)[2]) {
#pragma unroll
    for (int i = 0; i < kOut; ++i) out[i] *= correction[i / 2 % 2];
  }

  // out and lse of the work.
  __device__ __forceinline__ void store(const Work& work) {
    const bool per_query = Traits::kBias == Bias::kNone && p.bias_is_per_query;
    float lse[2], factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = sum_of_row(row_sum[r]);
      lse[r] = sum > 0 ? fmaf(row_max[r], p.scale, logf(sum)) : -INFINITY;
      factor[r] = sum > 0 ? 1.0f / sum : 0.0f;
      const int row = work.first_row + row_of_warp + 8 * r;
      if (per_query && row < p.seqlen_q) {
        float bias;
        with_bias(p, work, [&](auto bias_at) { bias = bias_at(row, 0); });
        lse[r] += bias;
        if (bias == -INFINITY) factor[r] = 0.0f;  // the row attends nothing
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = work.first_row + row_of_warp + 8 * r;
      const bool exists = row < p.seqlen_q;
      if (exists && lane % 4 == 0) {
        p.lse[(static_cast<int64_t>(work.batch) * p.num_heads + work.head) * p.seqlen_q + row] = lse[r];
      }
      Element* to = static_cast<Element*>(p.out) +
                    ((static_cast<int64_t>(work.batch) * p.seqlen_q + row) * p.num_heads + work.head) * p.head_dim_v;
#pragma unroll
      for (int c = 0; c < kDv / 32; ++c) {
        uint32_t words[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const int i = 4 * (4 * c + w) + 2 * r;
          // Not 0 * x: what has been summed for a row that attends nothing may be anything.
          words[w] = factor[r] == 0.0f ? 0u : pack(out[i] * factor[r], out[i + 1] * factor[r], Element{});
        }
        transpose_words(words[0], words[1], words[2], words[3], lane);
        const int column = 8 * (4 * c + lane % 4);
        if (exists && column < p.head_dim_v) {
          *reinterpret_cast<uint4*>(to + column) = make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }

  // Consumers take turns: one issues its products while the others are at their softmax.
  __device__ __forceinline__ void wait_turn() { named_barrier_sync(kFirstNamedBarrier + group, 2 * 128); }
  __device__ __forceinline__ void pass_turn() {
    named_barrier_arrive(kFirstNamedBarrier + (group + 1 == Traits::kConsumers ? 0 : group + 1), 2 * 128);
  }

  // The loop over blocks of keys: scores of a step are computed while the step before is multiplied with v.
  __device__ __forceinline__ void run(const Work& work, const Walk<Traits>& walk, Ring<Traits::kStages>& ring_k,
                                      Ring<Traits::kStages>& ring_v, Ring<Traits::kBiasStages>& ring_bias) {
    float correction[2];
    uint32_t probs[kKeys / 16][4];
    const int32_t* bits[2];
    find_bits(work, bits);
    {
      float scores[kScores];
      bool has_edge;
      const int block = walk.at(0, has_edge);
      Edge edge;
      if (has_edge) load_edge(edge, bits, block);
      barrier_wait(&shared.k_full[ring_k.stage], ring_k.phase);
      start_scores(scores, ring_k.stage);
      BiasWords bias;
      if constexpr (Traits::kLoadsBiasEarly) load_bias(bias, ring_bias);
      wgmma_wait<0>();
      barrier_arrive_of_warp(&shared.k_empty[ring_k.stage]);  // every warp for itself: its part of the products is done
      finish_scores(scores, work, block, bias, ring_bias);
      if (has_edge) forbid(scores, edge, work, block);
      softmax(scores, correction);  // of nothing so far
      to_operand(scores, probs);
      ring_k.advance();
    }
#pragma unroll 1
    for (int step = 1; step < walk.steps; ++step) {
      float scores[kScores];
      bool has_edge;
      const int block = walk.at(step, has_edge);
      Edge edge;
      if (has_edge) load_edge(edge, bits, block);
      barrier_wait(&shared.k_full[ring_k.stage], ring_k.phase);
      wait_turn();
      start_scores(scores, ring_k.stage);
      barrier_wait(&shared.v_full[ring_v.stage], ring_v.phase);
      start_out(probs, ring_v.stage, step > 1);
      if constexpr (!Traits::kPassesTurnLate) pass_turn();
      BiasWords bias;
      if constexpr (Traits::kLoadsBiasEarly) load_bias(bias, ring_bias);
      wgmma_wait<1>();
      pin(scores);
      barrier_arrive_of_warp(&shared.k_empty[ring_k.stage]);
      finish_scores(scores, work, block, bias, ring_bias);
      if constexpr (Traits::kPassesTurnLate) {
        pin(scores);
        pass_turn();
      }
      if (has_edge) forbid(scores, edge, work, block);
      const bool corrects = softmax(scores, correction);
      wgmma_wait<0>();
      pin(out);
      barrier_arrive_of_warp(&shared.v_empty[ring_v.stage]);
      to_operand(scores, probs);
      if (corrects) correct_out(correction);
      ring_k.advance();
      ring_v.advance();
    }
    barrier_arrive_of_warp(&shared.q_empty[query_stage]);
    barrier_wait(&shared.v_full[ring_v.stage], ring_v.phase);
    start_out(probs, ring_v.stage, walk.steps > 1);
    wgmma_wait<0>();
    pin(out);
    barrier_arrive_of_warp(&shared.v_empty[ring_v.stage]);
    ring_v.advance();
  }
};

// Consumer::bias_place: rows 0 to 7 and 8 to 15 of two neighbouring chunks of 16 bytes.
template <class Traits>
__device__ __forceinline__ uint32_t place_of_bias(int group) {
  const int lane = threadIdx.x % 32, row = group * 64 + threadIdx.x % 128 / 32 * 16 + lane % 16;
  uint32_t place = row * kRowBytes + ((lane / 16 ^ row % 8) << 4);
  asm volatile("" : "+r"(place));  // else it is computed again in each step
  return place;
}

template <class Traits>
__device__ __forceinline__ void consume(const ForwardParams& p, ForwardStorage<Traits>& shared, int group) {
  const int lane = threadIdx.x % 32;
  const int row_of_warp = group * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
  Ring<Traits::kStages> ring_k, ring_v;
  Ring<Traits::kQueryStages> ring_q;
  Ring<Traits::kBiasStages> ring_bias;
  Ring<2> ring_work;
  // The first warpgroup has the first turn: its barrier is filled by the last one.
  if (group == Traits::kConsumers - 1) named_barrier_arrive(kFirstNamedBarrier, 2 * 128);
  const uint32_t bias_place = place_of_bias<Traits>(group);
  for (;;) {
    const Item<Traits>& item = take_work(shared, ring_work);
    if (!item.exists) break;
    const Work& work = item.work;
    const Walk<Traits>& walk = item.walk;
    float out[Traits::kDv / 2];
    Consumer<Traits> consumer{p,   shared, group, lane, row_of_warp, ring_q.stage,
                              out, {-INFINITY, -INFINITY}, {0.0f, 0.0f}, {NAN, NAN}, bias_place};
    if (walk.steps > 0) {
      barrier_wait(&shared.q_full[ring_q.stage], ring_q.phase);
      consumer.run(work, walk, ring_k, ring_v, ring_bias);
      ring_q.advance();
    }
    bool has_piece = true;
    if constexpr (Traits::kSplits) {
      if (item.part >= 0) {
        has_piece = join_parts<Traits>(p, item.part, work.first_row + row_of_warp, out, consumer.row_max,
                                       consumer.row_sum);
      }
    }
    if (has_piece) consumer.store(work);
    give_back_work(shared, ring_work);
  }
  // Nobody leaves with an arrival of another outstanding: the last turn passed is taken by the first.
  if (group == 0) named_barrier_sync(kFirstNamedBarrier, 2 * 128);
}

}  // namespace flash_dmattn
