#include <algorithm>

#include "kernels/cuda/attention_bwd_parts.cuh"
#include "kernels/cuda/attention_cut.cuh"
#include "kernels/cuda/partial_sums.cuh"

namespace sinkhorn::cuda {
namespace {

template <class E>
void launch_keys(const AttentionCall& call, List list, int splits, Stream stream) {
  constexpr int kOut = std::min(E::kWidth, 128);
  AttentionCall own = call;
  own.splits = splits;
  const int positions = list == List::kSorted ? call.rows * call.block : call.length;
  const dim3 grid(tiles_of(positions) * (E::kWidth / kOut) * splits, call.heads, call.batch);
  launch("attention_bwd_keys", attention_bwd_keys_kernel<E, kOut>, grid, kThreads,
         attention_bwd_keys_shared<E>(), stream, own, dropout_of(call), list);
}

template <class E>
void launch_parts(const AttentionCall& call, Stream stream) {
  using T = typename E::T;
  if (call.combine == Combine::kOutputs && call.rows > 0) {
    launch("attention_delta", attention_delta_kernel<T>,
           dim3((call.queries + 7) / 8, call.heads, call.batch), 256, 0, stream, call);
  }
  launch("attention_bwd_queries", attention_bwd_queries_kernel<E>,
         dim3(tiles_of(call.queries), call.heads, call.batch), kThreads,
         attention_bwd_queries_shared<E>(), stream, call, dropout_of(call));
  if (call.rows > 0) launch_keys<E>(call, List::kSorted, call.splits, stream);
  if (!call.sortcut) launch_keys<E>(call, List::kLocal, 1, stream);
  if (call.splits > 1) {
    const int64_t size =
        static_cast<int64_t>(call.batch) * call.heads * call.rows * call.block * call.width;
    launch_partial_sums<T>("attention_bwd_reduce", call.partial, call.splits, size,
                           call.grad_sorted_key, call.grad_sorted_value, stream);
  }
}

}  // namespace

int sortcut_splits(const AttentionCall& call) {
  constexpr int kQueriesOfSplit = 1024, kMost = 64;
  if (covers_cut(call)) return bwd_cut_splits(call);
  return std::clamp(call.queries / kQueriesOfSplit, 1, kMost);
}

void launch_attention_bwd(const AttentionCall& call, Stream stream) {
  if (covers_cut(call)) return launch_attention_bwd_cut(call, stream);
  if (bwd_pair(call)) return launch_attention_bwd_pair(call, stream);
  if (bwd_together(call)) return launch_attention_bwd_together(call, stream);
  if (bwd_walk(call)) return launch_attention_bwd_walk(call, stream);
  for_engine(call, [&]<class E>() { launch_parts<E>(call, stream); });
}

}  // namespace sinkhorn::cuda
