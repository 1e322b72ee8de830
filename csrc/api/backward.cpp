// The backward operators, of dense calls and of calls with sequences, and the steps of their one body.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include <cuda_runtime_api.h>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "backward.h"
#include "build_instances.h"  // written by the build
#include "call.h"
#include "common.h"
#include "keys_in_order.h"
#include "sequences.h"
#include "tensor_map.h"

namespace flash_dmattn {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// --- kernel instances ---------------------------------------------------------------------------------------------

// `main` and `shared_dbias` are the kernels' functions that launch them.
#define FLASH_DMATTN_ROW(element, scalar, d, dv, main, shared_dbias)                                 \
  {ScalarType::scalar,                                                                               \
   d,                                                                                                \
   dv,                                                                                               \
   &main<element, d, dv>,                                                                            \
   &shared_dbias<element, d, dv>,                                                                    \
   &launch_backward_rows<element>,                                                                   \
   &launch_few_keys<element>,                                                                        \
   &launch_backward_sums<element>,                                                                   \
   &launch_add_chunks<element>},
#define FLASH_DMATTN_INSTANCE(element, scalar, d, dv) \
  FLASH_DMATTN_ROW(element, scalar, d, dv, launch_backward_main, launch_shared_dbias)
constexpr std::initializer_list<BackwardKernels> kInstances{FLASH_DMATTN_INSTANCES(FLASH_DMATTN_INSTANCE)};
#undef FLASH_DMATTN_INSTANCE
#define FLASH_DMATTN_INSTANCE(element, scalar, d, dv) \
  FLASH_DMATTN_ROW(element, scalar, d, dv, launch_backward_sequences, launch_shared_dbias_sequences)
constexpr std::initializer_list<BackwardKernels> kSequencesInstances{
    FLASH_DMATTN_SEQUENCES_INSTANCES(FLASH_DMATTN_INSTANCE)};
#undef FLASH_DMATTN_INSTANCE
#undef FLASH_DMATTN_ROW

const BackwardKernels& backward_kernels(const char* op, bool has_sequences, ScalarType dtype, const Sizes& sizes) {
  return has_sequences ? instance_for(op, kSequencesInstances, "sequences of ", dtype, sizes)
                       : instance_for(op, kInstances, "gradients of ", dtype, sizes);
}

// --- the steps of a call ------------------------------------------------------------------------------------------

void BackwardPass::run() {
  check_arguments();
  const CurrentDevice device(op, args.q);  // before the TMA descriptors, whose encoder needs its context
  stream = device.stream;
  num_sms = sm_count(op, device.index);
  choose_writer(device.index);
  describe_bias();
  describe_scores();
  if (has_dvalues()) describe_diagonals();
  if (sequences == nullptr) {
    schedule_tiles();
  } else {
    list_tiles();
  }
  describe_operands();
  allocate();

  clear_dbias();
  if (schedule.is_ordered && has_mask) order_lists();
  check(kernels.rows(rows, stream), op, "launching the kernel of the rows");
  if (sequences != nullptr && !args.invariant) sum_delta();
  if (writer == DbiasWriter::kSharedDbias) store_shared_dbias();
  if (summed.count() > 0) sum_diagonals();
  if (runs_main_kernel) {
    check(kernels.main(params, bias_form, mask_form, schedule.block_n, turns_dq, blocks, stream), op,
          "launching the kernel");
    store_sums();
  }
  if (has_dvalues()) store_dvalues();
}

// Makes params read column lists in ascending order, with each tile's predecessors.
void BackwardPass::order_lists() {
  OrderListsParams order{};
  order.row_lists = static_cast<const int32_t*>(args.mask[1].const_data_ptr());
  order.col_lists = static_cast<const int32_t*>(args.mask[2].const_data_ptr());
  order.num_lists = args.mask[2].size(0) * args.mask[2].size(1) * tiles_k;
  order.tiles_q = static_cast<int>(tiles_q);
  order.tiles_k = static_cast<int>(tiles_k);
  ordered_lists = empty(args.q, {order.num_lists * (2 + tiles_q + tiles_q)}, ScalarType::Int);
  order.ordered = static_cast<int32_t*>(ordered_lists.mutable_data_ptr());
  order.predecessors = order.ordered + order.num_lists * (2 + tiles_q);
  check(launch_order_lists(order, stream), op, "launching the kernel of the lists");
  params.mask.lists = order.ordered;
  params.mask_predecessors = order.predecessors;
}

// Sums delta of sequences of few keys.
void BackwardPass::sum_delta() const {
  FewKeysParams few{};
  set_sizes(sizes, few);
  few.head_dim = params.head_dim;
  few.q = rows_of(args.q);
  few.k = rows_of(args.k);
  few.v = rows_of(args.v);
  few.dout = rows_of(args.dout);
  few.dlse = rows.dlse;
  few.lse = rows.lse_log2;
  few.split_lse = rows.split_lse;
  few.delta = rows.delta;
  few.row_delta = rows.row_delta;
  few.bias_values = params.bias_values;
  few.softmax_scale = params.softmax_scale;
  few.sequences = params.sequences;
  check(kernels.few_keys(few, stream), op, "launching the kernel of few keys");
}

// Converts what was summed to results.
void BackwardPass::store_sums() const {
  BackwardSumsParams sums{};
  sums.sequences = params.sequences;
  sums.places = rows.places;
  sums.has_group = params.has_group;
  const auto describe = [](BackwardSumsParams::Result& it, const Tensor& result, const float* from,
                           int64_t rows_per_pair, double factor) {
    it.sums = from;
    it.out = result.mutable_data_ptr();
    it.batch = static_cast<int>(result.size(0));
    it.seqlen = static_cast<int>(result.size(1));
    it.num_heads = static_cast<int>(result.size(2));
    it.rows_per_pair = static_cast<int>(rows_per_pair);
    it.columns = static_cast<int>(result.size(3));
    it.factor = static_cast<float>(factor);
  };
  int64_t tiles = 0;
  // Adds nothing if the result is not wanted or not accumulated (`from` is null).
  const auto add = [&](BackwardSumsParams::Result& it, const std::optional<Tensor>& result, const float* from,
                       bool is_of_keys, int64_t columns, double factor) {
    if (from != nullptr) {
      const int64_t rows_per_pair = is_of_keys ? schedule.blocks_k * schedule.block_n : rows_of_pair;
      describe(it, *result, from, rows_per_pair, factor);
      it.tile_columns = accum_columns(static_cast<int>(columns));
      it.panels = static_cast<int>(columns) / it.tile_columns;
      tiles += (is_of_keys ? schedule.summed_pairs : pairs) * (rows_per_pair / kAccumRows) * it.panels;
      it.first_pair = is_of_keys ? params.first_summed_pair : 0;
      it.batch_is_inner = is_of_keys && params.batch_is_inner;
      it.is_by_place = is_of_keys && rows.places.order != nullptr;
      it.lacks_groups = is_of_keys && params.has_group != nullptr;
    }
    it.tiles = tiles;
  };
  if (turns_dq) {  // a kernel of its own converts it
    describe(sums.turned, *args.dq, params.dq_sums, rows_of_pair, args.softmax_scale);
    sums.turned.tiles = pairs * (rows_of_pair / kTurnedBlockM) * 2;
  }
  add(sums.results[0], args.dq, turns_dq ? nullptr : params.dq_sums, false, dq_columns, args.softmax_scale);
  add(sums.results[1], args.dk, params.dk_sums, true, dq_columns, args.softmax_scale);
  const double dv_factor = params.dropout.key != nullptr ? params.dropout.scale : 1.0;
  add(sums.results[2], args.dv, params.dv_sums, true, dv_columns, dv_factor);
  if (tiles > 0 || turns_dq) check(kernels.sums(sums, stream), op, "launching the kernel of the sums");
}

// --- operators ----------------------------------------------------------------------------------------------------

namespace {

// Writes the gradients that are present, all contiguous but for one dbias, see below. mask: {}, or (bits, row_lists,
// col_lists) of a TileMask, or (bounds, row_lists, col_lists) of an IntervalMask. low and high are the band if there is
// no mask.
// Calls that follow an IntervalMask have its key_order. Keys are in the caller's order in all tensors. With `in_order` k, v
// and a bias per key are in the order of the mask already, and dbias_sums starts as zeros.
// A bias per query and key has dbias, in its own dtype, which is q's or fp32; written whole. It may have fewer heads or batch
// entries. Where the main kernel stores it, it may lie in a larger tensor (B, Hq, Lq, Lk), and its rows may be longer, up to
// the next multiple of 8 keys. A bias by distance has a contiguous dbias in the shape of its values. A bias per key has
// dbias_sums, (B, Hq, Lk), in fp32. The caller computes gradients from delta, (B, Hq, Lq). Alone it takes the kernel of the
// rows and no other. The heads that the shared_dbias kernel sums are shared by num_dbias_chunks; 0 lets schedule_dbias choose.
void backward_kernel(Tensor dout, std::optional<Tensor> dlse, Tensor q, Tensor k, Tensor v, std::vector<Tensor> mask,
                     std::optional<Tensor> key_order, std::optional<Tensor> bias, Tensor out, Tensor lse,
                     std::optional<Tensor> dq, std::optional<Tensor> dk, std::optional<Tensor> dv,
                     std::optional<Tensor> dbias, std::optional<Tensor> dbias_sums, std::optional<Tensor> delta,
                     int64_t low, int64_t high, double softmax_scale, double softcap, bool deterministic,
                     int64_t num_dbias_chunks, std::optional<Tensor> dropout_key, double dropout_p, int64_t outside,
                     int64_t zero, bool invariant, bool in_order) {
  constexpr const char* kName = "cuda_backward_kernel";
  if (key_order.has_value() && !in_order) {
    CHECK_ARGUMENT(k.is_cuda(), "k is not on a CUDA device; the kernel is written for sm_90a");
    CHECK_ARGUMENT(mask.size() == 3, "key_order is of an interval mask");
    const CurrentDevice device(kName, k);
    const Tensor* cleared = nullptr;
    if (dbias_sums.has_value()) {
      check_array(kName, *dbias_sums, "dbias_sums", {q.size(0), q.size(2), k.size(1)}, ScalarType::Float, k);
      cleared = &*dbias_sums;
    }
    KeysInOrder made = keys_in_order(kName, k, v, bias, *key_order, mask[0], cleared, device.stream);
    k = std::move(made.k);
    v = std::move(made.v);
    bias = std::move(made.bias);
  }
  BackwardArguments arguments{kName, dout, dlse, q, k, v, bias, out, lse, dq, dk, dv, dbias,
                              dbias_sums, delta, softmax_scale, num_dbias_chunks, invariant};
  arguments.mask = std::move(mask);
  arguments.key_order = std::move(key_order);
  arguments.low = low;
  arguments.high = high;
  arguments.softcap = softcap;
  arguments.deterministic = deterministic;
  arguments.dropout_key = std::move(dropout_key);
  arguments.dropout_p = dropout_p;
  arguments.outside = outside;
  arguments.zero = zero;
  BackwardPass{arguments}.run();
}

// Writes the gradients that are present, all contiguous and of all rows. Arguments that the forward operator has, too,
// mean the same. dbias: of a bias per query and key, written whole. The main kernel writes it if it has one for each
// sequence and query head. dbias_sums: of a bias per key, in fp32, (1, Hq, Tk) of packed keys or (S, Hq, most_k); starts
// as zeros. delta: in the shape of lse. Alone it takes no main kernel.
void backward_sequences(Tensor dout, std::optional<Tensor> dlse, Tensor q, Tensor k, Tensor v, Tensor bounds,
                        std::optional<Tensor> bias, Tensor out, Tensor lse, std::optional<Tensor> dq,
                        std::optional<Tensor> dk, std::optional<Tensor> dv, std::optional<Tensor> dbias,
                        std::optional<Tensor> dbias_sums, std::optional<Tensor> delta, bool is_packed,
                        int64_t bias_packing, int64_t most_q, int64_t most_k, int64_t left, int64_t right,
                        double softmax_scale, int64_t num_dbias_chunks, bool invariant) {
  if (is_packed) {
    for (Tensor* x : {&dout, &q, &k, &v, &out}) as_entry(*x, 4);
    for (std::optional<Tensor>* x : {&dq, &dk, &dv}) as_entry(*x, 4);
    for (std::optional<Tensor>* x : {&dlse, &delta}) as_entry(*x, 3);
    as_entry(lse, 3);
  }
  const std::optional<Tensor> no_table;
  const SequenceCall sequences{bounds, no_table, is_packed, bias_packing, most_q, most_k, left, right};
  const BackwardArguments arguments{"cuda_backward_sequences", dout, dlse, q, k, v, bias, out, lse, dq, dk, dv, dbias,
                                    dbias_sums, delta, softmax_scale, num_dbias_chunks, invariant, &sequences};
  BackwardPass{arguments}.run();
}

template <class Library>
void implement(Library& m) {
  m.impl("cuda_backward_kernel", TORCH_BOX(&backward_kernel));
  m.impl("cuda_backward_sequences", TORCH_BOX(&backward_sequences));
}

}  // namespace

// The shapes of tensors are checked, but not the numbers in a mask: lists, bounds and the order of keys must come from the
// packing operators of this library. Others would lead kernels out of their tensors.
STABLE_TORCH_LIBRARY_FRAGMENT(flash_dmattn, m) {
  m.def(
      "cuda_backward_kernel(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor[] mask, Tensor? key_order, "
      "Tensor? bias, Tensor out, Tensor lse, Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv, Tensor(d!)? dbias, "
      "Tensor(e!)? dbias_sums, Tensor(f!)? delta, int low, int high, float softmax_scale, float softcap, "
      "bool deterministic, int num_dbias_chunks, Tensor? dropout_key, float dropout_p, int outside, int zero, "
      "bool invariant=False, bool in_order=False) -> ()");
  m.def(
      "cuda_backward_sequences(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor bounds, Tensor? bias, "
      "Tensor out, Tensor lse, Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv, Tensor(d!)? dbias, "
      "Tensor(e!)? dbias_sums, Tensor(f!)? delta, bool is_packed, int bias_packing, int most_q, int most_k, int left, "
      "int right, float softmax_scale, int num_dbias_chunks, bool invariant=False) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CUDA, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CPU, m) { implement(m); }

}  // namespace flash_dmattn
