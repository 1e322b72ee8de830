// What the copy engine is told of a tensor: the maps that kernels copy tiles by.
#pragma once

#include <cuda.h>

#include <torch/csrc/stable/tensor.h>

namespace flash_dmattn {

// A box of each is 64 columns of `rows` rows, swizzled within its 128-byte rows; what is outside the tensor reads as 0
// and is not written. `op` and `name` are the operator and its argument, for what is refused.

// Of q, k, v or dout, (B, L, H, D): its dims as (D, L, H, B), innermost first.
CUtensorMap rows_map(const char* op, const torch::stable::Tensor& x, const char* name, int rows);

// Of one value per query and key, (B, H, Lq, Lk): its dims as (Lk, Lq, H, B). Heads or batches that share one are 1.
CUtensorMap scores_map(const char* op, const torch::stable::Tensor& x, const char* name, int rows);

}  // namespace flash_dmattn
