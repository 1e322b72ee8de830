// A consumer warpgroup of the wide backward kernel: computes the scores of every second query block, and for all blocks
// dv or dk, and its share of dq.
//
// dk and dv of 64 keys do not fit into the registers of one warpgroup, so each consumer holds one of them. Both
// multiply p and ds, which go through shared memory: the consumer that computes a block's scores writes them.
#pragma once

#include "../backward/named_barriers.h"
#include "../backward/key_consumer.h"
#include "storage.h"

namespace flash_dmattn {

// kGroup: which consumer. 0 holds dv, 1 holds dk.
template <class Traits, int kGroup>
struct WideBackwardConsumer : KeyConsumer<Traits, WideBackwardStorage<Traits>> {
  using Base = KeyConsumer<Traits, WideBackwardStorage<Traits>>;
  using Base::kD, Base::kDv, Base::kHasKeyBias, Base::kBlockM, Base::kScores, Base::kSteps, Base::lane, Base::p,
      Base::shared;
  using typename Base::BiasWords, typename Base::Block, typename Base::Element, typename Base::Operand,
      typename Base::Scores;
  static constexpr bool kHasDv = kGroup == 0;
  static constexpr int kColumns = kHasDv ? kDv : kD;  // of its accumulator
  static constexpr int kFirstDqPanel = kGroup == 0 ? 0 : Traits::dq_panels(0);
  static constexpr int kDqColumns = Traits::dq_panels(kGroup) * kPanelColumns;
  using Sums = float[kColumns / 2];
  using DqAccum = float[kDqColumns / 2];  // its share of dq

  // Pipelines of q and dout, and of p and ds.
  struct PipelineStates {
    PipelineState<Traits::kStages> rows;
    PipelineState<Traits::kScoreStages> scores;

    __device__ __forceinline__ void advance() {
      rows.advance();
      scores.advance();
    }
  };

  Sums& sums;

  // --- scores ---------------------------------------------------------------------------------------------------

  // Finishes the scores of one of its own blocks and writes p and ds to shared memory.
  template <bool kGreat>
  __device__ __forceinline__ void share_scores(Scores& scores, Scores& dp, const Block& block,
                                               const KeyWorkItem<Traits>& item, const PipelineStates& at) {
    BiasWords bias;
    if constexpr (Traits::kHasBiasTiles) {
      barrier_wait(&shared.bias_full[at.scores.stage], at.scores.phase);
      this->read_bias(bias, at.scores.stage);
    }
    wgmma_wait<1>();
    wgmma_fence_operand(scores);
    this->template finish_scores<kGreat>(scores, at.rows.stage, bias, item, block.index);
    if (block.needs_mask) this->apply_mask(scores, block.words, item, block.index);
#pragma unroll
    for (int s = 0; s < kScores; ++s) scores[s] = exp2_approx(scores[s]);
    wgmma_wait<0>();
    wgmma_fence_operand(dp);
    Operand probs, ds;
    float ds_sums[2];
    this->finish_ds(scores, dp, at.rows.stage, probs, ds, ds_sums);
    add_key_sums(ds_sums);
    // p overwrites the bias: each warp has read what it overwrites.
    barrier_wait(&shared.ds_empty[at.scores.stage], at.scores.phase ^ 1);
    this->write_transposed(probs, shared.bias[at.scores.stage]);
    this->write_transposed(ds, shared.ds[at.scores.stage]);
  }

  // The same with a softcap, 16 queries at a time, once dp is there.
  template <bool kGreat>
  __device__ __forceinline__ void share_capped(Scores& scores, Scores& dp, const Block& block,
                                               const KeyWorkItem<Traits>& item, const PipelineStates& at) {
    this->cap_scores(scores, dp, block, item);
    const float cap = p.softcap * kLog2e;
    const float* lse = shared.lse[at.rows.stage] + 2 * (lane % 4);
    const float* delta = shared.delta[at.rows.stage] + 2 * (lane % 4);
    const uint32_t bias_tile = shared_address(shared.bias[at.scores.stage]) + this->matrices_offset();
    const uint32_t ds_tile = shared_address(shared.ds[at.scores.stage]) + this->matrices_offset();
    BiasWords bias;
    float ds_sums[2] = {0.0f, 0.0f};
    if constexpr (Traits::kHasBiasTiles) barrier_wait(&shared.bias_full[at.scores.stage], at.scores.phase);
    barrier_wait(&shared.ds_empty[at.scores.stage], at.scores.phase ^ 1);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if constexpr (Traits::kHasBiasTiles) ldmatrix_x4_trans(bias[i], bias_tile + i * 16 * kRowBytes);
      typename Base::Quarter probs, ds, unused;
      this->template finish_capped<kGreat>(i, scores, dp, cap, lse, delta, bias, item, block.index, probs, ds, unused,
                                           ds_sums);
      // Overwrites the matrices that the warp has just loaded.
      stmatrix_x4_trans(probs, bias_tile + i * 16 * kRowBytes);
      stmatrix_x4_trans(ds, ds_tile + i * 16 * kRowBytes);
    }
    add_key_sums(ds_sums);
  }

  template <bool kGreat>
  __device__ __forceinline__ void produce_scores(const KeyWorkItem<Traits>& item, int step, const PipelineStates& at) {
    Block block;
    this->find_block(block, item, step);
    Scores scores, dp;
    barrier_wait(&shared.q_full[at.rows.stage], at.rows.phase);
    this->start_scores(scores, at.rows.stage);
    barrier_wait(&shared.dout_full[at.rows.stage], at.rows.phase);
    this->start_dp(dp, at.rows.stage);
    if constexpr (Traits::kHasSoftcap) {
      share_capped<kGreat>(scores, dp, block, item, at);
    } else {
      share_scores<kGreat>(scores, dp, block, item, at);
    }
    fence_proxy_async_shared();
    barrier_arrive_of_warp(&shared.ds_full[at.scores.stage]);
  }

  // --- products -------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void start_sums(const PipelineStates& at) {
    const uint8_t* scores = kHasDv ? shared.bias[at.scores.stage] : shared.ds[at.scores.stage];
    const uint8_t* rows = kHasDv ? shared.dout[at.rows.stage] : shared.q[at.rows.stage];
    const uint64_t a = matrix_descriptor(shared_address(scores), 16);
    const uint64_t b = matrix_descriptor(shared_address(rows), kBlockM * kRowBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      Wgmma<Element, kColumns>::run_ab_transposed(sums, advance_mn_major(a, i), advance_mn_major(b, i), true);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void start_dq(DqAccum& dq, const PipelineStates& at) {
    const uint64_t ds = matrix_descriptor(shared_address(shared.ds[at.scores.stage]), 16);
    const uint32_t keys = shared_address(shared.k[this->key_stage]) + kFirstDqPanel * Traits::kBlockN * kRowBytes;
    const uint64_t k = matrix_descriptor(keys, Traits::kBlockN * kRowBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Traits::kBlockN / 16; ++i) {
      Wgmma<Element, kDqColumns>::run_b_transposed(dq, advance_k_major<kBlockM>(ds, i), advance_mn_major(k, i), i > 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void add_dq(const DqAccum& dq, const KeyWorkItem<Traits>& item, int block) {
    const int blocks = (p.seqlen_q + kTile - 1) / kTile * (kTile / kBlockM);
    const int64_t head = static_cast<int64_t>(item.batch) * p.num_heads + item.head;
    if (p.dq_semaphore != nullptr) named_barrier_sync(kMayAddBarrier + kGroup, 128 + 32);
    float* to = p.dq_sums + ((head * blocks + block) * Traits::kPanels + kFirstDqPanel) * kAccumFloats<kD>;
#pragma unroll
    for (int c = 0; c < kDqColumns / 8; ++c) {
      red_add_v4(to + c / 8 * kAccumFloats<kD> + accum_offset(c % 8, threadIdx.x % 128), dq[4 * c], dq[4 * c + 1],
                 dq[4 * c + 2], dq[4 * c + 3]);
    }
    if (p.dq_semaphore != nullptr) named_barrier_arrive(kHasAddedBarrier + kGroup, 128 + 32);
  }

  // The products of p and ds of a block. dq comes first: it is added to device memory while the other product runs.
  __device__ __forceinline__ void multiply(const KeyWorkItem<Traits>& item, int step, const PipelineStates& at) {
    bool needs_mask;
    const int block = item.walk.at(step, needs_mask);
    barrier_wait(&shared.ds_full[at.scores.stage], at.scores.phase);
    // The block's scores are done, so q and dout are no longer read for them.
    barrier_arrive_of_warp(kHasDv ? &shared.q_empty[at.rows.stage] : &shared.dout_empty[at.rows.stage]);
    DqAccum dq;
    start_dq(dq, at);
    start_sums(at);
    wgmma_wait<1>();
    wgmma_fence_operand(dq);
    if (p.dq_sums != nullptr) add_dq(dq, item, block);
    wgmma_wait<0>();
    wgmma_fence_operand(sums);
    barrier_arrive_of_warp(kHasDv ? &shared.dout_empty[at.rows.stage] : &shared.q_empty[at.rows.stage]);
    barrier_arrive_of_warp(&shared.ds_empty[at.scores.stage]);
    if constexpr (Traits::kHasBiasTiles && kHasDv) barrier_arrive_of_warp(&shared.bias_empty[at.scores.stage]);
  }

  // --- mainloop -------------------------------------------------------------------------------------------------

  // The first consumer computes the scores of even blocks, the second the scores of odd blocks. The second does so
  // before it multiplies the even blocks: one consumer's products run while the other computes scores. score_state and
  // mma_state are the pipeline positions of the next block of either kind.
  template <bool kGreat>
  __device__ __forceinline__ void mainloop(const KeyWorkItem<Traits>& item, PipelineStates& score_state,
                                           PipelineStates& mma_state) {
#pragma unroll 1
    for (int i = -kGroup; i < item.walk.steps; ++i) {
      if (i + kGroup < item.walk.steps) {
        if (score_state.scores.stage == kGroup) produce_scores<kGreat>(item, i + kGroup, score_state);
        score_state.advance();
      }
      if (i >= 0) {
        multiply(item, i, mma_state);
        mma_state.advance();
      }
    }
  }

  // --- the gradient of a bias per key -----------------------------------------------------------------------------

  // Sums over the queries of its own blocks, one key per thread.
  __device__ __forceinline__ float& key_sum(int r) { return shared.key_sums[kGroup][this->key_of_block(r)]; }

  __device__ __forceinline__ void start_key_sums() {
    if constexpr (kHasKeyBias) {
      if (lane % 4 == 0) key_sum(0) = key_sum(1) = 0.0f;
    }
  }

  __device__ __forceinline__ void add_key_sums(const float (&ds_sums)[2]) {
    if constexpr (kHasKeyBias) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float sum = quad_sum(ds_sums[r]);
        if (lane % 4 == 0) key_sum(r) += sum;
      }
    }
  }

  // Both consumers meet here, and continue once the sums have been read.
  __device__ __forceinline__ void store_key_sums(const KeyWorkItem<Traits>& item) {
    if constexpr (kHasKeyBias) {
      if (p.dbias_sums == nullptr) return;
      named_barrier_sync(kKeySumsBarrier, 2 * 128);
      const int index = threadIdx.x % 128, key = this->first_key(item) + index;
      if (kGroup == 0 && index < Traits::kBlockN && key < p.seqlen_k) {
        float* to = p.dbias_sums + (static_cast<int64_t>(item.batch) * p.num_heads + item.head) * p.seqlen_k;
        this->store_key_sum(to, item, key, shared.key_sums[0][index] + shared.key_sums[1][index]);
      }
      named_barrier_sync(kKeySumsBarrier, 2 * 128);
    }
  }
};

template <int kGroup, bool kGreat, class Traits>
__device__ __forceinline__ void consume_wide_work_tiles(const BackwardParams& p, WideBackwardStorage<Traits>& shared,
                                                        int warp, int lane) {
  using Consumer = WideBackwardConsumer<Traits, kGroup>;
  typename Consumer::PipelineStates score_state, mma_state;
  PipelineState<Traits::kKeyStages> pipe_keys;
  PipelineState<kWorkStages> pipe_work;
  typename Consumer::Sums sums;
  for (;;) {
    const KeyWorkItem<Traits>& item = get_work_tile(shared, pipe_work);
    if (!item.is_valid) return;
    Consumer consumer{{p, shared, 0, warp, lane, pipe_keys.stage, {}}, sums};
    if (item.is_first) {
#pragma unroll
      for (int i = 0; i < Consumer::kColumns / 2; ++i) sums[i] = 0.0f;
      barrier_wait(&shared.keys_full[pipe_keys.stage], pipe_keys.phase);
    }
    consumer.start_key_sums();
    consumer.load_key_bias(item);
    consumer.template mainloop<kGreat>(item, score_state, mma_state);
    consumer.store_key_sums(item);
    if (item.is_last) {
      barrier_arrive_of_warp(&shared.keys_empty[pipe_keys.stage]);
      pipe_keys.advance();
      if (p.dkv_semaphore != nullptr) named_barrier_sync(kMayAddBarrier + kGroup, 128 + 32);
      if constexpr (Consumer::kHasDv) {
        consumer.epilogue(sums, p.dv, consumer.sums_of(item, p.dv_sums), p.head_dim_v, 1.0f, item);
      } else {
        consumer.epilogue(sums, p.dk, consumer.sums_of(item, p.dk_sums), p.head_dim, p.softmax_scale, item);
      }
      if (p.dkv_semaphore != nullptr) named_barrier_arrive(kHasAddedBarrier + kGroup, 128 + 32);
    }
    release_work_tile(shared, pipe_work);
  }
}

template <int kGroup, class Traits>
__device__ __forceinline__ void consume_wide_backward(const BackwardParams& p, WideBackwardStorage<Traits>& shared) {
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x % 128 / 32, 0), lane = threadIdx.x % 32;
  choose_great<Traits>(p, shared.has_great, kGroup, warp, lane, [&](auto is_great, int, int own_warp, int own_lane) {
    consume_wide_work_tiles<kGroup, decltype(is_great)::value>(p, shared, own_warp, own_lane);
  });
}

}  // namespace flash_dmattn
