// The operators of interval masks: how one is made, what kernels walk of it, and keys and values in its order.
#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "../sm90/mask/mask.h"
#include "call.h"
#include "common.h"
#include "keys_in_order.h"
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

// Says where rows of k and v (B, Lk, Hk, D) lie, which TMA can read, and allocates them by place.
std::vector<Tensor> place_rows(const char* op, const Tensor& k, const Tensor& v, int64_t places,
                               GatherKeysParams::Tensor& k_rows, GatherKeysParams::Tensor& v_rows) {
  CHECK_FOR(op, k.dim() == 4 && v.dim() == 4, "k and v have ", k.dim(), " and ", v.dim(), " dims; they need 4");
  check_dims(op, v, "v", {k.size(0), k.size(1), k.size(2), v.size(3)}, k);
  CHECK_FOR(op, v.scalar_type() == k.scalar_type(), "v needs the dtype of k");
  const std::array<Shape, 2> shapes{Shape{k.size(0), places, k.size(2), k.size(3)},
                                    Shape{k.size(0), places, k.size(2), v.size(3)}};
  std::vector<Tensor> placed = empty_together(k, shapes, k.scalar_type());
  const auto describe = [&](const Tensor& x, const Tensor& to, GatherKeysParams::Tensor& rows) {
    CHECK_FOR(op, x.element_size() == 2 && x.stride(3) == 1 && x.size(3) % 8 == 0,
              "k and v need rows of 16-bit values, whole pieces of 16 bytes");
    rows.from = x.const_data_ptr();
    rows.to = to.mutable_data_ptr();
    rows.stride_b = x.stride(0) * 2;
    rows.stride_l = x.stride(1) * 2;
    rows.stride_h = x.stride(2) * 2;
    rows.chunks = static_cast<int>(x.size(3) / 8);
  };
  describe(k, placed[0], k_rows);
  describe(v, placed[1], v_rows);
  return placed;
}

// Allocates a bias per key, see keys_in_order, by place. There are so many keys. The order is (Bm, Hm, P).
template <class Params>
Tensor place_bias(const char* op, const Tensor& bias, int64_t keys, const Tensor& order, Params& params) {
  CHECK_FOR(op, bias.dim() == 4, "bias has ", bias.dim(), " dims; it needs 4");
  const int64_t batch = std::max(is_broadcast(bias, 0) ? 1 : bias.size(0), order.size(0)), places = order.size(2);
  const int64_t bias_heads = is_broadcast(bias, 1) ? 1 : bias.size(1), heads = std::max(bias_heads, order.size(1));
  CHECK_FOR(op,
            is_broadcast(bias, 2) && bias.size(3) == keys && heads % bias_heads == 0 && heads % order.size(1) == 0 &&
                (is_broadcast(bias, 0) || bias.size(0) == batch) && (order.size(0) == 1 || order.size(0) == batch),
            "bias has not one value for each key, or its heads or entries and those of the order do not divide each other");
  CHECK_FOR(op, bias.get_device_index() == order.get_device_index(), "bias is on another device than order");
  Tensor placed = empty(bias, {batch, heads, 1, places}, ScalarType::Float);
  params.bias = bias_values(op, bias, heads);
  params.placed_bias = static_cast<float*>(placed.mutable_data_ptr());
  params.bias_batch = static_cast<int>(batch);
  params.bias_heads = static_cast<int>(heads);
  return placed;
}

// Returns k and v in an order, and a bias; see keys_in_order.
std::vector<Tensor> gather_keys(Tensor k, Tensor v, std::optional<Tensor> bias, Tensor order, Tensor bounds) {
  constexpr const char* kName = "cuda_gather_keys";
  CHECK_ARGUMENT(k.is_cuda(), "k is not on a CUDA device; the kernel is written for sm_90a");
  const CurrentDevice device(kName, k);
  const KeysInOrder made = keys_in_order(kName, k, v, bias, order, bounds, nullptr, device.stream);
  std::vector<Tensor> results{made.k, made.v};
  if (made.bias.has_value()) results.push_back(*made.bias);
  return results;
}

// The tensors (start, stop, order, bounds, row_lists, col_lists) of the IntervalMask of
// flash_dmattn/masks/prepared/storage.py, where the kernel of masks of keys writes them. Without `reorder` the order has
// no places. With `for_call` kCounters of 0 follow.
struct KeyMask {
  std::vector<Tensor> tensors{};
  KeyMaskParams params{};
};

// `like` is on their device; batch and num_heads are of the mask; the band is low <= j - i <= high.
KeyMask allocate_key_mask(const char* op, const Tensor& like, int64_t batch, int64_t num_heads, int64_t seqlen_q,
                          int64_t seqlen_k, int64_t low, int64_t high, bool reorder, bool for_call) {
  CHECK_FOR(op, seqlen_k <= kMostMaskKeys, "mask has ", seqlen_k, " keys, more than ", kMostMaskKeys);
  CHECK_FOR(op, seqlen_q >= 0 && seqlen_k >= 0 && seqlen_q + seqlen_k <= kMaxInt / 2, "there are ", seqlen_q,
            " queries and ", seqlen_k, " keys; together they may be 2^30 - 1");
  const int64_t tiles_q = ceil_div(seqlen_q, kTile), tiles_k = ceil_div(seqlen_k, kTile), heads = batch * num_heads;
  CHECK_FOR(op, heads <= kMaxInt && heads * (tiles_q + tiles_k) <= kMaxInt, "mask of ", heads, " heads by ", seqlen_q,
            " by ", seqlen_k, " needs more than 2^31 - 1 blocks");
  const Shape keys{batch, num_heads, seqlen_k}, order_keys{batch, num_heads, reorder ? seqlen_k : 0};
  const std::array<Shape, 7> shapes{keys,
                                    keys,
                                    order_keys,
                                    Shape{batch, num_heads, tiles_k * kTile, 2},
                                    Shape{batch, num_heads, tiles_q, 2 + tiles_k},
                                    Shape{batch, num_heads, tiles_k, 2 + tiles_q},
                                    Shape{kCounters}};
  KeyMask made{};
  if (for_call) {  // nobody else sees these
    made.tensors = empty_together(like, shapes, ScalarType::Int);
  } else {
    for (size_t i = 0; i + 1 < shapes.size(); ++i) made.tensors.push_back(empty(like, shapes[i], ScalarType::Int));
  }
  const auto data = [&](int i) { return static_cast<int32_t*>(made.tensors[i].mutable_data_ptr()); };
  KeyMaskParams& params = made.params;
  params.has_batch = batch > 1;
  params.start = data(0);
  params.stop = data(1);
  params.order = reorder ? data(2) : nullptr;
  params.bounds = reinterpret_cast<int2*>(data(3));
  params.row_lists = data(4);
  params.col_lists = data(5);
  if (for_call) {
    params.counters = data(6);
    params.num_counters = static_cast<int>(kCounters);
  }
  params.num_heads = static_cast<int>(num_heads);
  params.seqlen_q = static_cast<int>(seqlen_q);
  params.seqlen_k = static_cast<int>(seqlen_k);
  params.tiles_q = static_cast<int>(tiles_q);
  params.tiles_k = static_cast<int>(tiles_k);
  // Limits beyond the last diagonal are clamped to just past it.
  params.low = static_cast<int>(std::clamp(low, -seqlen_q, seqlen_k));
  params.high = static_cast<int>(std::clamp(high, -seqlen_q, seqlen_k));
  const bool is_seen = seqlen_q > 0 && params.low <= params.high;
  params.first_seen = std::max(params.low, 0);
  params.end_of_seen = is_seen ? static_cast<int>(std::min(seqlen_k, seqlen_q + params.high)) : 0;
  return made;
}

// Returns the tensors of KeyMask. The mask is bool (B, H, 1, Lk) of any strides, 0 included. If there are k and v, they
// follow in the order of keys, and after them a bias per key, as keys_in_order returns them.
std::vector<Tensor> key_mask(Tensor mask, int64_t seqlen_q, int64_t low, int64_t high, bool reorder, bool for_call,
                             std::optional<Tensor> k, std::optional<Tensor> v, std::optional<Tensor> bias) {
  constexpr const char* kName = "cuda_key_mask";
  CHECK_ARGUMENT(mask.is_cuda(), "mask is not on a CUDA device; the kernel is written for sm_90a");
  CHECK_ARGUMENT(mask.scalar_type() == ScalarType::Bool, "mask is not bool");
  CHECK_ARGUMENT(mask.dim() == 4 && mask.size(2) == 1, "mask needs to be (B, H, 1, Lk)");
  CHECK_ARGUMENT(!k.has_value() || (reorder && v.has_value()), "k is gathered with v, in an order");
  CHECK_ARGUMENT(k.has_value() || (!v.has_value() && !bias.has_value()), "v and bias are gathered with k");
  const int64_t heads = mask.size(0) * mask.size(1), seqlen_k = mask.size(3);
  const CurrentDevice device(kName, mask);
  auto [results, params] =
      allocate_key_mask(kName, mask, mask.size(0), mask.size(1), seqlen_q, seqlen_k, low, high, reorder, for_call);
  params.mask = static_cast<const uint8_t*>(mask.const_data_ptr());
  params.stride_b = mask.stride(0);
  params.stride_h = mask.stride(1);
  params.stride_k = mask.stride(3);
  params.is_wide = rows_are_aligned(mask);
  if (k.has_value()) {
    for (Tensor& placed : place_rows(kName, *k, *v, seqlen_k, params.k, params.v)) results.push_back(std::move(placed));
    check_dims(kName, mask, "mask", {one_or(k->size(0)), divisor_of(k->size(2)), 1, k->size(1)}, *k);
    CHECK_ARGUMENT(k->size(0) * seqlen_k * k->size(2) <= kMaxInt, "k has more than 2^31 - 1 rows");
    params.batch = static_cast<int>(k->size(0));
    params.num_heads_k = static_cast<int>(k->size(2));
    if (bias.has_value()) results.push_back(place_bias(kName, *bias, seqlen_k, results[2], params));
  }
  if (heads > 0) check(launch_key_mask(params, heads, device.stream), kName, "launching the kernel of the mask");
  return results;
}

// Returns the tensors of KeyMask, for one call. The mask has all keys in the band, and its lists have only tiles of listed
// blocks. keys is int32 (B, H, lists, entries), contiguous, of a ListMask. Both sizes of a block are multiples of a tile.
// Bounds are of the band alone.
std::vector<Tensor> listed_tiles(Tensor keys, int64_t block_q, int64_t block_k, int64_t seqlen_q, int64_t seqlen_k,
                                 int64_t low, int64_t high) {
  constexpr const char* kName = "cuda_listed_tiles";
  CHECK_ARGUMENT(keys.is_cuda(), "keys is not on a CUDA device; the kernel is written for sm_90a");
  CHECK_ARGUMENT(keys.dim() == 4, "keys has ", keys.dim(), " dims; it needs 4: (B, H, lists, entries)");
  CHECK_ARGUMENT(block_q > 0 && block_k > 0 && block_q % kTile == 0 && block_k % kTile == 0, "blocks are ", block_q,
                 " by ", block_k, "; they need multiples of ", kTile);
  check_array(kName, keys, "keys", {keys.size(0), keys.size(1), ceil_div(seqlen_q, block_q), keys.size(3)},
              ScalarType::Int, keys);
  const int64_t heads = keys.size(0) * keys.size(1);
  const CurrentDevice device(kName, keys);
  auto [results, params] =
      allocate_key_mask(kName, keys, keys.size(0), keys.size(1), seqlen_q, seqlen_k, low, high, false, true);
  params.blocks_listed = static_cast<const int32_t*>(keys.const_data_ptr());
  params.num_lists = static_cast<int>(keys.size(2));
  params.list_size = static_cast<int>(keys.size(3));
  params.block_tiles_q = static_cast<int>(std::min<int64_t>(block_q / kTile, kMaxInt));
  params.block_tiles_k = static_cast<int>(std::min<int64_t>(block_k / kTile, kMaxInt));
  if (heads > 0) check(launch_key_mask(params, heads, device.stream), kName, "launching the kernel of the lists");
  return results;
}

template <class Library>
void implement(Library& m) {
  m.impl("cuda_topk_intervals", TORCH_BOX(&topk_intervals));
  m.impl("cuda_key_order", TORCH_BOX(&key_order));
  m.impl("cuda_interval_tiles", TORCH_BOX(&interval_tiles));
  m.impl("cuda_interval_bits", TORCH_BOX(&interval_bits));
  m.impl("cuda_gather_keys", TORCH_BOX(&gather_keys));
  m.impl("cuda_key_mask", TORCH_BOX(&key_mask));
  m.impl("cuda_listed_tiles", TORCH_BOX(&listed_tiles));
}

}  // namespace

KeysInOrder keys_in_order(const char* op, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias,
                          const Tensor& order, const Tensor& bounds, const Tensor* cleared, cudaStream_t stream) {
  CHECK_FOR(op, k.dim() == 4 && order.dim() == 3, "k and order have ", k.dim(), " and ", order.dim(),
            " dims; they need 4 and 3");
  check_array(op, order, "order", {one_or(k.size(0)), divisor_of(k.size(2)), std::min(order.size(2), k.size(1))},
              ScalarType::Int, k);
  check_array(op, bounds, "bounds", {order.size(0), order.size(1), ceil_div(order.size(2), kTile) * kTile, 2},
              ScalarType::Int, k);
  const int64_t places = order.size(2);
  GatherKeysParams params{};
  const std::vector<Tensor> placed = place_rows(op, k, v, places, params.k, params.v);
  KeysInOrder made{placed[0], placed[1], bias};
  if (bias.has_value() && (bias->dim() != 4 || !is_broadcast(*bias, 3))) {
    made.bias = place_bias(op, *bias, k.size(1), order, params);
    params.bias_masks = mask_heads(order, params.bias_heads);
  }
  params.places.order = static_cast<const int32_t*>(order.const_data_ptr());
  params.places.bounds = static_cast<const int2*>(bounds.const_data_ptr());
  params.places.length = static_cast<int>(places);
  params.places.tiles = static_cast<int>(bounds.size(2) / kTile);
  params.places.heads = mask_heads(order, k.size(2));
  params.rows = k.size(0) * places * k.size(2);
  params.num_heads = static_cast<int>(k.size(2));
  if (cleared != nullptr) {
    params.cleared = static_cast<int32_t*>(cleared->mutable_data_ptr());
    params.num_cleared = cleared->numel();
  }
  CHECK_FOR(op, params.rows <= kMaxInt, "k has more than 2^31 - 1 rows");
  if (params.rows > 0) check(launch_gather_keys(params, stream), op, "launching the kernel of the keys");
  return made;
}

STABLE_TORCH_LIBRARY_FRAGMENT(flash_dmattn, m) {
  m.def("cuda_topk_intervals(Tensor keys, int k, int seqlen_q, int local) -> Tensor[]");
  m.def("cuda_key_order(Tensor start, Tensor stop, int seqlen_q) -> Tensor");
  m.def("cuda_interval_tiles(Tensor start, Tensor stop, Tensor order, int seqlen_q) -> Tensor[]");
  m.def("cuda_interval_bits(Tensor bounds, int seqlen_q) -> Tensor");
  m.def("cuda_gather_keys(Tensor k, Tensor v, Tensor? bias, Tensor order, Tensor bounds) -> Tensor[]");
  m.def(
      "cuda_key_mask(Tensor mask, int seqlen_q, int low, int high, bool reorder, bool for_call, Tensor? k, Tensor? v, "
      "Tensor? bias) -> Tensor[]");
  m.def(
      "cuda_listed_tiles(Tensor keys, int block_q, int block_k, int seqlen_q, int seqlen_k, int low, int high) -> "
      "Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CUDA, m) { implement(m); }
// For CPU tensors too, so that they get our error message and not torch's about a missing kernel.
STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CPU, m) { implement(m); }

}  // namespace flash_dmattn
