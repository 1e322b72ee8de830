// Compile-time choices of the shared_dbias kernel, with their reasons.
#pragma once

#include "../../device/wgmma.h"
#include "launch.h"

namespace flash_dmattn {

template <class T, int kHeadDim, int kHeadDimV, bool kMaskTiles, bool kSoftcap, bool kOfSequences = false,
          bool kDropout = false, bool kByDistance = false>
struct SharedDbiasTraits {
  using Element = T;
  static constexpr int kD = kHeadDim, kDv = kHeadDimV;
  static constexpr bool kHasMask = kMaskTiles, kHasSoftcap = kSoftcap, kHasSequences = kOfSequences;
  static constexpr bool kHasDropout = kDropout, kIsRelative = kByDistance;
  static_assert(!(kHasSequences && (kHasMask || kHasSoftcap)), "where there are kernels of sequences");
  static_assert(!(kIsRelative && (kHasSequences || kHasSoftcap || kHasDropout)), "where there are kernels by distance");

  // A consumer has 64 queries and the 128 keys of a mask tile: 64 registers each for sums, scores and dp.
  static constexpr int kConsumers = 2;

  static constexpr int kPanels = (kD + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kPanelsV = (kDv + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kPanelBytes = kTile * kRowBytes;
  // Panels of an operand that a product reads at a time. An operand of D256 takes two slots.
  static constexpr int kMostPanels = kPanels > kPanelsV ? kPanels : kPanelsV;
  static constexpr int kSlotPanels = kMostPanels < 2 ? kMostPanels : 2;
  static constexpr int kOperandBytes = kSlotPanels * kPanelBytes;
  static constexpr int kBiasPanels = kTile / kPanelColumns;
  // By distance each warp has the values of its 16 queries and the tile's keys, twice (write_distances). The copies lie in
  // different banks. In the end the warp's sums lie there.
  static constexpr int kDistances = 16 + kTile - 1, kSecondCopy = kTile + 48, kWindow = 2 * kSecondCopy;
  static_assert(kSecondCopy >= kDistances && kSecondCopy % 32 == 16);
  static constexpr int kBiasBytes = kIsRelative ? 4 * kConsumers * kWindow * 4 : kBiasPanels * kPanelBytes;

  // As many slots as fit into 227 KB. A slot holds the operands of one product, or of 128 of its columns. From D128 on
  // a third slot is filled while the slots of scores and dp are read; at D64 a second tile of bias is loaded while the
  // first is in use.
  static constexpr int kSlots = kOperandBytes > kPanelBytes ? 3 : 5;
  static constexpr int kBiasStages = kOperandBytes > kPanelBytes || kIsRelative ? 1 : 2;

  static constexpr int kThreads = 128 * (1 + kConsumers);
  // Three warpgroups share 504 registers per thread, in steps of 8.
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static constexpr int kRegisters = kProducerRegisters + kConsumers * kConsumerRegisters;  // of all warpgroups
};

}  // namespace flash_dmattn
