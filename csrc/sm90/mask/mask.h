// Launches of the mask kernels, on the current device. Both return the launch's error.
#pragma once

#include <cuda_runtime_api.h>

#include "../../params.h"

namespace flash_dmattn {

// Keys of a strip: a block of the packing kernel takes 128 rows of one strip.
constexpr int kStripKeys = 512;
// Lists per block of the list kernel.
constexpr int kListsPerBlock = 4;

// wide: rows start and end on 16 bytes and keys have unit stride, so 16 keys are one load.
cudaError_t launch_pack_mask(const PackMaskParams& params, unsigned blocks, bool wide, bool has_band,
                             cudaStream_t stream);
cudaError_t launch_list_tiles(const ListTilesParams& params, unsigned blocks, cudaStream_t stream);

}  // namespace flash_dmattn
