// The blocks of a cluster, each with the same keys and queries of one of the batch entries that share a bias: they take
// works together, and sum their ds, the gradient of the bias.
//
// A block sends the others their lines of its ds, from shared memory to shared memory, and adds up its own lines of all.
// So scores are computed once, where a kernel for dbias alone would compute them again. Of one block a line is 64 keys of
// a query, swizzled as in ds.
#pragma once

#include "../../device/fragments.h"
#include "../../device/pipeline.h"
#include "tile_scheduler.h"

namespace flash_dmattn {

// The number of the cluster's next work, by one thread of each block: that of the first block takes it for all.
template <class Storage>
__device__ __forceinline__ int next_of_cluster(const BackwardParams& p, Storage& shared, uint32_t& phase) {
  if (cluster_rank() == 0) {
    barrier_wait(&shared.next_empty, phase ^ 1);
    const int taken = atomicAdd(p.next, 1);
    for (int rank = 0; rank < p.cluster; ++rank) {
      store_in_cluster(address_in_block(shared_address(&shared.next), rank), taken,
                       address_in_block(shared_address(&shared.next_full), rank));
    }
  }
  barrier_arrive_expect(&shared.next_full, sizeof(shared.next));
  barrier_wait(&shared.next_full, phase);
  const int taken = *static_cast<volatile int*>(&shared.next);
  barrier_arrive_in_cluster(address_in_block(shared_address(&shared.next_empty), 0));
  phase ^= 1;
  return taken;
}

// ds of each block of queries, sent by one warp, a lane for each other block of the cluster. Its own lines it copies as
// any thread does: the copy engine is for those of others.
template <class Traits, class Storage>
__device__ __forceinline__ void send_ds(const BackwardParams& p, Storage& shared) {
  constexpr int kParts = Traits::kParts;
  Ring<Traits::kDsStages> ring;
  Ring<Traits::kPartStages> ring_parts;
  Ring<2> ring_work;
  const int rank = cluster_rank(), lane = threadIdx.x % 32, bytes = Traits::kPartBytes / p.cluster;
  const int to = (rank + 1 + lane) % p.cluster;  // not all at once to the same block
  const uint32_t parts = address_in_block(shared_address(shared.parts) + rank * bytes, to);
  const uint32_t full = address_in_block(shared_address(shared.parts_full), to);
  for (;;) {
    const KeyItem<Traits>& item = take_work(shared, ring_work);
    if (!item.exists) return;
    const int steps = item.walk.steps;
    give_back_work(shared, ring_work);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
#pragma unroll 1
      for (int part = 0; part < kParts; ++part) {
        barrier_wait(&shared.ds_full[ring.stage * kParts + part], ring.phase);
        barrier_wait(&shared.parts_empty[ring_parts.stage], ring_parts.phase ^ 1);
        const uint8_t* const ds = shared.ds[ring.stage] + part * Traits::kPartBytes;
        if (lane < p.cluster - 1) {
          copy_in_cluster(parts + ring_parts.stage * Traits::kPartBytes, ds + to * bytes, bytes,
                          full + ring_parts.stage * sizeof(uint64_t));
        }
        uint8_t* const own = shared.parts[ring_parts.stage] + rank * bytes;
#pragma unroll 1
        for (int at = lane * 16; at < bytes; at += 32 * 16) {
          *reinterpret_cast<uint4*>(own + at) = *reinterpret_cast<const uint4*>(ds + rank * bytes + at);
        }
        if (lane == 0) barrier_expect(&shared.parts_full[ring_parts.stage], Traits::kPartBytes - bytes);
        barrier_arrive_of_warp(&shared.parts_full[ring_parts.stage]);
        ring_parts.advance();
      }
      ring.advance();
    }
  }
}

// dbias of each block of queries, by one warpgroup: the block's lines of what all have sent, in the order of the blocks.
template <class Traits, class Storage>
__device__ __forceinline__ void sum_dbias(const BackwardParams& p, Storage& shared) {
  using Element = typename Traits::Element;
  constexpr int kParts = Traits::kParts, kLines = Traits::kPartBytes / kRowBytes;
  constexpr int kAtOnce = Traits::kSumsFast ? 2 : 1;  // of the blocks, an even number
  Ring<Traits::kDsStages> ring_ds;
  Ring<Traits::kPartStages> ring;
  Ring<2> ring_work;
  const int rank = cluster_rank(), thread = threadIdx.x % 128;
  const int bytes = Traits::kPartBytes / p.cluster, lines = kLines / p.cluster;
  const int chunk = thread % 8;  // of the 8 keys of a line at a time
  for (;;) {
    const KeyItem<Traits>& item = take_work(shared, ring_work);
    if (!item.exists) return;
    Element* const dbias =
        static_cast<Element*>(p.summed_dbias) + static_cast<int64_t>(item.head) * p.seqlen_q * p.seqlen_k;
#pragma unroll 1
    for (int step = 0; step < item.walk.steps; ++step) {
      bool has_edge;
      const int first_query = item.walk.at(step, has_edge) * Traits::kRows;
#pragma unroll 1
      for (int part = 0; part < kParts; ++part) {
        barrier_wait(&shared.parts_full[ring.stage], ring.phase);
        // All have sent this block theirs, and may write their next ds.
        if (part == kParts - 1 && thread < 32) {
          barrier_arrive_of_warp_in_blocks(&shared.ds_empty[ring_ds.stage], p.cluster);
        }
#pragma unroll 1
        for (int line = thread / 8; line < lines; line += 128 / 8) {
          uint32_t at = shared_address(shared.parts[ring.stage]) + line * kRowBytes + ((chunk ^ line % 8) << 4);
          float sums[8] = {};
#pragma unroll 1
          for (int block = 0; block < p.cluster; block += kAtOnce) {
            uint32_t words[kAtOnce][4];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) load_four(words[i], at + i * bytes);
            at += kAtOnce * bytes;
#pragma unroll
            for (int w = 0; w < 4 * kAtOnce; ++w) {
              const float2 two = unpack(words[w / 4][w % 4], Element{});
              sums[w % 4 * 2] += two.x;
              sums[w % 4 * 2 + 1] += two.y;
            }
          }
          const int line_of_tile = part * kLines + rank * lines + line;
          const int query = first_query + line_of_tile % Traits::kRows;
          const int key = item.block_k * Traits::kKeys + line_of_tile / Traits::kRows * kPanelColumns + chunk * 8;
          if (query < p.seqlen_q && key < p.seqlen_k) {
            *reinterpret_cast<uint4*>(dbias + static_cast<int64_t>(query) * p.seqlen_k + key) =
                make_uint4(pack(sums[0], sums[1], Element{}), pack(sums[2], sums[3], Element{}),
                           pack(sums[4], sums[5], Element{}), pack(sums[6], sums[7], Element{}));
          }
        }
        barrier_arrive_of_warp_in_blocks(&shared.parts_empty[ring.stage], p.cluster);
        ring.advance();
      }
      ring_ds.advance();
    }
    give_back_work(shared, ring_work);
  }
}

}  // namespace flash_dmattn
