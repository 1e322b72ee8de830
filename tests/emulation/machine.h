// The emulated GPU: blocks of threads, shared memory, barriers, TMA and wgmma. Every CUDA thread is a fiber of one CPU
// thread.
//
// By a seed, asynchronous copies and products take effect at once or as late as the program allows. So a buffer that is
// written too early or read too soon changes the result. The seed also orders the warps. Not modelled: fences between
// kinds of access, the order of writes to device memory, registers, time.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace emulation {

// Reports something that on a GPU is an error or undefined.
[[noreturn]] void fail(const std::string& what);

constexpr int kLanes = 32, kWarpgroupThreads = 128;

// Bits of memory that nobody has written: a NaN, or -1.
constexpr uint32_t kUnwritten = 0xffffffffu;

// How many blocks a persistent kernel is told that fit, and what decides the order of everything.
struct Settings {
  int num_sms = 3;
  uint64_t seed = 0;
  int driver = 13000;  // as CUDA counts: of 13.0
  bool leaves_out = false;  // launches nothing, so that the host's time can be measured
};
extern Settings settings;
extern int launches;  // kernels and memsets so far

// Returns a new tensor as memory that nobody has written.
template <class Tensor>
Tensor unwritten(Tensor x) {
  if (settings.leaves_out) return x;
  std::memset(x.mutable_data_ptr(), 0xff, static_cast<size_t>(x.numel()) * x.element_size());
  return x;
}

// Adds to a sum in device memory.
inline void add(float* to, float value) {
  uint32_t bits;
  std::memcpy(&bits, to, sizeof(bits));
  if (bits == kUnwritten) fail("a kernel adds to memory that nobody has cleared");
  *to += value;
}

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};

struct Block;

// Blocks that run at the same time and reach each other's shared memory.
struct Cluster {
  std::vector<Block*> blocks;
  int threads = 0, arrived = 0;  // that have not ended; of them at the barrier
  int64_t phase = 0;
};

// A matrix instruction of a warpgroup, as its threads give it.
struct Product {
  int columns;   // N
  bool is_half;  // else bfloat16
  bool a_in_registers, a_mn_major, b_mn_major, accumulate;
  uint64_t a, b;  // descriptors
  std::array<float*, kWarpgroupThreads> d;
  std::array<const uint32_t*, kWarpgroupThreads> a_registers;
  int threads = 0;  // that have given it
};

struct Warpgroup {
  std::deque<Product> products;  // issued and not yet computed; number `computed` is the first
  int64_t computed = 0;
};

struct Warp {
  // Values of the exchange under way, and of the one before, which some lanes may still read.
  std::array<std::array<uint64_t, kLanes>, 2> values{};
  std::array<const char*, 2> names{};
  int arrived = 0;
  int64_t exchanged = 0;
};

struct Thread {
  Block* block = nullptr;
  unsigned index = 0;
  void* stack_pointer = nullptr;
  bool done = false;
  bool waited_griddep = false;
  // The event that it waits for, if any.
  bool (*ready)(void*) = nullptr;
  void* condition = nullptr;
  const char* waits_for = "nothing";
  bool spins = false;  // it came back to ask again
  int64_t exchanges = 0, products = 0;
  std::vector<int64_t> groups;  // of products: how many had been issued at each commit
  // Accumulators of its products: those in flight, with the number of the last product that adds to each; and those it
  // has waited for, which the compiler may use too early until wgmma_fence_operand.
  std::deque<std::pair<int64_t, const float*>> in_flight;
  std::vector<const float*> unfenced;
  std::vector<std::function<void()>> stores;  // by TMA, not yet read from shared memory

  Warp& warp() const;
  Warpgroup& warpgroup() const;
  int lane() const { return static_cast<int>(index % kLanes); }
};

struct NamedBarrier {
  int arrived = 0, threads = 0;
  int64_t phase = 0;
};

// Lies in shared memory, in the 8 bytes of an mbarrier.
struct Barrier {
  uint32_t expected : 15, pending : 16, phase : 1;
  int32_t bytes;  // that are yet to come

  void arrive();
  void add_bytes(int count);

 private:
  void finish_phase();
};
static_assert(sizeof(Barrier) == 8);

struct Block {
  int any_vote = 0;  // of __syncthreads_or
  unsigned index = 0;
  int rank = 0;  // in its cluster
  Cluster* cluster = nullptr;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<Warpgroup> warpgroups;
  std::array<NamedBarrier, 16> barriers{};
  uint8_t* shared = nullptr;
  size_t shared_bytes = 0;

  // The bytes from a shared-memory address on; at least `count` have to exist.
  uint8_t* at(uint32_t address, size_t count);
  bool has_ended() const;
  Barrier& barrier(uint32_t address) { return *reinterpret_cast<Barrier*>(at(address, sizeof(Barrier))); }
};

// The fiber that runs, and the grid it belongs to.
extern Thread* current;
extern Dim grid_dim;

// --- for the code of threads --------------------------------------------------------------------------------------

void leave();  // to the other threads, until `current->ready` says so

// Until the condition holds.
template <class F>
void wait_until(const char* what, F condition) {
  if (condition()) return;
  current->waits_for = what;
  current->ready = [](void* f) { return (*static_cast<F*>(f))(); };
  current->condition = &condition;
  leave();
  current->ready = nullptr;
}

// Lets the others run; for a thread that asks device memory again and again.
void spin();

// Whether an operation that may take effect later does so at once.
bool acts_at_once();
// A copy to be made while others run, in any order.
void copy_later(std::function<void()> copy);

// Gives `value` to the warp; returns the values of all lanes, once all have given theirs. `name` says what all lanes
// have to be at.
const std::array<uint64_t, kLanes>& exchange(const char* name, uint64_t value);

template <class T>
uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}
template <class T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

void named_barrier_arrive(int id, int threads);
void named_barrier_sync(int id, int threads);
void cluster_sync();

void issue_product(int columns, bool is_half, bool a_mn_major, bool b_mn_major, float* d, const uint32_t* a_registers,
                   uint64_t a, uint64_t b, bool accumulate);
void commit_products();
void wait_for_products(int groups);
void fence_operand(const float* d);

inline uint8_t* shared_memory() { return current->block->shared; }
uint32_t shared_address(const void* pointer);

// --- for the host -------------------------------------------------------------------------------------------------

struct Launch;
void run_grid(const Launch& launch, const std::function<void()>& kernel);

struct Launch {
  unsigned blocks, threads;
  size_t shared_bytes;
  unsigned cluster = 1;
  bool starts_early = false;  // programmatic dependent launch

  Launch(unsigned blocks, unsigned threads, size_t shared_bytes)
      : blocks(blocks), threads(threads), shared_bytes(shared_bytes) {}

  template <class... Parameters, class... Arguments>
  void run(void (*kernel)(Parameters...), const Arguments&... arguments) const {
    run_grid(*this, [&] { kernel(arguments...); });
  }
};

// A tensor map as the driver keeps it: the dims innermost first, strides in bytes from the second on.
struct TensorMap {
  uint8_t* data;
  uint64_t sizes[5], strides[4];
  uint32_t box[5];
  uint32_t rank, value_bytes;
  uint64_t is_one;

  // The places of the dims after the first, each a row of 128 bytes.
  uint32_t rows_of_box() const { return box[1] * box[2]; }

  static constexpr uint64_t kIsOne = 0x70616d20726f736e;
};
static_assert(sizeof(TensorMap) <= 128);

// The box at these coordinates, between device memory and shared memory, where its rows of 128 bytes are swizzled.
void load_box(const TensorMap& map, const std::array<int, 5>& at, Block& block, uint32_t to);
void store_box(const TensorMap& map, const std::array<int, 5>& at, Block& block, uint32_t from);

}  // namespace emulation
