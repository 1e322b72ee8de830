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

}  // namespace flash_dmattn
