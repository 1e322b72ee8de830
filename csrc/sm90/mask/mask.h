// The launches of the mask kernels. Both run on the current device and return the error of the launch.
#pragma once

#include <cuda_runtime_api.h>

#include "../../params.h"

namespace flash_dmattn {

// Keys of a strip: what a block of the packing kernel takes of each of its 128 rows.
constexpr int kStripKeys = 512;
// Lists that a block of the list kernel writes.
constexpr int kListsPerBlock = 4;

// wide: rows start and end on 16 bytes and keys have unit stride, so that 16 keys are one load.
cudaError_t launch_pack_mask(const PackMaskParams& params, unsigned blocks, bool wide, bool has_band,
                             cudaStream_t stream);
cudaError_t launch_list_tiles(const ListTilesParams& params, unsigned blocks, cudaStream_t stream);

}  // namespace flash_dmattn
