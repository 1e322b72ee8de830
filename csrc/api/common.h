// What the operators share: errors with the name of the operator, arithmetic of grids, and torch's stream.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "integers.h"

// In every libtorch_cuda; torch's header declares it under USE_CUDA only, which would need more CUDA headers.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

// In a function that several operators call, which one of them did.
#define CHECK_FOR(op, condition, ...) STD_TORCH_CHECK(condition, op, ": ", __VA_ARGS__)
// In a function of an operator, whose file has its name as kName.
#define CHECK_ARGUMENT(condition, ...) CHECK_FOR(kName, condition, __VA_ARGS__)

namespace flash_dmattn {

inline void check(cudaError_t error, const char* name, const char* what) {
  STD_TORCH_CHECK(error == cudaSuccess, name, ": ", what, ": ", cudaGetErrorString(error));
}

inline cudaStream_t current_stream(int32_t device) {
  void* current = nullptr;
  // Not by a macro of torch: 2.10 and 2.13 have different ones for this.
  const AOTITorchError error = aoti_torch_get_current_cuda_stream(device, &current);
  STD_TORCH_CHECK(error == AOTI_TORCH_SUCCESS, "torch does not give its current stream of CUDA device ", device);
  return static_cast<cudaStream_t>(current);
}

// The device of a tensor as the current one, while this lives, and torch's stream there. A thread of autograd that has
// not called CUDA yet has no context; this gives it one.
struct CurrentDevice {
  int32_t index;
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream;

  CurrentDevice(const char* op, const torch::stable::Tensor& x)
      : index(x.get_device_index()), guard(index), stream(current_stream(index)) {
    check(cudaSetDevice(index), op, "setting the device");  // of the static runtime; the guard sets that of torch
  }
};

}  // namespace flash_dmattn
