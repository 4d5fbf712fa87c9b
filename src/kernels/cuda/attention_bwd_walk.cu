#include <algorithm>

#include "kernels/cuda/attention_bwd_walk.cuh"
#include "kernels/cuda/attention_launch.cuh"

namespace sinkhorn::cuda {
namespace {

// Into how many runs each head's tiles are cut: the steps of the longest run and one more for its
// ends, times the turns in which CTAs take the card's places, are to be least.
int runs_of(int tiles, int64_t heads, int64_t places) {
  constexpr int64_t kMostRuns = 16;  // where heads alone fill the card
  const int64_t most = std::min<int64_t>(tiles, std::max(places / heads, kMostRuns));
  int64_t best = 1, least = 0;
  for (int64_t runs = 1; runs <= most; ++runs) {
    const int64_t turns = (heads * runs + places - 1) / places;
    const int64_t steps = turns * ((tiles + runs - 1) / runs + 1);
    if (runs == 1 || steps < least) {
      best = runs;
      least = steps;
    }
  }
  return static_cast<int>(best);
}

template <class E, bool kSorted>
void launch_walk(const AttentionCall& call, Stream stream) {
  const int64_t heads = static_cast<int64_t>(call.batch) * call.heads;
  const int64_t places = static_cast<int64_t>(kWalkCtas) * multiprocessors();
  const int runs = runs_of(tiles_of(call.length), heads, places);
  launch("attention_bwd_walk", attention_bwd_walk_kernel<E, kSorted>,
         dim3(static_cast<unsigned>(heads * runs)), kThreads,
         attention_bwd_walk_shared<E, kSorted>(), stream, call, runs);
}

}  // namespace

bool bwd_walk(const AttentionCall& call) {
  const bool plain =
      call.real == nullptr && call.weight == nullptr && call.dropout.probability == 0.0;
  const bool reaches_one_tile =
      kTile % call.block == 0 && call.window > 0 && call.window <= kTile / call.block;
  return on_hopper() && plain && reaches_one_tile && !call.sortcut &&
         call.causal != Causal::kNone && call.width > 32 && call.width <= 64 &&
         call.sequences.start == nullptr && call.sequences.length == nullptr &&
         (call.combine == Combine::kConcat || call.rows == 0);
}

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
