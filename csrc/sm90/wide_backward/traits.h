// Compile-time choices of the backward kernel for head dims above 128, with their reasons. Measurements:
// docs/notes/cuda.md, "Head dims above 128".
#pragma once

#include "../../device/wgmma.h"
#include "../backward/launch.h"

namespace flash_dmattn {

template <class T, int kHeadDim, int kHeadDimV, BackwardBias kBiasForm, MaskForm kMaskForm, bool kSoftcap>
struct WideBackwardTraits {
  using Element = T;
  static constexpr int kD = kHeadDim, kDv = kHeadDimV;
  static constexpr BackwardBias kBias = kBiasForm;
  static constexpr bool kHasMask = kMaskForm != MaskForm::kNone, kHasIntervals = kMaskForm == MaskForm::kIntervals;
  static constexpr bool kHasBiasTiles = has_tiles(form_of(kBias)), kHasBiasWindow = false;
  static constexpr bool kStoresDbias = kBias == BackwardBias::kTileStore, kSumsDbias = false;
  // With a softcap dbias differs from ds as dq needs it, and there is no room for both beside p, which overwrites the
  // bias: the shared_dbias kernel stores dbias.
  static constexpr bool kHasSoftcap = kSoftcap, kReplacesBias = false, kHoldsProbs = false;
  static constexpr bool kHasSequences = false, kHasDropout = false;

  // One consumer holds dv of the block's keys, the other dk: at D256 128 registers per thread for 64 keys, beside 64 of
  // scores and dp or of dq. 96 keys would take 192.
  static constexpr int kConsumers = 2;
  static constexpr bool kTurnsDq = false;
  static constexpr int kBlockN = backward_block_n(kD, kDv), kKeyTiles = 1, kBlockM = backward_block_m(kD, kDv, kBlockN);

  static constexpr int kPanels = (kD + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kPanelsV = (kDv + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kKeyBytes = kBlockN * kPanels * kRowBytes;
  static constexpr int kValueBytes = kBlockN * kPanelsV * kRowBytes;
  static constexpr int kQueryBytes = kBlockM * kPanels * kRowBytes;
  static constexpr int kDoutBytes = kBlockM * kPanelsV * kRowBytes;
  static constexpr int kScoreBytes = kBlockM * kBlockN * 2;
  static constexpr int kBiasColumns = panel_columns(form_of(kBias));
  static constexpr int kKeySums = kBias == BackwardBias::kVector ? kBlockN : 1;

  static constexpr int kKeyStages = 1;  // of k and v
  // Query blocks of q and dout: of 227 KB two of 64 KB fit at D256, three at D192.
  static constexpr int kStages = kPanels + kPanelsV > 6 ? 2 : 3;
  // Blocks of p and ds: one of each consumer.
  static constexpr int kScoreStages = kConsumers, kDsStages = kScoreStages, kBiasStages = kScoreStages;
  // One consumer writes a stage of ds. One is the last reader of a stage of bias: it multiplies p, which overwrites the
  // bias.
  static constexpr int kDsWriters = 1, kBiasReaders = 1;

  // Panels of dq that each consumer multiplies. At D192 the one with dv, which has fewer columns or as many, takes two
  // of three.
  static constexpr int dq_panels(int group) { return group == 0 ? 2 : kPanels - 2; }

  static constexpr int kThreads = 128 * (1 + kConsumers);
  // Three warpgroups share 504 registers per thread, in steps of 8.
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static constexpr int kRegisters = kProducerRegisters + kConsumers * kConsumerRegisters;  // of all warpgroups

  static_assert(!(kHasSoftcap && kStoresDbias), "ds has the slope of tanh, and dbias has not");
  static_assert(kBlockN == 64 && kBlockM == 64, "a matrix instruction has 64 rows, of scores keys, and of dq queries");
  static_assert(kPanels == 3 || kPanels == 4, "each consumer multiplies one or two panels of dq");
};

}  // namespace flash_dmattn
