// TMA descriptors (CUtensorMap) of the tensors that kernels read and write by tiles.
#pragma once

#include <cuda.h>

#include <torch/csrc/stable/tensor.h>

namespace flash_dmattn {

// A box is `rows` rows of 64 columns, with the 128-byte swizzle. Elements outside the tensor read as 0 and are not
// written. `op` and `name` are the operator and its argument, for error messages.

// For q, k, v or dout, (B, L, H, D): dims (D, L, H, B), innermost first.
CUtensorMap rows_map(const char* op, const torch::stable::Tensor& x, const char* name, int rows);

// For one value per query and key, (B, H, Lq, Lk): dims (Lk, Lq, H, B). A dim that is shared has size 1.
CUtensorMap scores_map(const char* op, const torch::stable::Tensor& x, const char* name, int rows);

// Ragged descriptors, of rows of which sequences have any number up to `most`: of x (E, L, H, D), whose entries follow
// each other, and of scores (1, H, Tq, Lk). Their innermost dims are (D or Lk, most, H, all rows + 1), and row i of n
// rows from `first` on has coordinates (most - n + i, first + n): rows behind the last are outside, so that TMA loads
// zeros for them and does not store them.
//
// Dims of rows and of entries have the same stride, and the descriptor starts `most` rows before the tensor. The idea is
// that of Triton's ragged tensors (triton/tools/ragged_tma.py), which need one dim more.
CUtensorMap ragged_rows_map(const char* op, const torch::stable::Tensor& x, const char* name, int rows, int64_t most);
CUtensorMap ragged_scores_map(const char* op, const torch::stable::Tensor& x, const char* name, int rows, int64_t most);

}  // namespace flash_dmattn
