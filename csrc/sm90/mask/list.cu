// The list kernel: turns the classes of tiles into row lists and column lists, the order in which kernels visit tiles.
//
//     list = number of full tiles, number of partial tiles, then the indices: full, partial, empty, each ascending
//
// A warp writes a list. It reads the classes (1/16384 of the mask) twice: to count, then to place. Where the classes of
// a long list do not lie side by side, the classes of neighbouring lists do: a block reads 32 lists together.
#include "../../api/integers.h"
#include "../kernel_launch.h"
#include "mask.h"
#include "pack_ops.h"

namespace flash_dmattn {
namespace {

// Where the lists of a kind lie, and the classes of a list: the classes of list i of head h start at
// classes + h * Tq * Tk + i * list_stride, tile_stride apart.
struct Lists {
  int32_t* out;
  int64_t list_stride, tile_stride;
  int number, length;  // of a head; of a list
};

__device__ __forceinline__ Lists lists_of(const ListTilesParams& p, bool is_row) {
  Lists lists;
  lists.out = is_row ? p.row_lists : p.col_lists;
  lists.number = is_row ? p.tiles_q : p.tiles_k;
  lists.length = is_row ? p.tiles_k : p.tiles_q;
  const bool is_contiguous = is_row != p.columns_are_contiguous;
  lists.list_stride = is_contiguous ? lists.length : 1;
  lists.tile_stride = is_contiguous ? 1 : lists.number;
  return lists;
}

// Writes both kinds of lists, or only the kind whose classes lie side by side.
__global__ void __launch_bounds__(kListsPerBlock * 32) list_tiles_kernel(const __grid_constant__ ListTilesParams p) {
  griddep_wait();
  const int64_t list = static_cast<int64_t>(blockIdx.x) * kListsPerBlock + threadIdx.x / 32;
  if (list >= p.num_lists) return;  // whole warps
  const bool is_row = list < p.num_rows;
  const int64_t index = is_row ? list : list - p.num_rows;
  const Lists lists = lists_of(p, is_row);
  const int64_t head = index / lists.number;
  const int line = static_cast<int>(index - head * lists.number);
  const uint8_t* classes = p.classes + head * p.tiles_q * p.tiles_k + line * lists.list_stride;
  int32_t* out = list_of(lists.out, head, lists.number, line, lists.length);
  write_list(out, lists.length, [&](int tile) { return classes[tile * lists.tile_stride]; });
}

constexpr int kNeighbours = 32, kWarps = 8, kListsOfWarp = kNeighbours / kWarps;
constexpr int kTilesAtOnce = 128;

// Writes the kind of lists whose neighbours have their classes side by side.
__global__ void __launch_bounds__(kWarps * 32) list_long_tiles_kernel(const __grid_constant__ ListTilesParams p) {
  griddep_wait();
  __shared__ uint8_t kinds[kTilesAtOnce][kNeighbours + 1];  // odd rows: 32 tiles of a list are in different banks
  const Lists lists = lists_of(p, p.columns_are_contiguous);
  const int groups = (lists.number + kNeighbours - 1) / kNeighbours;
  const int64_t head = blockIdx.x / groups;
  const int first_list = static_cast<int>(blockIdx.x - head * groups) * kNeighbours;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint8_t* classes = p.classes + head * p.tiles_q * p.tiles_k + first_list;
  Count all[kListsOfWarp], placed[kListsOfWarp];
  // Twice over all tiles; `use` gets a list of the warp, and the class of the lane's tile.
  auto each = [&](auto use) {
    for (int first = 0; first < lists.length; first += kTilesAtOnce) {
      __syncthreads();  // the tiles before are read
      for (int row = warp; row < kTilesAtOnce; row += kWarps) {
        const bool exists = first + row < lists.length && first_list + lane < lists.number;
        kinds[row][lane] = exists ? classes[(first + row) * lists.tile_stride + lane] : 0xff;
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kListsOfWarp; ++i) {
#pragma unroll
        for (int part = 0; part < kTilesAtOnce; part += 32) {
          use(i, kinds[part + lane][warp * kListsOfWarp + i], first + part);
        }
      }
    }
  };
  each([&](int i, int kind, int) { count_tiles(kind, all[i]); });
  const int first_of_warp = first_list + warp * kListsOfWarp;
  int32_t* const out = list_of(lists.out, head, lists.number, first_of_warp, lists.length);
  each([&](int i, int kind, int start) {
    if (first_of_warp + i >= lists.number) return;  // whole warps
    int32_t* const list = list_of(out, 0, 0, i, lists.length);
    if (start == 0 && lane < 2) list[lane] = lane == 0 ? all[i].full : all[i].partial;
    place_tiles(kind, start, lists.length, all[i], placed[i], list + 2);
  });
}

// From so many tiles on lists are long. Below, a block for 32 lists leaves most SMs without work.
constexpr int kLong = 512;

}  // namespace

cudaError_t launch_list_tiles(ListTilesParams params, cudaStream_t stream) {
  const int64_t heads = params.heads, rows = heads * params.tiles_q, columns = heads * params.tiles_k;
  const int64_t number = params.columns_are_contiguous ? params.tiles_q : params.tiles_k;  // of the other kind
  const int64_t length = params.columns_are_contiguous ? params.tiles_k : params.tiles_q;
  const bool is_long = length >= kLong && number > 0;
  if (is_long) {
    const auto blocks = static_cast<unsigned>(heads * ceil_div(number, kNeighbours));
    const cudaError_t error = KernelLaunch(blocks, kWarps * 32, stream).run(list_long_tiles_kernel, params);
    if (error != cudaSuccess) return error;
  }
  params.num_rows = is_long && params.columns_are_contiguous ? 0 : rows;
  params.num_lists = is_long ? (params.columns_are_contiguous ? columns : rows) : rows + columns;
  const auto blocks = static_cast<unsigned>(ceil_div(params.num_lists, kListsPerBlock));
  return KernelLaunch(blocks, kListsPerBlock * 32, stream).run(list_tiles_kernel, params);
}

}  // namespace flash_dmattn
