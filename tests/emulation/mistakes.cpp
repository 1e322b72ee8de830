// Mistakes on the emulated GPU: a product of two matrices, by a producer and a consumer that share one
// buffer, as it should be and with a mistake. Prints of each how many of its runs, each in another order, gave the
// right result.
#include <cstdio>
#include <vector>

#include "cuda_functions.h"
#include "device/fragments.h"
#include "device/pipeline.h"

namespace flash_dmattn {
namespace {

enum class Mistake {
  kNone,
  kReadsBeforeCopy,
  kReadsBeforeProduct,
  kGivesBackEarly,
  kNeverGivesBack,
  kExpectsTooFew,
  kLanesPart,
  kNeverFences,
  kLeavesSharedMemory,
  kNeverClears,
  kStartsTooEarly
};

constexpr int kSize = 64, kDepth = 128, kRounds = kDepth / kPanelColumns, kTileBytes = kSize * kRowBytes;

struct Storage {
  uint8_t a[kTileBytes], b[kTileBytes];
  uint64_t full, empty;
};

template <Mistake kMistake>
void product_kernel(CUtensorMap a, CUtensorMap b, float* out) {
  if (kMistake != Mistake::kStartsTooEarly || threadIdx.x > 0) griddep_wait();
  auto& shared = *reinterpret_cast<Storage*>(emulation::shared_memory());
  if (threadIdx.x == 0) {
    barrier_init(&shared.full, 2);
    barrier_init(&shared.empty, kMistake == Mistake::kExpectsTooFew ? 2 : 4);
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    for (int round = 0; threadIdx.x == 0 && round < kRounds; ++round) {
      barrier_wait(&shared.empty, (round & 1) ^ 1);
      tma_load_panels<1, kSize>(shared.a, &a, &shared.full, round * kPanelColumns, RowAt{0, 0}, 0);
      tma_load_panels<1, kSize>(shared.b, &b, &shared.full, round * kPanelColumns, RowAt{0, 0}, 0);
    }
    return;
  }
  float sums[kSize / 2];
  const uint32_t past = kMistake == Mistake::kLeavesSharedMemory ? 1 << 17 : 0;
  for (int round = 0; round < kRounds; ++round) {
    if (kMistake != Mistake::kReadsBeforeCopy) barrier_wait(&shared.full, round & 1);
    for (int k = 0; k < kPanelColumns / 16; ++k) {
      const uint64_t rows = matrix_descriptor(shared_address(shared.a) + past, 16);
      const uint64_t columns = matrix_descriptor(shared_address(shared.b), 16);
      Wgmma<__nv_bfloat16, kSize>::run(sums, advance_k_major<kSize>(rows, k), advance_k_major<kSize>(columns, k),
                                       round > 0 || k > 0);
    }
    wgmma_commit();
    if (kMistake == Mistake::kGivesBackEarly) barrier_arrive_of_warp(&shared.empty);
    if (kMistake != Mistake::kReadsBeforeProduct) wgmma_wait<0>();
    if (kMistake != Mistake::kNeverFences) wgmma_fence_operand(sums);
    if (kMistake == Mistake::kLanesPart && threadIdx.x % 32 == 7) __any_sync(0xffffffffu, true);
    if (kMistake != Mistake::kGivesBackEarly && kMistake != Mistake::kNeverGivesBack) {
      barrier_arrive_of_warp(&shared.empty);
    }
  }
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  for (int i = 0; i < kSize / 2; ++i) {
    const int row = warp * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (kMistake != Mistake::kNeverClears) out[row * kSize + column] = 0.0f;
    atomicAdd(out + row * kSize + column, sums[i]);
  }
}

CUtensorMap map_of(std::vector<__nv_bfloat16>& values) {
  emulation::TensorMap map{};
  map.data = reinterpret_cast<uint8_t*>(values.data());
  map.is_one = emulation::TensorMap::kIsOne;
  map.rank = 4;
  map.value_bytes = 2;
  const uint64_t sizes[4] = {kDepth, kSize, 1, 1};
  const uint32_t box[4] = {kPanelColumns, kSize, 1, 1};
  for (int dim = 0; dim < 4; ++dim) {
    map.sizes[dim] = sizes[dim];
    map.box[dim] = box[dim];
    if (dim < 3) map.strides[dim] = kDepth * 2;
  }
  CUtensorMap made{};
  std::memcpy(&made, &map, sizeof(map));
  return made;
}

template <Mistake kMistake>
void try_out(const char* name) {
  std::mt19937 numbers(1);
  std::vector<__nv_bfloat16> a(kSize * kDepth), b(kSize * kDepth);
  for (auto* values : {&a, &b}) {
    for (auto& value : *values) value = __float2bfloat16(static_cast<float>(numbers() % 16));  // whose sums are exact
  }
  std::vector<float> wanted(kSize * kSize), out(kSize * kSize);
  for (int place = 0; place < kSize * kSize; ++place) {
    for (int k = 0; k < kDepth; ++k) {
      wanted[place] +=
          __bfloat162float(a[place / kSize * kDepth + k]) * __bfloat162float(b[place % kSize * kDepth + k]);
    }
  }
  constexpr int kRuns = 40;
  int right = 0;
  std::string error;
  for (int run = 0; run < kRuns; ++run) {
    emulation::settings.seed = static_cast<uint64_t>(run);
    std::memset(out.data(), 0xff, out.size() * sizeof(float));
    try {
      emulation::Launch launch(1, 256, sizeof(Storage));
      launch.starts_early = true;
      launch.run(product_kernel<kMistake>, map_of(a), map_of(b), out.data());
      right += out == wanted;
    } catch (const std::exception& failure) {
      error = failure.what();
    }
  }
  std::printf("%s: %d of %d runs right; %s\n", name, right, kRuns, error.substr(0, error.find('\n')).c_str());
}

}  // namespace
}  // namespace flash_dmattn

int main() {
  using namespace flash_dmattn;
  try_out<Mistake::kNone>("none");
  try_out<Mistake::kReadsBeforeCopy>("reads before copy");
  try_out<Mistake::kReadsBeforeProduct>("reads before product");
  try_out<Mistake::kGivesBackEarly>("gives back early");
  try_out<Mistake::kNeverGivesBack>("never gives back");
  try_out<Mistake::kExpectsTooFew>("expects too few");
  try_out<Mistake::kLanesPart>("lanes part");
  try_out<Mistake::kNeverFences>("never fences");
  try_out<Mistake::kLeavesSharedMemory>("leaves shared memory");
  try_out<Mistake::kNeverClears>("never clears");
  try_out<Mistake::kStartsTooEarly>("starts too early");
}
