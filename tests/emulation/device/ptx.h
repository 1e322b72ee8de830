// csrc/device/ptx.h for the emulated GPU: the same functions, emulating what their instructions do.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

#include <cuda.h>
#include <cuda_fp16.h>

#include "../cuda_functions.h"

namespace flash_dmattn {

inline uint32_t shared_address(const void* pointer) { return emulation::shared_address(pointer); }

// --- mbarrier ---------------------------------------------------------------------------------------------------

inline emulation::Barrier& barrier_of(uint64_t* barrier) {
  return emulation::current->block->barrier(shared_address(barrier));
}

inline void barrier_init(uint64_t* barrier, int arrivals) {
  emulation::Barrier& it = barrier_of(barrier);
  it.expected = it.pending = static_cast<uint32_t>(arrivals);
  it.phase = 0;
  it.bytes = 0;
}
inline void fence_barrier_init() {}

inline void barrier_arrive(uint64_t* barrier) { barrier_of(barrier).arrive(); }

constexpr int kArrivalsOfWarp = 1;
inline void barrier_arrive_of_warp(uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

inline void barrier_expect_tx(uint64_t* barrier, int bytes) { barrier_of(barrier).bytes += bytes; }

inline void barrier_arrive_expect_tx(uint64_t* barrier, int bytes) {
  barrier_of(barrier).bytes += bytes;
  barrier_of(barrier).arrive();
}

inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
  const emulation::Barrier& it = barrier_of(barrier);
  emulation::wait_until("an mbarrier", [&it, parity] { return it.phase != parity; });
}

// --- named barriers ---------------------------------------------------------------------------------------------

inline void named_barrier_sync(int id, int threads) { emulation::named_barrier_sync(id, threads); }
inline void named_barrier_arrive(int id, int threads) { emulation::named_barrier_arrive(id, threads); }

// --- programmatic dependent launch --------------------------------------------------------------------------------

inline void griddep_wait() { emulation::current->waited_griddep = true; }
inline void griddep_launch_dependents() {}

// --- TMA --------------------------------------------------------------------------------------------------------

inline void prefetch_tensor_map(const CUtensorMap*) {}

// Now, or while others run; then it tells the barrier.
template <class F>
void copy_with(uint64_t* barrier, int bytes, F copy) {
  emulation::Block* const block = emulation::current->block;
  const uint32_t place = shared_address(barrier);
  const auto operation = [=] {
    copy(*block);
    block->barrier(place).add_bytes(-bytes);
  };
  if (emulation::acts_at_once()) {
    operation();
  } else {
    emulation::copy_later(operation);
  }
}

inline void tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, uint32_t rank, std::array<int, 5> at) {
  const auto of = *reinterpret_cast<const emulation::TensorMap*>(map);
  if (of.rank != rank) emulation::fail("a tensor map is of another rank than its instruction");
  const uint32_t address = shared_address(to);
  copy_with(barrier, static_cast<int>(of.box[0] * of.rows_of_box() * of.value_bytes),
            [=](emulation::Block& block) { emulation::load_box(of, at, block, address); });
}

inline void tma_load_4d(void* to, const CUtensorMap* map, uint64_t* barrier, int c0, int c1, int c2, int c3) {
  tma_load(to, map, barrier, 4, {c0, c1, c2, c3, 0});
}

inline void tma_load_5d(void* to, const CUtensorMap* map, uint64_t* barrier, int c0, int c1, int c2, int c3, int c4) {
  tma_load(to, map, barrier, 5, {c0, c1, c2, c3, c4});
}

inline void tma_load_4d_evict_first(void* to, const CUtensorMap* map, uint64_t* barrier, int c0, int c1, int c2,
                                    int c3) {
  tma_load_4d(to, map, barrier, c0, c1, c2, c3);
}

inline void bulk_load(void* to, const void* from, int bytes, uint64_t* barrier) {
  const uint32_t address = shared_address(to);
  if (address % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0 || bytes % 16 != 0) {
    emulation::fail("bulk_load is not on 16 bytes");
  }
  copy_with(barrier, bytes, [=](emulation::Block& block) {
    std::memcpy(block.at(address, static_cast<size_t>(bytes)), from, static_cast<size_t>(bytes));
  });
}

inline void tma_store(const CUtensorMap* map, const void* from, uint32_t rank, std::array<int, 5> at) {
  const auto of = *reinterpret_cast<const emulation::TensorMap*>(map);
  if (of.rank != rank) emulation::fail("a tensor map is of another rank than its instruction");
  const uint32_t address = shared_address(from);
  emulation::Block* const block = emulation::current->block;
  const auto operation = [=] { emulation::store_box(of, at, *block, address); };
  if (emulation::acts_at_once()) {
    operation();
  } else {
    emulation::current->stores.push_back(operation);
  }
}

inline void tma_store_4d(const CUtensorMap* map, const void* from, int c0, int c1, int c2, int c3) {
  tma_store(map, from, 4, {c0, c1, c2, c3, 0});
}

inline void tma_store_5d(const CUtensorMap* map, const void* from, int c0, int c1, int c2, int c3, int c4) {
  tma_store(map, from, 5, {c0, c1, c2, c3, c4});
}

inline void bulk_add_floats(float* to, const void* from, int bytes) {
  const uint32_t address = shared_address(from);
  const auto count = static_cast<size_t>(bytes);
  if (address % 16 != 0 || reinterpret_cast<uintptr_t>(to) % 16 != 0 || bytes % 16 != 0) {
    emulation::fail("bulk_add_floats is not on 16 bytes");
  }
  emulation::Block* const block = emulation::current->block;
  const auto operation = [=] {
    const auto* values = reinterpret_cast<const float*>(block->at(address, count));
    for (size_t i = 0; i < count / sizeof(float); ++i) emulation::add(to + i, values[i]);
  };
  if (emulation::acts_at_once()) {
    operation();
  } else {
    emulation::current->stores.push_back(operation);
  }
}

inline void tma_store_commit_and_wait_read() {
  for (const auto& store : emulation::current->stores) store();
  emulation::current->stores.clear();
}

inline void tma_wait_written() {}

// --- clusters ---------------------------------------------------------------------------------------------------

// An address in the cluster: the block's rank and one, above the address in its own shared memory.
constexpr int kRankShift = 24;

inline uint32_t pack_saturated(float low, float high) {
  constexpr float kMost = 65504.0f;
  const auto kept = [](float x) { return x > kMost ? kMost : x < -kMost ? -kMost : x; };
  const __half2 pair = __floats2half2_rn(kept(low), kept(high));
  return reinterpret_cast<const uint32_t&>(pair);
}

inline int cluster_rank() { return emulation::current->block->rank; }
inline uint32_t map_shared_rank(uint32_t address, int rank) {
  return static_cast<uint32_t>(rank + 1) << kRankShift | address;
}
inline emulation::Block& block_of(uint32_t address) {
  const size_t rank = (address >> kRankShift) - 1;
  const auto& blocks = emulation::current->block->cluster->blocks;
  if (rank >= blocks.size()) emulation::fail("an address is not one in the cluster");
  return *blocks[rank];
}
constexpr uint32_t place_of(uint32_t address) { return address & ((1u << kRankShift) - 1); }

inline void cluster_sync() { emulation::cluster_sync(); }

inline void barrier_arrive_in_cluster(uint32_t barrier) { block_of(barrier).barrier(place_of(barrier)).arrive(); }
inline void barrier_arrive_of_warp_in_blocks(uint64_t* barrier, int blocks) {
  __syncwarp();
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (lane < blocks) barrier_arrive_in_cluster(map_shared_rank(shared_address(barrier), lane));
}

// Writes to a block of the cluster, now or while others run, what `read` says then of the block that sends it.
template <class F>
void write_in_cluster(uint32_t to, size_t bytes, uint32_t barrier, F read) {
  emulation::Block &from = *emulation::current->block, &there = block_of(to);
  if (&block_of(barrier) != &there) emulation::fail("the barrier of a copy is not in the block that it goes to");
  const uint32_t place = place_of(to), place_of_barrier = place_of(barrier);
  const auto operation = [=, &from, &there] {
    if (there.has_ended()) emulation::fail("a copy goes to a block that has ended");
    std::memcpy(there.at(place, bytes), read(from), bytes);
    there.barrier(place_of_barrier).add_bytes(-static_cast<int>(bytes));
  };
  if (emulation::acts_at_once()) {
    operation();
  } else {
    emulation::copy_later(operation);
  }
}

inline void dsmem_bulk_copy(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  const uint32_t address = shared_address(from);
  const size_t count = static_cast<size_t>(bytes);
  if (&block_of(to) == emulation::current->block) emulation::fail("dsmem_bulk_copy is to the block itself");
  if (to % 16 != 0 || address % 16 != 0 || bytes % 16 != 0) emulation::fail("dsmem_bulk_copy is not on 16 bytes");
  write_in_cluster(to, count, barrier, [=](emulation::Block& block) { return block.at(address, count); });
}

inline void dsmem_store_async(uint32_t to, int value, uint32_t barrier) {
  if (to % 4 != 0) emulation::fail("dsmem_store_async is not on 4 bytes");
  write_in_cluster(to, sizeof(value), barrier, [value](emulation::Block&) { return &value; });
}

// --- fences -----------------------------------------------------------------------------------------------------

inline void fence_proxy_async_shared() {}

// --- matrix instructions ----------------------------------------------------------------------------------------

inline void wgmma_fence() {}
inline void wgmma_commit() { emulation::commit_products(); }
template <int kGroups>
void wgmma_wait() {
  emulation::wait_for_products(kGroups);
}
template <int kCount>
void wgmma_fence_operand(float (&x)[kCount]) {
  emulation::fence_operand(x);
}

// --- device memory ----------------------------------------------------------------------------------------------

inline int ld_acquire(const int* from) {
  emulation::spin();
  return *from;
}
inline void red_release(int* to, int value) { *to += value; }
inline int atom_add_acq_rel(int* to, int value) {
  const int before = *to;
  *to = before + value;
  return before;
}
inline void red_add_v4(float* to, float a, float b, float c, float d) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0) emulation::fail("red_add_v4 is not on 16 bytes");
  const float values[] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) emulation::add(to + i, values[i]);
}

// --- registers --------------------------------------------------------------------------------------------------

template <int kRegisters>
void setmaxnreg_dec() {}
template <int kRegisters>
void setmaxnreg_inc() {}

inline uint16_t load_16_bits(uint32_t address) {
  uint16_t bits;
  std::memcpy(&bits, emulation::current->block->at(address, 2), 2);
  return bits;
}

// Calls f with each of four matrices' number and the addresses of the lane's two elements there.
template <class F>
void for_each_matrix(const char* name, uint32_t address, bool is_transposed, F f) {
  if (address % 16 != 0) emulation::fail("a row of a matrix is not on 16 bytes");
  const auto rows = emulation::exchange(name, address);
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t i = 0; i < 4; ++i) {
    uint32_t places[2];
    for (uint32_t e = 0; e < 2; ++e) {
      const uint32_t row = is_transposed ? lane % 4 * 2 + e : lane / 4,
                     column = is_transposed ? lane / 4 : lane % 4 * 2 + e;
      places[e] = static_cast<uint32_t>(rows[8 * i + row]) + column * 2;
    }
    f(i, places);
  }
}

inline void ldmatrix_x4(uint32_t (&out)[4], uint32_t address) {
  for_each_matrix("ldmatrix_x4", address, false, [&](uint32_t i, const uint32_t (&places)[2]) {
    out[i] = load_16_bits(places[0]) | static_cast<uint32_t>(load_16_bits(places[1])) << 16;
  });
}
inline void ldmatrix_x4_trans(uint32_t (&out)[4], uint32_t address) {
  for_each_matrix("ldmatrix_x4_trans", address, true, [&](uint32_t i, const uint32_t (&places)[2]) {
    out[i] = load_16_bits(places[0]) | static_cast<uint32_t>(load_16_bits(places[1])) << 16;
  });
}
inline void stmatrix_x4_trans(const uint32_t (&in)[4], uint32_t address) {
  for_each_matrix("stmatrix_x4_trans", address, true, [&](uint32_t i, const uint32_t (&places)[2]) {
    for (int e = 0; e < 2; ++e) {
      const uint16_t bits = static_cast<uint16_t>(in[i] >> 16 * e);
      std::memcpy(emulation::current->block->at(places[e], 2), &bits, 2);
    }
  });
}

inline float ld_shared(uint32_t address) {
  if (address % 4 != 0) emulation::fail("ld_shared is not on 4 bytes");
  float value;
  std::memcpy(&value, emulation::current->block->at(address, 4), 4);
  return value;
}

inline void st_shared(uint32_t address, float value) {
  if (address % 4 != 0) emulation::fail("st_shared is not on 4 bytes");
  std::memcpy(emulation::current->block->at(address, 4), &value, 4);
}

inline void ld_shared_v2(uint32_t& first, uint32_t& second, uint32_t address) {
  if (address % 8 != 0) emulation::fail("ld_shared_v2 is not on 8 bytes");
  std::memcpy(&first, emulation::current->block->at(address, 8), 4);
  std::memcpy(&second, emulation::current->block->at(address + 4, 4), 4);
}

inline void ld_shared_v4(uint32_t (&out)[4], uint32_t address) {
  if (address % 16 != 0) emulation::fail("ld_shared_v4 is not on 16 bytes");
  std::memcpy(out, emulation::current->block->at(address, 16), 16);
}

inline void st_global_v4(void* to, const uint32_t (&words)[4]) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0) emulation::fail("st_global_v4 is not on 16 bytes");
  std::memcpy(to, words, 16);
}

// A value too small for a normal number becomes 0.
inline float flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }
inline float max_or_nan(float x, float y) { return x != x || y != y ? NAN : x > y ? x : y; }
inline float exp2_approx(float x) { return flushed(std::exp2(flushed(x))); }
inline float reciprocal_approx(float x) { return flushed(1.0f / flushed(x)); }
inline float log_approx(float x) { return 0.693147180559945f * std::log2(flushed(x)); }

}  // namespace flash_dmattn
