// Persistent, warp-specialised kernels: barriers, the roles of warpgroups, and the launch.
#pragma once

#include <atomic>
#include <cstdint>

#include "../device/ptx.h"
#include "kernel_launch.h"

namespace flash_dmattn {

// Has a phase of each of these barriers complete after so many arrivals.
template <int kCount>
__device__ __forceinline__ void init_barriers(uint64_t (&barriers)[kCount], int arrivals) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) barrier_init(&barriers[i], arrivals);
}

// The base of a kernel's roles, with what most kernels do not need. A derived class names its Traits and its Storage,
// and has `init` for the barriers, `produce` for a warp of the producer, `consume` for a consumer, and `assist` for a
// warpgroup behind the consumers.
struct KernelRoles {
  // Whether blocks of a cluster write to each other's shared memory.
  static constexpr bool kSharesMemory = false;

  template <class Params>
  __device__ __forceinline__ static void let_next_start(const Params&) {}
};

// Runs a block, whose first warpgroup is the producer.
template <class Roles, class Params>
__device__ __forceinline__ void run_roles(const Params& p) {
  using Traits = typename Roles::Traits;
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<typename Roles::Storage*>(memory);
  if (threadIdx.x == 0) {
    Roles::init(p, shared);
    fence_barrier_init();
  }
  griddep_wait();
  Roles::let_next_start(p);
  if constexpr (Roles::kSharesMemory) {
    cluster_sync();
  } else {
    __syncthreads();
  }

  constexpr bool kHasAssistant = Traits::kThreads > 128 * (1 + Traits::kConsumers);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // uniform, and the compiler can tell
  if (warpgroup == 0) {
    setmaxnreg_dec<Traits::kProducerRegisters>();
    Roles::produce(p, shared, __shfl_sync(0xffffffffu, threadIdx.x / 32, 0));
  } else if (!kHasAssistant || warpgroup <= Traits::kConsumers) {
    setmaxnreg_inc<Traits::kConsumerRegisters>();
    Roles::consume(p, shared, warpgroup - 1);
  } else if constexpr (kHasAssistant) {
    Roles::assist(p, shared);
  }
  // No block may exit while another may still write to its shared memory.
  if constexpr (Roles::kSharesMemory) cluster_sync();
}

// Launches `blocks` blocks of Traits::kThreads threads, each with a Storage, in clusters of this size.
template <class Roles, class Params>
cudaError_t launch_persistent(void (*kernel)(Params), const Params& params, int blocks, cudaStream_t stream,
                              int cluster = 1) {
  using Traits = typename Roles::Traits;
  constexpr int kBytes = sizeof(typename Roles::Storage);
  static_assert(kBytes <= 227 * 1024, "shared memory of a block");
  // setmaxnreg moves registers between the warpgroups of a block, which starts with kRegisters for each thread. If
  // warpgroups ask for more than others release, the kernel hangs.
  constexpr int kWarpgroups = Traits::kThreads / 128, kRegisters = 65536 / Traits::kThreads / 8 * 8;
  static_assert(Traits::kRegisters <= kWarpgroups * kRegisters, "registers of a block");
  // A device keeps the attribute, and setting it takes the host a microsecond.
  static std::atomic<uint64_t> devices_with_it{0};
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if ((devices_with_it.load(std::memory_order_relaxed) & bit) == 0) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (error != cudaSuccess) return error;
    devices_with_it.fetch_or(bit, std::memory_order_relaxed);
  }
  return KernelLaunch(blocks, Traits::kThreads, stream, kBytes, cluster).run(kernel, params);
}

}  // namespace flash_dmattn
