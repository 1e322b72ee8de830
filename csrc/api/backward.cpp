// The operator of the backward pass, as torch sees it: what flash_dmattn/backends/cuda.py has prepared becomes params.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include <cuda_runtime_api.h>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "../sm90/backward/launch.h"
#include "bias.h"
#include "build_units.h"  // written by the build
#include "call.h"
#include "common.h"
#include "shared_dbias.h"
#include "tensor_map.h"
#include "tile_scheduler.h"

namespace flash_dmattn {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr const char* kName = "cuda_backward_kernel";
constexpr int64_t kWorksEnough = 8;  // for each multiprocessor, so that none waits long for the last
// Of a section whose tiles of keys take turns: with more heads at work fewer tiles of one wait for each other. Under a
// mask so many at least; without one, where tiles come in their order, as many as L2 has room for.
constexpr int64_t kHeadsOfTurns = 8, kBytesOfTurns = 36 << 20;

// A block of two tiles of keys takes 5/3 of the time of a block of one where dbias is stored: it moves less through L2,
// which is what bounds those kernels at head dim 64. There are half as many to share out. Behind a band it is slower:
// 0.497 ms for 0.476 of causal queries at (4, 16, 2048), 1.00 for 0.83 at (1, 8, 8192).
bool pays_to_take_two(int64_t pairs, int64_t tiles_k, int64_t processors) {
  const auto rounds = [&](int64_t blocks) { return ceil_div(pairs * blocks, processors); };
  return 5 * rounds(ceil_div(tiles_k, 2)) <= 3 * rounds(tiles_k);
}

// The kernels of one dtype and one pair of head dims; those of the rows are of the dtype alone.
struct Unit {
  decltype(&launch_backward_main<__half, 64, 64>) main;
  decltype(&launch_backward_rows<__half>) rows;
  decltype(&launch_backward_sums<__half>) sums;
  decltype(&launch_shared_dbias<__half, 64, 64>) shared_dbias;
  int tile_keys;
  int64_t head_dim, head_dim_v;
};

// The smallest built head dims that hold those of a call.
Unit unit_of(ScalarType dtype, int64_t head_dim, int64_t head_dim_v) {
#define FLASH_DMATTN_UNIT(element, scalar, d, dv)                                                             \
  if (dtype == ScalarType::scalar && head_dim <= d && head_dim_v <= dv) {                                     \
    return {&launch_backward_main<element, d, dv>, &launch_backward_rows<element>,                            \
            &launch_backward_sums<element>, &launch_shared_dbias<element, d, dv>, backward_keys(d, dv),       \
            d, dv};                                                                                           \
  }
  FLASH_DMATTN_BACKWARD_UNITS(FLASH_DMATTN_UNIT)
#undef FLASH_DMATTN_UNIT
  CHECK_ARGUMENT(false, "the extension was not built for gradients of head dims ", head_dim, " and ", head_dim_v,
                 " (v) of this dtype");
}

template <class T = void>
T* data_of(const std::optional<Tensor>& x) {
  return x.has_value() ? static_cast<T*>(x->mutable_data_ptr()) : nullptr;
}

// How the main kernel reads a bias. One of a value per query only moves lse, which the kernel of the rows does; it is
// another one that adds up the gradient of a bias per score that heads share, or that the main kernel does not store.
BackwardBias describe_bias(const Tensor& bias, const Tensor& q, bool stores_dbias, bool shares_dbias, bool sums_dbias) {
  if (sums_dbias) {
    CHECK_ARGUMENT(is_broadcast(bias, 2), "dbias_sums are of a bias of one value per key, and bias has one per query");
    return BackwardBias::kVector;
  }
  const bool is_per_score = !is_broadcast(bias, 2) && !is_broadcast(bias, 3);
  CHECK_ARGUMENT(is_per_score || !stores_dbias, "dbias is of a bias of one value per query and key");
  if (!is_per_score) return is_broadcast(bias, 3) ? BackwardBias::kNone : BackwardBias::kVector;
  CHECK_ARGUMENT(bias.scalar_type() == q.scalar_type(), "bias of one value per query and key needs the dtype of q");
  return stores_dbias && !shares_dbias ? BackwardBias::kTileStore : BackwardBias::kTile;
}

// How many clusters run at the same time whose blocks sum dbias, one of each batch entry; 0 where the kernel of a
// shared dbias stores it: where heads share the bias too, or other numbers of entries do, or a mask has the blocks of a
// cluster walk different queries.
int clusters_of_batch(int device, const Sizes& sizes, const Unit& unit, const Tensor& dbias,
                      const std::vector<Tensor>& mask, bool has_softcap) {
  const bool has_cluster = sizes.batch == 2 || sizes.batch == 4 || sizes.batch == 8;
  const bool is_of_batch = dbias.size(0) == 1 && dbias.size(1) == sizes.num_heads;
  if (!has_cluster || !is_of_batch || (!mask.empty() && mask[0].size(0) > 1) ||
      !backward_sums_dbias(static_cast<int>(unit.head_dim), static_cast<int>(unit.head_dim_v), has_softcap)) {
    return 0;
  }
  int clusters = 0;
  check(count_clusters(device, static_cast<int>(sizes.batch), clusters), kName, "asking for clusters");
  return clusters;
}

// Has params read the lists of columns in one order, and the turns of their tiles; they lie in the tensor.
Tensor order_lists(const std::vector<Tensor>& mask, const Tensor& q, int64_t tiles_q, int64_t tiles_k,
                   BackwardParams& params, cudaStream_t stream) {
  OrderListsParams order{};
  order.row_lists = static_cast<const int32_t*>(mask[1].const_data_ptr());
  order.col_lists = static_cast<const int32_t*>(mask[2].const_data_ptr());
  order.num_lists = mask[2].size(0) * mask[2].size(1) * tiles_k;
  order.tiles_q = static_cast<int>(tiles_q);
  order.tiles_k = static_cast<int>(tiles_k);
  const int64_t length = order.num_lists * (2 + tiles_q + tiles_q);
  const Tensor lists = torch::stable::new_empty(q, {&length, 1}, ScalarType::Int);
  order.ordered = static_cast<int32_t*>(lists.mutable_data_ptr());
  order.turns = order.ordered + order.num_lists * (2 + tiles_q);
  check(launch_order_lists(order, stream), kName, "launching the kernel of the lists");
  params.mask_lists = order.ordered;
  params.mask_turns = order.turns;
  return lists;
}

// Parts of a tensor of floats, each on lines of their own, 128 bytes: one allocation for all of them. With sums 16
// bytes behind the start of a line, of which a warp's additions then touch one more, gradients took 2 % longer.
struct Scratch {
  int64_t length = 0;

  // Where a part of so many starts.
  int64_t add(int64_t count) {
    const int64_t start = length;
    length += ceil_div(count, 32) * 32;
    return start;
  }
};

// Of how many pairs of batch and head of k a work has all query heads. Query heads as works of their own are more
// works, whose dk and dv have to be added in device memory: where works are few, those of the last one or two rounds.
// Blocks 0.1 at D128 1.108 ms for 1.139, all keys 2.28 for 2.34. Behind a band, where works are shorter towards the
// end, it is all of them: causal queries at 4k, 8k and 16k 1.329, 2.39 and 4.37 ms, the other way 1.329, 2.42 and 4.33.
int64_t count_whole_pairs(const BackwardParams& params, int64_t pairs_k, int64_t processors, bool is_banded,
                          bool deterministic, bool takes_turns) {
  const int64_t works = pairs_k * params.blocks_k;
  if (params.queries_per_group == 1 || works >= kWorksEnough * processors) return pairs_k;
  if (deterministic) return takes_turns ? 0 : pairs_k;
  if (is_banded) return 0;
  const int64_t rounds = std::max<int64_t>(works / processors - 1, 0);
  const int64_t together = params.batch_is_inner ? params.batch : 1;
  return rounds * processors / params.blocks_k / together * together;
}

BackwardRowsParams describe_rows(const Tensor& out, const Tensor& dout, const Tensor& lse,
                                 const std::optional<Tensor>& dlse) {
  CHECK_ARGUMENT(out.is_contiguous() && lse.is_contiguous(), "out and lse need to be contiguous");
  BackwardRowsParams rows{};
  rows.out = out.const_data_ptr();
  rows.dout = dout.const_data_ptr();
  rows.lse = static_cast<const float*>(lse.const_data_ptr());
  rows.dout_stride_b = dout.stride(0);
  rows.dout_stride_q = dout.stride(1);
  rows.dout_stride_h = dout.stride(2);
  if (dlse.has_value()) {
    CHECK_ARGUMENT(dlse->scalar_type() == ScalarType::Float, "dlse needs to be float32, as lse");
    rows.dlse = static_cast<const float*>(dlse->const_data_ptr());
    rows.dlse_stride_b = dlse->stride(0);
    rows.dlse_stride_h = dlse->stride(1);
    rows.dlse_stride_q = dlse->stride(2);
  }
  rows.batch = static_cast<int>(out.size(0));
  rows.seqlen_q = static_cast<int>(out.size(1));
  rows.num_heads = static_cast<int>(out.size(2));
  rows.head_dim_v = static_cast<int>(out.size(3));
  return rows;
}

// What the kernel of the sums makes results of.
struct Finish {
  BackwardSumsParams params{};
  int count = 0;
  int64_t pieces = 0;

  // The result of `pairs` pairs of batch and head, from first_pair on, with so many rows of sums each; none where it is
  // not wanted, or not summed.
  void add(const std::optional<Tensor>& result, const float* sums, int64_t first_pair, int64_t pairs,
           int64_t rows_per_pair, int64_t columns, double factor, bool batch_is_inner) {
    BackwardSumsParams::Result& it = params.results[count++];
    if (sums != nullptr) {
      pieces += pairs * (rows_per_pair / kPieceRows) * (columns / kPieceColumns);
      it.sums = sums;
      it.out = result->mutable_data_ptr();
      it.first_pair = static_cast<int>(first_pair);
      it.batch_is_inner = batch_is_inner;
      it.batch = static_cast<int>(result->size(0));
      it.seqlen = static_cast<int>(result->size(1));
      it.num_heads = static_cast<int>(result->size(2));
      it.rows_per_pair = static_cast<int>(rows_per_pair);
      it.columns = static_cast<int>(result->size(3));
      it.panels = static_cast<int>(columns / kPieceColumns);
      it.factor = static_cast<float>(factor);
    }
    it.pieces = pieces;
  }
};

// Writes those of dq, dk, dv, dbias and dbias_sums that are given, all contiguous: dbias of a bias per query and key,
// in its dtype, (B, Hq, Lq, Lk) in those tiles that band and mask do not leave empty, or all of one with fewer heads or
// batch entries; dbias_sums (B, Hq, Lk) of a bias per key, in fp32. mask is {} or (bits, row_lists, col_lists) of a
// TileMask; low and high are the band where there is none.
void backward(Tensor dout, std::optional<Tensor> dlse, Tensor q, Tensor k, Tensor v, std::vector<Tensor> mask,
              std::optional<Tensor> bias, Tensor out, Tensor lse, std::optional<Tensor> dq, std::optional<Tensor> dk,
              std::optional<Tensor> dv, std::optional<Tensor> dbias, std::optional<Tensor> dbias_sums, int64_t low,
              int64_t high, double softmax_scale, double softcap, bool deterministic) {
  const Sizes sizes = sizes_of(kName, q, k, v);
  const Unit unit = unit_of(q.scalar_type(), sizes.head_dim, sizes.head_dim_v);
  CHECK_ARGUMENT(sizes.head_dim_v <= kMaxRowColumns, "rows of out have ", sizes.head_dim_v, " columns, more than ",
                 kMaxRowColumns);
  CHECK_ARGUMENT(bias.has_value() || !(dbias.has_value() || dbias_sums.has_value()), "there is no bias for a dbias");

  const int64_t tiles_q = ceil_div(sizes.seqlen_q, kTile), tiles_k = ceil_div(sizes.seqlen_k, kTile);
  const int64_t pairs = sizes.batch * sizes.num_heads, pairs_k = sizes.batch * sizes.num_heads_k;
  CHECK_ARGUMENT(pairs * tiles_q <= kMaxInt / 4, "there are more than 2^29 tiles of queries");
  CHECK_ARGUMENT(pairs_k * tiles_k <= kMaxInt / 4, "there are more than 2^29 tiles of keys");

  BackwardParams params{};
  BackwardRowsParams rows = describe_rows(out, dout, lse, dlse);
  BackwardBias form = BackwardBias::kNone;
  const bool stores_whole = backward_stores_dbias(unit.head_dim, unit.head_dim_v, softcap > 0);
  const bool shares_dbias = dbias.has_value() && (is_shared(*dbias, sizes) || !stores_whole);
  if (shares_dbias) {
    // Written 16 bytes at a time, by either kernel.
    CHECK_ARGUMENT(dbias->is_contiguous(), "dbias needs to be contiguous");
    CHECK_ARGUMENT(sizes.seqlen_k % 8 == 0, "rows of dbias have ", sizes.seqlen_k,
                   " keys; they need a multiple of 8");
  }
  if (bias.has_value()) {
    form = describe_bias(*bias, q, dbias.has_value(), shares_dbias, dbias_sums.has_value());
    if (form == BackwardBias::kNone) {
      set_bias(kName, *bias, sizes.num_heads, rows);
    } else {
      set_bias(kName, *bias, sizes.num_heads, params);
    }
  }

  const CurrentDevice device(kName, q);  // before the maps, whose encoder needs its context
  const int device_processors = multiprocessors(kName, device.index);

  const bool has_mask = !mask.empty(), has_bias_tiles = form == BackwardBias::kTile || form == BackwardBias::kTileStore;
  const bool is_banded = has_band(sizes, low, high);
  const bool takes_two = form == BackwardBias::kTileStore && !has_mask && !is_banded && !(softcap > 0) &&
                         has_two_key_tiles(unit.head_dim, unit.head_dim_v) &&
                         pays_to_take_two(pairs_k, tiles_k, device_processors);
  const int block_keys = takes_two ? 2 * kTile : unit.tile_keys;
  const int tile_rows = backward_rows(unit.head_dim, unit.head_dim_v, block_keys);
  const int64_t blocks_k = takes_two ? ceil_div(tiles_k, 2) : tiles_k * (kTile / block_keys);
  params.q = rows_map(kName, q, "q", tile_rows);
  params.k = rows_map(kName, k, "k", block_keys);
  params.v = rows_map(kName, v, "v", block_keys);
  params.dout = rows_map(kName, dout, "dout", tile_rows);
  if (has_bias_tiles) params.bias = scores_map(kName, *bias, "bias", tile_rows);
  if (form == BackwardBias::kTileStore) params.dbias = scores_map(kName, *dbias, "dbias", tile_rows);
  params.dk = data_of(dk);
  params.dv = data_of(dv);
  params.dbias_sums = data_of<float>(dbias_sums);
  set_sizes(sizes, params);
  params.head_dim = static_cast<int>(sizes.head_dim);
  params.softmax_scale = static_cast<float>(softmax_scale);
  set_softcap(softmax_scale, softcap, params);
  set_band(sizes, low, high, params);
  if (has_mask) {
    CHECK_ARGUMENT(mask.size() == 3, "mask has ", mask.size(), " tensors; it needs bits and lists of rows and columns");
    set_mask(mask[0], mask[2], sizes, params);
  }

  const bool needs_more = dq.has_value() || dk.has_value() || dv.has_value();
  const int clusters =
      shares_dbias && needs_more ? clusters_of_batch(device.index, sizes, unit, *dbias, mask, softcap > 0) : 0;
  params.cluster = 1;
  if (clusters > 0) {
    form = BackwardBias::kTileSum;
    params.cluster = static_cast<int>(sizes.batch);
    params.summed_dbias = dbias->mutable_data_ptr();
  }

  // The works, and how they are shared out.
  const bool takes_turns = dq.has_value() && deterministic;
  const int64_t dq_columns = ceil_div(unit.head_dim, kPieceColumns) * kPieceColumns;
  const int64_t dv_columns = ceil_div(unit.head_dim_v, kPieceColumns) * kPieceColumns;
  params.blocks_k = static_cast<int>(blocks_k);
  params.batch_is_inner = clusters > 0 || shares_over_batch(params, has_bias_tiles, has_mask);
  const int64_t whole_pairs =
      count_whole_pairs(params, pairs_k, device_processors, is_banded && !has_mask, deterministic, takes_turns);
  const int64_t summed_pairs = pairs_k - whole_pairs, single_heads = pairs - whole_pairs * params.queries_per_group;
  params.whole_pairs = static_cast<int>(whole_pairs);
  params.total = static_cast<int>((whole_pairs + single_heads) * blocks_k);
  // Of so many pairs of batch and this many heads, a section: q, dout and the sums of dq of its heads.
  const auto section_of = [&](int64_t count, int64_t heads) {
    const int64_t row_bytes = (sizes.head_dim + sizes.head_dim_v) * 2 + (dq.has_value() ? dq_columns * 4 : 0);
    const int64_t work_bytes = heads * sizes.seqlen_q * row_bytes;
    const int64_t turns_need = has_mask ? kHeadsOfTurns : std::max<int64_t>(kBytesOfTurns / work_bytes, 2);
    const int64_t section = std::max<int64_t>(kSectionBytes / work_bytes, takes_turns ? turns_need : 1);
    // The works of a cluster are batch entries of the same heads, in one section.
    const int64_t together = ceil_div(section, params.cluster) * params.cluster;
    return static_cast<int>(std::clamp<int64_t>(count, 1, together));
  };
  params.whole_section = section_of(whole_pairs, params.queries_per_group);
  params.section = section_of(single_heads, 1);
  const int blocks = std::min(params.total, clusters > 0 ? clusters * params.cluster : device_processors);
  const bool has_works = needs_more || !shares_dbias;
  const bool works_differ = has_mask || is_banded || (whole_pairs > 0 && summed_pairs > 0);
  const bool hands_out = has_works && (takes_turns || (works_differ && params.total > blocks));

  // lse in base 2 and delta, and what starts as zeros.
  const int64_t padded_rows = pairs * tiles_q * kTile, summed_rows = summed_pairs * blocks_k * block_keys;
  const int64_t blocks_q = padded_rows / tile_rows;
  Scratch scratch;
  scratch.add(2 * padded_rows);
  const int64_t next_at = scratch.add(hands_out ? 1 : 0), dq_turns_at = scratch.add(takes_turns ? blocks_q : 0);
  const int64_t key_turns_at = scratch.add(takes_turns ? summed_pairs * blocks_k : 0);
  const int64_t dk_at = scratch.add(dk.has_value() ? summed_rows * dq_columns : 0);
  const int64_t dv_at = scratch.add(dv.has_value() ? summed_rows * dv_columns : 0);
  const int64_t dq_at = scratch.add(dq.has_value() ? padded_rows * dq_columns : 0);
  const Tensor memory = torch::stable::new_empty(q, {&scratch.length, 1}, ScalarType::Float);
  float* const start = static_cast<float*>(memory.mutable_data_ptr());
  rows.lse_log2 = start;
  rows.delta = start + padded_rows;
  rows.cleared = start + next_at;
  rows.zeros = (scratch.length - next_at) / 4;
  params.lse = rows.lse_log2;
  params.delta = rows.delta;
  if (hands_out) params.next = reinterpret_cast<int*>(start + next_at);
  if (takes_turns) params.dq_turns = reinterpret_cast<int*>(start + dq_turns_at);
  if (dq.has_value()) params.dq_sums = start + dq_at;
  const bool sums_dk = dk.has_value() && summed_pairs > 0, sums_dv = dv.has_value() && summed_pairs > 0;
  if (sums_dk) params.dk_sums = start + dk_at;
  if (sums_dv) params.dv_sums = start + dv_at;
  if (takes_turns && (sums_dk || sums_dv)) params.key_turns = reinterpret_cast<int*>(start + key_turns_at);

  // Before the first kernel: others start while the one before ends, but not behind a memset.
  if (clusters > 0 && (has_mask || is_banded)) {
    const size_t bytes = static_cast<size_t>(dbias->numel()) * dbias->element_size();
    check(cudaMemsetAsync(params.summed_dbias, 0, bytes, device.stream), kName, "clearing dbias");
  }
  Tensor ordered_lists;
  if (takes_turns && has_mask) ordered_lists = order_lists(mask, q, tiles_q, tiles_k, params, device.stream);
  check(unit.rows(rows, device.stream), kName, "launching the kernel of the rows");
  if (shares_dbias && clusters == 0) {
    const SharedDbiasCall call{dout, q, k, v, *bias, mask, params.lse, params.delta, low, high, softmax_scale,
                               softcap};
    store_shared_dbias(kName, unit.shared_dbias, device, sizes, call, *dbias);
  }
  if (!has_works) return;
  check(unit.main(params, form, has_mask, block_keys, blocks, device.stream), kName, "launching the kernel");

  Finish finish;
  finish.add(dq, params.dq_sums, 0, pairs, tiles_q * kTile, dq_columns, softmax_scale, false);
  finish.add(dk, params.dk_sums, whole_pairs, summed_pairs, blocks_k * block_keys, dq_columns, softmax_scale,
             params.batch_is_inner);
  finish.add(dv, params.dv_sums, whole_pairs, summed_pairs, blocks_k * block_keys, dv_columns, 1.0,
             params.batch_is_inner);
  if (finish.pieces > 0) check(unit.sums(finish.params, device.stream), kName, "launching the kernel of the sums");
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(flash_dmattn, m) {
  m.def(
      "cuda_backward_kernel(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor[] mask, Tensor? bias, "
      "Tensor out, Tensor lse, Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv, Tensor(d!)? dbias, "
      "Tensor(e!)? dbias_sums, int low, int high, float softmax_scale, float softcap, bool deterministic) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CUDA, m) { m.impl("cuda_backward_kernel", TORCH_BOX(&backward)); }
STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CPU, m) { m.impl("cuda_backward_kernel", TORCH_BOX(&backward)); }

}  // namespace flash_dmattn
