// What a block works on: a tile of one head of dbias, and the heads of attention that are summed there.
#pragma once

#include "../operands.h"

namespace flash_dmattn {

// Tiles of this many rows and about twice as many columns are at work at a time: they share q, dout, k and v in L2.
constexpr int kRowsOfTiles = 8;

struct DbiasWork {
  int batch, first_head;  // the first of those that are summed
  int64_t owner;          // the head of dbias, counted over its batch entries
  int block_q, block_k;
};

__device__ __forceinline__ DbiasWork dbias_work_at(const SharedDbiasParams& p, int index) {
  const int tiles = p.tiles_q * p.tiles_k;
  DbiasWork work;
  const int owner = index / tiles;
  work.owner = owner;
  work.batch = owner / p.dbias_heads;
  work.first_head = (owner - work.batch * p.dbias_heads) * p.heads_per_dbias;
  const int place = index - owner * tiles, band = place / (kRowsOfTiles * p.tiles_k);
  const int first = band * kRowsOfTiles, rows = min(kRowsOfTiles, p.tiles_q - first);
  const int place_of_band = place - first * p.tiles_k;
  work.block_k = place_of_band / rows;
  work.block_q = first + place_of_band - work.block_k * rows;
  return work;
}

// One head of attention.
struct Head {
  int batch, head;
};

__device__ __forceinline__ Head summed_head(const SharedDbiasParams& p, const DbiasWork& work, int place) {
  const int entry = place / p.heads_per_dbias;
  return {work.batch + entry, work.first_head + place - entry * p.heads_per_dbias};
}

enum class TileClass { kEmpty, kPartial, kFull };

// Whether an ascending part of a list has the index.
__device__ __forceinline__ bool list_has(const int32_t* list, int from, int to, int index) {
  const int end = to;
  while (from < to) {
    const int middle = (from + to) / 2;
    if (__ldg(list + middle) < index) {
      from = middle + 1;
    } else {
      to = middle;
    }
  }
  return from < end && __ldg(list + from) == index;
}

// What the mask, or the band, leaves of a tile for one head.
template <class Traits>
__device__ __forceinline__ TileClass class_of(const SharedDbiasParams& p, int block_q, int block_k, const Head& head) {
  if constexpr (Traits::kHasMask) {
    const int32_t* list = p.mask_lists + (mask_of(p, head) * p.tiles_q + block_q) * (2 + p.tiles_k);
    const int num_full = __ldg(list), num_partial = __ldg(list + 1);
    if (list_has(list + 2, 0, num_full, block_k)) return TileClass::kFull;
    const bool is_partial = list_has(list + 2, num_full, num_full + num_partial, block_k);
    return is_partial ? TileClass::kPartial : TileClass::kEmpty;
  } else {
    const int first_query = block_q * kTile, first_key = block_k * kTile;
    const int least = first_key - (min(first_query + kTile, p.seqlen_q) - 1);
    const int most = min(first_key + kTile, p.seqlen_k) - 1 - first_query;
    if (most < p.low || least > p.high) return TileClass::kEmpty;
    return least >= p.low && most <= p.high ? TileClass::kFull : TileClass::kPartial;
  }
}

// Heads of an item: a bit each.
constexpr int kHeadsOfItem = 32;

// What the warp that hands out work tells the others: a tile, and up to 32 heads.
struct DbiasItem {
  bool exists;             // false after the last
  bool is_first, is_last;  // of those of the tile
  bool takes_bias, frees_bias;
  DbiasWork work;
  int first_place;          // of the first head among those that are summed
  // The heads of which something of the tile is allowed, and those of them of which something is forbidden.
  uint32_t visited, edges;
};

}  // namespace flash_dmattn
