// A consumer warpgroup: computes dk and dv of 64 keys of each of the block's key tiles, and its share of dq.
//
// Scores have keys as rows and queries as columns, so p and ds are wgmma operands for dv and dk straight from
// registers. ds is also written to shared memory, transposed. From there both consumers multiply it by k, each for its
// share of dq, and a producer warp stores it as dbias.
#pragma once

#include "../bias_window.h"
#include "named_barriers.h"
#include "key_consumer.h"
#include "storage.h"

namespace flash_dmattn {

template <class Traits>
struct BackwardConsumer : KeyConsumer<Traits, BackwardStorage<Traits>> {
  using Base = KeyConsumer<Traits, BackwardStorage<Traits>>;
  using Base::group, Base::kD, Base::kDv, Base::kHasKeyBias, Base::kBlockM, Base::kScores, Base::kSteps, Base::lane,
      Base::p, Base::shared, Base::warp;
  using typename Base::BiasWords, typename Base::Block, typename Base::Element, typename Base::Operand,
      typename Base::Scores;
  static constexpr int kKeyTiles = Traits::kKeyTiles;
  using DsPipe = PipelineState<Traits::kDsStages>;
  using BiasPipe = PipelineState<Traits::kBiasStages>;
  using DqPipe = PipelineState<1>;

  // Pipelines of q and dout; of ds, where it is written and where dq reads it; of the bias; of dq on its way.
  struct Pipes {
    PipelineState<Traits::kStages> rows;
    DsPipe ds, dq;
    BiasPipe bias;
    DqPipe dq_sums;
  };

  float (&dk)[kKeyTiles][kD / 2];
  float (&dv)[kKeyTiles][kDv / 2];

  // --- products -------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void start_dv(const Operand& probs, int stage, int tile) {
    const uint64_t dout = matrix_descriptor(shared_address(shared.dout[stage]), kBlockM * kRowBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) Wgmma<Element, kDv>::run(dv[tile], probs[i], advance_mn_major(dout, i), true);
    wgmma_commit();
  }

  __device__ __forceinline__ void start_dk(const Operand& ds, int stage, int tile) {
    const uint64_t q = matrix_descriptor(shared_address(shared.q[stage]), kBlockM * kRowBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) Wgmma<Element, kD>::run(dk[tile], ds[i], advance_mn_major(q, i), true);
    wgmma_commit();
  }

  // The consumer's accumulator of dq: 64 of 128 queries, or 64 of 128 columns; with 64 queries and 64 columns, half the
  // columns.
  static constexpr int kDqColumns = Traits::kDqColumns;
  using DqAccum = float[kDqColumns / 2];
  // Its half of a third panel.
  static constexpr int kRestColumns = Traits::kHasThirdPanel ? kPanelColumns / 2 : 16;
  using DqRest = float[kRestColumns / 2];
  // Columns of the second consumer that exist: at D96 half of its panel is zeros.
  static constexpr int kLastColumns = kBlockM == 64 && kD > kAccumColumns ? kD - kAccumColumns : kDqColumns;

  // dq over the keys of all key tiles, whose ds are in consecutive stages.
  __device__ __forceinline__ void start_dq(DqAccum& dq, DsPipe pipe) {
    // One consumer's columns are the first panel, the other's the second; or they share a panel.
    constexpr int kColumnBytes =
        kDqColumns == kAccumColumns || Traits::kTurnsDq ? kTile * kRowBytes : kDqColumns * 2;
    const int row = kBlockM == 128 ? group * 64 : 0, column = kBlockM == 128 ? 0 : group;
    const uint64_t k = matrix_descriptor(shared_address(shared.k[this->key_stage]) + column * kColumnBytes, 16);
    wgmma_fence();
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile) {
      const uint64_t ds = matrix_descriptor(shared_address(shared.ds[pipe.stage]) + row * kRowBytes, 16);
#pragma unroll
      for (int i = 0; i < kTile / 16; ++i) {
        const uint64_t keys = advance_mn_major(k, tile * (kTile / 16) + i), scores = advance_k_major<kBlockM>(ds, i);
        if constexpr (Traits::kTurnsDq) {
          Wgmma<Element, kDqColumns>::run_a_transposed(dq, keys, scores, i > 0);
        } else {
          Wgmma<Element, kDqColumns>::run_b_transposed(dq, scores, keys, tile > 0 || i > 0);
        }
      }
      pipe.advance();
    }
    wgmma_commit();
  }

  // The same for its half of a third panel.
  __device__ __forceinline__ void start_rest_of_dq(DqRest& rest, const DsPipe& pipe) {
    const uint32_t keys = shared_address(shared.k[this->key_stage]) + 2 * kTile * kRowBytes + group * kRestColumns * 2;
    const uint64_t k = matrix_descriptor(keys, 16), ds = matrix_descriptor(shared_address(shared.ds[pipe.stage]), 16);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kTile / 16; ++i) {
      Wgmma<Element, kRestColumns>::run_b_transposed(rest, advance_k_major<kBlockM>(ds, i), advance_mn_major(k, i),
                                                     i > 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void wait_for_ds(DsPipe pipe) {
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile) {
#pragma unroll
      for (int slice = 0; slice < Traits::kDsSlices; ++slice) {
        barrier_wait(&shared.ds_full[pipe.stage * Traits::kDsSlices + slice], pipe.phase);
      }
      pipe.advance();
    }
  }

  __device__ __forceinline__ void release_ds(DsPipe& pipe) {
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile) {
      barrier_arrive_of_warp(&shared.ds_empty[pipe.stage]);
      pipe.advance();
    }
  }

  __device__ __forceinline__ void add_dq(const DqAccum& dq, const KeyWorkItem<Traits>& item, int block, DqPipe& pipe) {
    if constexpr (Traits::kTurnsDq) {
      barrier_wait(&shared.dq_empty[group], pipe.phase ^ 1);
      float* const to = reinterpret_cast<float*>(shared.dq[group]);
#pragma unroll
      for (int c = 0; c < kDqColumns / 8; ++c) {
        *reinterpret_cast<float4*>(to + accum_offset(c, threadIdx.x % 128)) =
            make_float4(dq[4 * c], dq[4 * c + 1], dq[4 * c + 2], dq[4 * c + 3]);
      }
      fence_proxy_async_shared();
      barrier_arrive_of_warp(&shared.dq_full[group]);
      pipe.advance();
    } else {
      if (p.dq_semaphore != nullptr) named_barrier_sync(kMayAddBarrier + group, 128 + 32);
      float* const to = dq_sums_of(p, item, block, group);
#pragma unroll
      for (int c = 0; c < kDqColumns / 8; ++c) {
        if (c * 8 >= kLastColumns && group == 1) break;
        red_add_v4(to + accum_offset(c, threadIdx.x % 128), dq[4 * c], dq[4 * c + 1], dq[4 * c + 2], dq[4 * c + 3]);
      }
      if constexpr (Traits::kHasThirdPanel) return;  // the rest follows
      if (p.dq_semaphore != nullptr) named_barrier_arrive(kHasAddedBarrier + group, 128 + 32);
    }
  }

  __device__ __forceinline__ void add_rest_of_dq(const DqRest& rest, const KeyWorkItem<Traits>& item, int block) {
    float* const to = dq_sums_of(p, item, block, 0) + 2 * kAccumFloats<kD>;
    const int first = group * (kRestColumns / 8);
#pragma unroll
    for (int c = 0; c < kRestColumns / 8; ++c) {
      red_add_v4(to + accum_offset(first + c, threadIdx.x % 128), rest[4 * c], rest[4 * c + 1], rest[4 * c + 2],
                 rest[4 * c + 3]);
    }
    if (p.dq_semaphore != nullptr) named_barrier_arrive(kHasAddedBarrier + group, 128 + 32);
  }

  // Stores dq, (B, Lq, Hq, D), of all keys. A quad stores 16 bytes of a row.
  __device__ __forceinline__ void store_dq(const DqAccum& dq, const KeyWorkItem<Traits>& item, int block) {
    static_assert(kBlockM == 64, "both consumers have the rows of the block");
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = block * kBlockM + warp * 16 + lane / 4 + 8 * r;
      Element* row = static_cast<Element*>(p.dq) +
                     ((static_cast<int64_t>(item.batch) * p.seqlen_q + query) * p.num_heads + item.head) * p.head_dim;
#pragma unroll
      for (int c = 0; c < kDqColumns / 8; ++c) {
        const int i = 4 * c + 2 * r, column = group * kDqColumns + 8 * c + 2 * (lane % 4);
        if (query < p.seqlen_q && column < p.head_dim) {
          *reinterpret_cast<uint32_t*>(row + column) =
              pack(dq[i] * p.softmax_scale, dq[i + 1] * p.softmax_scale, Element{});
        }
      }
    }
  }

  // Finishes dq of a query block: adds it to the sums if it is a share, stores it if it is complete.
  __device__ __forceinline__ void finish_dq(const DqAccum& dq, const KeyWorkItem<Traits>& item, int block,
                                            DqPipe& pipe) {
    if (p.dq_sums != nullptr) add_dq(dq, item, block, pipe);
    if constexpr (kKeyTiles == 2) {
      if (p.dq != nullptr) store_dq(dq, item, block);
    }
  }

  // --- scores ---------------------------------------------------------------------------------------------------

  // finish_scores with a tile of bias, loaded 16 queries ahead of its use. Loaded all at once, the first lse would wait
  // behind it.
  template <bool kGreat>
  __device__ __forceinline__ void finish_with_bias(Scores& scores, int stage, BiasPipe& pipe,
                                                   const KeyWorkItem<Traits>& item, int block) {
    BiasWords bias;
    const uint32_t tile = shared_address(shared.bias[pipe.stage]) + this->bias_offset();
    barrier_wait(&shared.bias_full[pipe.stage], pipe.phase);
    this->read_sixteen(bias, 0, tile);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (i + 1 < kSteps) this->read_sixteen(bias, i + 1, tile);
      this->template finish_sixteen<kGreat>(i, scores, stage, bias, item, block);
    }
    if constexpr (Traits::kReplacesBias) return;  // dbias follows
    barrier_arrive_of_warp(&shared.bias_empty[pipe.stage]);
    pipe.advance();
  }

  // finish_scores with a window.
  template <bool kGreat>
  __device__ __forceinline__ void finish_with_window(Scores& scores, int stage, BiasPipe& pipe,
                                                     const KeyWorkItem<Traits>& item, int block) {
    using Window = BiasWindow<Traits::kBlockN, kBlockM, true>;
    const float scale = p.softmax_scale * kLog2e;
    const float* lse = shared.lse[stage] + 2 * (lane % 4);
    const float* values = reinterpret_cast<const float*>(shared.bias[pipe.stage]) +
                          Window::pair_of(this->key_of_block(1), lane);
    barrier_wait(&shared.bias_full[pipe.stage], pipe.phase);
    const auto load = [&](int c) { return *reinterpret_cast<const float2*>(values + 8 * c); };
    Window::for_each_pair(load, [&](int c, const float2(&biases)[2]) {
      const float2 pair = *reinterpret_cast<const float2*>(lse + 8 * c);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float(&two)[2] = *reinterpret_cast<float(*)[2]>(&scores[4 * c + 2 * r]);
        if constexpr (kGreat) {
          this->finish_great(two, biases[r], p.softmax_scale, item, block, c);
        } else {
          two[0] = fmaf(two[0], scale, fmaf(biases[r].x, kLog2e, -pair.x));
          two[1] = fmaf(two[1], scale, fmaf(biases[r].y, kLog2e, -pair.y));
        }
      }
    });
    barrier_arrive_of_warp(&shared.bias_empty[pipe.stage]);
    pipe.advance();
  }

  // Makes the warp's writes visible to wgmma and TMA, and signals them.
  __device__ __forceinline__ void signal_ds(const DsPipe& pipe) {
    fence_proxy_async_shared();
    barrier_arrive_of_warp(&shared.ds_full[pipe.stage * Traits::kDsSlices + group % Traits::kDsSlices]);
  }

  __device__ __forceinline__ void share_ds(const Operand& ds, const DsPipe& pipe) {
    barrier_wait(&shared.ds_empty[pipe.stage], pipe.phase ^ 1);
    this->write_transposed(ds, shared.ds[pipe.stage]);
    signal_ds(pipe);
  }

  // With a softcap: finish_scores, p, finish_ds and share_ds in one.
  //
  // Each 16 queries are written to shared memory at once, which makes ptxas free their registers before it loads lse
  // and delta of the next. Otherwise it delays ds until dk is multiplied, and up to 90 registers spill.
  template <bool kGreat>
  __device__ __forceinline__ void share_capped(const Scores& tanhs, const Scores& dp, const KeyWorkItem<Traits>& item,
                                               int block, Pipes& pipes, Operand& probs, Operand& ds) {
    const float cap = p.softcap * kLog2e;
    const float* lse = shared.lse[pipes.rows.stage] + 2 * (lane % 4);
    const float* delta = shared.delta[pipes.rows.stage] + 2 * (lane % 4);
    const uint32_t bias_tile = shared_address(shared.bias[pipes.bias.stage]) + this->matrices_offset();
    const uint32_t ds_tile = shared_address(shared.ds[pipes.ds.stage]) + this->matrices_offset();
    BiasWords bias, dbias;
    if constexpr (Traits::kHasBiasTiles) barrier_wait(&shared.bias_full[pipes.bias.stage], pipes.bias.phase);
    barrier_wait(&shared.ds_empty[pipes.ds.stage], pipes.ds.phase ^ 1);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if constexpr (Traits::kHasBiasTiles) ldmatrix_x4_trans(bias[i], bias_tile + i * 16 * kRowBytes);
      float sums[2] = {0.0f, 0.0f};
      this->template finish_capped<kGreat>(i, tanhs, dp, cap, lse, delta, bias, item, block, probs[i], ds[i], dbias[i],
                                           sums);
      stmatrix_x4_trans(ds[i], ds_tile + i * 16 * kRowBytes);
      // Overwrites the matrices that the warp has just loaded.
      if constexpr (Traits::kReplacesBias) stmatrix_x4_trans(dbias[i], bias_tile + i * 16 * kRowBytes);
      if constexpr (kHasKeyBias) add_key_sums(sums);
    }
    signal_ds(pipes.ds);
    if constexpr (Traits::kHasBiasTiles) {
      if constexpr (!Traits::kReplacesBias) barrier_arrive_of_warp(&shared.bias_empty[pipes.bias.stage]);
      pipes.bias.advance();
    }
  }

  // --- mainloop -------------------------------------------------------------------------------------------------

  // The products of one query block and one key tile: dv and dk, and with the first key tile dq of the step before, for
  // which the other consumer has long written its ds. With kHasNext the scores of the next key tile, or of the next
  // query block, have been started at the end.
  template <bool kHasNext, int kKeyTile>
  __device__ __forceinline__ void multiply(const KeyWorkItem<Traits>& item, int i, const Operand& probs,
                                           const Operand& ds, Scores& scores, int last_index, Pipes& pipes) {
    constexpr bool kIsLast = kKeyTile == kKeyTiles - 1;  // of the tiles
    const int stage = pipes.rows.stage;
    // With two key tiles there are enough stages to write ds before the ping-pong barrier, which then orders products
    // only.
    if constexpr (kKeyTiles == 2) share_ds(ds, pipes.ds);
    const PingPong pingpong{group};
    pingpong.wait();
    start_dv(probs, stage, kKeyTile);
    if constexpr (kKeyTiles == 1 && !Traits::kHasSoftcap) share_ds(ds, pipes.ds);  // else it has been written
    pipes.ds.advance();
    start_dk(ds, stage, kKeyTile);
    const auto start_next = [&] {
      if constexpr (kHasNext) {
        const bool is_there = kKeyTiles == 1 || i + 1 < item.walk.steps;
        if (kIsLast && is_there) barrier_wait(&shared.q_full[pipes.rows.stage], pipes.rows.phase);
        this->start_scores(scores, pipes.rows.stage, kIsLast ? 0 : kKeyTile + 1);
      }
    };
    if constexpr (kKeyTile > 0) {
      // Here no dq follows dk to keep the tensor cores busy while scores are started.
      static_assert(kIsLast && kHasNext);
      pipes.rows.advance();
      start_next();
      wgmma_wait<2>();
      barrier_arrive_of_warp(&shared.dout_empty[stage]);
      wgmma_wait<1>();
      barrier_arrive_of_warp(&shared.q_empty[stage]);
      pingpong.pass();
      wgmma_fence_operand(dk[kKeyTile]);
      wgmma_fence_operand(dv[kKeyTile]);
      return;
    }
    DqAccum dq;
    // The first step has no step before it: it multiplies whatever lies there and does not add the result. A branch
    // around wgmma would cost registers. TMA may be filling k, and nobody has written ds: the product may be anything, NaN
    // included, and no thread reads it.
    if (i > 0) wait_for_ds(pipes.dq);
    if constexpr (Traits::kTurnsDq) {
      // ptxas finds no place for dq while dv still reads p: it would wait behind every single product.
      wgmma_wait<1>();
      wgmma_fence_operand(dv[kKeyTile]);
      start_dq(dq, pipes.dq);
    } else {
      start_dq(dq, pipes.dq);
      wgmma_wait<2>();
    }
    if constexpr (kIsLast) barrier_arrive_of_warp(&shared.dout_empty[stage]);
    wgmma_wait<1>();
    if constexpr (kIsLast) {
      barrier_arrive_of_warp(&shared.q_empty[stage]);
      pipes.rows.advance();
    }
    start_next();
    pingpong.pass();
    wgmma_wait<kHasNext ? 1 : 0>();
    wgmma_fence_operand(dk[kKeyTile]);
    wgmma_fence_operand(dv[kKeyTile]);
    wgmma_fence_operand(dq);
    if (i > 0) {
      release_ds(pipes.dq);
      finish_dq(dq, item, last_index, pipes.dq_sums);
    }
  }

  // The products of one query block, with three panels of dq: as `multiply`, in an order that leaves fewer accumulators
  // alive.
  template <bool kHasNext>
  __device__ __forceinline__ void multiply_three_panels(const KeyWorkItem<Traits>& item, int i, const Operand& probs,
                                                        const Operand& ds, Scores& scores, int last_index,
                                                        Pipes& pipes) {
    const int stage = pipes.rows.stage;
    const PingPong pingpong{group};
    pingpong.wait();
    start_dv(probs, stage, 0);
    share_ds(ds, pipes.ds);
    pipes.ds.advance();
    start_dk(ds, stage, 0);
    if (i > 0) wait_for_ds(pipes.dq);
    wgmma_wait<1>();
    wgmma_fence_operand(dv[0]);
    barrier_arrive_of_warp(&shared.dout_empty[stage]);
    wgmma_wait<0>();
    wgmma_fence_operand(dk[0]);
    barrier_arrive_of_warp(&shared.q_empty[stage]);
    DqAccum dq;
    start_dq(dq, pipes.dq);
    pipes.rows.advance();
    DqRest rest;
    start_rest_of_dq(rest, pipes.dq);
    pingpong.pass();
    wgmma_wait<1>();
    wgmma_fence_operand(dq);
    const bool adds = i > 0 && p.dq_sums != nullptr;
    if (adds) add_dq(dq, item, last_index, pipes.dq_sums);
    if constexpr (kHasNext) {
      barrier_wait(&shared.q_full[pipes.rows.stage], pipes.rows.phase);
      this->start_scores(scores, pipes.rows.stage);
    }
    wgmma_wait<kHasNext ? 1 : 0>();
    wgmma_fence_operand(rest);
    if (i > 0) release_ds(pipes.dq);
    if (adds) add_rest_of_dq(rest, item, last_index);
  }

  // One step: a query block and a key tile, whose scores have been computed. With kHasNext the scores of the next
  // key tile, or of the next query block, have been computed at the end.
  template <bool kGreat, bool kHasNext, int kKeyTile>
  __device__ __forceinline__ void step(const KeyWorkItem<Traits>& item, int i, Scores& scores, Block& block,
                                       int& last_index, Pipes& pipes) {
    constexpr bool kIsLast = kKeyTile == kKeyTiles - 1;
    typename Base::Kept kept;
    this->find_kept_of(kept, item, block.index);
    Scores dp;
    Operand probs, ds;
    const int stage = pipes.rows.stage;
    if constexpr (kKeyTile == 0 && !Traits::kHasThirdPanel) {
      barrier_wait(&shared.dout_full[stage], pipes.rows.phase);
    }
    if constexpr (!Traits::kHasThirdPanel) this->start_dp(dp, stage, kKeyTile);
    if constexpr (Traits::kHasBiasTiles) {
      finish_with_bias<kGreat>(scores, stage, pipes.bias, item, block.index);
    } else if constexpr (Traits::kHasBiasWindow) {
      finish_with_window<kGreat>(scores, stage, pipes.bias, item, block.index);
    } else {
      this->template finish_scores<kGreat>(scores, stage, {}, item, block.index);
    }
    if (block.needs_mask) this->apply_mask(scores, block.words, item, block.index, kKeyTile);
    const int index = block.index;
    if constexpr (kHasNext && kIsLast) this->find_block(block, item, i + 1);  // loaded early, to be there when needed
#pragma unroll
    for (int s = 0; s < kScores; ++s) scores[s] = exp2_approx(scores[s]);
    if constexpr (Traits::kHasThirdPanel) {
      this->hold_probs(scores, probs);
      barrier_wait(&shared.dout_full[stage], pipes.rows.phase);
      this->start_dp(dp, stage, kKeyTile);
      wgmma_wait<0>();
      wgmma_fence_operand(dp);
      this->finish_held(probs, dp, stage, probs, ds);
      multiply_three_panels<kHasNext>(item, i, probs, ds, scores, last_index, pipes);
    } else {
      this->mark_dropped(scores, kept);
      wgmma_wait<0>();
      wgmma_fence_operand(dp);
      float sums[2];
      if constexpr (Traits::kReplacesBias) {
        this->finish_ds(scores, dp, stage, probs, ds, sums,
                        shared_address(shared.bias[pipes.bias.stage]) + this->bias_offset());
        pipes.bias.advance();
      } else {
        this->finish_ds(scores, dp, stage, probs, ds, sums);
      }
      if constexpr (kHasKeyBias) add_key_sums(sums);
      if constexpr (Traits::kSumsFlat) add_flat_sums(sums, item, index);
      multiply<kHasNext, kKeyTile>(item, i, probs, ds, scores, last_index, pipes);
    }
    if constexpr (kHasNext) {
      wgmma_wait<0>();
      wgmma_fence_operand(scores);
    }
    if constexpr (kIsLast) last_index = index;
  }

  // With a softcap: computes tanh and dp of a block whose scores have been started.
  __device__ __forceinline__ void start_capped(const KeyWorkItem<Traits>& item, Scores& scores, Scores& dp,
                                               const Block& block, const Pipes& pipes) {
    barrier_wait(&shared.dout_full[pipes.rows.stage], pipes.rows.phase);
    this->start_dp(dp, pipes.rows.stage);
    this->cap_scores(scores, dp, block, item);
  }

  // With a softcap: one query block, whose tanh and dp have been computed. With kHasNext tanh and dp of the next block
  // have been computed at the end.
  template <bool kGreat, bool kHasNext>
  __device__ __forceinline__ void step_capped(const KeyWorkItem<Traits>& item, int i, Scores& scores, Scores& dp,
                                              Block& block, int& last_index, Pipes& pipes) {
    const int index = block.index;
    if constexpr (kHasNext) this->find_block(block, item, i + 1);  // loaded early, to be there when needed
    Operand probs, ds;
    share_capped<kGreat>(scores, dp, item, index, pipes, probs, ds);
    multiply<kHasNext, 0>(item, i, probs, ds, scores, last_index, pipes);
    if constexpr (kHasNext) start_capped(item, scores, dp, block, pipes);
    last_index = index;
  }

  template <bool kGreat>
  __device__ __forceinline__ void mainloop(const KeyWorkItem<Traits>& item, Pipes& pipes) {
    const int last = item.walk.steps - 1;
    // With two key tiles ptxas must not know that the loop below runs at least once: it would compute the descriptors
    // of the last dq before the loop instead of after it, and spill.
    if (kKeyTiles == 1 ? last < 0 : last == -1) return;
    int last_index = 0;
    Block block;
    this->find_block(block, item, 0);
    Scores scores;
    barrier_wait(&shared.q_full[pipes.rows.stage], pipes.rows.phase);
    this->start_scores(scores, pipes.rows.stage);
    if constexpr (Traits::kHasSoftcap) {
      Scores dp;
      start_capped(item, scores, dp, block, pipes);
#pragma unroll 1
      for (int i = 0; i < last; ++i) step_capped<kGreat, true>(item, i, scores, dp, block, last_index, pipes);
      step_capped<kGreat, false>(item, last, scores, dp, block, last_index, pipes);
    } else {
      wgmma_wait<0>();
      wgmma_fence_operand(scores);
      if constexpr (kKeyTiles == 1) {
#pragma unroll 1
        for (int i = 0; i < last; ++i) step<kGreat, true, 0>(item, i, scores, block, last_index, pipes);
        step<kGreat, false, 0>(item, last, scores, block, last_index, pipes);
      } else {
        // The last step is like the others and starts scores of whatever follows its q: half the code.
#pragma unroll 1
        for (int i = 0; i < item.walk.steps; ++i) {
          step<kGreat, true, 0>(item, i, scores, block, last_index, pipes);
          step<kGreat, true, 1>(item, i, scores, block, last_index, pipes);
        }
      }
    }
    if (p.dq_sums != nullptr || (kKeyTiles == 2 && p.dq != nullptr)) {
      DqAccum dq;
      wait_for_ds(pipes.dq);
      start_dq(dq, pipes.dq);
      wgmma_wait<0>();
      wgmma_fence_operand(dq);
      finish_dq(dq, item, last_index, pipes.dq_sums);
      if constexpr (Traits::kHasThirdPanel) {
        DqRest rest;
        start_rest_of_dq(rest, pipes.dq);
        wgmma_wait<0>();
        wgmma_fence_operand(rest);
        add_rest_of_dq(rest, item, last_index);
      }
    }
    release_ds(pipes.dq);
  }

  // The thread's sums of ds for its two keys, over the queries it holds.
  __device__ __forceinline__ float2& key_sums() { return shared.key_sums[group * 128 + warp * 32 + lane]; }

  __device__ __forceinline__ void add_key_sums(const float (&sums)[2]) {
    float2& total = key_sums();
    total = make_float2(total.x + sums[0], total.y + sums[1]);
  }

  __device__ __forceinline__ void start_key_sums() {
    if constexpr (Base::kSumsKeys) key_sums() = make_float2(0.0f, 0.0f);
  }

  // Adds to the thread's sums of ds over flat tiles, before the values and behind them. The scores of keys beyond the
  // last are masked.
  __device__ __forceinline__ void add_flat_sums(const float (&sums)[2], const KeyWorkItem<Traits>& item, int block) {
    const int diagonal = item.block_k - block / (kTile / kBlockM);
    if (diagonal >= p.first_diagonal && diagonal <= p.last_diagonal) return;
    float2& totals = key_sums();
    (diagonal < p.first_diagonal ? totals.x : totals.y) += sums[0] + sums[1];
  }

  __device__ __forceinline__ void store_flat_sums(const KeyWorkItem<Traits>& item) {
    if constexpr (Traits::kSumsFlat) {
      float2 totals = key_sums();
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) {
        totals.x += __shfl_xor_sync(0xffffffffu, totals.x, lanes);
        totals.y += __shfl_xor_sync(0xffffffffu, totals.y, lanes);
      }
      const int64_t head = static_cast<int64_t>(item.batch) * p.num_heads + item.head;
      if (lane == 0) p.flat_sums[(head * p.blocks_k + item.block_k) * kFlatSums + group * 4 + warp] = totals;
    }
  }

  __device__ __forceinline__ void store_key_sums(const KeyWorkItem<Traits>& item) {
    if constexpr (kHasKeyBias) {
      if (p.dbias_sums == nullptr) return;
      float* to = p.dbias_sums + first_key_sum_of(p, item);
      const int seqlen_k = extent_of(p, item).seqlen_k;
      const float2 totals = key_sums();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float sum = r == 0 ? totals.x : totals.y;
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        const int key = this->first_key(item) + this->key_of_block(r);
        if (lane % 4 == 0 && key < seqlen_k) this->store_key_sum(to, item, key, sum);
      }
    }
  }
};

// is_great: whether rows may have a great lse; a type if the compiler knows.
template <class Traits, class IsGreat>
__device__ __forceinline__ void consume_work_tiles(const BackwardParams& p, BackwardStorage<Traits>& shared, IsGreat is_great,
                                                   int group, int warp, int lane) {
  typename BackwardConsumer<Traits>::Pipes pipes;
  PipelineState<Traits::kKeyStages> pipe_keys;
  PipelineState<kWorkStages> pipe_work;
  float dk[Traits::kKeyTiles][Traits::kD / 2], dv[Traits::kKeyTiles][Traits::kDv / 2];
  for (;;) {
    const KeyWorkItem<Traits>& item = get_work_tile(shared, pipe_work);
    if (!item.is_valid) break;
    BackwardConsumer<Traits> consumer{{p, shared, group, warp, lane, pipe_keys.stage, {}}, dk, dv};
    if (item.is_first) {
#pragma unroll
      for (int tile = 0; tile < Traits::kKeyTiles; ++tile) {
#pragma unroll
        for (float& sum : dk[tile]) sum = 0.0f;
#pragma unroll
        for (float& sum : dv[tile]) sum = 0.0f;
      }
      barrier_wait(&shared.keys_full[pipe_keys.stage], pipe_keys.phase);
    }
    consumer.start_key_sums();
    consumer.load_key_bias(item);
    if constexpr (!std::is_same_v<IsGreat, bool>) {
      consumer.template mainloop<IsGreat::value>(item, pipes);
    } else if (is_great) {
      int own_lane = lane;
      asm volatile("" : "+r"(own_lane));
      BackwardConsumer<Traits> own{
          {p, shared, group, warp, own_lane, pipe_keys.stage, {consumer.key_bias[0], consumer.key_bias[1]}}, dk, dv};
      own.template mainloop<true>(item, pipes);
    } else {
      consumer.template mainloop<false>(item, pipes);
    }
    consumer.store_key_sums(item);
    consumer.store_flat_sums(item);
    if (item.is_last) {
      barrier_arrive_of_warp(&shared.keys_empty[pipe_keys.stage]);
      pipe_keys.advance();
      if (p.dkv_semaphore != nullptr) named_barrier_sync(kMayAddBarrier + group, 128 + 32);
#pragma unroll
      for (int tile = 0; tile < Traits::kKeyTiles; ++tile) {
        consumer.epilogue(dk[tile], p.dk, consumer.sums_of(item, p.dk_sums), p.head_dim, p.softmax_scale, item, tile);
        const float scale = Traits::kHasDropout ? p.dropout.scale : 1.0f;
        consumer.epilogue(dv[tile], p.dv, consumer.sums_of(item, p.dv_sums), p.head_dim_v, scale, item, tile);
      }
      if (p.dkv_semaphore != nullptr) named_barrier_arrive(kHasAddedBarrier + group, 128 + 32);
    }
    release_work_tile(shared, pipe_work);
  }
}

template <class Traits>
__device__ __forceinline__ void consume_backward(const BackwardParams& p, BackwardStorage<Traits>& shared, int group) {
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x % 128 / 32, 0), lane = threadIdx.x % 32;
  const PingPong pingpong{group};
  pingpong.start();
  choose_great<Traits>(p, shared.has_great, group, warp, lane, [&](auto is_great, int own_group, int own_warp, int own_lane) {
    consume_work_tiles<Traits>(p, shared, is_great, own_group, own_warp, own_lane);
  });
  pingpong.end();
}

}  // namespace flash_dmattn
