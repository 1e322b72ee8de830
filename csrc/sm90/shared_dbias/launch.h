// The shared_dbias kernel's interface for code that does not compile it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "../bias_forms.h"
#include "params.h"

namespace flash_dmattn {

// Defined for the dtypes and head dims of the backward kernels. Launches on the current device and returns the launch's
// error; launch_backward_rows must have written lse and delta before.
template <class T, int kHeadDim, int kHeadDimV>
cudaError_t launch_shared_dbias(const SharedDbiasParams& params, bool has_mask, int blocks, cudaStream_t stream);
// The same of calls with sequences, without mask and softcap.
template <class T, int kHeadDim, int kHeadDimV>
cudaError_t launch_shared_dbias_sequences(const SharedDbiasParams& params, bool has_mask, int blocks,
                                          cudaStream_t stream);
// Writes dbias if the kernel before has left it in slots. Defined for both dtypes and for fp32.
template <class T>
cudaError_t launch_add_chunks(const AddChunksParams& params, cudaStream_t stream);
// Writes the gradient of a bias by distance. The kernel above has left sums in slots, and the main kernel has summed flat
// tiles.
cudaError_t launch_add_diagonals(const AddDiagonalsParams& params, cudaStream_t stream);

}  // namespace flash_dmattn
