// The launch of a persistent kernel.
#pragma once

#include "kernel_launch.h"

namespace flash_dmattn {

// Launches `blocks` blocks of Traits::kThreads threads, each with a Storage, in clusters of this size.
template <class Traits, class Storage, class Params>
cudaError_t launch_persistent(void (*kernel)(Params), const Params& params, int blocks, cudaStream_t stream,
                              int cluster = 1) {
  constexpr int kBytes = sizeof(Storage);
  static_assert(kBytes <= 227 * 1024, "shared memory of a block");
  // setmaxnreg moves registers between the warpgroups of a block, which starts with kRegisters for each thread. If
  // warpgroups ask for more than others release, the kernel hangs.
  constexpr int kWarpgroups = Traits::kThreads / 128, kRegisters = 65536 / Traits::kThreads / 8 * 8;
  static_assert(Traits::kRegisters <= kWarpgroups * kRegisters, "registers of a block");
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  return KernelLaunch(blocks, Traits::kThreads, stream, kBytes, cluster).run(kernel, params);
}

}  // namespace flash_dmattn
