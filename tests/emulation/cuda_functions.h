// Names that nvcc knows by itself, for a C++ compiler: the words of the language, the indices of a thread, the
// functions of a warp. Included before everything else.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <vector_functions.h>

#include "machine.h"

#undef __device__
#undef __forceinline__
#undef __global__
#undef __grid_constant__
#undef __launch_bounds__
#undef __shared__
#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static  // blocks with such memory run one after another

#define threadIdx (::emulation::Dim{::emulation::current->index, 0, 0})
#define blockIdx (::emulation::Dim{::emulation::current->block->index, 0, 0})
static const ::emulation::Dim& gridDim = ::emulation::grid_dim;  // no macro: a launch has a field of this name

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  return b < a ? b : a;
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  return a < b ? b : a;
}

inline float __uint_as_float(unsigned bits) { return emulation::from_bits<float>(bits); }
inline float __int_as_float(int bits) { return emulation::from_bits<float>(bits); }
inline int __float_as_int(float x) { return emulation::from_bits<int>(emulation::to_bits(x)); }
inline unsigned __float_as_uint(float x) { return emulation::from_bits<unsigned>(emulation::to_bits(x)); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }  // 0 of NaN
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }

template <class T>
T __ldg(const T* from) {
  return *from;
}

template <class T>
T atomicAdd(T* to, T value) {
  const T before = *to;
  if constexpr (std::is_same_v<T, float>) {
    emulation::add(to, value);
  } else {
    *to = before + value;
  }
  return before;
}

template <class T>
T atomicMin(T* to, T value) {
  const T before = *to;
  if (value < before) *to = value;
  return before;
}

template <class T>
T atomicMax(T* to, T value) {
  const T before = *to;
  if (before < value) *to = value;
  return before;
}

template <class... Parameters>
cudaError_t cudaFuncSetAttribute(void (*)(Parameters...), cudaFuncAttribute, int) {
  return cudaSuccess;
}

// The C++ forms of the runtime's functions for launches with attributes.
inline emulation::Launch emulation_launch(const cudaLaunchConfig_t& config) {
  emulation::Launch launch(config.gridDim.x, config.blockDim.x, config.dynamicSmemBytes);
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& it = config.attrs[i];
    if (it.id == cudaLaunchAttributeClusterDimension) launch.cluster = it.val.clusterDim.x;
    if (it.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
      launch.starts_early = it.val.programmaticStreamSerializationAllowed != 0;
    }
  }
  return launch;
}
template <class... Parameters>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, void (*)(Parameters...), const cudaLaunchConfig_t* config) {
  const int blocks = static_cast<int>(emulation_launch(*config).cluster);
  *clusters = max(emulation::settings.num_sms / blocks, 1);
  return cudaSuccess;
}
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  emulation_launch(*config).run(kernel, arguments...);
  return cudaSuccess;
}

inline void __syncthreads() {
  emulation::named_barrier_sync(0, static_cast<int>(emulation::current->block->threads.size()));
}

inline int __syncthreads_or(int x) {
  int& any = emulation::current->block->any_vote;
  __syncthreads();  // the votes of the call before have been read
  any = 0;
  __syncthreads();
  any |= x;
  __syncthreads();
  return any;
}

// --- of a warp, always of all lanes -------------------------------------------------------------------------------

inline void emulation_check_mask(unsigned mask) {
  if (mask != 0xffffffffu) emulation::fail("a function of a warp is not given all lanes");
}

inline void __syncwarp(unsigned mask = 0xffffffffu) {
  emulation_check_mask(mask);
  emulation::exchange("__syncwarp", 0);
}

template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  emulation_check_mask(mask);
  const int lane = emulation::current->lane();
  const auto& all = emulation::exchange("__shfl_sync", emulation::to_bits(value));
  return emulation::from_bits<T>(all[lane / width * width + (from & (width - 1))]);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance, int width = 32) {
  emulation_check_mask(mask);
  const int lane = emulation::current->lane(), other = lane ^ distance;
  const auto& all = emulation::exchange("__shfl_xor_sync", emulation::to_bits(value));
  return emulation::from_bits<T>(all[other / width <= lane / width ? other : lane]);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, int distance, int width = 32) {
  emulation_check_mask(mask);
  const int lane = emulation::current->lane(), other = lane - distance;
  const auto& all = emulation::exchange("__shfl_up_sync", emulation::to_bits(value));
  return emulation::from_bits<T>(all[other >= 0 && other / width == lane / width ? other : lane]);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, int distance, int width = 32) {
  emulation_check_mask(mask);
  const int lane = emulation::current->lane(), other = lane + distance;
  const auto& all = emulation::exchange("__shfl_down_sync", emulation::to_bits(value));
  return emulation::from_bits<T>(all[other / width == lane / width ? other : lane]);
}

inline unsigned __ballot_sync(unsigned mask, bool holds) {
  emulation_check_mask(mask);
  const auto& all = emulation::exchange("__ballot_sync", holds);
  unsigned votes = 0;
  for (int lane = 0; lane < emulation::kLanes; ++lane) votes |= static_cast<unsigned>(all[lane]) << lane;
  return votes;
}
inline int __reduce_add_sync(unsigned mask, int value) {
  emulation_check_mask(mask);
  const auto& all = emulation::exchange("__reduce_add_sync", emulation::to_bits(value));
  int total = 0;
  for (int lane = 0; lane < emulation::kLanes; ++lane) total += emulation::from_bits<int>(all[lane]);
  return total;
}
inline bool __any_sync(unsigned mask, bool holds) { return __ballot_sync(mask, holds) != 0; }
