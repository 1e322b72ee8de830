// delta of the queries of sequences of few keys, as the sum of p dp over keys: out in 16 bits is not exact enough
// there. A warp has some queries of a head, and each lane every 32nd key.
#include <algorithm>

#include "../../device/fragments.h"
#include "../kernel_launch.h"
#include "../operands.h"
#include "launch.h"

namespace flash_dmattn {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kBlocks = 1 << 13;  // shared out over the tiles; most of them end at once

struct Query : OfSequence<true> {
  int batch, head;
};

constexpr int kQueries = 8;  // of a warp at a time, which share what it reads of k and v

// Adds the products of some rows, `stride` elements apart, with one of k or v. Rows start on 16 bytes and have a
// multiple of 8 columns; behind the last of them its products are added again.
template <class Element>
__device__ __forceinline__ void add_products(float (&sums)[kQueries], const Element* rows, int64_t stride, int number,
                                             const Element* other, int columns) {
#pragma unroll 2  // a warp waits for memory more than it computes
  for (int c = 0; c < columns; c += 8) {
    const uint4 y = *reinterpret_cast<const uint4*>(other + c);
    const uint32_t ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int row = 0; row < kQueries; ++row) {
      const uint4 x = *reinterpret_cast<const uint4*>(rows + min(row, number - 1) * stride + c);
      const uint32_t xs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 first = unpack(xs[i], Element{}), second = unpack(ys[i], Element{});
        sums[row] = fmaf(first.x, second.x, fmaf(first.y, second.y, sums[row]));
      }
    }
  }
}

template <class Element>
__global__ void __launch_bounds__(kThreads) few_keys_kernel(const __grid_constant__ FewKeysParams p, int shares) {
  griddep_wait();
  const SequenceParams& of = p.sequences;
  const int lane = threadIdx.x % 32, warp = static_cast<int>(blockIdx.x % shares) * kWarps + threadIdx.x / 32;
  // `shares` blocks of threads have a padded tile of all heads.
  for (int tile = blockIdx.x / shares; tile < of.padded_tiles; tile += gridDim.x / shares) {
    Query work;
    work.batch = of.sequence_of_tile[tile];
    if (work.batch < 0) continue;
    work.sequence = load_sequence(of, work.batch);
    const Sequence& sequence = work.sequence;
    if (sequence.seqlen_k == 0 || sequence.seqlen_k > kFewKeys) continue;
    const int first = (tile - first_padded_tile(sequence, work.batch)) * kTile;
    const int groups = (min(sequence.seqlen_q - first, kTile) + kQueries - 1) / kQueries;
    for (int at = warp; at < groups * p.num_heads; at += shares * kWarps) {
      const int first_row = first + at / p.num_heads * kQueries, rows = min(sequence.seqlen_q - first_row, kQueries);
      work.head = at % p.num_heads;
      const int64_t padded = first_padded_tile_of(p, work) * kTile + first_row;
      const int64_t head_k = work.head / p.heads_per_group;
      const auto row_of = [&](const Rows& x, bool packs, int64_t first_of_sequence, int i, int64_t head) {
        return static_cast<const Element*>(x.data) + (packs ? 0 : work.batch) * x.stride_b +
               ((packs ? first_of_sequence : 0) + i) * x.stride_l + head * x.stride_h;
      };
      const Element* q = row_of(p.q, of.packs_queries, sequence.first_q, first_row, work.head);
      const Element* dout = row_of(p.dout, of.packs_queries, sequence.first_q, first_row, work.head);
      float sums[kQueries] = {};
      for (int key = lane; key < sequence.seqlen_k; key += 32) {
        float scores[kQueries] = {}, products[kQueries] = {};
        const Element* k = row_of(p.k, of.packs_keys, sequence.first_k, key, head_k);
        const Element* v = row_of(p.v, of.packs_keys, sequence.first_k, key, head_k);
        add_products(scores, q, p.q.stride_l, rows, k, p.head_dim);
        add_products(products, dout, p.dout.stride_l, rows, v, p.head_dim_v);
#pragma unroll
        for (int i = 0; i < kQueries; ++i) {
          const int row = first_row + i;
          if (i >= rows || key < row + sequence.low || key > row + sequence.high) continue;
          float bias = 0.0f;
          if (p.bias_values.data != nullptr) with_bias(p, work, [&](auto bias_at) { bias = bias_at(row, key); });
          const float lse = p.lse[padded + i];  // +inf where nothing is attended: p is 0
          const float exponent =
              lse == -INFINITY ? great_exponent(scores[i], p.softmax_scale, bias, p.split_lse[padded + i])
                               : fmaf(fmaf(scores[i], p.softmax_scale, bias), kLog2e, -lse);
          sums[i] = fmaf(exp2_approx(exponent), products[i], sums[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < kQueries; ++i) {
        float sum = sums[i];
        for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        if (lane > 0 || i >= rows) continue;
        const int row = first_row + i;
        if (p.dlse.data != nullptr && p.lse[padded + i] != INFINITY) {
          const int64_t entry = of.packs_queries ? 0 : work.batch;
          const int64_t row_of_entry = (of.packs_queries ? sequence.first_q : 0) + row;
          sum -= p.dlse.data[entry * p.dlse.stride_b + work.head * p.dlse.stride_h + row_of_entry * p.dlse.stride_q];
        }
        p.delta[padded + i] = sum;
        if (p.row_delta != nullptr) p.row_delta[first_lse_of(p, work) + row] = sum;
      }
    }
  }
}

}  // namespace

template <class T>
cudaError_t launch_few_keys(const FewKeysParams& params, cudaStream_t stream) {
  // Where few of many tiles have few keys, their blocks would work while the other SMs wait.
  const int tiles = std::min(params.sequences.padded_tiles, 1 << 16), warps = kTile / kQueries * params.num_heads;
  const int shares = std::clamp(kBlocks / std::max(tiles, 1), 1, (warps + kWarps - 1) / kWarps);
  return KernelLaunch(tiles * shares, kThreads, stream).run(few_keys_kernel<T>, params, shares);
}

template cudaError_t launch_few_keys<__half>(const FewKeysParams&, cudaStream_t);
template cudaError_t launch_few_keys<__nv_bfloat16>(const FewKeysParams&, cudaStream_t);

}  // namespace flash_dmattn
