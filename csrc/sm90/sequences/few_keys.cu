// delta of the queries of sequences of few keys, as the sum of p dp over keys: out in 16 bits is not exact enough there.
// A warp has a query of a head, and each lane every 32nd key.
#include <algorithm>

#include "../../device/fragments.h"
#include "../kernel_launch.h"
#include "../operands.h"
#include "launch.h"

namespace flash_dmattn {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

struct Query : OfSequence<true> {
  int batch, head;
};

// Of rows that start on 16 bytes, of a multiple of 8 columns.
template <class Element>
__device__ __forceinline__ float dot(const Element* a, const Element* b, int columns) {
  float sum = 0.0f;
#pragma unroll 4
  for (int c = 0; c < columns; c += 8) {
    const uint4 x = *reinterpret_cast<const uint4*>(a + c), y = *reinterpret_cast<const uint4*>(b + c);
    const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 first = unpack(xs[i], Element{}), second = unpack(ys[i], Element{});
      sum = fmaf(first.x, second.x, fmaf(first.y, second.y, sum));
    }
  }
  return sum;
}

template <class Element>
__global__ void __launch_bounds__(kThreads) few_keys_kernel(const __grid_constant__ FewKeysParams p) {
  griddep_wait();
  const SequenceParams& of = p.sequences;
  const int lane = threadIdx.x % 32;
  // A block of threads has a padded tile of all heads.
  for (int tile = blockIdx.x; tile < of.padded_tiles; tile += gridDim.x) {
    Query work;
    work.batch = of.sequence_of_tile[tile];
    if (work.batch < 0) continue;
    work.sequence = load_sequence(of, work.batch);
    const Sequence& sequence = work.sequence;
    if (sequence.seqlen_k == 0 || sequence.seqlen_k > kFewKeys) continue;
    const int first = (tile - first_padded_tile(sequence, work.batch)) * kTile;
    const int rows = min(sequence.seqlen_q - first, kTile);
    for (int at = threadIdx.x / 32; at < rows * p.num_heads; at += kWarps) {
      const int row = first + at / p.num_heads;
      work.head = at % p.num_heads;
      const int64_t padded = first_padded_tile_of(p, work) * kTile + row;
      const float lse = p.lse[padded];
      if (lse == INFINITY) continue;  // nothing is attended, and delta is not used
      const int64_t head_k = work.head / p.heads_per_group;
      const auto row_of = [&](const auto& x, bool packs, int64_t first_row, int i, int64_t head) {
        return static_cast<const Element*>(x.data) + (packs ? 0 : work.batch) * x.stride_b +
               ((packs ? first_row : 0) + i) * x.stride_l + head * x.stride_h;
      };
      const Element* q = row_of(p.q, of.packs_queries, sequence.first_q, row, work.head);
      const Element* dout = row_of(p.dout, of.packs_queries, sequence.first_q, row, work.head);
      float sum = 0.0f;
      const int last = min(row + sequence.high, sequence.seqlen_k - 1);
      for (int key = max(row + sequence.low, 0) + lane; key <= last; key += 32) {
        const Element* k = row_of(p.k, of.packs_keys, sequence.first_k, key, head_k);
        const Element* v = row_of(p.v, of.packs_keys, sequence.first_k, key, head_k);
        float score = dot(q, k, p.head_dim) * p.softmax_scale;
        if (p.bias_values != nullptr) with_bias(p, work, [&](auto bias) { score += bias(row, key); });
        sum = fmaf(exp2_approx(fmaf(score, kLog2e, -lse)), dot(dout, v, p.head_dim_v), sum);
      }
      for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
      if (lane > 0) continue;
      const int64_t of_lse = first_lse_of(p, work) + row;
      if (p.dlse != nullptr) {
        const int64_t entry = of.packs_queries ? 0 : work.batch, i = of.packs_queries ? sequence.first_q + row : row;
        sum -= p.dlse[entry * p.dlse_stride_b + work.head * p.dlse_stride_h + i * p.dlse_stride_q];
      }
      p.delta[padded] = sum;
      if (p.row_delta != nullptr) p.row_delta[of_lse] = sum;
    }
  }
}

}  // namespace

template <class T>
cudaError_t launch_few_keys(const FewKeysParams& params, cudaStream_t stream) {
  const int blocks = std::min(params.sequences.padded_tiles, 1 << 16);
  return KernelLaunch(blocks, kThreads, stream).run(few_keys_kernel<T>, params);
}

template cudaError_t launch_few_keys<__half>(const FewKeysParams&, cudaStream_t);
template cudaError_t launch_few_keys<__nv_bfloat16>(const FewKeysParams&, cudaStream_t);

}  // namespace flash_dmattn
