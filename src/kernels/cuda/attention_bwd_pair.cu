#include <algorithm>

#include "kernels/cuda/attention_bwd_pair.cuh"
#include "kernels/cuda/attention_launch.cuh"

namespace sinkhorn::cuda {
namespace {

template <class E, int kHalves>
void launch_pair(const AttentionCall& call, Stream stream) {
  using Shape = PairShape<E, kHalves>;
  const int across = (call.length + Shape::kTokens - 1) / Shape::kTokens;
  const int tiles = across * call.heads * call.batch;
  const dim3 grid(std::min(tiles, Shape::kCtas * multiprocessors()));
  launch_early(numbers_of(call), "attention_bwd_pair", attention_bwd_pair_kernel<E, kHalves>, grid,
               Shape::kAllThreads, attention_bwd_pair_shared<E, kHalves>(), stream, call,
               describe(call, E::kColumns), tiles);
}

}  // namespace

void launch_attention_bwd_pair(const AttentionCall& call, Stream stream) {
  for_hopper_engine<256>(call, [&]<class E>() {
    if constexpr (E::kWidth <= 64) {
      if (call.block > kTile) return launch_pair<E, 2>(call, stream);
    }
    launch_pair<E, 1>(call, stream);
  });
}

}  // namespace sinkhorn::cuda
