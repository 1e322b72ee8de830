// Hopper's instructions, one per function: barriers in shared memory, bulk tensor copies, clusters, fences, register
// moves.
//
// Source of every form: the PTX ISA, sections on mbarrier, cp.async.bulk, st.async, mapa, barrier.cluster, ldmatrix, bar
// and setmaxnreg.
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

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// The arrival of a warp, of one lane: __syncwarp orders before it what the others have read and written. racecheck of
// compute-sanitizer knows that of the lane alone; a build with FLASH_DMATTN_RACECHECK=1, for it, has all lanes arrive.
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

// Has the phase wait for this many bytes of copies.
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Arrives, and has the phase wait for this many bytes of copies.
__device__ __forceinline__ void barrier_arrive_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Returns once the phase of this parity is over.
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

// --- bulk tensor copies -----------------------------------------------------------------------------------------

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies the box at (c0, c1, c2, c3), innermost first, to shared memory; what lies outside the tensor becomes 0.
__device__ __forceinline__ void copy_tensor(void* to, const CUtensorMap* map, uint64_t* barrier, int c0, int c1, int c2,
                                            int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// The same of what is read once: L2 gives it up before anything else.
__device__ __forceinline__ void copy_tensor_once(void* to, const CUtensorMap* map, uint64_t* barrier, int c0, int c1,
                                                 int c2, int c3) {
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

// Copies `bytes`, a multiple of 16, from device memory.
__device__ __forceinline__ void copy_bytes(void* to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// Copies a box from shared memory to (c0, c1, c2, c3); what lies outside the tensor is not written.
__device__ __forceinline__ void store_tensor(const CUtensorMap* map, const void* from, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(shared_address(from)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

// Until shared memory has been read by all stores of this thread.
__device__ __forceinline__ void wait_for_stores_to_read() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// --- clusters ---------------------------------------------------------------------------------------------------

// The block's number in its cluster.
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// What has this address in a block's own shared memory, in that of another block: an address in the cluster.
__device__ __forceinline__ uint32_t address_in_block(uint32_t address, int rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// Until all threads of the cluster that have not left are here.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Arrives at a barrier of the cluster: what this thread has read may be written over.
__device__ __forceinline__ void barrier_arrive_in_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The arrival of a warp (barrier_arrive_of_warp) at the barrier of this address in each of so many blocks.
__device__ __forceinline__ void barrier_arrive_of_warp_in_blocks(uint64_t* barrier, int blocks) {
#ifdef FLASH_DMATTN_RACECHECK
  for (int rank = 0; rank < blocks; ++rank) barrier_arrive_in_cluster(address_in_block(shared_address(barrier), rank));
#else
  __syncwarp();
  const int lane = threadIdx.x % 32;
  if (lane < blocks) barrier_arrive_in_cluster(address_in_block(shared_address(barrier), lane));
#endif
}

// Copies `bytes`, a multiple of 16, from the block's shared memory to that of another, at an address in the cluster; the
// barrier, too, is one there.
__device__ __forceinline__ void copy_in_cluster(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(shared_address(from)), "r"(bytes), "r"(barrier)
               : "memory");
}

// The same of one value in a register.
__device__ __forceinline__ void store_in_cluster(uint32_t to, int value, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(value),
               "r"(barrier)
               : "memory");
}

// --- kernels of a stream ------------------------------------------------------------------------------------------

// Until the kernel before is done and what it wrote can be read.
__device__ __forceinline__ void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Has the kernel behind start once all blocks are here or done; else it starts when they are done. For kernels whose
// next is known to read nothing that they write by __ldg, which is for what does not change while a kernel runs. Only
// after wait_for_kernel_before, so that never more than two kernels run.
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// --- fences -----------------------------------------------------------------------------------------------------

// What this thread has written to shared memory becomes visible to matrix instructions and the copy engine.
__device__ __forceinline__ void shared_memory_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- matrix instructions: their order; the instructions themselves are in wgmma_instructions.h ----------------------

// Before the first product whose registers other instructions have written.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most kGroups of the committed groups are unfinished.
template <int kGroups>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

// Keeps the compiler from moving what reads or writes these registers across this point.
template <int kCount>
__device__ __forceinline__ void pin(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// --- device memory ----------------------------------------------------------------------------------------------

// Reads what another block has written before it has added to this with `add_released`.
__device__ __forceinline__ int load_acquired(const int* from) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// Adds, after what this thread and those it has met at a barrier have written.
__device__ __forceinline__ void add_released(int* to, int value) {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// Adds, after what this thread and those it has met at a barrier have written, and before what they read; returns what
// was there.
__device__ __forceinline__ int add_and_return(int* to, int value) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(value) : "memory");
  return before;
}

// Adds four values, each at once but in any order among threads.
__device__ __forceinline__ void add_four(float* to, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}

// --- registers --------------------------------------------------------------------------------------------------

template <int kRegisters>
__device__ __forceinline__ void registers_release() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void registers_acquire() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Four 8 x 8 matrices of 16-bit values; lane n gives the address of row n % 8 of matrix n / 8 and receives elements
// 2 (n % 4) and 2 (n % 4) + 1 of row n / 4 of each.
__device__ __forceinline__ void load_matrices(uint32_t (&out)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}

// The same with every matrix turned: the lane receives elements n / 4 of rows 2 (n % 4) and 2 (n % 4) + 1.
__device__ __forceinline__ void load_matrices_turned(uint32_t (&out)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}

// And its reverse.
__device__ __forceinline__ void store_matrices_turned(const uint32_t (&in)[4], uint32_t address) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(in[0]),
               "r"(in[1]), "r"(in[2]), "r"(in[3])
               : "memory");
}

__device__ __forceinline__ void load_pair(uint32_t& first, uint32_t& second, uint32_t address) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(first), "=r"(second) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_four(uint32_t (&out)[4], uint32_t address) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
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

}  // namespace flash_dmattn
