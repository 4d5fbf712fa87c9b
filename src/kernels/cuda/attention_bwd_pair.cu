#include <algorithm>

#include "kernels/cuda/attention_bwd_pair.cuh"
#include "kernels/cuda/attention_launch.cuh"

namespace sinkhorn::cuda {
namespace {

// columns: those of a panel.
PairMaps describe_all(const AttentionCall& call, int columns) {
  const int positions = call.rows * call.block;
  const int64_t head = int64_t{positions} * call.width;
  const auto sorted = [&](void* data) { return Tokens{data, head * call.heads, head, call.width}; };
  PairMaps maps{};
  maps.used = describe(maps.query, call, call.query, call.length, columns) &&
              describe(maps.grad, call, call.grad_out, call.length, columns) &&
              describe(maps.key, call, call.key, call.length, columns) &&
              describe(maps.value, call, call.value, call.length, columns) &&
              describe(maps.sorted_key, call, sorted(call.sorted_key), positions, columns) &&
              describe(maps.sorted_value, call, sorted(call.sorted_value), positions, columns);
  return maps;
}

template <class E, int kHalves>
void launch_pair(const AttentionCall& call, Stream stream) {
  using Shape = PairShape<E, kHalves>;
  const int across = (call.length + Shape::kTokens - 1) / Shape::kTokens;
  const int tiles = across * call.heads * call.batch;
  const dim3 grid(std::min(tiles, Shape::kCtas * multiprocessors()));
  launch_early(numbers_of(call), "attention_bwd_pair", attention_bwd_pair_kernel<E, kHalves>, grid,
               Shape::kAllThreads, attention_bwd_pair_shared<E, kHalves>(), stream, call,
               describe_all(call, E::kColumns), tiles);
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
