#include <algorithm>

#include "kernels/cuda/attention_bwd_pair.cuh"
#include "kernels/cuda/attention_launch.cuh"

namespace sinkhorn::cuda {

bool bwd_pair(const AttentionCall& call) {
  const bool plain =
      call.real == nullptr && call.weight == nullptr && call.dropout.probability == 0.0;
  return bwd_together(call) && on_hopper() && plain && call.rows > 0 && call.block <= kTile &&
         call.width > 32 && call.sequences.length == nullptr;
}

void launch_attention_bwd_pair(const AttentionCall& call, Stream stream) {
  const int64_t tiles = static_cast<int64_t>(tiles_of(call.length)) * call.heads * call.batch;
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(tiles, 2 * multiprocessors())));
  for_engine(call, [&]<class E>() {
    if constexpr (!E::kWarpsAlone && E::kWidth == 64) {
      launch("attention_bwd_pair", attention_bwd_pair_kernel<E>, grid, kPairThreads,
             attention_bwd_pair_shared<E>(), stream, call, tiles);
    }
  });
}

}  // namespace sinkhorn::cuda
