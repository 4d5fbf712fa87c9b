#include <algorithm>

#include "kernels/cuda/attention_bwd_parts_launch.cuh"
#include "kernels/cuda/attention_cut.cuh"

namespace sinkhorn::cuda {

int sortcut_splits(const AttentionCall& call) {
  constexpr int kQueriesOfSplit = 1024, kMost = 64;
  if (covers_cut(call)) return bwd_cut_splits(call);
  return std::clamp(call.queries / kQueriesOfSplit, 1, kMost);
}

bool keeps_delta(const AttentionCall& call) {
  return call.type == Type::kFloat32 ||
         !(covers_cut(call) || bwd_pair(call) || bwd_together(call) || bwd_walk(call));
}

void launch_attention_bwd(const AttentionCall& call, Stream stream) {
  if (call.type == Type::kFloat32) return launch_attention_bwd_float(call, stream);
  if (covers_cut(call)) return launch_attention_bwd_cut(call, stream);
  if (bwd_pair(call)) return launch_attention_bwd_pair(call, stream);
  if (bwd_together(call)) return launch_attention_bwd_together(call, stream);
  if (bwd_walk(call)) return launch_attention_bwd_walk(call, stream);
  for_engine(call, [&]<class E>() { launch_parts<E>(call, stream); });
}

}  // namespace sinkhorn::cuda
