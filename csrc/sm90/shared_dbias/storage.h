// The shared memory of a block, and how its warps hand it to each other.
#pragma once

#include "../../device/pipeline.h"
#include "traits.h"
#include "tile_scheduler.h"

namespace flash_dmattn {

// The barriers come last: each one's phase is over when what it names has happened.
template <class Traits>
struct alignas(1024) SharedDbiasStorage {
  // A head takes slots in turn: columns of q and k, with lse, then columns of dout and v, with delta.
  alignas(1024) uint8_t rows[Traits::kSlots][Traits::kOperandBytes];
  alignas(1024) uint8_t keys[Traits::kSlots][Traits::kOperandBytes];
  alignas(1024) uint8_t bias[Traits::kBiasStages][Traits::kBiasBytes];
  alignas(16) float numbers[Traits::kSlots][kTile];
  uint64_t slot_full[Traits::kSlots], slot_empty[Traits::kSlots];
  uint64_t bias_full[Traits::kBiasStages], bias_empty[Traits::kBiasStages];
  uint64_t work_full[2], work_empty[2];
  DbiasItem work[2];
};

}  // namespace flash_dmattn
