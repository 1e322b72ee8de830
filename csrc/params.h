// Arguments that kernels of several folders take. A folder's own are in its params.h.
#pragma once

#include <cstdint>

#include <vector_types.h>

#include "tile.h"

namespace flash_dmattn {

// Shapes: B batch, Lq / Lk query and key lengths, Hq / Hk query and key-value heads, D / Dv head dims of q, k and of v.
// Hm heads of a mask, Bm its batch entries. Tq / Tk = ceil(Lq / 128), ceil(Lk / 128). Sizes and counts fit int32; every
// offset is 64 bits.

// The sizes of a call: the base of the arguments of attention kernels. Kernels load two neighbours at a time, so
// another order of these and of what follows them is other machine code.
struct AttentionSizes {
  int batch, num_heads, seqlen_q, seqlen_k, head_dim_v;
  int heads_per_group;  // Hq / Hk
};

// Rows (B, L, H, D) of q, k, v or dout. Strides count elements.
struct Rows {
  const void* data;
  int64_t stride_b, stride_l, stride_h;
};

// One fp32 value per query, (B, H, Lq).
struct RowValues {
  const float* data;
  int64_t stride_b, stride_h, stride_q;
};

enum class BiasDtype { kFloat32, kFloat16, kBFloat16 };

// A bias (B, H, Lq, Lk). Strides count elements of its dtype; 0 where one value serves every index. Heads of q share
// one of the bias, heads_per_bias each; has_batch says whether batch entries have their own.
struct BiasValues {
  const void* data;  // null for no bias
  int64_t stride_b, stride_h, stride_q, stride_k;
  BiasDtype dtype;
  int heads_per_bias;
  bool has_batch;
};

// A bias by distance, whose values are the keys of a BiasValues: query i and key j read place origin + j - i. All places
// up to `lowest` have one value, and so have all from `highest` on: the first and the last, or 0 beyond the values.
struct Distances {
  int origin, number, lowest, highest;
};

// How a mask is read: not at all, as bits, or as the queries that see each key, [x, y) of its bounds.
enum class MaskForm { kNone, kTiles, kIntervals };

// Which mask a head reads: heads_per_mask heads share one of mask_heads; has_batch says whether batch entries have
// their own.
struct MaskHeads {
  int heads_per_mask, mask_heads;
  bool has_batch;
};

// A mask by tiles of 128 queries and 128 keys.
struct MaskTiles {
  const int32_t* bits;   // (Bm, Hm, Lq, 4 Tk), for MaskForm::kTiles
  const int2* bounds;    // (Bm, Hm, 128 Tk), for MaskForm::kIntervals
  // Lists of rows (Bm, Hm, Tq, 2 + Tk), or lists of columns (Bm, Hm, Tk, 2 + Tq): see sm90/mask/list.cu.
  const int32_t* lists;
  MaskHeads heads;
};

// An order of keys: which key stands at each place, live keys first. Key heads share the order of their mask.
struct PlacesOfKeys {
  const int32_t* order;  // (Bm, Hm, length); null where places are keys
  const int2* bounds;    // (Bm, Hm, 128 tiles)
  int length, tiles;
  MaskHeads heads;
};

// Dropout of probabilities: flash_dmattn/reference/dropout.py says which are kept.
struct DropoutParams {
  const int64_t* key;  // (2), of a part of a call (4); null for none
  uint32_t threshold;  // a probability is kept if its random word is at least this
  float scale;         // and is then multiplied by this
};

}  // namespace flash_dmattn
