#include <algorithm>

#include "kernels/cuda/attention_bwd_long.cuh"
#include "kernels/cuda/attention_launch.cuh"

namespace sinkhorn::cuda {

void launch_attention_bwd_long(const AttentionCall& call, Stream stream) {
  for_engine(call, [&]<class E>() {
    static_assert(kLongTokens == kLongBlock);
    if constexpr (!E::kWarpsAlone && E::kWidth == 64) {
      const int blocks = call.length / kLongTokens * call.heads * call.batch;
      launch("attention_bwd_long", attention_bwd_long_kernel<E>,
             dim3(std::min(blocks, multiprocessors())), kLongThreads,
             static_cast<int>(sizeof(LongMemory<E>)), stream, call, describe(call, E::kColumns),
             blocks);
    }
  });
}

}  // namespace sinkhorn::cuda
