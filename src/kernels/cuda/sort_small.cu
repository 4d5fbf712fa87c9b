#include <algorithm>

#include "kernels/cuda/attention_launch.cuh"
#include "kernels/cuda/undo_small.cuh"

namespace sinkhorn::cuda {
namespace {

// f.template operator()<T, kN, kCtaThreads>() for the call's type, its number of blocks and the
// card.
template <class F>
void for_size(const AttentionCall& call, F f) {
  with_type(call.type, [&]<class T>() {
    if (call.blocks <= 16) return f.template operator()<T, 16, 128>();
    if (call.blocks <= 32) return f.template operator()<T, 32, 128>();
    if constexpr (sizeof(T) == 2) {
      if (on_hopper()) return f.template operator()<T, 64, 256>();
    }
    f.template operator()<T, 64, 128>();
  });
}

}  // namespace

void launch_sort_small(const AttentionCall& call, Stream stream) {
  const int heads = call.batch * call.heads;
  for_size(call, [&]<class T, int kN, int kCtaThreads>() {
    constexpr int kColumns = kSmallSortColumns<T, kN, kCtaThreads>;
    const int tiles = 2 * ((call.block * call.width + kColumns - 1) / kColumns);
    const int shares = even_shares(heads, tiles, 132 * kSmallSortCtas<T, kN, kCtaThreads>);
    launch("sort_small", sort_small_kernel<T, kN, kCtaThreads>, dim3(shares, heads), kCtaThreads,
           sort_small_shared<T, kN, kCtaThreads>(), stream, call);
  });
}

int undo_small_splits(const AttentionCall& call) {
  int splits = 1;
  for_size(call, [&]<class T, int kN, int kCtaThreads>() {
    constexpr int kColumns = kSmallUndoColumns<T, kN, kCtaThreads>;
    const int tiles = 2 * ((call.block * call.width + kColumns - 1) / kColumns);
    splits = even_shares(int64_t{call.batch} * call.heads, tiles,
                         132 * kSmallUndoCtas<T, kN, kCtaThreads>);
  });
  return std::min(splits, 16);
}

void launch_undo_small(const AttentionCall& call, float* partial, int splits, Stream stream) {
  for_size(call, [&]<class T, int kN, int kCtaThreads>() {
    launch("undo_small", undo_small_kernel<T, kN, kCtaThreads>,
           dim3(splits, call.batch * call.heads), kCtaThreads,
           undo_small_shared<T, kN, kCtaThreads>(), stream, call, partial);
  });
}

}  // namespace sinkhorn::cuda
