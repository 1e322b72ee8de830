// Shared by the operators: errors with the name of the operator, arithmetic of grids, and torch's stream.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
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

// The number of SMs. Asked once: the query takes as long as encoding a TMA descriptor. Two threads that ask at the same
// time write the same value.
inline int sm_count(const char* op, int device) {
  static std::array<std::atomic<int>, 64> known{};
  std::atomic<int>& count = known[static_cast<size_t>(device) % known.size()];
  if (count == 0) {
    int number = 0;
    check(cudaDeviceGetAttribute(&number, cudaDevAttrMultiProcessorCount, device), op, "asking for multiprocessors");
    count = number;
  }
  return count;
}

// The size that a dim of an argument may have.
struct DimSize {
  enum Rule { kThis, kOneOrThis, kDivisor } rule;
  int64_t size;

  DimSize(int64_t size, Rule rule = kThis) : rule(rule), size(size) {}
  bool holds(int64_t actual) const {
    const bool divides = actual > 0 && size % actual == 0;
    return actual == size || (rule == kOneOrThis && actual == 1) || (rule == kDivisor && divides);
  }
  std::string text() const {
    return (rule == kOneOrThis && size != 1 ? "1 or " : rule == kDivisor ? "a divisor of " : "") + std::to_string(size);
  }
};
inline DimSize one_or(int64_t size) { return {size, DimSize::kOneOrThis}; }
inline DimSize divisor_of(int64_t size) { return {size, DimSize::kDivisor}; }

// Checks the dims of an argument, and that it is where the first argument is.
inline void check_dims(const char* op, const torch::stable::Tensor& x, const char* name,
                       std::initializer_list<DimSize> dims, const torch::stable::Tensor& first) {
  bool holds = x.dim() == static_cast<int64_t>(dims.size());
  int64_t dim = 0;
  for (auto it = dims.begin(); holds && it != dims.end(); ++it) holds = it->holds(x.size(dim++));
  if (!holds) {
    std::string actual, wanted;
    for (dim = 0; dim < x.dim(); ++dim) actual += (dim > 0 ? ", " : "") + std::to_string(x.size(dim));
    for (const DimSize& size : dims) wanted += (wanted.empty() ? "" : ", ") + size.text();
    CHECK_FOR(op, false, name, " is (", actual, "); it needs to be (", wanted, ")");
  }
  CHECK_FOR(op, x.get_device_index() == first.get_device_index(), name, " is on another device than the first argument");
}

inline void check_dtype(const char* op, const torch::stable::Tensor& x, const char* name,
                        torch::headeronly::ScalarType dtype) {
  using torch::headeronly::ScalarType;
  const char* const wanted = dtype == ScalarType::Int     ? "to be int32"
                             : dtype == ScalarType::Long  ? "to be int64"
                             : dtype == ScalarType::Float ? "to be float32"
                                                          : "the dtype of q";
  CHECK_FOR(op, x.scalar_type() == dtype, name, " needs ", wanted);
}

// Checks what kernels read or write as one array: dims, dtype, and that it is contiguous.
inline void check_array(const char* op, const torch::stable::Tensor& x, const char* name,
                        std::initializer_list<DimSize> dims, torch::headeronly::ScalarType dtype,
                        const torch::stable::Tensor& first) {
  check_dims(op, x, name, dims, first);
  check_dtype(op, x, name, dtype);
  CHECK_FOR(op, x.is_contiguous(), name, " needs to be contiguous");
}

// The shape of a tensor that an operator allocates, contiguous.
struct Shape {
  std::array<int64_t, 4> sizes{};
  int64_t dims = 0;

  Shape(std::initializer_list<int64_t> shape) : dims(static_cast<int64_t>(shape.size())) {
    STD_TORCH_CHECK(shape.size() <= sizes.size(), "an operator allocates ", shape.size(), " dims");
    std::copy(shape.begin(), shape.end(), sizes.begin());
  }
  std::array<int64_t, 4> strides() const {
    std::array<int64_t, 4> steps{};
    int64_t step = 1;
    for (int64_t dim = dims; dim-- > 0; step *= std::max<int64_t>(sizes[dim], 1)) steps[dim] = step;
    return steps;
  }
  int64_t numel() const {
    int64_t number = 1;
    for (int64_t dim = 0; dim < dims; ++dim) number *= sizes[dim];
    return number;
  }
};

// Memory that is not initialised, on the device of `like`. Not by new_empty, which takes the host twice as long.
inline torch::stable::Tensor empty(const torch::stable::Tensor& like, const Shape& shape,
                                   torch::headeronly::ScalarType dtype) {
  int32_t device = 0;
  STD_TORCH_CHECK(aoti_torch_get_device_type(like.get(), &device) == AOTI_TORCH_SUCCESS, "a tensor has no device");
  AtenTensorHandle made = nullptr;
  const auto code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  STD_TORCH_CHECK(aoti_torch_empty_strided(shape.dims, shape.sizes.data(), shape.strides().data(), code, device,
                                           like.get_device_index(), &made) == AOTI_TORCH_SUCCESS,
                  "memory cannot be allocated");
  return torch::stable::Tensor(made);
}

// The same for several tensors in one allocation, each from a multiple of 128 bytes on. It ends with the last of them.
template <size_t kNumber>
std::vector<torch::stable::Tensor> empty_together(const torch::stable::Tensor& like, const std::array<Shape, kNumber>& shapes,
                                                  torch::headeronly::ScalarType dtype) {
  constexpr int64_t kStep = 128;  // elements, of a byte or more
  int64_t total = 0;
  for (const Shape& shape : shapes) total += ceil_div(shape.numel(), kStep) * kStep;
  const torch::stable::Tensor whole = empty(like, {total}, dtype);
  std::vector<torch::stable::Tensor> parts;
  parts.reserve(kNumber);
  int64_t first = 0;
  for (const Shape& shape : shapes) {
    AtenTensorHandle part = nullptr;
    STD_TORCH_CHECK(aoti_torch__reinterpret_tensor(whole.get(), shape.dims, shape.sizes.data(), shape.strides().data(),
                                                   first, &part) == AOTI_TORCH_SUCCESS,
                    "a part of a tensor cannot be made");
    parts.emplace_back(part);
    first += ceil_div(shape.numel(), kStep) * kStep;
  }
  return parts;
}

// The device of a tensor as the current one, while this lives, and torch's stream there. A thread of autograd that has
// not called CUDA yet has no context; this gives it one.
struct CurrentDevice {
  int32_t index;
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream;

  CurrentDevice(const char* op, const torch::stable::Tensor& x)
      : index(x.get_device_index()), guard(index), stream(current_stream(index)) {
    check(cudaSetDevice(index), op, "setting the device");  // in the static runtime; the guard sets it in torch
  }
};

}  // namespace flash_dmattn
