// The functions of CUDA and of torch's CUDA part that csrc calls, for the emulated GPU.
#include <cstdlib>
#include <cstring>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "machine.h"
#include "sm90/kernel_launch.h"

namespace flash_dmattn {
cudaError_t count_clusters(int device, int cluster, int& clusters);  // csrc/sm90/backward/clusters.cu
}

namespace {

CUresult encode(CUtensorMap* to, CUtensorMapDataType dtype, cuuint32_t rank, void* data, const cuuint64_t* sizes,
                const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps,
                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                CUtensorMapFloatOOBfill fill) {
  bool can = (rank == 4 || rank == 5) && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE && swizzle == CU_TENSOR_MAP_SWIZZLE_128B &&
             fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE && box[1] * box[2] <= 256;
  can &= dtype == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 || dtype == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 ||
         dtype == CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  can &= reinterpret_cast<uintptr_t>(data) % 16 == 0;
  emulation::TensorMap map{};
  map.value_bytes = dtype == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  can &= box[0] * map.value_bytes == 128;
  map.data = static_cast<uint8_t*>(data);
  map.is_one = emulation::TensorMap::kIsOne;
  map.rank = rank;
  for (cuuint32_t dim = 0; can && dim < rank; ++dim) {
    can &= dim < 3 || box[dim] == 1;
    can &= steps[dim] == 1 && sizes[dim] >= 1 && sizes[dim] <= cuuint64_t{1} << 32;
    map.sizes[dim] = sizes[dim];
    map.box[dim] = box[dim];
    if (dim == rank - 1) continue;
    can &= strides[dim] % 16 == 0 && strides[dim] < cuuint64_t{1} << 40;
    map.strides[dim] = strides[dim];
  }
  if (!can) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(to, &map, sizeof(map));
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

int aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}
int aoti_torch_create_device_guard(int32_t, void** guard) {
  *guard = nullptr;
  return 0;
}
int aoti_torch_delete_device_guard(void*) { return 0; }

cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) {
  *version = emulation::settings.driver;
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) { return "an error of the emulated GPU"; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute != cudaDevAttrMultiProcessorCount) return cudaErrorInvalidValue;
  *value = emulation::settings.num_sms;
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  ++emulation::launches;
  std::memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const bool known = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
  *entry = known ? reinterpret_cast<void*>(&encode) : nullptr;
  *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// For Python, by ctypes.
__attribute__((visibility("default"))) void emulation_configure(int num_sms, uint64_t seed) {
  emulation::settings = {num_sms, seed};
}

// How many kernels and memsets have been launched; with `leaves_out` no kernel runs from now on.
__attribute__((visibility("default"))) int emulation_launches(int leaves_out) {
  emulation::settings.leaves_out = leaves_out != 0;
  return emulation::launches;
}

// The number of blocks in a cluster of a launch by this driver; negative where the launch may start early.
__attribute__((visibility("default"))) int emulation_launch_of_driver(int driver, int cluster) {
  const auto before = emulation::settings;
  emulation::settings.driver = driver;
  const flash_dmattn::KernelLaunch made(cluster, 32, nullptr, 0, cluster);
  emulation::settings = before;
  const emulation::Launch launch = emulation_launch(made.config);
  return launch.starts_early ? -static_cast<int>(launch.cluster) : static_cast<int>(launch.cluster);
}

// The result of count_clusters for clusters of so many blocks; `runs`: how many run at the same time.
__attribute__((visibility("default"))) int emulation_count_clusters(int cluster, int* clusters) {
  return flash_dmattn::count_clusters(0, cluster, *clusters);
}

}  // extern "C"
