// Backward in two kernels: dq for 64 queries, and dk, dv (or those of sorted positions) for 64
// keys. attention_bwd.cuh has the equations.
#pragma once

#include <algorithm>

#include "kernels/cuda/attention_bwd.cuh"

namespace sinkhorn::cuda {

template <class E>
constexpr int
attention_bwd_queries_shared() {  // queries, dO, two pairs of keys and values, weights
  return 6 * E::kElements * static_cast<int>(sizeof(typename E::T)) +
         3 * kTile * static_cast<int>(sizeof(float));
}
template <class E>
constexpr int attention_bwd_keys_shared() {  // keys, values, two pairs of queries and dO, facts
  return 6 * E::kElements * static_cast<int>(sizeof(typename E::T)) +
         2 * static_cast<int>(sizeof(QueryFacts));
}
// CTAs a multiprocessor that their tiles leave room for, or their registers.
template <class E>
constexpr int kPartsCtas = E::kWidth > 64
                               ? 1
                               : std::min(220 * 1024 / attention_bwd_keys_shared<E>(), 3);

// combine = outputs: delta[t] = dO[t].O[t] of each softmax by itself. A warp a query.
template <class T>
__global__ void __launch_bounds__(256)
    attention_delta_kernel(const __grid_constant__ AttentionCall p) {
  const int lane = threadIdx.x % 32, t = blockIdx.x * 8 + threadIdx.x / 32;
  const int head = blockIdx.y, batch = blockIdx.z;
  const Plan plan(p, batch);
  if (t >= plan.queries) return;
  const int64_t flat_head = static_cast<int64_t>(batch) * p.heads + head;
  const T* const out = head_of<const T>(p.out, p.sequences, batch, head) + t * p.out.token;
  const T* const grad =
      head_of<const T>(p.grad_out, p.sequences, batch, head) + t * p.grad_out.token;
  const float* const aside = p.sorted_out + (flat_head * p.queries + t) * p.width;
  float all = 0.0f, sorted = 0.0f;
  if (p.real == nullptr || p.real[static_cast<int64_t>(batch) * p.length + t] != 0) {
    for (int d = lane; d < p.width; d += 32) {
      all += to_float(grad[d]) * to_float(out[d]);
      sorted += to_float(grad[d]) * aside[d];
    }
  }
  for (int step = 16; step > 0; step /= 2) {
    all += __shfl_xor_sync(0xFFFFFFFFu, all, step);
    sorted += __shfl_xor_sync(0xFFFFFFFFu, sorted, step);
  }
  if (lane == 0) {
    float* const to = p.delta + flat_head * 2 * p.queries;
    to[t] = sorted;
    to[p.queries + t] = all - sorted;
  }
}

template <class E>
__global__ void __launch_bounds__(kThreads, kPartsCtas<E>)
    attention_bwd_queries_kernel(const __grid_constant__ AttentionCall p, const Dropout dropout) {
  using T = typename E::T;
  constexpr int kWidth = E::kWidth;
  extern __shared__ __align__(1024) unsigned char shared[];
  T* const q_tile = reinterpret_cast<T*>(shared);
  T* const g_tile = q_tile + E::kElements;
  T* const kv_tiles = g_tile + E::kElements;  // [stage][key, value]
  float* const weights = reinterpret_cast<float*>(kv_tiles + 4 * E::kElements);  // [stage][64]
  float* const deltas = weights + 2 * kTile;

  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16;
  const int first = blockIdx.x * kTile, head = blockIdx.y, batch = blockIdx.z;
  const Plan plan(p, batch);
  if (first >= plan.queries) return;
  const int64_t flat_head = static_cast<int64_t>(batch) * p.heads + head;
  Weights weighing(p, batch, head);
  const uint8_t* const real = weighing.real;
  const uint8_t* const asked = p.sortcut ? nullptr : real;
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
  const T* const grad = head_of<const T>(p.grad_out, p.sequences, batch, head);
  load_rows<E>(q_tile, head_of<const T>(p.query, p.sequences, batch, head), p.query.token, first,
               plan.queries, p.width, asked);
  load_rows<E>(g_tile, grad, p.grad_out.token, first, plan.queries, p.width, asked);
  weighing.look_at_rows(p.rows);
  load(0);
  load(1);

  const bool separate = p.combine == Combine::kOutputs && p.rows > 0;
  const int terms = separate ? 2 : 1;
  const int low = first + row + lane / 4;
  const bool drops = dropout.threshold != 0;
  const float scale = p.scale * kLog2E;
  float dq[kWidth / 8][4] = {};
  // Of this lane's two queries, for the softmax under way.
  float log_sum[2], delta[2];
  bool sorted_seen[2];
  const auto begin_term = [&](int term) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int t = low + 8 * half;
      const int64_t at = flat_head * terms + term;
      log_sum[half] = log_sum_of<T>(plan, asked, stats_of<T>(p, at), p.queries, t);
      sorted_seen[half] = t < plan.queries && sees_sorted<T>(stats_of<T>(p, at), p.queries, t);
      if (separate) delta[half] = t < plan.queries ? p.delta[at * p.queries + t] : 0.0f;
    }
  };
  begin_term(separate && list_of.sorted_tiles == 0 ? 1 : 0);
  if (!separate) {
    load_deltas<T, kWidth>(deltas, p, plan, asked,
                           head_of<const T>(p.out, p.sequences, batch, head), grad, first);
    __syncthreads();
    if (threadIdx.x < kTile && first + threadIdx.x < plan.queries) {
      p.delta[flat_head * p.queries + first + threadIdx.x] = deltas[threadIdx.x];
    }
    delta[0] = deltas[low - first];
    delta[1] = deltas[low + 8 - first];
  }

  for (int j = 0; j < list_of.tiles; ++j) {
    const List list = list_of.list(j);
    const int at = list_of.start(j);
    if (separate && j == list_of.sorted_tiles) begin_term(1);
    Interval seen[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool looks = log_sum[half] != INFINITY && (list == List::kLocal || sorted_seen[half]);
      seen[half] = looks ? plan.seen(list, low + 8 * half) : Interval{0, 0};
    }
    wait_copies<1>();
    E::publish();
    __syncthreads();
    const T* const k = kv_tiles + j % 2 * 2 * E::kElements;
    const float* const weight = weighing.needed(list) ? weights + j % 2 * kTile : nullptr;
    const auto any = [&](const Interval& i) {
      return i.begin < i.end && i.begin < at + kTile && i.end > at;
    };
    const auto all = [&](const Interval& i) { return i.begin <= at && i.end >= at + kTile; };
    if (!E::kWarpsAlone || __any_sync(0xFFFFFFFFu, any(seen[0]) || any(seen[1]))) {
      float s[8][4], dp[8][4];
      E::begin();
      E::scores(s, q_tile, k, row, lane);
      E::scores(dp, g_tile, k + E::kElements, row, lane);
      E::end();
      E::settle(s);
      E::settle(dp);
      const bool all_seen = __all_sync(0xFFFFFFFFu, all(seen[0]) && all(seen[1]));
      if (weight == nullptr && !drops) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const int half = c / 2, position = at + n * 8 + lane % 4 * 2 + c % 2;
            const float share = power_of_2(s[n][c] * scale - log_sum[half]);
            const bool visible =
                all_seen || (position >= seen[half].begin && position < seen[half].end);
            s[n][c] = visible ? share * (dp[n][c] - delta[half]) : 0.0f;
          }
        }
      } else {
        uint4 bits = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          if (drops && n % 2 == 0) {
            bits = DropoutState(dropout.rng)
                       .draw(draw_stream(p, flat_head, list), low, at + n * 8 + lane % 4 * 2);
          }
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const int half = c / 2, position = at + n * 8 + lane % 4 * 2 + c % 2;
            const float share = power_of_2(s[n][c] * scale - log_sum[half]);
            const float weighs = weight == nullptr ? 1.0f : weight[position - at];
            const bool counts =
                position >= seen[half].begin && position < seen[half].end && weighs > 0.0f;
            const bool gone =
                drops && dropout_bits(bits, half == 1, n % 2 == 1, c % 2 == 1) < dropout.threshold;
            const float passed = gone ? 0.0f : dp[n][c] * dropout.kept;
            s[n][c] = counts ? share * weighs * (passed - delta[half]) : 0.0f;
          }
        }
      }
      PackedAs<T> change;
      pack_left<T>(change, s);
      E::settle(dq);
      E::begin();
      E::template gather<kWidth>(dq, change, k, 0, lane);
      E::end();
      E::settle(dq);
    }
    __syncthreads();
    load(j + 2);
  }
  wait_copies<0>();
  __syncthreads();
  store_rows<E, kWidth>(q_tile, dq, p.scale, p.scale, row, lane,
                        head_of<T>(p.grad_query, p.sequences, batch, head), p.grad_query.token,
                        first, plan.queries, p.width);
}

// dk and dv of 64 positions of a list, columns kOut * part .. of them. With splits, each takes
// every splits-th tile of queries and leaves a partial sum in float32.
template <class E, int kOut>
__global__ void __launch_bounds__(kThreads, kPartsCtas<E>)
    attention_bwd_keys_kernel(const __grid_constant__ AttentionCall p, const Dropout dropout,
                              const List list) {
  using T = typename E::T;
  extern __shared__ __align__(1024) unsigned char shared[];
  T* const k_tile = reinterpret_cast<T*>(shared);
  T* const v_tile = k_tile + E::kElements;
  T* const qg_tiles = v_tile + E::kElements;  // [stage][query, dO]
  QueryFacts* const facts = reinterpret_cast<QueryFacts*>(qg_tiles + 4 * E::kElements);

  const bool is_sorted = list == List::kSorted;
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16;
  constexpr int kParts = E::kWidth / kOut;
  const int part = blockIdx.x % kParts, split = blockIdx.x / kParts % p.splits;
  const int first = blockIdx.x / kParts / p.splits * kTile;
  const int head = blockIdx.y, batch = blockIdx.z;
  const Plan plan(p, batch);
  Weights weighing(p, batch, head);
  const uint8_t* const real = weighing.real;
  const uint8_t* const asked = p.sortcut ? nullptr : real;
  const KeySource<E> source(p, plan, batch, head, real);
  const int limit = source.limit(list);
  if (first >= limit) return;
  const int64_t flat_head = static_cast<int64_t>(batch) * p.heads + head;
  const T* const query = head_of<const T>(p.query, p.sequences, batch, head);
  const T* const grad = head_of<const T>(p.grad_out, p.sequences, batch, head);
  const bool separate = p.combine == Combine::kOutputs && p.rows > 0;
  const int64_t term = flat_head * (separate ? 2 : 1) + (separate && !is_sorted ? 1 : 0);

  const Interval seers = plan.seers(list, first, min(first + kTile, limit) - 1);
  const int all_tiles =
      seers.end <= seers.begin ? 0 : (seers.end - seers.begin + kTile - 1) / kTile;
  const int tiles = (all_tiles - split + p.splits - 1) / p.splits;
  const auto start_of = [&](int j) { return seers.begin + (j * p.splits + split) * kTile; };
  bool sees_all[2] = {true, true};  // this thread's query of each of the two tiles
  const auto load = [&](int j) {
    if (j < tiles) {
      QueryFacts& known = facts[j % 2];
      bool looks = true;
      if (threadIdx.x < kTile) {
        const int t = start_of(j) + threadIdx.x;
        const float* const stats = stats_of<T>(p, term);
        known.log_sum[threadIdx.x] = log_sum_of<T>(plan, asked, stats, p.queries, t);
        known.delta[threadIdx.x] = t < plan.queries ? p.delta[term * p.queries + t] : 0.0f;
        looks = !is_sorted || t >= plan.queries || sees_sorted<T>(stats, p.queries, t);
      }
      sees_all[j % 2] =
          set_seen(known, plan, list, start_of(j), first, [&](float) { return looks; });
      T* const q = qg_tiles + j % 2 * 2 * E::kElements;
      load_rows<E>(q, query, p.query.token, start_of(j), plan.queries, p.width, asked);
      load_rows<E>(q + E::kElements, grad, p.grad_out.token, start_of(j), plan.queries, p.width,
                   asked);
    }
    commit_copies();
  };
  source.load(k_tile, v_tile, list, first);
  if (is_sorted) weighing.look_at_rows(p.rows);
  load(0);
  load(1);
  KeyLane keys = key_lane(weighing, list, first + row, limit, lane);
  float dk[kOut / 8][4] = {}, dv[kOut / 8][4] = {};

  for (int j = 0; j < tiles; ++j) {
    const int at = start_of(j);
    wait_copies<1>();
    E::publish();
    const bool all_seen = __syncthreads_and(sees_all[j % 2]) != 0;
    const T* const q = qg_tiles + j % 2 * 2 * E::kElements;
    const T* const g = q + E::kElements;
    float s[8][4], dp[8][4];
    E::begin();
    E::scores(s, k_tile, q, row, lane);
    E::scores(dp, v_tile, g, row, lane);
    E::end();
    E::settle(s);
    E::settle(dp);
    turn_scores<false>(s, dp, keys, facts[j % 2], all_seen, p.scale, dropout,
                       draw_stream(p, flat_head, list), at, lane);
    PackedAs<T> share, change;
    pack_left<T>(share, s);
    pack_left<T>(change, dp);
    E::settle(dv);
    E::settle(dk);
    E::begin();
    E::template gather<kOut>(dv, share, g, part * kOut, lane);
    E::template gather<kOut>(dk, change, q, part * kOut, lane);
    E::end();
    E::settle(dv);
    E::settle(dk);
    __syncthreads();
    load(j + 2);
  }
  wait_copies<0>();
  __syncthreads();

  if (p.splits > 1) {
    const int64_t size = static_cast<int64_t>(p.batch) * p.heads * limit * p.width;
    float* const to = p.partial + split * 2 * size + flat_head * limit * p.width;
#pragma unroll
    for (int n = 0; n < kOut / 8; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int at = first + row + lane / 4 + c / 2 * 8;
        const int d = part * kOut + n * 8 + lane % 4 * 2 + c % 2;
        if (at < limit && d < p.width) {
          to[static_cast<int64_t>(at) * p.width + d] = dk[n][c] * p.scale;
          to[size + static_cast<int64_t>(at) * p.width + d] = dv[n][c];
        }
      }
    }
  } else {
    const int64_t sorted_at = flat_head * limit * p.width;
    T* const to_k = is_sorted ? static_cast<T*>(p.grad_sorted_key) + sorted_at
                              : head_of<T>(p.grad_key, p.sequences, batch, head);
    T* const to_v = is_sorted ? static_cast<T*>(p.grad_sorted_value) + sorted_at
                              : head_of<T>(p.grad_value, p.sequences, batch, head);
    const int width = p.width - part * kOut;
    store_rows<E, kOut>(k_tile, dk, p.scale, p.scale, row, lane, to_k + part * kOut,
                        is_sorted ? p.width : p.grad_key.token, first, limit, width);
    store_rows<E, kOut>(v_tile, dv, 1.0f, 1.0f, row, lane, to_v + part * kOut,
                        is_sorted ? p.width : p.grad_value.token, first, limit, width);
  }
  if (p.grad_weight != nullptr && is_sorted && part == 0) {
    // With splits the gradients of weights are partial sums too, [splits, B, H, rows * b].
    const int64_t heads = static_cast<int64_t>(p.batch) * p.heads;
    store_weight_gradients(p.grad_weight + (split * heads + flat_head) * limit, keys, limit, lane);
  }
}

}  // namespace sinkhorn::cuda
