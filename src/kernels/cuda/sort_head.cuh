// The sides of a product of the sort: R as far as it is allowed, and blocks as tokens lie.
#pragma once

#include "kernels/cuda/sort.h"
#include "kernels/cuda/tile.cuh"

namespace sinkhorn::cuda {

// The causal rule, and both blocks live. live: this sequence's [N], or null.
__device__ __forceinline__ bool allowed(const AttentionCall& p, const uint8_t* live, int i, int j) {
  if (p.causal == Causal::kStrict && j >= i - p.window) return false;
  if (p.causal == Causal::kInclusive && j > i) return false;
  return live == nullptr || (live[i] != 0 && live[j] != 0);
}
__device__ __forceinline__ const uint8_t* live_of(const AttentionCall& p, int64_t flat_head) {
  return p.live == nullptr ? nullptr : p.live + flat_head / p.heads * p.blocks;
}
// R[i, j] as it was passed.
__device__ __forceinline__ float sort_at(const AttentionCall& p, int64_t flat_head, int i, int j) {
  const int64_t at = (flat_head * p.blocks + i) * p.blocks + j;
  switch (p.sort_type) {
    case Type::kBFloat16: return to_float(static_cast<const __nv_bfloat16*>(p.sort)[at]);
    case Type::kFloat16: return to_float(static_cast<const __half*>(p.sort)[at]);
    default: return static_cast<const float*>(p.sort)[at];
  }
}

// The sides of a product of the sort. side: 0 keys, 1 values.
template <class T>
struct SortHead {
  const AttentionCall& p;
  int batch, head, key_head;
  int64_t flat_head;
  const uint8_t* real;

  __device__ __forceinline__ SortHead(const AttentionCall& call, int flat)
      : p(call),
        batch(flat / call.heads),
        head(flat % call.heads),
        key_head(head / (call.heads / call.key_heads)),
        flat_head(flat),
        real(call.real == nullptr ? nullptr
                                  : call.real + static_cast<int64_t>(batch) * call.length) {}

  __device__ __forceinline__ int columns() const { return p.block * p.width; }
  // x[j, c ..]; null where there is no real token.
  __device__ __forceinline__ const T* token(int side, int j, int c) const {
    const int t = j * p.block + c / p.width;
    if (j >= p.blocks || c >= columns() || t >= p.length || (real != nullptr && real[t] == 0)) {
      return nullptr;
    }
    const Tokens& x = side == 0 ? p.key : p.value;
    return head_of<const T>(x, p.sequences, batch, key_head) + t * x.token + c % p.width;
  }
  // x'[i, c ..] of the given sorted buffer; null beyond it.
  __device__ __forceinline__ int64_t sorted(int i, int c) const {
    if (i >= p.rows || c >= columns()) return -1;
    return (flat_head * p.rows + i) * columns() + c;
  }
  __device__ __forceinline__ const T* selected(const void* from) const {
    return static_cast<const T*>(from) + flat_head * p.rows * selected_pitch(p.blocks);
  }
  // Sources that row i may read: j below this.
  __device__ __forceinline__ int reach(int i) const {
    if (p.causal == Causal::kStrict) return max(0, min(p.blocks, i - p.window));
    return p.causal == Causal::kInclusive ? min(p.blocks, i + 1) : p.blocks;
  }
  // The first destination that may read source j.
  __device__ __forceinline__ int first_reader(int j) const {
    if (p.causal == Causal::kStrict) return j + p.window + 1;
    return p.causal == Causal::kInclusive ? j : 0;
  }
};

// One number again, over the sources it reads and no other.
template <class T, bool kUndo>
__device__ __noinline__ float sum_exactly(const SortHead<T>& h, const T* sorted, int side, int r,
                                          int c) {
  const int depth = kUndo ? h.p.rows : h.p.blocks;
  const uint8_t* const live = live_of(h.p, h.flat_head);
  float total = 0.0f;
  for (int k = 0; k < depth; ++k) {
    const int i = kUndo ? k : r, j = kUndo ? r : k;
    if (!allowed(h.p, live, i, j)) continue;
    const float weight = to_float(from_float<T>(sort_at(h.p, h.flat_head, i, j)));
    if constexpr (kUndo) {
      total += weight * to_float(sorted[h.sorted(k, c)]);
    } else {
      const T* const x = h.token(side, k, c);
      if (x != nullptr) total += weight * to_float(*x);
    }
  }
  return total;
}

}  // namespace sinkhorn::cuda
