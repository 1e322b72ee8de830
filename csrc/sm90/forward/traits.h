// Compile-time choices of the forward kernel, with their reasons.
// Measurements: docs/notes/cuda_tried.md, "Forward kernel".
#pragma once

#include "../../device/wgmma.h"
#include "launch.h"

namespace flash_dmattn {

template <class T, int kHeadDim, int kHeadDimV, Bias kBiasForm, MaskForm kMaskForm, int kNumConsumers,
          bool kOfSequences = false, bool kInPages = false, bool kDropout = false, bool kHeldBias = false,
          bool kMaxScores = false>
struct ForwardTraits {
  using Element = T;
  static constexpr int kD = kHeadDim, kDv = kHeadDimV;
  static constexpr Bias kBias = kBiasForm;
  static constexpr bool kHasMask = kMaskForm != MaskForm::kNone, kHasIntervals = kMaskForm == MaskForm::kIntervals;
  static constexpr bool kHasSequences = kOfSequences;
  // Keys in pages have kernels of their own, in which another warp loads them.
  static constexpr bool kHasPages = kInPages;
  static constexpr bool kHasDropout = kDropout;
  // Kernels that write the largest score of each row, too: others have no registers to spare for it.
  static constexpr bool kHasMaxScores = kMaxScores;

  // A consumer has the 64 rows of one wgmma. The more consumers there are, the better they hide each other's softmax,
  // and the more rows share a tile of k and v.
  static constexpr int kConsumers = kNumConsumers;
  static constexpr int kBlockM = 64 * kConsumers;
  // A mask whose tiles are no work tiles: it has one row for all queries.
  static constexpr bool kHasOneMaskRow = kHasMask && kBlockM != kTile;
  // At D32 a thread of four consumers has registers for the scores of 64 keys; with three, short rows leave fewer of 64
  // keys empty.
  static constexpr bool kIsNarrow = kConsumers > 2 && kD <= 32 && kDv <= 32;
  // Else 128 keys where two stages of k and v and two of bias fit beside q in 227 KB; at D192 a bias would spill registers.
  static constexpr bool kIsWide = kDv > 128 || kD > (kBias == Bias::kNone ? 192 : 128);
  static constexpr int kBlockN = kIsNarrow || kIsWide ? 64 : 128;
  // A block holds all tiles of bias that its rows need, for the batch entries that read them one after the other. Two
  // stages of k and v fit beside these tiles, and beside tiles of fp32.
  static constexpr bool kHoldsBias = kHeldBias, kHasFloatTiles = has_float_tiles(kBias);
  static constexpr int kStages = kIsNarrow && !kHoldsBias && !kHasFloatTiles ? 3 : 2;
  // Tiles of bias come from device memory, k and v mostly from L2: bias gets more stages where they fit.
  static constexpr bool kProducesBias = is_staged(kBias), kWarpWritesBias = is_written_by_warp(kBias);
  static constexpr bool kHasBiasTiles = has_tiles(kBias), kHasBiasWindow = has_window(kBias);
  static constexpr int kBiasStages = kHoldsBias             ? held_keys(kConsumers) / kBlockN
                                     : kHasFloatTiles       ? 2
                                     : kBias != Bias::kTile ? 4
                                                            : (kConsumers == 2 && kD <= 64 && kDv <= 64 ? 4 : 2);

  static constexpr int kPanels = (kD + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kPanelsV = (kDv + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kQueryBytes = kBlockM * kPanels * kRowBytes;
  static constexpr int kKeyBytes = kBlockN * kPanels * kRowBytes;
  static constexpr int kValueBytes = kBlockN * kPanelsV * kRowBytes;
  static constexpr int kBiasTileBytes = kBlockM * kBlockN * value_bytes(kBias), kBiasColumns = panel_columns(kBias);
  static constexpr int kBiasBytes = kHasBiasTiles       ? kBiasTileBytes
                                    : is_per_key(kBias) ? kBlockN * 4
                                    : kHasBiasWindow    ? WindowLayout<kBlockM, kBlockN>::kBytes
                                                        : 16;
  // q of the next work tile is loaded while consumers are at this one, where there is room for it.
  static constexpr int kQueryStages = (kD <= 64 && kDv <= 64) || (kD <= 128 && kDv <= 128 && kConsumers == 2 &&
                                                                  kBias != Bias::kTile)
                                          ? 2
                                          : 1;

  static constexpr int kThreads = 128 * (1 + kConsumers);
  // Three warpgroups share 504 registers per thread, four share 512, five 480, in steps of 8. With 24 the producer
  // spills.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : kConsumers == 3 ? 160 : 112;
  static constexpr int kRegisters = kProducerRegisters + kConsumers * kConsumerRegisters;  // of all warpgroups
  // With three consumers and tiles of bias, the ping-pong barrier is passed after the bias has been added. This
  // keeps the exponentials of two consumers apart.
  static constexpr bool kPingPongAfterBias = kConsumers == 3 && kHasBiasTiles;
  // Whether enough registers are left to load the bias of a step while its scores are computed.
  static constexpr bool kLoadsBiasEarly =
      kProducesBias && !kHasBiasWindow && !kHasFloatTiles && (kConsumers == 2 || kIsNarrow) && kDv <= 128;

  // Whether there is split-KV: not for wide rows, nor for a bias that is read value by value, nor of sequences.
  static constexpr bool kSplitKv = kD <= 128 && kDv <= 128 && kBias != Bias::kStrided && !kHasSequences && !kHoldsBias;
  // Whether rows may be heads of a group (ForwardParams::group_shift): in calls of few queries without more.
  static constexpr bool kHasGroups = !kHasMask && kBias == Bias::kNone && !kHasSequences && !kHasDropout;
  static_assert(!kHasIntervals || takes_intervals(kBias), "where there are kernels with intervals");
  static_assert(!kHasFloatTiles || (has_float_tile_kernels(kD, kDv) && (kConsumers == 2 || kIsNarrow)),
                "where there are kernels with tiles in fp32");
  static_assert(!kHasSequences || (!kHasMask && takes_sequences(kBias)), "where there are kernels of sequences");
  static_assert(!kHasDropout || (kBlockN % 16 == 0 && !kHasSequences && takes_dropout(kBias)),
                "where there are kernels with dropout");
  static_assert(!kHoldsBias || (kBias == Bias::kTile && kIsNarrow && !kHasMask && !kHasDropout && !kHasSequences),
                "where there are kernels that hold their bias");
  static_assert(!kHasPages || (kHasSequences && kBlockN == kTile), "boxes of pages make up a block of keys");
  static_assert(!kHasMaxScores || (has_max_scores_kernels(kBias, kMaskForm) && !kHasDropout && !kHasPages),
                "where there are kernels with the largest scores");
};

}  // namespace flash_dmattn
