// For kernels that pack masks: bools as bits, lists of tiles, and rows in an order of keys.
#pragma once

#include <cstdint>

#include "../operands.h"

namespace flash_dmattn {

constexpr unsigned kAllLanes = 0xffffffffu;
// Keys that a lane holds as bits: one load of 16 bytes.
constexpr int kLaneKeys = 16;

// Bit k of the result says whether byte k is not 0. The sum sets bit 7 of a byte if any lower bit is set. The product
// moves bit 7 of byte k to bit 28 + k, and no two partial products meet.
__device__ __forceinline__ unsigned nibble(unsigned four) {
  const unsigned nonzero = (((four & 0x7f7f7f7fu) + 0x7f7f7f7fu) | four) & 0x80808080u;
  return (nonzero * 0x00204081u) >> 28;
}

__device__ __forceinline__ unsigned bits_of(const uint4& keys) {
  return nibble(keys.x) | nibble(keys.y) << 4 | nibble(keys.z) << 8 | nibble(keys.w) << 12;
}

// The n lowest bits of a lane, for any n.
__device__ __forceinline__ unsigned ones_below(int n) { return (1u << min(max(n, 0), kLaneKeys)) - 1; }

constexpr int kPartial = 1, kFull = 2;

// How many full and partial tiles a list has so far.
struct Count {
  int full = 0, partial = 0;
};

// Adds 32 tiles, one of each lane. Lanes beyond the end hold a class that is none of the three.
__device__ __forceinline__ void count_tiles(int kind, Count& count) {
  count.full += __popc(__ballot_sync(kAllLanes, kind == kFull));
  count.partial += __popc(__ballot_sync(kAllLanes, kind == kPartial));
}

// Writes the indices of 32 tiles from `start` on after the tiles that `placed` counts, and counts them too.
__device__ __forceinline__ void place_tiles(int kind, int start, int length, const Count& all, Count& placed,
                                            int32_t* indices) {
  const int lane = threadIdx.x % 32, tile = start + lane;
  const unsigned lanes_before = (1u << lane) - 1;
  const unsigned full_lanes = __ballot_sync(kAllLanes, kind == kFull);
  const unsigned partial_lanes = __ballot_sync(kAllLanes, kind == kPartial);
  const int full_before = placed.full + __popc(full_lanes & lanes_before);
  const int partial_before = placed.partial + __popc(partial_lanes & lanes_before);
  const int empty_before = tile - full_before - partial_before;
  const int place = kind == kFull      ? full_before
                    : kind == kPartial ? all.full + partial_before
                                       : all.full + all.partial + empty_before;
  if (tile < length) indices[place] = tile;
  placed.full += __popc(full_lanes);
  placed.partial += __popc(partial_lanes);
}

// A warp writes a list of `length` tiles, whose classes `class_of` has; it is asked twice for each.
template <class ClassOf>
__device__ __forceinline__ void write_list(int32_t* out, int length, const ClassOf& class_of) {
  const int lane = threadIdx.x % 32;
  const auto kind_of = [&](int tile) { return tile < length ? static_cast<int>(class_of(tile)) : -1; };
  Count all, placed;
  for (int start = 0; start < length; start += 32) count_tiles(kind_of(start + lane), all);
  if (lane == 0) {
    out[0] = all.full;
    out[1] = all.partial;
  }
  for (int start = 0; start < length; start += 32) {
    place_tiles(kind_of(start + lane), start, length, all, placed, out + 2);
  }
}

// A lane of 8 copies its chunks of 16 bytes of a row of k or v, or writes zeros.
__device__ __forceinline__ void copy_row(const GatherKeysParams::Tensor& rows, int64_t batch, int64_t key, int head,
                                         int64_t row, bool keeps, int lane) {
  const char* const from =
      static_cast<const char*>(rows.from) + batch * rows.stride_b + key * rows.stride_l + head * rows.stride_h;
  uint4* const to = static_cast<uint4*>(rows.to) + row * rows.chunks;
  for (int chunk = lane; chunk < rows.chunks; chunk += kGatherLanes) {
    to[chunk] = keeps ? reinterpret_cast<const uint4*>(from)[chunk] : make_uint4(0, 0, 0, 0);
  }
}

// The value of a bias per key, in fp32.
__device__ __forceinline__ float bias_at(const BiasValues& bias, int64_t batch, int head, int64_t key) {
  const int64_t from = batch * bias.stride_b + head / bias.heads_per_bias * bias.stride_h + key * bias.stride_k;
  if (bias.dtype == BiasDtype::kFloat32) return static_cast<const float*>(bias.data)[from];
  if (bias.dtype == BiasDtype::kFloat16) return __half2float(static_cast<const __half*>(bias.data)[from]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(bias.data)[from]);
}

}  // namespace flash_dmattn
