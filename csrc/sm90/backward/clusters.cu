// How many clusters of the backward kernels run at the same time.
#include <array>
#include <atomic>

#include "../kernel_launch.h"
#include "launch.h"

namespace flash_dmattn {
namespace {

// Stands in for them: like theirs, one of its blocks fills an SM.
__global__ void fill_multiprocessor() {}

constexpr int kBytes = 227 * 1024, kThreads = 512;

}  // namespace

cudaError_t count_clusters(int device, int cluster, int& clusters) {
  if (cluster < 1 || cluster > kMaxCluster) return cudaErrorInvalidValue;
  // Asked once. Two threads that ask at the same time write the same value.
  static std::array<std::array<std::atomic<int>, kMaxCluster + 1>, 64> known{};  // the count plus 1; 0 for unknown
  std::atomic<int>& count = known[static_cast<size_t>(device) % known.size()][static_cast<size_t>(cluster)];
  if (count == 0) {
    cudaError_t error = cudaFuncSetAttribute(fill_multiprocessor, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (error != cudaSuccess) return error;
    const KernelLaunch launch(cluster, kThreads, nullptr, kBytes, cluster);
    error = cudaOccupancyMaxActiveClusters(&clusters, fill_multiprocessor, &launch.config);
    if (error != cudaSuccess) return error;
    count = clusters + 1;
  }
  clusters = count - 1;
  return cudaSuccess;
}

}  // namespace flash_dmattn
