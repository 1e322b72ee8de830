// The launch of a persistent kernel.
#pragma once

#include <cuda_runtime_api.h>

namespace flash_dmattn {

// Blocks of Traits::kThreads threads with a Storage each. Returns the error of the launch.
template <class Traits, class Storage, class Params>
cudaError_t launch_persistent(void (*kernel)(Params), const Params& params, int blocks, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Storage);
  static_assert(kBytes <= 227 * 1024, "shared memory of a block");
  // A block starts with as many registers for each thread as all its threads can have. What warpgroups release is all
  // that others can acquire: those that ask for more would wait for ever.
  constexpr int kWarpgroups = Traits::kThreads / 128, kRegisters = 65536 / Traits::kThreads / 8 * 8;
  static_assert(Traits::kProducerRegisters + (kWarpgroups - 1) * Traits::kConsumerRegisters <= kWarpgroups * kRegisters,
                "registers of a block");
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, Traits::kThreads, kBytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace flash_dmattn
