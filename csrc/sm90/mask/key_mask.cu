// The kernel of masks with one row for all queries: one launch from bools to an interval mask, and k, v and a bias per key
// in its order. It also makes the lists of tiles of a mask of all keys whose blocks are listed.
//
// Each block reads the whole row of its mask and counts it, so that no block waits for another. A key is seen by the
// queries that the band leaves to it, from `start` to `stop`, which both grow with the key. So the keys that some query
// of a tile sees are a run of keys, and so are the keys that all of its queries see. How many kept keys a run has, is
// the difference of two ranks, and so is the class of a tile.
#include <algorithm>

#include "../../api/integers.h"
#include "../kernel_launch.h"
#include "mask.h"
#include "pack_ops.h"

namespace flash_dmattn {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kStripTiles = kStripKeys / kTile;
constexpr int kMostTiles = kMostMaskKeys / kTile;
static_assert(kTileWords == 4 && kStripKeys == 32 * kLaneKeys, "a warp reads a strip, the bits of a tile are 16 bytes");

// The n lowest bits of a word, for any n.
__device__ __forceinline__ unsigned word_below(int n) { return n >= kWord ? kAllLanes : (1u << max(n, 0)) - 1; }

// Where the lowest bit is that has `index` bits of the word below it.
__device__ __forceinline__ int place_of_bit(unsigned word, int index) {
  int place = 0;
#pragma unroll
  for (int half = kWord / 2; half > 0; half /= 2) {
    const int below = __popc(word & ((1u << half) - 1));
    if (index < below) continue;
    index -= below;
    word >>= half;
    place += half;
  }
  return place;
}

// The live keys of a mask in shared memory: kept, and seen by a query.
struct LiveKeys {
  const unsigned* words;  // (Tk, 4), bits of keys
  const int* before;      // (Tk + 1), how many live keys are before each tile
  int tiles;

  __device__ __forceinline__ int number() const { return before[tiles]; }
  __device__ __forceinline__ bool has(int key) const { return words[key / kWord] >> key % kWord & 1; }

  // How many live keys are below a key.
  __device__ __forceinline__ int rank(int key) const {
    const int tile = key / kTile, rest = key % kTile;
    int number = before[tile];
    if (rest == 0) return number;  // perhaps behind the last tile
#pragma unroll
    for (int w = 0; w < kTileWords; ++w) {
      number += __popc(words[tile * kTileWords + w] & word_below(rest - w * kWord));
    }
    return number;
  }

  // The key at a place of the order. It has a place for each key: live keys first, both parts ascending.
  __device__ __forceinline__ int key_at(int place) const {
    const bool is_live = place < number();
    int index = is_live ? place : place - number();
    const auto number_before = [&](int tile) { return is_live ? before[tile] : tile * kTile - before[tile]; };
    int tile = 0;  // the last one with at most `index` such keys before it
    for (int end = tiles; end - tile > 1;) {
      const int middle = (tile + end) / 2;
      if (number_before(middle) <= index) {
        tile = middle;
      } else {
        end = middle;
      }
    }
    index -= number_before(tile);
#pragma unroll
    for (int w = 0; w < kTileWords; ++w) {
      const unsigned bits = words[tile * kTileWords + w], word = is_live ? bits : ~bits;
      const int inside = __popc(word);
      if (index < inside) return tile * kTile + w * kWord + place_of_bit(word, index);
      index -= inside;
    }
    return 0;  // not reached
  }
};

// The lane's 16 keys as bits.
__device__ __forceinline__ unsigned load_keys(const KeyMaskParams& p, const uint8_t* row, int first_key, int lane) {
  const int lane_key = first_key + lane * kLaneKeys;
  if (p.mask == nullptr) return ones_below(p.seqlen_k - lane_key);
  if (p.is_wide) {
    return lane_key < p.seqlen_k ? bits_of(*reinterpret_cast<const uint4*>(row + lane_key)) : 0;
  }
  unsigned bits = 0;
#pragma unroll
  for (int word = 0; word < kStripKeys / kWord; ++word) {
    const int key = first_key + word * kWord + lane;
    const unsigned voted = __ballot_sync(kAllLanes, key < p.seqlen_k && row[key * p.stride_k] != 0);
    if (lane / 2 == word) bits = voted >> lane % 2 * kLaneKeys & 0xffffu;
  }
  return bits;
}

// Reads the row of a mask, and counts its live keys.
__device__ __forceinline__ LiveKeys read_row(const KeyMaskParams& p, const uint8_t* row, unsigned* words, int* before) {
  __shared__ int warp_ends[kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int strips = (p.tiles_k + kStripTiles - 1) / kStripTiles;
#pragma unroll 4
  for (int strip = warp; strip < strips; strip += kWarps) {
    const int lane_key = strip * kStripKeys + lane * kLaneKeys;
    const unsigned seen = ones_below(p.end_of_seen - lane_key) & ~ones_below(p.first_seen - lane_key);
    const unsigned bits = load_keys(p, row, strip * kStripKeys, lane) & seen;
    const unsigned upper = __shfl_down_sync(kAllLanes, bits, 1);
    if (lane % 2 == 0 && lane_key / kTile < p.tiles_k) words[lane_key / kWord] = bits | upper << kLaneKeys;
  }
  __syncthreads();
  // A thread counts the same number of tiles as any other, one after the other.
  const int each = (p.tiles_k + kThreads - 1) / kThreads;
  const int first = min(static_cast<int>(threadIdx.x) * each, p.tiles_k), end = min(first + each, p.tiles_k);
  const auto live_of = [&](int tile) {
    int number = 0;
#pragma unroll
    for (int w = 0; w < kTileWords; ++w) number += __popc(words[tile * kTileWords + w]);
    return number;
  };
  int number = 0;
  for (int tile = first; tile < end; ++tile) number += live_of(tile);
  int up_to = number;  // of the threads of the warp up to this one
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(kAllLanes, up_to, distance);
    if (lane >= distance) up_to += other;
  }
  if (lane == 31) warp_ends[warp] = up_to;
  __syncthreads();
  int sum = up_to - number;
  for (int w = 0; w < warp; ++w) sum += warp_ends[w];
  for (int tile = first; tile < end; ++tile) {
    before[tile] = sum;
    sum += live_of(tile);
  }
  if (threadIdx.x == kThreads - 1) before[p.tiles_k] = sum;
  __syncthreads();
  return {words, before, p.tiles_k};
}

// Whether the block of a tile is in the list of its queries.
__device__ __forceinline__ bool is_listed(const KeyMaskParams& p, int mask, int tile_q, int tile_k) {
  if (p.blocks_listed == nullptr) return true;
  const int64_t row = static_cast<int64_t>(mask) * p.num_lists + tile_q / p.block_tiles_q;
  const int32_t* const list = p.blocks_listed + row * p.list_size;
  const unsigned block = tile_k / p.block_tiles_k;
  int first = 0;  // the first entry that is not below the block; -1 is the largest unsigned number
  for (int end = p.list_size; first < end;) {
    const int middle = (first + end) / 2;
    if (static_cast<unsigned>(list[middle]) < block) {
      first = middle + 1;
    } else {
      end = middle;
    }
  }
  return first < p.list_size && static_cast<unsigned>(list[first]) == block;
}

// The class of a tile of places.
__device__ __forceinline__ int class_of(const KeyMaskParams& p, const LiveKeys& live, int mask, int tile_q, int tile_k) {
  if (!is_listed(p, mask, tile_q, tile_k)) return 0;
  const int first_row = tile_q * kTile, end_row = min(first_row + kTile, p.seqlen_q);
  const int first = tile_k * kTile, end = min(first + kTile, p.seqlen_k);
  const auto within = [&](int key, int from, int to) { return min(max(key, from), to); };
  // Some query of the tile sees the keys of one run, and all queries see the keys of another run.
  const int some_from = first_row + p.low, some_to = end_row + p.high;
  const int all_from = end_row - 1 + p.low, all_to = first_row + p.high + 1;
  if (p.order == nullptr) {
    if (live.rank(within(some_to, first, end)) <= live.rank(within(some_from, first, end))) return 0;
    const bool has_all = live.before[tile_k + 1] - live.before[tile_k] == kTile;
    return has_all && all_from <= first && all_to >= first + kTile ? kFull : kPartial;
  }
  const auto rank = [&](int key) { return live.rank(within(key, 0, p.seqlen_k)); };
  if (min(rank(some_to), end) <= max(rank(some_from), first)) return 0;
  return rank(all_from) <= first && rank(all_to) >= first + kTile ? kFull : kPartial;
}

__device__ __forceinline__ int2 rows_of(const KeyMaskParams& p, int key, bool is_live) {
  return is_live ? make_int2(max(key - p.high, 0), min(key - p.low + 1, p.seqlen_q)) : make_int2(0, 0);
}

// Rows of k and v by place, as far as tiles have live keys; see gather_keys_kernel in intervals.cu.
__device__ __forceinline__ void place_keys(const KeyMaskParams& p, const LiveKeys& live, int mask, int block) {
  const int batches = p.has_batch ? 1 : p.batch, heads = p.num_heads_k / p.num_heads;
  const int first_batch = p.has_batch ? mask / p.num_heads : 0, first_head = mask % p.num_heads * heads;
  const int places = min((live.number() + kTile - 1) / kTile * kTile, p.seqlen_k);
  constexpr int kGroups = kThreads / kGatherLanes;
  const int lane = threadIdx.x % kGatherLanes;
  for (int64_t at = block * kGroups + threadIdx.x / kGatherLanes; at < static_cast<int64_t>(batches) * places * heads;
       at += p.blocks * kGroups) {
    const int64_t batch_place = at / heads, batch = first_batch + batch_place / places;
    const int head = first_head + static_cast<int>(at % heads), place = static_cast<int>(batch_place % places);
    const int64_t row = (batch * p.seqlen_k + place) * p.num_heads_k + head;
    const int key = live.key_at(place);
#pragma unroll
    for (const GatherKeysParams::Tensor* rows : {&p.k, &p.v}) {
      copy_row(*rows, batch, key, head, row, place < live.number(), lane);
    }
  }
}

// A bias per key by place, in fp32; see intervals.cu.
__device__ __forceinline__ void place_bias(const KeyMaskParams& p, const LiveKeys& live, int mask, int block) {
  const int batches = p.has_batch ? 1 : p.bias_batch, heads = p.bias_heads / p.num_heads;
  const int first_batch = p.has_batch ? mask / p.num_heads : 0, first_head = mask % p.num_heads * heads;
  for (int64_t at = block * kThreads + threadIdx.x; at < static_cast<int64_t>(batches) * heads * p.seqlen_k;
       at += p.blocks * kThreads) {
    const int64_t pair = at / p.seqlen_k, batch = first_batch + pair / heads;
    const int head = first_head + static_cast<int>(pair % heads), place = static_cast<int>(at % p.seqlen_k);
    p.placed_bias[(batch * p.bias_heads + head) * p.seqlen_k + place] =
        bias_at(p.bias, batch, head, live.key_at(place));
  }
}

__global__ void __launch_bounds__(kThreads) key_mask_kernel(const __grid_constant__ KeyMaskParams p) {
  __shared__ unsigned words[kMostTiles * kTileWords];
  __shared__ int before[kMostTiles + 1];
  griddep_wait();
  const int mask = blockIdx.x / p.blocks, block = blockIdx.x % p.blocks;
  const uint8_t* const row = p.mask + mask / p.num_heads * p.stride_b + mask % p.num_heads * p.stride_h;
  const LiveKeys live = read_row(p, row, words, before);

  const int64_t first_key = static_cast<int64_t>(mask) * p.seqlen_k;
  for (int place = block * kThreads + threadIdx.x; place < p.tiles_k * kTile; place += p.blocks * kThreads) {
    int key = place;
    bool is_live = live.has(place);
    if (place < p.seqlen_k) {
      const int2 seen_by = rows_of(p, place, is_live);
      p.start[first_key + place] = seen_by.x;
      p.stop[first_key + place] = seen_by.y;
      if (p.order != nullptr) {
        key = live.key_at(place);
        p.order[first_key + place] = key;
        is_live = place < live.number();
      }
    }
    p.bounds[static_cast<int64_t>(mask) * p.tiles_k * kTile + place] = rows_of(p, key, is_live);
  }
  for (int line = block * kWarps + threadIdx.x / 32; line < p.tiles_q + p.tiles_k; line += p.blocks * kWarps) {
    if (line < p.tiles_q) {
      write_list(list_of(p.row_lists, mask, p.tiles_q, line, p.tiles_k), p.tiles_k,
                 [&](int tile_k) { return class_of(p, live, mask, line, tile_k); });
    } else {
      const int tile_k = line - p.tiles_q;
      write_list(list_of(p.col_lists, mask, p.tiles_k, tile_k, p.tiles_q), p.tiles_q,
                 [&](int tile_q) { return class_of(p, live, mask, tile_q, tile_k); });
    }
  }
  if (mask == 0) {  // numbers of threads of all masks may exceed int32
    for (int i = block * kThreads + threadIdx.x; i < p.num_counters; i += p.blocks * kThreads) p.counters[i] = 0;
  }
  if (p.k.to != nullptr) place_keys(p, live, mask, block);
  if (p.placed_bias != nullptr) place_bias(p, live, mask, block);
}

}  // namespace

cudaError_t launch_key_mask(KeyMaskParams params, int64_t heads, cudaStream_t stream) {
  const int64_t lines = ceil_div(params.tiles_q + params.tiles_k, kWarps), places = params.tiles_k;
  const int64_t rows = params.k.to == nullptr ? 0 : int64_t{params.batch} * params.seqlen_k * params.num_heads_k / heads;
  const int64_t most = std::min(kMostBlocksOfMask, kMaxInt / heads);
  params.blocks = static_cast<int>(std::clamp<int64_t>(std::max({lines, places, rows / kThreads}), 1, most));
  return KernelLaunch(heads * params.blocks, kThreads, stream).run(key_mask_kernel, params);
}

}  // namespace flash_dmattn
