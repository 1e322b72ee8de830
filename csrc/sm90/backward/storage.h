// The shared memory of a block.
#pragma once

#include "../../device/pipeline.h"
#include "traits.h"
#include "tile_scheduler.h"

namespace flash_dmattn {

// The barriers come last. A phase of a barrier completes when what it is named after has happened.
template <class Traits>
struct alignas(1024) BackwardStorage {
  static constexpr int kStages = Traits::kStages, kDsStages = Traits::kDsStages, kBiasStages = Traits::kBiasStages;
  alignas(1024) uint8_t k[Traits::kKeyStages][Traits::kKeyBytes];
  alignas(1024) uint8_t v[Traits::kKeyStages][Traits::kValueBytes];
  alignas(1024) uint8_t q[kStages][Traits::kQueryBytes];
  alignas(1024) uint8_t dout[kStages][Traits::kDoutBytes];
  alignas(1024) uint8_t ds[kDsStages][Traits::kScoreBytes];  // (queries, keys of a key tile), panels of 64 keys
  alignas(Traits::kHasBiasTiles ? 1024 : 16) uint8_t bias[kBiasStages][Traits::kBiasBytes];
  // Received rows of ds, from each block of the cluster.
  alignas(Traits::kSumsDbias ? 1024 : 16) uint8_t exchange[Traits::kExchangeStages][Traits::kExchangeBytes];
  // Turned dq of each consumer, as its threads hold it (accumulators.h).
  alignas(16) uint8_t dq[Traits::kTurnsDq ? Traits::kConsumers : 1][Traits::kTurnsDq ? Traits::kDqBytes : 16];
  float2 key_sums[Traits::kKeySums];  // one for each consumer thread
  uint32_t has_great[4 * Traits::kConsumers];  // whether a warp of a consumer saw a row whose lse is great
  alignas(16) float lse[kStages][Traits::kBlockM];
  alignas(16) float delta[kStages][Traits::kBlockM];
  uint64_t keys_full[Traits::kKeyStages], keys_empty[Traits::kKeyStages];  // k and v
  uint64_t q_full[kStages], q_empty[kStages];                              // q and lse
  uint64_t dout_full[kStages], dout_empty[kStages];                        // dout and delta
  uint64_t ds_full[kDsStages * Traits::kDsSlices], ds_empty[kDsStages];
  uint64_t bias_full[kBiasStages], bias_empty[kBiasStages];
  uint64_t dq_full[Traits::kConsumers], dq_empty[Traits::kConsumers];
  uint64_t work_full[kWorkStages], work_empty[kWorkStages];
  uint64_t work_wanted;  // the last loads of a work tile begin, so the next one may be taken
  KeyWorkItem<Traits> work[kWorkStages];
  // Clusters only: the number of the next work tile, which the first block tells the others; barriers of the exchange.
  int next_tile;
  uint64_t next_tile_full, next_tile_empty;
  uint64_t exchange_full[Traits::kExchangeStages], exchange_empty[Traits::kExchangeStages];
};

}  // namespace flash_dmattn
