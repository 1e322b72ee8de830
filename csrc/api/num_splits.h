// How many pieces of a forward pass are handed out in parts, each a share of the keys. No CUDA and no torch in here.
#pragma once

#include <algorithm>
#include <cstdint>

namespace flash_dmattn {

constexpr int64_t kMaxParts = 64;  // which the last one to arrive reads one after another

// Pieces from number `whole` on come in `parts`; 1 where none does.
struct KeyParts {
  int64_t whole, parts;
};

// The pieces of a call that are left when every processor has had as many as every other: the last round of them, or
// all where they are few. It takes as long as one piece, however few they are; in parts it can be shorter. The times of
// the round are counted in steps, blocks of keys of one piece:
//
//     rounds(parts) * (steps of a part + what a piece has besides them) + reading the parts + sharing at all
//
// What a piece has besides its steps, q and the first scores before and out after them, was 12 % of pieces of 16 steps
// (a bias at D64). What a part leaves behind is out in fp32, 48 or 64 KB for steps of some 3000 clocks: half a step to
// write, half to read. Sharing at all costs 3 microseconds, three steps: pieces of 4 steps in 4 parts took 13 for 10,
// 64 pieces of 8 in 2 parts 18.6 for 16.3, but 16 such pieces 14.5 for 15.9, and 4 pieces of 64 steps 23 for 93.
//
// steps: of the longest piece, as far as the host knows. uneven: whether pieces differ in length by their place (a
// band); then the round that is left is of the shortest ones, and only pieces that are few altogether are split.
inline KeyParts estimate_key_parts(int64_t pieces, int64_t steps, int64_t processors, bool uneven) {
  const int64_t left = pieces % processors, whole = pieces - left;
  if (uneven && whole > 0) return {pieces, 1};
  const auto halves = [&](int64_t parts) {  // of a step
    const int64_t rounds = (left * parts + processors - 1) / processors;
    const int64_t of_part = (steps + parts - 1) / parts;
    return parts == 1 ? rounds * (2 * of_part + 4) : rounds * (2 * of_part + 4 + 1) + parts + 6;
  };
  KeyParts best{whole, 1};
  for (int64_t parts = 2; parts <= std::min(steps, kMaxParts); ++parts) {
    if (halves(parts) < halves(best.parts)) best.parts = parts;
  }
  return best;
}

}  // namespace flash_dmattn
