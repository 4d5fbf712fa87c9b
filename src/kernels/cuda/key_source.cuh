// The tiles of positions a group of 64 queries goes through, and where their keys and values lie.
#pragma once

#include "kernels/cuda/engine.cuh"

namespace sinkhorn::cuda {

// Tiles of both lists that queries first .. first + 63 look at, one behind the other.
struct TileList {
  Interval sorted, local;
  int sorted_tiles, tiles;

  __device__ __forceinline__ TileList(const Plan& plan, int first)
      : sorted(plan.seen(List::kSorted, first, first + kTile - 1)),
        local(plan.seen(List::kLocal, first, first + kTile - 1)) {
    sorted_tiles = (sorted.end - sorted.begin + kTile - 1) / kTile;
    tiles = sorted_tiles + (local.end - local.begin + kTile - 1) / kTile;
  }
  __device__ __forceinline__ List list(int j) const {
    return j < sorted_tiles ? List::kSorted : List::kLocal;
  }
  __device__ __forceinline__ int start(int j) const {
    return j < sorted_tiles ? sorted.begin + j * kTile : local.begin + (j - sorted_tiles) * kTile;
  }
};

// The keys and values of one head, in both lists.
template <class E>
struct KeySource {
  using T = typename E::T;
  const T *key, *value, *sorted_key, *sorted_value;
  int64_t key_stride, value_stride;
  int width, length, positions;
  const uint8_t* real;

  __device__ __forceinline__ KeySource(const AttentionCall& p, const Plan& plan, int batch,
                                       int head, const uint8_t* mask)
      : key_stride(p.key.token),
        value_stride(p.value.token),
        width(p.width),
        length(plan.length),
        positions(p.rows * p.block),
        real(mask) {
    const int key_head = head / (p.heads / p.key_heads);
    const int64_t at = (static_cast<int64_t>(batch) * p.heads + head) * positions * p.width;
    key = head_of<const T>(p.key, p.sequences, batch, key_head);
    value = head_of<const T>(p.value, p.sequences, batch, key_head);
    sorted_key = static_cast<const T*>(p.sorted_key) + at;
    sorted_value = static_cast<const T*>(p.sorted_value) + at;
  }
  __device__ __forceinline__ int limit(List list) const {
    return list == List::kSorted ? positions : length;
  }
  // 64 positions of a list into a pair of tiles.
  __device__ __forceinline__ void load(T* keys, T* values, List list, int first) const {
    if (list == List::kSorted) {
      load_rows<E>(keys, sorted_key, width, first, positions, width, nullptr);
      load_rows<E>(values, sorted_value, width, first, positions, width, nullptr);
    } else {
      load_rows<E>(keys, key, key_stride, first, length, width, real);
      load_rows<E>(values, value, value_stride, first, length, width, real);
    }
  }
};

}  // namespace sinkhorn::cuda
