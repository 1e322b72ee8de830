// The list kernel: turns the classes of tiles into row lists and column lists, the order in which kernels visit tiles.
//
//     list = number of full tiles, number of partial tiles, then the indices: full, partial, empty, each ascending
//
// A warp writes one list. It reads the classes (1/16384 of the mask) twice: to count, then to place.
#include "../kernel_launch.h"
#include "mask.h"

namespace flash_dmattn {
namespace {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kPartial = 1, kFull = 2;

__global__ void __launch_bounds__(kListsPerBlock * 32) list_tiles_kernel(const __grid_constant__ ListTilesParams p) {
  griddep_wait();
  const int64_t list = static_cast<int64_t>(blockIdx.x) * kListsPerBlock + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (list >= p.num_lists) return;  // whole warps
  const bool is_row = list < p.num_rows;
  const int64_t index = is_row ? list : list - p.num_rows;
  const int length = is_row ? p.tiles_k : p.tiles_q;
  const int64_t stride = is_row ? 1 : p.tiles_k;
  // There are no columns where tiles_k is 0, so nothing is divided by 0.
  const uint8_t* classes =
      p.classes + (is_row ? index * p.tiles_k : index / p.tiles_k * p.tiles_q * p.tiles_k + index % p.tiles_k);
  int32_t* out = (is_row ? p.row_lists : p.col_lists) + index * (2 + length);

  // Lanes beyond the end hold a class that is none of the three.
  auto class_of = [&](int tile) { return tile < length ? static_cast<int>(classes[tile * stride]) : -1; };

  int num_full = 0, num_partial = 0;
  for (int start = 0; start < length; start += 32) {
    const int kind = class_of(start + lane);
    num_full += __popc(__ballot_sync(kAll, kind == kFull));
    num_partial += __popc(__ballot_sync(kAll, kind == kPartial));
  }
  if (lane == 0) {
    out[0] = num_full;
    out[1] = num_partial;
  }
  out += 2;

  const unsigned lanes_before = (1u << lane) - 1;
  int full = 0, partial = 0;
  for (int start = 0; start < length; start += 32) {
    const int tile = start + lane;
    const int kind = class_of(tile);
    const unsigned full_lanes = __ballot_sync(kAll, kind == kFull);
    const unsigned partial_lanes = __ballot_sync(kAll, kind == kPartial);
    const int full_before = full + __popc(full_lanes & lanes_before);
    const int partial_before = partial + __popc(partial_lanes & lanes_before);
    const int empty_before = tile - full_before - partial_before;
    const int place = kind == kFull      ? full_before
                      : kind == kPartial ? num_full + partial_before
                                         : num_full + num_partial + empty_before;
    if (tile < length) out[place] = tile;
    full += __popc(full_lanes);
    partial += __popc(partial_lanes);
  }
}

}  // namespace

cudaError_t launch_list_tiles(const ListTilesParams& params, unsigned blocks, cudaStream_t stream) {
  return KernelLaunch(blocks, kListsPerBlock * 32, stream).run(list_tiles_kernel, params);
}

}  // namespace flash_dmattn
