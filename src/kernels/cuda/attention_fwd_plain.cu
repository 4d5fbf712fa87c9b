#include <algorithm>

#include "kernels/cuda/attention_fwd_plain.cuh"
#include "kernels/cuda/attention_launch.cuh"

namespace sinkhorn::cuda {

void launch_attention_fwd_plain(const AttentionCall& call, Stream stream) {
  for_engine(call, [&]<class E>() {
    if constexpr (!E::kWarpsAlone && E::kWidth == 64) {
      const auto go = [&]<class F>() {
        const int groups = (call.length + F::kTokens - 1) / F::kTokens * call.heads * call.batch;
        launch("attention_fwd_plain", attention_fwd_plain_kernel<F>,
               dim3(std::min(groups, F::kCtas * multiprocessors())), F::kAllThreads,
               attention_fwd_plain_shared<F>(), stream, call, groups);
      };
      if (call.window == 0 && call.block > 2 * kTile) {
        go.template operator()<LongForward<E>>();
      } else if (call.window == 0 && call.block > kTile) {
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
