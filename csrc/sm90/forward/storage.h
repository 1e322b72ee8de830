// The shared memory of a block.
#pragma once

#include "../../device/pipeline.h"
#include "traits.h"
#include "tile_scheduler.h"

namespace flash_dmattn {

// The barriers come last. A phase of a barrier completes when what it is named after has happened.
template <class Traits>
struct alignas(1024) ForwardStorage {
  alignas(1024) uint8_t q[Traits::kQueryStages][Traits::kQueryBytes];
  alignas(1024) uint8_t k[Traits::kStages][Traits::kKeyBytes];
  alignas(1024) uint8_t v[Traits::kStages][Traits::kValueBytes];
  alignas(1024) uint8_t bias[Traits::kBiasStages][Traits::kBiasBytes];
  uint64_t q_full[Traits::kQueryStages], q_empty[Traits::kQueryStages];
  uint64_t k_full[Traits::kStages], k_empty[Traits::kStages];
  uint64_t v_full[Traits::kStages], v_empty[Traits::kStages];
  uint64_t bias_full[Traits::kBiasStages], bias_empty[Traits::kBiasStages];
  uint64_t work_full[kWorkStages], work_empty[kWorkStages];
  uint64_t work_wanted;  // loads of the last work tile begin, so the next one may be taken
  WorkItem<Traits> work[kWorkStages];
};

}  // namespace flash_dmattn
