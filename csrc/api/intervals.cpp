// The operators of interval masks: how one is made, what kernels walk of it, and keys and values in its order.
#include <algorithm>
#include <cstdint>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "../sm90/mask/mask.h"
#include "call.h"
#include "common.h"
#include "tile_lists.h"

namespace flash_dmattn {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kSegmentKeys = 16384;
static_assert(kSegmentKeys % kMostChunkKeys == 0);
constexpr int64_t kMostHeads = kMaxInt >> (2 * kCurveBits + 1);  // a head's number fits the code of a key

// Returns (start, stop) int32 (B, H, Lk) of causal top-k, as `topk_intervals` of
// flash_dmattn/masks/prepared/interval_operators.py. keys is int32 (B, H, Lk), contiguous.
std::vector<Tensor> topk_intervals(Tensor keys, int64_t k, int64_t seqlen_q, int64_t local) {
  constexpr const char* kName = "cuda_topk_intervals";
  CHECK_ARGUMENT(keys.is_cuda(), "keys is not on a CUDA device; the kernel is written for sm_90a");
  CHECK_ARGUMENT(keys.scalar_type() == ScalarType::Int && keys.dim() == 3 && keys.is_contiguous(),
                 "keys needs to be int32 (B, H, Lk), contiguous");
  const int64_t heads = keys.size(0) * keys.size(1), seqlen_k = keys.size(2);
  CHECK_ARGUMENT(k > 0 && local >= 0, "k is ", k, " and local ", local, "; they need to be at least 1 and 0");
  CHECK_ARGUMENT(seqlen_q + seqlen_k <= kMaxInt / 2, "there are ", seqlen_q, " queries and ", seqlen_k,
                 " keys; together they may be 2^30 - 1");
  const CurrentDevice device(kName, keys);
  const auto like_keys = [&] { return empty(keys, {keys.size(0), keys.size(1), seqlen_k}, ScalarType::Int); };
  std::vector<Tensor> results{like_keys(), like_keys()};
  if (heads * seqlen_k == 0) return results;
  TopkParams params{};
  // Long rows have greater chunks: each chunk reads the whole prefix some times.
  params.chunk_keys = seqlen_k <= 16384 ? kMostChunkKeys / 4 : seqlen_k <= 65536 ? kMostChunkKeys / 2 : kMostChunkKeys;
  const int64_t chunks = ceil_div(seqlen_k, params.chunk_keys);
  // Segments that keep all of their keys would gain nothing.
  const int64_t segment_keys = std::max(kSegmentKeys, ceil_div(k, kMostChunkKeys) * kMostChunkKeys);
  params.segment_keys = static_cast<int>(seqlen_k > 2 * segment_keys ? segment_keys : seqlen_k);
  const int64_t segments = ceil_div(seqlen_k, params.segment_keys);
  CHECK_ARGUMENT(heads * chunks <= kMaxInt, "keys of ", heads, " heads by ", seqlen_k, " need more than 2^31 - 1 blocks");
  const Tensor stops = like_keys(), thresholds = empty(keys, {heads * chunks}, ScalarType::Long);
  const int64_t num_survivors = segments > 1 ? heads * segments * k : 0;
  const Tensor survivors = empty(keys, {2 * num_survivors}, ScalarType::Int);
  params.keys = static_cast<const int32_t*>(keys.const_data_ptr());
  params.stops = static_cast<int32_t*>(stops.mutable_data_ptr());
  params.thresholds = static_cast<uint64_t*>(thresholds.mutable_data_ptr());
  params.best_of_segments = static_cast<int32_t*>(survivors.mutable_data_ptr());
  params.survivors = params.best_of_segments + num_survivors;
  params.start = static_cast<int32_t*>(results[0].mutable_data_ptr());
  params.stop = static_cast<int32_t*>(results[1].mutable_data_ptr());
  params.total = heads * seqlen_k;
  params.k = static_cast<int>(std::min<int64_t>(k, kMaxInt));
  params.local = static_cast<int>(std::min<int64_t>(local, seqlen_k));
  params.seqlen_q = static_cast<int>(seqlen_q);
  params.seqlen_k = static_cast<int>(seqlen_k);
  params.chunks = static_cast<int>(chunks);
  params.segments = static_cast<int>(segments);
  check(launch_topk(params, device.stream), kName, "launching the kernels of top-k");
  return results;
}

// Returns the order of keys int32 (B, H, Lk), as `key_order` of flash_dmattn/masks/prepared/interval_order.py. start
// and stop are int32 (B, H, Lk), contiguous.
Tensor key_order(Tensor start, Tensor stop, int64_t seqlen_q) {
  constexpr const char* kName = "cuda_key_order";
  CHECK_ARGUMENT(start.is_cuda(), "start is not on a CUDA device; the kernel is written for sm_90a");
  CHECK_ARGUMENT(start.dim() == 3, "start has ", start.dim(), " dims; it needs 3: (B, H, Lk)");
  for (const auto& [x, name] : {std::pair{&start, "start"}, std::pair{&stop, "stop"}}) {
    check_array(kName, *x, name, {start.size(0), start.size(1), start.size(2)}, ScalarType::Int, start);
  }
  const int64_t heads = start.size(0) * start.size(1), total = start.numel();
  CHECK_ARGUMENT(heads <= kMostHeads, "start has ", heads, " heads, more than ", kMostHeads);
  CHECK_ARGUMENT(total <= kMaxInt, "start has ", total, " keys, more than 2^31 - 1");
  const CurrentDevice device(kName, start);
  Tensor order = empty(start, {start.size(0), start.size(1), start.size(2)}, ScalarType::Int);
  if (total == 0) return order;
  const Tensor scratch = empty(start, {3 * total}, ScalarType::Int);
  auto* const words = static_cast<uint32_t*>(scratch.mutable_data_ptr());
  KeyCodesParams codes{};
  codes.start = static_cast<const int32_t*>(start.const_data_ptr());
  codes.stop = static_cast<const int32_t*>(stop.const_data_ptr());
  codes.codes = words;
  codes.keys = reinterpret_cast<int32_t*>(words + total);
  codes.total = total;
  codes.seqlen_q = static_cast<int>(seqlen_q);
  codes.seqlen_k = static_cast<int>(start.size(2));
  check(launch_key_codes(codes, device.stream), kName, "launching the kernel of the codes");
  SortCodesParams sort{};
  sort.codes = codes.codes;
  sort.keys = codes.keys;
  sort.sorted_codes = words + 2 * total;
  sort.order = static_cast<int32_t*>(order.mutable_data_ptr());
  sort.total = static_cast<int>(total);
  sort.bits = 2 * kCurveBits + 1;
  while ((int64_t{1} << (sort.bits - 2 * kCurveBits - 1)) < heads) ++sort.bits;
  check(sort_codes(sort, device.stream), kName, "asking for the scratch of the sort");
  const Tensor room = empty(start, {static_cast<int64_t>(sort.scratch_bytes)}, ScalarType::Byte);
  sort.scratch = room.mutable_data_ptr();
  check(sort_codes(sort, device.stream), kName, "sorting");
  return order;
}

// Returns (bounds, row_lists, col_lists), as `interval_tiles` of flash_dmattn/masks/prepared/interval_operators.py.
// start and stop are int32 (B, H, Lk), order is that or (B, H, 0); all contiguous.
std::vector<Tensor> interval_tiles(Tensor start, Tensor stop, Tensor order, int64_t seqlen_q) {
  constexpr const char* kName = "cuda_interval_tiles";
  CHECK_ARGUMENT(start.is_cuda(), "start is not on a CUDA device; the kernel is written for sm_90a");
  CHECK_ARGUMENT(start.dim() == 3 && order.dim() == 3, "start and order have ", start.dim(), " and ", order.dim(),
                 " dims; they need 3: (B, H, Lk)");
  const int64_t batch = start.size(0), num_heads = start.size(1), seqlen_k = start.size(2);
  check_array(kName, start, "start", {batch, num_heads, seqlen_k}, ScalarType::Int, start);
  check_array(kName, stop, "stop", {batch, num_heads, seqlen_k}, ScalarType::Int, start);
  check_array(kName, order, "order", {batch, num_heads, order.size(2) == 0 ? 0 : seqlen_k}, ScalarType::Int, start);
  CHECK_ARGUMENT(seqlen_q + seqlen_k <= kMaxInt / 2, "there are ", seqlen_q, " queries and ", seqlen_k,
                 " keys; together they may be 2^30 - 1");
  const int64_t tiles_q = ceil_div(seqlen_q, kTile), tiles_k = ceil_div(seqlen_k, kTile), heads = batch * num_heads;
  CHECK_ARGUMENT(heads * (tiles_q + tiles_k) <= kMaxInt, "mask of ", heads, " heads by ", seqlen_q, " by ", seqlen_k,
                 " needs more than 2^31 - 1 blocks");

  const CurrentDevice device(kName, start);
  Tensor bounds = empty(start, {batch, num_heads, tiles_k * kTile, 2}, ScalarType::Int);
  Tensor classes = empty(start, {batch, num_heads, tiles_k, tiles_q}, ScalarType::Byte);  // written column by column
  if (heads * tiles_k > 0) {
    IntervalTilesParams params{};
    params.start = static_cast<const int32_t*>(start.const_data_ptr());
    params.stop = static_cast<const int32_t*>(stop.const_data_ptr());
    params.order = order.numel() > 0 ? static_cast<const int32_t*>(order.const_data_ptr()) : nullptr;
    params.bounds = static_cast<int2*>(bounds.mutable_data_ptr());
    params.classes = static_cast<uint8_t*>(classes.mutable_data_ptr());
    params.seqlen_q = static_cast<int>(seqlen_q);
    params.seqlen_k = static_cast<int>(seqlen_k);
    params.tiles_q = static_cast<int>(tiles_q);
    params.tiles_k = static_cast<int>(tiles_k);
    check(launch_interval_tiles(params, heads, device.stream), kName, "launching the kernel of the bounds");
  }
  const auto [row_lists, col_lists] = list_tiles(kName, classes, true, device.stream);
  return {bounds, row_lists, col_lists};
}

// Returns the bits of a TileMask, (B, H, Lq, 4 Tk), that allow what bounds (B, H, 128 Tk, 2) do.
Tensor interval_bits(Tensor bounds, int64_t seqlen_q) {
  constexpr const char* kName = "cuda_interval_bits";
  CHECK_ARGUMENT(bounds.is_cuda(), "bounds is not on a CUDA device; the kernel is written for sm_90a");
  CHECK_ARGUMENT(bounds.dim() == 4 && bounds.size(2) % kTile == 0, "bounds needs to be (B, H, 128 Tk, 2)");
  check_array(kName, bounds, "bounds", {bounds.size(0), bounds.size(1), bounds.size(2), 2}, ScalarType::Int, bounds);
  const int64_t heads = bounds.size(0) * bounds.size(1), tiles_q = ceil_div(seqlen_q, kTile);
  const int64_t tiles_k = bounds.size(2) / kTile;
  CHECK_ARGUMENT(heads * tiles_q * tiles_k <= kMaxInt, "bits of ", heads, " heads by ", seqlen_q, " by ",
                 bounds.size(2), " need more than 2^31 - 1 blocks");
  const CurrentDevice device(kName, bounds);
  Tensor bits = empty(bounds, {bounds.size(0), bounds.size(1), seqlen_q, tiles_k * kTileWords}, ScalarType::Int);
  IntervalBitsParams params{};
  params.bounds = static_cast<const int2*>(bounds.const_data_ptr());
  params.bits = static_cast<int32_t*>(bits.mutable_data_ptr());
  params.seqlen_q = static_cast<int>(seqlen_q);
  params.tiles_q = static_cast<int>(tiles_q);
  params.tiles_k = static_cast<int>(tiles_k);
  if (heads * tiles_q * tiles_k > 0) {
    check(launch_interval_bits(params, heads, device.stream), kName, "launching the kernel of the bits");
  }
  return bits;
}

// Returns a bias per key, (Bb, Hb, 1, Lk) of any strides, by place: fp32 (B, H, 1, P), contiguous. order is (Bm, Hm,
// P); B is the larger of Bb and Bm, and H the larger of Hb and Hm.
Tensor gather_bias(Tensor bias, Tensor order) {
  constexpr const char* kName = "cuda_gather_bias";
  CHECK_ARGUMENT(bias.is_cuda(), "bias is not on a CUDA device; the kernel is written for sm_90a");
  CHECK_ARGUMENT(bias.dim() == 4 && order.dim() == 3, "bias and order have ", bias.dim(), " and ", order.dim(),
                 " dims; they need 4 and 3");
  const int64_t batch = std::max(is_broadcast(bias, 0) ? 1 : bias.size(0), order.size(0));
  const int64_t bias_heads = is_broadcast(bias, 1) ? 1 : bias.size(1), heads = std::max(bias_heads, order.size(1));
  check_array(kName, order, "order", {one_or(batch), divisor_of(heads), order.size(2)}, ScalarType::Int, bias);
  CHECK_ARGUMENT(bias.size(3) >= order.size(2) && heads % bias_heads == 0 &&
                     (is_broadcast(bias, 0) || bias.size(0) == batch),
                 "bias has fewer keys than order, or their heads or entries do not divide each other");
  const CurrentDevice device(kName, bias);
  Tensor result = empty(bias, {batch, heads, 1, order.size(2)}, ScalarType::Float);
  GatherBiasParams params{};
  params.bias = bias_values(kName, bias, heads);
  params.to = static_cast<float*>(result.mutable_data_ptr());
  params.order = static_cast<const int32_t*>(order.const_data_ptr());
  params.total = batch * heads * order.size(2);
  params.seqlen = static_cast<int>(order.size(2));
  params.heads = static_cast<int>(heads);
  params.masks = mask_heads(order, heads);
  if (params.total > 0) check(launch_gather_bias(params, device.stream), kName, "launching the kernel of the bias");
  return result;
}

// Returns k and v, (B, Lk, Hk, D) with rows that TMA can read, by place: (B, P, Hk, D), contiguous. An IntervalMask has
// order (Bm, Hm, P), with at most Lk places, and bounds (Bm, Hm, 128 ceil(P / 128), 2). Hk is a multiple of Hm. Dead
// keys become zeros, but in a tile of dead keys alone, whose rows are not initialised.
std::vector<Tensor> gather_keys(Tensor k, Tensor v, Tensor order, Tensor bounds) {
  constexpr const char* kName = "cuda_gather_keys";
  CHECK_ARGUMENT(k.is_cuda(), "k is not on a CUDA device; the kernel is written for sm_90a");
  CHECK_ARGUMENT(k.dim() == 4 && order.dim() == 3, "k and order have ", k.dim(), " and ", order.dim(),
                 " dims; they need 4 and 3");
  check_array(kName, order, "order", {one_or(k.size(0)), divisor_of(k.size(2)), std::min(order.size(2), k.size(1))},
              ScalarType::Int, k);
  check_array(kName, bounds, "bounds", {order.size(0), order.size(1), ceil_div(order.size(2), kTile) * kTile, 2},
              ScalarType::Int, k);
  const CurrentDevice device(kName, k);
  GatherKeysParams params{};
  std::vector<Tensor> results;
  const auto rows_of = [&](const Tensor& x, GatherKeysParams::Tensor& rows) {
    CHECK_ARGUMENT(x.element_size() == 2 && x.stride(3) == 1 && x.size(3) % 8 == 0,
                   "k and v need rows of 16-bit values, whole pieces of 16 bytes");
    results.push_back(empty(x, {x.size(0), order.size(2), x.size(2), x.size(3)}, x.scalar_type()));
    rows.from = x.const_data_ptr();
    rows.to = results.back().mutable_data_ptr();
    rows.stride_b = x.stride(0) * 2;
    rows.stride_l = x.stride(1) * 2;
    rows.stride_h = x.stride(2) * 2;
    rows.chunks = static_cast<int>(x.size(3) / 8);
  };
  CHECK_ARGUMENT(v.dim() == 4, "v has ", v.dim(), " dims; it needs 4");
  check_dims(kName, v, "v", {k.size(0), k.size(1), k.size(2), v.size(3)}, k);
  rows_of(k, params.k);
  rows_of(v, params.v);
  params.places.order = static_cast<const int32_t*>(order.const_data_ptr());
  params.places.bounds = static_cast<const int2*>(bounds.const_data_ptr());
  params.places.length = static_cast<int>(order.size(2));
  params.places.tiles = static_cast<int>(bounds.size(2) / kTile);
  params.places.heads = mask_heads(order, k.size(2));
  params.rows = k.size(0) * order.size(2) * k.size(2);
  params.num_heads = static_cast<int>(k.size(2));
  CHECK_ARGUMENT(params.rows <= kMaxInt, "k has more than 2^31 - 1 rows");
  if (params.rows > 0) check(launch_gather_keys(params, device.stream), kName, "launching the kernel of the keys");
  return results;
}

template <class Library>
void implement(Library& m) {
  m.impl("cuda_topk_intervals", TORCH_BOX(&topk_intervals));
  m.impl("cuda_key_order", TORCH_BOX(&key_order));
  m.impl("cuda_interval_tiles", TORCH_BOX(&interval_tiles));
  m.impl("cuda_interval_bits", TORCH_BOX(&interval_bits));
  m.impl("cuda_gather_keys", TORCH_BOX(&gather_keys));
  m.impl("cuda_gather_bias", TORCH_BOX(&gather_bias));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(flash_dmattn, m) {
  m.def("cuda_topk_intervals(Tensor keys, int k, int seqlen_q, int local) -> Tensor[]");
  m.def("cuda_key_order(Tensor start, Tensor stop, int seqlen_q) -> Tensor");
  m.def("cuda_interval_tiles(Tensor start, Tensor stop, Tensor order, int seqlen_q) -> Tensor[]");
  m.def("cuda_interval_bits(Tensor bounds, int seqlen_q) -> Tensor");
  m.def("cuda_gather_keys(Tensor k, Tensor v, Tensor order, Tensor bounds) -> Tensor[]");
  m.def("cuda_gather_bias(Tensor bias, Tensor order) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CUDA, m) { implement(m); }
// For CPU tensors too, so that they get our error message and not torch's about a missing kernel.
STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CPU, m) { implement(m); }

}  // namespace flash_dmattn
