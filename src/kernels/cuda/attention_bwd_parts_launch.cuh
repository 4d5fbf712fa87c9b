// The launches of attention_bwd_parts.cuh.
#pragma once

#include <algorithm>

#include "kernels/cuda/attention_bwd_parts.cuh"
#include "kernels/cuda/attention_launch.cuh"
#include "kernels/cuda/partial_sums.cuh"

namespace sinkhorn::cuda {

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
  if (!call.sortcut && call.window >= 0) launch_keys<E>(call, List::kLocal, 1, stream);
  if (call.splits > 1) {
    const int64_t size =
        static_cast<int64_t>(call.batch) * call.heads * call.rows * call.block * call.width;
    launch_partial_sums<T>("attention_bwd_reduce", call.partial, call.splits, size,
                           call.grad_sorted_key, call.grad_sorted_value, stream);
  }
}

}  // namespace sinkhorn::cuda
