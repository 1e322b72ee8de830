// Keys and values in the order of an interval mask, for the operators of a call.
#pragma once

#include <cstdint>
#include <optional>

#include <cuda_runtime_api.h>

#include <torch/csrc/stable/tensor.h>

namespace flash_dmattn {

// How many numbers the kernel that makes keys in an order clears for the forward pass. It has up to 16 counters for each
// work tile that several blocks compute; the GPU has more SMs than such tiles.
constexpr int64_t kCounters = 4096;

struct KeysInOrder {
  torch::stable::Tensor k, v;
  std::optional<torch::stable::Tensor> bias;
};

// Returns k and v, (B, Lk, Hk, D) with rows that TMA can read, by place: (B, P, Hk, D), contiguous; and a bias. A bias with
// one value per key, (Bb, Hb, 1, Lk) of any strides, becomes fp32 (B, H, 1, P). B and H are the larger ones of the bias and
// of the order. Any other bias stays as it is. An IntervalMask has order (Bm, Hm, P), with at most Lk places, and bounds (Bm, Hm,
// 128 ceil(P / 128), 2). Hk is a multiple of Hm. Dead keys become zeros, but in a tile of dead keys alone, whose rows are
// not initialised. `cleared` is an array of 32-bit numbers that become 0, or null.
KeysInOrder keys_in_order(const char* op, const torch::stable::Tensor& k, const torch::stable::Tensor& v,
                          const std::optional<torch::stable::Tensor>& bias, const torch::stable::Tensor& order,
                          const torch::stable::Tensor& bounds, const torch::stable::Tensor* cleared, cudaStream_t stream);

}  // namespace flash_dmattn
