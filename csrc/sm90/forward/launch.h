// The forward kernels' interface for code that does not compile them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "../backward/instances.h"
#include "../bias_forms.h"
#include "params.h"

namespace flash_dmattn {

// Whether there are kernels of more than two consumers beside a mask with one row for all queries, in the form that
// such a mask takes beside the bias. With any other mask a work tile is of the size of a mask tile.
constexpr bool has_one_row_kernels(Bias bias, MaskForm mask) {
  return mask == (has_tiles(bias) ? MaskForm::kTiles : MaskForm::kIntervals);
}

// The most consumers of a block that registers are left for, and shared memory beside tiles of fp32. Each has 64 rows.
constexpr int most_consumers(int head_dim, int head_dim_v, Bias bias, MaskForm mask) {
  if (bias == Bias::kStrided || head_dim > 64 || head_dim_v > 64) return 2;
  if (mask != MaskForm::kNone && !has_one_row_kernels(bias, mask)) return 2;
  return head_dim <= 32 && head_dim_v <= 32 ? 4 : has_float_tiles(bias) ? 2 : 3;
}

// How many consumers serve a call, of at most so many. Two serve where more would make no fewer work tiles. At D32 more
// than two walk 64 keys at a time and leave fewer keys of short rows empty, so the rule holds there for intervals
// alone, whose tiles are never halved. Three take less time than four where they leave fewer of their rows empty: a
// work tile of three takes 0.8 of the time of a work tile of four. (docs/notes/cuda_tried.md, "Short rows and head dims
// up to 32")
inline int consumers_for(int seqlen_q, int most, MaskForm mask) {
  const auto tiles = [=](int consumers) { return (seqlen_q + 64 * consumers - 1) / (64 * consumers); };
  if ((most == 3 || mask == MaskForm::kIntervals) && tiles(most) >= tiles(2)) return 2;
  return most == 4 && 4 * tiles(3) >= 5 * tiles(4) ? 4 : 3;
}

// Keys whose bias a block of three or four consumers can hold at once: 227 KB hold 192 or 256 rows of them beside two
// stages of q, k and v.
constexpr int held_keys(int consumers) { return consumers == 3 ? 384 : 256; }

// Whether there is a kernel that holds it, for a call without a mask and without dropout.
inline bool can_hold_bias(int head_dim, int head_dim_v, Bias bias, int seqlen_q, int64_t seqlen_k) {
  return bias == Bias::kTile && most_consumers(head_dim, head_dim_v, bias, MaskForm::kNone) == 4 &&
         seqlen_k <= held_keys(consumers_for(seqlen_q, 4, MaskForm::kNone));
}

// Whether there are kernels that write the largest scores, too. They have neither dropout nor pages.
constexpr bool has_max_scores_kernels(Bias bias, MaskForm mask) {
  return bias == Bias::kNone && mask == MaskForm::kNone;
}

// Chooses one of an instance's kernels. The bias is kNone or kVector if the mask is of intervals. A call with sequences
// has no mask, and its bias is not kStrided.
struct ForwardVariant {
  Bias bias;
  MaskForm mask;
  int64_t queries;        // of a batch entry, or of a sequence on the mean
  bool has_one_mask_row;  // All queries see the same keys.
  bool holds_bias;        // Blocks keep their bias for batch entries that share it; can_hold_bias has to allow that.
  bool has_dropout, has_pages, has_max_scores;
};

// Defined for the dtypes and head dims of the build. Both launch on the current device and return the launch's error;
// the second is for calls with sequences.
template <class T, int kHeadDim, int kHeadDimV>
cudaError_t launch_forward(const ForwardParams& params, const ForwardVariant& variant, int blocks, cudaStream_t stream);
template <class T, int kHeadDim, int kHeadDimV>
cudaError_t launch_forward_sequences(const ForwardParams& params, const ForwardVariant& variant, int blocks,
                                     cudaStream_t stream);

// Three consumers where there are kernels of them, and sequences of so many queries on the mean leave few of their rows
// empty.
constexpr int kQueriesOfThree = 1024;
constexpr int sequences_consumers(int head_dim, int head_dim_v, int64_t mean_queries, bool has_pages) {
  const int most = has_pages ? 2 : most_consumers(head_dim, head_dim_v, Bias::kNone, MaskForm::kNone);
  return most > 2 && mean_queries >= kQueriesOfThree ? 3 : 2;
}

// The tile of a work tile: block_m queries and block_n keys at a time. With split-KV, the floats that a split leaves in
// device memory and the warps that write them; 0 if the kernel has no split-KV.
struct ForwardTile {
  int block_m, block_n;
  int split_floats, split_warps;
};
template <class T, int kHeadDim, int kHeadDimV>
ForwardTile forward_tile(const ForwardVariant& variant);
template <class T, int kHeadDim, int kHeadDimV>
ForwardTile forward_sequences_tile(const ForwardVariant& variant) {
  return {64 * sequences_consumers(kHeadDim, kHeadDimV, variant.queries, variant.has_pages), kTile, 0, 0};
}

}  // namespace flash_dmattn
