#include "kernels/cuda/attention_bwd_cut.cuh"
#include "kernels/cuda/attention_cut.cuh"
#include "kernels/cuda/partial_sums.cuh"

namespace sinkhorn::cuda {

int bwd_cut_splits(const AttentionCall& call) {
  // An H200's multiprocessors, whatever the card: sums are added in the same order on any.
  constexpr int kSlots = 132;
  return even_shares(static_cast<int64_t>(call.batch) * call.heads, tiles_of(call.queries), kSlots);
}

void launch_attention_bwd_cut(const AttentionCall& call, Stream stream) {
  const dim3 grid(call.splits, call.heads, call.batch);
  for_engine(call, [&]<class E>() {
    if constexpr (!E::kWarpsAlone && E::kWidth == 64) {
      const auto of = [&](const Tokens& x) { return describe(call, x, call.queries, E::kColumns); };
      const CutMaps maps = {of(call.query), of(call.grad_out), of(call.out)};
      const auto launch_groups = [&]<int kGroups>() {
        launch("attention_bwd_cut", attention_bwd_cut_kernel<E, kGroups>, grid,
               (kGroups + 1) * kThreads, attention_bwd_cut_shared<E, kGroups>(), stream, call,
               maps);
      };
      if (call.rows * call.block <= kTile) {
        launch_groups.template operator()<1>();
      } else {
        launch_groups.template operator()<2>();
      }
      if (call.splits > 1) {
        const int64_t size =
            static_cast<int64_t>(call.batch) * call.heads * call.rows * call.block * call.width;
        launch_partial_sums<typename E::T>("attention_bwd_reduce", call.partial, call.splits, size,
                                           call.grad_sorted_key, call.grad_sorted_value, stream);
      }
    }
  });
}

}  // namespace sinkhorn::cuda
