// Compile-time choices of the shared_dbias kernel, with their reasons.
#pragma once

#include "../../device/wgmma.h"
#include "launch.h"

namespace flash_dmattn {

template <class T, int kHeadDim, int kHeadDimV, bool kMaskTiles, bool kSoftcap, bool kOfSequences = false,
          bool kDropout = false, bool kDiagonals = false, Bias kBiasForm = Bias::kTile>
struct SharedDbiasTraits {
  using Element = T;
  static constexpr int kD = kHeadDim, kDv = kHeadDimV;
  static constexpr bool kHasMask = kMaskTiles, kHasSoftcap = kSoftcap, kHasSequences = kOfSequences;
  static constexpr bool kHasDropout = kDropout;
  // With a window ds is summed along diagonals, and a work tile is a diagonal.
  static constexpr bool kSumsDiagonals = kDiagonals;
  // Tiles of bias, and then dbias, may have fp32.
  static constexpr bool kHasFloatTiles = has_float_tiles(kBiasForm);
  static_assert(!(kHasSequences && (kHasMask || kHasSoftcap)), "where there are kernels of sequences");
  static_assert(!(kSumsDiagonals && (kHasSequences || kHasSoftcap || kHasDropout)), "where there are kernels of diagonals");
  static_assert(!kHasFloatTiles || (has_float_tile_kernels(kD, kDv) && !kHasSequences && !kHasSoftcap && !kHasDropout &&
                                    !kSumsDiagonals),
                "where there are kernels with tiles in fp32");

  // A consumer has 64 queries and the 128 keys of a mask tile: 64 registers each for sums, scores and dp.
  static constexpr int kConsumers = 2;

  static constexpr int kPanels = (kD + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kPanelsV = (kDv + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kPanelBytes = kTile * kRowBytes;
  // Panels of an operand that a product reads at a time. An operand of D256 takes two slots.
  static constexpr int kMostPanels = kPanels > kPanelsV ? kPanels : kPanelsV;
  static constexpr int kSlotPanels = kMostPanels < 2 ? kMostPanels : 2;
  static constexpr int kOperandBytes = kSlotPanels * kPanelBytes;
  static constexpr int kBiasColumns = panel_columns(kBiasForm), kBiasPanels = kTile / kBiasColumns;
  // Each warp has a window of its 16 queries and the tile's keys. In the end the warp's sums lie there.
  static constexpr int kBiasBytes =
      kSumsDiagonals ? 4 * kConsumers * WindowLayout<16, kTile>::kBytes : kBiasPanels * kPanelBytes;

  // As many slots as fit into 227 KB. A slot holds the operands of one product, or of 128 of its columns. From D128 on
  // a third slot is filled while the slots of scores and dp are read; at D64 a second tile of bias is loaded while the
  // first is in use, unless it is in fp32.
  static constexpr int kSlots = kOperandBytes > kPanelBytes ? 3 : 5;
  static constexpr int kBiasStages = kOperandBytes > kPanelBytes || kSumsDiagonals || kHasFloatTiles ? 1 : 2;

  static constexpr int kThreads = 128 * (1 + kConsumers);
  // Three warpgroups share 504 registers per thread, in steps of 8.
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static constexpr int kRegisters = kProducerRegisters + kConsumers * kConsumerRegisters;  // of all warpgroups
};

}  // namespace flash_dmattn
