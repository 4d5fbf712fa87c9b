// Backward where a group of kTiles * 64 tokens sees only itself and the positions sorted into it:
// one CTA has the queries, their dO and every key they see, so each tensor is read and written
// once. attention_bwd.cuh has the equations.
#pragma once

#include "kernels/cuda/attention_bwd.cuh"

namespace sinkhorn::cuda {

// With one tile of queries scores take the place of the values, which are not needed again, and dv
// follows dk in the same registers: both then last for more CTAs.
template <class E, int kTiles>
constexpr bool kScoresOverValues = kTiles == 1 && E::kElements >= E::kScoreElements;

template <class E, int kTiles>
constexpr int attention_bwd_together_shared() {
  return ((2 * kTiles + 4) * E::kElements +
          (kScoresOverValues<E, kTiles> ? 0 : E::kScoreElements)) *
             2 +
         kTiles * static_cast<int>(sizeof(QueryFacts));
}

// 16 rows of dk or dv of a list, where they belong.
template <class E>
__device__ __forceinline__ void store_key_rows(const AttentionCall& p, typename E::T* tile,
                                               const float (&x)[E::kWidth / 8][4], float factor,
                                               bool is_key, bool is_sorted, int row, int lane,
                                               int batch, int head, int first, int limit) {
  using T = typename E::T;
  const Tokens& local = is_key ? p.grad_key : p.grad_value;
  T* to;
  if (is_sorted) {
    const int64_t at = (static_cast<int64_t>(batch) * p.heads + head) * limit * p.width;
    to = static_cast<T*>(is_key ? p.grad_sorted_key : p.grad_sorted_value) + at;
  } else {
    to = head_of<T>(local, p.sequences, batch, head);
  }
  store_rows<E, E::kWidth>(tile, x, factor, factor, row, lane, to,
                           is_sorted ? p.width : local.token, first, limit, p.width);
}

template <class E, int kTiles>
struct Sums {
  float dk[E::kWidth / 8][4] = {}, dv[E::kWidth / 8][4] = {};
};
template <class E>
struct Sums<E, 1> {};

// kPlain: no mask, no weights, no dropout.
template <class E, int kTiles, bool kPlain>
__global__ void __launch_bounds__(kThreads, kTiles == 1 ? 3 : 2)
    attention_bwd_together_kernel(const __grid_constant__ AttentionCall p, const Dropout dropout) {
  using T = typename E::T;
  constexpr int kWidth = E::kWidth;
  extern __shared__ __align__(1024) unsigned char shared[];
  T* const q_tiles = reinterpret_cast<T*>(shared);
  T* const g_tiles = q_tiles + kTiles * E::kElements;
  T* const kv_tiles = g_tiles + kTiles * E::kElements;  // [stage][key, value]
  T* const scores = kv_tiles + 4 * E::kElements;        // [key][query], of several tiles of queries
  QueryFacts* const facts = reinterpret_cast<QueryFacts*>(
      scores + (kScoresOverValues<E, kTiles> ? 0 : E::kScoreElements));

  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16;
  const int first = blockIdx.x * kTiles * kTile, head = blockIdx.y, batch = blockIdx.z;
  const Plan plan(p, batch);
  if (first >= plan.length) return;
  const int64_t flat_head = static_cast<int64_t>(batch) * p.heads + head;
  const Weights weighing(p, batch, head);
  const uint8_t* const real = kPlain ? nullptr : weighing.real;
  const KeySource<E> source(p, plan, batch, head, real);

  // Key tiles: those sorted into the group, then its own. A last block may be short: its sorted
  // positions go on where its tokens end.
  const int sorted_tiles = p.rows > 0 ? kTiles : 0, tiles = sorted_tiles + kTiles;
  const auto load = [&](int j) {
    if (j < tiles) {
      T* const k = kv_tiles + j % 2 * 2 * E::kElements;
      source.load(k, k + E::kElements, j < sorted_tiles ? List::kSorted : List::kLocal,
                  first + j % kTiles * kTile);
    }
    commit_copies();
  };
  const T* const grad = head_of<const T>(p.grad_out, p.sequences, batch, head);
  const T* const out = head_of<const T>(p.out, p.sequences, batch, head);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    load_rows<E>(q_tiles + i * E::kElements, head_of<const T>(p.query, p.sequences, batch, head),
                 p.query.token, first + i * kTile, plan.queries, p.width, real);
    load_rows<E>(g_tiles + i * E::kElements, grad, p.grad_out.token, first + i * kTile,
                 plan.queries, p.width, real);
  }
  load(0);
  load(1);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    if (threadIdx.x < kTile) {
      facts[i].log_sum[threadIdx.x] = log_sum_of<T>(plan, real, stats_of<T>(p, flat_head),
                                                    p.queries, first + i * kTile + threadIdx.x);
    }
    load_deltas<T, kWidth>(facts[i].delta, p, plan, real, out, grad, first + i * kTile);
  }

  float dq[kTiles][kWidth / 8][4] = {};
#pragma unroll 1
  for (int j = 0; j < tiles; ++j) {
    const List list = j < sorted_tiles ? List::kSorted : List::kLocal;
    const bool is_sorted = list == List::kSorted;
    const int at = first + j % kTiles * kTile, limit = source.limit(list);
    T* const k = kv_tiles + j % 2 * 2 * E::kElements;
    T* const v = k + E::kElements;
    KeyLane keys = kPlain ? KeyLane{at + row + lane / 4, false, {1.0f, 1.0f}}
                          : key_lane(weighing, list, at + row, limit, lane);
    T* const ds_tile = kScoresOverValues<E, kTiles> ? v : scores;
    Sums<E, kTiles> sums;  // dk and dv over several tiles of queries
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const bool sees_all = set_seen(facts[i], plan, list, first + i * kTile, at);
      wait_copies<1>();
      E::publish();
      const bool all_seen = __syncthreads_and(sees_all) != 0;
      const T* const q = q_tiles + i * E::kElements;
      const T* const g = g_tiles + i * E::kElements;
      float s[8][4], dp[8][4];
      E::begin();
      E::scores(s, k, q, row, lane);
      E::scores(dp, v, g, row, lane);
      E::end();
      E::settle(s);
      E::settle(dp);
      turn_scores<kPlain>(s, dp, keys, facts[i], all_seen, p.scale, dropout,
                          draw_stream(p, flat_head, list), first + i * kTile, lane);
      Packed share, change;
      pack_left<T>(share, s);
      pack_left<T>(change, dp);
      if constexpr (kTiles == 1) __syncthreads();  // the values have been read
#pragma unroll
      for (int step = 0; step < 4; ++step) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int r = row + lane / 4 + e % 2 * 8, c = step * 16 + e / 2 * 8 + lane % 4 * 2;
          *reinterpret_cast<uint32_t*>(ds_tile + E::score_at(r, c)) = change[step][e];
        }
      }
      E::publish();
      __syncthreads();
      if constexpr (kTiles == 1) {
        {
          float dk[kWidth / 8][4] = {};
          E::settle(dk);
          E::settle(dq[i]);
          E::begin();
          E::template gather<kWidth>(dk, change, q, 0, lane);
          E::gather_t(dq[i], ds_tile, k, row, lane);
          E::end();
          E::settle(dk);
          E::settle(dq[i]);
          __syncthreads();  // scores, facts and keys have been read
          store_key_rows<E>(p, k, dk, p.scale, true, is_sorted, row, lane, batch, head, at, limit);
        }
        float dv[kWidth / 8][4] = {};
        E::settle(dv);
        E::begin();
        E::template gather<kWidth>(dv, share, g, 0, lane);
        E::end();
        E::settle(dv);
        store_key_rows<E>(p, v, dv, 1.0f, false, is_sorted, row, lane, batch, head, at, limit);
      } else {
        E::settle(sums.dk);
        E::settle(sums.dv);
        E::settle(dq[i]);
        E::begin();
        E::template gather<kWidth>(sums.dk, change, q, 0, lane);
        E::template gather<kWidth>(sums.dv, share, g, 0, lane);
        E::gather_t(dq[i], ds_tile, k, row, lane);
        E::end();
        E::settle(sums.dk);
        E::settle(sums.dv);
        E::settle(dq[i]);
        __syncthreads();
      }
    }
    if constexpr (kTiles > 1) {
      store_key_rows<E>(p, k, sums.dk, p.scale, true, is_sorted, row, lane, batch, head, at, limit);
      store_key_rows<E>(p, v, sums.dv, 1.0f, false, is_sorted, row, lane, batch, head, at, limit);
    }
    if (!kPlain && p.grad_weight != nullptr && is_sorted) {
      store_weight_gradients(p.grad_weight + flat_head * limit, keys, limit, lane);
    }
    if constexpr (kTiles == 1) {
      commit_copies();  // both of its tiles are there or under way
    } else {
      __syncthreads();
      load(j + 2);
    }
  }
  __syncthreads();  // the last product with dO or queries is done
  T* const to_q = head_of<T>(p.grad_query, p.sequences, batch, head);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    store_rows<E, kWidth>(q_tiles + i * E::kElements, dq[i], p.scale, p.scale, row, lane, to_q,
                          p.grad_query.token, first + i * kTile, plan.queries, p.width);
  }
}

}  // namespace sinkhorn::cuda
