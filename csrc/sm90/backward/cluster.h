// Summing dbias over the batch within a cluster: each block has the same keys and queries of one batch entry, and ds of
// all blocks is added up.
//
// A block sends each other block that block's share of the rows of its ds, through distributed shared memory, and sums
// its own share of all blocks. So scores are computed once; a kernel for dbias alone would compute them again. A row
// here is 64 keys of one query: 128 bytes, swizzled as in ds.
#pragma once

#include "../../device/fragments.h"
#include "../../device/pipeline.h"
#include "tile_scheduler.h"

namespace flash_dmattn {

// Dynamic scheduling for a cluster, by one thread of each block: the first block takes the next tile for all.
template <class Storage>
__device__ __forceinline__ int next_tile_of_cluster(const BackwardParams& p, Storage& shared, uint32_t& phase) {
  if (cluster_rank() == 0) {
    barrier_wait(&shared.next_tile_empty, phase ^ 1);
    const int taken = atomicAdd(p.tile_counter, 1);
    for (int rank = 0; rank < p.cluster; ++rank) {
      dsmem_store_async(map_shared_rank(shared_address(&shared.next_tile), rank), taken,
                        map_shared_rank(shared_address(&shared.next_tile_full), rank));
    }
  }
  barrier_arrive_expect_tx(&shared.next_tile_full, sizeof(shared.next_tile));
  barrier_wait(&shared.next_tile_full, phase);
  const int taken = *static_cast<volatile int*>(&shared.next_tile);
  barrier_arrive_in_cluster(map_shared_rank(shared_address(&shared.next_tile_empty), 0));
  phase ^= 1;
  return taken;
}

// Sends ds of each query block, as one warp, a lane for each other block. The block's own share is copied by plain
// loads and stores: memcheck reports a bulk copy within a block as an error.
template <class Traits, class Storage>
__device__ __forceinline__ void send_ds(const BackwardParams& p, Storage& shared) {
  constexpr int kDsSlices = Traits::kDsSlices;
  PipelineState<Traits::kDsStages> pipe;
  PipelineState<Traits::kExchangeStages> pipe_exchange;
  PipelineState<kWorkStages> pipe_work;
  const int rank = cluster_rank(), lane = threadIdx.x % 32, bytes = Traits::kExchangeBytes / p.cluster;
  const int to = (rank + 1 + lane) % p.cluster;  // so that not all blocks send to the same one at once
  const uint32_t exchange = map_shared_rank(shared_address(shared.exchange) + rank * bytes, to);
  const uint32_t full = map_shared_rank(shared_address(shared.exchange_full), to);
  for (;;) {
    const KeyWorkItem<Traits>& item = get_work_tile(shared, pipe_work);
    if (!item.is_valid) return;
    const int steps = item.walk.steps;
    release_work_tile(shared, pipe_work);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
#pragma unroll 1
      for (int slice = 0; slice < kDsSlices; ++slice) {
        barrier_wait(&shared.ds_full[pipe.stage * kDsSlices + slice], pipe.phase);
        barrier_wait(&shared.exchange_empty[pipe_exchange.stage], pipe_exchange.phase ^ 1);
        const uint8_t* const ds = shared.ds[pipe.stage] + slice * Traits::kExchangeBytes;
        if (lane < p.cluster - 1) {
          dsmem_bulk_copy(exchange + pipe_exchange.stage * Traits::kExchangeBytes, ds + to * bytes, bytes,
                          full + pipe_exchange.stage * sizeof(uint64_t));
        }
        uint8_t* const own = shared.exchange[pipe_exchange.stage] + rank * bytes;
#pragma unroll 1
        for (int at = lane * 16; at < bytes; at += 32 * 16) {
          *reinterpret_cast<uint4*>(own + at) = *reinterpret_cast<const uint4*>(ds + rank * bytes + at);
        }
        if (lane == 0) barrier_expect_tx(&shared.exchange_full[pipe_exchange.stage], Traits::kExchangeBytes - bytes);
        barrier_arrive_of_warp(&shared.exchange_full[pipe_exchange.stage]);
        pipe_exchange.advance();
      }
      pipe.advance();
    }
  }
}

// Sums and stores dbias of each query block, as one warpgroup: the block's share of rows, in the order of the blocks.
template <class Traits, class Storage>
__device__ __forceinline__ void sum_dbias(const BackwardParams& p, Storage& shared) {
  using Element = typename Traits::Element;
  constexpr int kDsSlices = Traits::kDsSlices, kSliceRows = Traits::kExchangeBytes / kRowBytes;
  constexpr int kAtOnce = Traits::kSumsFast ? 2 : 1;  // blocks read at once; clusters have an even number
  PipelineState<Traits::kDsStages> pipe_ds;
  PipelineState<Traits::kExchangeStages> pipe;
  PipelineState<kWorkStages> pipe_work;
  const int rank = cluster_rank(), thread = threadIdx.x % 128;
  const int bytes = Traits::kExchangeBytes / p.cluster, rows = kSliceRows / p.cluster;
  const int chunk = thread % 8;  // 8 of the row's 64 keys
  for (;;) {
    const KeyWorkItem<Traits>& item = get_work_tile(shared, pipe_work);
    if (!item.is_valid) return;
    Element* const dbias =
        static_cast<Element*>(p.summed_dbias) + static_cast<int64_t>(item.head) * p.seqlen_q * p.seqlen_k;
#pragma unroll 1
    for (int step = 0; step < item.walk.steps; ++step) {
      bool needs_mask;
      const int first_query = item.walk.at(step, needs_mask) * Traits::kBlockM;
#pragma unroll 1
      for (int slice = 0; slice < kDsSlices; ++slice) {
        barrier_wait(&shared.exchange_full[pipe.stage], pipe.phase);
        // All have sent their share to this block, and may overwrite their ds.
        if (slice == kDsSlices - 1 && thread < 32) {
          barrier_arrive_of_warp_in_blocks(&shared.ds_empty[pipe_ds.stage], p.cluster);
        }
#pragma unroll 1
        for (int row_of_slice = thread / 8; row_of_slice < rows; row_of_slice += 128 / 8) {
          uint32_t at = shared_address(shared.exchange[pipe.stage]) + row_of_slice * kRowBytes +
                        ((chunk ^ row_of_slice % 8) << 4);
          float sums[8] = {};
#pragma unroll 1
          for (int block = 0; block < p.cluster; block += kAtOnce) {
            uint32_t words[kAtOnce][4];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) ld_shared_v4(words[i], at + i * bytes);
            at += kAtOnce * bytes;
#pragma unroll
            for (int w = 0; w < 4 * kAtOnce; ++w) {
              const float2 two = unpack(words[w / 4][w % 4], Element{});
              sums[w % 4 * 2] += two.x;
              sums[w % 4 * 2 + 1] += two.y;
            }
          }
          const int row_of_tile = slice * kSliceRows + rank * rows + row_of_slice;
          const int query = first_query + row_of_tile % Traits::kBlockM;
          const int key = item.block_k * Traits::kBlockN + row_of_tile / Traits::kBlockM * kPanelColumns + chunk * 8;
          if (query < p.seqlen_q && key < p.seqlen_k) {
            *reinterpret_cast<uint4*>(dbias + static_cast<int64_t>(query) * p.seqlen_k + key) =
                make_uint4(pack(sums[0], sums[1], Element{}), pack(sums[2], sums[3], Element{}),
                           pack(sums[4], sums[5], Element{}), pack(sums[6], sums[7], Element{}));
          }
        }
        barrier_arrive_of_warp_in_blocks(&shared.exchange_empty[pipe.stage], p.cluster);
        pipe.advance();
      }
      pipe_ds.advance();
    }
    release_work_tile(shared, pipe_work);
  }
}

}  // namespace flash_dmattn
