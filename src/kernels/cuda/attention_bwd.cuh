// Backward: scores are computed again from the kept statistics; nothing is added by atomics.
//
//   P = weight e^(score - m) / sum,  dP = dO v (dropped as P was),  delta = dO.O
//   dS = P (dP - delta),  dq = scale dS k,  dk = scale dS' q,  dv = P' dO
//   d weight[s] = sum_t P (dP - delta) / weight
//
// Four kernels. `together`: blocks that fill whole tiles and see no neighbour (64 % b == 0 or b =
// 128; D <= 64): a CTA takes a group of queries and every key they see, and has all five gradients.
// On Hopper `walk` does the same for a causal window into the tile before, along a run of tiles.
// Otherwise `queries` gives dq and delta, a CTA for 64 queries, and `keys` the rest, a CTA for 64
// positions of a list.
//
// Mapping where keys are at rest: a warp takes 16 keys and all queries of a tile, as the transpose
// S' = K Q', so that P' and dS' are the next products' left sides without leaving the registers.
// Only dq, which adds over keys, needs dS through shared memory.
#pragma once

#include "kernels/cuda/attention_row.cuh"
#include "kernels/cuda/key_source.cuh"

namespace sinkhorn::cuda {

constexpr float kLog2E = 1.4426950408889634f;
// A position of weight 0 may stand above the largest score; its exponential is capped at e^80.
constexpr float kMostExponent = 80.0f * kLog2E;

// What backward knows of 64 queries, in shared memory.
struct QueryFacts {
  float log_sum[kTile];  // log2 of the softmax's denominator; +inf where a query sees nothing
  float delta[kTile];
  int begin[kTile], end[kTile];  // what it sees of the list
};

// The log-sum of query t. asked: which queries are real, or null.
template <class T>
__device__ __forceinline__ float log_sum_of(const Plan& plan, const uint8_t* asked,
                                            const float* stats, int queries, int t) {
  if (t >= plan.queries || (asked != nullptr && asked[t] == 0)) return INFINITY;
  return load_log_sum<T>(stats, queries, t);
}

// Threads 0 .. 63 set what each of 64 queries sees of a list; whether this thread's sees all of the
// positions [at, at + 64). Its log_sum must be there; looks(log_sum): whether it sees anything of
// the list.
template <class Looks>
__device__ __forceinline__ bool set_seen(QueryFacts& facts, const Plan& plan, List list, int first,
                                         int at, Looks looks) {
  if (threadIdx.x >= kTile) return true;
  Interval seen = {0, 0};
  const float log_sum = facts.log_sum[threadIdx.x];
  if (log_sum != INFINITY && looks(log_sum)) seen = plan.seen(list, first + threadIdx.x);
  facts.begin[threadIdx.x] = seen.begin;
  facts.end[threadIdx.x] = seen.end;
  return seen.begin <= at && seen.end >= at + kTile;
}
// The same for half types, whose log_sum says whether a query looks.
__device__ __forceinline__ bool set_seen(QueryFacts& facts, const Plan& plan, List list, int first,
                                         int at) {
  return set_seen(facts, plan, list, first, at,
                  [&](float log_sum) { return list == List::kLocal || sees_sorted(log_sum); });
}

// delta = dO.O of a tile's queries, four lanes a row, from memory as they are.
template <class T, int kWidth>
__device__ __forceinline__ void load_deltas(float* delta, const AttentionCall& p, const Plan& plan,
                                            const uint8_t* real, const T* out, const T* grad,
                                            int first) {
#pragma unroll
  for (int r = threadIdx.x / 4; r < kTile; r += kThreads / 4) {
    const int t = first + r;
    float total = 0.0f;
    if (t < plan.queries && (real == nullptr || real[t] != 0)) {
#pragma unroll
      for (int c = threadIdx.x % 4 * kPiece<T>; c < kWidth; c += 4 * kPiece<T>) {
        if (c >= p.width) break;
        const uint4 o = *reinterpret_cast<const uint4*>(out + t * p.out.token + c);
        const uint4 g = *reinterpret_cast<const uint4*>(grad + t * p.grad_out.token + c);
        add_product<T>(total, o, g);
      }
    }
    total = quad_sum(total);
    if (threadIdx.x % 4 == 0) delta[r] = total;
  }
}

// delta of a row whose pieces of O and dO, eight unless told, so many neighbouring threads hold.
template <class T, int kPieces = 8>
__device__ __forceinline__ float delta_of(const uint4& out, const uint4& grad) {
  float total = 0.0f;
  add_product<T>(total, out, grad);
  total = quad_sum(total);
#pragma unroll
  for (int apart = 4; apart < kPieces; apart *= 2) {
    total += __shfl_xor_sync(0xFFFFFFFFu, total, apart);
  }
  return total;
}

// A lane's part of a tile of 16 keys x 64 queries.
struct KeyLane {
  int key;        // the number in the list of the first of its two keys
  bool weighted;  // else both weights are 1
  float weight[2], gradient[2] = {0.0f, 0.0f};  // of its keys; the gradients of their weights
};

// On entry s = raw scores and dp = dO v, keys in rows; on exit s = P' and dp = dS' without the
// scale: where there are no weights and there is no dropout. key: the first of this lane's two;
// scale: in powers of 2.
__device__ __forceinline__ void turn_plain(float (&s)[8][4], float (&dp)[8][4],
                                           const QueryFacts& facts, bool all_seen, int key,
                                           float scale, int lane) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const int column = n * 8 + lane % 4 * 2;
    const float2 log_sum = *reinterpret_cast<const float2*>(facts.log_sum + column);
    const float2 delta = *reinterpret_cast<const float2*>(facts.delta + column);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      s[n][c] = power_of_2(s[n][c] * scale - (c % 2 == 0 ? log_sum.x : log_sum.y));
      dp[n][c] = s[n][c] * (dp[n][c] - (c % 2 == 0 ? delta.x : delta.y));
    }
  }
  if (all_seen) return;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const int column = n * 8 + lane % 4 * 2;
    const int2 begin = *reinterpret_cast<const int2*>(facts.begin + column);
    const int2 end = *reinterpret_cast<const int2*>(facts.end + column);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      // Selected, not multiplied: dP of what is not seen may be anything.
      const int at = key + c / 2 * 8;
      const bool seen = at >= (c % 2 == 0 ? begin.x : begin.y) && at < (c % 2 == 0 ? end.x : end.y);
      s[n][c] = seen ? s[n][c] : 0.0f;
      dp[n][c] = seen ? dp[n][c] : 0.0f;
    }
  }
}

// The same with weights and dropout, s = P' after dropout. query: the number of the tile's first.
// kPlain: known to be without either, which leaves registers for another CTA.
template <bool kPlain>
__device__ __forceinline__ void turn_scores(float (&s)[8][4], float (&dp)[8][4], KeyLane& keys,
                                            const QueryFacts& facts, bool all_seen, float scale,
                                            const Dropout& dropout, uint32_t stream, int query,
                                            int lane) {
  scale *= kLog2E;
  if (kPlain || (!keys.weighted && dropout.threshold == 0)) {
    return turn_plain(s, dp, facts, all_seen, keys.key, scale, lane);
  }
  const bool drops = dropout.threshold != 0;
  uint4 bits[2];  // of queries c and c + 1, eight further ones in the second half
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    if (drops && n % 2 == 0) {
      const DropoutState state(dropout.rng);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        bits[e] = state.draw(stream, query + n * 8 + lane % 4 * 2 + e, keys.key);
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = n * 8 + lane % 4 * 2 + e;
      const float log_sum = facts.log_sum[column], delta = facts.delta[column];
      const int begin = facts.begin[column], end = facts.end[column];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = keys.key + 8 * half, c = 2 * half + e;
        float share = power_of_2(fminf(s[n][c] * scale - log_sum, kMostExponent));
        const bool seen = at >= begin && at < end && keys.weight[half] >= 0.0f;
        float factor = 1.0f;
        if (drops) {
          const bool odd = (lane / 4) % 2 == 1;
          const bool gone = dropout_bits(bits[e], n % 2 == 1, half == 1, odd) < dropout.threshold;
          factor = gone ? 0.0f : dropout.kept;
        }
        // Selected, not multiplied: dP of what is not seen may be anything.
        float ds = seen ? share * (dp[n][c] * factor - delta) : 0.0f;
        share = seen ? share : 0.0f;
        keys.gradient[half] += ds;
        s[n][c] = share * keys.weight[half] * factor;
        dp[n][c] = ds * keys.weight[half];
      }
    }
  }
}

// key: the warp's first.
__device__ __forceinline__ KeyLane key_lane(const Weights& weights, List list, int key, int limit,
                                            int lane) {
  KeyLane keys;
  keys.key = key + lane / 4;
  keys.weighted = weights.needed(list);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    keys.weight[half] = keys.weighted ? weights.at(list, keys.key + 8 * half, limit) : 1.0f;
  }
  return keys;
}

// Adds up the four lanes of each key and writes the gradients of its weight.
__device__ __forceinline__ void store_weight_gradients(float* to, const KeyLane& keys, int limit,
                                                       int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float total = quad_sum(keys.gradient[half]);
    const int at = keys.key + 8 * half;
    if (lane % 4 == 0 && at < limit) to[at] = total;
  }
}

}  // namespace sinkhorn::cuda
