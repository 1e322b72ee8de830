// The shapes of the forward kernel: every tile choice, with its reason.
#pragma once

#include "../../device/wgmma.h"
#include "../../params.h"
#include "launch.h"

namespace flash_dmattn {

template <class T, int kHeadDim, int kHeadDimV, Bias kBiasForm, bool kMaskTiles>
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
  static constexpr int kRegisters = kProducerRegisters + kConsumers * kConsumerRegisters;  // of all warpgroups
  // Of three consumers that read tiles of bias each passes its turn when it has added them, which spaces them out: when
  // it passed it with its products under way, their exponentials met. Bias D64 0.1926 ms for 0.1963, batch-shared 0.318
  // for 0.333. Without a bias it makes no difference, and two consumers lose 1 %.
  static constexpr bool kPassesTurnLate = kConsumers == 3 && kBias == Bias::kTile;
  // Whether registers are left to read the bias of a step while its scores are computed.
  static constexpr bool kLoadsBiasEarly = kSuppliesBias && kConsumers == 2 && kDv <= 128;

  // Whether pieces of work may come in parts: not where rows are wide or the bias is read value by value.
  static constexpr bool kSplits = kD <= 128 && kDv <= 128 && kBias != Bias::kStrided;
};

}  // namespace flash_dmattn
