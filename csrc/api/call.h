// The sizes, the band, the mask and the bias of a call, for both passes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <vector>

#include <torch/csrc/stable/tensor.h>

#include "../sm90/forward/params.h"
#include "../sm90/backward/instances.h"
#include "common.h"

namespace flash_dmattn {

struct Sizes {
  int64_t batch, seqlen_q, seqlen_k, num_heads, num_heads_k, head_dim, head_dim_v;
};

// The sizes of q (B, Lq, Hq, D), k and v, checked to be within what the kernels can count. Pages are no entries of q.
inline Sizes sizes_of(const char* op, const torch::stable::Tensor& q, const torch::stable::Tensor& k,
                      const torch::stable::Tensor& v, bool has_pages = false) {
  CHECK_FOR(op, q.is_cuda(), "q is not on a CUDA device; the kernel is written for sm_90a");
  CHECK_FOR(op, q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "q, k and v have ", q.dim(), ", ", k.dim(), " and ",
            v.dim(), " dims; they need 4");
  check_dims(op, k, "k", {has_pages ? k.size(0) : q.size(0), k.size(1), divisor_of(q.size(2)), q.size(3)}, q);
  check_dims(op, v, "v", {k.size(0), k.size(1), k.size(2), v.size(3)}, q);
  check_dtype(op, k, "k", q.scalar_type());
  check_dtype(op, v, "v", q.scalar_type());
  const Sizes sizes{q.size(0), q.size(1), k.size(1), q.size(2), k.size(2), q.size(3), v.size(3)};
  CHECK_FOR(op, sizes.seqlen_q > 0 && sizes.seqlen_k > 0 && sizes.batch * sizes.num_heads > 0,
            "there is nothing to attend");
  // The kernels add rows, keys and band limits in int32.
  CHECK_FOR(op, sizes.seqlen_q + sizes.seqlen_k <= kMaxInt / 2, "there are ", sizes.seqlen_q, " queries and ",
            sizes.seqlen_k, " keys; together they may be 2^30 - 1");
  CHECK_FOR(op, sizes.head_dim % 8 == 0 && sizes.head_dim_v % 8 == 0, "head dims are ", sizes.head_dim, " and ",
            sizes.head_dim_v, " (v); they need to be multiples of 8");
  return sizes;
}

// The first kernel instance that holds the head dims of the call, which is the smallest. An error says what it has to
// serve: `served`.
template <class Instance>
const Instance& instance_for(const char* op, std::initializer_list<Instance> instances, const char* served,
                             torch::headeronly::ScalarType dtype, const Sizes& sizes) {
  for (const Instance& it : instances) {
    if (it.dtype == dtype && sizes.head_dim <= it.head_dim && sizes.head_dim_v <= it.head_dim_v) return it;
  }
  CHECK_FOR(op, false, "the extension was not built for ", served, "head dims ", sizes.head_dim, " and ",
            sizes.head_dim_v, " (v) of this dtype");
}

inline void set_sizes(const Sizes& sizes, AttentionSizes& params) {
  params.batch = static_cast<int>(sizes.batch);
  params.num_heads = static_cast<int>(sizes.num_heads);
  params.seqlen_q = static_cast<int>(sizes.seqlen_q);
  params.seqlen_k = static_cast<int>(sizes.seqlen_k);
  params.head_dim_v = static_cast<int>(sizes.head_dim_v);
  params.heads_per_group = static_cast<int>(sizes.num_heads / sizes.num_heads_k);
}

// Limits beyond the last diagonal are clamped to just past it.
template <class Params>
void set_band(const Sizes& sizes, int64_t low, int64_t high, Params& params) {
  params.low = static_cast<int>(std::clamp(low, -sizes.seqlen_q, sizes.seqlen_k));
  params.high = static_cast<int>(std::clamp(high, -sizes.seqlen_q, sizes.seqlen_k));
}

// Whether the band forbids anything.
inline bool has_band(const Sizes& sizes, int64_t low, int64_t high) {
  return low > -sizes.seqlen_q || high < sizes.seqlen_k;
}

// Whether the band leaves later rows of work tiles shorter, as causality does: blocks of queries from the last on, or
// of keys from the first on.
inline bool shortens_rows(const Sizes& sizes, int64_t low, int64_t high) {
  return low <= -sizes.seqlen_q && high < sizes.seqlen_k;
}

// Whether batch entries read the same bias per score or the same mask. The scheduler then makes them neighbours, so
// that they find it in L2. Call after the bias and the mask have been set.
template <class Params>
bool shares_over_batch(const Params& params, bool has_bias_per_score, bool has_mask) {
  const bool shares_bias = has_bias_per_score && !params.bias_values.has_batch;
  const bool shares_mask = has_mask && !params.mask.heads.has_batch;
  return params.batch > 1 && (shares_bias || shares_mask);
}

// Scores are softcap * tanh(pre_scale * q k) if softcap is positive; both passes use these numbers.
template <class Params>
void set_softcap(double softmax_scale, double softcap, Params& params) {
  if (!(softcap > 0)) return;
  params.softcap = static_cast<float>(softcap);
  params.pre_scale = static_cast<float>(softmax_scale / softcap);
}

// For the forward pass. The softmax computes scale * score - scale * max in one instruction, so scale must be positive;
// what is above it is compared with in units of scale, so scale must not be tiny either.
inline void set_scale(double softmax_scale, double softcap, bool has_bias, ForwardParams& params) {
  constexpr double kLeastScale = 1e-6;
  set_softcap(softmax_scale, softcap, params);
  params.transforms = softcap > 0 || (!has_bias && softmax_scale < kLeastScale);
  params.scale = has_bias || params.transforms ? 1.0f : static_cast<float>(softmax_scale);
  params.inverse_scale = 1.0f / params.scale;
  params.factor = static_cast<float>(softcap > 0 ? softcap : softmax_scale);
  params.inverse_factor = 1.0f / params.factor;
  if (!(softcap > 0)) params.pre_scale = static_cast<float>(softmax_scale);
}

// Dropout of probabilities, of a kernel instance that has it: the key of a call, int64 (2,) or of a part of one (4,),
// and how many are dropped.
template <class Params>
void set_dropout(const char* op, const std::optional<torch::stable::Tensor>& key, double p, int64_t head_dim,
                 int64_t head_dim_v, const torch::stable::Tensor& q, Params& params) {
  if (!key.has_value()) return;
  const bool is_of_part = key->dim() == 1 && key->size(0) == 4;
  check_array(op, *key, "dropout_key", {is_of_part ? 4 : 2}, torch::headeronly::ScalarType::Long, q);
  CHECK_FOR(op, has_dropout_kernels(static_cast<int>(head_dim), static_cast<int>(head_dim_v)),
            "there are no kernels with dropout of head dims ", head_dim, " and ", head_dim_v, " (v)");
  CHECK_FOR(op, p >= 0 && p <= 1, "p is ", p, "; it needs to be from 0 to 1");
  constexpr double kWords = 4294967296.0;
  params.dropout.key = static_cast<const int64_t*>(key->const_data_ptr());
  params.dropout.threshold = static_cast<uint32_t>(std::min(p * kWords, kWords - 1));
  params.dropout.scale = p == 1 ? 0.0f : static_cast<float>(1 / (1 - p));
}

// The form of a mask, which the last dim of its first tensor tells: bits of a TileMask are (Bm, Hm, Lq, 4 Tk), bounds
// of an IntervalMask (Bm, Hm, 128 Tk, 2).
inline MaskForm mask_form(const std::vector<torch::stable::Tensor>& mask) {
  if (mask.empty()) return MaskForm::kNone;
  return mask[0].size(3) == 2 ? MaskForm::kIntervals : MaskForm::kTiles;
}

// Checks that a mask fits q and k, and returns its form. It is {}, or bits or bounds and row lists, and column lists if
// `has_columns`.
inline MaskForm checked_mask_form(const char* op, const std::vector<torch::stable::Tensor>& mask, bool has_columns,
                                  const Sizes& sizes, const torch::stable::Tensor& q) {
  if (mask.empty()) return MaskForm::kNone;
  CHECK_FOR(op, mask.size() == (has_columns ? 3 : 2), "mask has ", mask.size(),
            " tensors; it needs bits or bounds, and lists of rows", has_columns ? " and columns" : "");
  constexpr auto kInt = torch::headeronly::ScalarType::Int;
  const torch::stable::Tensor& allowed = mask[0];
  CHECK_FOR(op, allowed.dim() == 4, "mask[0] has ", allowed.dim(), " dims; it needs 4");
  const MaskForm form = mask_form(mask);
  const int64_t tiles_q = ceil_div(sizes.seqlen_q, kTile), tiles_k = ceil_div(sizes.seqlen_k, kTile);
  const DimSize entries = one_or(sizes.batch), heads = divisor_of(sizes.num_heads);
  if (form == MaskForm::kIntervals) {
    check_array(op, allowed, "mask[0]", {entries, heads, tiles_k * kTile, 2}, kInt, q);
  } else {
    check_array(op, allowed, "mask[0]", {entries, heads, sizes.seqlen_q, tiles_k * kTileWords}, kInt, q);
  }
  check_array(op, mask[1], "mask[1]", {allowed.size(0), allowed.size(1), tiles_q, 2 + tiles_k}, kInt, q);
  if (has_columns) {
    check_array(op, mask[2], "mask[2]", {allowed.size(0), allowed.size(1), tiles_k, 2 + tiles_q}, kInt, q);
  }
  return form;
}

// Rows (B, L, H, D) of a tensor.
inline Rows rows_of(const torch::stable::Tensor& x) {
  return {x.const_data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
}

// Which mask of a tensor (Bm, Hm, ...) each of so many heads reads.
inline MaskHeads mask_heads(const torch::stable::Tensor& mask, int64_t num_heads) {
  return {static_cast<int>(num_heads / mask.size(1)), static_cast<int>(mask.size(1)), mask.size(0) > 1};
}

// A mask of either form; `lists` are its row lists or its column lists.
inline MaskTiles mask_tiles(const std::vector<torch::stable::Tensor>& mask, const torch::stable::Tensor& lists,
                            const Sizes& sizes) {
  MaskTiles tiles{};
  if (mask_form(mask) == MaskForm::kIntervals) {
    tiles.bounds = static_cast<const int2*>(mask[0].const_data_ptr());
  } else {
    tiles.bits = static_cast<const int32_t*>(mask[0].const_data_ptr());
  }
  tiles.lists = static_cast<const int32_t*>(lists.const_data_ptr());
  tiles.heads = mask_heads(mask[0], sizes.num_heads);
  return tiles;
}

// --- bias and sink ------------------------------------------------------------------------------------------------

// Whether one value serves every index of the dim.
inline bool is_broadcast(const torch::stable::Tensor& x, int dim) { return x.size(dim) == 1 || x.stride(dim) == 0; }

// Whether TMA can read tiles of the bias: rows of unit stride that start on 16 bytes, in this dtype.
inline bool can_copy_tiles(const torch::stable::Tensor& bias, torch::headeronly::ScalarType dtype) {
  bool can = bias.scalar_type() == dtype && bias.stride(3) == 1;
  can &= reinterpret_cast<uintptr_t>(bias.const_data_ptr()) % 16 == 0;
  for (int dim = 0; dim < 3; ++dim) {
    can &= is_broadcast(bias, dim) || bias.stride(dim) * static_cast<int64_t>(bias.element_size()) % 16 == 0;
  }
  return can;
}

// The dtype of a bias or a sink.
inline BiasDtype float_dtype(const char* op, const torch::stable::Tensor& x, const char* name) {
  using torch::headeronly::ScalarType;
  const ScalarType dtype = x.scalar_type();
  CHECK_FOR(op, dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16, name,
            " needs to be float32, float16 or bfloat16");
  return dtype == ScalarType::Float  ? BiasDtype::kFloat32
         : dtype == ScalarType::Half ? BiasDtype::kFloat16
                                     : BiasDtype::kBFloat16;
}

// The stride the kernels use: 0 where one value serves every index.
inline int64_t bias_stride(const torch::stable::Tensor& bias, int dim) {
  return is_broadcast(bias, dim) ? 0 : bias.stride(dim);
}

// A bias of so many query heads, as kernels read it.
inline BiasValues bias_values(const char* op, const torch::stable::Tensor& bias, int64_t num_heads) {
  const int64_t heads_per_bias = is_broadcast(bias, 1) ? num_heads : num_heads / bias.size(1);
  return {bias.const_data_ptr(), bias_stride(bias, 0), bias_stride(bias, 1), bias_stride(bias, 2), bias_stride(bias, 3),
          float_dtype(op, bias, "bias"), static_cast<int>(heads_per_bias), !is_broadcast(bias, 0)};
}

// Checks the dims of a bias (B, H, Lq, Lk): each may be 1, and H divides Hq.
inline void check_bias(const char* op, const torch::stable::Tensor& bias, const Sizes& sizes,
                       const torch::stable::Tensor& q) {
  check_dims(op, bias, "bias",
             {one_or(sizes.batch), divisor_of(sizes.num_heads), one_or(sizes.seqlen_q), one_or(sizes.seqlen_k)}, q);
}

// Distances beyond the values of a bias by distance have the first or the last one, or 0.
constexpr int64_t kNotByDistance = 0, kClamps = 1, kHasZeros = 2;

// Sets a bias by distance: values (B, H, 1, n), where place `zero` is of distance 0, the one of the last query and the last
// key.
template <class Params>
void set_distances(const char* op, const std::optional<torch::stable::Tensor>& values, int64_t outside, int64_t zero,
                   const Sizes& sizes, const torch::stable::Tensor& q, Params& params) {
  CHECK_FOR(op, outside == kClamps || outside == kHasZeros, "outside is ", outside, "; it needs to be 1 or 2");
  CHECK_FOR(op, values.has_value() && values->dim() == 4, "a bias by distance needs values of 4 dims");
  const int64_t number = values->size(3);
  check_dims(op, *values, "bias", {one_or(sizes.batch), divisor_of(sizes.num_heads), 1, number}, q);
  // The kernels add a place, rows and keys in int32.
  CHECK_FOR(op, number > 0 && number <= kMaxInt / 4, "bias has ", number, " distances; it needs 1 to 2^29 - 1");
  // Where no distance of the call has a value of its own, zero is clamped to just past that.
  const int64_t first_query = std::clamp(zero, -kMaxInt, kMaxInt) - (sizes.seqlen_k - sizes.seqlen_q);
  const int64_t origin = std::clamp(first_query, -sizes.seqlen_k, number + sizes.seqlen_q);
  const int beyond = outside == kClamps ? 0 : 1;
  params.distances = {static_cast<int>(origin), static_cast<int>(number), -beyond, static_cast<int>(number) - 1 + beyond};
}

// Sets a sink, (Hq), contiguous, in fp32 or 16 bits.
inline void set_sink(const char* op, const std::optional<torch::stable::Tensor>& sink, int64_t num_heads,
                     const torch::stable::Tensor& q, ForwardParams& params) {
  if (!sink.has_value()) return;
  check_dims(op, *sink, "sink", {num_heads}, q);
  CHECK_FOR(op, sink->is_contiguous(), "sink needs to be contiguous");
  params.sink = sink->const_data_ptr();
  params.sink_dtype = float_dtype(op, *sink, "sink");
}

}  // namespace flash_dmattn
