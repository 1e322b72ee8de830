// How the blocks of a backward pass share its work, and which kernel writes dbias. Includes no CUDA, no torch: tests
// compile it alone to know which calls reach which kernel.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../sm90/backward/instances.h"
#include "integers.h"

namespace flash_dmattn {

// The facts that a schedule depends on. Sizes of tensors that are absent are 0. How an invariant call sums goes by no size and
// by no number of SMs.
struct BackwardCall {
  int64_t batch, num_heads, num_heads_k, seqlen_q, seqlen_k;
  int64_t head_dim, head_dim_v;            // of the kernel instance
  int64_t dbias_batch, dbias_heads;        // of a dbias of one value per query and key
  int64_t mask_batch;
  int64_t low, high;                       // query i sees keys from i + low to i + high, or fewer under a mask
  bool has_key_order;                      // keys are in the order of an interval mask
  bool is_banded;                          // the band forbids something; of a mask, the band is part of it
  bool takes_plain_kernels;                // none of two key tiles or of clusters: a softcap, dropout or a window
  bool is_deterministic, needs_dq, needs_dk_or_dv;
  bool groups_share_mask;                  // the heads of a group have the same mask
  bool shares_over_batch;                  // batch entries read the same bias per score or the same mask
  bool has_key_bias;                       // a bias of one value per key
  bool has_bias;                           // of one value per key, per query and key, or per distance
  bool is_invariant;
  bool has_float_dbias;                    // of one value per query and key in fp32
};

constexpr int64_t kDbiasColumns = 8;  // of a row of dbias, or of its sums; 16 bytes of dbias are written at a time

enum class DbiasWriter {
  kNone,        // no dbias of one value per query and key
  kMain,        // the main kernel, whose blocks store a tile each
  kClusters,    // the main kernel, whose clusters sum it over the batch
  kSharedDbias  // the shared_dbias kernel, which computes the scores once more
};

// Who writes dbias, if clusters of `batch` blocks find room on the GPU; without room, kSharedDbias replaces kClusters.
// Clusters serve a dbias that the whole batch shares and nothing else does. The batch has to be a cluster size, and
// rows of dbias written 16 bytes at a time. All entries need one mask: else the blocks of a cluster would walk
// different queries. Blocks exchange terms of 16 bits, which are not enough for a dbias in fp32.
inline DbiasWriter dbias_writer(const BackwardCall& call) {
  if (call.dbias_batch == 0) return DbiasWriter::kNone;
  const bool is_shared = call.dbias_batch < call.batch || call.dbias_heads < call.num_heads;
  const bool stores = backward_stores_dbias(call.head_dim, call.head_dim_v, call.takes_plain_kernels);
  if (!is_shared && stores) return DbiasWriter::kMain;
  const bool is_cluster_size = call.batch == 2 || call.batch == 4 || call.batch == 8;
  const bool sums = is_cluster_size && call.dbias_batch == 1 && call.dbias_heads == call.num_heads &&
                    call.seqlen_k % kDbiasColumns == 0 && call.mask_batch <= 1 &&
                    (call.needs_dq || call.needs_dk_or_dv) && !call.has_float_dbias &&
                    backward_sums_dbias(call.head_dim, call.head_dim_v, call.takes_plain_kernels);
  return sums ? DbiasWriter::kClusters : DbiasWriter::kSharedDbias;
}

// How the blocks of the shared_dbias kernel share a dbias. Its slots hold fp32 sums.
struct DbiasSchedule {
  int64_t dbias_tiles;
  int64_t heads_summed;  // attention heads that are summed into one tile
  int64_t chunks;        // work tiles that share them
  bool has_slots;        // sums go into slots, one for each chunk: there are several, or rows of dbias are not aligned
  int64_t slot_columns;  // length of a row of a slot
  int64_t slot_floats;   // of one slot
};

constexpr int64_t kLeastHeadsOfChunk = 4, kMostDbiasWaves = 8, kMostSlotBytes = 64 << 20;

// Chooses the number of chunks; `most` is how many slots there is room for. The estimate counts steps. A step is one
// head of one tile, and takes some 1.3 us at D64:
//
//     waves * (steps of a chunk + fixed cost of a work tile) + fixed cost of slots + writing and reading them
//
// The constants are estimates: docs/notes/cuda.md, "shared_dbias kernel". The host does not know which tiles a mask
// leaves out.
inline int64_t estimate_dbias_chunks(int64_t tiles, int64_t heads, int64_t most, int64_t num_sms) {
  constexpr int64_t kParts = 64;  // of a step; the slot of a work tile costs one part
  constexpr int64_t kTileSteps = 2, kSlotSteps = 3;
  const auto time_of = [&](int64_t chunks) {
    const int64_t tile_time = (ceil_div(heads, chunks) + kTileSteps) * kParts, work_tiles = tiles * chunks;
    const int64_t total_time = ceil_div(work_tiles, num_sms) * tile_time;
    return chunks == 1 ? total_time : total_time + kSlotSteps * kParts + work_tiles;
  };
  int64_t best = 1;
  for (int64_t waves = 1; waves <= kMostDbiasWaves; ++waves) {
    const int64_t chunks = std::min({waves * num_sms / tiles, heads / kLeastHeadsOfChunk, most});
    if (chunks > 1 && time_of(chunks) < time_of(best)) best = chunks;
  }
  return 16 * time_of(best) < 15 * time_of(1) ? best : 1;  // what is hardly faster is not worth the memory
}

// num_chunks: 0 for the estimate; of any other number as many as there are heads, and room for slots.
inline DbiasSchedule schedule_dbias(const BackwardCall& call, int64_t num_chunks, int64_t num_sms) {
  const int64_t heads = call.dbias_batch * call.dbias_heads;
  DbiasSchedule schedule{};
  schedule.dbias_tiles = heads * ceil_div(call.seqlen_q, kTile) * ceil_div(call.seqlen_k, kTile);
  schedule.heads_summed = call.batch / call.dbias_batch * (call.num_heads / call.dbias_heads);
  schedule.slot_columns = ceil_div(call.seqlen_k, kDbiasColumns) * kDbiasColumns;
  schedule.slot_floats = heads * call.seqlen_q * schedule.slot_columns;
  const int64_t most = std::max<int64_t>(kMostSlotBytes / (schedule.slot_floats * 4), 1);
  schedule.chunks = num_chunks > 0
                        ? std::min({num_chunks, schedule.heads_summed, most})
                        : estimate_dbias_chunks(schedule.dbias_tiles, schedule.heads_summed, most, num_sms);
  schedule.has_slots = schedule.chunks > 1 || schedule.slot_columns != call.seqlen_k;
  return schedule;
}

// Diagonals of tiles from `first` to `last`; none if `last` is less. The number of a diagonal is the tile of keys minus
// the tile of queries.
struct Diagonals {
  int64_t first = 0, last = -1;
  int64_t count() const { return std::max<int64_t>(last - first + 1, 0); }
  Diagonals within(const Diagonals& other) const { return {std::max(first, other.first), std::min(last, other.last)}; }
};

// The diagonals whose tiles have a distance, key minus query, from `low` to `high`.
inline Diagonals diagonals_between(int64_t low, int64_t high) {
  return {-floor_div(kTile - 1 - low, kTile), floor_div(high + kTile - 1, kTile)};
}

// How blocks share the sums along so many diagonals of each head of a bias by distance.
inline DbiasSchedule schedule_diagonals(const BackwardCall& call, int64_t dbias_batch, int64_t dbias_heads,
                                        int64_t diagonals, int64_t floats, int64_t num_chunks, int64_t num_sms) {
  DbiasSchedule schedule{};
  schedule.dbias_tiles = dbias_batch * dbias_heads * diagonals;
  schedule.heads_summed = call.batch / dbias_batch * (call.num_heads / dbias_heads);
  schedule.slot_floats = schedule.dbias_tiles * floats;
  schedule.has_slots = diagonals > 0;
  if (diagonals == 0) return schedule;
  const int64_t tiles = std::min(ceil_div(call.seqlen_q, kTile), ceil_div(call.seqlen_k, kTile));
  const int64_t summed = schedule.heads_summed * tiles;  // of a long diagonal
  const int64_t most = std::max<int64_t>(kMostSlotBytes / (schedule.slot_floats * 4), 1);
  schedule.chunks = num_chunks > 0 ? std::min({num_chunks, summed, most})
                                   : estimate_dbias_chunks(schedule.dbias_tiles, summed, most, num_sms);
  return schedule;
}

struct BackwardSchedule {
  int block_n;                   // keys of a work tile
  int64_t blocks_k;              // work tiles along the keys
  bool batch_is_inner;           // neighbours are batch entries of one head
  int64_t full_group_pairs;      // the first (batch, key head) pairs: their work tiles have all query heads of a group
  int64_t summed_pairs;          // the others: one query head a work tile, dk and dv are summed in device memory
  int64_t single_heads;          // (batch, query head) pairs of these others
  bool blocks_decide;            // blocks find out which key blocks have whole groups: sums have room for all pairs
  int64_t short_walk, share;     // by which they decide, as in GroupWalks
  int64_t walk_parts;            // work tiles that share the walk of a key block and a head
  int64_t walk_tiles;            // tiles of queries that one of them gets at most; 0 where walks stay whole
  bool is_head_by_head;          // in sections of one head, which blocks leave where its live keys end
  int64_t num_work_tiles;
  bool completes_dq;             // a work tile has all keys, and stores dq of its queries; else dq is summed
  bool is_ordered;               // sums are added in a fixed order
  bool tiles_differ;             // in length, so that blocks take them as they finish
};

constexpr int64_t kEnoughTilesPerSm = 8;  // so many for each SM leave no SM waiting long for the last

// A block of two key tiles takes 5 / 3 of the time of a block of one, in two cases. Where dbias is stored, L2 bounds the
// kernel and the larger block moves less. Where a block has all keys, nothing is added to dq. With a band it is slower:
// docs/notes/cuda_tried.md, "Backward kernel".
constexpr int64_t kTimeOfTwo = 5, kTimeOfOne = 3;

// Whether blocks of two key tiles finish earlier than twice as many blocks of one, for so many pairs of a batch entry
// and a head.
inline bool pays_to_take_two(int64_t pairs, int64_t tiles_k, int64_t num_sms) {
  const auto waves = [&](int64_t blocks) { return ceil_div(pairs * blocks, num_sms); };
  return kTimeOfTwo * waves(ceil_div(tiles_k, 2)) <= kTimeOfOne * waves(tiles_k);
}

// Whether work tiles have 128 keys where other calls of these head dims have 64. They need to be more than the SMs: causal
// gradients of (1, 16, 1024), 128 such tiles, take 0.0680 ms with 64 keys and 0.0773 with 128; of (1, 16, 2048), 256
// tiles, 0.1869 and 0.1469 (H200).
inline bool takes_whole_tile(const BackwardCall& call, int64_t num_sms) {
  const bool has_kernel = has_whole_tile(call.head_dim, call.head_dim_v) && call.mask_batch == 0 &&
                          !call.takes_plain_kernels && !call.has_bias;
  return has_kernel && call.batch * call.num_heads * ceil_div(call.seqlen_k, kTile) > num_sms;
}

// In an order of keys, walks of neighbours are alike, and three quarters of the key blocks may have none. Walks of 32
// tiles or an eighth of long rows, where heads are few of 8 tiles or a 32nd, leave no SM waiting long:
// docs/notes/intervals.md.
constexpr int64_t kFewHeads = 8;
constexpr int64_t kWalkTiles = 32, kMostWalkParts = 8;
constexpr int64_t kShortWalkTiles = 8, kMostShortWalkParts = 32;

// How many queries see a key on the mean, where query i sees the keys up to i + high.
inline int64_t mean_walk(int64_t seqlen_q, int64_t seqlen_k, int64_t high) {
  // The first keys are seen by all queries, each one behind them by one less, the last ones by none.
  const int64_t by_all = std::clamp<int64_t>(high + 1, 0, seqlen_k);
  const int64_t seen = std::clamp<int64_t>(seqlen_q + high, by_all, seqlen_k);
  const int64_t most = seqlen_q + high - by_all, least = seqlen_q + high - (seen - 1);
  return (by_all * seqlen_q + (seen - by_all) * (most + least) / 2) / seqlen_k;
}

// The same in a band.
inline int64_t mean_walk(const BackwardCall& call) {
  return mean_walk(call.seqlen_q, call.seqlen_k, call.high) - mean_walk(call.seqlen_q, call.seqlen_k, call.low - 1);
}

// A work tile of one query head adds its dk and dv in device memory. It costs as much as a walk of so many queries
// more (docs/notes/cuda_tried.md, "Head groups"). Where dbias is stored walks wait for memory, and SMs without work are
// missed less; with dq complete nothing else is added.
constexpr int64_t kSumsBesideDbias = 1024, kSumsAlone = 384, kSumsBesideDq = 224;
inline int64_t sums_walk(const BackwardSchedule& schedule, DbiasWriter writer) {
  if (writer == DbiasWriter::kMain) return kSumsBesideDbias;
  return schedule.completes_dq ? kSumsAlone : kSumsBesideDq;
}

// How many (batch, key head) pairs have work tiles of whole groups, so that nothing is added. Tiles of single heads are
// more and shorter, and leave no SM waiting long for the last one. So all pairs have whole groups where that saves
// more than SMs then wait. Else the pairs of the last one or two waves have single heads. With a band, where tiles get
// shorter towards the end, all pairs have. Measured: docs/notes/cuda_tried.md, "Head groups".
inline int64_t count_full_group_pairs(const BackwardCall& call, const BackwardSchedule& schedule, DbiasWriter writer,
                                      int64_t num_sms) {
  const int64_t pairs_k = call.batch * call.num_heads_k, tiles = pairs_k * schedule.blocks_k;
  const int64_t group = call.num_heads / call.num_heads_k;
  if (call.has_key_order) return 0;  // the kernel of the sums puts dk and dv in the order of keys
  if (group == 1 || call.is_invariant || tiles >= kEnoughTilesPerSm * num_sms) return pairs_k;
  if (call.is_deterministic) return schedule.is_ordered ? 0 : pairs_k;
  const bool has_mask = call.mask_batch > 0, is_banded = call.is_banded && !has_mask;
  const int64_t waves = is_banded ? 0 : std::max<int64_t>(tiles / num_sms - 1, 0);
  const int64_t saved = (tiles - waves * num_sms) * group * sums_walk(schedule, writer);
  // If tiles are alike, SMs wait as long as the last wave lacks tiles; if not, as long as a last tile has heads but
  // one.
  const int64_t waiting = has_mask || is_banded ? (group - 1) * num_sms
                                                : group * (ceil_div(tiles, num_sms) * num_sms - tiles);
  // Fewer tiles leave SMs without any, which pays beside those two alone.
  const bool fills_sms = 4 * tiles >= 3 * num_sms || writer == DbiasWriter::kMain || schedule.completes_dq;
  if (fills_sms && waiting * mean_walk(call) <= saved) return pairs_k;
  const int64_t together = schedule.batch_is_inner ? call.batch : 1;
  return waves * num_sms / schedule.blocks_k / together * together;
}

// Under a mask the host does not know the walks, and assumes that they are alike. They may differ, for example where
// all queries see a few keys. Then blocks decide for each key block whether its work tile has a whole group. In the
// first full_group_pairs pairs it has, unless an SM would have done all its other work before that one tile. In the
// other pairs it has if the walk is short: an SM then waits for all heads but one of such a walk, which is less than
// the sums take. (For head dims up to 64 half as much was right.)
inline void let_blocks_decide(const BackwardCall& call, DbiasWriter writer, int64_t num_sms,
                              BackwardSchedule& schedule) {
  const int64_t pairs_k = call.batch * call.num_heads_k, tiles = pairs_k * schedule.blocks_k;
  const int64_t group = call.num_heads / call.num_heads_k, summed_pairs = pairs_k - schedule.full_group_pairs;
  const bool can_decide = call.mask_batch > 0 && call.groups_share_mask && !call.has_key_order &&
                          !call.is_deterministic && group > 1 &&
                          writer != DbiasWriter::kClusters;  // whose blocks have one work tile each
  if (!can_decide || (summed_pairs == 0 && tiles >= ceil_div(call.seqlen_q, kTile) * num_sms)) return;
  const int64_t saved = summed_pairs * schedule.blocks_k * group * sums_walk(schedule, writer);
  schedule.short_walk = saved / ((group - 1) * num_sms * kTile) / (call.head_dim <= 64 ? 2 : 1);
  schedule.share = std::max<int64_t>(tiles / num_sms, 1);
  schedule.blocks_decide = schedule.short_walk > 0 || schedule.full_group_pairs > 0;
}

inline BackwardSchedule schedule_backward(const BackwardCall& call, DbiasWriter writer, int64_t num_sms) {
  const int64_t pairs_k = call.batch * call.num_heads_k, tiles_k = ceil_div(call.seqlen_k, kTile);
  const bool has_mask = call.mask_batch > 0;
  const bool takes_two = !has_mask && !call.is_banded && !call.takes_plain_kernels && !call.has_key_bias &&
                         !call.is_invariant &&
                         has_two_key_tiles(call.head_dim, call.head_dim_v) &&
                         (pays_to_take_two(pairs_k, tiles_k, num_sms) ||  // of whole groups, or of single heads
                          pays_to_take_two(call.batch * call.num_heads, tiles_k, num_sms));
  BackwardSchedule schedule{};
  schedule.completes_dq = takes_two && tiles_k == 2 && call.needs_dq && writer != DbiasWriter::kClusters;
  const bool has_two_tiles = schedule.completes_dq || (takes_two && writer == DbiasWriter::kMain);
  schedule.block_n = has_two_tiles                     ? 2 * kTile
                     : takes_whole_tile(call, num_sms) ? kTile
                                                       : backward_block_n(call.head_dim, call.head_dim_v);
  schedule.blocks_k = has_two_tiles ? ceil_div(tiles_k, 2) : tiles_k * (kTile / schedule.block_n);
  schedule.is_ordered = call.needs_dq && call.is_deterministic && !schedule.completes_dq;
  schedule.batch_is_inner = writer == DbiasWriter::kClusters || call.shares_over_batch;
  schedule.full_group_pairs = count_full_group_pairs(call, schedule, writer, num_sms);
  let_blocks_decide(call, writer, num_sms, schedule);
  schedule.summed_pairs = pairs_k - (schedule.blocks_decide ? 0 : schedule.full_group_pairs);
  schedule.single_heads = (pairs_k - schedule.full_group_pairs) * (call.num_heads / call.num_heads_k);
  schedule.walk_parts = 1;
  if (call.has_key_order && !schedule.is_ordered) {
    const int64_t tiles_q = ceil_div(call.seqlen_q, kTile);
    schedule.is_head_by_head = schedule.single_heads < kFewHeads;
    schedule.walk_parts = schedule.is_head_by_head
                              ? std::min(ceil_div(tiles_q, kShortWalkTiles), kMostShortWalkParts)
                              : std::min(ceil_div(tiles_q, kWalkTiles), kMostWalkParts);
    schedule.walk_tiles = ceil_div(tiles_q, schedule.walk_parts);
  }
  const int64_t pairs = schedule.full_group_pairs + schedule.single_heads;
  schedule.num_work_tiles = pairs * schedule.blocks_k * schedule.walk_parts;
  schedule.tiles_differ =
      has_mask || call.is_banded || (schedule.full_group_pairs > 0 && schedule.summed_pairs > 0);
  return schedule;
}

}  // namespace flash_dmattn
