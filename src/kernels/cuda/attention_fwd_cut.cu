#include "kernels/cuda/attention_cut.cuh"
#include "kernels/cuda/attention_fwd_cut.cuh"

namespace sinkhorn::cuda {

void launch_attention_fwd_cut(const AttentionCall& call, Stream stream) {
  const int64_t heads = static_cast<int64_t>(call.batch) * call.heads;
  const int tiles = (tiles_of(call.queries) + kCutGroups - 1) / kCutGroups;
  const dim3 grid(even_shares(heads, tiles, 2 * multiprocessors()), call.heads, call.batch);
  for_engine(call, [&]<class E>() {
    if constexpr (!E::kWarpsAlone && E::kWidth == 64) {
      const auto launch_tiles = [&]<int kTiles>() {
        launch("attention_fwd_cut", attention_fwd_cut_kernel<E, kTiles>, grid,
               kCutGroups * kThreads, attention_fwd_cut_shared<E, kTiles>(), stream, call);
      };
      if (call.rows * call.block <= kTile) {
        launch_tiles.template operator()<1>();
      } else {
        launch_tiles.template operator()<2>();
      }
    }
  });
}

}  // namespace sinkhorn::cuda
