// What both backward operators tell the kernel of the rows.
#pragma once

#include <cstdint>
#include <optional>

#include <torch/csrc/stable/tensor.h>

#include "../params.h"
#include "common.h"

namespace flash_dmattn {

template <class T = void>
T* data_of(const std::optional<torch::stable::Tensor>& x) {
  return x.has_value() ? static_cast<T*>(x->mutable_data_ptr()) : nullptr;
}

inline BackwardRowsParams describe_rows(const char* op, const torch::stable::Tensor& out,
                                        const torch::stable::Tensor& dout, const torch::stable::Tensor& lse,
                                        const std::optional<torch::stable::Tensor>& dlse) {
  CHECK_FOR(op, out.is_contiguous() && lse.is_contiguous(), "out and lse need to be contiguous");
  BackwardRowsParams rows{};
  rows.out = out.const_data_ptr();
  rows.dout = dout.const_data_ptr();
  rows.lse = static_cast<const float*>(lse.const_data_ptr());
  rows.dout_stride_b = dout.stride(0);
  rows.dout_stride_q = dout.stride(1);
  rows.dout_stride_h = dout.stride(2);
  if (dlse.has_value()) {
    CHECK_FOR(op, dlse->scalar_type() == torch::headeronly::ScalarType::Float, "dlse needs to be float32, as lse");
    rows.dlse = static_cast<const float*>(dlse->const_data_ptr());
    rows.dlse_stride_b = dlse->stride(0);
    rows.dlse_stride_h = dlse->stride(1);
    rows.dlse_stride_q = dlse->stride(2);
  }
  rows.batch = static_cast<int>(out.size(0));
  rows.seqlen_q = static_cast<int>(out.size(1));
  rows.num_heads = static_cast<int>(out.size(2));
  rows.head_dim_v = static_cast<int>(out.size(3));
  return rows;
}

// Sets where the caller gets delta of every row, of the shape of lse.
inline void set_row_delta(const char* op, const std::optional<torch::stable::Tensor>& delta,
                          const torch::stable::Tensor& lse, BackwardRowsParams& rows) {
  if (!delta.has_value()) return;
  CHECK_FOR(op,
            delta->is_contiguous() && delta->scalar_type() == torch::headeronly::ScalarType::Float &&
                delta->numel() == lse.numel(),
            "delta needs to be contiguous, float32, and of the shape of lse");
  rows.row_delta = data_of<float>(delta);
}

}  // namespace flash_dmattn
