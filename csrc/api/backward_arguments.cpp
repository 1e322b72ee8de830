// The arguments of the backward pass: their checks, and what the kernels are told of them.
#include <algorithm>
#include <cstdint>
#include <optional>

#include <torch/csrc/stable/tensor.h>

#include "backward.h"
#include "call.h"
#include "common.h"
#include "sequences.h"
#include "tensor_map.h"

namespace flash_dmattn {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

template <class T = void>
T* data_of(const std::optional<Tensor>& x) {
  return x.has_value() ? static_cast<T*>(x->mutable_data_ptr()) : nullptr;
}

}  // namespace

void BackwardPass::check_arguments() {
  CHECK_FOR(op, sizes.head_dim_v <= kMaxRowColumns, "rows of out have ", sizes.head_dim_v, " columns, more than ",
            kMaxRowColumns);
  CHECK_FOR(op, args.dq.has_value() || !(args.key_order.has_value() && args.deterministic),
            "dq is needed with key_order in a fixed order: its semaphores order the sums of dk and dv");
  CHECK_FOR(op, args.bias.has_value() || !(args.dbias.has_value() || args.dbias_sums.has_value()),
            "there is no bias for a dbias");
  if (sequences != nullptr) {
    params.sequences = sequence_params(op, *sequences, sizes, args.bias, args.q);
  } else {
    check_counts(sizes.batch * sizes.num_heads * tiles_q, pairs_k * tiles_k);
  }
  describe_rows();
  mask_form = checked_mask_form(op, args.mask, true, sizes, args.q);
  if (args.outside != kNotByDistance) {
    set_distances(op, args.bias, args.outside, args.zero, sizes, args.q, params);
    CHECK_FOR(op, has_window_kernels(static_cast<int>(kernels.head_dim), static_cast<int>(kernels.head_dim_v)),
              "there are no kernels with a bias by distance of head dims ", kernels.head_dim, " and ",
              kernels.head_dim_v, " (v)");
    CHECK_FOR(op, !args.dbias_sums.has_value(), "dbias_sums are of a bias of one value per key");
    CHECK_FOR(op, args.softcap <= 0 && !args.dropout_key.has_value() && mask_form != MaskForm::kIntervals,
              "there is no kernel with a bias by distance beside a softcap, dropout or intervals");
  } else if (args.bias.has_value() && sequences == nullptr) {
    check_bias(op, *args.bias, sizes, args.q);
  }
  check_dbias();
}

void BackwardPass::check_dbias() const {
  if (has_dvalues()) {
    check_array(op, *args.dbias, "dbias", {args.bias->size(0), args.bias->size(1), 1, args.bias->size(3)},
                args.bias->scalar_type(), args.q);
  } else if (args.dbias.has_value()) {
    const Sizes score_sizes = dbias_sizes();
    // The main kernel may store rows of whole pieces of 16 bytes, with places that no key has.
    const int64_t keys = score_sizes.seqlen_k, columns = ceil_div(keys, kDbiasColumns) * kDbiasColumns;
    const bool has_pieces = sequences == nullptr && args.dbias->dim() == 4 && args.dbias->size(3) == columns;
    check_dims(op, *args.dbias, "dbias",
               {args.bias->size(0), args.bias->size(1), score_sizes.seqlen_q, has_pieces ? columns : keys}, args.q);
    check_dtype(op, *args.dbias, "dbias", args.bias->scalar_type());
  }
  if (args.dbias_sums.has_value()) {
    const bool packs_keys = params.sequences.bias_packs_keys, has_all_keys = sequences == nullptr || packs_keys;
    check_array(op, *args.dbias_sums, "dbias_sums",
                {packs_keys ? 1 : entries, sizes.num_heads, has_all_keys ? sizes.seqlen_k : params.sequences.most_k},
                ScalarType::Float, args.q);
  }
}

void BackwardPass::check_counts(int64_t tiles_of_queries, int64_t tiles_of_keys) const {
  CHECK_FOR(op, tiles_of_queries <= kMaxInt / 4, "there are more than 2^29 tiles of queries");
  CHECK_FOR(op, tiles_of_keys <= kMaxInt / 4, "there are more than 2^29 tiles of keys");
}

// Checks the arguments that have a row for each query, and the gradients that have rows of q, k and v.
void BackwardPass::describe_rows() {
  const auto [batch, seqlen_q, seqlen_k, heads, heads_k, head_dim, head_dim_v] = sizes;
  const ScalarType dtype = args.q.scalar_type();
  check_array(op, args.out, "out", {batch, seqlen_q, heads, head_dim_v}, dtype, args.q);
  rows.has_wide_lse = args.lse.scalar_type() == ScalarType::Double;
  check_array(op, args.lse, "lse", {batch, heads, seqlen_q}, rows.has_wide_lse ? ScalarType::Double : ScalarType::Float,
              args.q);
  check_dims(op, args.dout, "dout", {batch, seqlen_q, heads, head_dim_v}, args.q);
  check_dtype(op, args.dout, "dout", dtype);
  if (args.dq.has_value()) check_array(op, *args.dq, "dq", {batch, seqlen_q, heads, head_dim}, dtype, args.q);
  if (args.dk.has_value()) check_array(op, *args.dk, "dk", {batch, seqlen_k, heads_k, head_dim}, dtype, args.q);
  if (args.dv.has_value()) check_array(op, *args.dv, "dv", {batch, seqlen_k, heads_k, head_dim_v}, dtype, args.q);
  // Packed rows have one entry, which no stride leads to.
  const bool has_entries = sequences == nullptr || !sequences->is_packed;
  set_sizes(sizes, rows);
  rows.out = args.out.const_data_ptr();
  rows.lse = args.lse.const_data_ptr();
  rows.dout = rows_of(args.dout);
  if (!has_entries) rows.dout.stride_b = 0;
  if (args.dlse.has_value()) {
    const Tensor& dlse = *args.dlse;
    check_dims(op, dlse, "dlse", {batch, heads, seqlen_q}, args.q);
    check_dtype(op, dlse, "dlse", ScalarType::Float);
    rows.dlse = {static_cast<const float*>(dlse.const_data_ptr()), has_entries ? dlse.stride(0) : 0, dlse.stride(1),
                 dlse.stride(2)};
  }
  if (args.delta.has_value()) {
    check_array(op, *args.delta, "delta", {batch, heads, seqlen_q}, ScalarType::Float, args.q);
    rows.row_delta = data_of<float>(args.delta);
  }
}

// Chooses how the main kernel reads the bias. A bias per query only changes lse, which the kernel of the rows handles.
void BackwardPass::describe_bias() {
  if (!args.bias.has_value()) return;
  const Tensor& bias = *args.bias;
  const bool is_per_score = !is_broadcast(bias, 2) && !is_broadcast(bias, 3);
  if (args.outside != kNotByDistance) {
    bias_form = BackwardBias::kRelative;
  } else if (args.dbias_sums.has_value()) {
    CHECK_FOR(op, is_broadcast(bias, 2), "dbias_sums are of a bias of one value per key, and bias has one per query");
    bias_form = BackwardBias::kVector;
  } else if (!is_per_score) {
    CHECK_FOR(op, writer == DbiasWriter::kNone, "dbias is of a bias of one value per query and key");
    bias_form = is_broadcast(bias, 3) ? BackwardBias::kNone : BackwardBias::kVector;
  } else {
    const bool is_float = bias.scalar_type() == ScalarType::Float, stores = writer == DbiasWriter::kMain;
    CHECK_FOR(op, sequences == nullptr || can_copy_tiles(bias, args.q.scalar_type()),
              "bias per query and key needs rows that TMA can read, in the dtype of q");
    CHECK_FOR(op, bias.scalar_type() == args.q.scalar_type() || is_float,
              "bias of one value per query and key needs the dtype of q, or float32");
    CHECK_FOR(op,
              !is_float || (has_float_tile_kernels(static_cast<int>(kernels.head_dim),
                                                   static_cast<int>(kernels.head_dim_v)) &&
                            args.softcap <= 0 && !args.dropout_key.has_value()),
              "there are no kernels with a bias of one value per query and key in float32 of head dims ",
              kernels.head_dim, " and ", kernels.head_dim_v, " (v), nor with a softcap or dropout");
    bias_form = is_float ? (stores ? BackwardBias::kFloatTileStore : BackwardBias::kFloatTile)
                : stores                           ? BackwardBias::kTileStore
                : writer == DbiasWriter::kClusters ? BackwardBias::kTileSum
                                                   : BackwardBias::kTile;
  }
  CHECK_FOR(op, mask_form != MaskForm::kIntervals || !has_bias_tiles(),
            "a bias per query and key needs bits of a mask");
  BiasValues& read_by = bias_form == BackwardBias::kNone ? rows.bias_values : params.bias_values;
  read_by = bias_values(op, bias, sizes.num_heads);
}

void BackwardPass::describe_scores() {
  set_sizes(sizes, params);
  params.head_dim = static_cast<int>(sizes.head_dim);
  params.softmax_scale = static_cast<float>(args.softmax_scale);
  set_softcap(args.softmax_scale, args.softcap, params);
  CHECK_FOR(op, !(args.softcap > 0 && args.dropout_key.has_value()), "there is no kernel with dropout and a softcap");
  set_dropout(op, args.dropout_key, args.dropout_p, kernels.head_dim, kernels.head_dim_v, args.q, params);
  set_band(sizes, args.low, args.high, params);
  call.low = params.low;
  call.high = params.high;
  if (!has_mask) return;
  params.mask = mask_tiles(args.mask, args.mask[2], sizes);
  call.groups_share_mask = params.mask.heads.heads_per_mask % params.heads_per_group == 0;
  if (!args.key_order.has_value()) return;
  CHECK_FOR(op, mask_form == MaskForm::kIntervals && call.groups_share_mask,
            "key_order is of an interval mask that all heads of a group share");
  check_array(op, *args.key_order, "key_order", {args.mask[0].size(0), args.mask[0].size(1), sizes.seqlen_k},
              ScalarType::Int, args.q);
  params.key_order = static_cast<const int32_t*>(args.key_order->const_data_ptr());
}

void BackwardPass::describe_operands() {
  const SequenceParams& of = params.sequences;
  params.q = map_rows(op, args.q, "q", block_m, of);
  params.k = map_rows(op, args.k, "k", schedule.block_n, of);
  params.v = map_rows(op, args.v, "v", schedule.block_n, of);
  params.dout = map_rows(op, args.dout, "dout", block_m, of);
  if (has_bias_tiles()) params.bias = map_scores(op, *args.bias, "bias", block_m, of);
  if (stores_tiles(bias_form)) {
    // dbias may lie in a larger tensor, if its rows are whole pieces of 16 bytes.
    const Tensor& dbias = *args.dbias;
    for (int dim = 0; dim < 3; ++dim) {
      CHECK_FOR(op, dbias.size(dim) == 1 || dbias.stride(dim) > 0, "dbias has one place for all of dim ", dim);
    }
    CHECK_FOR(op, dbias.size(3) % 8 == 0, "rows of dbias have ", dbias.size(3), " keys; they need a multiple of 8");
    params.dbias = map_scores(op, dbias, "dbias", block_m, of);
  }
  params.dk = data_of(args.dk);
  params.dv = data_of(args.dv);
  params.dbias_sums = data_of<float>(args.dbias_sums);
  params.cluster = 1;
  if (writer == DbiasWriter::kClusters) {
    params.cluster = static_cast<int>(sizes.batch);
    params.summed_dbias = args.dbias->mutable_data_ptr();
  }
}

}  // namespace flash_dmattn
