// dbias from the sums of several chunks: adds their slots in order, and rounds once.
#include <algorithm>

#include "../../device/fragments.h"
#include "../kernel_launch.h"
#include "launch.h"

namespace flash_dmattn {
namespace {

constexpr int kThreads = 128;
constexpr int kMaxBlocks = 1 << 20;

// Stores so many values of four, all of them at once if rows start on as many bytes.
__device__ __forceinline__ void store_four(float* to, float4 x, int count, bool at_once) {
  if (at_once) {
    *reinterpret_cast<float4*>(to) = x;
    return;
  }
  const float values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < count) to[i] = values[i];
  }
}

template <class Element>
__device__ __forceinline__ void store_four(Element* to, float4 x, int count, bool at_once) {
  const uint32_t words[2] = {pack(x.x, x.y, Element{}), pack(x.z, x.w, Element{})};
  if (at_once) {
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    return;
  }
  uint16_t* const values = reinterpret_cast<uint16_t*>(to);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < count) values[i] = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
  }
}

// A thread has four keys of a row.
template <class Element>
__global__ void __launch_bounds__(kThreads) add_chunks_kernel(const __grid_constant__ AddChunksParams p) {
  griddep_wait();
  griddep_launch_dependents();
  const int fours_of_row = p.slot_columns / 4;
  const int64_t fours = p.rows * fours_of_row, stride = static_cast<int64_t>(gridDim.x) * kThreads;
  const float4* const slots = reinterpret_cast<const float4*>(p.slots);
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; at < fours; at += stride) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
      const float4 sums_of_chunk = slots[chunk * fours + at];
      sum.x += sums_of_chunk.x;
      sum.y += sums_of_chunk.y;
      sum.z += sums_of_chunk.z;
      sum.w += sums_of_chunk.w;
    }
    const int64_t row = at / fours_of_row;
    const int key = static_cast<int>(at - row * fours_of_row) * 4;
    Element* const to = static_cast<Element*>(p.dbias) + row * p.seqlen_k + key;
    if (key < p.seqlen_k) store_four(to, sum, p.seqlen_k - key, p.stores_fours);  // then Lk is a multiple of 4
  }
}

}  // namespace

template <class T>
cudaError_t launch_add_chunks(const AddChunksParams& params, cudaStream_t stream) {
  const int64_t threads = params.rows * (params.slot_columns / 4);
  const int64_t blocks = std::min<int64_t>((threads + kThreads - 1) / kThreads, kMaxBlocks);
  return KernelLaunch(blocks, kThreads, stream).run(add_chunks_kernel<T>, params);
}

template cudaError_t launch_add_chunks<__half>(const AddChunksParams&, cudaStream_t);
template cudaError_t launch_add_chunks<__nv_bfloat16>(const AddChunksParams&, cudaStream_t);
template cudaError_t launch_add_chunks<float>(const AddChunksParams&, cudaStream_t);

}  // namespace flash_dmattn
