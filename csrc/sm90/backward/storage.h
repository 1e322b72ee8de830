// The shared memory of a block, and how its warps hand it to each other.
#pragma once

#include "../../device/pipeline.h"
#include "traits.h"
#include "tile_scheduler.h"

namespace flash_dmattn {

// The barriers come last: each one's phase is over when what it names has happened.
template <class Traits>
struct alignas(1024) BackwardStorage {
  static constexpr int kStages = Traits::kStages, kDsStages = Traits::kDsStages, kBiasStages = Traits::kBiasStages;
  alignas(1024) uint8_t k[Traits::kKeyStages][Traits::kKeyBytes];
  alignas(1024) uint8_t v[Traits::kKeyStages][Traits::kValueBytes];
  alignas(1024) uint8_t q[kStages][Traits::kQueryBytes];
  alignas(1024) uint8_t dout[kStages][Traits::kDoutBytes];
  alignas(1024) uint8_t ds[kDsStages][Traits::kScoreBytes];  // (queries, keys of a tile) in panels of 64 keys
  alignas(1024) uint8_t bias[kBiasStages][Traits::kBiasBytes];
  alignas(1024) uint8_t parts[Traits::kPartStages][Traits::kPartBytes];  // of ds, from each block of the cluster
  float2 key_sums[Traits::kKeySums];  // one of each thread of the consumers
  alignas(16) float lse[kStages][Traits::kRows];
  alignas(16) float delta[kStages][Traits::kRows];
  uint64_t keys_full[Traits::kKeyStages], keys_empty[Traits::kKeyStages];  // k and v
  uint64_t q_full[kStages], q_empty[kStages];          // q and lse
  uint64_t dout_full[kStages], dout_empty[kStages];    // dout and delta
  uint64_t ds_full[kDsStages * Traits::kParts], ds_empty[kDsStages];
  uint64_t bias_full[kBiasStages], bias_empty[kBiasStages];
  uint64_t work_full[2], work_empty[2];
  KeyItem<Traits> work[2];
  // Of a cluster: the number of the next work, of which the first block's tells the others; and its parts.
  int next;
  uint64_t next_full, next_empty;
  uint64_t parts_full[Traits::kPartStages], parts_empty[Traits::kPartStages];
};

}  // namespace flash_dmattn
