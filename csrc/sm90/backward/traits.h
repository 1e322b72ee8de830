// Compile-time choices of the backward kernel, with their reasons.
// Measurements: docs/notes/cuda_tried.md, "Backward kernel".
#pragma once

#include "../../device/wgmma.h"
#include "launch.h"

namespace flash_dmattn {

// The columns of the product for a consumer's share of dq of a query block.
constexpr int dq_columns(int head_dim, int block_m, bool turns_dq) {
  if (turns_dq) return block_m;          // all queries; 64 columns of dq are the rows
  if (block_m == 128) return head_dim;   // 64 of the queries
  return head_dim > kAccumColumns ? kAccumColumns : head_dim / 2;  // all queries, and a panel or half of one
}

template <class T, int kHeadDim, int kHeadDimV, BackwardBias kBiasForm, MaskForm kMaskForm, bool kSoftcap,
          int kN = kTile, bool kOfSequences = false, bool kDropout = false,
          int kM = backward_block_m(kHeadDim, kHeadDimV, kN)>
struct BackwardTraits {
  using Element = T;
  static constexpr int kD = kHeadDim, kDv = kHeadDimV;
  static constexpr BackwardBias kBias = kBiasForm;
  static constexpr bool kHasMask = kMaskForm != MaskForm::kNone, kHasIntervals = kMaskForm == MaskForm::kIntervals;
  static constexpr bool kStoresDbias = stores_tiles(kBias), kSumsDbias = kBias == BackwardBias::kTileSum;
  static constexpr bool kHasBiasTiles = has_tiles(form_of(kBias)), kHasBiasWindow = has_window(form_of(kBias));
  static constexpr bool kHasFloatTiles = has_float_tiles(form_of(kBias)), kSumsFlat = sums_flat_tiles(kBias);
  static constexpr bool kHasSoftcap = kSoftcap, kHasSequences = kOfSequences, kHasDropout = kDropout;
  // With a softcap ds as dq needs it includes the slope of tanh, and dbias does not. So dbias overwrites the bias in
  // shared memory, in the tile that has just been read. So does a dbias in fp32, which ds in 16 bits is not.
  static constexpr bool kReplacesBias = kStoresDbias && (kHasSoftcap || kHasFloatTiles);

  // A consumer holds dk and dv of 64 keys, D floats per thread, and scores and dp of a query block, kBlockM floats: 192
  // of its 240 registers, at D64 and at D128.
  //
  // Up to D64 two key tiles fit too, with 64 queries at a time: as many scores per step. q and dout are then read half
  // as often, and half as much is added to dq. It pays where dbias is stored, and where the two tiles are all keys, so
  // that dq is complete.
  static constexpr int kConsumers = 2, kBlockN = kN, kKeyTiles = kBlockN / kTile;
  static constexpr int kBlockM = kM;
  // With 80 queries dq is computed turned: its columns are rows of the product, 64 of them a consumer's.
  static constexpr bool kTurnsDq = kBlockM == kTurnedBlockM;
  static constexpr int kStages = 2;
  // At D64 there is room to load k and v of the next tile early, unless a tile of bias takes it.
  static constexpr int kKeyStages =
      kD <= 64 && kDv <= 64 && !kHasSoftcap && kKeyTiles == 1 && !kSumsDbias && !kHasFloatTiles ? 2 : 1;
  // With a softcap ds is written before the ping-pong barrier, while the other consumer may still multiply the one
  // before the last: a third stage. At D64 it takes the place of the second stage of bias, which is needed later then.
  // One stage of bias is better at D64 without a softcap too: q and dout queue behind it in TMA. With two key tiles,
  // each has a stage.
  static constexpr int kDsStages = kHasSoftcap ? 3 : kStages * kKeyTiles;
  static constexpr int kBiasStages = (kHasSoftcap || kD <= 64) && !kHasBiasWindow ? kKeyTiles : kStages;
  // Blocks of a cluster exchange ds of a tile at a time, or at D64 the slice of each consumer as soon as it is written.
  // Two stages for that fit.
  static constexpr int kDsSlices = kSumsDbias && kBlockM == 128 ? kConsumers : 1, kExchangeStages = 2;
  // Consumers that write what a barrier of ds is for, and that read a stage of bias.
  static constexpr int kDsWriters = kConsumers / kDsSlices, kBiasReaders = kConsumers;

  static constexpr int kPanels = (kD + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kPanelsV = (kDv + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kKeyBytes = kBlockN * kPanels * kRowBytes;
  static constexpr int kValueBytes = kBlockN * kPanelsV * kRowBytes;
  static constexpr int kQueryBytes = kBlockM * kPanels * kRowBytes;
  static constexpr int kDoutBytes = kBlockM * kPanelsV * kRowBytes;
  static constexpr int kScoreBytes = kBlockM * kTile * 2;
  static constexpr int kBiasBytes = kHasBiasTiles    ? kBlockM * kTile * value_bytes(form_of(kBias))
                                    : kHasBiasWindow ? WindowLayout<kBlockN, kBlockM>::kBytes
                                                     : 16;
  static constexpr int kBiasColumns = panel_columns(form_of(kBias));  // of a panel of bias or dbias
  static constexpr int kExchangeBytes = kSumsDbias ? kScoreBytes / kDsSlices : 16;
  static constexpr int kKeySums = kBias == BackwardBias::kVector || kSumsFlat ? 128 * kConsumers : 1;

  static constexpr int kThreads = 128 * (1 + kConsumers + kSumsDbias);
  // Three warpgroups share 504 registers per thread, four share 512, in steps of 8. The summing warpgroup delays every
  // stage of ds: at D64 it gets 40 registers so as not to spill. At D128 it has twice the time, and consumers need
  // theirs.
  static constexpr bool kSumsFast = kSumsDbias && kD <= 64 && kDv <= 64;
  static constexpr int kProducerRegisters = 24, kSumRegisters = kSumsFast ? 40 : 24;
  static constexpr int kConsumerRegisters = kSumsFast ? 224 : kSumsDbias ? 232 : 240;
  static constexpr int kRegisters =  // of all warpgroups
      kProducerRegisters + kConsumers * kConsumerRegisters + kSumsDbias * kSumRegisters;

  static constexpr int kDqColumns = dq_columns(kD, kBlockM, kTurnsDq);
  // A consumer has half of a third panel of dq. dk and dv leave few registers then: p is held in 16 bits before dp is
  // started, dq waits for dk, and the next scores wait for most of dq.
  static constexpr bool kHasThirdPanel = kD > 2 * kPanelColumns, kHoldsProbs = kHasThirdPanel;
  // Turned, dq leaves through shared memory, and one warp adds it to device memory: a consumer then need not hold its
  // registers until the additions are on their way.
  static constexpr int kDqBytes = 64 * kDqColumns * static_cast<int>(sizeof(float));  // of a consumer

  static_assert(!kTurnsDq || (!kHasMask && kKeyTiles == 1 && !kHasSequences), "where dq may be turned");
  static_assert(kTurnsDq || kDqColumns <= kAccumColumns, "at most an accumulator tile");
  static_assert(!kHasThirdPanel || (kD == 3 * kPanelColumns && kBlockM == 64 && kKeyTiles == 1 && !kHasBiasTiles &&
                                    !kHasSoftcap && !kHasDropout && kBias == BackwardBias::kNone),
                "where there are kernels of three panels");
  static_assert(!(kSumsDbias && kHasSoftcap), "ds has the slope of tanh, and dbias has not");
  static_assert(!kHasBiasWindow || (kKeyTiles == 1 && !kHasSoftcap), "where there are kernels with a window");
  static_assert(!kHasFloatTiles || (has_float_tile_kernels(kD, kDv) && !kHasSoftcap),
                "where there are kernels with tiles in fp32");
  static_assert(!kHasIntervals || takes_intervals(form_of(kBias)), "where there are kernels with intervals");
  static_assert(kKeyTiles == 1 || (!kSumsDbias && kBias != BackwardBias::kVector && !kHasMask && !kHasSoftcap),
                "where there are kernels of two key tiles");
  static_assert(!kHasSequences || (kKeyTiles == 1 && !kSumsDbias && !kHasMask && !kHasSoftcap &&
                                   takes_sequences(form_of(kBias))),
                "where there are kernels of sequences");
  static_assert(!kHasDropout || (kKeyTiles == 1 && !kSumsDbias && !kHasSequences && !kHasSoftcap &&
                                 takes_dropout(form_of(kBias))),
                "where there are kernels with dropout");
};

}  // namespace flash_dmattn
