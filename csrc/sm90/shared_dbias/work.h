// What a block works on: a tile of one head of dbias, and the heads of attention that are summed there.
#pragma once

#include "../operands.h"

namespace flash_dmattn {

// Tiles of this many rows and about twice as many columns are at work at a time: they share q, dout, k and v in L2.
constexpr int kRowsOfTiles = 8;

struct DbiasWork {
  int batch, first_head;  // the first of those that are summed
  int64_t owner;          // the head of dbias, counted over its batch entries
  int block_q, block_k;   // may lie beyond the last, in a patch that is not whole
};

// That of a block in the cluster that has the patch `index`.
template <class Traits>
__device__ __forceinline__ DbiasWork dbias_work_at(const SharedDbiasParams& p, int index, int rank) {
  constexpr int kRows = kRowsOfTiles / Traits::kPatch.q;
  const int patches = p.patches_q * p.patches_k;
  DbiasWork work;
  const int owner = index / patches;
  work.owner = owner;
  work.batch = owner / p.dbias_heads;
  work.first_head = (owner - work.batch * p.dbias_heads) * p.heads_per_dbias;
  const int place = index - owner * patches, band = place / (kRows * p.patches_k);
  const int first = band * kRows, rows = min(kRows, p.patches_q - first);
  const int place_of_band = place - first * p.patches_k, column = place_of_band / rows;
  work.block_q = (first + place_of_band - column * rows) * Traits::kPatch.q + rank / Traits::kPatch.k;
  work.block_k = column * Traits::kPatch.k + rank % Traits::kPatch.k;
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
  if (block_q >= p.tiles_q || block_k >= p.tiles_k) return TileClass::kEmpty;
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
  // The heads of which some tile of the patch is not empty, and those of which something of this tile is forbidden.
  uint32_t visited, edges;
};

}  // namespace flash_dmattn
