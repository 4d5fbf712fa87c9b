// Forward: queries against the sorted positions of their block and the tokens around them, in one
// pass over tiles with a running softmax; scores never leave the registers.
//
//   score(t, s) = scale * q[t].k[s]            over the positions s that query t sees
//   out[t] = sum_s weight[s] e^(score - m) v[s] / sum_s weight[s] e^(score - m)
//
// Mapping: a CTA of 4 warps takes 64 queries of a head, a warp 16 of them with all their keys. Key
// and value tiles of 64 positions pass through two buffers, the next one loading while one is used.
// The products are those of an engine (engine.cuh).
// Kept for backward: the log-sum of each query's softmax (softmax_stats.cuh).
#pragma once

#include <algorithm>

#include "kernels/cuda/attention_row.cuh"
#include "kernels/cuda/key_source.cuh"

namespace sinkhorn::cuda {

template <class E>
constexpr int attention_fwd_shared() {  // bytes: queries, two pairs of keys and values, weights
  return 5 * E::kElements * static_cast<int>(sizeof(typename E::T)) +
         2 * kTile * static_cast<int>(sizeof(float));
}
// CTAs a multiprocessor that their tiles leave room for, or their registers.
template <class E>
constexpr int kFwdCtas = std::clamp(220 * 1024 / attention_fwd_shared<E>(), 1, 4);

// The running softmax of the two rows a lane holds, and what was gathered under it.
template <int kWidth>
struct RunningSoftmax {
  float largest[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.0f, 0.0f};
  float out[kWidth / 8][4] = {};

  // Exponentials of a tile of scores in place, masked ones -inf, still without the scale (which is
  // not negative); the sum is this lane's own share.
  __device__ __forceinline__ void merge(float (&s)[8][4], float scale, const float* weight,
                                        int lane) {
    bool shrinks = false;
    float shrink[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = -INFINITY;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        top = fmaxf(top, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
      }
      top = quad_max(top);
      top = fmaxf(largest[half], top == -INFINITY ? top : top * scale);
      const float base = top == -INFINITY ? 0.0f : top;
      shrink[half] = largest[half] == -INFINITY ? 1.0f : power_of_2(largest[half] - base);
      shrinks |= shrink[half] != 1.0f;
      largest[half] = top;
      float total = 0.0f;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float x = power_of_2(s[n][2 * half + e] * scale - base);
          if (weight != nullptr) x *= fmaxf(weight[n * 8 + lane % 4 * 2 + e], 0.0f);
          s[n][2 * half + e] = x;
          total += x;
        }
      }
      sum[half] = sum[half] * shrink[half] + total;
    }
    if (!__any_sync(0xFFFFFFFFu, shrinks)) return;
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) out[n][c] *= shrink[c / 2];
    }
  }
  __device__ __forceinline__ void finish() {  // sums of all four lanes
    sum[0] = quad_sum(sum[0]);
    sum[1] = quad_sum(sum[1]);
  }
  __device__ __forceinline__ float inverse(int half) const {
    return sum[half] == 0.0f ? 0.0f : 1.0f / sum[half];
  }
};

// Scores outside the rows' intervals, or of positions without weight, become -inf.
__device__ __forceinline__ void hide(float (&s)[8][4], const Interval (&seen)[2], int first,
                                     const float* weight, int lane) {
  const int column = first + lane % 4 * 2;
  if (weight == nullptr) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int at = column + n * 8 + c % 2;
        if (at < seen[c / 2].begin || at >= seen[c / 2].end) s[n][c] = -INFINITY;
      }
    }
    return;
  }
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int at = column + n * 8 + e;
      const bool weighs = weight[at - first] > 0.0f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool visible = at >= seen[half].begin && at < seen[half].end && weighs;
        if (!visible) s[n][2 * half + e] = -INFINITY;
      }
    }
  }
}

// Scores of a warp's 16 queries, from `row` of their tile on, against a tile of keys; turned where
// the scale is negative, whose size softmaxes are told.
template <class E>
__device__ __forceinline__ void score_tile(float (&s)[8][4], const typename E::T* query,
                                           const typename E::T* key, int row, bool negative,
                                           int lane) {
  E::begin();
  E::scores(s, query, key, row, lane);
  E::end();
  E::settle(s);
  if (negative) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) s[n][c] = -s[n][c];
    }
  }
}

// Adds what a tile of values gives by the weights s.
template <class E>
__device__ __forceinline__ void gather_tile(float (&out)[E::kWidth / 8][4], const float (&s)[8][4],
                                            const typename E::T* value, int lane) {
  PackedAs<typename E::T> share;
  pack_left<typename E::T>(share, s);
  E::settle(out);
  E::begin();
  E::template gather<E::kWidth>(out, share, value, 0, lane);
  E::end();
  E::settle(out);
}

// Dropped weights of a tile become 0; the others stay, and the output is scaled at the end.
__device__ __forceinline__ void drop(float (&s)[8][4], const DropoutState& state,
                                     uint32_t threshold, uint32_t head, int query, int first,
                                     int lane) {
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    const uint4 bits = state.draw(head, query, first + n * 8 + lane % 4 * 2);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (dropout_bits(bits, c >= 2, k == 1, c % 2 == 1) < threshold) s[n + k][c] = 0.0f;
      }
    }
  }
}

template <class E>
__global__ void __launch_bounds__(kThreads, kFwdCtas<E>)
    attention_fwd_kernel(const __grid_constant__ AttentionCall p, const Dropout dropout) {
  using T = typename E::T;
  constexpr int kWidth = E::kWidth;
  extern __shared__ __align__(1024) unsigned char shared[];
  T* const q_tile = reinterpret_cast<T*>(shared);
  T* const kv_tiles = q_tile + E::kElements;  // [stage][key, value]
  float* const weights = reinterpret_cast<float*>(kv_tiles + 4 * E::kElements);  // [stage][64]

  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16;
  const int first = blockIdx.x * kTile, head = blockIdx.y, batch = blockIdx.z;
  const Plan plan(p, batch);
  if (first >= plan.queries) return;
  const int64_t flat_head = static_cast<int64_t>(batch) * p.heads + head;
  Weights weighing(p, batch, head);
  const uint8_t* const real = weighing.real;
  const KeySource<E> source(p, plan, batch, head, real);
  const TileList list_of(plan, first);

  const auto load = [&](int j) {
    if (j < list_of.tiles) {
      const List list = list_of.list(j);
      T* const k = kv_tiles + j % 2 * 2 * E::kElements;
      source.load(k, k + E::kElements, list, list_of.start(j));
      if (weighing.needed(list) && threadIdx.x < kTile) {
        weights[j % 2 * kTile + threadIdx.x] =
            weighing.at(list, list_of.start(j) + threadIdx.x, source.limit(list));
      }
    }
    commit_copies();
  };
  load_rows<E>(q_tile, head_of<const T>(p.query, p.sequences, batch, head), p.query.token, first,
               plan.queries, p.width, p.sortcut ? nullptr : real);
  weighing.look_at_rows(p.rows);
  load(0);
  load(1);

  const int low = first + row + lane / 4;  // this lane's queries: low and low + 8
  bool asks[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int t = low + 8 * half;
    asks[half] = t < plan.queries && (p.sortcut || real == nullptr || real[t] != 0);
  }
  const float scale = fabsf(p.scale) * 1.4426950408889634f;
  const bool separate = p.combine == Combine::kOutputs && p.rows > 0;
  RunningSoftmax<kWidth> softmax;

  // Writes the statistics of softmax number `term`; the factors for out.
  const auto finish = [&](int term, float(&factor)[2]) {
    softmax.finish();
    float* const stats = stats_of<T>(p, flat_head * (separate ? 2 : 1) + term);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      factor[half] = softmax.inverse(half) * dropout.kept;
      const int t = low + 8 * half;
      if (lane % 4 == 0 && t < plan.queries) {
        store_log_sum<T>(stats, p.queries, t, softmax.largest[half], softmax.sum[half]);
      }
    }
  };
  float* const aside = p.sorted_out + flat_head * p.queries * p.width;
  // f(value, where it is put aside) of every number of this lane.
  const auto for_aside = [&](auto f) {
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int t = low + c / 2 * 8, d = n * 8 + lane % 4 * 2 + c % 2;
        const bool there = t < plan.queries && d < p.width;
        f(softmax.out[n][c], c / 2,
          there ? aside + static_cast<int64_t>(t) * p.width + d : nullptr);
      }
    }
  };

  for (int j = 0; j < list_of.tiles; ++j) {
    const List list = list_of.list(j);
    const int at = list_of.start(j);
    wait_copies<1>();
    E::publish();
    __syncthreads();
    if (separate && j == list_of.sorted_tiles) {
      // The sorted term stands alone: put aside what it gathered, and begin anew.
      float factor[2];
      finish(0, factor);
      for_aside([&](float x, int half, float* to) {
        if (to != nullptr) *to = x * factor[half];
      });
      softmax = RunningSoftmax<kWidth>();
    }
    Interval seen[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      seen[half] = asks[half] ? plan.seen(list, low + 8 * half) : Interval{0, 0};
    }
    const auto any = [&](const Interval& i) {
      return i.begin < i.end && i.begin < at + kTile && i.end > at;
    };
    const auto all = [&](const Interval& i) { return i.begin <= at && i.end >= at + kTile; };
    if (!E::kWarpsAlone || __any_sync(0xFFFFFFFFu, any(seen[0]) || any(seen[1]))) {
      const T* const k = kv_tiles + j % 2 * 2 * E::kElements;
      const float* const weight = weighing.needed(list) ? weights + j % 2 * kTile : nullptr;
      float s[8][4];
      score_tile<E>(s, q_tile, k, row, p.scale < 0.0f, lane);
      const bool plain = __all_sync(0xFFFFFFFFu, all(seen[0]) && all(seen[1])) && weight == nullptr;
      if (!plain) hide(s, seen, at, weight, lane);
      softmax.merge(s, scale, weight, lane);
      if (dropout.threshold != 0) {
        drop(s, DropoutState(dropout.rng), dropout.threshold, draw_stream(p, flat_head, list), low,
             at, lane);
      }
      gather_tile<E>(softmax.out, s, k + E::kElements, lane);
    }
    __syncthreads();
    load(j + 2);
  }

  float factor[2];
  finish(separate ? 1 : 0, factor);
  wait_copies<0>();
  __syncthreads();
  if (separate) {
    for_aside([&](float& x, int half, const float* from) {
      x = x * factor[half] + (from == nullptr ? 0.0f : *from);
    });
    factor[0] = factor[1] = 1.0f;
  }
  if (__any_sync(0xFFFFFFFFu, !asks[0] || !asks[1])) {  // what does not ask gets 0, not 0 times NaN
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) softmax.out[n][c] = asks[c / 2] ? softmax.out[n][c] : 0.0f;
    }
  }
  store_rows<E, kWidth>(q_tile, softmax.out, factor[0], factor[1], row, lane,
                        head_of<T>(p.out, p.sequences, batch, head), p.out.token, first,
                        plan.queries, p.width);

  redo_rows<T, kWidth / 8>(p, dropout, softmax.out, batch, head, first + row, asks, lane);
}

}  // namespace sinkhorn::cuda
