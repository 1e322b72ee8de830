// The kernels around the backward kernel. Before: lse in base 2 and delta of every row, and zeros for accumulators.
// After: results from accumulators.
#include <algorithm>
#include <type_traits>

#include "../../device/fragments.h"
#include "../../dispatch.h"
#include "../kernel_launch.h"
#include "../operands.h"
#include "launch.h"
#include "accumulators.h"

namespace flash_dmattn {
namespace {

constexpr int kThreads = 256;
// Lanes per row; each takes 8 values at a time.
template <int kColumns>
constexpr int kLanesOf = kColumns < 64 ? kColumns / 8 : 8;
constexpr int kMaxBlocks = 1 << 20;
constexpr int kZerosOfThread = 8;  // more blocks if there is more to clear than this

// A row as with_bias expects a work tile.
template <bool kHasSequences>
struct Row : OfSequence<kHasSequences> {
  int batch, head;
};

// In 32 bits: with more some kernels take more registers.
__device__ __forceinline__ int mask_of_head(const MaskHeads& of, int batch, int head) {
  return static_cast<int>(mask_of(of, HeadAt{batch, head}));
}

__device__ __forceinline__ bool is_live(const PlacesOfKeys& places, int batch, int head, int place) {
  const int64_t first = static_cast<int64_t>(mask_of_head(places.heads, batch, head)) * places.tiles * kTile;
  const int2 bounds = places.bounds[first + place];
  return place < places.length && bounds.x < bounds.y;
}

// Decides whether a key block has a whole group. A warp compares its walk with the walks of 32 others of the mask. All warps
// of a block decide alike. With `is_first` the block writes has_long of the mask, too, from the same sums.
__device__ __forceinline__ bool has_group(const GroupWalks& p, int mask, int pair, int tile, bool is_first) {
  const int lane = threadIdx.x % 32;
  const int32_t* const lists = list_of(p.lists, mask, p.tiles, 0, p.tiles_q);
  const auto walk_of = [&](int tile) {
    const int32_t* list = list_of(lists, 0, 0, tile, p.tiles_q);
    return list[0] + list[1];
  };
  const int walk = walk_of(tile), other = walk_of((2 * lane + 1) * p.tiles / 64);
  constexpr unsigned kAll = 0xffffffffu;
  const int num_short = __popc(__ballot_sync(kAll, other <= p.short_walk));
  const bool is_short = walk == 0 || (walk <= p.short_walk && num_short >= 16);
  if (p.full_group_pairs == 0) return is_short;
  const int sum = __reduce_add_sync(kAll, other), live = max(__popc(__ballot_sync(kAll, other > 0)), 1);
  const auto is_long = [&](int walk) {
    return static_cast<int64_t>(walk) * live > static_cast<int64_t>(sum) * p.share;
  };
  if (is_first) {
    bool has_long = false;
    for (int tile = lane; tile < p.tiles; tile += 32) has_long = has_long || is_long(walk_of(tile));
    has_long = __any_sync(kAll, has_long);
    if (threadIdx.x == 0) {
      p.has_long[mask] = has_long;  // as the mask's other pairs write
      if (mask == p.masks - 1) {
        for (int rest = p.masks; rest % 4 != 0; ++rest) p.has_long[rest] = 0;
      }
    }
  }
  return is_short || (pair < p.full_group_pairs && !is_long(walk));
}

// Clears accumulators of dk and dv, a block of threads 64 rows at a time. A tile with a live key adds to all of its
// rows, though nobody reads the rows of its dead keys.
__device__ __forceinline__ void clear_rows_added_to(const BackwardRowsParams& p) {
  const int row_blocks = p.batch * p.num_heads_k * p.row_blocks, inners = p.batch_is_inner ? p.batch : p.num_heads_k;
  for (int at = blockIdx.x; at < row_blocks; at += gridDim.x) {
    const int pair = at / p.row_blocks, outer = pair / inners, inner = pair - outer * inners;
    const int first = (at - pair * p.row_blocks) * kAccumRows / kTile * kTile;
    const int batch = p.batch_is_inner ? inner : outer, head = p.batch_is_inner ? outer : inner;
    bool is_added_to;
    if (p.places.order != nullptr) {
      is_added_to = is_live(p.places, batch, head, first);
    } else {
      const int mask = mask_of_head(p.group_walks.heads, batch, head);
      is_added_to = !has_group(p.group_walks, mask, pair, first / kTile, at == pair * p.row_blocks);
      if (threadIdx.x == 0) p.group_walks.has_group[at] = !is_added_to;
    }
    if (!is_added_to) continue;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (p.sums[i] == nullptr) continue;
      uint4* to = reinterpret_cast<uint4*>(p.sums[i] + static_cast<int64_t>(at) * p.floats[i]);
      for (int four = threadIdx.x; four < p.floats[i] / 4; four += kThreads) to[four] = make_uint4(0, 0, 0, 0);
    }
  }
}

// For rows of out and dout of up to kColumns.
template <class Element, int kColumns, bool kHasSequences>
__global__ void __launch_bounds__(kThreads, kColumns <= 128 ? 6 : 5)
    backward_rows_kernel(const __grid_constant__ BackwardRowsParams p, int64_t rows) {
  griddep_wait();
  griddep_launch_dependents();
  constexpr int kLanes = kLanesOf<kColumns>;
  constexpr int kTimes = kColumns / (kLanes * 8);  // loads of a lane, all issued before the first is used
  const int padded = kHasSequences ? p.sequences.padded_tiles * kTile : p.padded_rows;
  const int lane = threadIdx.x % kLanes;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * (kThreads / kLanes);
  // Rows are padded to whole tiles or blocks, so all threads of a warp make the same number of iterations.
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes; at < rows;
       at += stride) {
    const int64_t pair = at / padded;
    int row = static_cast<int>(at - pair * padded);
    Row<kHasSequences> work;
    work.batch = static_cast<int>(pair / p.num_heads);
    work.head = static_cast<int>(pair % p.num_heads);
    bool exists = true;
    if constexpr (kHasSequences) {
      work.batch = p.sequences.sequence_of_tile[row / kTile];
      exists = work.batch >= 0;
      if (exists) {
        work.sequence = load_sequence(p.sequences, work.batch);
        row -= first_padded_tile(work.sequence, work.batch) * kTile;
      }
    }
    exists = exists && row < seqlen_q_of(p, work);
    float sum = 0.0f;
    // Loaded together with out and dout: behind their sum it would be waited for once more.
    float narrow = INFINITY;
    double wide = INFINITY;
    if (exists && lane == 0) {
      const int64_t from = first_lse_of(p, work) + row;
      if (p.has_wide_lse) {
        wide = static_cast<const double*>(p.lse)[from];
      } else {
        narrow = static_cast<const float*>(p.lse)[from];
      }
    }
    // The row in its entry of dout and of dlse.
    int entry = work.batch, row_of_entry = row;
    if constexpr (kHasSequences) {
      if (exists && p.sequences.packs_queries) entry = 0, row_of_entry += work.sequence.first_q;
    }
    if (exists) {
      const int64_t row_index = (first_query_of(p, work) + row) * p.num_heads + work.head;
      const Element* out = static_cast<const Element*>(p.out) + row_index * p.head_dim_v;
      const Element* dout = static_cast<const Element*>(p.dout.data) + entry * p.dout.stride_b +
                            row_of_entry * p.dout.stride_l + work.head * p.dout.stride_h;
      uint4 a[kTimes], b[kTimes];
#pragma unroll
      for (int t = 0; t < kTimes; ++t) {
        const int column = (t * kLanes + lane) * 8;
        const bool is_inside = column < p.head_dim_v;
        a[t] = is_inside ? *reinterpret_cast<const uint4*>(out + column) : make_uint4(0, 0, 0, 0);
        b[t] = is_inside ? *reinterpret_cast<const uint4*>(dout + column) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int t = 0; t < kTimes; ++t) {
        const uint32_t as[4] = {a[t].x, a[t].y, a[t].z, a[t].w}, bs[4] = {b[t].x, b[t].y, b[t].z, b[t].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 x = unpack(as[i], Element{}), y = unpack(bs[i], Element{});
          sum = fmaf(x.x, y.x, sum);
          sum = fmaf(x.y, y.y, sum);
        }
      }
    }
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, distance, kLanes);
    }
    bool is_great = false;
    if (lane == 0) {
      float lse = INFINITY;
      SplitLse natural{INFINITY, 0.0f};
      if (exists) {
        natural = p.has_wide_lse ? split_lse(wide) : SplitLse{narrow, 0.0f};
        if (natural.high != -INFINITY) {
          if (p.dlse.data != nullptr) {
            sum -= p.dlse.data[entry * p.dlse.stride_b + work.head * p.dlse.stride_h + row_of_entry * p.dlse.stride_q];
          }
          float bias = 0.0f;
          if (p.bias_values.data != nullptr) with_bias(p, work, [&](auto bias_at) { bias = bias_at(row, 0); });
          lse = ((natural.high - bias) + natural.low) * kLog2e;
        } else {
          natural.high = INFINITY;
        }
      }
      if (p.split_lse != nullptr) {
        p.split_lse[at] = make_float2(natural.high, natural.low * kLog2e);
        is_great = fabsf(natural.high) > kGreatLse && natural.high != INFINITY;
        if (is_great) lse = -INFINITY;
      }
      p.lse_log2[at] = lse;
      p.delta[at] = exists ? sum : 0.0f;
      if (exists && p.row_delta != nullptr) p.row_delta[first_lse_of(p, work) + row] = sum;
    }
    if (p.split_lse != nullptr) {
      // The block's rows are in one tile, because tiles are whole multiples of them.
      constexpr int kBytes = kThreads / kLanes / 32;
      static_assert(kTile % (kThreads / kLanes) == 0 && kBytes > 0);
      const bool any = __syncthreads_or(is_great);
      if (threadIdx.x < kBytes) p.great_rows[at / 32 + threadIdx.x] = any;
    }
  }
  uint4* cleared = static_cast<uint4*>(p.cleared);
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; at < p.zeros;
       at += static_cast<int64_t>(gridDim.x) * kThreads) {
    cleared[at] = make_uint4(0, 0, 0, 0);
  }
  if (p.places.order != nullptr || p.group_walks.has_group != nullptr) clear_rows_added_to(p);
}

// One warpgroup converts one accumulator tile.
template <class Element, bool kHasSequences>
__global__ void __launch_bounds__(128) backward_sums_kernel(const __grid_constant__ BackwardSumsParams params) {
  griddep_wait();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t total = params.results[BackwardSumsParams::kResults - 1].tiles;
  for (int64_t at = blockIdx.x; at < total; at += gridDim.x) {
    int result = 0;
    while (at >= params.results[result].tiles) ++result;
    const BackwardSumsParams::Result& p = params.results[result];
    // Tiles of 16 KB are fewer than 2^31, and division of 64 bits is slow.
    const int tile = static_cast<int>(at - (result > 0 ? params.results[result - 1].tiles : 0));
    const int row_index = tile / p.panels, panel = tile - row_index * p.panels;
    if (p.lacks_groups && params.has_group[row_index]) continue;
    const int row_blocks = p.rows_per_pair / kAccumRows, position = row_index / row_blocks;
    int first_row = (row_index - position * row_blocks) * kAccumRows;
    int seqlen = p.seqlen;
    [[maybe_unused]] int64_t first_out_row = 0;
    if constexpr (kHasSequences) {
      const int number = params.sequences.sequence_of_tile[first_row / kTile];
      if (number < 0) continue;
      const Sequence of = load_sequence(params.sequences, number);
      first_row -= first_padded_tile(of, number) * kTile;
      seqlen = of.seqlen_q;
      first_out_row = of.first_q;
    }
    if (first_row >= seqlen) continue;
    const int inners = p.batch_is_inner ? p.batch : p.num_heads, pair = p.first_pair + position, outer = pair / inners;
    const int inner = pair - outer * inners;
    const int batch = p.batch_is_inner ? inner : outer, head = p.batch_is_inner ? outer : inner;
    const float* from = p.sums + static_cast<int64_t>(tile) * kAccumRows * p.tile_columns;
    float4 sums[kAccumColumns / 8];
    const bool is_used = !p.is_by_place || is_live(params.places, batch, head, first_row);
    const int columns = is_used ? min(p.tile_columns, p.columns - panel * kAccumColumns) : 0;
#pragma unroll
    for (int c = 0; c < kAccumColumns / 8; ++c) {
      const bool is_there = 8 * c < columns;
      sums[c] = is_there ? *reinterpret_cast<const float4*>(from + accum_offset(c, threadIdx.x))
                         : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + warp * 16 + lane / 4 + 8 * r;
      int64_t out_row = row;
      if (p.is_by_place && row < seqlen) {
        const int64_t mask = mask_of_head(params.places.heads, batch, head);
        out_row = params.places.order[mask * p.seqlen + row];
      }
      const int64_t in_batch = kHasSequences ? first_out_row : static_cast<int64_t>(batch) * seqlen;
      Element* to = static_cast<Element*>(p.out) + ((in_batch + out_row) * p.num_heads + head) * p.columns;
      const int first = panel * kAccumColumns;
      store_row<kAccumColumns / 2>(to + first, r, row < seqlen, p.columns - first, lane, [&](int i) {
        const float4 four = sums[i / 4];
        return r == 0 ? pack(four.x * p.factor, four.y * p.factor, Element{})
                      : pack(four.z * p.factor, four.w * p.factor, Element{});
      });
    }
  }
}

// One warpgroup converts one turned tile of dq, by way of shared memory, where it has rows of queries.
template <class Element>
__global__ void __launch_bounds__(128) turned_sums_kernel(const __grid_constant__ BackwardSumsParams params) {
  constexpr int kRow = kAccumColumns + 8;  // of shared memory: rows 16 bytes apart, in other banks
  __shared__ __align__(16) uint16_t rows[kTurnedBlockM * kRow];
  griddep_wait();
  const BackwardSumsParams::Result& p = params.turned;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, blocks = p.rows_per_pair / kTurnedBlockM;
  for (int64_t tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    const int panel = static_cast<int>(tile % 2);
    const int64_t block_index = tile / 2, pair = block_index / blocks, batch = pair / p.num_heads;
    const int first_row = static_cast<int>(block_index - pair * blocks) * kTurnedBlockM;
    const int64_t head = pair - batch * p.num_heads;
    const float* from = p.sums + tile * kTurnedFloats;
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kTurnedBlockM / 8; ++c) {
      const float4 four = *reinterpret_cast<const float4*>(from + accum_offset(c, threadIdx.x));
      const int column = warp * 16 + lane / 4, row = 8 * c + 2 * (lane % 4);
      const uint32_t low = pack(four.x * p.factor, four.z * p.factor, Element{});
      const uint32_t high = pack(four.y * p.factor, four.w * p.factor, Element{});
      rows[row * kRow + column] = static_cast<uint16_t>(low);
      rows[row * kRow + column + 8] = static_cast<uint16_t>(low >> 16);
      rows[(row + 1) * kRow + column] = static_cast<uint16_t>(high);
      rows[(row + 1) * kRow + column + 8] = static_cast<uint16_t>(high >> 16);
    }
    __syncthreads();
    for (int at = threadIdx.x; at < kTurnedBlockM * 8; at += 128) {
      const int row = first_row + at / 8, column = panel * kAccumColumns + at % 8 * 8;
      if (row < p.seqlen && column < p.columns) {
        Element* to = static_cast<Element*>(p.out) + ((batch * p.seqlen + row) * p.num_heads + head) * p.columns;
        *reinterpret_cast<uint4*>(to + column) = *reinterpret_cast<const uint4*>(rows + at / 8 * kRow + at % 8 * 8);
      }
    }
  }
}

int64_t blocks_for(int64_t count) { return std::min<int64_t>(count, kMaxBlocks); }

}  // namespace

template <class T>
cudaError_t launch_backward_rows(const BackwardRowsParams& params, cudaStream_t stream) {
  const bool has_sequences = params.sequences.bounds != nullptr;
  const int64_t padded = has_sequences ? params.sequences.padded_tiles * kTile : params.padded_rows;
  const int64_t entries = has_sequences ? 1 : params.batch;
  const int64_t rows = entries * params.num_heads * padded;
  const auto launch = [&](auto columns) {
    constexpr int kColumns = decltype(columns)::value;
    const int64_t blocks = std::max(rows / (kThreads / kLanesOf<kColumns>), params.zeros / (kThreads * kZerosOfThread));
    return with_bool(has_sequences, [&](auto is_there) {
      return KernelLaunch(blocks_for(blocks), kThreads, stream)
          .run(backward_rows_kernel<T, kColumns, decltype(is_there)::value>, params, rows);
    });
  };
  if (params.head_dim_v <= 32) return launch(std::integral_constant<int, 32>{});
  if (params.head_dim_v <= kMaxRowColumns / 2) return launch(std::integral_constant<int, kMaxRowColumns / 2>{});
  return launch(std::integral_constant<int, kMaxRowColumns>{});
}

template <class T>
cudaError_t launch_backward_sums(const BackwardSumsParams& params, cudaStream_t stream) {
  if (params.turned.tiles > 0) {
    const cudaError_t error =
        KernelLaunch(blocks_for(params.turned.tiles), 128, stream).run(turned_sums_kernel<T>, params);
    if (error != cudaSuccess) return error;
  }
  const int64_t tiles = params.results[BackwardSumsParams::kResults - 1].tiles;
  if (tiles == 0) return cudaSuccess;
  return with_bool(params.sequences.bounds != nullptr, [&](auto is_there) {
    return KernelLaunch(blocks_for(tiles), 128, stream).run(backward_sums_kernel<T, decltype(is_there)::value>, params);
  });
}

template cudaError_t launch_backward_rows<__half>(const BackwardRowsParams&, cudaStream_t);
template cudaError_t launch_backward_rows<__nv_bfloat16>(const BackwardRowsParams&, cudaStream_t);
template cudaError_t launch_backward_sums<__half>(const BackwardSumsParams&, cudaStream_t);
template cudaError_t launch_backward_sums<__nv_bfloat16>(const BackwardSumsParams&, cudaStream_t);

}  // namespace flash_dmattn
