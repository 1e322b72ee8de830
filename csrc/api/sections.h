// How work tiles are put in an order. Includes no CUDA, no torch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../sections.h"
#include "integers.h"

namespace flash_dmattn {

// What the tiles of a section share fits in the 50 MB of L2, with room for what each tile reads alone.
constexpr int64_t kSectionBytes = 24 << 20;

// So many sections at the end have late rows, half of theirs: these read one and a half times what a section does.
constexpr int64_t kLateSections = 3;

// Sections of at most `most` pairs each, or of `together` if that is more, and of a multiple of it. `rows_shrink` where
// tiles of later rows are shorter: a section then has tiles for every SM, whatever L2 holds, sections are alike, and the
// last ones have late rows. Simulated and measured: docs/notes/cuda_bounds.md, "Order of work tiles".
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
