// The backward kernel, persistent: a producer warpgroup and two consumers share blocks of keys until there is none.
//
//     p = exp2(scale log2(e) q k^T + bias log2(e) - lse),  dp = dout v^T,  ds = p (dp - delta)
//     dv = p^T dout,  dk = scale ds^T q,  dq = scale ds k,  dbias = ds
//
// With a softcap, t = tanh(scale q k^T / softcap):
//
//     p = exp2(softcap log2(e) t + bias log2(e) - lse),  dk = scale (ds (1 - t^2))^T q,  dq = scale ds (1 - t^2) k
//
// With a bias that batch entries share, blocks of a cluster have one of them each and sum dbias (cluster.h).
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
  constexpr int kArrivals = 4 * Traits::kConsumers * kArrivalsOfWarp;  // of all warps that consume
  constexpr int kSummingWarps = 4;
  const int senders = Traits::kSumsDbias ? p.cluster : 0;  // blocks that tell of a stage of ds that it has arrived
  const bool takes_turns = p.dq_turns != nullptr;
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
      // Where dbias replaces the bias, it is dbias that is read last there, by the warp that stores it.
      for (int part = 0; part < Traits::kParts; ++part) {
        barrier_init(&shared.ds_full[stage * Traits::kParts + part], kArrivals / Traits::kParts);
      }
      barrier_init(&shared.ds_empty[stage],
                   kArrivals + kArrivalsOfWarp * ((Traits::kStoresDbias && !Traits::kReplacesBias) + senders));
      if (stage < Traits::kBiasStages) {
        barrier_init(&shared.bias_full[stage], 1);
        barrier_init(&shared.bias_empty[stage], Traits::kReplacesBias ? kArrivalsOfWarp : kArrivals);
      }
    }
    for (int stage = 0; stage < 2; ++stage) {
      barrier_init(&shared.work_full[stage], 1);
      barrier_init(&shared.work_empty[stage],
                   kArrivals + kArrivalsOfWarp * (Traits::kHasBiasTiles + Traits::kStoresDbias + takes_turns +
                                                  (Traits::kSumsDbias ? 1 + kSummingWarps : 0)));
    }
    if constexpr (Traits::kSumsDbias) {
      for (int stage = 0; stage < Traits::kPartStages; ++stage) {
        barrier_init(&shared.parts_full[stage], kArrivalsOfWarp);
        barrier_init(&shared.parts_empty[stage], kArrivalsOfWarp * kSummingWarps * p.cluster);
      }
      barrier_init(&shared.next_full, 1);
      barrier_init(&shared.next_empty, p.cluster);
    }
    barrier_init_fence();
  }
  wait_for_kernel_before();
  if (p.dq_sums != nullptr) let_next_kernel_start();  // the kernel of the sums
  if constexpr (Traits::kSumsDbias) {
    cluster_sync();
  } else {
    __syncthreads();
  }

  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // the same for all, and known to be
  if (warpgroup == 0) {
    registers_release<Traits::kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp == 0) {
      if (threadIdx.x == 0) copy_operands<Traits>(p, shared);
    } else if (Traits::kHasBiasTiles && warp == 1) {
      copy_bias<Traits>(p, shared);
    } else if (Traits::kStoresDbias && warp == 2) {
      store_dbias<Traits>(p, shared);
    } else if (Traits::kSumsDbias && warp == 2) {
      send_ds<Traits>(p, shared);
    } else if (warp == 3 && takes_turns) {
      order_sums<Traits>(p, shared);
    }
  } else if (warpgroup <= Traits::kConsumers) {
    registers_acquire<Traits::kConsumerRegisters>();
    consume_backward<Traits>(p, shared, warpgroup - 1);
  } else if constexpr (Traits::kSumsDbias) {
    registers_release<Traits::kSumRegisters>();
    sum_dbias<Traits>(p, shared);
  }
  // Nobody leaves while another may still write to its shared memory.
  if constexpr (Traits::kSumsDbias) cluster_sync();
}

template <class Traits>
cudaError_t launch_backward_kernel(const BackwardParams& params, int blocks, cudaStream_t stream) {
  return launch_persistent<Traits, BackwardStorage<Traits>>(backward_kernel<Traits>, params, blocks, stream,
                                                            params.cluster);
}

}  // namespace flash_dmattn
