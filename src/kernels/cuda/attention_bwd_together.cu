#include "kernels/cuda/attention_bwd_together.cuh"
#include "kernels/cuda/attention_launch.cuh"

namespace sinkhorn::cuda {
namespace {

template <class E, int kTiles, bool kPlain>
void launch_group(const AttentionCall& call, Stream stream) {
  const dim3 grid((call.length + kTiles * kTile - 1) / (kTiles * kTile), call.heads, call.batch);
  launch("attention_bwd_together", attention_bwd_together_kernel<E, kTiles, kPlain>, grid, kThreads,
         attention_bwd_together_shared<E, kTiles>(), stream, call, dropout_of(call));
}

}  // namespace

void launch_attention_bwd_together(const AttentionCall& call, Stream stream) {
  for_engine(call, [&]<class E>() {
    if constexpr (E::kWidth <= 64) {
      const bool plain =
          call.real == nullptr && call.weight == nullptr && call.dropout.probability == 0.0;
      if (call.block > kTile) {
        launch_group<E, 2, false>(call, stream);
      } else if (!E::kWarpsAlone && plain) {
        launch_group<E, 1, !E::kWarpsAlone>(call, stream);
      } else {
        launch_group<E, 1, false>(call, stream);
      }
    }
  });
}

}  // namespace sinkhorn::cuda
