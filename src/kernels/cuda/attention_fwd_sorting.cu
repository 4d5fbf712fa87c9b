#include <algorithm>
#include <array>
#include <atomic>

#include "kernels/cuda/attention_fwd_sorting.cuh"
#include "kernels/cuda/written.h"

namespace sinkhorn::cuda {
namespace {

constexpr const char* kName = "attention_fwd_sorting";

// f.template operator()<F>() for the call's type, its number of blocks and its window.
template <class Body>
void for_size(const AttentionCall& call, Body f) {
  for_half_type(call, [&]<class T>() {
    const auto with_window = [&]<int kCtas>() {
      using E = Hopper<T, kTile>;
      if (call.window == 0) return f.template operator()<SortingForward<E, kCtas, false>>();
      f.template operator()<SortingForward<E, kCtas, true>>();
    };
    if (call.blocks <= 4) return with_window.template operator()<1>();
    if (call.blocks <= 8) return with_window.template operator()<2>();
    if (call.blocks <= 16) return with_window.template operator()<4>();
    with_window.template operator()<8>();
  });
}

template <class F>
struct SortingLaunch {
  static constexpr int kShared = static_cast<int>(sizeof(SortingMemory<F>));
  static_assert(kShared <= kSortingShared && F::kSources <= kSortingBlocks);
  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config{};

  explicit SortingLaunch(Stream stream = nullptr) {
    allow_shared(attention_fwd_sorting_kernel<F>, kShared, kName);
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {F::kCtas, 1, 1};
    config.gridDim = dim3(F::kCtas);
    config.blockDim = dim3(F::kAllThreads);
    config.dynamicSmemBytes = kShared;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
};

// Asking takes the driver a while: once a card.
template <class F>
int clusters_at_once() {
  static std::array<std::atomic<int>, 64> known{};  // by card: one more than found, 0 at first
  int device = 0;
  check(cudaGetDevice(&device), kName);
  const bool remembers = static_cast<size_t>(device) < known.size();
  const int before = remembers ? known[static_cast<size_t>(device)].load() : 0;
  if (before > 0) return before - 1;
  int count = 0;
  const SortingLaunch<F> launch;
  check(cudaOccupancyMaxActiveClusters(&count, attention_fwd_sorting_kernel<F>, &launch.config),
        kName);
  if (remembers) known[static_cast<size_t>(device)].store(count + 1);
  return count;
}

// All results, and all sorted blocks that are kept: both are stored by bulk. Told before the
// launch, since rows that are done again are read in it.
void tell_stored(const AttentionCall& p, Stream stream) {
  constexpr int64_t kNumber = 2;  // bytes
  const int64_t out = (p.batch - 1) * p.out.batch + (p.heads - 1) * p.out.head +
                      (p.queries - 1) * p.out.token + p.width;
  const int64_t kept = p.keeps_sorted ? int64_t{p.batch} * p.heads * p.rows * p.block * p.width : 0;
  const auto bytes = [](int64_t numbers) { return static_cast<size_t>(numbers * kNumber); };
  tell_written(
      {{p.out.data, bytes(out)}, {p.sorted_key, bytes(kept)}, {p.sorted_value, bytes(kept)}},
      static_cast<cudaStream_t>(stream));
}

}  // namespace

int sorting_clusters(const AttentionCall& call) {
  int count = 0;
  for_size(call, [&]<class F>() { count = clusters_at_once<F>(); });
  return count;
}

void launch_attention_fwd_sorting(const AttentionCall& call, Stream stream) {
  tell_stored(call, stream);
  for_size(call, [&]<class F>() {
    SortingMaps maps{};
    maps.tokens = describe(call, kTile);
    maps.key_slice = describe(call, call.key, call.length, kTile, F::kSlice);
    maps.value_slice = describe(call, call.value, call.length, kTile, F::kSlice);
    maps.out = describe(call, call.out, call.length, kTile, 16);
    SortingLaunch<F> launch(stream);
    const int clusters = std::min(call.batch * call.heads, clusters_at_once<F>());
    launch.config.gridDim = dim3(static_cast<unsigned>(clusters * F::kCtas));
    check(cudaLaunchKernelEx(&launch.config, attention_fwd_sorting_kernel<F>, call, maps), kName);
  });
}

}  // namespace sinkhorn::cuda
