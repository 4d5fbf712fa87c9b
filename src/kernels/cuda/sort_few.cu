#include <algorithm>

#include "kernels/cuda/partial_sums.cuh"
#include "kernels/cuda/sort_few.cuh"

namespace sinkhorn::cuda {
namespace {

// Warps that lie side by side over a block's columns.
int warps_across(const AttentionCall& call, int most) {
  const int needed = (call.block * call.width + kFewColumns - 1) / kFewColumns;
  int across = 1;
  while (across < std::min(needed, most)) across *= 2;
  return across;
}
int column_groups(const AttentionCall& call, int across) {
  return (call.block * call.width + across * kFewColumns - 1) / (across * kFewColumns);
}
// Half of a CTA's warps add up sources apart, which leaves half as much to add up later.
int sort_across(const AttentionCall& call) { return warps_across(call, kFewWarps / 2); }
// Long stretches of memory, and few parts of dR.
int undo_across(const AttentionCall& call) { return warps_across(call, kFewWarps); }

int64_t heads_of(const AttentionCall& call) {
  return static_cast<int64_t>(call.batch) * call.heads;
}

// f.template operator()<T, kRows>() for the call's type and rows.
template <class F>
void for_rows(const AttentionCall& call, F f) {
  const auto with_type = [&]<class T>() {
    if (call.rows <= 2) {
      f.template operator()<T, 2>();
    } else if (call.rows <= 4) {
      f.template operator()<T, 4>();
    } else {
      f.template operator()<T, kFewRows>();
    }
  };
  if (call.type == Type::kBFloat16) {
    with_type.template operator()<__nv_bfloat16>();
  } else {
    with_type.template operator()<__half>();
  }
}

}  // namespace

bool sorts_few(const AttentionCall& call) {
  constexpr int64_t kMostColumns = 1 << 18;  // of a block; each 2048 of them leave a part of dR
  const bool half = call.type == Type::kBFloat16 || call.type == Type::kFloat16;
  return call.sortcut && half && call.rows <= kFewRows &&
         int64_t{call.block} * call.width <= kMostColumns && call.causal == Causal::kNone &&
         call.real == nullptr && call.length % call.block == 0 &&
         call.sequences.length == nullptr && call.key_heads == call.heads;
}

int sort_few_splits(const AttentionCall& call) {
  // CTAs that an H200 runs at a time, whatever the card; and sources worth a warp.
  constexpr int64_t kWanted = 132 * 4, kLeastSources = 8;
  const int across = sort_across(call);
  const int64_t groups = heads_of(call) * 2 * column_groups(call, across);
  const int64_t least = kLeastSources * (kFewWarps / across);
  return static_cast<int>(
      std::clamp<int64_t>(kWanted / groups, 1, (call.blocks + least - 1) / least));
}

void launch_sort_few(const AttentionCall& call, float* partial, int splits, Stream stream) {
  const int across = sort_across(call);
  const dim3 grid(splits, column_groups(call, across), static_cast<unsigned>(2 * heads_of(call)));
  for_rows(call, [&]<class T, int kRows>() {
    launch("sort_few", sort_few_kernel<T, kRows>, grid, kFewThreads, 0, stream, call, partial,
           across);
    if (splits > 1) {
      const int64_t size = heads_of(call) * call.rows * call.block * call.width;
      launch_partial_sums<T>("sort_few_sums", partial, splits, size, call.sorted_key,
                             call.sorted_value, stream);
    }
  });
}

int undo_few_splits(const AttentionCall& call) {
  return 2 * column_groups(call, undo_across(call));
}

void launch_undo_few(const AttentionCall& call, float* partial, Stream stream) {
  const int across = undo_across(call), sources = kFewSources * (kFewWarps / across);
  const dim3 grid((call.blocks + sources - 1) / sources, column_groups(call, across),
                  static_cast<unsigned>(2 * heads_of(call)));
  for_rows(call, [&]<class T, int kRows>() {
    launch("undo_few", undo_few_kernel<T, kRows>, grid, kFewThreads, 0, stream, call, partial,
           across);
  });
}

}  // namespace sinkhorn::cuda
