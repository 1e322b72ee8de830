// The shapes of the forward kernel: every tile choice, with its reason.
#pragma once

#include "../../device/wgmma.h"
#include "../../params.h"
#include "launch.h"

namespace flash_dmattn {

template <class T, int kHeadDim, int kHeadDimV, Bias kBiasForm, bool kMaskTiles, bool kHasParts = false>
struct ForwardTraits {
  using Element = T;
  static constexpr int kD = kHeadDim, kDv = kHeadDimV;
  static constexpr Bias kBias = kBiasForm;
  static constexpr bool kHasMask = kMaskTiles;

  // Rows of a warpgroup are those of one matrix instruction. Where registers allow a third consumer, a tile of k and v
  // serves 192 rows, and a third warpgroup hides the softmax of two: 517 TFLOP/s at D64 instead of 430, and 0.23 ms
  // with a bias instead of 0.25. Tiles of a mask are 128 rows.
  static constexpr int kConsumers = kD <= 64 && kDv <= 64 && !kHasMask && kBias != Bias::kStrided ? 3 : 2;
  static constexpr int kRows = 64 * kConsumers;
  // 128 keys where two stages of k and v and two of bias fit beside q in 227 KB.
  static constexpr int kKeys = kD <= 128 && kDv <= 128 ? 128 : 64;
  static constexpr int kStages = 2;
  // Tiles of bias come from device memory, k and v mostly from L2: bias needs more on its way, where it fits.
  static constexpr bool kSuppliesBias = kBias == Bias::kTile || kBias == Bias::kVector;
  static constexpr int kBiasStages = kBias == Bias::kTile ? (kConsumers == 2 && kD <= 64 && kDv <= 64 ? 4 : 2) : 4;

  static constexpr int kPanels = (kD + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kPanelsV = (kDv + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kQueryBytes = kRows * kPanels * kRowBytes;
  static constexpr int kKeyBytes = kKeys * kPanels * kRowBytes;
  static constexpr int kValueBytes = kKeys * kPanelsV * kRowBytes;
  static constexpr int kBiasTileBytes = kRows * kKeys * 2;
  static constexpr int kBiasBytes = kBias == Bias::kTile ? kBiasTileBytes : kBias == Bias::kVector ? kKeys * 4 : 16;
  // Beside tiles of bias, behind which q would wait in the copy engine, that of the next piece is there before this one
  // is done: 0.200 ms for 0.204. Without them it gains nothing, and D128 loses 1 %.
  static constexpr int kQueryStages = kBias == Bias::kTile && kD <= 64 && kDv <= 64 ? 2 : 1;

  static constexpr int kThreads = 128 * (1 + kConsumers);
  // Of 504 registers (512 for four) a thread of each warpgroup can be given together, in steps of 8. With 24 for the
  // producer it spills.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 232;
  // Skipping the correction of out saves more than finding out whether it can be skipped where out is wide: 688 TFLOP/s
  // at D128 instead of 657, but 499 at D64 instead of 517.
  static constexpr bool kSkipsCorrection = kDv > 64;
  // Whether registers are left to read the bias of a step while its scores are computed.
  static constexpr bool kLoadsBiasEarly = kSuppliesBias && kConsumers == 2 && kDv <= 128;

  // Whether pieces of work may come in parts, which kernels of their own take: those of whole pieces have nothing to
  // join. Where rows are wide or the bias is read value by value there are none, which keeps the file small.
  static constexpr bool kSplits = kHasParts;
  static constexpr bool kCanSplit = kD <= 128 && kDv <= 128 && kBias != Bias::kStrided;
  static_assert(kCanSplit || !kSplits, "no kernel of parts is built for these");
};

}  // namespace flash_dmattn
