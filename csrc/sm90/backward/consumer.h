// A consumer: a warpgroup that computes dk and dv of 64 keys of each of the block's tiles, and its part of dq.
//
// Scores have keys as rows and queries as columns, so that p and ds, in registers, are operands of dv and dk as they
// are. ds goes to shared memory too, turned: from there both consumers multiply it with k, each for its part of dq, and
// a warp of the producer stores it as dbias.
#pragma once

#include "named_barriers.h"
#include "key_consumer.h"
#include "storage.h"

namespace flash_dmattn {

template <class Traits>
struct BackwardConsumer : KeyConsumer<Traits, BackwardStorage<Traits>> {
  using Base = KeyConsumer<Traits, BackwardStorage<Traits>>;
  using typename Base::BiasWords, typename Base::Block, typename Base::Element, typename Base::Operand,
      typename Base::Scores;
  using Base::group, Base::kD, Base::kDv, Base::kHasKeyBias, Base::kRows, Base::kScores, Base::kSteps, Base::lane,
      Base::p, Base::shared, Base::warp;
  static constexpr int kKeyTiles = Traits::kKeyTiles;
  using RingDs = Ring<Traits::kDsStages>;
  using RingBias = Ring<Traits::kBiasStages>;

  // Places in the rings of stages: of q and dout; of ds where it is written, and where dq is multiplied; of the bias.
  struct Rings {
    Ring<Traits::kStages> rows;
    RingDs ds, dq;
    RingBias bias;
  };

  float (&dk)[kKeyTiles][kD / 2];
  float (&dv)[kKeyTiles][kDv / 2];

  // --- products -------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void start_dv(const Operand& probs, int stage, int tile) {
    const uint64_t dout = matrix_descriptor(shared_address(shared.dout[stage]), kRows * kRowBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) Wgmma<Element, kDv>::run(dv[tile], probs[i], step_by_rows(dout, i), true);
    wgmma_commit();
  }

  __device__ __forceinline__ void start_dk(const Operand& ds, int stage, int tile) {
    const uint64_t q = matrix_descriptor(shared_address(shared.q[stage]), kRows * kRowBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) Wgmma<Element, kD>::run(dk[tile], ds[i], step_by_rows(q, i), true);
    wgmma_commit();
  }

  // The consumer's piece of dq: its 64 of 128 queries, or its 64 of 128 columns; or, of 64 queries and 64 columns, half
  // of the columns.
  static constexpr int kDqColumns = Traits::kDqColumns;
  using Piece = float[kDqColumns / 2];

  // Of the keys of all tiles, whose ds lie one stage behind the other.
  __device__ __forceinline__ void start_dq(Piece& dq, RingDs ring) {
    constexpr int kColumnBytes = kDqColumns == kPieceColumns ? kTile * kRowBytes : kDqColumns * 2;
    const int row = kRows == 128 ? group * 64 : 0, column = kRows == 128 ? 0 : group;
    const uint64_t k = matrix_descriptor(shared_address(shared.k[this->key_stage]) + column * kColumnBytes, 16);
    wgmma_fence();
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile) {
      const uint64_t ds = matrix_descriptor(shared_address(shared.ds[ring.stage]) + row * kRowBytes, 16);
#pragma unroll
      for (int i = 0; i < kTile / 16; ++i) {
        Wgmma<Element, kDqColumns>::run_rows(dq, step_by_columns<kRows>(ds, i),
                                             step_by_rows(k, tile * (kTile / 16) + i), tile > 0 || i > 0);
      }
      ring.advance();
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void wait_for_ds(RingDs ring) {
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile) {
#pragma unroll
      for (int part = 0; part < Traits::kParts; ++part) {
        barrier_wait(&shared.ds_full[ring.stage * Traits::kParts + part], ring.phase);
      }
      ring.advance();
    }
  }

  __device__ __forceinline__ void give_back_ds(RingDs& ring) {
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile) {
      barrier_arrive_of_warp(&shared.ds_empty[ring.stage]);
      ring.advance();
    }
  }

  __device__ __forceinline__ void add_dq(const Piece& dq, const KeyItem<Traits>& item, int block) {
    const int tiles_q = (p.seqlen_q + kTile - 1) / kTile;
    const int row = block * (kRows / 64) + (kRows == 128 ? group : 0);
    const int panel = Traits::kPanels == 2 ? group : 0;
    const int first = kDqColumns < kPieceColumns ? group * (kDqColumns / 8) : 0;
    const int64_t head = static_cast<int64_t>(item.batch) * p.num_heads + item.head;
    if (p.dq_turns != nullptr) named_barrier_sync(kMayAddBarrier + group, 128 + 32);
    float* to = p.dq_sums + ((head * 2 * tiles_q + row) * Traits::kPanels + panel) * kPieceFloats;
#pragma unroll
    for (int c = 0; c < kDqColumns / 8; ++c) {
      float* four = to + place_in_piece(first + c, threadIdx.x % 128);
      add_four(four, dq[4 * c], dq[4 * c + 1], dq[4 * c + 2], dq[4 * c + 3]);
    }
    if (p.dq_turns != nullptr) named_barrier_arrive(kHasAddedBarrier + group, 128 + 32);
  }

  // --- scores ---------------------------------------------------------------------------------------------------

  // finish_scores, with a tile of bias. It is read 16 queries ahead of where it is added: behind all of it lse would be
  // waited for. Full bias D64 0.4505 ms for 0.4549, D128 0.6637 for 0.6674.
  __device__ __forceinline__ void finish_with_bias(Scores& scores, int stage, RingBias& ring) {
    BiasWords bias;
    const uint32_t tile = shared_address(shared.bias[ring.stage]) + this->place_of_matrices();
    barrier_wait(&shared.bias_full[ring.stage], ring.phase);
    this->read_sixteen(bias, 0, tile);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (i + 1 < kSteps) this->read_sixteen(bias, i + 1, tile);
      this->finish_sixteen(i, scores, stage, bias);
    }
    barrier_arrive_of_warp(&shared.bias_empty[ring.stage]);
    ring.advance();
  }

  // What the warp has written becomes visible to products and copies, which learn of it.
  __device__ __forceinline__ void tell_ds(const RingDs& ring) {
    shared_memory_fence();
    barrier_arrive_of_warp(&shared.ds_full[ring.stage * Traits::kParts + group % Traits::kParts]);
  }

  __device__ __forceinline__ void share_ds(const Operand& ds, const RingDs& ring) {
    barrier_wait(&shared.ds_empty[ring.stage], ring.phase ^ 1);
    this->write_turned(ds, shared.ds[ring.stage]);
    tell_ds(ring);
  }

  // With a softcap: finish_scores, p, finish_ds and share_ds in one.
  //
  // 16 queries at a time go to shared memory, which is what makes ptxas finish with their registers: it reads lse and
  // delta of the next ones after that. Else it puts off ds until dk is multiplied, and up to 90 registers spill.
  __device__ __forceinline__ void share_capped(const Scores& tanhs, const Scores& dp, Rings& rings, Operand& probs,
                                               Operand& ds) {
    const float cap = p.softcap * kLog2e;
    const float* lse = shared.lse[rings.rows.stage] + 2 * (lane % 4);
    const float* delta = shared.delta[rings.rows.stage] + 2 * (lane % 4);
    const uint32_t bias_tile = shared_address(shared.bias[rings.bias.stage]) + this->place_of_matrices();
    const uint32_t ds_tile = shared_address(shared.ds[rings.ds.stage]) + this->place_of_matrices();
    BiasWords bias, dbias;
    if constexpr (Traits::kHasBiasTiles) barrier_wait(&shared.bias_full[rings.bias.stage], rings.bias.phase);
    barrier_wait(&shared.ds_empty[rings.ds.stage], rings.ds.phase ^ 1);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if constexpr (Traits::kHasBiasTiles) load_matrices_turned(bias[i], bias_tile + i * 16 * kRowBytes);
      float sums[2] = {0.0f, 0.0f};
      this->finish_capped(i, tanhs, dp, cap, lse, delta, bias, probs[i], ds[i], dbias[i], sums);
      store_matrices_turned(ds[i], ds_tile + i * 16 * kRowBytes);
      // Over the matrices that the warp has just read.
      if constexpr (Traits::kReplacesBias) store_matrices_turned(dbias[i], bias_tile + i * 16 * kRowBytes);
      if constexpr (kHasKeyBias) add_key_sums(sums);
    }
    tell_ds(rings.ds);
    if constexpr (Traits::kHasBiasTiles) {
      if constexpr (!Traits::kReplacesBias) barrier_arrive_of_warp(&shared.bias_empty[rings.bias.stage]);
      rings.bias.advance();
    }
  }

  // --- the walk -------------------------------------------------------------------------------------------------

  // The products of a block of queries and a tile of keys: dv and dk, and with the first tile dq of the step before,
  // when the other consumer's part of ds has long been there. With kHasNext the scores of the next tile, or of the next
  // block, are being multiplied at the end.
  template <bool kHasNext, int kKeyTile>
  __device__ __forceinline__ void multiply(const KeyItem<Traits>& item, int i, const Operand& probs, const Operand& ds,
                                           Scores& scores, int last_index, Rings& rings) {
    constexpr bool kIsLast = kKeyTile == kKeyTiles - 1;  // of the tiles
    const int stage = rings.rows.stage;
    // With two tiles of keys there are stages to write ds before the turn, which is then for products alone.
    if constexpr (kKeyTiles == 2) share_ds(ds, rings.ds);
    const Turns turns{group};
    turns.wait();
    start_dv(probs, stage, kKeyTile);
    if constexpr (kKeyTiles == 1 && !Traits::kHasSoftcap) share_ds(ds, rings.ds);  // else it has been
    rings.ds.advance();
    start_dk(ds, stage, kKeyTile);
    const auto start_next = [&] {
      if constexpr (kHasNext) {
        const bool is_there = kKeyTiles == 1 || i + 1 < item.walk.steps;
        if (kIsLast && is_there) barrier_wait(&shared.q_full[rings.rows.stage], rings.rows.phase);
        this->start_scores(scores, rings.rows.stage, kIsLast ? 0 : kKeyTile + 1);
      }
    };
    if constexpr (kKeyTile > 0) {
      // There is no dq behind dk for the tensor cores to be at when scores are started.
      static_assert(kIsLast && kHasNext);
      rings.rows.advance();
      start_next();
      wgmma_wait<2>();
      barrier_arrive_of_warp(&shared.dout_empty[stage]);
      wgmma_wait<1>();
      barrier_arrive_of_warp(&shared.q_empty[stage]);
      turns.pass();
      pin(dk[kKeyTile]);
      pin(dv[kKeyTile]);
      return;
    }
    Piece dq;
    // Of the first step there is none behind it: the product is of whatever lies there, and is not added. A branch
    // round products costs registers.
    if (i > 0) wait_for_ds(rings.dq);
    start_dq(dq, rings.dq);
    wgmma_wait<2>();
    if constexpr (kIsLast) barrier_arrive_of_warp(&shared.dout_empty[stage]);
    wgmma_wait<1>();
    if constexpr (kIsLast) {
      barrier_arrive_of_warp(&shared.q_empty[stage]);
      rings.rows.advance();
    }
    start_next();
    turns.pass();
    wgmma_wait<kHasNext ? 1 : 0>();
    pin(dk[kKeyTile]);
    pin(dv[kKeyTile]);
    pin(dq);
    if (i > 0) {
      give_back_ds(rings.dq);
      if (p.dq_sums != nullptr) add_dq(dq, item, last_index);
    }
  }

  // One block of queries and one tile of keys, whose scores are there; with kHasNext those of the next tile, or of the
  // next block, are, at the end.
  template <bool kHasNext, int kKeyTile>
  __device__ __forceinline__ void step(const KeyItem<Traits>& item, int i, Scores& scores, Block& block,
                                       int& last_index, Rings& rings) {
    constexpr bool kIsLast = kKeyTile == kKeyTiles - 1;
    Scores dp;
    const int stage = rings.rows.stage;
    if constexpr (kKeyTile == 0) barrier_wait(&shared.dout_full[stage], rings.rows.phase);
    this->start_dp(dp, stage, kKeyTile);
    if constexpr (Traits::kHasBiasTiles) {
      finish_with_bias(scores, stage, rings.bias);
    } else {
      this->finish_scores(scores, stage, {});
    }
    if (block.has_edge) this->forbid(scores, block.words, item, block.index, kKeyTile);
    const int index = block.index;
    if constexpr (kHasNext && kIsLast) this->find_block(block, item, i + 1);  // it has arrived by the time it is needed
#pragma unroll
    for (int s = 0; s < kScores; ++s) scores[s] = exp2_approx(scores[s]);
    wgmma_wait<0>();
    pin(dp);
    Operand probs, ds;
    float sums[2];
    this->finish_ds(scores, dp, stage, probs, ds, sums);
    if constexpr (kHasKeyBias) add_key_sums(sums);
    multiply<kHasNext, kKeyTile>(item, i, probs, ds, scores, last_index, rings);
    if constexpr (kHasNext) {
      wgmma_wait<0>();
      pin(scores);
    }
    if constexpr (kIsLast) last_index = index;
  }

  // With a softcap: of a block whose product of scores is under way, tanh and dp.
  __device__ __forceinline__ void start_capped(const KeyItem<Traits>& item, Scores& scores, Scores& dp,
                                               const Block& block, const Rings& rings) {
    barrier_wait(&shared.dout_full[rings.rows.stage], rings.rows.phase);
    this->start_dp(dp, rings.rows.stage);
    this->cap_scores(scores, dp, block, item);
  }

  // With a softcap: one block of queries, whose tanh and dp are there; with kHasNext those of the next are, at the end.
  template <bool kHasNext>
  __device__ __forceinline__ void step_capped(const KeyItem<Traits>& item, int i, Scores& scores, Scores& dp,
                                              Block& block, int& last_index, Rings& rings) {
    const int index = block.index;
    if constexpr (kHasNext) this->find_block(block, item, i + 1);  // it has arrived by the time it is needed
    Operand probs, ds;
    share_capped(scores, dp, rings, probs, ds);
    multiply<kHasNext, 0>(item, i, probs, ds, scores, last_index, rings);
    if constexpr (kHasNext) start_capped(item, scores, dp, block, rings);
    last_index = index;
  }

  __device__ __forceinline__ void run(const KeyItem<Traits>& item, Rings& rings) {
    const int last = item.walk.steps - 1;
    // With two tiles ptxas is not to know that the loop below runs: it would keep descriptors of dq there for the one
    // of the last step, behind it, and spill.
    if (kKeyTiles == 1 ? last < 0 : last == -1) return;
    int last_index = 0;
    Block block;
    this->find_block(block, item, 0);
    Scores scores;
    barrier_wait(&shared.q_full[rings.rows.stage], rings.rows.phase);
    this->start_scores(scores, rings.rows.stage);
    if constexpr (Traits::kHasSoftcap) {
      Scores dp;
      start_capped(item, scores, dp, block, rings);
#pragma unroll 1
      for (int i = 0; i < last; ++i) step_capped<true>(item, i, scores, dp, block, last_index, rings);
      step_capped<false>(item, last, scores, dp, block, last_index, rings);
    } else {
      wgmma_wait<0>();
      pin(scores);
      if constexpr (kKeyTiles == 1) {
#pragma unroll 1
        for (int i = 0; i < last; ++i) step<true, 0>(item, i, scores, block, last_index, rings);
        step<false, 0>(item, last, scores, block, last_index, rings);
      } else {
        // The last step is as the others, and multiplies scores of whatever lies behind its q: half the instructions.
#pragma unroll 1
        for (int i = 0; i < item.walk.steps; ++i) {
          step<true, 0>(item, i, scores, block, last_index, rings);
          step<true, 1>(item, i, scores, block, last_index, rings);
        }
      }
    }
    if (p.dq_sums != nullptr) {
      Piece dq;
      wait_for_ds(rings.dq);
      start_dq(dq, rings.dq);
      wgmma_wait<0>();
      pin(dq);
      add_dq(dq, item, last_index);
    }
    give_back_ds(rings.dq);
  }

  // The thread's sums of ds over queries, of its two keys, by every fourth pair of queries.
  __device__ __forceinline__ float2& key_sums() { return shared.key_sums[group * 128 + warp * 32 + lane]; }

  __device__ __forceinline__ void add_key_sums(const float (&sums)[2]) {
    float2& total = key_sums();
    total = make_float2(total.x + sums[0], total.y + sums[1]);
  }

  __device__ __forceinline__ void start_key_sums() {
    if constexpr (kHasKeyBias) key_sums() = make_float2(0.0f, 0.0f);
  }

  __device__ __forceinline__ void store_key_sums(const KeyItem<Traits>& item) {
    if constexpr (kHasKeyBias) {
      if (p.dbias_sums == nullptr) return;
      float* to = p.dbias_sums + (static_cast<int64_t>(item.batch) * p.num_heads + item.head) * p.seqlen_k;
      const float2 of_thread = key_sums();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float sum = r == 0 ? of_thread.x : of_thread.y;
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        const int key = this->first_key(item) + this->key_of_block(r);
        if (lane % 4 == 0 && key < p.seqlen_k) to[key] = sum;
      }
    }
  }
};

template <class Traits>
__device__ __forceinline__ void consume_backward(const BackwardParams& p, BackwardStorage<Traits>& shared, int group) {
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x % 128 / 32, 0), lane = threadIdx.x % 32;
  typename BackwardConsumer<Traits>::Rings rings;
  Ring<Traits::kKeyStages> ring_keys;
  Ring<2> ring_work;
  float dk[Traits::kKeyTiles][Traits::kD / 2], dv[Traits::kKeyTiles][Traits::kDv / 2];
  const Turns turns{group};
  turns.start();
  for (;;) {
    const KeyItem<Traits>& item = take_work(shared, ring_work);
    if (!item.exists) break;
    BackwardConsumer<Traits> consumer{{p, shared, group, warp, lane, ring_keys.stage, {}}, dk, dv};
    if (item.is_first) {
#pragma unroll
      for (int tile = 0; tile < Traits::kKeyTiles; ++tile) {
#pragma unroll
        for (float& sum : dk[tile]) sum = 0.0f;
#pragma unroll
        for (float& sum : dv[tile]) sum = 0.0f;
      }
      barrier_wait(&shared.keys_full[ring_keys.stage], ring_keys.phase);
    }
    consumer.start_key_sums();
    consumer.load_key_bias(item);
    consumer.run(item, rings);
    consumer.store_key_sums(item);
    if (item.is_last) {
      barrier_arrive_of_warp(&shared.keys_empty[ring_keys.stage]);
      ring_keys.advance();
      if (p.key_turns != nullptr) named_barrier_sync(kMayAddBarrier + group, 128 + 32);
#pragma unroll
      for (int tile = 0; tile < Traits::kKeyTiles; ++tile) {
        consumer.store(dk[tile], p.dk, consumer.sums_of(item, p.dk_sums), p.head_dim, p.softmax_scale, item, tile);
        consumer.store(dv[tile], p.dv, consumer.sums_of(item, p.dv_sums), p.head_dim_v, 1.0f, item, tile);
      }
      if (p.key_turns != nullptr) named_barrier_arrive(kHasAddedBarrier + group, 128 + 32);
    }
    give_back_work(shared, ring_work);
  }
  turns.end();
}

}  // namespace flash_dmattn
