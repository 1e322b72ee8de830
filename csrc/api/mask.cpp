// The operator that packs masks.
#include <algorithm>
#include <cstdint>
#include <vector>

#include <cuda_runtime_api.h>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "../sm90/mask/mask.h"
#include "common.h"
#include "tile_lists.h"

namespace flash_dmattn {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr const char* kName = "cuda_pack_mask";

// Returns (bits, classes, row_lists, col_lists), the TileMask of flash_dmattn/masks/prepared/storage.py, of a bool mask
// (B, H, Lq, Lk) of any strides, 0 included. With has_band the band low <= j - i <= high is folded in.
std::vector<Tensor> pack_mask(Tensor mask, int64_t low, int64_t high, bool has_band) {
  CHECK_ARGUMENT(mask.is_cuda(), "mask is not on a CUDA device; the kernel is written for sm_90a");
  CHECK_ARGUMENT(mask.scalar_type() == ScalarType::Bool, "mask is not bool");
  CHECK_ARGUMENT(mask.dim() == 4, "mask has ", mask.dim(), " dims; it needs 4: (B, H, Lq, Lk)");
  const int64_t batch = mask.size(0), num_heads = mask.size(1), seqlen_q = mask.size(2), seqlen_k = mask.size(3);
  // The kernel adds rows and keys in int32, in its last block too.
  CHECK_ARGUMENT(seqlen_q + seqlen_k <= kMaxInt - 2 * kStripKeys, "mask has ", seqlen_q, " queries and ", seqlen_k,
                 " keys; together they may be ", kMaxInt - 2 * kStripKeys);
  const int64_t tiles_q = ceil_div(seqlen_q, kTile), tiles_k = ceil_div(seqlen_k, kTile);
  const int64_t strips = ceil_div(seqlen_k, kStripKeys), heads = batch * num_heads;
  const int64_t pack_blocks = heads * tiles_q * strips;
  CHECK_ARGUMENT(std::max({heads, pack_blocks, heads * (tiles_q + tiles_k)}) <= kMaxInt, "mask of ", heads,
                 " heads by ", seqlen_q, " by ", seqlen_k, " needs more than 2^31 - 1 blocks");

  const CurrentDevice device(kName, mask);
  Tensor bits = empty(mask, {batch, num_heads, seqlen_q, tiles_k * kTileWords}, ScalarType::Int);
  Tensor classes = empty(mask, {batch, num_heads, tiles_q, tiles_k}, ScalarType::Byte);
  if (pack_blocks > 0) {
    PackMaskParams params{};
    params.mask = static_cast<const uint8_t*>(mask.const_data_ptr());
    params.bits = static_cast<int32_t*>(bits.mutable_data_ptr());
    params.classes = static_cast<uint8_t*>(classes.mutable_data_ptr());
    params.stride_b = mask.stride(0);
    params.stride_h = mask.stride(1);
    params.stride_q = mask.stride(2);
    params.stride_k = mask.stride(3);
    params.num_heads = static_cast<int>(num_heads);
    params.seqlen_q = static_cast<int>(seqlen_q);
    params.seqlen_k = static_cast<int>(seqlen_k);
    params.tiles_q = static_cast<int>(tiles_q);
    params.tiles_k = static_cast<int>(tiles_k);
    params.strips = static_cast<int>(strips);
    // Limits beyond the last diagonal are clamped to just past it.
    params.low = static_cast<int>(std::clamp(low, -seqlen_q, seqlen_k));
    params.high = static_cast<int>(std::clamp(high, -seqlen_q, seqlen_k));
    check(launch_pack_mask(params, static_cast<unsigned>(pack_blocks), rows_are_aligned(mask), has_band, device.stream),
          kName, "launching the packing kernel");
  }
  const auto [row_lists, col_lists] = list_tiles(kName, classes, false, device.stream);
  return {bits, classes, row_lists, col_lists};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(flash_dmattn, m) {
  m.def("cuda_pack_mask(Tensor mask, int low, int high, bool has_band) -> Tensor[]");
}

// Registered for CPU tensors too, so that they get our error message and not torch's about a missing kernel.
STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CUDA, m) { m.impl("cuda_pack_mask", TORCH_BOX(&pack_mask)); }
STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CPU, m) { m.impl("cuda_pack_mask", TORCH_BOX(&pack_mask)); }

}  // namespace flash_dmattn
