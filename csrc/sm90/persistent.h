// The launch of a persistent kernel.
#pragma once

#include "kernel_launch.h"

namespace flash_dmattn {

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
  return KernelLaunch(blocks, Traits::kThreads, stream, kBytes, cluster).run(kernel, params);
}

}  // namespace flash_dmattn
