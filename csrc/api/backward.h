// One call of the backward pass: its arguments, and what its steps decide. `run` in backward.cpp has the steps in
// order.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <cuda_runtime_api.h>

#include <torch/csrc/stable/tensor.h>

#include "../sm90/backward/launch.h"
#include "../sm90/shared_dbias/launch.h"
#include "backward_schedule.h"
#include "call.h"
#include "common.h"
#include "sequences.h"

namespace flash_dmattn {

// The kernels of one dtype and one pair of head dims, for dense calls or for calls with sequences. `rows`, `few_keys`,
// `sums` and `add_chunks` depend on the dtype only.
struct BackwardKernels {
  torch::headeronly::ScalarType dtype;
  int64_t head_dim, head_dim_v;
  decltype(&launch_backward_main<__half, 64, 64>) main;
  decltype(&launch_shared_dbias<__half, 64, 64>) shared_dbias;
  decltype(&launch_backward_rows<__half>) rows;
  decltype(&launch_few_keys<__half>) few_keys;
  decltype(&launch_backward_sums<__half>) sums;
  decltype(&launch_add_chunks<__half>) add_chunks;
};

// The kernels that serve a call.
const BackwardKernels& backward_kernels(const char* op, bool has_sequences, torch::headeronly::ScalarType dtype,
                                        const Sizes& sizes);

// Arguments of the operators.
struct BackwardArguments {
  using Tensor = torch::stable::Tensor;

  const char* op;
  const Tensor& dout;
  const std::optional<Tensor>& dlse;
  const Tensor &q, &k, &v;
  const std::optional<Tensor>& bias;
  const Tensor &out, &lse;
  const std::optional<Tensor>&dq, &dk, &dv, &dbias, &dbias_sums, &delta;
  double softmax_scale;
  int64_t num_dbias_chunks;
  // The gradients of a sequence are summed alike in every call that has it. Calls of such kind are deterministic, and have
  // no mask and no bias.
  bool invariant = false;
  const SequenceCall* sequences = nullptr;  // null in a dense call; the members below are for dense calls alone
  std::vector<Tensor> mask{};
  std::optional<Tensor> key_order{};
  int64_t low = 0, high = 0;
  double softcap = 0;
  bool deterministic = false;
  std::optional<Tensor> dropout_key{};
  double dropout_p = 0;
  int64_t outside = 0, zero = 0;  // as in the forward operator
};

struct BackwardPass {
  using Tensor = torch::stable::Tensor;

  const BackwardArguments& args;
  const char* const op = args.op;
  const SequenceCall* const sequences = args.sequences;
  const Sizes sizes = sizes_of(op, args.q, args.k, args.v);
  const BackwardKernels& kernels = backward_kernels(op, sequences != nullptr, args.q.scalar_type(), sizes);
  const bool has_mask = !args.mask.empty();
  const bool is_banded = sequences == nullptr && has_band(sizes, args.low, args.high);
  const int64_t tiles_q = ceil_div(sizes.seqlen_q, kTile), tiles_k = ceil_div(sizes.seqlen_k, kTile);
  const int64_t pairs_k = sizes.batch * sizes.num_heads_k;
  const int64_t entries = sequences == nullptr ? sizes.batch : sequences->bounds.size(0);  // or sequences
  // Columns of the accumulators.
  const int64_t dq_columns = accumulated(kernels.head_dim), dv_columns = accumulated(kernels.head_dim_v);

  BackwardParams params{};
  BackwardRowsParams rows{};
  MaskForm mask_form = MaskForm::kNone;
  BackwardBias bias_form = BackwardBias::kNone;
  BackwardCall call{};
  DbiasWriter writer = DbiasWriter::kNone;
  BackwardSchedule schedule{};
  DbiasSchedule dbias_schedule{};
  Diagonals summed{};  // of a bias by distance: not flat, and with a tile of the call
  bool turns_dq = false, runs_main_kernel = false;
  int num_sms = 0, clusters = 0, block_m = 0, blocks = 0;
  cudaStream_t stream = nullptr;
  // Pairs of a batch entry and a query head, or query heads of a call with sequences; and the padded rows of each.
  int64_t pairs = 0, rows_of_pair = 0;
  Tensor works{}, memory{}, ordered_lists{};  // hold what the params point to
  float* slots = nullptr;                     // of the shared_dbias kernel, and its counter
  int* dbias_counter = nullptr;

  void run();

 private:
  // backward_arguments.cpp: checks the arguments, and says to the kernels what they compute and where it lies.
  void check_arguments();
  void check_dbias() const;
  void check_counts(int64_t tiles_of_queries, int64_t tiles_of_keys) const;
  void describe_rows();
  void describe_bias();
  void describe_scores();
  void describe_operands();
  bool has_bias_tiles() const { return has_tiles(form_of(bias_form)); }

  // backward_scratch.cpp: how blocks share the work, and the memory that they need for it.
  struct Layout;
  void schedule_tiles();
  Sections sections(int64_t count, int64_t heads) const;
  void list_tiles();
  Layout lay_out() const;
  void allocate();
  void choose_what_to_clear(const Layout& at, float* start);
  int64_t row_bytes() const;
  static int64_t accumulated(int64_t head_dim) {
    const int64_t columns = accum_columns(static_cast<int>(head_dim));
    return ceil_div(head_dim, columns) * columns;
  }

  // backward_dbias.cpp: dbias of a bias per query and key, or by distance.
  Sizes dbias_sizes() const;
  void choose_writer(int device);
  void clear_dbias() const;
  SharedDbiasParams summed_operands(const Sizes& scores) const;
  void launch_shared_dbias(SharedDbiasParams& shared) const;
  void store_shared_dbias() const;
  void add_chunks(const SharedDbiasParams& from) const;
  bool has_dvalues() const { return args.outside != kNotByDistance && args.dbias.has_value(); }
  void describe_diagonals();
  void sum_diagonals() const;
  void store_dvalues() const;

  // backward.cpp: the kernels before and after the main kernel.
  void order_lists();
  void sum_delta() const;
  void store_sums() const;
};

}  // namespace flash_dmattn
