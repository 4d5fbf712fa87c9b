#include <algorithm>

#include "kernels/cuda/attention_launch.cuh"
#include "kernels/cuda/sort_tiny.cuh"

namespace sinkhorn::cuda {
namespace {

// f.template operator()<T, kN>() for the call's type and number of blocks.
template <class F>
void for_size(const AttentionCall& call, F f) {
  with_type(call.type, [&]<class T>() {
    if (call.blocks <= 2) {
      f.template operator()<T, 2>();
    } else if (call.blocks <= 4) {
      f.template operator()<T, 4>();
    } else {
      f.template operator()<T, kTinyBlocks>();
    }
  });
}

template <class T>
int tiny_tiles(const AttentionCall& call) {
  return (call.block * call.width + kTinyColumns<T> - 1) / kTinyColumns<T>;
}

}  // namespace

void launch_sort_tiny(const AttentionCall& call, Stream stream) {
  const int sides = call.batch * call.heads * 2;
  for_size(call, [&]<class T, int kN>() {
    const int shares = even_shares(sides, tiny_tiles<T>(call), 132 * kTinySortCtas<kN>);
    launch_early(numbers_of(call), "sort_tiny", sort_tiny_kernel<T, kN>, dim3(shares, sides),
                 kTinyThreads, 0, stream, call);
  });
}

int undo_tiny_splits(const AttentionCall& call) {
  constexpr int kMostShares = 8;
  int shares = 1;
  for_size(call, [&]<class T, int kN>() {
    shares = even_shares(int64_t{call.batch} * call.heads * 2, tiny_tiles<T>(call),
                         132 * kTinyUndoCtas<kN>);
  });
  return 2 * std::min(shares, kMostShares);  // keys and values apart
}

void launch_undo_tiny(const AttentionCall& call, float* partial, int splits, Stream stream) {
  const dim3 grid(splits / 2, call.batch * call.heads * 2);
  for_size(call, [&]<class T, int kN>() {
    launch_early(numbers_of(call), "undo_tiny", undo_tiny_kernel<T, kN>, grid, kTinyThreads, 0,
                 stream, call, partial);
  });
}

}  // namespace sinkhorn::cuda
