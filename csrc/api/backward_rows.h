// What both backward operators tell the kernel of the rows.
#pragma once

#include <cstdint>
#include <optional>

#include <torch/csrc/stable/tensor.h>

#include "../params.h"
#include "call.h"
#include "common.h"

namespace flash_dmattn {

template <class T = void>
T* data_of(const std::optional<torch::stable::Tensor>& x) {
  return x.has_value() ? static_cast<T*>(x->mutable_data_ptr()) : nullptr;
}

// Checks the arguments that have a row for each query, and those gradients that have rows of q, k and v.
inline BackwardRowsParams describe_rows(const char* op, const Sizes& sizes, const torch::stable::Tensor& q,
                                        const torch::stable::Tensor& out, const torch::stable::Tensor& dout,
                                        const torch::stable::Tensor& lse,
                                        const std::optional<torch::stable::Tensor>& dlse,
                                        const std::optional<torch::stable::Tensor>& delta,
                                        const std::optional<torch::stable::Tensor>& dq,
                                        const std::optional<torch::stable::Tensor>& dk,
                                        const std::optional<torch::stable::Tensor>& dv) {
  constexpr auto kFloat = torch::headeronly::ScalarType::Float;
  const auto [batch, seqlen_q, seqlen_k, heads, heads_k, head_dim, head_dim_v] = sizes;
  check_array(op, out, "out", {batch, seqlen_q, heads, head_dim_v}, q.scalar_type(), q);
  check_array(op, lse, "lse", {batch, heads, seqlen_q}, kFloat, q);
  check_dims(op, dout, "dout", {batch, seqlen_q, heads, head_dim_v}, q);
  check_dtype(op, dout, "dout", q.scalar_type());
  if (dq.has_value()) check_array(op, *dq, "dq", {batch, seqlen_q, heads, head_dim}, q.scalar_type(), q);
  if (dk.has_value()) check_array(op, *dk, "dk", {batch, seqlen_k, heads_k, head_dim}, q.scalar_type(), q);
  if (dv.has_value()) check_array(op, *dv, "dv", {batch, seqlen_k, heads_k, head_dim_v}, q.scalar_type(), q);
  BackwardRowsParams rows{};
  rows.out = out.const_data_ptr();
  rows.dout = dout.const_data_ptr();
  rows.lse = static_cast<const float*>(lse.const_data_ptr());
  rows.dout_stride_b = dout.stride(0);
  rows.dout_stride_q = dout.stride(1);
  rows.dout_stride_h = dout.stride(2);
  if (dlse.has_value()) {
    check_dims(op, *dlse, "dlse", {batch, heads, seqlen_q}, q);
    check_dtype(op, *dlse, "dlse", kFloat);
    rows.dlse = static_cast<const float*>(dlse->const_data_ptr());
    rows.dlse_stride_b = dlse->stride(0);
    rows.dlse_stride_h = dlse->stride(1);
    rows.dlse_stride_q = dlse->stride(2);
  }
  rows.batch = static_cast<int>(out.size(0));
  rows.seqlen_q = static_cast<int>(out.size(1));
  rows.num_heads = static_cast<int>(out.size(2));
  rows.head_dim_v = static_cast<int>(out.size(3));
  if (delta.has_value()) check_array(op, *delta, "delta", {batch, heads, seqlen_q}, kFloat, q);
  rows.row_delta = data_of<float>(delta);  // where the caller gets delta of every row
  return rows;
}

}  // namespace flash_dmattn
