// The launch of every kernel, with programmatic dependent launch: its blocks start as soon as the blocks of the kernel
// before are done, or leave room after griddep_launch_dependents. So every kernel begins with griddep_wait. Saves some
// microseconds per kernel (docs/notes/cuda_tried.md, "Backward kernel").
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "../device/ptx.h"

namespace flash_dmattn {

// Whether the driver is of CUDA 12.3 or later: older ones cannot capture such launches in graphs. Without the attribute
// a kernel starts when the one before has ended, and griddepcontrol does nothing.
inline bool can_start_early() {
  static const bool known = [] {
    int driver = 0;
    return cudaDriverGetVersion(&driver) == cudaSuccess && driver >= 12030;
  }();
  return known;
}

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
    if (can_start_early()) {
      cudaLaunchAttribute& early = attributes[config.numAttrs++];
      early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      early.val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
      cudaLaunchAttribute& size = attributes[config.numAttrs++];
      size.id = cudaLaunchAttributeClusterDimension;
      size.val.clusterDim.x = cluster;
      size.val.clusterDim.y = size.val.clusterDim.z = 1;
    }
  }
  KernelLaunch(const KernelLaunch&) = delete;  // config points to the attributes

  template <class... Parameters, class... Arguments>
  cudaError_t run(void (*kernel)(Parameters...), const Arguments&... arguments) const {
    return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
  }
};

}  // namespace flash_dmattn
