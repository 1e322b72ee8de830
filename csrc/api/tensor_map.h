// TMA descriptors (CUtensorMap) of the tensors that kernels read and write by tiles.
#pragma once

#include <cuda.h>

#include <torch/csrc/stable/tensor.h>

namespace flash_dmattn {

// A box is `rows` rows of 64 columns of 16 bits, or of 32 columns of fp32, with the 128-byte swizzle. Elements outside the
// tensor read as 0 and are not written. `op` and `name` are the operator and its argument, for error messages.

// For q, k, v or dout, (B, L, H, D): dims (D, L, H, B), innermost first. is_alone: rows have 64 bytes, and their
// neighbours in memory belong to other heads, which are read at another time. L2 then does not fetch the neighbours
// with a row.
CUtensorMap rows_map(const char* op, const torch::stable::Tensor& x, const char* name, int rows, bool is_alone = false);

// The same where 2^shift heads of a row become rows that follow each other: dims (D, H, L, B), boxes of so many rows.
CUtensorMap group_rows_map(const char* op, const torch::stable::Tensor& x, const char* name, int rows, int shift);

// For one value per query and key, (B, H, Lq, Lk): dims (Lk, Lq, H, B). A dim that is shared has size 1.
CUtensorMap scores_map(const char* op, const torch::stable::Tensor& x, const char* name, int rows);

// Ragged descriptors, for sequences of any number of rows: x (E, L, H, D), whose entries follow each other, and scores
// (1, H, Tq, Lk). The dims are columns, rows, heads, a shift, and entries. Row i of n rows from `first` on has the
// coordinates kRaggedRows - n + i of rows, kRaggedRows of the shift, and first + n of entries. Rows after these n are
// outside of the tensor: TMA loads zeros for them and does not store them.
//
// Rows and entries have the same stride, and kRaggedRows shifts of 2^34 bytes less that stride are kRaggedRows rows
// back, because addresses have 64 bits. Source: Triton's ragged tensors (triton/tools/ragged_tma.py). A descriptor that
// starts kRaggedRows rows before the tensor instead would do with one dim less, but where nothing lies there the
// hardware faults now and then.
constexpr int64_t kRaggedWrap = int64_t{1} << 33;  // elements of 2 bytes
CUtensorMap ragged_rows_map(const char* op, const torch::stable::Tensor& x, const char* name, int rows);
// The same for x (pages, page_size, H, D). Pages lie a whole number of rows apart; an entry has so many rows.
CUtensorMap pages_map(const char* op, const torch::stable::Tensor& x, const char* name, int rows);
CUtensorMap ragged_scores_map(const char* op, const torch::stable::Tensor& x, const char* name, int rows);
// scores_map with a dim of size 1 in the place of shifts.
CUtensorMap scores_by_position_map(const char* op, const torch::stable::Tensor& x, const char* name, int rows);

}  // namespace flash_dmattn
