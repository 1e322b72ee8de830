// The launch of the backward kernels, for those who do not compile them.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "../../params.h"

namespace flash_dmattn {

enum class BackwardBias {
  kNone,       // none, or one value per query, which moves lse alone
  kTile,       // one value per query and key, in the dtype of q, copied as tiles; its gradient is not stored
  kTileStore,  // the same, and its gradient, one for every query head, is stored as tiles in the dtype of q
  kTileSum,    // the same, and the gradients of all batch entries are summed, by the blocks of a cluster, and stored
  kVector      // one value per key, of any dtype and stride
};

// Of out and dout the kernel of the rows reads so many columns at most.
constexpr int kMaxRowColumns = 256;

// Sums that several blocks add to lie in pieces.
constexpr int kPieceRows = 64, kPieceColumns = 64, kPieceFloats = kPieceRows * kPieceColumns;

// Of an entry of an ordered list (OrderListsParams): every query of the tile may attend every key.
constexpr int32_t kFullTile = INT32_MIN;

// Rows of the tiles of q, dout, bias and dbias; and of k and v, those of a mask tile or half of them, or of two: such
// blocks there are where dbias is stored as tiles, without a mask or a softcap.
constexpr int backward_rows(int head_dim, int head_dim_v, int keys) {
  return head_dim <= 64 && head_dim_v <= 64 && keys <= kTile ? 128 : 64;
}
constexpr bool has_two_key_tiles(int head_dim, int head_dim_v) { return head_dim <= 64 && head_dim_v <= 64; }
constexpr int backward_keys(int head_dim, int head_dim_v) { return head_dim <= 128 && head_dim_v <= 128 ? kTile : 64; }

// Whether there are kernels of kTileStore. Where there are none, the kernel of a shared bias' gradient stores any.
constexpr bool backward_stores_dbias(int head_dim, int head_dim_v, bool has_softcap) {
  return !has_softcap || (head_dim <= 128 && head_dim_v <= 128);
}

// Whether there are kernels of kTileSum.
constexpr bool backward_sums_dbias(int head_dim, int head_dim_v, bool has_softcap) {
  return head_dim <= 128 && head_dim_v <= 128 && !has_softcap;
}

// Defined for the dtypes and head dims that the extension is built with. Each returns the error of its launch, which is
// on the current device. `rows` is before `main`, and `sums` after it where it has summed results. `keys` are those of a
// block. `launch_order_lists` is before it too, for a mask and tiles of keys that take turns; there is one for all
// units.
template <class T, int kHeadDim, int kHeadDimV>
cudaError_t launch_backward_main(const BackwardParams& params, BackwardBias bias, bool has_mask, int keys, int blocks,
                                 cudaStream_t stream);
template <class T>
cudaError_t launch_backward_rows(const BackwardRowsParams& params, cudaStream_t stream);
template <class T>
cudaError_t launch_backward_sums(const BackwardSumsParams& params, cudaStream_t stream);
cudaError_t launch_order_lists(const OrderListsParams& params, cudaStream_t stream);
// How many clusters of so many blocks of a main kernel the device, which is the current one, runs at the same time; 0
// where it has no room for one.
cudaError_t count_clusters(int device, int cluster, int& clusters);

}  // namespace flash_dmattn
