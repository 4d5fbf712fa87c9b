#include <algorithm>

#include "kernels/cuda/attention_launch.cuh"
#include "kernels/cuda/sort_small.cuh"

namespace sinkhorn::cuda {
namespace {

// f.template operator()<T, kN>() for the call's type and number of blocks.
template <class F>
void for_size(const AttentionCall& call, F f) {
  with_type(call.type, [&]<class T>() {
    if (call.blocks <= 16) {
      f.template operator()<T, 16>();
    } else if (call.blocks <= 32) {
      f.template operator()<T, 32>();
    } else {
      f.template operator()<T, 64>();
    }
  });
}

}  // namespace

void launch_sort_small(const AttentionCall& call, Stream stream) {
  const int heads = call.batch * call.heads;
  for_size(call, [&]<class T, int kN>() {
    constexpr int kColumns = kSmallColumns<T, kN>;
    const int tiles = 2 * ((call.block * call.width + kColumns - 1) / kColumns);
    const int shares = even_shares(heads, tiles, 132 * kSmallSortCtas<T>);
    launch("sort_small", sort_small_kernel<T, kN>, dim3(shares, heads), 128,
           sort_small_shared<T, kN>(), stream, call);
  });
}

int undo_small_splits(const AttentionCall& call) {
  int splits = 1;
  for_size(call, [&]<class T, int kN>() {
    constexpr int kColumns = kSmallColumns<T, kN> / 2;
    const int tiles = 2 * ((call.block * call.width + kColumns - 1) / kColumns);
    splits = even_shares(int64_t{call.batch} * call.heads, tiles, 132 * kSmallUndoCtas<T, kN>);
  });
  return std::min(splits, 16);
}

void launch_undo_small(const AttentionCall& call, float* partial, int splits, Stream stream) {
  for_size(call, [&]<class T, int kN>() {
    launch("undo_small", undo_small_kernel<T, kN>, dim3(splits, call.batch * call.heads), 128,
           undo_small_shared<T, kN>(), stream, call, partial);
  });
}

}  // namespace sinkhorn::cuda
