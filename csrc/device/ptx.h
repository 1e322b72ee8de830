// Hopper's PTX instructions, one per function: mbarriers, TMA, clusters, fences, register moves.
//
// Source of every form: the PTX ISA, sections on mbarrier, cp.async.bulk, st.async, mapa, cvt, barrier.cluster,
// ldmatrix, bar and setmaxnreg.
#pragma once

#include <cstdint>

#include <cuda.h>

namespace flash_dmattn {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// --- mbarrier ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to TMA.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// One arrival for a whole warp: __syncwarp orders the accesses of all lanes before it. compute-sanitizer's racecheck
// does not see that order, so a build for it (FLASH_DMATTN_RACECHECK=1) has all lanes arrive.
#ifdef FLASH_DMATTN_RACECHECK
constexpr int kArrivalsOfWarp = 32;
__device__ __forceinline__ void barrier_arrive_of_warp(uint64_t* barrier) { barrier_arrive(barrier); }
#else
constexpr int kArrivalsOfWarp = 1;
__device__ __forceinline__ void barrier_arrive_of_warp(uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}
#endif

// Makes the phase wait for this many more bytes of TMA loads.
__device__ __forceinline__ void barrier_expect_tx(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Arrives, and makes the phase wait for this many more bytes of TMA loads.
__device__ __forceinline__ void barrier_arrive_expect_tx(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Waits until the phase of this parity is complete.
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// --- named barriers ---------------------------------------------------------------------------------------------

__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// --- TMA --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads the box at (c0, c1, c2, c3), innermost first, into shared memory. Elements outside the tensor become 0.
__device__ __forceinline__ void tma_load_4d(void* to, const CUtensorMap* map, uint64_t* barrier, int c0, int c1, int c2,
                                            int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

__device__ __forceinline__ void tma_load_5d(void* to, const CUtensorMap* map, uint64_t* barrier, int c0, int c1, int c2,
                                            int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// The same for data that is read once: L2 evicts it first.
__device__ __forceinline__ void tma_load_4d_evict_first(void* to, const CUtensorMap* map, uint64_t* barrier, int c0,
                                                        int c1, int c2, int c3) {
  asm volatile(
      "{\n"
      ".reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], policy;\n"
      "}\n" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// Loads `bytes`, a multiple of 16, from device memory.
__device__ __forceinline__ void bulk_load(void* to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// Stores a box from shared memory to (c0, c1, c2, c3). Elements outside the tensor are not written.
__device__ __forceinline__ void tma_store_4d(const CUtensorMap* map, const void* from, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(shared_address(from)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

__device__ __forceinline__ void tma_store_5d(const CUtensorMap* map, const void* from, int c0, int c1, int c2, int c3,
                                             int c4) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
               "r"(shared_address(from)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}

// Adds `bytes` of floats, a multiple of 16, from shared to device memory.
__device__ __forceinline__ void bulk_add_floats(float* to, const void* from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}

// Commits this thread's TMA stores and additions, and waits until they have read shared memory.
__device__ __forceinline__ void tma_store_commit_and_wait_read() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// --- clusters ---------------------------------------------------------------------------------------------------

// The block's rank in its cluster.
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Two numbers in fp16, the greatest finite one where they are greater.
__device__ __forceinline__ uint32_t pack_saturated(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// The cluster address of the same shared-memory address in the block of this rank.
__device__ __forceinline__ uint32_t map_shared_rank(uint32_t address, int rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// Waits for all threads of the cluster that have not exited.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Arrives at a barrier given by its cluster address, to say that this thread has read what others may now overwrite. It
// publishes no write: it is not `.release.cluster`, which by nvcc 13.0 waits for all earlier writes to device memory
// (MEMBAR.ALL.GPU) before each arrival, dbias among them. CUTLASS' ClusterBarrier arrives in this form too.
__device__ __forceinline__ void barrier_arrive_in_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The arrival of a warp (barrier_arrive_of_warp) at the same barrier of each of the first `blocks` blocks of the
// cluster.
__device__ __forceinline__ void barrier_arrive_of_warp_in_blocks(uint64_t* barrier, int blocks) {
#ifdef FLASH_DMATTN_RACECHECK
  for (int rank = 0; rank < blocks; ++rank) barrier_arrive_in_cluster(map_shared_rank(shared_address(barrier), rank));
#else
  __syncwarp();
  const int lane = threadIdx.x % 32;
  if (lane < blocks) barrier_arrive_in_cluster(map_shared_rank(shared_address(barrier), lane));
#endif
}

// Copies `bytes`, a multiple of 16, from this block's shared memory to a cluster address (distributed shared memory).
// The barrier is a cluster address in the same block.
__device__ __forceinline__ void dsmem_bulk_copy(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(shared_address(from)), "r"(bytes), "r"(barrier)
               : "memory");
}

// The same for one value in a register.
__device__ __forceinline__ void dsmem_store_async(uint32_t to, int value, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(value),
               "r"(barrier)
               : "memory");
}

// --- programmatic dependent launch --------------------------------------------------------------------------------

// Waits until the kernels before are complete and their writes are visible. Nothing that they write may be read
// earlier. Nor by __ldg, where the kernel before has let this one start early: __ldg is for data that does not change
// while a kernel runs.
__device__ __forceinline__ void griddep_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel of the stream start its blocks once all blocks of this one have called it or exited. Call it
// only after griddep_wait, so that never more than two kernels run at once.
__device__ __forceinline__ void griddep_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// --- fences -----------------------------------------------------------------------------------------------------

// Makes this thread's writes to shared memory visible to wgmma and TMA (the async proxy).
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- order of wgmma; the instructions themselves are in wgmma_instructions.h ---------------------------------------

// Needed before the first wgmma that uses registers other instructions have written.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kGroups committed groups are unfinished.
template <int kGroups>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

// Stops the compiler from moving reads and writes of these registers across this point. Needed behind every wgmma_wait
// for the accumulators that it completes: the compiler does not know that the wait is what writes them.
template <int kCount>
__device__ __forceinline__ void wgmma_fence_operand(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// --- device memory ----------------------------------------------------------------------------------------------

// Reads a counter; what other blocks wrote before their red_release is then visible.
__device__ __forceinline__ int ld_acquire(const int* from) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// Adds to a counter, after all writes of this thread and of those it has met at a barrier.
__device__ __forceinline__ void red_release(int* to, int value) {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// Adds to a counter with acquire and release: after the writes and before the reads of this thread and of those it
// meets at barriers. Returns the value before.
__device__ __forceinline__ int atom_add_acq_rel(int* to, int value) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(value) : "memory");
  return before;
}

// Adds four values. Each addition is atomic; their order among threads is free.
__device__ __forceinline__ void red_add_v4(float* to, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}

// --- registers --------------------------------------------------------------------------------------------------

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Loads four 8 x 8 matrices of 16-bit values. Lane n gives the address of row n % 8 of matrix n / 8 and receives
// elements 2 (n % 4) and 2 (n % 4) + 1 of row n / 4 of each matrix.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&out)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}

// The same with every matrix transposed: the lane receives elements n / 4 of rows 2 (n % 4) and 2 (n % 4) + 1.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&out)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}

// The inverse of ldmatrix_x4_trans.
__device__ __forceinline__ void stmatrix_x4_trans(const uint32_t (&in)[4], uint32_t address) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(in[0]),
               "r"(in[1]), "r"(in[2]), "r"(in[3])
               : "memory");
}

__device__ __forceinline__ float ld_shared(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ void st_shared(uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ __forceinline__ void ld_shared_v2(uint32_t& first, uint32_t& second, uint32_t address) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(first), "=r"(second) : "r"(address) : "memory");
}

__device__ __forceinline__ void ld_shared_v4(uint32_t (&out)[4], uint32_t address) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}

// One store of 16 bytes. As four words of a struct the compiler may store them one by one.
__device__ __forceinline__ void st_global_v4(void* to, const uint32_t (&words)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// NaN if one of both is.
__device__ __forceinline__ float max_or_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The natural logarithm of a positive number: off by up to 2.5e-7 where it is between -0.7 and 0.7, else by 2^-22 of
// itself.
__device__ __forceinline__ float log_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return 0.693147180559945f * y;
}

}  // namespace flash_dmattn
