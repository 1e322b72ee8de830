// For operators that pack masks: how rows of bools are read, and the lists of tiles.
#pragma once

#include <cstdint>
#include <utility>

#include <torch/csrc/stable/tensor.h>

#include "../sm90/mask/mask.h"
#include "common.h"

namespace flash_dmattn {

// Whether every row of the mask starts and ends on 16 bytes and keys have unit stride. A dim of size 1 may have any
// stride: it is never taken.
inline bool rows_are_aligned(const torch::stable::Tensor& mask) {
  bool aligned = mask.stride(3) == 1 && mask.size(3) % 16 == 0;
  aligned &= reinterpret_cast<uintptr_t>(mask.const_data_ptr()) % 16 == 0;
  for (int dim = 0; dim < 3; ++dim) aligned &= mask.size(dim) <= 1 || mask.stride(dim) % 16 == 0;
  return aligned;
}

// Returns (row_lists, col_lists) of classes (B, H, Tq, Tk), or (B, H, Tk, Tq) with `columns_are_contiguous`, whose
// blocks the caller has found to be few enough: B * H * (Tq + Tk) fit int32.
inline std::pair<torch::stable::Tensor, torch::stable::Tensor> list_tiles(const char* op,
                                                                          const torch::stable::Tensor& classes,
                                                                          bool columns_are_contiguous,
                                                                          cudaStream_t stream) {
  const int64_t batch = classes.size(0), heads = classes.size(1);
  const int64_t tiles_q = classes.size(columns_are_contiguous ? 3 : 2);
  const int64_t tiles_k = classes.size(columns_are_contiguous ? 2 : 3);
  const auto lists_of = [&](int64_t tiles, int64_t length) {
    return empty(classes, {batch, heads, tiles, 2 + length}, torch::headeronly::ScalarType::Int);
  };
  std::pair<torch::stable::Tensor, torch::stable::Tensor> lists{lists_of(tiles_q, tiles_k), lists_of(tiles_k, tiles_q)};
  ListTilesParams params{};
  params.classes = static_cast<const uint8_t*>(classes.const_data_ptr());
  params.row_lists = static_cast<int32_t*>(lists.first.mutable_data_ptr());
  params.col_lists = static_cast<int32_t*>(lists.second.mutable_data_ptr());
  params.columns_are_contiguous = columns_are_contiguous;
  params.heads = batch * heads;
  params.tiles_q = static_cast<int>(tiles_q);
  params.tiles_k = static_cast<int>(tiles_k);
  if (batch * heads * (tiles_q + tiles_k) > 0) {
    check(launch_list_tiles(params, stream), op, "launching the list kernel");
  }
  return lists;
}

}  // namespace flash_dmattn
