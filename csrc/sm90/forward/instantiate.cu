// The forward kernels of one dtype and one pair of head dims, a kernel instance. The build compiles this file once for
// each, chosen by FLASH_DMATTN_ELEMENT, FLASH_DMATTN_HEAD_DIM and FLASH_DMATTN_HEAD_DIM_V.
#include "../../dispatch.h"
#include "forward.h"

namespace flash_dmattn {
namespace {

constexpr int kD = FLASH_DMATTN_HEAD_DIM, kDv = FLASH_DMATTN_HEAD_DIM_V;

template <Bias kBias, MaskForm kMask, int kConsumers, bool kMaxScores = false, bool kHasDropout = false,
          bool kHoldsBias = false>
using TraitsOf = ForwardTraits<FLASH_DMATTN_ELEMENT, kD, kDv, kBias, kMask, kConsumers, false, false, kHasDropout,
                               kHoldsBias, kMaxScores>;

// Calls f with the traits of the kernel that serves a call of so many queries. Kernels with dropout have two consumers,
// for the registers that Philox takes; the caller has found them to be there.
template <class F>
auto with_traits(const ForwardVariant& variant, F f) {
  const int seqlen_q = static_cast<int>(variant.queries);
  const auto call = [&](auto bias_form, auto mask_form, auto max_scores) {
    constexpr Bias kBias = decltype(bias_form)::value;
    constexpr MaskForm kMask = decltype(mask_form)::value;
    constexpr bool kMax = decltype(max_scores)::value;
    if constexpr (has_dropout_kernels(kD, kDv) && takes_dropout(kBias) && !kMax) {
      if (variant.has_dropout) return f(TraitsOf<kBias, kMask, 2, false, true>{});
    }
    constexpr int kMost = most_consumers(kD, kDv, kBias, kMask);
    if constexpr (kMost == 4 && kBias == Bias::kTile && kMask == MaskForm::kNone) {
      if (variant.holds_bias) {
        if (consumers_for(seqlen_q, 4, kMask) == 4) return f(TraitsOf<kBias, kMask, 4, false, false, true>{});
        return f(TraitsOf<kBias, kMask, 3, false, false, true>{});
      }
    }
    if constexpr (kMost > 2) {
      const int consumers = kMask == MaskForm::kNone || variant.has_one_mask_row ? consumers_for(seqlen_q, kMost, kMask) : 2;
      if (consumers == kMost) return f(TraitsOf<kBias, kMask, kMost, kMax>{});
      if (consumers == 3) return f(TraitsOf<kBias, kMask, 3, kMax>{});
    }
    return f(TraitsOf<kBias, kMask, 2, kMax>{});
  };
  if constexpr (has_float_tile_kernels(kD, kDv)) {
    if (has_float_tiles(variant.bias)) {
      constexpr std::integral_constant<Bias, Bias::kFloatTile> form{};
      return with_bool(variant.mask != MaskForm::kNone, [&](auto has_mask) {
        constexpr MaskForm kMask = decltype(has_mask)::value ? MaskForm::kTiles : MaskForm::kNone;
        return call(form, std::integral_constant<MaskForm, kMask>{}, std::false_type{});
      });
    }
  }
  return with_mask_form(variant.mask, [&](auto form) {
    constexpr MaskForm kMask = decltype(form)::value;
    return with_bias_form<kD, kDv, kMask>(variant.bias, [&](auto bias) {
      if constexpr (has_max_scores_kernels(decltype(bias)::value, kMask)) {
        if (variant.has_max_scores) return call(bias, form, std::true_type{});
      }
      return call(bias, form, std::false_type{});
    });
  });
}

}  // namespace

template <>
cudaError_t launch_forward<FLASH_DMATTN_ELEMENT, FLASH_DMATTN_HEAD_DIM, FLASH_DMATTN_HEAD_DIM_V>(
    const ForwardParams& params, const ForwardVariant& variant, int blocks, cudaStream_t stream) {
  return with_traits(
      variant, [&](auto traits) { return launch_forward_kernel<decltype(traits)>(params, blocks, stream); });
}

template <>
ForwardTile forward_tile<FLASH_DMATTN_ELEMENT, FLASH_DMATTN_HEAD_DIM, FLASH_DMATTN_HEAD_DIM_V>(
    const ForwardVariant& variant) {
  return with_traits(variant, [](auto traits) {
    using Of = decltype(traits);
    return ForwardTile{Of::kBlockM, Of::kBlockN, Of::kSplitKv ? kSplitFloats<Of> : 0,
                       Of::kSplitKv ? kSplitWarps<Of> : 0};
  });
}

}  // namespace flash_dmattn
