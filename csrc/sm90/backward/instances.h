// The abilities of the backward kernels of a pair of head dims. Includes no CUDA, no torch.
#pragma once

#include "../../tile.h"

namespace flash_dmattn {

// block_m: queries of a step. block_n: keys of a work tile, a mask tile or half of one. Without mask, softcap and a
// bias per key there are also kernels with block_n of two mask tiles.
constexpr int backward_block_m(int head_dim, int head_dim_v, int keys) {
  return head_dim <= 64 && head_dim_v <= 64 && keys <= kTile ? 128 : 64;
}
// Long walks, without mask, softcap, dropout and a bias per key or score, take steps of 80 queries, which read shared
// memory less often. dq is turned there: its columns are the rows of the product.
constexpr int kTurnedBlockM = 80;
constexpr int kLeastTurnedWalk = 4096;  // queries; in shorter walks steps of 64 are faster
constexpr bool has_turned_dq(int head_dim, int head_dim_v) {
  return head_dim == head_dim_v && (head_dim == 96 || head_dim == 128);
}
constexpr bool has_two_key_tiles(int head_dim, int head_dim_v) { return head_dim <= 64 && head_dim_v <= 64; }
constexpr int backward_block_n(int head_dim, int head_dim_v) {
  return head_dim <= 128 && head_dim_v <= 128 ? kTile : 64;
}
// Whether there is a kernel with block_n of a whole mask tile besides those with half of one. It has no mask, softcap or
// bias per key or score. Half as much of q and dout is read then, and half as much is added to dq.
constexpr bool has_whole_tile(int head_dim, int head_dim_v) { return head_dim == 192 && head_dim_v == 128; }

// Whether there are `kTileStore` kernels. Where there are none the shared_dbias kernel stores every dbias.
constexpr bool backward_stores_dbias(int head_dim, int head_dim_v, bool has_softcap) {
  return !has_softcap || (head_dim <= 128 && head_dim_v <= 128);
}

// Whether there are kernels with dropout, in every pass: at the head dim of the models that have it.
constexpr bool has_dropout_kernels(int head_dim, int head_dim_v) { return head_dim == 64 && head_dim_v == 64; }

// Whether there are `kTileSum` kernels.
constexpr bool backward_sums_dbias(int head_dim, int head_dim_v, bool has_softcap) {
  return head_dim <= 128 && head_dim_v <= 128 && !has_softcap;
}

}  // namespace flash_dmattn
