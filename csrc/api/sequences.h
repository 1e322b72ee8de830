// Shared by both passes of a call with sequences: its tables, and the lists of its work tiles.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>

#include <torch/csrc/stable/tensor.h>

#include "../sm90/sequences/launch.h"
#include "call.h"
#include "common.h"
#include "tensor_map.h"

namespace flash_dmattn {

// The meaning of rows and columns of a bias: positions in a sequence, or packed queries or keys
// (flash_dmattn/backends/cuda).
enum BiasPacking : int64_t { kByPosition = 0, kPackedQueries = 1, kPackedKeys = 2 };

// Views tokens (T, H, D) as the one entry of a batch, (1, T, H, D), and lse likewise; `dims` are the dims of a batch.
// torch's unsqueeze would go through its dispatcher, which takes several times as long.
inline void as_entry(torch::stable::Tensor& x, int64_t dims) {
  if (x.dim() != dims - 1) return;
  std::array<int64_t, 4> sizes{1}, strides{x.size(0) * x.stride(0)};
  for (int64_t dim = 1; dim < dims; ++dim) {
    sizes[dim] = x.size(dim - 1);
    strides[dim] = x.stride(dim - 1);
  }
  AtenTensorHandle view = nullptr;
  const AOTITorchError error = aoti_torch__reinterpret_tensor(x.get(), dims, sizes.data(), strides.data(), 0, &view);
  STD_TORCH_CHECK(error == AOTI_TORCH_SUCCESS, "torch does not view tokens as an entry of a batch");
  x = torch::stable::Tensor(view);
}
inline void as_entry(std::optional<torch::stable::Tensor>& x, int64_t dims) {
  if (x.has_value()) as_entry(*x, dims);
}

// The arguments of a call with sequences that a dense call has not.
struct SequenceCall {
  const torch::stable::Tensor& bounds;  // int32 (S, 4): first and number of queries, first and number of keys
  const std::optional<torch::stable::Tensor>& block_table;  // of the forward operator
  bool is_packed;  // q, k and v have one entry of all tokens; else one for each sequence. Pages aside
  int64_t bias_packing, most_q, most_k, left, right;
};

// A descriptor of rows of q, k, v or dout, which are ragged in a call with sequences.
inline CUtensorMap map_rows(const char* op, const torch::stable::Tensor& x, const char* name, int rows,
                            const SequenceParams& sequences, bool is_alone = false) {
  if (sequences.bounds != nullptr) return ragged_rows_map(op, x, name, rows);
  return rows_map(op, x, name, rows, is_alone);
}

// The same of scores: tiles of a bias or of dbias.
inline CUtensorMap map_scores(const char* op, const torch::stable::Tensor& x, const char* name, int rows,
                              const SequenceParams& sequences) {
  if (sequences.bounds == nullptr) return scores_map(op, x, name, rows);
  return sequences.bias_packs_queries ? ragged_scores_map(op, x, name, rows) : scores_by_position_map(op, x, name, rows);
}

// q (1, Tq, Hq, D) or (S, Lq, Hq, D), and so k and v.
inline SequenceParams sequence_params(const char* op, const SequenceCall& call, const Sizes& sizes,
                                      const std::optional<torch::stable::Tensor>& bias,
                                      const torch::stable::Tensor& q) {
  using torch::headeronly::ScalarType;
  const auto& bounds = call.bounds;
  CHECK_FOR(op, bounds.scalar_type() == ScalarType::Int && bounds.dim() == 2 && bounds.size(1) == 4 &&
                    bounds.is_contiguous() && bounds.size(0) > 0,
            "bounds need to be contiguous, int32, and (sequences, 4)");
  check_dims(op, bounds, "bounds", {bounds.size(0), 4}, q);
  CHECK_FOR(op, sizes.batch == (call.is_packed ? 1 : bounds.size(0)), "q has ", sizes.batch, " entries beside ",
            bounds.size(0), " sequences");
  CHECK_FOR(op, call.most_q > 0 && call.most_k > 0 && call.left >= 0 && call.right >= 0,
            "bounds on lengths need to be positive, and a window not negative");
  CHECK_FOR(op, sizes.batch * (sizes.seqlen_q + sizes.seqlen_k) <= kMaxInt / 2, "there are more than 2^30 rows");
  if (bias.has_value() && bias->numel() > 0) {  // of sequences without a key there may be nothing
    const bool is_by_position = call.bias_packing == kByPosition, packs_keys = call.bias_packing == kPackedKeys;
    check_dims(op, *bias, "bias",
               {one_or(is_by_position ? bounds.size(0) : 1), divisor_of(sizes.num_heads),
                one_or(is_by_position ? call.most_q : packs_keys ? 1 : sizes.seqlen_q),
                one_or(packs_keys ? sizes.seqlen_k : call.most_k)},
               q);
  }
  SequenceParams params{};
  params.bounds = static_cast<const int4*>(bounds.const_data_ptr());
  params.packs_queries = params.packs_keys = call.is_packed;
  params.rows_q = static_cast<int>(sizes.seqlen_q);
  params.rows_k = static_cast<int>(sizes.seqlen_k);
  params.most_q = static_cast<int>(std::min(call.most_q, sizes.seqlen_q));
  params.most_k = static_cast<int>(std::min(call.most_k, sizes.seqlen_k));
  params.left = static_cast<int>(std::min(call.left, kMaxInt / 2));
  params.right = static_cast<int>(std::min(call.right, kMaxInt / 2));
  params.bias_packs_queries = call.bias_packing == kPackedQueries;
  params.bias_packs_keys = call.bias_packing == kPackedKeys;
  return params;
}

// Says where keys lie in pages: k and v are (pages, page_size, Hk, D). The page of key j of a sequence is entry
// j / page_size of its row in the table, int32 (S, P).
inline void set_pages(const char* op, const torch::stable::Tensor& table, int64_t number,
                      const torch::stable::Tensor& k, const torch::stable::Tensor& v, SequenceParams& params) {
  const int64_t pages = k.size(0), page_size = k.size(1);
  CHECK_FOR(op, table.scalar_type() == torch::headeronly::ScalarType::Int && table.dim() == 2 && table.size(1) > 0 &&
                    table.stride(1) == 1,
            "block_table needs to be int32, (sequences, pages), its rows of unit stride");
  check_dims(op, table, "block_table", {number, table.size(1)}, k);
  CHECK_FOR(op, pages > 0, "k has no pages");
  const int64_t box = std::min<int64_t>(page_size, kTile);
  CHECK_FOR(op, box >= kLeastPage && kTile % box == 0 && page_size % box == 0, "pages have ", page_size,
            " keys; kernels take 16, 32, 64, or a multiple of 128");
  const auto rows_of_page = [&](const torch::stable::Tensor& x, const char* name) {
    const int64_t rows = pages > 1 ? x.stride(0) / x.stride(1) : page_size;
    CHECK_FOR(op, (pages == 1 || rows * x.stride(1) == x.stride(0)) && pages * rows <= kRaggedRows, name, " has pages ",
              x.stride(0), " elements apart; they need to be a whole number of rows of ", x.stride(1));
    return static_cast<int>(rows);
  };
  params.block_table = static_cast<const int*>(table.const_data_ptr());
  params.table_stride = table.size(0) > 1 ? table.stride(0) : 0;
  params.table_columns = static_cast<int>(table.size(1));
  params.pages = static_cast<int>(pages);
  params.page_size = static_cast<int>(page_size);
  params.page_box = static_cast<int>(box);
  params.page_rows_k = rows_of_page(k, "k");
  params.page_rows_v = rows_of_page(v, "v");
  params.packs_keys = false;
}

// Blocks of so many rows of all sequences: at most this many.
inline int64_t most_blocks(int64_t number, int64_t all_rows, int64_t most, int64_t rows) {
  return std::min(number * ceil_div(most, rows), all_rows / rows + number);
}

// A tensor (entries, rows, heads, columns), contiguous, of queries or of keys.
inline GapsOf gaps_of(const torch::stable::Tensor& x, bool are_keys, const SequenceParams& params) {
  return {const_cast<void*>(x.const_data_ptr()), static_cast<int>(x.size(1)),
          static_cast<int>(x.size(2) * x.size(3) / 8), are_keys, are_keys ? params.packs_keys : params.packs_queries};
}

// Lists the work tiles of a pass, blocks of so many rows, at most `blocks`; the tensor that is returned holds them. The
// forward pass also gets a counter, which is 0. The backward pass, where padded_tiles > 0, gets the sequence of each
// padded tile. The same kernel writes the rows of results that no sequence has, `gaps`, where no later kernel writes.
// is_ordered: as in ListWorksParams.
inline torch::stable::Tensor list_works(const char* op, const torch::stable::Tensor& like, int64_t number, bool by_keys,
                                        int64_t rows, int64_t blocks, int64_t padded_tiles, const FillGapsParams& gaps,
                                        int num_sms, SequenceParams& params, int** counter, cudaStream_t stream,
                                        bool is_ordered = false) {
  // Pairs of integers start on 8 bytes: the list of works comes first.
  torch::stable::Tensor memory =
      empty(like, {2 * blocks + 2 + number + padded_tiles}, torch::headeronly::ScalarType::Int);
  int* const start = static_cast<int*>(memory.mutable_data_ptr());
  params.padded_tiles = static_cast<int>(padded_tiles);
  ListWorksParams list{};
  list.sequences = params;
  list.number = static_cast<int>(number);
  list.by_keys = by_keys;
  list.is_ordered = is_ordered;
  list.rows = static_cast<int>(rows);
  list.works = reinterpret_cast<int2*>(start);
  list.num_works = start + 2 * blocks;
  list.firsts = list.num_works + 2;
  if (counter != nullptr) *counter = list.counter = list.num_works + 1;
  if (padded_tiles > 0) list.sequence_of_tile = list.firsts + number;
  check(launch_prepare({list, gaps}, num_sms, stream), op, "launching the kernel of the work tiles and the gaps");
  params.works = list.works;
  params.num_works = list.num_works;
  params.sequence_of_tile = list.sequence_of_tile;
  return memory;
}

}  // namespace flash_dmattn
