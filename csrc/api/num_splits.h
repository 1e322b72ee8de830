// Split-KV: which work tiles of a forward pass are split along the keys, and into how many. Includes no CUDA, no torch.
#pragma once

#include <algorithm>
#include <cstdint>

namespace flash_dmattn {

constexpr int64_t kMaxSplits = 64;  // the last block to finish reads the results of all splits in sequence

// Work tiles from number `unsplit_tiles` on are split into num_splits; 1 if none is.
struct KvSplits {
  int64_t unsplit_tiles, num_splits;
};

// Chooses the split of the last wave: the tiles left over when every SM has had the same number, or all tiles if there
// are fewer than SMs. The last wave takes as long as one tile, however few tiles it has; splits shorten it. The
// estimate counts steps, one key block of one tile each:
//
//     waves(splits) * (steps of a split + fixed cost of a tile) + reading the splits + fixed cost of splitting
//
// The constants below are fitted to an H200 (docs/notes/cuda_bounds.md, "Split-KV"): a tile costs 2 steps besides
// its own, writing a split half a step, reading one half a step, and splitting at all 3 steps.
//
// steps: of the longest tile, as far as the host knows. uneven: tiles differ in length by position (a band). The last
// wave then holds the shortest tiles, so tiles are split only if there are fewer than SMs.
inline KvSplits estimate_num_splits(int64_t tiles, int64_t steps, int64_t num_sms, bool uneven) {
  const int64_t left = tiles % num_sms, unsplit = tiles - left;
  if (uneven && unsplit > 0) return {tiles, 1};
  const auto halves = [&](int64_t splits) {  // the time, in half steps
    const int64_t waves = (left * splits + num_sms - 1) / num_sms;
    const int64_t split_steps = (steps + splits - 1) / splits;
    return splits == 1 ? waves * (2 * split_steps + 4) : waves * (2 * split_steps + 4 + 1) + splits + 6;
  };
  KvSplits best{unsplit, 1};
  for (int64_t splits = 2; splits <= std::min(steps, kMaxSplits); ++splits) {
    if (halves(splits) < halves(best.num_splits)) best.num_splits = splits;
  }
  return best;
}

}  // namespace flash_dmattn
