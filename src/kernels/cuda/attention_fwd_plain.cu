#include <algorithm>

#include "kernels/cuda/attention_fwd_plain.cuh"
#include "kernels/cuda/attention_launch.cuh"

namespace sinkhorn::cuda {

bool fwd_plain(const AttentionCall& call) {
  const bool plain = call.real == nullptr && call.weight == nullptr &&
                     call.dropout.probability == 0.0 && call.sequences.length == nullptr;
  const bool concat = call.rows == 0 || call.combine == Combine::kConcat;
  const bool fits = call.block <= kTile && kTile % call.block == 0;
  const bool sorted = call.rows > 0 && call.window == 0 && (fits || call.block == 2 * kTile);
  const bool windowed = call.window == 1 && call.causal != Causal::kNone && fits;
  return on_hopper() && plain && concat && !call.sortcut && call.width > 32 && call.width <= 64 &&
         (sorted || windowed);
}

void launch_attention_fwd_plain(const AttentionCall& call, Stream stream) {
  for_engine(call, [&]<class E>() {
    if constexpr (!E::kWarpsAlone && E::kWidth == 64) {
      const auto go = [&]<class F>() {
        const int groups = (call.length + F::kTokens - 1) / F::kTokens * call.heads * call.batch;
        launch("attention_fwd_plain", attention_fwd_plain_kernel<F>,
               dim3(std::min(groups, F::kCtas * multiprocessors())), F::kAllThreads, F::kShared,
               stream, call, groups);
      };
      if (call.window == 0 && call.block > kTile) {
        go.template operator()<PlainForward<E, true, false, 2, 4, 2>>();
      } else if (call.window == 0) {
        go.template operator()<PlainForward<E, true, false, 1, 3, 3>>();
      } else if (call.rows == 0) {
        go.template operator()<PlainForward<E, false, true, 1, 3, 3>>();
      } else {
        go.template operator()<PlainForward<E, true, true, 1, 3, 3>>();
      }
    }
  });
}

}  // namespace sinkhorn::cuda
