// The forward operator of calls with sequences: turns the tensors from flash_dmattn/backends/cuda/sequences.py into
// ForwardParams and launches the kernels.
#include <algorithm>
#include <cstdint>
#include <optional>

#include <cuda_runtime_api.h>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "../sm90/forward/launch.h"
#include "bias.h"
#include "build_instances.h"  // written by the build
#include "call.h"
#include "common.h"
#include "sections.h"
#include "sequences.h"
#include "tensor_map.h"
#include "tile_scheduler.h"

namespace flash_dmattn {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr const char* kName = "cuda_forward_sequences";

struct KernelInstance {
  decltype(&launch_forward_sequences<__half, 64, 64>) launch;
  int head_dim, head_dim_v;
};

// The smallest kernel instance whose head dims hold those of the call.
KernelInstance instance_for(ScalarType dtype, int64_t head_dim, int64_t head_dim_v) {
#define FLASH_DMATTN_INSTANCE(element, scalar, d, dv)                     \
  if (dtype == ScalarType::scalar && head_dim <= d && head_dim_v <= dv) { \
    return {&launch_forward_sequences<element, d, dv>, d, dv};            \
  }
  FLASH_DMATTN_SEQUENCES_INSTANCES(FLASH_DMATTN_INSTANCE)
#undef FLASH_DMATTN_INSTANCE
  CHECK_ARGUMENT(false, "the extension was not built for sequences of head dims ", head_dim, " and ", head_dim_v,
                 " (v) of this dtype");
  return {};
}

// Chooses how the kernel reads the bias, and sets its fields.
Bias describe_bias(const Tensor& bias, const Tensor& q, ForwardParams& params) {
  set_bias(kName, bias, q.size(2), params);
  params.bias_is_per_query = is_broadcast(bias, 3);
  if (params.bias_is_per_query) return Bias::kNone;
  if (is_broadcast(bias, 2)) return Bias::kVector;
  CHECK_ARGUMENT(can_copy_tiles(bias, q), "bias per query and key needs rows that TMA can read, in the dtype of q");
  return Bias::kTile;
}

// Writes out and lse, of all rows. q, k, v and out are (1, T, H, D) where `is_packed`, else (S, L, H, D), entries of q,
// k and v next to each other; beside a block_table k and v are (pages, page_size, Hk, D). lse is (1, Hq, Tq) or
// (S, Hq, Lq). bias is 4-D, its packing as BiasPacking says.
void forward(Tensor q, Tensor k, Tensor v, Tensor bounds, std::optional<Tensor> block_table, std::optional<Tensor> bias,
             std::optional<Tensor> sink, Tensor out, Tensor lse, bool is_packed, int64_t bias_packing, int64_t most_q, int64_t most_k, int64_t left,
             int64_t right, double softmax_scale, double softcap) {
  Sizes sizes = sizes_of(kName, q, k, v, block_table.has_value());
  // Beside pages the keys of an entry are those that a row of the table has room for.
  if (block_table.has_value()) {
    CHECK_ARGUMENT(block_table->dim() == 2, "block_table has ", block_table->dim(), " dims; it needs 2");
    sizes.seqlen_k *= block_table->size(1);
  }
  const KernelInstance instance = instance_for(q.scalar_type(), sizes.head_dim, sizes.head_dim_v);
  check_array(kName, out, "out", {sizes.batch, sizes.seqlen_q, sizes.num_heads, sizes.head_dim_v}, q.scalar_type(), q);
  check_array(kName, lse, "lse", {sizes.batch, sizes.num_heads, sizes.seqlen_q}, ScalarType::Float, q);
  ForwardParams params{};
  params.sequences = sequence_params(kName, {bounds, is_packed, bias_packing, most_q, most_k, left, right}, sizes, bias, q);
  SequenceParams& of = params.sequences;
  const int64_t number = bounds.size(0);
  if (block_table.has_value()) set_pages(kName, *block_table, number, k, v, of);
  const Bias form = bias.has_value() ? describe_bias(*bias, q, params) : Bias::kNone;
  const int64_t all_q = sizes.batch * sizes.seqlen_q;
  const int block_m = sequences_block_m(instance.head_dim, instance.head_dim_v, all_q / number, block_table.has_value());

  const CurrentDevice device(kName, q);  // before the TMA descriptors, whose encoder needs its context
  params.q = ragged_rows_map(kName, q, "q", block_m);
  const auto keys_map = [&](const Tensor& x, const char* name) {
    return block_table.has_value() ? pages_map(kName, x, name, of.page_box) : ragged_rows_map(kName, x, name, kTile);
  };
  params.k = keys_map(k, "k");
  params.v = keys_map(v, "v");
  if (form == Bias::kTile) {
    params.bias = of.bias_packs_queries ? ragged_scores_map(kName, *bias, "bias", block_m)
                                        : scores_by_position_map(kName, *bias, "bias", block_m);
  }
  params.out = out.mutable_data_ptr();
  params.out_row_step = static_cast<int>(sizes.num_heads);
  params.out_head_step = 1;
  params.lse = static_cast<float*>(lse.mutable_data_ptr());
  set_sink(kName, sink, sizes.num_heads, q, params);
  set_sizes(sizes, params);
  set_scale(softmax_scale, softcap, params);

  const int64_t tiles = most_blocks(number, all_q, of.most_q, block_m);
  CHECK_ARGUMENT(tiles * sizes.num_heads <= kMaxInt / 2, "there are more than 2^30 tiles of rows");
  // A section's keys and values fit in L2.
  const int64_t group = sizes.num_heads / sizes.num_heads_k;
  const int64_t all_k = block_table.has_value() ? std::min(number * of.most_k, k.size(0) * k.size(1))
                                                : sizes.batch * sizes.seqlen_k;
  const int64_t group_bytes = all_k * (sizes.head_dim + sizes.head_dim_v) * 2;
  of.section =
      static_cast<int>(std::min(sizes.num_heads, group * std::max<int64_t>(1, kSectionBytes / group_bytes)));
  const Tensor works = list_works(kName, q, number, false, block_m, tiles, 0, of, &params.tile_counter, device.stream);
  const int blocks = static_cast<int>(std::min<int64_t>(tiles * sizes.num_heads, sm_count(kName, device.index)));
  check(instance.launch(params, form, block_m, blocks, device.stream), kName, "launching the kernel");
  fill_gaps(kName, out, false, params.lse, of, number, device.stream);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(flash_dmattn, m) {
  m.def(
      "cuda_forward_sequences(Tensor q, Tensor k, Tensor v, Tensor bounds, Tensor? block_table, Tensor? bias, "
      "Tensor? sink, Tensor(a!) out, Tensor(b!) lse, bool is_packed, int bias_packing, int most_q, int most_k, int left, int right, "
      "float softmax_scale, float softcap) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CUDA, m) { m.impl("cuda_forward_sequences", TORCH_BOX(&forward)); }
STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CPU, m) { m.impl("cuda_forward_sequences", TORCH_BOX(&forward)); }

}  // namespace flash_dmattn
