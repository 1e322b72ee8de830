#include "machine.h"

#include <algorithm>
#include <map>
#include <sstream>

#include <sys/mman.h>

#ifndef __x86_64__
#error "fibers are switched by code for x86-64"
#endif

// Saves the registers that a function must keep, and the stack pointer in *from; then loads them from `to`.
extern "C" void emulation_switch(void** from, void* to);
asm(R"(
.text
.type emulation_switch, @function
emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulation_switch, . - emulation_switch
)");

namespace emulation {

Thread* current = nullptr;
Dim grid_dim;
Settings settings;
int launches = 0;

namespace {

constexpr size_t kStackBytes = 256 << 10, kPageBytes = 4096;
constexpr int kSpinsAllowed = 10000;  // rounds in which threads only ask device memory again

void* scheduler_stack = nullptr;
const std::function<void()>* running_kernel = nullptr;
std::exception_ptr error;
std::mt19937_64 random_numbers;
unsigned late_of_8 = 0;    // of 8 operations that may be late, so many are
unsigned copies_of_8 = 0;  // of 8 operations that are done at last, so many are copies while products are late too
std::vector<std::function<void()>> later_copies, later_products;

// Stacks are kept for the next grid. Below each lies a page that cannot be touched.
struct Stacks {
  std::vector<uint8_t*> free;

  uint8_t* take() {
    if (!free.empty()) {
      uint8_t* stack = free.back();
      free.pop_back();
      return stack;
    }
    void* memory = mmap(nullptr, kPageBytes + kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, kPageBytes, PROT_NONE) != 0) fail("there is no memory for a stack");
    return static_cast<uint8_t*>(memory) + kPageBytes;
  }
} stacks;

void run_thread() {
  try {
    (*running_kernel)();
  } catch (...) {
    if (!error) error = std::current_exception();
  }
  current->done = true;
  --current->block->cluster->threads;
  leave();
}

void start(Thread& thread, uint8_t* stack) {
  void** top = reinterpret_cast<void**>(stack + kStackBytes - 64);  // a multiple of 16, as a call leaves it
  *top = reinterpret_cast<void*>(&run_thread);
  thread.stack_pointer = top - 6;
  std::fill(top - 6, top, nullptr);
}

void resume(Thread& thread) {
  current = &thread;
  emulation_switch(&scheduler_stack, thread.stack_pointer);
  current = nullptr;
  if (error) std::rethrow_exception(error);
}

std::string whereabouts(const std::vector<Block*>& blocks) {
  std::map<std::string, int> counts;
  for (const Block* block : blocks) {
    for (const Thread& thread : block->threads) {
      if (thread.done) continue;
      std::ostringstream line;
      line << "block " << block->index << " warp " << thread.index / kLanes << " waits for " << thread.waits_for;
      ++counts[line.str()];
    }
  }
  std::ostringstream text;
  for (const auto& [line, count] : counts) text << "\n  " << line << " (" << count << " lanes)";
  return text.str();
}

// One of the operations that are late: of the kind that goes first in this grid, if there is one.
void do_one_late() {
  const bool is_copy = later_products.empty() || (!later_copies.empty() && random_numbers() % 8 < copies_of_8);
  std::vector<std::function<void()>>& of = is_copy ? later_copies : later_products;
  std::swap(of[random_numbers() % of.size()], of.back());
  const std::function<void()> operation = std::move(of.back());
  of.pop_back();
  operation();
}

void run_to_the_end(std::vector<Block*> blocks) {
  int idle = 0;
  while (!blocks.empty()) {
    bool progresses = false, some_spin = false;
    for (Block* block : blocks) {
      const size_t warps = block->warps.size(), first = random_numbers() % warps;
      for (size_t i = 0; i < warps; ++i) {
        Thread* const threads = &block->threads[(first + i) % warps * kLanes];
        bool resumes = false, spins = false;
        for (Thread* thread = threads; thread != threads + kLanes; ++thread) {
          if (thread->done || (thread->ready != nullptr && !thread->ready(thread->condition))) continue;
          thread->spins = false;
          resume(*thread);
          resumes = true;
          spins |= thread->spins;
        }
        // Lanes that wait for one that asks again and again get no further than that one.
        progresses |= resumes && !spins;
        some_spin |= spins;
      }
    }
    blocks.erase(std::remove_if(blocks.begin(), blocks.end(), [](const Block* block) { return block->has_ended(); }),
                 blocks.end());
    idle = progresses ? 0 : idle + 1;
    const bool some_are_late = !later_copies.empty() || !later_products.empty();
    if (some_are_late && (!progresses || random_numbers() % 8 >= late_of_8)) {
      do_one_late();
    } else if (!blocks.empty() && !progresses && (!some_spin || idle > kSpinsAllowed)) {
      fail("no thread can go on:" + whereabouts(blocks));
    }
  }
}

// --- products -------------------------------------------------------------------------------------------------------

float half_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  float magnitude;
  if (exponent == 31) {
    magnitude = mantissa == 0 ? INFINITY : NAN;
  } else if (exponent == 0) {
    magnitude = std::ldexp(static_cast<float>(mantissa), -24);
  } else {
    magnitude = from_bits<float>(static_cast<uint64_t>((exponent + 112) << 23 | mantissa << 13));
  }
  return from_bits<float>(sign | static_cast<uint32_t>(to_bits(magnitude)));
}

// Every 16-bit value as a float.
const std::array<std::vector<float>, 2>& tables() {
  static const std::array<std::vector<float>, 2> made = [] {
    std::array<std::vector<float>, 2> both{std::vector<float>(65536), std::vector<float>(65536)};
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      both[0][bits] = from_bits<float>(static_cast<uint64_t>(bits) << 16);
      both[1][bits] = half_to_float(static_cast<uint16_t>(bits));
    }
    return both;
  }();
  return made;
}

uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

struct Descriptor {
  uint32_t address, leading, stride;

  explicit Descriptor(uint64_t bits)
      : address(static_cast<uint32_t>(bits & 0x3fff) << 4),
        leading(static_cast<uint32_t>(bits >> 16 & 0x3fff) << 4),
        stride(static_cast<uint32_t>(bits >> 32 & 0x3fff) << 4) {
    if (bits >> 62 != 1) fail("a matrix descriptor is not of the 128-byte swizzle");
    if ((bits >> 49 & 7) != 0) fail("a matrix descriptor has a base offset");
  }

  // Where element k of row (or column) i lies: K-major, the k of a row beside each other.
  uint32_t k_major(int i, int k) const { return swizzled(address + i / 8 * stride + i % 8 * 128 + k * 2); }
  // MN-major, the i of a k beside each other, in panels of 64.
  uint32_t mn_major(int i, int k) const {
    return swizzled(address + i / 64 * leading + k / 8 * stride + k % 8 * 128 + i % 64 * 2);
  }
};

constexpr int kM = 64, kK = 16, kMaxColumns = 256;

struct Operands {
  float a[kM][kK], b[kK][kMaxColumns];
};

void load_operands(const Product& product, Block& block, Operands& to) {
  const std::vector<float>& table = tables()[product.is_half];
  const auto read = [&](uint32_t address) {
    uint16_t bits;
    std::memcpy(&bits, block.at(address, 2), 2);
    return table[bits];
  };
  if (product.a_in_registers) {
    for (int thread = 0; thread < kWarpgroupThreads; ++thread) {
      const int row = thread / kLanes * 16 + thread % kLanes / 4, column = thread % 4 * 2;
      for (int i = 0; i < 4; ++i) {
        const uint32_t pair = product.a_registers[thread][i];
        to.a[row + i % 2 * 8][column + i / 2 * 8] = table[pair & 0xffff];
        to.a[row + i % 2 * 8][column + i / 2 * 8 + 1] = table[pair >> 16];
      }
    }
  } else {
    const Descriptor a(product.a);
    for (int row = 0; row < kM; ++row) {
      for (int k = 0; k < kK; ++k) {
        to.a[row][k] = read(product.a_mn_major ? a.mn_major(row, k) : a.k_major(row, k));
      }
    }
  }
  const Descriptor b(product.b);
  for (int k = 0; k < kK; ++k) {
    for (int i = 0; i < product.columns; ++i) {
      to.b[k][i] = read(product.b_mn_major ? b.mn_major(i, k) : b.k_major(i, k));
    }
  }
}

// Calls f with the thread's element, its row and its column, for all of D.
template <class F>
void for_each_sum(const Product& product, F f) {
  for (int thread = 0; thread < kWarpgroupThreads; ++thread) {
    float* d = product.d[thread];
    const int row = thread / kLanes * 16 + thread % kLanes / 4, column = thread % 4 * 2;
    for (int i = 0; i < product.columns / 2; ++i) f(d[i], row + i / 2 % 2 * 8, i / 4 * 8 + column + i % 2);
  }
}

// The first products of the queue that add to the same registers, up to `count`.
void compute_products(Warpgroup& group, Block& block, int64_t count) {
  static float sums[kM][kMaxColumns];
  static Operands operands;
  const Product first = group.products.front();
  if (first.accumulate) {
    for_each_sum(first, [&](float& sum, int row, int column) { sums[row][column] = sum; });
  } else {
    std::memset(sums, 0, sizeof(sums));
  }
  for (int64_t done = 0; done < count; ++done) {
    const Product& product = group.products.front();
    if (product.d != first.d || (done > 0 && !product.accumulate)) break;
    load_operands(product, block, operands);
    for (int row = 0; row < kM; ++row) {
      for (int k = 0; k < kK; ++k) {
        const float a = operands.a[row][k];
        for (int column = 0; column < product.columns; ++column) sums[row][column] += a * operands.b[k][column];
      }
    }
    group.products.pop_front();
    ++group.computed;
  }
  for_each_sum(first, [&](float& sum, int row, int column) { sum = sums[row][column]; });
}

// Computes up to this number of products, which all threads have issued.
void compute_until(Warpgroup& group, Block& block, int64_t number) {
  while (group.computed < number) compute_products(group, block, number - group.computed);
}

}  // namespace

void fail(const std::string& what) {
  std::ostringstream text;
  text << "emulated GPU: " << what;
  if (current != nullptr) text << " (block " << current->block->index << ", thread " << current->index << ")";
  throw std::runtime_error(text.str());
}

Warp& Thread::warp() const { return block->warps[index / kLanes]; }
Warpgroup& Thread::warpgroup() const { return block->warpgroups[index / kWarpgroupThreads]; }

uint8_t* Block::at(uint32_t address, size_t count) {
  if (address + count > shared_bytes) fail("shared memory ends before address " + std::to_string(address + count));
  return shared + address;
}

bool Block::has_ended() const {
  return std::all_of(threads.begin(), threads.end(), [](const Thread& thread) { return thread.done; });
}

void Barrier::arrive() {
  if (expected == 0 || expected < pending) fail("an mbarrier is used before it is initialised");
  --pending;
  finish_phase();
}

void Barrier::add_bytes(int count) {
  bytes += count;
  finish_phase();
}

void Barrier::finish_phase() {
  if (pending != 0 || bytes != 0) return;
  phase ^= 1;
  pending = expected;
}

void leave() { emulation_switch(&current->stack_pointer, scheduler_stack); }

void spin() {
  current->spins = true;
  current->waits_for = "device memory, which it asks again and again";
  leave();
}

bool acts_at_once() { return random_numbers() % 8 >= late_of_8; }

void copy_later(std::function<void()> copy) { later_copies.push_back(std::move(copy)); }

const std::array<uint64_t, kLanes>& exchange(const char* name, uint64_t value) {
  Warp& warp = current->warp();
  const int64_t number = current->exchanges++;
  const size_t place = number % 2;
  if (warp.arrived == 0) warp.names[place] = name;
  if (std::strcmp(warp.names[place], name) != 0) {
    fail(std::string("a lane is at ") + name + " while others of its warp are at " + warp.names[place]);
  }
  warp.values[place][current->lane()] = value;
  if (++warp.arrived == kLanes) {
    warp.arrived = 0;
    ++warp.exchanged;
  }
  wait_until(name, [&warp, number] { return warp.exchanged > number; });
  return warp.values[place];
}

void named_barrier_arrive(int id, int threads) {
  NamedBarrier& barrier = current->block->barriers.at(id);
  if (barrier.arrived == 0) barrier.threads = threads;
  if (barrier.threads != threads) fail("a named barrier is given two numbers of threads");
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.phase;
  }
}

void named_barrier_sync(int id, int threads) {
  NamedBarrier& barrier = current->block->barriers.at(id);
  const int64_t phase = barrier.phase;
  named_barrier_arrive(id, threads);
  wait_until("a named barrier", [&barrier, phase] { return barrier.phase != phase; });
}

void cluster_sync() {
  Cluster& cluster = *current->block->cluster;
  const int64_t phase = cluster.phase;
  ++cluster.arrived;
  wait_until("the barrier of the cluster", [&cluster, phase] {
    if (cluster.phase == phase && cluster.arrived == cluster.threads) {
      cluster.arrived = 0;
      ++cluster.phase;
    }
    return cluster.phase != phase;
  });
}

void issue_product(int columns, bool is_half, bool a_mn_major, bool b_mn_major, float* d, const uint32_t* a_registers,
                   uint64_t a, uint64_t b, bool accumulate) {
  Warpgroup& group = current->warpgroup();
  const int64_t number = current->products++;
  const std::vector<const float*>& unfenced = current->unfenced;
  if (std::find(unfenced.begin(), unfenced.end(), d) != unfenced.end()) {
    fail("a matrix instruction takes an accumulator that was waited for without wgmma_fence_operand");
  }
  if (current->in_flight.empty() || current->in_flight.back().second != d) {
    current->in_flight.emplace_back(number, d);
  } else {
    current->in_flight.back().first = number;
  }
  const size_t place = static_cast<size_t>(number - group.computed);
  if (place == group.products.size()) {
    group.products.push_back(
        {columns, is_half, a_registers != nullptr, a_mn_major, b_mn_major, accumulate, a, b, {}, {}});
  }
  Product& product = group.products.at(place);
  const bool same = product.columns == columns && product.is_half == is_half && product.a_mn_major == a_mn_major &&
                    product.b_mn_major == b_mn_major && product.a_in_registers == (a_registers != nullptr) &&
                    product.accumulate == accumulate && product.a == a && product.b == b;
  if (!same) fail("the warps of a warpgroup issue different matrix instructions");
  product.d[current->index % kWarpgroupThreads] = d;
  product.a_registers[current->index % kWarpgroupThreads] = a_registers;
  ++product.threads;
}

void commit_products() {
  Warpgroup& group = current->warpgroup();
  Block& block = *current->block;
  const int64_t number = current->products;
  current->groups.push_back(number);
  // The last thread starts them.
  const bool starts =
      group.computed < number && group.products[number - 1 - group.computed].threads == kWarpgroupThreads;
  if (!starts) return;
  const auto operation = [&group, &block, number] { compute_until(group, block, number); };
  if (acts_at_once()) {
    operation();
  } else {
    later_products.push_back(operation);
  }
}

void wait_for_products(int groups) {
  const std::vector<int64_t>& ends = current->groups;
  if (ends.size() <= static_cast<size_t>(groups)) return;
  const int64_t number = ends[ends.size() - 1 - groups];
  const Warpgroup& group = current->warpgroup();
  wait_until("its matrix instructions", [&group, number] { return group.computed >= number; });
  while (!current->in_flight.empty() && current->in_flight.front().first < number) {
    current->unfenced.push_back(current->in_flight.front().second);
    current->in_flight.pop_front();
  }
}

void fence_operand(const float* d) {
  std::vector<const float*>& unfenced = current->unfenced;
  unfenced.erase(std::remove(unfenced.begin(), unfenced.end(), d), unfenced.end());
}

uint32_t shared_address(const void* pointer) {
  const Block& block = *current->block;
  const auto* byte = static_cast<const uint8_t*>(pointer);
  if (byte < block.shared || byte > block.shared + block.shared_bytes) fail("an address is not in shared memory");
  return static_cast<uint32_t>(byte - block.shared);
}

void run_grid(const Launch& launch, const std::function<void()>& kernel) {
  const auto [blocks, threads, shared_bytes, cluster, starts_early] = launch;
  if (threads % kLanes != 0) fail("a block has no whole warps");
  if (blocks % cluster != 0) fail("a grid has no whole clusters");
  ++launches;
  if (settings.leaves_out) return;
  random_numbers.seed(settings.seed++);
  constexpr unsigned kOf8[] = {0, 4, 8, 8};  // what shows most mistakes comes most often
  late_of_8 = kOf8[random_numbers() % 4];
  copies_of_8 = kOf8[random_numbers() % 4];
  later_copies.clear();
  later_products.clear();
  error = nullptr;
  grid_dim.x = blocks;
  running_kernel = &kernel;
  // Blocks of a persistent kernel may wait for each other; it has shared memory of a size of its own. Others run one
  // after another, since their static shared memory is one for all, and in any order.
  const unsigned together = shared_bytes > 0 ? blocks : cluster;
  std::vector<unsigned> firsts;
  for (unsigned first = 0; first < blocks; first += together) firsts.push_back(first);
  std::shuffle(firsts.begin(), firsts.end(), random_numbers);
  std::vector<uint8_t*> taken;
  struct Return {
    std::vector<uint8_t*>& taken;
    ~Return() { stacks.free.insert(stacks.free.end(), taken.begin(), taken.end()); }
  } give_back{taken};
  for (const unsigned first : firsts) {
    std::vector<std::unique_ptr<Block>> made;
    std::vector<Block*> running;
    std::vector<std::unique_ptr<Cluster>> clusters;
    std::vector<std::unique_ptr<uint8_t, void (*)(void*)>> memories;
    size_t stack = 0;
    for (unsigned index = first; index < first + together; ++index) {
      made.push_back(std::make_unique<Block>());
      Block& block = *made.back();
      block.index = index;
      block.rank = static_cast<int>(index % cluster);
      if (block.rank == 0) clusters.push_back(std::make_unique<Cluster>());
      block.cluster = clusters.back().get();
      block.cluster->blocks.push_back(&block);
      block.cluster->threads += static_cast<int>(threads);
      block.warps.resize(threads / kLanes);
      block.warpgroups.resize((threads + kWarpgroupThreads - 1) / kWarpgroupThreads);
      block.shared_bytes = (shared_bytes + 1023) / 1024 * 1024;
      if (block.shared_bytes > 0) {
        memories.emplace_back(static_cast<uint8_t*>(std::aligned_alloc(1024, block.shared_bytes)), std::free);
        block.shared = memories.back().get();
        std::memset(block.shared, 0xff, block.shared_bytes);  // NaN in every dtype
      }
      block.threads.resize(threads);
      for (unsigned i = 0; i < threads; ++i) {
        block.threads[i].block = &block;
        block.threads[i].index = i;
        if (stack == taken.size()) taken.push_back(stacks.take());
        start(block.threads[i], taken[stack++]);
      }
      running.push_back(&block);
    }
    std::shuffle(running.begin(), running.end(), random_numbers);
    run_to_the_end(running);
    for (const auto& block : made) {
      for (const Warpgroup& group : block->warpgroups) {
        if (!group.products.empty()) fail("a block ends before its matrix instructions");
      }
      for (const Thread& thread : block->threads) {
        if (starts_early && !thread.waited_griddep) fail("a thread does not wait for the kernel before");
        if (!thread.unfenced.empty()) fail("a thread ends without wgmma_fence_operand behind a wait for its products");
      }
    }
    if (!later_copies.empty()) fail("blocks end before their copies");
  }
}

namespace {

// Calls f with the place in device memory and the address in shared memory of each element of a box; the first is null
// outside the tensor.
template <class F>
void for_each_of_box(const TensorMap& map, const std::array<int, 5>& at, uint32_t address, F f) {
  if (map.is_one != TensorMap::kIsOne) fail("what is given for a tensor map is none");
  if (address % 1024 != 0)
    fail("a box of 128-byte swizzle starts at " + std::to_string(address) + ", not on 1024 bytes");
  for (uint32_t row = 0; row < map.rows_of_box(); ++row) {
    for (uint32_t column = 0; column < map.box[0]; ++column) {
      const int64_t place[5] = {static_cast<int64_t>(at[0]) + column, static_cast<int64_t>(at[1]) + row % map.box[1],
                                static_cast<int64_t>(at[2]) + row / map.box[1], at[3], at[4]};
      bool inside = true;
      uint64_t offset = static_cast<uint64_t>(place[0]) * map.value_bytes;  // of 64 bits, as addresses
      for (uint32_t dim = 0; dim < map.rank; ++dim) {
        inside &= place[dim] >= 0 && place[dim] < static_cast<int64_t>(map.sizes[dim]);
        if (dim > 0) offset += static_cast<uint64_t>(place[dim]) * map.strides[dim - 1];
      }
      f(inside ? map.data + static_cast<int64_t>(offset) : nullptr, swizzled(address + row * 128 + column * map.value_bytes));
    }
  }
}

}  // namespace

void load_box(const TensorMap& map, const std::array<int, 5>& at, Block& block, uint32_t to) {
  for_each_of_box(map, at, to, [&](const uint8_t* value, uint32_t address) {
    constexpr uint8_t kNothing[4] = {0, 0, 0, 0};
    std::memcpy(block.at(address, map.value_bytes), value == nullptr ? kNothing : value, map.value_bytes);
  });
}

void store_box(const TensorMap& map, const std::array<int, 5>& at, Block& block, uint32_t from) {
  for_each_of_box(map, at, from, [&](uint8_t* place, uint32_t address) {
    if (place != nullptr) std::memcpy(place, block.at(address, map.value_bytes), map.value_bytes);
  });
}

}  // namespace emulation
