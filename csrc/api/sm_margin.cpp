// The operator that sets how many SMs the launches of this thread leave to other kernels.
#include <cstdint>

#include <torch/csrc/stable/library.h>

#include "common.h"
#include "tile_scheduler.h"

namespace flash_dmattn {
namespace {

constexpr const char* kName = "cuda_set_sm_margin";

// Returns the margin before.
int64_t set_sm_margin(int64_t margin) {
  CHECK_ARGUMENT(margin >= 0 && margin <= kMaxInt, "margin is ", margin, "; it needs to be a number of SMs, 0 or more");
  const int64_t before = sm_margin;
  sm_margin = static_cast<int>(margin);
  return before;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(flash_dmattn, m) { m.def("cuda_set_sm_margin(int margin) -> int"); }

STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CompositeExplicitAutograd, m) {
  m.impl("cuda_set_sm_margin", TORCH_BOX(&set_sm_margin));
}

}  // namespace flash_dmattn
