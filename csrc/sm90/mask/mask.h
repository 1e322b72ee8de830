// Launches of the mask kernels, on the current device. They return the launch's error.
#pragma once

#include <cuda_runtime_api.h>

#include "params.h"

namespace flash_dmattn {

// Keys of a strip: a block of the packing kernel takes 128 rows of one strip.
constexpr int kStripKeys = 512;
// Lists per block of the list kernel.
constexpr int kListsPerBlock = 4;

// wide: rows start and end on 16 bytes and keys have unit stride, so 16 keys are one load.
cudaError_t launch_pack_mask(const PackMaskParams& params, unsigned blocks, bool wide, bool has_band,
                             cudaStream_t stream);
// Sets num_rows and num_lists.
cudaError_t launch_list_tiles(ListTilesParams params, cudaStream_t stream);
// Keys of a chunk in causal top-k, at most.
constexpr int kMostChunkKeys = 1024;
cudaError_t launch_topk(const TopkParams& params, cudaStream_t stream);
// Bits of the curve along which keys are ordered, along each axis.
constexpr int kCurveBits = 8;
cudaError_t launch_key_codes(const KeyCodesParams& params, cudaStream_t stream);
// Without scratch it only sets scratch_bytes.
cudaError_t sort_codes(SortCodesParams& params, cudaStream_t stream);
// heads: B * H of the mask.
cudaError_t launch_interval_tiles(const IntervalTilesParams& params, int64_t heads, cudaStream_t stream);
cudaError_t launch_interval_bits(const IntervalBitsParams& params, int64_t heads, cudaStream_t stream);
cudaError_t launch_gather_keys(const GatherKeysParams& params, cudaStream_t stream);
// A block has the bits of a whole row of the mask in shared memory, 20 bytes for each 128 keys: 40 KB.
constexpr int64_t kMostMaskKeys = 1 << 18;
// Each of them reads the whole row, so that more than a GPU runs at a time would only read.
constexpr int64_t kMostBlocksOfMask = 256;
// heads: B * H of the mask. Sets `blocks`.
cudaError_t launch_key_mask(KeyMaskParams params, int64_t heads, cudaStream_t stream);

}  // namespace flash_dmattn
