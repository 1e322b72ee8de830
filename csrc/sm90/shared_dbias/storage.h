// The shared memory of a block.
#pragma once

#include "../../device/pipeline.h"
#include "traits.h"
#include "tile_scheduler.h"

namespace flash_dmattn {

// The barriers come last. A phase of a barrier completes when what it is named after has happened.
template <class Traits>
struct alignas(1024) SharedDbiasStorage {
  // A head uses slots in sequence: for columns of q and k, with lse; then for columns of dout and v, with delta.
  alignas(1024) uint8_t rows[Traits::kSlots][Traits::kOperandBytes];
  alignas(1024) uint8_t keys[Traits::kSlots][Traits::kOperandBytes];
  alignas(1024) uint8_t bias[Traits::kBiasStages][Traits::kBiasBytes];
  alignas(16) float row_stats[Traits::kSlots][kTile];
  uint64_t slot_full[Traits::kSlots], slot_empty[Traits::kSlots];
  uint64_t bias_full[Traits::kBiasStages], bias_empty[Traits::kBiasStages];
  uint64_t work_full[2], work_empty[2];
  DbiasWorkItem work[2];
};

}  // namespace flash_dmattn
