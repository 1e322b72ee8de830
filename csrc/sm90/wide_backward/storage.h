// The shared memory of a block.
#pragma once

#include "../../device/pipeline.h"
#include "../backward/tile_scheduler.h"
#include "traits.h"

namespace flash_dmattn {

// The barriers come last. A phase of a barrier completes when what it is named after has happened.
template <class Traits>
struct alignas(1024) WideBackwardStorage {
  static constexpr int kStages = Traits::kStages, kScoreStages = Traits::kScoreStages;
  alignas(1024) uint8_t k[Traits::kKeyStages][Traits::kKeyBytes];
  alignas(1024) uint8_t v[Traits::kKeyStages][Traits::kValueBytes];
  alignas(1024) uint8_t q[kStages][Traits::kQueryBytes];
  alignas(1024) uint8_t dout[kStages][Traits::kDoutBytes];
  // (queries, keys). A block uses the stage of the consumer that computes its scores.
  alignas(1024) uint8_t ds[kScoreStages][Traits::kScoreBytes];
  alignas(1024) uint8_t bias[kScoreStages][Traits::kScoreBytes];  // overwritten by p
  float key_sums[Traits::kConsumers][Traits::kKeySums];
  uint32_t has_great[4 * Traits::kConsumers];  // as in BackwardStorage
  alignas(16) float lse[kStages][Traits::kBlockM];
  alignas(16) float delta[kStages][Traits::kBlockM];
  uint64_t keys_full[Traits::kKeyStages], keys_empty[Traits::kKeyStages];  // k and v
  uint64_t q_full[kStages], q_empty[kStages];                              // q and lse
  uint64_t dout_full[kStages], dout_empty[kStages];                        // dout and delta
  uint64_t ds_full[kScoreStages], ds_empty[kScoreStages];                  // ds and p
  uint64_t bias_full[kScoreStages], bias_empty[kScoreStages];
  uint64_t work_full[kWorkStages], work_empty[kWorkStages];
  uint64_t work_wanted;  // the last loads of a work tile begin, so the next one may be taken
  KeyWorkItem<Traits> work[kWorkStages];
};

}  // namespace flash_dmattn
