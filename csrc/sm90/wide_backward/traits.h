// The shapes of the backward kernel for head dims above 128: every tile choice, with its reason.
#pragma once

#include "../../device/wgmma.h"
#include "../backward/launch.h"

namespace flash_dmattn {

template <class T, int kHeadDim, int kHeadDimV, BackwardBias kBiasForm, bool kMaskTiles, bool kSoftcap>
struct WideBackwardTraits {
  using Element = T;
  static constexpr int kD = kHeadDim, kDv = kHeadDimV;
  static constexpr BackwardBias kBias = kBiasForm;
  static constexpr bool kHasMask = kMaskTiles;
  static constexpr bool kHasBiasTiles = kBias == BackwardBias::kTile || kBias == BackwardBias::kTileStore;
  static constexpr bool kStoresDbias = kBias == BackwardBias::kTileStore, kSumsDbias = false;
  // With a softcap dbias is not ds as dq takes it. Beside p, in the place of the bias, there is no room for both: the
  // kernel of a shared bias' gradient stores it.
  static constexpr bool kHasSoftcap = kSoftcap, kReplacesBias = false;

  // One consumer holds dv of the block's keys and the other dk: 128 registers a thread for 64 keys at D256, beside 64
  // of scores and dp, or of dq. Of 96 keys they were 192.
  static constexpr int kConsumers = 2;
  static constexpr int kKeys = backward_keys(kD, kDv), kKeyTiles = 1, kRows = backward_rows(kD, kDv, kKeys);

  static constexpr int kPanels = (kD + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kPanelsV = (kDv + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kKeyBytes = kKeys * kPanels * kRowBytes;
  static constexpr int kValueBytes = kKeys * kPanelsV * kRowBytes;
  static constexpr int kQueryBytes = kRows * kPanels * kRowBytes;
  static constexpr int kDoutBytes = kRows * kPanelsV * kRowBytes;
  static constexpr int kScoreBytes = kRows * kKeys * 2;
  static constexpr int kKeySums = kBias == BackwardBias::kVector ? kKeys : 1;

  static constexpr int kKeyStages = 1;  // k and v of a work
  // Blocks of q and dout that are there or on their way: of 227 KB two of 64 KB fit at D256, and three at D192.
  static constexpr int kStages = kPanels + kPanelsV > 6 ? 2 : 3;
  // Blocks whose p and ds are there: one of each consumer.
  static constexpr int kScoreStages = kConsumers, kDsStages = kScoreStages, kBiasStages = kScoreStages;

  // dq of a block, 64 queries and all columns, is multiplied by both. At D192 the one that holds dv, which has fewer
  // columns at Dv 128 and as many at Dv 192, takes two panels of three.
  static constexpr int dq_panels(int group) { return group == 0 ? 2 : kPanels - 2; }

  static constexpr int kThreads = 128 * (1 + kConsumers);
  // Of 504 registers a thread of each warpgroup can be given together, in steps of 8.
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static constexpr int kRegisters = kProducerRegisters + kConsumers * kConsumerRegisters;  // of all warpgroups

  static_assert(!(kHasSoftcap && kStoresDbias), "ds has the slope of tanh, and dbias has not");
  static_assert(kKeys == 64 && kRows == 64, "a matrix instruction has 64 rows, of scores keys, and of dq queries");
  static_assert(kPanels == 3 || kPanels == 4, "each consumer multiplies one or two panels of dq");
};

}  // namespace flash_dmattn
