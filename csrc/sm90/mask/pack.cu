// The packing kernel: reads a bool mask once and writes bits and tile classes.
//
//     allowed[i, j] = mask[i, j] and low <= j - i <= high
//     bits[i, w]    = sum over t < 32 of allowed[i, 32 w + t] << t, 0 beyond the last key
//     class[I, J]   = 0 if no bit of the 128 x 128 tile is set, 2 if all are, 1 otherwise; rows beyond the last
//                     count as allowed, keys beyond the last as forbidden
//
// flash_dmattn/masks/prepared/packing.py and triton_kernels/mask_pack.py give the same results bit for bit. The kernel
// is bound by reading the mask: 1 byte per element, against 1/8 byte written. A block takes 128 rows by 512 keys and a
// warp takes whole rows; lane n holds keys 16 n to 16 n + 15 as 16 bits, for both kinds of load.
#include "../../dispatch.h"
#include "../kernel_launch.h"
#include "mask.h"
#include "pack_ops.h"

namespace flash_dmattn {
namespace {

constexpr int kWarps = 8;
constexpr int kRowsPerWarp = kTile / kWarps;
constexpr int kStripTiles = kStripKeys / kTile;
constexpr int kTileLanes = kTile / kLaneKeys;
constexpr unsigned kLaneFull = (1u << kLaneKeys) - 1;
// Wide loads in flight per thread: 8 x 16 bytes, in 32 registers.
constexpr int kInFlight = 8;
static_assert(kTileWords == 4, "the bits of a row of a tile are 16 bytes");
static_assert(kLaneKeys == kStripKeys / 32 && kStripTiles == 4, "a lane holds one 16-byte load, a warp row has four tiles");

template <bool kWideLoads, bool kBand>
struct PackTraits {
  static constexpr bool kWide = kWideLoads;
  static constexpr bool kHasBand = kBand;
};

// The lane's 16 keys as bits, from bytes of any stride: the warp reads 32 neighbouring keys at a time and votes. Lane 8
// t of wanted_lanes says whether tile t of the strip is read.
__device__ unsigned load_narrow(const uint8_t* row, int64_t stride_k, int first_key, int seqlen_k,
                                unsigned wanted_lanes, int lane) {
  unsigned lane_bits = 0;
#pragma unroll
  for (int word = 0; word < kStripKeys / kWord; ++word) {
    const int key = first_key + word * kWord + lane;
    const bool wanted = wanted_lanes >> word / kTileWords * kTileLanes & 1;  // the word lies in one tile
    const bool allowed = wanted && key < seqlen_k && row[key * stride_k] != 0;
    const unsigned voted = __ballot_sync(kAllLanes, allowed);
    if (lane / 2 == word) lane_bits = voted >> lane % 2 * kLaneKeys & kLaneFull;
  }
  return lane_bits;
}

// The results of a block outside the band; under causality that is half of all blocks.
__device__ void write_nothing(const PackMaskParams& p, int head, int tile_q, int strip) {
  const int64_t row_of_tiles = static_cast<int64_t>(head) * p.tiles_q + tile_q;
  uint4* const bits = reinterpret_cast<uint4*>(p.bits) + static_cast<int64_t>(head) * p.seqlen_q * p.tiles_k;
#pragma unroll
  for (int i = threadIdx.x; i < kTile * kStripTiles; i += kWarps * 32) {
    const int row = tile_q * kTile + i / kStripTiles, tile = strip * kStripTiles + i % kStripTiles;
    const int64_t place = static_cast<int64_t>(row) * p.tiles_k + tile;
    if (row < p.seqlen_q && tile < p.tiles_k) bits[place] = make_uint4(0, 0, 0, 0);
  }
  const int tile = strip * kStripTiles + threadIdx.x;
  if (threadIdx.x < kStripTiles && tile < p.tiles_k) p.classes[row_of_tiles * p.tiles_k + tile] = 0;
}

template <class Traits>
__global__ void __launch_bounds__(kWarps * 32) pack_mask_kernel(const __grid_constant__ PackMaskParams p) {
  griddep_wait();
  // Neighbouring blocks read neighbouring keys of the same rows.
  const int strip = blockIdx.x % p.strips;
  const int tile_q = blockIdx.x / p.strips % p.tiles_q;
  const int head = blockIdx.x / p.strips / p.tiles_q;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = tile_q * kTile, strip_key = strip * kStripKeys;
  const int lane_key = strip_key + lane * kLaneKeys;

  if (Traits::kHasBand &&
      (strip_key + (kStripKeys - 1) < first_row + p.low || strip_key > first_row + (kTile - 1) + p.high)) {
    return write_nothing(p, head, tile_q, strip);
  }

  // A tile outside the band is not read. All lanes of a tile agree.
  const int tile_key = strip_key + lane / kTileLanes * kTile;
  const bool reached = !Traits::kHasBand ||
                       (tile_key + (kTile - 1) >= first_row + p.low && tile_key <= first_row + (kTile - 1) + p.high);

  const uint8_t* mask = p.mask + head / p.num_heads * p.stride_b + head % p.num_heads * p.stride_h;
  const int words = p.tiles_k * kTileWords;
  const int word = lane_key / kWord;
  int32_t* bits = p.bits + static_cast<int64_t>(head) * p.seqlen_q * words;
  unsigned seen = 0, full = kLaneFull;

  auto finish_row = [&](int row, unsigned lane_bits) {
    if (Traits::kHasBand) {
      const int offset = row - lane_key;
      lane_bits &= ones_below(offset + p.high + 1) & ~ones_below(offset + p.low);
    }
    const unsigned upper = __shfl_down_sync(kAllLanes, lane_bits, 1);
    if (row < p.seqlen_q) {
      seen |= lane_bits;
      full &= lane_bits;
      if (lane % 2 == 0 && word < words) {
        bits[static_cast<int64_t>(row) * words + word] = static_cast<int32_t>(lane_bits | upper << kLaneKeys);
      }
    }
  };

  if constexpr (Traits::kWide) {
    const bool inside = reached && lane_key < p.seqlen_k;  // for all 16 keys: seqlen_k counts whole loads
#pragma unroll 1
    for (int start = 0; start < kRowsPerWarp; start += kInFlight) {
      uint4 keys[kInFlight];
#pragma unroll
      for (int n = 0; n < kInFlight; ++n) {
        const int row = first_row + (start + n) * kWarps + warp;
        keys[n] = make_uint4(0, 0, 0, 0);
        if (inside && row < p.seqlen_q) {
          keys[n] = *reinterpret_cast<const uint4*>(mask + row * p.stride_q + lane_key);
        }
      }
#pragma unroll
      for (int n = 0; n < kInFlight; ++n) finish_row(first_row + (start + n) * kWarps + warp, bits_of(keys[n]));
    }
  } else {
    const unsigned reached_lanes = __ballot_sync(kAllLanes, reached);
#pragma unroll 1
    for (int n = 0; n < kRowsPerWarp; ++n) {
      const int row = first_row + n * kWarps + warp;
      const unsigned wanted_lanes = row < p.seqlen_q ? reached_lanes : 0;
      finish_row(row, load_narrow(mask + row * p.stride_q, p.stride_k, strip_key, p.seqlen_k, wanted_lanes, lane));
    }
  }

  // Lanes 8 t to 8 t + 7 hold tile t of the strip, for the warp's rows.
  __shared__ unsigned seen_lanes[kWarps], full_lanes[kWarps];
  const unsigned any_seen = __ballot_sync(kAllLanes, seen != 0);
  const unsigned all_full = __ballot_sync(kAllLanes, full == kLaneFull);
  if (lane == 0) {
    seen_lanes[warp] = any_seen;
    full_lanes[warp] = all_full;
  }
  __syncthreads();  // the four threads below read what all warps wrote
  const int tile = strip * kStripTiles + threadIdx.x;
  if (threadIdx.x < kStripTiles && tile < p.tiles_k) {
    unsigned any = 0, all = kAllLanes;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      any |= seen_lanes[w];
      all &= full_lanes[w];
    }
    constexpr unsigned kLanes = (1u << kTileLanes) - 1;
    any = any >> threadIdx.x * kTileLanes & kLanes;
    all = all >> threadIdx.x * kTileLanes & kLanes;
    const int64_t row_of_tiles = static_cast<int64_t>(head) * p.tiles_q + tile_q;
    p.classes[row_of_tiles * p.tiles_k + tile] = any == 0 ? 0 : all == kLanes ? 2 : 1;
  }
}

}  // namespace

cudaError_t launch_pack_mask(const PackMaskParams& params, unsigned blocks, bool wide, bool has_band,
                             cudaStream_t stream) {
  return with_bool(wide, [&](auto wide_) {
    return with_bool(has_band, [&](auto band_) {
      using Traits = PackTraits<decltype(wide_)::value, decltype(band_)::value>;
      return KernelLaunch(blocks, kWarps * 32, stream).run(pack_mask_kernel<Traits>, params);
    });
  });
}

}  // namespace flash_dmattn
