// The forward operators, of dense calls and of calls with sequences: turn the tensors from flash_dmattn/backends/cuda
// into ForwardParams and launch the kernels.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include <cuda_runtime_api.h>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "../sections.h"
#include "../sm90/forward/launch.h"
#include "build_instances.h"  // written by the build
#include "call.h"
#include "common.h"
#include "keys_in_order.h"
#include "num_splits.h"
#include "sequences.h"
#include "tensor_map.h"

namespace flash_dmattn {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

struct KernelInstance {
  ScalarType dtype;
  int64_t head_dim, head_dim_v;
  decltype(&launch_forward<__half, 64, 64>) launch;
  decltype(&forward_tile<__half, 64, 64>) tile;
};

#define FLASH_DMATTN_INSTANCE(element, scalar, d, dv) \
  {ScalarType::scalar, d, dv, &launch_forward<element, d, dv>, &forward_tile<element, d, dv>},
constexpr std::initializer_list<KernelInstance> kInstances{FLASH_DMATTN_INSTANCES(FLASH_DMATTN_INSTANCE)};
#undef FLASH_DMATTN_INSTANCE
#define FLASH_DMATTN_INSTANCE(element, scalar, d, dv) \
  {ScalarType::scalar, d, dv, &launch_forward_sequences<element, d, dv>, &forward_sequences_tile<element, d, dv>},
constexpr std::initializer_list<KernelInstance> kSequencesInstances{
    FLASH_DMATTN_SEQUENCES_INSTANCES(FLASH_DMATTN_INSTANCE)};
#undef FLASH_DMATTN_INSTANCE

// Arguments of the operators.
struct ForwardArguments {
  const char* op;
  const Tensor &q, &k, &v;
  const std::optional<Tensor>&bias, &sink;
  const Tensor &out, &lse;
  double softmax_scale, softcap;
  const std::optional<Tensor>& max_scores;
  const SequenceCall* sequences = nullptr;  // null in a dense call; the members below are for dense calls alone
  std::vector<Tensor> mask{};
  int64_t low = 0, high = 0, num_splits = 1;
  std::optional<Tensor> dropout_key{};
  double dropout_p = 0;
  bool one_mask_row = false;
  int64_t outside = 0, zero = 0, group_shift = 0;
  std::optional<Tensor> counters{};
};

// Chooses how the kernel reads the bias, and sets its fields.
Bias describe_bias(const ForwardArguments& call, const KernelInstance& instance, ForwardParams& params) {
  const Tensor& bias = *call.bias;
  params.bias_values = bias_values(call.op, bias, call.q.size(2));
  if (call.outside != kNotByDistance) return Bias::kRelative;
  params.bias_is_per_query = is_broadcast(bias, 3);
  if (params.bias_is_per_query) return Bias::kNone;
  if (is_broadcast(bias, 2)) return Bias::kVector;
  if (can_copy_tiles(bias, call.q.scalar_type())) return Bias::kTile;
  const bool takes_floats = has_float_tile_kernels(static_cast<int>(instance.head_dim),
                                                   static_cast<int>(instance.head_dim_v)) &&
                            call.sequences == nullptr && !call.dropout_key.has_value();
  if (takes_floats && can_copy_tiles(bias, ScalarType::Float)) return Bias::kFloatTile;
  CHECK_FOR(call.op, call.sequences == nullptr,
            "bias per query and key needs rows that TMA can read, in the dtype of q");
  return Bias::kStrided;
}

// Whether blocks keep the bias that batch entries share, for work tiles that follow each other. They have to be many.
bool pays_to_hold_bias(const KernelInstance& instance, Bias form, const Sizes& sizes, const ForwardParams& params,
                       bool has_more, int num_sms) {
  constexpr int64_t kTilesOfBlock = 4;
  if (has_more || params.bias_values.has_batch || sizes.batch == 1) return false;
  const int64_t least = sizes.batch * sizes.num_heads * ceil_div(sizes.seqlen_q, int64_t{256});
  return least >= kTilesOfBlock * num_sms && can_hold_bias(instance.head_dim, instance.head_dim_v, form,
                                                           static_cast<int>(sizes.seqlen_q), sizes.seqlen_k);
}

// Checks that 2^group_shift heads of a group can be rows, and returns the sizes of the call with them. The kernel takes
// no bias, mask, sink or dropout then. A consumer's 64 rows are whole queries.
Sizes sizes_in_rows(const ForwardArguments& call, Sizes sizes) {
  const int64_t shift = call.group_shift;
  CHECK_FOR(call.op, shift >= 0 && shift <= 6, "group_shift is ", shift, "; it may be 0 to 6");
  if (shift == 0) return sizes;
  CHECK_FOR(call.op, sizes.num_heads / sizes.num_heads_k % (int64_t{1} << shift) == 0, "groups have ",
            sizes.num_heads / sizes.num_heads_k, " heads; group_shift ", shift, " needs a multiple of ", 1 << shift);
  CHECK_FOR(call.op,
            call.mask.empty() && !call.bias.has_value() && !call.sink.has_value() && !call.dropout_key.has_value(),
            "group_shift is for calls without a mask, bias, sink and dropout");
  sizes.seqlen_q <<= shift;
  sizes.num_heads >>= shift;
  CHECK_FOR(call.op, sizes.seqlen_q + sizes.seqlen_k <= kMaxInt / 2, "there are ", sizes.seqlen_q, " rows and ",
            sizes.seqlen_k, " keys; together they may be 2^30 - 1");
  return sizes;
}

// Key blocks that the longest work tile walks. The host does not know how many a mask leaves: it assumes a quarter.
int64_t longest_walk(const Sizes& sizes, bool has_mask, const ForwardTile& tile, const ForwardParams& params) {
  const int64_t all = ceil_div(sizes.seqlen_k, tile.block_n);
  if (has_mask) return ceil_div(all, 4);
  return std::min(all, ceil_div(std::max(tile.block_m + params.high - params.low, 0), tile.block_n) + 1);
}

// out may have rows before heads, as q has, or in a dense call heads before rows.
void set_out(const ForwardArguments& call, const Sizes& sizes, ForwardParams& params) {
  const Tensor& out = call.out;
  const bool has_heads_first = !out.is_contiguous();
  CHECK_FOR(call.op,
            !has_heads_first || (out.stride(3) == 1 && out.stride(1) == sizes.head_dim_v &&
                                 out.stride(2) == sizes.seqlen_q * sizes.head_dim_v &&
                                 out.stride(0) == sizes.num_heads * sizes.seqlen_q * sizes.head_dim_v),
            "out needs to be contiguous as (B, Lq, Hq, Dv) or as (B, Hq, Lq, Dv)");
  params.out = out.mutable_data_ptr();
  params.out_row_step = static_cast<int>(has_heads_first ? 1 : sizes.num_heads);
  params.out_head_step = static_cast<int>(has_heads_first ? sizes.seqlen_q : 1);
}

// Returns counters that are 0: the counters of the call, if they are enough. They live as long as the returned tensor.
Tensor zero_counters(const ForwardArguments& call, int64_t count, cudaStream_t stream) {
  if (call.counters.has_value() && call.counters->numel() >= count) {
    check_array(call.op, *call.counters, "counters", {call.counters->numel()}, ScalarType::Int, call.q);
    return *call.counters;
  }
  Tensor counters = empty(call.q, {count}, ScalarType::Int);
  check(cudaMemsetAsync(counters.mutable_data_ptr(), 0, count * sizeof(int), stream), call.op, "clearing counters");
  return counters;
}

// The blocks of a launch, and memory that its work tiles need.
struct Work {
  int blocks;
  Tensor memory, results{};
};

// Sets the work tiles of a dense call, and their order. `rows`: its sizes where heads are rows, which bands do not count.
Work schedule(const ForwardArguments& call, const Sizes& sizes, const Sizes& rows, const ForwardTile& tile,
              bool has_bias_per_score, int num_sms, cudaStream_t stream, ForwardParams& params) {
  const bool has_mask = !call.mask.empty(), is_banded = has_band(sizes, call.low, call.high);
  const int64_t pairs = rows.batch * rows.num_heads, blocks_q = ceil_div(rows.seqlen_q, tile.block_m);
  CHECK_FOR(call.op, pairs * blocks_q <= kMaxInt / 2, "there are more than 2^30 tiles of rows");
  params.blocks_q = static_cast<int>(blocks_q);
  params.batch_is_inner = shares_over_batch(params, has_bias_per_score, has_mask);
  // A section's keys and values fit in L2.
  const int64_t group_bytes = sizes.seqlen_k * (sizes.head_dim + sizes.head_dim_v) * 2;
  const int64_t inner_pairs = params.batch_is_inner ? rows.batch : rows.num_heads / rows.num_heads_k;
  const int64_t inner_bytes = params.batch_is_inner ? group_bytes * sizes.batch : group_bytes;
  const int64_t most = kSectionBytes / std::max<int64_t>(1, inner_bytes) * inner_pairs;
  // A few queries on many keys: their walks are nearly as long, and L2 decides.
  constexpr int64_t kFewQueries = 8;
  const bool rows_shrink = shortens_rows(sizes, call.low, call.high) && kFewQueries * sizes.seqlen_q >= sizes.seqlen_k;
  params.sections = sections_of(pairs, blocks_q, most, inner_pairs, rows_shrink, num_sms);

  CHECK_FOR(call.op, call.num_splits >= 0 && call.num_splits <= kMaxSplits, "num_splits is ", call.num_splits,
            "; it may be 0 to ", kMaxSplits);
  const int64_t tiles = pairs * blocks_q;
  KvSplits split{tiles, 1};
  if (tile.split_floats > 0) {
    const int64_t steps = longest_walk(sizes, has_mask, tile, params);
    split = call.num_splits == 0 ? estimate_num_splits(tiles, steps, num_sms, is_banded)
                                 : KvSplits{tiles - tiles % num_sms, call.num_splits};
  }
  const int64_t tiles_split = split.num_splits > 1 ? tiles - split.unsplit_tiles : 0;
  params.unsplit_tiles = static_cast<int>(tiles - tiles_split);
  params.num_splits = tiles_split > 0 ? static_cast<int>(split.num_splits) : 1;
  params.num_work_tiles = static_cast<int>(params.unsplit_tiles + tiles_split * params.num_splits);

  Work work{std::min(params.num_work_tiles, num_sms)};
  // Tiles that are alike are scheduled statically.
  const bool needs_counter = (has_mask || is_banded) && params.num_work_tiles > work.blocks;
  if (needs_counter || tiles_split > 0) {
    work.memory = zero_counters(call, 1 + tiles_split * tile.split_warps, stream);
    int* const first = static_cast<int*>(work.memory.mutable_data_ptr());
    if (needs_counter) params.tile_counter = first;
    params.split_arrivals = first + 1;
  }
  if (tiles_split > 0) {
    work.results = empty(call.q, {tiles_split * params.num_splits * tile.split_floats}, ScalarType::Float);
    params.split_results = static_cast<float*>(work.results.mutable_data_ptr());
  }
  return work;
}

// The same for a call with sequences.
Work schedule_sequences(const ForwardArguments& call, const Sizes& sizes, const ForwardTile& tile, int num_sms,
                        cudaStream_t stream, ForwardParams& params) {
  SequenceParams& of = params.sequences;
  const int64_t number = call.sequences->bounds.size(0);
  const int64_t tiles = most_blocks(number, sizes.batch * sizes.seqlen_q, of.most_q, tile.block_m);
  CHECK_FOR(call.op, tiles * sizes.num_heads <= kMaxInt / 2, "there are more than 2^30 tiles of rows");
  // A section's keys and values fit in L2.
  const int64_t all_k = of.block_table != nullptr ? std::min(number * of.most_k, call.k.size(0) * call.k.size(1))
                                                  : sizes.batch * sizes.seqlen_k;
  const int64_t group_bytes = all_k * (sizes.head_dim + sizes.head_dim_v) * 2;
  const int64_t most = params.heads_per_group * std::max<int64_t>(1, kSectionBytes / group_bytes);
  of.section = static_cast<int>(std::min(sizes.num_heads, most));
  FillGapsParams gaps{};
  gaps.tensors = 1;
  gaps.of[0] = gaps_of(call.out, false, of);
  gaps.lse = params.lse;
  gaps.has_wide_lse = params.has_wide_lse;
  gaps.num_heads = static_cast<int>(sizes.num_heads);
  return {static_cast<int>(std::min<int64_t>(tiles * sizes.num_heads, num_sms)),
          list_works(call.op, call.q, number, false, tile.block_m, tiles, 0, gaps, num_sms, of, &params.tile_counter,
                     stream)};
}

// The sizes of a call. With pages an entry has as many keys as a row of the table has room for.
Sizes sizes_of_call(const ForwardArguments& call, bool has_pages) {
  Sizes sizes = sizes_of(call.op, call.q, call.k, call.v, has_pages);
  if (has_pages) {
    const Tensor& table = *call.sequences->block_table;
    CHECK_FOR(call.op, table.dim() == 2, "block_table has ", table.dim(), " dims; it needs 2");
    sizes.seqlen_k *= table.size(1);
  }
  return sizes;
}

// Checks the results, the sequences, the bias, the mask and dropout, and chooses the kernel of the instance.
ForwardVariant choose_variant(const ForwardArguments& call, const Sizes& sizes, const Sizes& rows,
                              const KernelInstance& instance, bool has_pages, ForwardParams& params) {
  const char* const op = call.op;
  const SequenceCall* const sequences = call.sequences;
  check_dims(op, call.out, "out", {sizes.batch, sizes.seqlen_q, sizes.num_heads, sizes.head_dim_v}, call.q);
  check_dtype(op, call.out, "out", call.q.scalar_type());
  CHECK_FOR(op, sequences == nullptr || call.out.is_contiguous(), "out needs to be contiguous");
  params.has_wide_lse = call.bias.has_value();
  check_array(op, call.lse, "lse", {sizes.batch, sizes.num_heads, sizes.seqlen_q},
              params.has_wide_lse ? ScalarType::Double : ScalarType::Float, call.q);
  params.lse = call.lse.mutable_data_ptr();
  if (call.max_scores.has_value()) {
    check_array(op, *call.max_scores, "max_scores", {sizes.batch, sizes.num_heads, sizes.seqlen_q}, ScalarType::Float,
                call.q);
    params.max_scores = static_cast<float*>(call.max_scores->mutable_data_ptr());
  }
  if (sequences != nullptr) {
    params.sequences = sequence_params(op, *sequences, sizes, call.bias, call.q);
    if (has_pages) {
      set_pages(op, *sequences->block_table, sequences->bounds.size(0), call.k, call.v, params.sequences);
    }
  } else if (call.outside != kNotByDistance) {
    set_distances(op, call.bias, call.outside, call.zero, sizes, call.q, params);
    CHECK_FOR(op, has_window_kernels(static_cast<int>(instance.head_dim), static_cast<int>(instance.head_dim_v)),
              "there are no kernels with a bias by distance of head dims ", instance.head_dim, " and ",
              instance.head_dim_v, " (v)");
  } else if (call.bias.has_value()) {
    check_bias(op, *call.bias, sizes, call.q);
  }
  ForwardVariant variant{};
  variant.bias = call.bias.has_value() ? describe_bias(call, instance, params) : Bias::kNone;
  variant.mask = checked_mask_form(op, call.mask, false, sizes, call.q);
  CHECK_FOR(op, variant.mask != MaskForm::kIntervals || takes_intervals(variant.bias),
            "a bias per query and key needs bits of a mask");
  set_dropout(op, call.dropout_key, call.dropout_p, instance.head_dim, instance.head_dim_v, call.q, params);
  variant.has_dropout = params.dropout.key != nullptr;
  CHECK_FOR(op, !variant.has_dropout || variant.bias != Bias::kStrided,
            "bias has rows that TMA cannot read; dropout has no kernel for it");
  CHECK_FOR(op, !variant.has_dropout || takes_dropout(variant.bias), "dropout has no kernel for a bias by distance");
  variant.has_one_mask_row = call.one_mask_row;
  variant.has_pages = has_pages;
  variant.has_max_scores = params.max_scores != nullptr;
  CHECK_FOR(op, !variant.has_max_scores || (!call.bias.has_value() && call.mask.empty() && !variant.has_dropout && !has_pages),
            "max_scores is for calls without a mask, bias, dropout and pages");
  variant.queries = sequences == nullptr ? rows.seqlen_q : sizes.batch * sizes.seqlen_q / sequences->bounds.size(0);
  return variant;
}

// Says to the kernel where its operands lie, and how scores are made of them.
void describe_operands(const ForwardArguments& call, const Sizes& sizes, const ForwardVariant& variant,
                       const ForwardTile& tile, ForwardParams& params) {
  const char* const op = call.op;
  const SequenceParams& of = params.sequences;
  // Blocks that keep their bias read the rows of many heads at a time, each at its own place.
  const auto map = [&](const Tensor& x, const char* name, int rows) {
    return map_rows(op, x, name, rows, of, variant.holds_bias && x.size(2) * x.size(3) > 128);
  };
  const auto map_keys = [&](const Tensor& x, const char* name) {
    return variant.has_pages ? pages_map(op, x, name, of.page_box) : map(x, name, tile.block_n);
  };
  params.q = call.group_shift > 0
                 ? group_rows_map(op, call.q, "q", tile.block_m, static_cast<int>(call.group_shift))
                 : map(call.q, "q", tile.block_m);
  params.k = map_keys(call.k, "k");
  params.v = map_keys(call.v, "v");
  if (has_tiles(variant.bias)) params.bias = map_scores(op, *call.bias, "bias", tile.block_m, of);
  set_out(call, sizes, params);
  set_sink(op, call.sink, sizes.num_heads, call.q, params);
  set_band(sizes, call.low, call.high, params);
  params.group_shift = static_cast<int>(call.group_shift);
  set_scale(call.softmax_scale, call.softcap, variant.bias != Bias::kNone, params);
  if (!call.mask.empty()) params.mask = mask_tiles(call.mask, call.mask[1], sizes);
}

// Writes out, lse and max_scores.
void forward(const ForwardArguments& call) {
  const char* const op = call.op;
  const SequenceCall* const sequences = call.sequences;
  const bool has_pages = sequences != nullptr && sequences->block_table.has_value();
  const Sizes sizes = sizes_of_call(call, has_pages);
  const ScalarType dtype = call.q.scalar_type();
  const KernelInstance& instance = sequences == nullptr
                                       ? instance_for(op, kInstances, "", dtype, sizes)
                                       : instance_for(op, kSequencesInstances, "sequences of ", dtype, sizes);
  ForwardParams params{};
  const Sizes rows = sizes_in_rows(call, sizes);
  set_sizes(rows, params);
  ForwardVariant variant = choose_variant(call, sizes, rows, instance, has_pages, params);
  const CurrentDevice device(op, call.q);  // before the TMA descriptors, whose encoder needs its context
  const int num_sms = sm_count(op, device.index);
  const bool has_more = !call.mask.empty() || variant.has_dropout || sequences != nullptr ||
                        has_band(sizes, call.low, call.high);
  variant.holds_bias = pays_to_hold_bias(instance, variant.bias, sizes, params, has_more, num_sms);
  const ForwardTile tile = instance.tile(variant);
  describe_operands(call, sizes, variant, tile, params);
  const bool has_bias_per_score = has_tiles(variant.bias) || is_read_by_threads(variant.bias);
  const Work work = sequences == nullptr
                        ? schedule(call, sizes, rows, tile, has_bias_per_score, num_sms, device.stream, params)
                        : schedule_sequences(call, sizes, tile, num_sms, device.stream, params);
  check(instance.launch(params, variant, work.blocks, device.stream), op, "launching the kernel");
}

// mask is {}, or (bits, row_lists) of a TileMask, or (bounds, row_lists) of an IntervalMask; low and high are the band
// if there is no mask.
// sink: (Hq), contiguous, in fp32 or 16 bits.
// dropout_key: int64 (2) of 32 bits each, or (4) of a part of a call, as key_of_part of flash_dmattn/reference/dropout.py
// makes it. With it a bias per query and key needs rows that TMA can read, and there is no softcap.
// num_splits: KV splits of the work tiles of the last wave. 1 for none, 0 to let estimate_num_splits choose.
// one_mask_row: whether the mask lets all queries see the same keys.
// outside, zero: of a bias by distance, whose values (B, H, 1, n) are in the place of the bias: see set_distances.
// group_shift: 2^group_shift heads of a group are rows of one tile, so that their keys are read once.
// Calls that follow an IntervalMask have its key_order. k, v and a bias per key are in the caller's order.
// The packer of a mask may have made `fresh` for this call. First it has counters of 0, which the call uses up if it needs
// no more of them. k, v and a bias per key in the order of keys may follow.
// max_scores: (B, Hq, Lq) in fp32, for the largest score of each row of a call without a mask, bias and dropout.
void forward_kernel(Tensor q, Tensor k, Tensor v, std::vector<Tensor> mask, std::optional<Tensor> bias,
                    std::optional<Tensor> sink, Tensor out, Tensor lse, int64_t low, int64_t high, double softmax_scale,
                    double softcap, int64_t num_splits, std::optional<Tensor> dropout_key, double dropout_p,
                    bool one_mask_row, int64_t outside, int64_t zero, int64_t group_shift,
                    std::optional<Tensor> key_order, std::vector<Tensor> fresh,
                    std::optional<Tensor> max_scores) {
  constexpr const char* kName = "cuda_forward_kernel";
  std::optional<Tensor> counters;
  if (!fresh.empty()) counters = fresh[0];
  if (fresh.size() > 1) {
    CHECK_ARGUMENT(fresh.size() == 3 || fresh.size() == 4, "fresh has ", fresh.size(),
                   " tensors; it needs counters, or counters, k, v and perhaps a bias");
    for (const auto& [to, from] : {std::pair{&k, &fresh[1]}, std::pair{&v, &fresh[2]}}) {
      check_dims(kName, *from, "fresh", {to->size(0), to->size(1), to->size(2), to->size(3)}, q);
      check_dtype(kName, *from, "fresh", to->scalar_type());
      *to = *from;
    }
    if (fresh.size() == 4) bias = fresh[3];
  } else if (key_order.has_value()) {
    CHECK_ARGUMENT(k.is_cuda(), "k is not on a CUDA device; the kernel is written for sm_90a");
    CHECK_ARGUMENT(mask.size() == 2, "key_order is of an interval mask");
    const CurrentDevice device(kName, k);
    counters = empty(k, {kCounters}, ScalarType::Int);
    KeysInOrder made = keys_in_order(kName, k, v, bias, *key_order, mask[0], &*counters, device.stream);
    k = std::move(made.k);
    v = std::move(made.v);
    bias = std::move(made.bias);
  }
  ForwardArguments call{kName, q, k, v, bias, sink, out, lse, softmax_scale, softcap, max_scores};
  call.mask = std::move(mask);
  call.low = low;
  call.high = high;
  call.num_splits = num_splits;
  call.dropout_key = std::move(dropout_key);
  call.dropout_p = dropout_p;
  call.one_mask_row = one_mask_row;
  call.outside = outside;
  call.zero = zero;
  call.group_shift = group_shift;
  call.counters = std::move(counters);
  forward(call);
}

// Writes all rows. q, k, v and out are (T, H, D) or (1, T, H, D) where `is_packed`, else (S, L, H, D). Entries of q, k
// and v lie next to each other. With a block_table k and v are (pages, page_size, Hk, D). lse is (Hq, Tq) or (1, Hq, Tq),
// or (S, Hq, Lq). max_scores lies as lse does; its rows of no sequence are not written. bias is 4-D, and BiasPacking says
// how it is packed.
void forward_sequences(Tensor q, Tensor k, Tensor v, Tensor bounds, std::optional<Tensor> block_table,
                       std::optional<Tensor> bias, std::optional<Tensor> sink, Tensor out, Tensor lse, bool is_packed,
                       int64_t bias_packing, int64_t most_q, int64_t most_k, int64_t left, int64_t right,
                       double softmax_scale, double softcap, std::optional<Tensor> max_scores) {
  if (is_packed) {
    for (Tensor* x : {&q, &k, &v, &out}) as_entry(*x, 4);
    as_entry(lse, 3);
    if (max_scores.has_value()) as_entry(*max_scores, 3);
  }
  const SequenceCall sequences{bounds, block_table, is_packed, bias_packing, most_q, most_k, left, right};
  forward({"cuda_forward_sequences", q, k, v, bias, sink, out, lse, softmax_scale, softcap, max_scores, &sequences});
}

template <class Library>
void implement(Library& m) {
  m.impl("cuda_forward_kernel", TORCH_BOX(&forward_kernel));
  m.impl("cuda_forward_sequences", TORCH_BOX(&forward_sequences));
}

}  // namespace

// The shapes of tensors are checked, but not the numbers in a mask: lists, bounds and the order of keys must come from the
// packing operators of this library. Others would lead kernels out of their tensors.
STABLE_TORCH_LIBRARY_FRAGMENT(flash_dmattn, m) {
  m.def(
      "cuda_forward_kernel(Tensor q, Tensor k, Tensor v, Tensor[] mask, Tensor? bias, Tensor? sink, Tensor(a!) out, "
      "Tensor(b!) lse, int low, int high, float softmax_scale, float softcap, int num_splits, Tensor? dropout_key, "
      "float dropout_p, bool one_mask_row, int outside, int zero, int group_shift, Tensor? key_order, "
      "Tensor(c!)[] fresh, Tensor(d!)? max_scores=None) -> ()");
  m.def(
      "cuda_forward_sequences(Tensor q, Tensor k, Tensor v, Tensor bounds, Tensor? block_table, Tensor? bias, "
      "Tensor? sink, Tensor(a!) out, Tensor(b!) lse, bool is_packed, int bias_packing, int most_q, int most_k, int left, "
      "int right, float softmax_scale, float softcap, Tensor(c!)? max_scores=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CUDA, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CPU, m) { implement(m); }

}  // namespace flash_dmattn
