// One query again, position by position: for rows whose result is not finite, and for those into
// whose block a row of zeros is sorted. A product carries NaN and inf, times a weight of 0, to
// queries that do not see them; here only what is seen is read. Neither is common, so that kernels
// do their work as if there were none, and look for them in passing.
#pragma once

#include "kernels/cuda/philox.cuh"
#include "kernels/cuda/softmax_stats.cuh"
#include "kernels/cuda/tile.cuh"

namespace sinkhorn::cuda {

// Whether the softmax weight of query t at position s is dropped.
__device__ __forceinline__ bool dropped(const Dropout& dropout, uint32_t head, int t, int s) {
  if (dropout.threshold == 0) return false;
  const uint4 bits = DropoutState(dropout.rng).draw(head, t, s);
  return dropout_bits(bits, (t & 8) != 0, (s & 8) != 0, (s & 1) != 0) < dropout.threshold;
}

// Each list draws its own dropout; without a sort there is but one.
__device__ __forceinline__ uint32_t draw_stream(const AttentionCall& p, int64_t flat_head,
                                                List list) {
  return static_cast<uint32_t>(flat_head) * 2 + (list == List::kSorted || p.rows == 0 ? 0 : 1);
}

// By one warp; writes out, statistics and, with combine = outputs, the sorted term of query t.
template <class T>
__device__ __noinline__ void attention_row(const AttentionCall& p, const Dropout& dropout,
                                           int batch, int head, int t, int lane) {
  constexpr int kShare = kMaxWidth / 32;
  const Plan plan(p, batch);
  const int64_t flat_head = static_cast<int64_t>(batch) * p.heads + head;
  const int key_head = head / (p.heads / p.key_heads);
  const Weights weights(p, batch, head);
  const T* const query = head_of<const T>(p.query, p.sequences, batch, head) + t * p.query.token;
  const bool separate = p.combine == Combine::kOutputs && p.rows > 0;
  const int terms = separate ? 2 : 1;
  const int64_t sorted_at = flat_head * p.rows * p.block * p.width;
  float q[kShare], out[kShare] = {};
  for (int i = 0; i < kShare; ++i)
    q[i] = lane + 32 * i < p.width ? to_float(query[lane + 32 * i]) : 0.0f;

  for (int term = 0; term < terms; ++term) {
    float largest = -INFINITY, sum = 0.0f, gathered[kShare] = {};
    const bool sees_row = sees_sorted_row(p, flat_head, t);
    for (int pass = 0; pass < 2; ++pass) {
      for (int l = 0; l < 2; ++l) {
        if (separate && l != term) continue;
        const List list = l == 0 ? List::kSorted : List::kLocal;
        const bool is_sorted = list == List::kSorted;
        if (is_sorted && !sees_row) continue;
        const Interval seen = plan.seen(list, t);
        const int limit = is_sorted ? p.rows * p.block : plan.length;
        const T* const keys = is_sorted ? static_cast<const T*>(p.sorted_key) + sorted_at
                                        : head_of<const T>(p.key, p.sequences, batch, key_head);
        const T* const values = is_sorted ? static_cast<const T*>(p.sorted_value) + sorted_at
                                          : head_of<const T>(p.value, p.sequences, batch, key_head);
        for (int s = seen.begin; s < seen.end; ++s) {
          const float weight = weights.needed(list) ? weights.at(list, s, limit) : 1.0f;
          if (weight <= 0.0f) continue;
          const T* const key = keys + s * (is_sorted ? p.width : p.key.token);
          float score = 0.0f;
          for (int i = 0; i < kShare; ++i) {
            if (lane + 32 * i < p.width) score += q[i] * to_float(key[lane + 32 * i]);
          }
          for (int step = 16; step > 0; step /= 2)
            score += __shfl_xor_sync(0xFFFFFFFFu, score, step);
          score *= p.scale * 1.4426950408889634f;
          if (pass == 0) {
            largest = fmaxf(largest, score);
            continue;
          }
          float share = weight * power_of_2(score - (largest == -INFINITY ? 0.0f : largest));
          sum += share;
          if (dropped(dropout, draw_stream(p, flat_head, list), t, s)) continue;
          const T* const value = values + s * (is_sorted ? p.width : p.value.token);
          for (int i = 0; i < kShare; ++i) {
            if (lane + 32 * i < p.width) gathered[i] += share * to_float(value[lane + 32 * i]);
          }
        }
      }
    }
    const float factor = sum == 0.0f ? 0.0f : dropout.kept / sum;
    for (int i = 0; i < kShare; ++i) {
      out[i] += gathered[i] * factor;
      if (separate && term == 0 && lane + 32 * i < p.width) {
        p.sorted_out[(flat_head * p.queries + t) * p.width + lane + 32 * i] = gathered[i] * factor;
      }
    }
    if (lane == 0) {
      store_log_sum<T>(stats_of<T>(p, flat_head * terms + term), p.queries, t, largest, sum,
                       sees_row);
    }
  }
  T* const to = head_of<T>(p.out, p.sequences, batch, head) + t * p.out.token;
  for (int i = 0; i < kShare; ++i) {
    if (lane + 32 * i < p.width) to[lane + 32 * i] = from_float<T>(out[i]);
  }
}

// Those of a warp's 16 queries, from `first` on, that need it. asks: whether this lane's two are
// there.
template <class T, int kTiles>
__device__ __forceinline__ void redo_rows(const AttentionCall& p, const Dropout& dropout,
                                          const float (&out)[kTiles][4], int batch, int head,
                                          int first, const bool (&asks)[2], int lane) {
  const int64_t flat_head = static_cast<int64_t>(batch) * p.heads + head;
  bool right[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    right[half] = sees_sorted_row(p, flat_head, first + lane / 4 + 8 * half);
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) right[c / 2] &= fabsf(out[n][c]) < INFINITY;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unsigned bad = __ballot_sync(0xFFFFFFFFu, asks[half] && !right[half]);
    for (int r = 0; bad != 0 && r < 8; ++r) {
      if ((bad >> (4 * r) & 0xFu) != 0) {
        attention_row<T>(p, dropout, batch, head, first + r + 8 * half, lane);
      }
    }
  }
}

// The same of 16 queries that have been stored, by a warp that saw one. A kernel that keeps its
// registers full does this at its end. In sortcut `lacks` says of all queries that they do.
template <class T>
__device__ __forceinline__ void redo_stored_rows(const AttentionCall& p, int batch, int head,
                                                 int first, int lane, bool lacks = false) {
  const int64_t flat_head = static_cast<int64_t>(batch) * p.heads + head;
  const T* const out = head_of<const T>(p.out, p.sequences, batch, head);
  for (int t = first; t < min(first + 16, p.queries); ++t) {
    bool right = !lacks && sees_sorted_row(p, flat_head, t);
    for (int d = lane; d < p.width; d += 32) {
      right &= fabsf(to_float(out[t * p.out.token + d])) < INFINITY;
    }
    if (!__all_sync(0xFFFFFFFFu, right)) attention_row<T>(p, Dropout{}, batch, head, t, lane);
  }
}

}  // namespace sinkhorn::cuda
