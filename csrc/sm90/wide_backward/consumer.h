// A consumer: a warpgroup that computes scores of every second block of queries, and of all blocks dv, or dk, and its
// part of dq.
//
// dk and dv of 64 keys are more than the registers of one warpgroup, so each holds one of them. p and ds, which both
// multiply, go through shared memory: whoever has computed the scores of a block puts them there.
#pragma once

#include "../backward/named_barriers.h"
#include "../backward/key_consumer.h"
#include "storage.h"

namespace flash_dmattn {

// kGroup is which warpgroup: 0 holds dv, 1 holds dk.
template <class Traits, int kGroup>
struct WideBackwardConsumer : KeyConsumer<Traits, WideBackwardStorage<Traits>> {
  using Base = KeyConsumer<Traits, WideBackwardStorage<Traits>>;
  using typename Base::BiasWords, typename Base::Block, typename Base::Element, typename Base::Operand,
      typename Base::Scores;
  using Base::kD, Base::kDv, Base::kHasKeyBias, Base::kRows, Base::kScores, Base::kSteps, Base::lane, Base::p,
      Base::shared;
  static constexpr bool kHasDv = kGroup == 0;
  static constexpr int kColumns = kHasDv ? kDv : kD;  // of its sums
  static constexpr int kFirstDqPanel = kGroup == 0 ? 0 : Traits::dq_panels(0);
  static constexpr int kDqColumns = Traits::dq_panels(kGroup) * kPanelColumns;
  using Sums = float[kColumns / 2];
  using Piece = float[kDqColumns / 2];  // of dq

  // A place in the walk over blocks: the stages of q and dout, and of p and ds.
  struct Place {
    Ring<Traits::kStages> rows;
    Ring<Traits::kScoreStages> scores;

    __device__ __forceinline__ void advance() {
      rows.advance();
      scores.advance();
    }
  };

  Sums& sums;

  // --- scores ---------------------------------------------------------------------------------------------------

  // Of a block of its own, whose products are under way, p and ds to shared memory.
  __device__ __forceinline__ void share_scores(Scores& scores, Scores& dp, const Block& block,
                                               const KeyItem<Traits>& item, const Place& at) {
    BiasWords bias;
    if constexpr (Traits::kHasBiasTiles) {
      barrier_wait(&shared.bias_full[at.scores.stage], at.scores.phase);
      this->read_bias(bias, at.scores.stage);
    }
    wgmma_wait<1>();
    pin(scores);
    this->finish_scores(scores, at.rows.stage, bias);
    if (block.has_edge) this->forbid(scores, block.words, item, block.index);
#pragma unroll
    for (int s = 0; s < kScores; ++s) scores[s] = exp2_approx(scores[s]);
    wgmma_wait<0>();
    pin(dp);
    Operand probs, ds;
    float of_keys[2];
    this->finish_ds(scores, dp, at.rows.stage, probs, ds, of_keys);
    add_key_sums(of_keys);
    // What bias is over is free: each warp has read what it writes there.
    barrier_wait(&shared.ds_empty[at.scores.stage], at.scores.phase ^ 1);
    this->write_turned(probs, shared.bias[at.scores.stage]);
    this->write_turned(ds, shared.ds[at.scores.stage]);
  }

  // The same with a softcap, 16 queries at a time once dp is there.
  __device__ __forceinline__ void share_capped(Scores& scores, Scores& dp, const Block& block,
                                               const KeyItem<Traits>& item, const Place& at) {
    this->cap_scores(scores, dp, block, item);
    const float cap = p.softcap * kLog2e;
    const float* lse = shared.lse[at.rows.stage] + 2 * (lane % 4);
    const float* delta = shared.delta[at.rows.stage] + 2 * (lane % 4);
    const uint32_t bias_tile = shared_address(shared.bias[at.scores.stage]) + this->place_of_matrices();
    const uint32_t ds_tile = shared_address(shared.ds[at.scores.stage]) + this->place_of_matrices();
    BiasWords bias;
    float of_keys[2] = {0.0f, 0.0f};
    if constexpr (Traits::kHasBiasTiles) barrier_wait(&shared.bias_full[at.scores.stage], at.scores.phase);
    barrier_wait(&shared.ds_empty[at.scores.stage], at.scores.phase ^ 1);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if constexpr (Traits::kHasBiasTiles) load_matrices_turned(bias[i], bias_tile + i * 16 * kRowBytes);
      typename Base::Quarter probs, ds, unused;
      this->finish_capped(i, scores, dp, cap, lse, delta, bias, probs, ds, unused, of_keys);
      // Over the matrices that the warp has just read.
      store_matrices_turned(probs, bias_tile + i * 16 * kRowBytes);
      store_matrices_turned(ds, ds_tile + i * 16 * kRowBytes);
    }
    add_key_sums(of_keys);
  }

  __device__ __forceinline__ void make_scores(const KeyItem<Traits>& item, int step, const Place& at) {
    Block block;
    this->find_block(block, item, step);
    Scores scores, dp;
    barrier_wait(&shared.q_full[at.rows.stage], at.rows.phase);
    this->start_scores(scores, at.rows.stage);
    barrier_wait(&shared.dout_full[at.rows.stage], at.rows.phase);
    this->start_dp(dp, at.rows.stage);
    if constexpr (Traits::kHasSoftcap) {
      share_capped(scores, dp, block, item, at);
    } else {
      share_scores(scores, dp, block, item, at);
    }
    shared_memory_fence();
    barrier_arrive_of_warp(&shared.ds_full[at.scores.stage]);
  }

  // --- products -------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void start_sums(const Place& at) {
    const uint8_t* scores = kHasDv ? shared.bias[at.scores.stage] : shared.ds[at.scores.stage];
    const uint8_t* rows = kHasDv ? shared.dout[at.rows.stage] : shared.q[at.rows.stage];
    const uint64_t a = matrix_descriptor(shared_address(scores), 16);
    const uint64_t b = matrix_descriptor(shared_address(rows), kRows * kRowBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      Wgmma<Element, kColumns>::run_turned(sums, step_by_rows(a, i), step_by_rows(b, i), true);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void start_dq(Piece& dq, const Place& at) {
    const uint64_t ds = matrix_descriptor(shared_address(shared.ds[at.scores.stage]), 16);
    const uint32_t keys = shared_address(shared.k[this->key_stage]) + kFirstDqPanel * Traits::kKeys * kRowBytes;
    const uint64_t k = matrix_descriptor(keys, Traits::kKeys * kRowBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Traits::kKeys / 16; ++i) {
      Wgmma<Element, kDqColumns>::run_rows(dq, step_by_columns<kRows>(ds, i), step_by_rows(k, i), i > 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void add_dq(const Piece& dq, const KeyItem<Traits>& item, int block) {
    const int blocks = (p.seqlen_q + kTile - 1) / kTile * (kTile / kRows);
    const int64_t head = static_cast<int64_t>(item.batch) * p.num_heads + item.head;
    if (p.dq_turns != nullptr) named_barrier_sync(kMayAddBarrier + kGroup, 128 + 32);
    float* to = p.dq_sums + ((head * blocks + block) * Traits::kPanels + kFirstDqPanel) * kPieceFloats;
#pragma unroll
    for (int c = 0; c < kDqColumns / 8; ++c) {
      add_four(to + c / 8 * kPieceFloats + place_in_piece(c % 8, threadIdx.x % 128), dq[4 * c], dq[4 * c + 1],
               dq[4 * c + 2], dq[4 * c + 3]);
    }
    if (p.dq_turns != nullptr) named_barrier_arrive(kHasAddedBarrier + kGroup, 128 + 32);
  }

  // The products of p and ds of a block. dq comes first: it is added while the other product runs.
  __device__ __forceinline__ void multiply(const KeyItem<Traits>& item, int step, const Place& at) {
    bool has_edge;
    const int block = item.walk.at(step, has_edge);
    barrier_wait(&shared.ds_full[at.scores.stage], at.scores.phase);
    // Scores of the block are there, so nobody reads q for them any more, nor dout.
    barrier_arrive_of_warp(kHasDv ? &shared.q_empty[at.rows.stage] : &shared.dout_empty[at.rows.stage]);
    Piece dq;
    start_dq(dq, at);
    start_sums(at);
    wgmma_wait<1>();
    pin(dq);
    if (p.dq_sums != nullptr) add_dq(dq, item, block);
    wgmma_wait<0>();
    pin(sums);
    barrier_arrive_of_warp(kHasDv ? &shared.dout_empty[at.rows.stage] : &shared.q_empty[at.rows.stage]);
    barrier_arrive_of_warp(&shared.ds_empty[at.scores.stage]);
    if constexpr (Traits::kHasBiasTiles && kHasDv) barrier_arrive_of_warp(&shared.bias_empty[at.scores.stage]);
  }

  // --- the walk -------------------------------------------------------------------------------------------------

  // Of two blocks the first consumer has the scores of one and the second those of the other, which it computes before
  // it multiplies the first: the products of one consumer run while the other is at its scores. `made` and `multiplied`
  // are the places of the next block.
  __device__ __forceinline__ void run(const KeyItem<Traits>& item, Place& made, Place& multiplied) {
#pragma unroll 1
    for (int i = -kGroup; i < item.walk.steps; ++i) {
      if (i + kGroup < item.walk.steps) {
        if (made.scores.stage == kGroup) make_scores(item, i + kGroup, made);
        made.advance();
      }
      if (i >= 0) {
        multiply(item, i, multiplied);
        multiplied.advance();
      }
    }
  }

  // --- the gradient of a bias per key -----------------------------------------------------------------------------

  // Sums over the queries of its own blocks; of a key they are those of one thread.
  __device__ __forceinline__ float& key_sum(int r) { return shared.key_sums[kGroup][this->key_of_block(r)]; }

  __device__ __forceinline__ void start_key_sums() {
    if constexpr (kHasKeyBias) {
      if (lane % 4 == 0) key_sum(0) = key_sum(1) = 0.0f;
    }
  }

  __device__ __forceinline__ void add_key_sums(const float (&of_keys)[2]) {
    if constexpr (kHasKeyBias) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float sum = sum_of_row(of_keys[r]);
        if (lane % 4 == 0) key_sum(r) += sum;
      }
    }
  }

  // Both consumers meet here, and leave once what they have summed is read.
  __device__ __forceinline__ void store_key_sums(const KeyItem<Traits>& item) {
    if constexpr (kHasKeyBias) {
      if (p.dbias_sums == nullptr) return;
      named_barrier_sync(kKeySumsBarrier, 2 * 128);
      const int place = threadIdx.x % 128, key = this->first_key(item) + place;
      if (kGroup == 0 && place < Traits::kKeys && key < p.seqlen_k) {
        float* to = p.dbias_sums + (static_cast<int64_t>(item.batch) * p.num_heads + item.head) * p.seqlen_k;
        to[key] = shared.key_sums[0][place] + shared.key_sums[1][place];
      }
      named_barrier_sync(kKeySumsBarrier, 2 * 128);
    }
  }
};

template <int kGroup, class Traits>
__device__ __forceinline__ void consume_wide_backward(const BackwardParams& p, WideBackwardStorage<Traits>& shared) {
  using Consumer = WideBackwardConsumer<Traits, kGroup>;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x % 128 / 32, 0), lane = threadIdx.x % 32;
  typename Consumer::Place made, multiplied;
  Ring<Traits::kKeyStages> ring_keys;
  Ring<2> ring_work;
  typename Consumer::Sums sums;
  for (;;) {
    const KeyItem<Traits>& item = take_work(shared, ring_work);
    if (!item.exists) return;
    Consumer consumer{{p, shared, 0, warp, lane, ring_keys.stage, {}}, sums};
    if (item.is_first) {
#pragma unroll
      for (int i = 0; i < Consumer::kColumns / 2; ++i) sums[i] = 0.0f;
      barrier_wait(&shared.keys_full[ring_keys.stage], ring_keys.phase);
    }
    consumer.start_key_sums();
    consumer.load_key_bias(item);
    consumer.run(item, made, multiplied);
    consumer.store_key_sums(item);
    if (item.is_last) {
      barrier_arrive_of_warp(&shared.keys_empty[ring_keys.stage]);
      ring_keys.advance();
      if (p.key_turns != nullptr) named_barrier_sync(kMayAddBarrier + kGroup, 128 + 32);
      if constexpr (Consumer::kHasDv) {
        consumer.store(sums, p.dv, consumer.sums_of(item, p.dv_sums), p.head_dim_v, 1.0f, item);
      } else {
        consumer.store(sums, p.dk, consumer.sums_of(item, p.dk_sums), p.head_dim, p.softmax_scale, item);
      }
      if (p.key_turns != nullptr) named_barrier_arrive(kHasAddedBarrier + kGroup, 128 + 32);
    }
    give_back_work(shared, ring_work);
  }
}

}  // namespace flash_dmattn
