// The backward kernels' interface for code that does not compile them.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "../../params.h"

namespace flash_dmattn {

enum class BackwardBias {
  kNone,       // no bias, or one value per query, which changes lse only
  kTile,       // one value per query and key, in the dtype of q, loaded by TMA; dbias is not stored
  kTileStore,  // the same; dbias, one per query head, is stored as tiles in the dtype of q
  kTileSum,    // the same; dbias is summed over the batch by the blocks of a cluster, and stored
  kVector      // one value per key, of any dtype and stride
};

// The widest rows of out and dout that the kernel of the rows can read.
constexpr int kMaxRowColumns = 256;

// Accumulator tiles (accumulators.h).
constexpr int kAccumRows = 64, kAccumColumns = 64, kAccumFloats = kAccumRows * kAccumColumns;

// Marks an entry of an ordered list (OrderListsParams) as a full tile, which needs no masking.
constexpr int32_t kFullTile = INT32_MIN;

// block_m: queries of a step. block_n: keys of a work tile, a mask tile or half of one. Where dbias is stored as tiles,
// without mask and softcap, there are also kernels with block_n of two mask tiles.
constexpr int backward_block_m(int head_dim, int head_dim_v, int keys) {
  return head_dim <= 64 && head_dim_v <= 64 && keys <= kTile ? 128 : 64;
}
constexpr bool has_two_key_tiles(int head_dim, int head_dim_v) { return head_dim <= 64 && head_dim_v <= 64; }
constexpr int backward_block_n(int head_dim, int head_dim_v) {
  return head_dim <= 128 && head_dim_v <= 128 ? kTile : 64;
}

// Whether there are kTileStore kernels. Where there are none the shared_dbias kernel stores every dbias.
constexpr bool backward_stores_dbias(int head_dim, int head_dim_v, bool has_softcap) {
  return !has_softcap || (head_dim <= 128 && head_dim_v <= 128);
}

// Whether there are kTileSum kernels.
constexpr bool backward_sums_dbias(int head_dim, int head_dim_v, bool has_softcap) {
  return head_dim <= 128 && head_dim_v <= 128 && !has_softcap;
}

// Defined for the dtypes and head dims of the build. Each launches on the current device and returns the launch's
// error. Order: launch_order_lists if the order of additions is fixed and there is a mask, rows, main, and sums if
// anything was accumulated.
template <class T, int kHeadDim, int kHeadDimV>
cudaError_t launch_backward_main(const BackwardParams& params, BackwardBias bias, bool has_mask, int block_n,
                                 int blocks, cudaStream_t stream);
template <class T>
cudaError_t launch_backward_rows(const BackwardRowsParams& params, cudaStream_t stream);
template <class T>
cudaError_t launch_backward_sums(const BackwardSumsParams& params, cudaStream_t stream);
cudaError_t launch_order_lists(const OrderListsParams& params, cudaStream_t stream);
// The largest cluster that every GPU with clusters has.
constexpr int kMaxCluster = 8;

// How many clusters of `cluster` blocks of a main kernel run at the same time on `device`, which is the current one; 0
// if it has no room for one. cudaErrorInvalidValue unless `cluster` is 1 to kMaxCluster.
cudaError_t count_clusters(int device, int cluster, int& clusters);

}  // namespace flash_dmattn
