#include "shared_dbias.h"

#include <algorithm>

#include "bias.h"
#include "sequences.h"
#include "tensor_map.h"
#include "tile_scheduler.h"

namespace flash_dmattn {

void store_shared_dbias(const char* op, const SharedDbiasKernels& kernels, const CurrentDevice& device,
                        const Sizes& sizes, const SharedDbiasCall& call, const DbiasSchedule& schedule,
                        const torch::stable::Tensor& dbias) {
  const int64_t entries = dbias.size(0), heads = dbias.size(1);
  const int64_t tiles_q = ceil_div(sizes.seqlen_q, kTile), tiles_k = ceil_div(sizes.seqlen_k, kTile);
  CHECK_FOR(op, (entries == 1 || entries == sizes.batch) && sizes.num_heads % heads == 0, "dbias has ", entries,
            " batch entries and ", heads, " heads; it needs 1 or ", sizes.batch, ", and a divisor of ",
            sizes.num_heads);
  CHECK_FOR(op, schedule.dbias_tiles <= kMaxInt / 2 / schedule.chunks, "dbias has more than 2^30 tiles");

  const bool has_mask = !call.mask.empty();
  SharedDbiasParams params{};
  params.sequences = call.sequences;
  params.q = map_rows(op, call.q, "q", kTile, params.sequences);
  params.k = map_rows(op, call.k, "k", kTile, params.sequences);
  params.v = map_rows(op, call.v, "v", kTile, params.sequences);
  params.dout = map_rows(op, call.dout, "dout", kTile, params.sequences);
  params.bias = scores_map(op, call.bias, "bias", kTile);
  params.dbias = dbias.mutable_data_ptr();
  params.slots = call.slots;
  params.lse = call.lse;
  params.delta = call.delta;
  set_sizes(sizes, params);
  set_band(sizes, call.low, call.high, params);
  params.softmax_scale = static_cast<float>(call.softmax_scale);
  set_softcap(call.softmax_scale, call.softcap, params);
  params.dropout = call.dropout;
  if (has_mask) {
    CHECK_FOR(op, mask_form(call.mask) == MaskForm::kTiles, "a bias per query and key needs bits of a mask");
    params.mask = mask_tiles(call.mask, call.mask[1], sizes);
  }
  params.bias_values = bias_values(op, call.bias, sizes.num_heads);
  params.dbias_heads = static_cast<int>(heads);
  params.heads_per_dbias = static_cast<int>(sizes.num_heads / heads);
  params.heads_summed = static_cast<int>(schedule.heads_summed);
  params.chunks = static_cast<int>(schedule.chunks);
  params.slot_floats = schedule.slot_floats;
  params.slot_columns = static_cast<int>(schedule.slot_columns);
  params.tiles_q = static_cast<int>(tiles_q);
  params.tiles_k = static_cast<int>(tiles_k);
  params.dbias_tiles = static_cast<int>(schedule.dbias_tiles);
  params.num_work_tiles = static_cast<int>(schedule.dbias_tiles * schedule.chunks);
  const int blocks = std::min(params.num_work_tiles, sm_count(op, device.index));
  // Dynamic even if all tiles are alike: static scheduling is slower
  // (docs/notes/cuda_tried.md, "shared_dbias kernel").
  if (params.num_work_tiles > blocks) params.tile_counter = call.tile_counter;
  check(kernels.sum(params, has_mask, blocks, device.stream), op, "launching the kernel of dbias");
  if (!schedule.has_slots) return;
  AddChunksParams added{};
  added.slots = call.slots;
  added.dbias = params.dbias;
  added.rows = entries * heads * sizes.seqlen_q;
  added.chunks = params.chunks;
  added.slot_columns = params.slot_columns;
  added.seqlen_k = params.seqlen_k;
  added.stores_fours = sizes.seqlen_k % 4 == 0;
  check(kernels.add(added, device.stream), op, "launching the kernel that adds chunks of dbias");
}

}  // namespace flash_dmattn
