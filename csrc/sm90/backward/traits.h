// The shapes of the backward kernel: every tile choice, with its reason.
#pragma once

#include "../../device/wgmma.h"
#include "../../params.h"
#include "launch.h"

namespace flash_dmattn {

template <class T, int kHeadDim, int kHeadDimV, BackwardBias kBiasForm, bool kMaskTiles, bool kSoftcap,
          int kBlockKeys = kTile>
struct BackwardTraits {
  using Element = T;
  static constexpr int kD = kHeadDim, kDv = kHeadDimV;
  static constexpr BackwardBias kBias = kBiasForm;
  static constexpr bool kHasMask = kMaskTiles;
  static constexpr bool kStoresDbias = kBias == BackwardBias::kTileStore, kSumsDbias = kBias == BackwardBias::kTileSum;
  static constexpr bool kHasBiasTiles = kBias == BackwardBias::kTile || kStoresDbias || kSumsDbias;
  static constexpr bool kHasSoftcap = kSoftcap;
  // With a softcap the slope of tanh is in ds as dq takes it, not as it is stored: dbias then replaces the bias in
  // shared memory, in the tile whose values have just been read.
  static constexpr bool kReplacesBias = kStoresDbias && kHasSoftcap;

  // A consumer has 64 keys, whose dk and dv it holds, D floats a thread, beside scores and dp of all queries of a tile,
  // kRows floats: 192 of its 240 registers at D64 and at D128.
  //
  // At D64 two tiles of keys fit too, of 64 queries at a time, first with the one tile and then with the other: as many
  // scores a step, for which half of q and dout is read, and half of the sums of dq are added. Full bias 0.455 ms for
  // 0.548; where dbias is not stored it is no faster. A third stage of q and dout, or of the bias, changes nothing.
  static constexpr int kConsumers = 2, kKeys = kBlockKeys, kKeyTiles = kKeys / kTile;
  static constexpr int kRows = backward_rows(kD, kDv, kKeys);
  static constexpr int kStages = 2;
  // Where it fits, at D64, k and v of the next work are there before this one is done: dense 2.50 ms for 2.56.
  static constexpr int kKeyStages = kD <= 64 && kDv <= 64 && !kHasSoftcap && kKeyTiles == 1 && !kSumsDbias ? 2 : 1;
  // With a softcap ds is written before a consumer's turn, when the other may still multiply the last but one: a third
  // stage. There is room for it at D64 since the bias is read late, right before that: its next tile has the products
  // and tanh of a step to come in. Without a softcap, too, one tile on its way is better at D64 than two, behind which
  // q and dout wait in the copy engine: 0.534 ms for 0.548.
  // Of two tiles of keys each has a stage of ds and of the bias.
  static constexpr int kDsStages = kHasSoftcap ? 3 : kStages * kKeyTiles;
  static constexpr int kBiasStages = kHasSoftcap || kD <= 64 ? kKeyTiles : kStages;
  // What the blocks of a cluster send each other at once: ds of a tile, or at D64 of each consumer as soon as it has
  // written it, for there is room for two such parts. One of a whole tile took 1.29 ms for 1.01, four quarters 1.12.
  static constexpr int kParts = kSumsDbias && kRows == 128 ? kConsumers : 1, kPartStages = 2;

  static constexpr int kPanels = (kD + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kPanelsV = (kDv + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kKeyBytes = kKeys * kPanels * kRowBytes;
  static constexpr int kValueBytes = kKeys * kPanelsV * kRowBytes;
  static constexpr int kQueryBytes = kRows * kPanels * kRowBytes;
  static constexpr int kDoutBytes = kRows * kPanelsV * kRowBytes;
  static constexpr int kScoreBytes = kRows * kTile * 2;
  static constexpr int kBiasBytes = kHasBiasTiles ? kScoreBytes : 16;
  static constexpr int kPartBytes = kSumsDbias ? kScoreBytes / kParts : 16;
  static constexpr int kKeySums = kBias == BackwardBias::kVector ? 128 * kConsumers : 1;

  static constexpr int kThreads = 128 * (1 + kConsumers + kSumsDbias);
  // Of 504 registers a thread of each warpgroup can be given together, 512 of four, in steps of 8. The warpgroup that
  // sums is behind every stage of ds: with 24, which it spills, 1.01 ms at D64 for 0.96. At D128, where consumers with
  // 224 are slower by a fifth, it has twice the time.
  static constexpr bool kSumsFast = kSumsDbias && kD <= 64 && kDv <= 64;
  static constexpr int kProducerRegisters = 24, kSumRegisters = kSumsFast ? 40 : 24;
  static constexpr int kConsumerRegisters = kSumsFast ? 224 : kSumsDbias ? 232 : 240;
  static constexpr int kRegisters =  // of all warpgroups
      kProducerRegisters + kConsumers * kConsumerRegisters + kSumsDbias * kSumRegisters;

  // Of dq of a block of queries each consumer has 64 queries, and so many columns.
  static constexpr int kDqColumns = kPanels * kRows / 2;

  static_assert(kKeyTiles == 1 ? kDqColumns == kPieceColumns : kDqColumns == kPieceColumns / 2, "of a whole piece");
  static_assert(!(kSumsDbias && kHasSoftcap), "ds has the slope of tanh, and dbias has not");
  static_assert(kKeyTiles == 1 || (kStoresDbias && !kHasMask && !kHasSoftcap), "where dbias is stored");
};

}  // namespace flash_dmattn
