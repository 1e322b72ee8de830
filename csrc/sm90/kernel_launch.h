// The launch of every kernel, with programmatic dependent launch: its blocks start as soon as those of the kernel
// before are done, or leave room after griddep_launch_dependents. So every kernel begins with griddep_wait. Saves some
// microseconds per kernel (docs/notes/cuda_tried.md, "Backward kernel").
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "../device/ptx.h"

namespace flash_dmattn {

struct KernelLaunch {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};

  // `bytes`: dynamic shared memory.
  KernelLaunch(int64_t blocks, int threads, cudaStream_t stream, int bytes = 0, int cluster = 1) {
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = cluster > 1 ? 2 : 1;
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = cluster;
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  }
  KernelLaunch(const KernelLaunch&) = delete;  // config points to the attributes

  template <class... Parameters, class... Arguments>
  cudaError_t run(void (*kernel)(Parameters...), const Arguments&... arguments) const {
    return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
  }
};

}  // namespace flash_dmattn
