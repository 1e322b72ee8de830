// The tile scheduler: decodes the number of a work tile to a tile of a head of dbias, and to the attention heads that
// it sums.
#pragma once

#include "../operands.h"

namespace flash_dmattn {

// Tiles are visited in bands of so many rows of tiles, so that those running at the same time share operands in L2.
constexpr int kRowsOfTiles = 8;

struct DbiasWorkTile {
  int batch, first_head;  // the first attention head that is summed into the tile of dbias
  int64_t owner;          // the head of dbias, counted over its batch entries
  int chunk;              // which share of the summed heads this work tile has
  int block_q, block_k;   // of a diagonal the first tile
};

template <class Traits>
__device__ __forceinline__ DbiasWorkTile decode_dbias_work_tile(const SharedDbiasParams& p, int index) {
  const int tiles = Traits::kSumsDiagonals ? p.diagonals : p.tiles_q * p.tiles_k;
  DbiasWorkTile work;
  // Chunk by chunk, so that blocks at work at the same time read the same heads.
  work.chunk = index / p.dbias_tiles;
  index -= work.chunk * p.dbias_tiles;
  const int owner = index / tiles;
  work.owner = owner;
  work.batch = owner / p.dbias_heads;
  work.first_head = (owner - work.batch * p.dbias_heads) * p.heads_per_dbias;
  if constexpr (Traits::kSumsDiagonals) {
    const int diagonal = p.first_diagonal + index - owner * tiles;
    work.block_q = max(-diagonal, 0);
    work.block_k = work.block_q + diagonal;
    return work;
  }
  const int position = index - owner * tiles, band = position / (kRowsOfTiles * p.tiles_k);
  const int first = band * kRowsOfTiles, rows = min(kRowsOfTiles, p.tiles_q - first);
  const int position_of_band = position - first * p.tiles_k;
  work.block_k = position_of_band / rows;
  work.block_q = first + position_of_band - work.block_k * rows;
  return work;
}

// The tiles of a diagonal.
__device__ __forceinline__ int tiles_of_diagonal(const SharedDbiasParams& p, const DbiasWorkTile& work) {
  return min(p.tiles_q - work.block_q, p.tiles_k - work.block_k);
}

// Where a chunk starts among the heads that are summed, or among all tiles of a diagonal. The first chunks are longer by
// one.
template <class Traits>
__device__ __forceinline__ int start_of_chunk(const SharedDbiasParams& p, const DbiasWorkTile& work, int chunk) {
  const int all = Traits::kSumsDiagonals ? p.heads_summed * tiles_of_diagonal(p, work) : p.heads_summed;
  const int heads = all / p.chunks;
  return chunk * heads + min(chunk, all - heads * p.chunks);
}

// One attention head, of a batch entry or of a sequence.
template <bool kHasSequences>
struct Head : OfSequence<kHasSequences> {
  int batch, head;
};

template <bool kHasSequences>
__device__ __forceinline__ Head<kHasSequences> summed_head(const SharedDbiasParams& p, const DbiasWorkTile& work,
                                                           int position) {
  const int entry = position / p.heads_per_dbias;
  Head<kHasSequences> head;
  head.batch = work.batch + entry;
  head.head = work.first_head + position - entry * p.heads_per_dbias;
  if constexpr (kHasSequences) head.sequence = load_sequence(p.sequences, head.batch);
  return head;
}

// A tile of scores, and the head that it is of.
template <bool kHasSequences>
struct SummedTile {
  DbiasWorkTile work;
  Head<kHasSequences> head;
};

// Diagonals are summed head by head.
template <class Traits>
__device__ __forceinline__ SummedTile<Traits::kHasSequences> summed_tile(const SharedDbiasParams& p,
                                                                         const DbiasWorkTile& work, int position) {
  if constexpr (Traits::kSumsDiagonals) {
    const int tiles = tiles_of_diagonal(p, work), head = position / tiles;
    SummedTile<false> tile{work, summed_head<false>(p, work, head)};
    tile.work.block_q += position - head * tiles;
    tile.work.block_k += position - head * tiles;
    return tile;
  } else {
    return {work, summed_head<Traits::kHasSequences>(p, work, position)};
  }
}

enum class TileClass { kEmpty, kPartial, kFull };

// Whether the ascending entries [from, to) of a list contain the index.
__device__ __forceinline__ bool list_has(const int32_t* list, int from, int to, int index) {
  const int end = to;
  while (from < to) {
    const int middle = (from + to) / 2;
    if (list[middle] < index) {
      from = middle + 1;
    } else {
      to = middle;
    }
  }
  return from < end && list[from] == index;
}

// The class of a tile for one head, by the mask or the band.
template <class Traits>
__device__ __forceinline__ TileClass class_of(const SharedDbiasParams& p,
                                              const SummedTile<Traits::kHasSequences>& tile) {
  const int block_q = tile.work.block_q, block_k = tile.work.block_k;
  const Head<Traits::kHasSequences>& head = tile.head;
  if constexpr (Traits::kHasMask) {
    const int32_t* list = list_of(p.mask.lists, mask_of(p.mask.heads, head), p.tiles_q, block_q, p.tiles_k);
    const int num_full = list[0], num_partial = list[1];
    if (list_has(list + 2, 0, num_full, block_k)) return TileClass::kFull;
    const bool is_partial = list_has(list + 2, num_full, num_full + num_partial, block_k);
    return is_partial ? TileClass::kPartial : TileClass::kEmpty;
  } else {
    const int first_query = block_q * kTile, first_key = block_k * kTile;
    const Extent of = extent_of(p, head);
    const int least = first_key - (min(first_query + kTile, of.seqlen_q) - 1);
    const int most = min(first_key + kTile, of.seqlen_k) - 1 - first_query;
    if (most < of.low || least > of.high) return TileClass::kEmpty;
    bool is_full = least >= of.low && most <= of.high;
    // Along diagonals keys beyond the last would add to the sums of others. A mask has no full tile there.
    if constexpr (Traits::kSumsDiagonals) is_full = is_full && first_key + kTile <= of.seqlen_k;
    if constexpr (Traits::kHasSequences) {
      if (first_query >= of.seqlen_q || first_key >= of.seqlen_k) return TileClass::kEmpty;
      // After the last query and the last key of a sequence dbias has values of other sequences.
      is_full = is_full && first_query + kTile <= of.seqlen_q && first_key + kTile <= of.seqlen_k;
    }
    return is_full ? TileClass::kFull : TileClass::kPartial;
  }
}

// One bit for each head of an item.
constexpr int kHeadsOfItem = 32;

// A work tile and up to 32 of its heads, as the producer hands it to the consumers.
struct DbiasWorkItem {
  bool is_valid;           // false after the last
  bool is_first, is_last;  // of the tile's items
  bool takes_bias, frees_bias;
  DbiasWorkTile work;
  int first_index;  // the first of these heads, counted over all heads that are summed into the tile of dbias
  // A bit for each head to visit, because its tile is not empty; and a bit for each head that needs masking, too.
  uint32_t visited, partial;
};

}  // namespace flash_dmattn
