#include "kernels/cuda/attention_cut.cuh"
#include "kernels/cuda/attention_fwd_cut.cuh"

namespace sinkhorn::cuda {

bool covers_cut(const AttentionCall& call) {
  const bool half = call.type == Type::kBFloat16 || call.type == Type::kFloat16;
  const bool plain = call.real == nullptr && call.weight == nullptr &&
                     call.dropout.probability == 0.0 && call.sequences.length == nullptr &&
                     call.combine == Combine::kConcat;
  return call.sortcut && half && plain && call.width > 32 && call.width <= 64 &&
         static_cast<int64_t>(call.rows) * call.block <= kCutPositions && on_hopper();
}

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
