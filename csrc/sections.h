// The order in which work tiles are taken. Includes no CUDA, no torch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "api/integers.h"

namespace flash_dmattn {

// The order of work tiles. Each pair has one tile in every row. Pairs come in sections of `width` pairs, whose operands
// fit in L2. Within a section, all tiles of a row come before the tiles of the next row.
//
// Tiles of later rows may be shorter. Then the pairs from number `whole_pairs` on leave their last `late_rows` rows for
// the very end. The SMs that would wait for long tiles of the last section take these short ones.
struct Sections {
  int pairs, rows, width;
  int whole_pairs, late_rows;
};

// The bytes that tiles of a section share. They fit in the 50 MB of L2, beside the bytes that each tile reads alone.
constexpr int64_t kSectionBytes = 24 << 20;

// So many sections at the end have late rows, which are half of their rows. Together these read one and a half times
// the bytes of a section.
constexpr int64_t kLateSections = 3;

// Sections of a multiple of `together` pairs, and of at most `most` pairs where that leaves `together`. `rows_shrink`
// says that tiles of later rows are shorter. A section then has tiles for every SM, even if L2 does not hold what they
// read; sections are alike, and the last ones have late rows. Simulated and measured: docs/notes/cuda_bounds.md, "Order
// of work tiles".
inline Sections sections_of(int64_t pairs, int64_t rows, int64_t most, int64_t together, bool rows_shrink,
                            int64_t num_sms) {
  if (rows_shrink) most = std::max(most, num_sms / std::max<int64_t>(rows, 1));
  int64_t width = std::max<int64_t>(most / together, 1) * together;
  if (rows_shrink && pairs > width) width = ceil_div(ceil_div(pairs, ceil_div(pairs, width)), together) * together;
  width = std::clamp<int64_t>(width, 1, std::max<int64_t>(pairs, 1));
  const int64_t whole = rows_shrink ? std::max<int64_t>(ceil_div(pairs, width) - kLateSections, 0) * width : pairs;
  return {static_cast<int>(pairs), static_cast<int>(rows), static_cast<int>(width), static_cast<int>(whole),
          rows_shrink ? static_cast<int>(rows / 2) : 0};
}

}  // namespace flash_dmattn
