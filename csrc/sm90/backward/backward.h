// The backward kernel: persistent and warp-specialised, a producer warpgroup and two consumer warpgroups.
//
//     p = exp2(scale log2(e) q k^T + bias log2(e) - lse),  dp = dout v^T,  ds = p (dp - delta)
//     dv = p^T dout,  dk = scale ds^T q,  dq = scale ds k,  dbias = ds
//
// With a softcap, t = tanh(scale q k^T / softcap):
//
//     p = exp2(softcap log2(e) t + bias log2(e) - lse),  dk = scale (ds (1 - t^2))^T q,  dq = scale ds (1 - t^2) k
//
// If batch entries share a bias, each block of a cluster takes one of them and together they sum dbias (cluster.h).
//
// Source: FlashAttention-2 (arXiv:2307.08691), section 3.1.2.
#pragma once

#include "../persistent.h"
#include "consumer.h"
#include "launch.h"
#include "producer.h"
#include "storage.h"

namespace flash_dmattn {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) backward_kernel(const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<BackwardStorage<Traits>*>(memory);
  constexpr int kArrivals = 4 * Traits::kConsumers * kArrivalsOfWarp;  // all consumer warps
  constexpr int kSummingWarps = 4;
  const int senders = Traits::kSumsDbias ? p.cluster : 0;  // blocks that signal that they have received a stage of ds
  const bool has_adding_warp = Traits::kTurnsDq || p.dq_semaphore != nullptr;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Traits::kKeyStages; ++stage) {
      barrier_init(&shared.keys_full[stage], 2);  // k and v
      barrier_init(&shared.keys_empty[stage], kArrivals);
    }
    for (int stage = 0; stage < Traits::kDsStages; ++stage) {
      if (stage < Traits::kStages) {
        barrier_init(&shared.q_full[stage], 2);  // q and lse
        barrier_init(&shared.q_empty[stage], kArrivals);
        barrier_init(&shared.dout_full[stage], 2);  // dout and delta
        barrier_init(&shared.dout_empty[stage], kArrivals);
      }
      // If dbias overwrites the bias, the last reader of the stage is the warp that stores dbias.
      for (int slice = 0; slice < Traits::kDsSlices; ++slice) {
        barrier_init(&shared.ds_full[stage * Traits::kDsSlices + slice], kArrivals / Traits::kDsSlices);
      }
      barrier_init(&shared.ds_empty[stage],
                   kArrivals + kArrivalsOfWarp * ((Traits::kStoresDbias && !Traits::kReplacesBias) + senders));
      if (stage < Traits::kBiasStages) {
        barrier_init(&shared.bias_full[stage], 1);
        barrier_init(&shared.bias_empty[stage], Traits::kReplacesBias ? kArrivalsOfWarp : kArrivals);
      }
    }
    if constexpr (Traits::kTurnsDq) {
      for (int group = 0; group < Traits::kConsumers; ++group) {
        barrier_init(&shared.dq_full[group], 4 * kArrivalsOfWarp);
        barrier_init(&shared.dq_empty[group], kArrivalsOfWarp);
      }
    }
    for (int stage = 0; stage < 2; ++stage) {
      barrier_init(&shared.work_full[stage], 1);
      barrier_init(&shared.work_empty[stage],
                   kArrivals + kArrivalsOfWarp * (Traits::kHasBiasTiles + Traits::kStoresDbias + has_adding_warp +
                                                  (Traits::kSumsDbias ? 1 + kSummingWarps : 0)));
    }
    if constexpr (Traits::kSumsDbias) {
      for (int stage = 0; stage < Traits::kExchangeStages; ++stage) {
        barrier_init(&shared.exchange_full[stage], kArrivalsOfWarp);
        barrier_init(&shared.exchange_empty[stage], kArrivalsOfWarp * kSummingWarps * p.cluster);
      }
      barrier_init(&shared.next_tile_full, 1);
      barrier_init(&shared.next_tile_empty, p.cluster);
    }
    fence_barrier_init();
  }
  griddep_wait();
  if (p.dq_sums != nullptr) griddep_launch_dependents();  // the kernel of the sums
  if constexpr (Traits::kSumsDbias) {
    cluster_sync();
  } else {
    __syncthreads();
  }

  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // uniform, and the compiler can tell
  if (warpgroup == 0) {
    setmaxnreg_dec<Traits::kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp == 0) {
      if (threadIdx.x == 0) load_operands<Traits>(p, shared);
    } else if (Traits::kHasBiasTiles && warp == 1) {
      load_bias<Traits>(p, shared);
    } else if (Traits::kStoresDbias && warp == 2) {
      store_dbias<Traits>(p, shared);
    } else if (Traits::kSumsDbias && warp == 2) {
      send_ds<Traits>(p, shared);
    } else if (warp == 3 && has_adding_warp) {
      if constexpr (Traits::kTurnsDq) {
        add_turned_dq<Traits>(p, shared);
      } else {
        order_sums<Traits>(p, shared);
      }
    }
  } else if (warpgroup <= Traits::kConsumers) {
    setmaxnreg_inc<Traits::kConsumerRegisters>();
    consume_backward<Traits>(p, shared, warpgroup - 1);
  } else if constexpr (Traits::kSumsDbias) {
    setmaxnreg_dec<Traits::kSumRegisters>();
    sum_dbias<Traits>(p, shared);
  }
  // No block may exit while another may still write to its shared memory.
  if constexpr (Traits::kSumsDbias) cluster_sync();
}

template <class Traits>
cudaError_t launch_backward_kernel(const BackwardParams& params, int blocks, cudaStream_t stream) {
  return launch_persistent<Traits, BackwardStorage<Traits>>(backward_kernel<Traits>, params, blocks, stream,
                                                            params.cluster);
}

}  // namespace flash_dmattn
