// A consumer warpgroup: sums ds of 64 queries and 128 keys over heads.
#pragma once

#include <type_traits>

#include "../../device/fragments.h"
#include "../../device/philox.h"
#include "../../device/softcap.h"
#include "../bias_window.h"
#include "../float_tile.h"
#include "storage.h"

namespace flash_dmattn {

// Both consumers meet here to add their sums along diagonals. The ping-pong has the two barriers before.
constexpr int kDiagonalBarrier = 3;

template <class Traits>
struct SharedDbiasConsumer {
  using Element = typename Traits::Element;
  static constexpr int kScores = kTile / 2;  // of a thread
  using Scores = float[kScores];

  const SharedDbiasParams& p;
  SharedDbiasStorage<Traits>& shared;
  const int group, warp, lane;  // which consumer; which warp of it
  Scores& sums;
  PipelineState<Traits::kSlots>& pipe;
  const int bias_stage;
  using AttentionHead = Head<Traits::kHasSequences>;

  __device__ __forceinline__ int row_of_tile() const { return group * 64 + warp * 16 + lane / 4; }

  // --- products -------------------------------------------------------------------------------------------------

  // The slots that hold the operands of a product over kColumns columns.
  template <int kColumns>
  struct Slots {
    static constexpr int kEach = Traits::kSlotPanels * kPanelColumns;
    static constexpr int kCount = (kColumns + kEach - 1) / kEach;
    int of[kCount];
  };

  // Starts the part of a product whose operands are in its i-th slot, the next of the pipeline.
  template <int i, int kColumns>
  __device__ __forceinline__ void start_part(Scores& scores, Slots<kColumns>& slots) {
    constexpr int kEach = Slots<kColumns>::kEach, kLeft = kColumns - i * kEach;
    const int slot = slots.of[i] = pipe.stage;
    barrier_wait(&shared.slot_full[slot], pipe.phase);
    const uint64_t rows = matrix_descriptor(shared_address(shared.rows[slot]) + group * 64 * kRowBytes, 16);
    const uint64_t keys = matrix_descriptor(shared_address(shared.keys[slot]), 16);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < (kLeft < kEach ? kLeft : kEach) / 16; ++c) {
      Wgmma<Element, kTile>::run(scores, advance_k_major<kTile>(rows, c), advance_k_major<kTile>(keys, c),
                                 i > 0 || c > 0);
    }
    wgmma_commit();
    pipe.advance();
  }

  template <int kColumns>
  __device__ __forceinline__ void release(const Slots<kColumns>& slots) {
#pragma unroll
    for (int i = 0; i < Slots<kColumns>::kCount; ++i) barrier_arrive_of_warp(&shared.slot_empty[slots.of[i]]);
  }

  // lse or delta of the thread's two rows.
  struct RowStats {
    float values[2];
  };

  __device__ __forceinline__ RowStats row_stats_of(int slot) const {
    const float* row_stats = shared.row_stats[slot] + row_of_tile();
    return {{row_stats[0], row_stats[8]}};
  }

  // --- scores ---------------------------------------------------------------------------------------------------

  // Of the tile's keys. The kernel starts before the one ahead of it has ended, so nothing is constant.
  using MaskWords = RowBits<2, kTileWords, false>;

  __device__ __forceinline__ void load_mask_words(MaskWords& words, const DbiasWorkTile& work,
                                                  const AttentionHead& head) {
    if constexpr (Traits::kHasMask) {
      const int64_t first = mask_of(p.mask.heads, head) * p.seqlen_q, row_words = p.tiles_k * kTileWords;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // A row beyond the last takes the bits of the last; it is not stored.
        const int row = min(work.block_q * kTile + row_of_tile() + 8 * r, p.seqlen_q - 1);
        words.load(r, p.mask.bits + (first + row) * row_words + work.block_k * kTileWords);
      }
    }
  }

  __device__ __forceinline__ void apply_mask(Scores& scores, const MaskWords& words, const DbiasWorkTile& work,
                                             const AttentionHead& head) {
    if constexpr (Traits::kHasMask) {
      words.apply(scores);
    } else {
      const Extent of = extent_of(p, head);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = work.block_q * kTile + row_of_tile() + 8 * r, first = work.block_k * kTile + 2 * (lane % 4);
        // Keys beyond the last are not stored, and so not masked. With sequences others have stored keys there, and
        // along diagonals keys share a sum.
        int to = row + of.high - first;
        if constexpr (Traits::kSumsDiagonals) to = min(to, of.seqlen_k - 1 - first);
        if constexpr (Traits::kHasSequences) to = row < of.seqlen_q ? min(to, of.seqlen_k - 1 - first) : -1;
        keep_columns(scores, r, row + of.low - first, to);
      }
    }
  }

  // lse of the thread's two rows in two parts (BackwardParams::split_lse).
  __device__ __forceinline__ void load_split_lse(float2 (&split)[2], const DbiasWorkTile& work, int position) const {
    const auto tile = summed_tile<Traits>(p, work, position);
    const int64_t first = (first_padded_tile_of(p, tile.head) + tile.work.block_q) * kTile;
    split[0] = p.split_lse[first + row_of_tile()];
    split[1] = p.split_lse[first + row_of_tile() + 8];
  }

  // The exponent of p of the thread's row r, from a product, or tanh with a softcap. kGreat: its lse may be great, and is
  // in `split` then.
  template <bool kGreat>
  __device__ __forceinline__ float exponent(float product, float bias, int r, const RowStats& lse,
                                            const float2 (&split)[2]) const {
    const float factor = Traits::kHasSoftcap ? p.softcap : p.softmax_scale;
    if constexpr (kGreat) return great_exponent(product, factor, bias, split[r]);
    return fmaf(product, factor * kLog2e, fmaf(bias, kLog2e, -lse.values[r]));
  }

  // Turns products into scores minus lse, bias included, in units of log2.
  template <bool kGreat>
  __device__ __forceinline__ void finish_scores(Scores& scores, const RowStats& lse, const float2 (&split)[2]) {
    if constexpr (Traits::kHasFloatTiles) {
      const uint32_t first = shared_address(shared.bias[bias_stage]) + FloatTile<kTile>::first_of(row_of_tile(), lane);
      FloatTile<kTile>::template for_each_pair<kTile>(first, lane / 4 % 2 == 1, [&](int c, int r, float2 pair) {
        float* const two = scores + 4 * c + 2 * r;
        two[0] = exponent<kGreat>(two[0], pair.x, r, lse, split);
        two[1] = exponent<kGreat>(two[1], pair.y, r, lse, split);
      });
      return;
    }
    // The lane's row of the four matrices of a load: rows 0 to 7 and 8 to 15 of two neighbouring chunks.
    const int row = group * 64 + warp * 16 + lane % 16;
    const uint32_t tile = shared_address(shared.bias[bias_stage]) + row * kRowBytes;
#pragma unroll
    for (int c = 0; c < kTile / 16; ++c) {
      const int chunk = 2 * (c % 4) + lane / 16;
      uint32_t bias[4];
      ldmatrix_x4(bias, tile + c / 4 * Traits::kPanelBytes + ((chunk ^ (row % 8)) << 4));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack(bias[i], Element{});
        float& low = scores[8 * c + 2 * i];
        float& high = scores[8 * c + 2 * i + 1];
        if constexpr (Traits::kHasSoftcap) {
          low = tanh_exact(p.pre_scale * low);
          high = tanh_exact(p.pre_scale * high);
        }
        low = exponent<kGreat>(low, pair.x, i % 2, lse, split);
        high = exponent<kGreat>(high, pair.y, i % 2, lse, split);
      }
    }
  }

  // --- diagonals --------------------------------------------------------------------------------------------------

  using Window = BiasWindow<16, kTile>;

  __device__ __forceinline__ float* window() const {
    return reinterpret_cast<float*>(shared.bias[0]) + (group * 4 + warp) * Window::kFloats;
  }

  // Loads the warp's window. Every tile of the diagonal has the same.
  __device__ __forceinline__ void load_window(const DbiasWorkTile& work) {
    const int first_row = work.block_q * kTile + group * 64 + warp * 16;
    const int first = Window::first_place(p.distances, first_row, work.block_k * kTile);
    with_bias(p, HeadAt{work.batch, work.first_head},
              [&](auto bias) { Window::write(window(), p.distances, first, Window::kValues, bias); });
    __syncwarp();
  }

  // finish_scores with a window.
  template <bool kGreat>
  __device__ __forceinline__ void finish_with_window(Scores& scores, const RowStats& lse, const float2 (&split)[2]) {
    const float* values = window() + Window::pair_of(lane / 4 + 8, lane);
    const auto load = [&](int c) { return *reinterpret_cast<const float2*>(values + 8 * c); };
    Window::for_each_pair(load, [&](int c, const float2(&pairs)[2]) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float* const two = scores + 4 * c + 2 * r;
        two[0] = exponent<kGreat>(two[0], pairs[r].x, r, lse, split);
        two[1] = exponent<kGreat>(two[1], pairs[r].y, r, lse, split);
      }
    });
  }

  // Stores the sums along the diagonals of the block's sums: place y has key - query = y - 127. Each warp adds in the
  // order of its rows, then the warps' sums are added in the order of warps.
  __device__ __forceinline__ void store_diagonals(const DbiasWorkTile& work) {
    float* const own = window();
    __syncwarp();
    for (int i = lane; i < Window::kValues; i += 32) own[i] = 0.0f;
    __syncwarp();
    float* const to = own + 7 - lane / 4 + 2 * (lane % 4);
#pragma unroll 1
    for (int row = 0; row < 8; ++row) {  // two rows of one lane have no diagonal twice
      if (lane / 4 == row) {
#pragma unroll
        for (int c = -1; c < kTile / 8; ++c) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float sum = 0.0f;
            if (c >= 0) sum += sums[4 * c + e];
            if (c + 1 < kTile / 8) sum += sums[4 * (c + 1) + 2 + e];
            to[8 * (c + 1) + e] += sum;
          }
        }
      }
      __syncwarp();
    }
    named_barrier_sync(kDiagonalBarrier, 128 * Traits::kConsumers);
    const int y = group * 128 + warp * 32 + lane;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < 4 * Traits::kConsumers; ++w) {
      const int at = y - (kTile - 16) + 16 * w;
      if (at >= 0 && at < Window::kValues) {
        total += reinterpret_cast<const float*>(shared.bias[0])[w * Window::kFloats + at];
      }
    }
    const int diagonal = work.block_k - work.block_q - p.first_diagonal;
    const int64_t tile = static_cast<int64_t>(work.chunk) * p.dbias_tiles + work.owner * p.diagonals + diagonal;
    p.slots[tile * kDiagonalFloats + y] = total;
    named_barrier_sync(kDiagonalBarrier, 128 * Traits::kConsumers);
  }

  // --- mainloop -------------------------------------------------------------------------------------------------

  // Adds ds of one head. Ping-pong: one consumer has its products computed and adds the bias while the other computes
  // exponentials. Where the barrier is passed was measured: docs/notes/cuda_tried.md, "shared_dbias kernel".
  __device__ __forceinline__ void add_head(const DbiasWorkTile& work, int position, bool needs_mask) {
    MaskWords words;
    AttentionHead head;
    [[maybe_unused]] SummedTile<Traits::kHasSequences> of_diagonal;
    if constexpr (Traits::kSumsDiagonals) {
      if (needs_mask) of_diagonal = summed_tile<Traits>(p, work, position), head = of_diagonal.head;
    } else {
      if (needs_mask || Traits::kHasDropout) head = summed_head<Traits::kHasSequences>(p, work, position);
    }
    const DbiasWorkTile& tile = Traits::kSumsDiagonals ? of_diagonal.work : work;  // a copy of `work` would be loaded early
    if (needs_mask) load_mask_words(words, tile, head);
    Scores scores, dp;
    Slots<Traits::kD> first;
    Slots<Traits::kDv> second;
    constexpr bool kIsSplit = first.kCount > 1, kIsSplitV = second.kCount > 1;
    const PingPong pingpong{group};
    pingpong.wait();
    start_part<0>(scores, first);
    if constexpr (kIsSplit) start_part<1>(scores, first);
    start_part<0>(dp, second);
    const RowStats lse = row_stats_of(first.of[0]), delta = row_stats_of(second.of[0]);
    wgmma_wait<1>();
    wgmma_fence_operand(scores);
    release(first);
    const auto finish = [&](auto is_great, const float2(&split)[2]) {
      if constexpr (Traits::kSumsDiagonals) {
        finish_with_window<decltype(is_great)::value>(scores, lse, split);
      } else {
        finish_scores<decltype(is_great)::value>(scores, lse, split);
      }
    };
    float2 split[2];
    if (__any_sync(0xffffffffu, lse.values[0] == -INFINITY || lse.values[1] == -INFINITY)) {
      load_split_lse(split, work, position);
      finish(std::true_type{}, split);
    } else {
      finish(std::false_type{}, split);
    }
    wgmma_fence_operand(scores);
    pingpong.pass();
    if (needs_mask) apply_mask(scores, words, tile, head);
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores[i] = exp2_approx(scores[i]);
    if constexpr (kIsSplitV) start_part<1>(dp, second);
    [[maybe_unused]] uint32_t kept[Traits::kHasDropout ? kScores / 32 : 1];
    if constexpr (Traits::kHasDropout) {
      find_kept<kScores, true>(kept, p.dropout, head.batch, head.head, work.block_q * kTile + row_of_tile(),
                               work.block_k * kTile + 2 * (lane % 4));
    }
    wgmma_wait<0>();
    wgmma_fence_operand(dp);
    release(second);
    if constexpr (Traits::kHasDropout) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) dp[i] = is_kept(kept, i) ? dp[i] * p.dropout.scale : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) sums[i] = fmaf(scores[i], dp[i] - delta.values[i / 2 % 2], sums[i]);
  }

  // Stores the thread's sums of one chunk, 8 bytes at a time. A quad stores a sector of L2.
  __device__ __forceinline__ void store_chunk(const DbiasWorkTile& work) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = work.block_q * kTile + row_of_tile() + 8 * r, first = work.block_k * kTile + 2 * (lane % 4);
      float* row = p.slots + work.chunk * p.slot_floats + (work.owner * p.seqlen_q + query) * p.slot_columns;
#pragma unroll
      for (int c = 0; c < kTile / 8; ++c) {
        const int key = first + 8 * c, at = 4 * c + 2 * r;
        if (query < p.seqlen_q && key < p.slot_columns) {
          *reinterpret_cast<float2*>(row + key) = make_float2(sums[at], sums[at + 1]);
        }
      }
    }
  }

  // Stores the thread's rows of dbias, (B, H, Lq, Lk), 16 bytes at a time.
  __device__ __forceinline__ void epilogue(const DbiasWorkTile& work) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = work.block_q * kTile + row_of_tile() + 8 * r;
      Element* row = static_cast<Element*>(p.dbias) + (work.owner * p.seqlen_q + query) * p.seqlen_k;
#pragma unroll
      for (int c = 0; c < kScores / 16; ++c) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 4 * (4 * c + i) + 2 * r;
          words[i] = pack(sums[at], sums[at + 1], Element{});
        }
        quad_transpose(words[0], words[1], words[2], words[3], lane);
        const int key = work.block_k * kTile + 8 * (4 * c + lane % 4);
        if (query < p.seqlen_q && key < p.seqlen_k) {
          *reinterpret_cast<uint4*>(row + key) = make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }
};

template <class Traits>
__device__ __forceinline__ void sum_heads(const SharedDbiasParams& p, SharedDbiasStorage<Traits>& shared, int group) {
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x % 128 / 32, 0), lane = threadIdx.x % 32;
  PipelineState<Traits::kSlots> pipe;
  PipelineState<Traits::kBiasStages> pipe_bias;
  PipelineState<2> pipe_work;
  float sums[kTile / 2];
  const PingPong pingpong{group};
  pingpong.start();
  for (;;) {
    const DbiasWorkItem& item = get_work_tile(shared, pipe_work);
    if (!item.is_valid) break;
    if (item.is_first) {
#pragma unroll
      for (int i = 0; i < kTile / 2; ++i) sums[i] = 0.0f;
    }
    if (item.takes_bias) barrier_wait(&shared.bias_full[pipe_bias.stage], pipe_bias.phase);
    SharedDbiasConsumer<Traits> consumer{p, shared, group, warp, lane, sums, pipe, pipe_bias.stage};
    if constexpr (Traits::kSumsDiagonals) {
      if (item.is_first) consumer.load_window(item.work);
    }
#pragma unroll 1
    for (uint32_t left = item.visited; left != 0; left &= left - 1) {
      const int i = __ffs(left) - 1;
      consumer.add_head(item.work, item.first_index + i, item.partial >> i & 1u);
    }
    if (item.frees_bias) {
      barrier_arrive_of_warp(&shared.bias_empty[pipe_bias.stage]);
      pipe_bias.advance();
    }
    if (item.is_last) {
      if constexpr (Traits::kSumsDiagonals) {
        consumer.store_diagonals(item.work);
      } else if (Traits::kHasFloatTiles || p.slots != nullptr) {  // dbias in fp32 is a slot
        consumer.store_chunk(item.work);
      } else {
        consumer.epilogue(item.work);
      }
    }
    release_work_tile(shared, pipe_work);
  }
  pingpong.end();
}

}  // namespace flash_dmattn
