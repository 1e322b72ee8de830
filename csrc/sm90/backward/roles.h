// The barriers of both backward kernels, and the roles of the producer's warps.
#pragma once

#include "../persistent.h"
#include "producer.h"

namespace flash_dmattn {

template <class T, class S>
struct BackwardRoles : KernelRoles {
  using Traits = T;
  using Storage = S;
  static constexpr bool kSharesMemory = Traits::kSumsDbias;

  __device__ __forceinline__ static bool has_adding_warp(const BackwardParams& p) {
    return Traits::kTurnsDq || p.dq_semaphore != nullptr;
  }

  __device__ __forceinline__ static void init(const BackwardParams& p, Storage& shared) {
    constexpr int kWarp = kArrivalsOfWarp, kWarpgroup = 4 * kWarp, kConsumers = Traits::kConsumers * kWarpgroup;
    const int blocks = Traits::kSumsDbias ? p.cluster : 0;  // that signal that they have received a stage of ds
    init_barriers(shared.keys_full, 2);  // k and v
    init_barriers(shared.keys_empty, kConsumers);
    init_barriers(shared.q_full, 2);  // q and lse
    init_barriers(shared.q_empty, kConsumers);
    init_barriers(shared.dout_full, 2);  // dout and delta
    init_barriers(shared.dout_empty, kConsumers);
    init_barriers(shared.ds_full, kWarpgroup * Traits::kDsWriters);
    init_barriers(shared.ds_empty,
                  kConsumers + kWarp * ((Traits::kStoresDbias && !Traits::kReplacesBias) + blocks));
    init_barriers(shared.bias_full, Traits::kHasBiasWindow ? kWarp : 1);
    // If dbias overwrites the bias, the last reader of the stage is the warp that stores dbias.
    init_barriers(shared.bias_empty, Traits::kReplacesBias ? kWarp : kWarpgroup * Traits::kBiasReaders);
    if constexpr (Traits::kTurnsDq) {
      init_barriers(shared.dq_full, kWarpgroup);
      init_barriers(shared.dq_empty, kWarp);
    }
    init_barriers(shared.work_full, 1);
    const int helpers = Traits::kHasBiasTiles + Traits::kHasBiasWindow + Traits::kStoresDbias + has_adding_warp(p);
    init_barriers(shared.work_empty, kConsumers + kWarp * (helpers + Traits::kSumsDbias) +
                                         kWarpgroup * Traits::kSumsDbias + kHasScheduler<Traits>);
    barrier_init(&shared.work_wanted, 1);
    if constexpr (Traits::kSumsDbias) {
      init_barriers(shared.exchange_full, kWarp);
      init_barriers(shared.exchange_empty, kWarpgroup * p.cluster);
      barrier_init(&shared.next_tile_full, 1);
      barrier_init(&shared.next_tile_empty, p.cluster);
    }
  }

  // The kernel of the sums.
  __device__ __forceinline__ static void let_next_start(const BackwardParams& p) {
    if (p.dq_sums != nullptr) griddep_launch_dependents();
  }

  __device__ __forceinline__ static void produce(const BackwardParams& p, Storage& shared, int warp) {
    if (warp == 0) {
      if (threadIdx.x == 0) load_operands<Traits>(p, shared);
    } else if (Traits::kHasBiasTiles && warp == 1) {
      load_bias<Traits>(p, shared);
    } else if (Traits::kHasBiasWindow && warp == 1) {
      if constexpr (Traits::kHasBiasWindow) write_windows<Traits>(p, shared);
    } else if (kHasScheduler<Traits> && warp == 2) {
      if (threadIdx.x % 32 == 0) schedule<Traits>(p, shared);
    } else if (Traits::kStoresDbias && warp == 2) {
      store_dbias<Traits>(p, shared);
    } else if (Traits::kSumsDbias && warp == 2) {
      if constexpr (Traits::kSumsDbias) send_ds<Traits>(p, shared);
    } else if (warp == 3 && has_adding_warp(p)) {
      if constexpr (Traits::kTurnsDq) {
        add_turned_dq<Traits>(p, shared);
      } else {
        order_sums<Traits>(p, shared);
      }
    }
  }
};

}  // namespace flash_dmattn
