// Before the backward kernel if the order of additions is fixed and there is a mask: merges the full and partial tiles
// of each column list into one ascending order, and counts each tile's predecessors.
//
// Without it a list has full tiles first, so neighbouring key blocks would visit the same queries at different times
// and wait for each other. A warp writes one list.
#include "../kernel_launch.h"
#include "../operands.h"
#include "launch.h"

namespace flash_dmattn {
namespace {

constexpr int kListsPerBlock = 4;

// How many of the ascending values are below the bound.
__device__ __forceinline__ int count_below(const int32_t* values, int count, int bound) {
  int low = 0, high = count;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (values[middle] < bound) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

__global__ void __launch_bounds__(kListsPerBlock * 32) order_lists_kernel(const __grid_constant__ OrderListsParams p) {
  griddep_wait();
  const int64_t list = static_cast<int64_t>(blockIdx.x) * kListsPerBlock + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (list >= p.num_lists) return;
  const int64_t mask = list / p.tiles_k;
  const int tile_k = static_cast<int>(list - mask * p.tiles_k);
  const int32_t* full = list_of(p.col_lists, mask, p.tiles_k, tile_k, p.tiles_q) + 2;
  const int num_full = full[-2], num_partial = full[-1];
  const int32_t* partial = full + num_full;
  int32_t* ordered = list_of(p.ordered, mask, p.tiles_k, tile_k, p.tiles_q);
  if (lane == 0) {
    ordered[0] = 0;
    ordered[1] = num_full + num_partial;
  }
  for (int i = lane; i < num_full + num_partial; i += 32) {
    const int tile_q = full[i];
    const bool is_full = i < num_full;
    const int position =
        is_full ? i + count_below(partial, num_partial, tile_q) : i - num_full + count_below(full, num_full, tile_q);
    ordered[2 + position] = is_full ? tile_q | kFullTile : tile_q;
    // Tiles of later keys in this row add before this tile.
    const int32_t* row = list_of(p.row_lists, mask, p.tiles_q, tile_q, p.tiles_k) + 2;
    const int row_full = row[-2], row_partial = row[-1];
    const int up_to_this =
        count_below(row, row_full, tile_k + 1) + count_below(row + row_full, row_partial, tile_k + 1);
    p.predecessors[list * p.tiles_q + position] = row_full + row_partial - up_to_this;
  }
}

}  // namespace

cudaError_t launch_order_lists(const OrderListsParams& params, cudaStream_t stream) {
  const int64_t blocks = (params.num_lists + kListsPerBlock - 1) / kListsPerBlock;
  return KernelLaunch(blocks, kListsPerBlock * 32, stream).run(order_lists_kernel, params);
}

}  // namespace flash_dmattn
