// The kernels of interval masks: what the attention kernels walk of one, and keys and values in its order.
#include "../kernel_launch.h"
#include "mask.h"
#include "pack_ops.h"

namespace flash_dmattn {
namespace {

// A block takes 128 places of a head, a thread each; then the threads share the tiles of queries.
__global__ void __launch_bounds__(kTile) interval_tiles_kernel(const __grid_constant__ IntervalTilesParams p) {
  griddep_wait();
  __shared__ int2 bounds[kTile];
  const int64_t head = blockIdx.x / p.tiles_k;
  const int tile_k = static_cast<int>(blockIdx.x - head * p.tiles_k), place = tile_k * kTile + threadIdx.x;
  int2 interval = make_int2(0, 0);
  if (place < p.seqlen_k) {
    const int64_t key = head * p.seqlen_k + (p.order == nullptr ? place : p.order[head * p.seqlen_k + place]);
    interval = make_int2(p.start[key], p.stop[key]);
  }
  bounds[threadIdx.x] = interval;
  p.bounds[blockIdx.x * static_cast<int64_t>(kTile) + threadIdx.x] = interval;
  __syncthreads();
  int earliest = INT32_MAX, latest = 0;           // the rows that some place has, and all between
  int last_start = 0, first_stop = INT32_MAX;     // those between are the rows that all places have
#pragma unroll 8
  for (int i = 0; i < kTile; ++i) {
    const int2 seen_by = bounds[i];
    if (seen_by.x < seen_by.y) {
      earliest = min(earliest, seen_by.x);
      latest = max(latest, seen_by.y);
    }
    last_start = max(last_start, seen_by.x);
    first_stop = min(first_stop, seen_by.y);
  }
  uint8_t* classes = p.classes + (head * p.tiles_k + tile_k) * p.tiles_q;
  for (int tile_q = threadIdx.x; tile_q < p.tiles_q; tile_q += kTile) {
    const int first = tile_q * kTile, end = min(first + kTile, p.seqlen_q);
    const bool is_full = last_start <= first && first_stop >= end;
    bool is_active = is_full;
    if (!is_full && earliest < end && latest > first) {
#pragma unroll 8
      for (int i = 0; i < kTile; ++i) {
        const int2 seen_by = bounds[i];
        is_active |= seen_by.x < end && seen_by.y > first && seen_by.x < seen_by.y;
      }
    }
    classes[tile_q] = is_active + is_full;
  }
}

constexpr int kThreads = 256, kLanes = kGatherLanes, kRows = kThreads / kLanes;

// A block takes values of a bias per key.
__device__ void place_bias(const GatherKeysParams& p, int64_t block) {
  const int64_t at = block * kThreads + threadIdx.x, length = p.places.length;
  if (at >= length * p.bias_batch * p.bias_heads) return;
  const int64_t pair = at / length, batch = pair / p.bias_heads;
  const int head = static_cast<int>(pair - batch * p.bias_heads);
  const int64_t mask = mask_of(p.bias_masks, HeadAt{static_cast<int>(batch), head});
  p.placed_bias[at] = bias_at(p.bias, batch, head, p.places.order[mask * length + at % length]);
}

// Rows of dead keys are zeros beside live ones, because a product takes them all and 0 * NaN is NaN. Tiles of dead keys
// alone are read by nobody and stay as they are.
__global__ void __launch_bounds__(kThreads) gather_keys_kernel(const __grid_constant__ GatherKeysParams p) {
  griddep_wait();
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < p.num_cleared; i += int64_t{gridDim.x} * kThreads) {
    p.cleared[i] = 0;
  }
  const int64_t block = blockIdx.x - (p.rows + kRows - 1) / kRows;  // behind the blocks of k and v
  if (block >= 0) return place_bias(p, block);
  const int lane = threadIdx.x % kLanes;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kLanes;
  if (row >= p.rows) return;
  const PlacesOfKeys& places = p.places;
  const int64_t batch_place = row / p.num_heads, batch = batch_place / places.length;
  const int head = static_cast<int>(row - batch_place * p.num_heads);
  const int place = static_cast<int>(batch_place - batch * places.length);
  const int64_t mask = mask_of(places.heads, HeadAt{static_cast<int>(batch), head});
  const int2* bounds = places.bounds + mask * places.tiles * kTile;
  const auto is_live = [&](int at) { return bounds[at].x < bounds[at].y; };
  if (!is_live(place / kTile * kTile)) return;  // live keys come first
  const bool keeps = is_live(place);
  const int64_t key = places.order[mask * places.length + place];
#pragma unroll
  for (const GatherKeysParams::Tensor* rows : {&p.k, &p.v}) copy_row(*rows, batch, key, head, row, keeps, lane);
}

// A block takes a tile, a thread of it a row.
__global__ void __launch_bounds__(kTile) interval_bits_kernel(const __grid_constant__ IntervalBitsParams p) {
  griddep_wait();
  __shared__ int2 bounds[kTile];
  const int tile_k = blockIdx.x % p.tiles_k;
  const int64_t tile_row = blockIdx.x / p.tiles_k, head = tile_row / p.tiles_q;
  const int row = static_cast<int>(tile_row - head * p.tiles_q) * kTile + threadIdx.x;
  bounds[threadIdx.x] = p.bounds[(head * p.tiles_k + tile_k) * kTile + threadIdx.x];
  __syncthreads();
  if (row >= p.seqlen_q) return;
  int words[kTileWords];
#pragma unroll
  for (int w = 0; w < kTileWords; ++w) {
    words[w] = 0;
#pragma unroll
    for (int i = 0; i < kWord; ++i) {
      const int2 seen_by_key = bounds[w * kWord + i];
      if (row >= seen_by_key.x && row < seen_by_key.y) words[w] |= 1u << i;
    }
  }
  *reinterpret_cast<int4*>(p.bits + ((head * p.seqlen_q + row) * p.tiles_k + tile_k) * kTileWords) =
      make_int4(words[0], words[1], words[2], words[3]);
}

}  // namespace

cudaError_t launch_interval_bits(const IntervalBitsParams& params, int64_t heads, cudaStream_t stream) {
  return KernelLaunch(heads * params.tiles_q * params.tiles_k, kTile, stream).run(interval_bits_kernel, params);
}

cudaError_t launch_interval_tiles(const IntervalTilesParams& params, int64_t heads, cudaStream_t stream) {
  return KernelLaunch(heads * params.tiles_k, kTile, stream).run(interval_tiles_kernel, params);
}

cudaError_t launch_gather_keys(const GatherKeysParams& params, cudaStream_t stream) {
  const int64_t values = int64_t{params.bias_batch} * params.bias_heads * params.places.length;
  const int64_t blocks = (params.rows + kRows - 1) / kRows + (values + kThreads - 1) / kThreads;
  return KernelLaunch(blocks, kThreads, stream).run(gather_keys_kernel, params);
}

}  // namespace flash_dmattn
