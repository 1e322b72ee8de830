// The forms of a bias: what a kernel reads for a tile of scores, and what it makes of the gradient. Kernels and the code
// that launches them ask for these facts and name no form. A new form is an enumerator, its facts, and an entry in the
// lists of dispatch.h and backward/dispatch.h. bias_window.h and float_tile.h have the code of operands. Includes no CUDA,
// no torch.
#pragma once

namespace flash_dmattn {

// How a bias is read.
enum class Bias {
  kNone,       // no bias, or one value per query, which changes lse only
  kTile,       // one value per query and key, in the dtype of q, loaded as tiles by TMA
  kFloatTile,  // the same in fp32
  kVector,     // one value per key, of any dtype and stride
  kStrided,    // one value per query and key, any dtype and strides: slower, but needs no copy
  kRelative    // one value per distance of key and query, of any dtype and stride
};

// How the backward pass reads it, and what its main kernel does with the gradient.
enum class BackwardBias {
  kNone,
  kTile,            // dbias is not stored
  kTileStore,       // dbias, one per query head, is stored as tiles in the dtype of q
  kTileSum,         // dbias is summed over the batch by the blocks of a cluster, and stored
  kFloatTile,       // dbias is not stored
  kFloatTileStore,  // dbias, one per query head, is stored as tiles in fp32
  kVector,          // ds is summed for each key
  kRelative,        // no gradient is stored
  kRelativeSum,     // ds of flat tiles is summed, for the gradients of the first and the last value
};

constexpr Bias form_of(BackwardBias bias) {
  switch (bias) {
    case BackwardBias::kTile:
    case BackwardBias::kTileStore:
    case BackwardBias::kTileSum:
      return Bias::kTile;
    case BackwardBias::kFloatTile:
    case BackwardBias::kFloatTileStore:
      return Bias::kFloatTile;
    case BackwardBias::kVector:
      return Bias::kVector;
    case BackwardBias::kRelative:
    case BackwardBias::kRelativeSum:
      return Bias::kRelative;
    case BackwardBias::kNone:
      break;
  }
  return Bias::kNone;
}

// --- the operand of a tile of scores ------------------------------------------------------------------------------

// A tile in shared memory: a value for each score, in 16 bits or in fp32, in panels whose rows have 128 bytes.
constexpr bool has_float_tiles(Bias bias) { return bias == Bias::kFloatTile; }
constexpr bool has_tiles(Bias bias) { return bias == Bias::kTile || has_float_tiles(bias); }
constexpr int value_bytes(Bias bias) { return has_float_tiles(bias) ? 4 : 2; }
constexpr int panel_columns(Bias bias) { return 128 / value_bytes(bias); }
// A value for each key, in fp32: in shared memory, or in the registers of a consumer that has keys as rows.
constexpr bool is_per_key(Bias bias) { return bias == Bias::kVector; }
// A window in shared memory: a value for each difference of key and query, in fp32. The tile is flat if all are equal.
constexpr bool has_window(Bias bias) { return bias == Bias::kRelative; }
// A value for each score, which the thread that has the score loads from device memory.
constexpr bool is_read_by_threads(Bias bias) { return bias == Bias::kStrided; }

// The layout of a window. The values lie there twice (bias_window.h), and the copies in different halves of the banks.
template <int kQueries, int kKeys>
struct WindowLayout {
  static constexpr int kValues = kQueries + kKeys - 1;
  static constexpr int kSecondCopy = (kQueries + kKeys + 31) / 32 * 32 + 16;
  static constexpr int kFloats = 2 * kSecondCopy, kBytes = kFloats * 4;
};

// In the forward pass a warp of the producer fills stages of shared memory with an operand: it starts copies of tiles by
// TMA, and writes all others.
constexpr bool is_staged(Bias bias) { return has_tiles(bias) || is_per_key(bias) || has_window(bias); }
constexpr bool is_written_by_warp(Bias bias) { return is_per_key(bias) || has_window(bias); }

// --- gradients ----------------------------------------------------------------------------------------------------

// The main kernel stores dbias, as tiles of the dtype of the bias.
constexpr bool stores_tiles(BackwardBias bias) {
  return bias == BackwardBias::kTileStore || bias == BackwardBias::kFloatTileStore;
}
// The main kernel sums ds of flat tiles; of the others the shared_dbias kernel sums it, along diagonals.
constexpr bool sums_flat_tiles(BackwardBias bias) { return bias == BackwardBias::kRelativeSum; }

// --- which kernels there are --------------------------------------------------------------------------------------

// Whether there are kernels with a window. In the backward pass they have no softcap.
constexpr bool has_window_kernels(int head_dim, int head_dim_v) {
  return head_dim == head_dim_v && (head_dim == 64 || head_dim == 128);
}
// Whether there are kernels with tiles in fp32: at the head dims of the models that have such a bias. Its tiles would not
// fit beside wider rows of q, k and v. Backward kernels have no softcap then.
constexpr bool has_float_tile_kernels(int head_dim, int head_dim_v) { return head_dim <= 64 && head_dim_v <= 64; }
// Whether there are kernels with an interval mask, too.
constexpr bool takes_intervals(Bias bias) { return bias == Bias::kNone || bias == Bias::kVector; }
// The same for dropout, and for calls with sequences.
constexpr bool takes_dropout(Bias bias) {
  return !is_read_by_threads(bias) && !has_window(bias) && !has_float_tiles(bias);
}
constexpr bool takes_sequences(Bias bias) { return takes_dropout(bias); }

}  // namespace flash_dmattn
