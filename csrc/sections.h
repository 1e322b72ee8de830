// The order in which work tiles are taken. Includes no CUDA, no torch.
#pragma once

namespace flash_dmattn {

// The order of work tiles, of which each of `pairs` has one in every row. Pairs come in sections of `width`, so that what
// a section reads fits in L2; within one, all tiles of a row come before those of the next.
//
// Rows may get shorter. Then the last `late_rows` of all pairs from number `whole_pairs` on come behind everything else:
// short tiles, for the SMs that would wait for the long ones of the last section.
struct Sections {
  int pairs, rows, width;
  int whole_pairs, late_rows;
};

}  // namespace flash_dmattn
