// The shapes of the kernel of a shared bias' gradient: every tile choice, with its reason.
#pragma once

#include "../../device/wgmma.h"
#include "../../params.h"
#include "launch.h"

namespace flash_dmattn {

template <class T, int kHeadDim, int kHeadDimV, bool kMaskTiles, bool kSoftcap>
struct SharedDbiasTraits {
  using Element = T;
  static constexpr int kD = kHeadDim, kDv = kHeadDimV;
  static constexpr bool kHasMask = kMaskTiles, kHasSoftcap = kSoftcap;

  // A consumer has 64 queries and the 128 keys of a mask tile: 64 registers of sums, and as many of scores and of dp.
  static constexpr int kConsumers = 2;

  static constexpr int kPanels = (kD + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kPanelsV = (kDv + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kPanelBytes = kTile * kRowBytes;
  // Panels of an operand that a product reads at a time: those of D256 are as many bytes as two products of D128 have.
  static constexpr int kMostPanels = kPanels > kPanelsV ? kPanels : kPanelsV;
  static constexpr int kSlotPanels = kMostPanels < 2 ? kMostPanels : 2;
  static constexpr int kOperandBytes = kSlotPanels * kPanelBytes;
  static constexpr int kBiasPanels = kTile / kPanelColumns;
  static constexpr int kBiasBytes = kBiasPanels * kPanelBytes;

  // What 227 KB hold. A slot has the operands of one product, or of up to 128 of its columns: from D128 on a third one
  // is filled while those of scores and of dp are read. At D64 a second tile of bias comes while the last heads of the
  // first are at work.
  static constexpr int kSlots = kOperandBytes > kPanelBytes ? 3 : 5;
  static constexpr int kBiasStages = kOperandBytes > kPanelBytes ? 1 : 2;

  static constexpr int kThreads = 128 * (1 + kConsumers);
  // Of 504 registers a thread of each warpgroup can be given together, in steps of 8.
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static constexpr int kRegisters = kProducerRegisters + kConsumers * kConsumerRegisters;  // of all warpgroups
};

}  // namespace flash_dmattn
