// Which key blocks under a mask have work tiles of whole groups. The backward kernel and those around it ask.
#pragma once

#include "../../params.h"

namespace flash_dmattn {

// The mask of a key head.
template <class Masks>
__device__ __forceinline__ int64_t mask_of_head(const Masks& p, int64_t batch, int64_t head) {
  return (p.mask_has_batch ? batch : 0) * p.mask_heads + head / p.heads_per_mask;
}

// `pair` is the number of the (batch, key head) pair in the order of work tiles, `tile` the mask's tile of keys.
__device__ __forceinline__ bool is_group_walk(const GroupWalks& p, int64_t batch, int64_t head, int64_t pair, int tile) {
  const int length = 2 + p.tiles_q;
  const int32_t* lists = p.lists + mask_of_head(p, batch, head) * p.tiles * length;
  const auto walk_of = [&](int tile) {
    const int32_t* counts = lists + static_cast<int64_t>(tile) * length;
    return counts[0] + counts[1];
  };
  const int walk = walk_of(tile);
  if (walk <= p.short_walk) return true;
  if (pair >= p.whole_pairs) return false;
  constexpr int kSamples = 16;  // the mean is that of so many tiles
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kSamples; ++i) sum += walk_of((2 * i + 1) * p.tiles / (2 * kSamples));
  return static_cast<int64_t>(walk) * kSamples <= static_cast<int64_t>(sum) * p.share;
}

}  // namespace flash_dmattn
