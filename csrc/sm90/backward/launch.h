// The backward kernels' interface for code that does not compile them.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "../bias_forms.h"
#include "instances.h"
#include "params.h"

namespace flash_dmattn {

// The widest rows of out and dout that the kernel of the rows can read.
constexpr int kMaxRowColumns = 256;

// Accumulator tiles (accumulators.h): so many rows, and at most so many columns.
constexpr int kAccumRows = 64, kAccumColumns = 64;
constexpr int accum_columns(int head_dim) { return head_dim < kAccumColumns ? head_dim : kAccumColumns; }
template <int kHeadDim>
constexpr int kAccumFloats = kAccumRows * accum_columns(kHeadDim);

// Marks an entry of an ordered list (OrderListsParams) as a full tile, which needs no masking.
constexpr int32_t kFullTile = INT32_MIN;

// Defined for the dtypes and head dims of the build. With an interval mask the bias is kNone or kVector. Each launches
// on the current device and returns the launch's error. Order: launch_order_lists if the order of additions is fixed
// and there is a mask, rows, main, and sums if anything was accumulated.
template <class T, int kHeadDim, int kHeadDimV>
cudaError_t launch_backward_main(const BackwardParams& params, BackwardBias bias, MaskForm mask, int block_n,
                                 bool turns_dq, int blocks, cudaStream_t stream);
// The main kernel of calls with sequences: work tiles of kTile keys; the bias is not kTileSum, and there is no mask, no
// softcap and no turned dq. Additions have an order in invariant calls alone.
template <class T, int kHeadDim, int kHeadDimV>
cudaError_t launch_backward_sequences(const BackwardParams& params, BackwardBias bias, MaskForm mask, int block_n,
                                      bool turns_dq, int blocks, cudaStream_t stream);
template <class T>
cudaError_t launch_backward_rows(const BackwardRowsParams& params, cudaStream_t stream);
template <class T>
cudaError_t launch_backward_sums(const BackwardSumsParams& params, cudaStream_t stream);
cudaError_t launch_order_lists(const OrderListsParams& params, cudaStream_t stream);
// Before the main kernel: dbias has zeros where no row of the band has a score, and the main kernel stores the rest.
cudaError_t launch_clear_dbias(ClearDbiasParams params, cudaStream_t stream);
// The largest cluster that every GPU with clusters has.
constexpr int kMaxCluster = 8;

// How many clusters of `cluster` blocks of a main kernel run at the same time on `device`, which is the current one; 0
// if it has no room for one. cudaErrorInvalidValue unless `cluster` is 1 to kMaxCluster.
cudaError_t count_clusters(int device, int cluster, int& clusters);

}  // namespace flash_dmattn
