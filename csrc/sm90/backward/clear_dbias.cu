// Writes zeros where a stored dbias has no score: what the main kernel, which stores tiles of band or mask, does not
// reach.
#include <algorithm>

#include "../../api/integers.h"
#include "../kernel_launch.h"
#include "../operands.h"
#include "launch.h"

namespace flash_dmattn {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kRowsPerWarp = 4;  // of the longest sequence; a gap behind it may have more
// The narrowest tile of keys. A tile with a score of a row is stored for that row whole.
constexpr int kKept = 64;

__device__ __forceinline__ void clear(uint4* row, int from, int to) {
  for (int chunk = from + threadIdx.x % 32; chunk < to; chunk += 32) row[chunk] = make_uint4(0, 0, 0, 0);
}

__device__ __forceinline__ uint4* first_row(const ClearDbiasParams& p, int entry, int head) {
  return static_cast<uint4*>(p.x) + entry * p.stride_b + head * p.stride_h;
}

// With a mask: a block of threads has a row of tiles, whose list ends with the empty ones. kChunk: numbers in 16 bytes.
template <int kChunk>
__global__ void __launch_bounds__(kThreads) clear_masked_dbias_kernel(const __grid_constant__ ClearDbiasParams p) {
  griddep_wait();
  constexpr int kTileChunks = kTile / kChunk, kRowsAtOnce = kThreads / kTileChunks;
  const int tiles_q = (p.rows + kTile - 1) / kTile, tiles_k = (p.columns + kTile - 1) / kTile;
  const int pair = blockIdx.x / tiles_q, tile = blockIdx.x - pair * tiles_q;
  const int entry = pair / p.num_heads, head = pair - entry * p.num_heads;
  const int32_t* const list = list_of(p.mask.lists, mask_of(p.mask.heads, HeadAt{entry, head}), tiles_q, tile, tiles_k);
  const int chunks = p.columns / kChunk, rows = min(kTile, p.rows - tile * kTile);
  uint4* const x = first_row(p, entry, head) + tile * kTile * p.stride_q;
  for (int at = list[0] + list[1]; at < tiles_k; ++at) {
    const int chunk = list[2 + at] * kTileChunks + threadIdx.x % kTileChunks;
    if (chunk >= chunks) continue;
    for (int row = threadIdx.x / kTileChunks; row < rows; row += kRowsAtOnce) {
      x[row * p.stride_q + chunk] = make_uint4(0, 0, 0, 0);
    }
  }
}

template <int kChunk>
__global__ void __launch_bounds__(kThreads) clear_dbias_kernel(const __grid_constant__ ClearDbiasParams p) {
  griddep_wait();
  const int pair = blockIdx.x / p.shares, share = blockIdx.x - pair * p.shares;
  const int entry = pair / p.num_heads, head = pair - entry * p.num_heads;
  Sequence of{0, p.rows, 0, p.columns, p.low, p.high};
  if (p.sequences.bounds != nullptr) of = load_sequence(p.sequences, entry);
  // Rows of a sequence and of the gap behind it; of the first one, of the gap before it, too.
  int begin = 0, end = p.rows, first = 0;
  if (p.packs_rows) {
    first = of.first_q;
    if (entry > 0) begin = of.first_q;
    if (entry + 1 < p.number) end = min(end, p.sequences.bounds[entry + 1].x);
  }
  const int chunks = p.columns / kChunk;
  uint4* const x = first_row(p, entry, head);
  for (int row = begin + share * kWarps + threadIdx.x / 32; row < end; row += p.shares * kWarps) {
    const int i = row - first;
    int kept_from = chunks, kept_to = chunks;
    if (i >= 0 && i < of.seqlen_q) {
      const int low = max(i + of.low, 0), high = min(i + of.high, of.seqlen_k - 1);
      if (low <= high) {
        kept_from = low / kKept * (kKept / kChunk);
        kept_to = min((high / kKept + 1) * (kKept / kChunk), chunks);
      }
    }
    uint4* const to = x + row * p.stride_q;
    clear(to, 0, kept_from);
    clear(to, kept_to, chunks);
  }
}

}  // namespace

cudaError_t launch_clear_dbias(ClearDbiasParams params, cudaStream_t stream) {
  const int64_t pairs = static_cast<int64_t>(params.number) * params.num_heads;
  if (params.mask.lists != nullptr) {
    return KernelLaunch(pairs * ceil_div(params.rows, kTile), kThreads, stream)
        .run(params.is_float ? clear_masked_dbias_kernel<4> : clear_masked_dbias_kernel<8>, params);
  }
  const int longest = params.packs_rows ? std::min(params.sequences.most_q, params.rows) : params.rows;
  params.shares = static_cast<int>(ceil_div(longest, kWarps * kRowsPerWarp));
  return KernelLaunch(pairs * params.shares, kThreads, stream)
      .run(params.is_float ? clear_dbias_kernel<4> : clear_dbias_kernel<8>, params);
}

}  // namespace flash_dmattn
