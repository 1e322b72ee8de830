// The launch of a persistent kernel.
#pragma once

#include <cuda_runtime_api.h>

namespace flash_dmattn {

// What the runtime asks of a launch in clusters.
struct ClusterLaunch {
  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config{};

  ClusterLaunch(int blocks, int cluster, int threads, int bytes, cudaStream_t stream) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;  // config points to the attribute
};

// Blocks of Traits::kThreads threads with a Storage each, in clusters of so many. Returns the error of the launch.
template <class Traits, class Storage, class Params>
cudaError_t launch_persistent(void (*kernel)(Params), const Params& params, int blocks, cudaStream_t stream,
                              int cluster = 1) {
  constexpr int kBytes = sizeof(Storage);
  static_assert(kBytes <= 227 * 1024, "shared memory of a block");
  // A block starts with as many registers for each thread as all its threads can have. What warpgroups release is all
  // that others can acquire: those that ask for more would wait for ever.
  constexpr int kWarpgroups = Traits::kThreads / 128, kRegisters = 65536 / Traits::kThreads / 8 * 8;
  static_assert(Traits::kRegisters <= kWarpgroups * kRegisters, "registers of a block");
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  if (cluster > 1) {
    ClusterLaunch launch(blocks, cluster, Traits::kThreads, kBytes, stream);
    return cudaLaunchKernelEx(&launch.config, kernel, params);
  }
  kernel<<<blocks, Traits::kThreads, kBytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace flash_dmattn
