// Which pair and which row a work tile has.
#pragma once

#include "../sections.h"

namespace flash_dmattn {

struct Place {
  int pair, row;
};

// Narrows pairs [first, end) and the rows from `first_row` on to the kind of sections that the tile is in. `index` then counts
// their tiles.
__device__ __forceinline__ Place place_of(const Sections& of, int index) {
  int first = 0, end = of.pairs, width = of.width, first_row = 0, rows = of.rows;
  if (of.late_rows > 0) {
    const int tiles_before = of.whole_pairs * rows;
    if (index < tiles_before) {
      end = of.whole_pairs;  // sections of whole pairs
    } else {
      index -= tiles_before;
      first = of.whole_pairs;
      rows -= of.late_rows;  // sections without their late rows
      const int early = (end - first) * rows;
      if (index >= early) {
        index -= early;
        width = end - first;  // one section of all late rows
        first_row = rows;
        rows = of.late_rows;
      }
    }
  }
  const int section = index / (width * rows), position = index - section * width * rows;
  first += section * width;
  width = min(width, end - first);
  const int row = position / width;
  return {first + position - row * width, first_row + row};
}

}  // namespace flash_dmattn
