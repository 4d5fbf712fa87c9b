#include <algorithm>

#include "kernels/cuda/attention_bwd_walk.cuh"
#include "kernels/cuda/attention_launch.cuh"

namespace sinkhorn::cuda {
namespace {

template <class E, bool kSorted>
void launch_walk(const AttentionCall& call, Stream stream) {
  const int64_t heads = static_cast<int64_t>(call.batch) * call.heads;
  const int places = kWalkCtas * multiprocessors();
  const int runs = even_shares(heads, tiles_of(call.length), places);
  launch("attention_bwd_walk", attention_bwd_walk_kernel<E, kSorted>,
         dim3(static_cast<unsigned>(heads * runs)), kThreads,
         static_cast<int>(sizeof(WalkMemory<E, kSorted>)), stream, call,
         describe(call, E::kColumns), runs);
}

}  // namespace

void launch_attention_bwd_walk(const AttentionCall& call, Stream stream) {
  for_engine(call, [&]<class E>() {
    if constexpr (!E::kWarpsAlone && E::kWidth == 64) {
      if (call.rows > 0) {
        launch_walk<E, true>(call, stream);
      } else {
        launch_walk<E, false>(call, stream);
      }
    }
  });
}

}  // namespace sinkhorn::cuda
