#include <algorithm>

#include "kernels/cuda/attention_fwd_plain.cuh"
#include "kernels/cuda/attention_launch.cuh"

namespace sinkhorn::cuda {
void launch_attention_fwd_plain(const AttentionCall& call, Stream stream) {
  for_hopper_engine<kMaxWidth>(call, [&]<class E>() {
    const TokenMaps maps = describe(call, E::kColumns);
    const auto go = [&]<class F>() {
      const int groups = (call.length + F::kTokens - 1) / F::kTokens * call.heads * call.batch;
      launch_early(numbers_of(call), "attention_fwd_plain", attention_fwd_plain_kernel<F>,
                   dim3(std::min(groups, F::kCtas * multiprocessors())), F::kAllThreads,
                   static_cast<int>(sizeof(PlainMemory<F>)), stream, call, maps, groups);
    };
    if constexpr (E::kWidth >= 128) {
      // 192 KB of tiles on a multiprocessor, of one CTA or two.
      go.template operator()<PlainForward<E, true, false, 1, 2, 256 / E::kWidth>>();
    } else {
      // Tiles of 32 columns leave room for more CTAs, and ask for them: twice the softmax a byte.
      constexpr int kCtas = E::kWidth == 32 ? 5 : 3;
      if (call.window == 0 && call.block > 2 * kTile) {
        go.template operator()<LongForward<E>>();
      } else if (call.window == 0 && call.block > kTile) {
        go.template operator()<PlainForward<E, true, false, 2, 5, 2>>();
      } else if (call.window == 0) {
        go.template operator()<PlainForward<E, true, false, 1, 3, kCtas>>();
      } else if (call.rows == 0) {
        go.template operator()<PlainForward<E, false, true, 1, 3, kCtas>>();
      } else {
        go.template operator()<PlainForward<E, true, true, 1, 3, kCtas>>();
      }
    }
  });
}

}  // namespace sinkhorn::cuda
