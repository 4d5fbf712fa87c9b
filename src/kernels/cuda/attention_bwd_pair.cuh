// Backward as in attention_bwd_together.cuh for the common case on Hopper: D <= 64, blocks that
// fill tiles of 64, a sort, no window, no mask, no dropout.
//
// Two groups of four warps work on a tile of 64 tokens, one on the positions sorted into it, one on
// its own; the first also adds up dq over both. A CTA goes from tile to tile, the next one's loads
// under way while it works: backward is bound by memory, and never waits for it.
#pragma once

#include "kernels/cuda/attention_bwd.cuh"

namespace sinkhorn::cuda {

constexpr int kPairThreads = 2 * kThreads, kPairStages = 2;

template <class E>
constexpr int attention_bwd_pair_shared() {  // each stage: queries, dO, and keys and values twice
  return kPairStages * 6 * E::kElements * 2 + static_cast<int>(sizeof(QueryFacts));
}

// Where a tile of the grid of all of them lies.
struct PairPlace {
  int first, head, batch;
  __device__ __forceinline__ PairPlace(const AttentionCall& p, int64_t tile) {
    const int across = (p.length + kTile - 1) / kTile;
    first = static_cast<int>(tile % across) * kTile;
    head = static_cast<int>(tile / across % p.heads);
    batch = static_cast<int>(tile / across / p.heads);
  }
  __device__ __forceinline__ int64_t flat_head(const AttentionCall& p) const {
    return static_cast<int64_t>(batch) * p.heads + head;
  }
};

// 16 rows of a warp's gradient through a tile to their place.
template <class E>
__device__ __forceinline__ void store_pair_rows(const AttentionCall& p, typename E::T* tile,
                                                const float (&x)[8][4], float factor,
                                                const Tokens& local, void* sorted, bool is_sorted,
                                                const PairPlace& at, int row, int lane) {
  using T = typename E::T;
  const int limit = is_sorted ? p.rows * p.block : p.length;
  T* const to = is_sorted ? static_cast<T*>(sorted) + at.flat_head(p) * limit * p.width
                          : head_of<T>(local, p.sequences, at.batch, at.head);
  store_rows<E, 64>(tile, x, factor, factor, row, lane, to, is_sorted ? p.width : local.token,
                    at.first, limit, p.width);
}

template <class E>
__global__ void __launch_bounds__(kPairThreads, 2)
    attention_bwd_pair_kernel(const __grid_constant__ AttentionCall p, const int64_t tiles) {
  using T = typename E::T;
  extern __shared__ __align__(1024) unsigned char shared[];
  T* const stages = reinterpret_cast<T*>(shared);  // [stage][q, dO, k', v', k, v]
  QueryFacts& facts = *reinterpret_cast<QueryFacts*>(stages + kPairStages * 6 * E::kElements);

  const int group = threadIdx.x / kThreads, thread = threadIdx.x % kThreads;
  const int lane = threadIdx.x % 32, row = thread / 32 * 16;
  const bool is_sorted = group == 0;
  const Plan plan(p, 0);
  const float scale = p.scale * kLog2E;

  // A thread's share of what delta and the softmax need of a tile: two pieces of O, one statistic.
  uint4 out_pieces[2];
  float log_sum = 0.0f;
  const int piece_row = threadIdx.x / 8, piece = threadIdx.x % 8 * 8;
  const auto load = [&](int64_t tile, int stage) {
    if (tile < tiles) {
      const PairPlace at(p, tile);
      T* const q = stages + stage * 6 * E::kElements;
      T* const k = q + (2 + 2 * group) * E::kElements;
      load_rows<E, kPairThreads>(q, head_of<const T>(p.query, p.sequences, at.batch, at.head),
                                 p.query.token, at.first, p.length, p.width, nullptr);
      load_rows<E, kPairThreads>(q + E::kElements,
                                 head_of<const T>(p.grad_out, p.sequences, at.batch, at.head),
                                 p.grad_out.token, at.first, p.length, p.width, nullptr);
      const int limit = is_sorted ? p.rows * p.block : p.length;
      const int64_t sorted_at = at.flat_head(p) * limit * p.width;
      const T* const key = is_sorted ? static_cast<const T*>(p.sorted_key) + sorted_at
                                     : head_of<const T>(p.key, p.sequences, at.batch, at.head);
      const T* const value = is_sorted ? static_cast<const T*>(p.sorted_value) + sorted_at
                                       : head_of<const T>(p.value, p.sequences, at.batch, at.head);
      load_rows<E>(k, key, is_sorted ? p.width : p.key.token, at.first, limit, p.width, nullptr,
                   thread);
      load_rows<E>(k + E::kElements, value, is_sorted ? p.width : p.value.token, at.first, limit,
                   p.width, nullptr, thread);
      const T* const out = head_of<const T>(p.out, p.sequences, at.batch, at.head);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int t = at.first + piece_row + 32 * i;
        out_pieces[i] = t < p.length && piece < p.width
                            ? *reinterpret_cast<const uint4*>(out + t * p.out.token + piece)
                            : make_uint4(0, 0, 0, 0);
      }
      if (threadIdx.x < kTile) {
        log_sum = log_sum_of(plan, nullptr, p.stats + at.flat_head(p) * 2 * p.queries, p.queries,
                             at.first + threadIdx.x);
      }
    }
    commit_copies();
  };

  int stage = 0;
  load(blockIdx.x, 0);
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x, stage ^= 1) {
    const PairPlace at(p, tile);
    T* const q = stages + stage * 6 * E::kElements;
    T* const g = q + E::kElements;
    T* const k = q + (2 + 2 * group) * E::kElements;
    T* const v = k + E::kElements;
    wait_copies<0>();
    E::publish();
    __syncthreads();
    // delta = dO.O from the pieces loaded ahead, eight threads a row, while products run.
    float s[8][4], dp[8][4];
    E::begin();
    E::scores(s, k, q, row, lane);
    E::scores(dp, v, g, row, lane);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = piece_row + 32 * i;
      const uint4 change = *reinterpret_cast<const uint4*>(g + E::at(r, piece));
      const uint32_t left[4] = {out_pieces[i].x, out_pieces[i].y, out_pieces[i].z, out_pieces[i].w};
      const uint32_t right[4] = {change.x, change.y, change.z, change.w};
      float total = 0.0f;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 x = unpack<T>(left[e]), y = unpack<T>(right[e]);
        total += x.x * y.x + x.y * y.y;
      }
      total = quad_sum(total);
      total += __shfl_xor_sync(0xFFFFFFFFu, total, 4);
      if (threadIdx.x % 8 == 0) facts.delta[r] = total;
    }
    if (threadIdx.x < kTile) facts.log_sum[threadIdx.x] = log_sum;
    load(tile + gridDim.x, stage ^ 1);
    E::end();
    E::settle(s);
    E::settle(dp);
    __syncthreads();  // facts are there, and values have been read

    // All of a tile's queries see all of its positions if the first and the last do.
    const List list = is_sorted ? List::kSorted : List::kLocal;
    const auto sees_tile = [&](int t) {
      const Interval seen = plan.seen(list, t);
      return seen.begin <= at.first && seen.end >= at.first + kTile;
    };
    const bool all_seen = sees_tile(at.first) && sees_tile(min(at.first + kTile, p.length) - 1);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int column = n * 8 + lane % 4 * 2;
      const float2 denominator = *reinterpret_cast<const float2*>(facts.log_sum + column);
      const float2 delta = *reinterpret_cast<const float2*>(facts.delta + column);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        s[n][c] = power_of_2(s[n][c] * scale - (c % 2 == 0 ? denominator.x : denominator.y));
        dp[n][c] = s[n][c] * (dp[n][c] - (c % 2 == 0 ? delta.x : delta.y));
      }
    }
    if (!all_seen) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const Interval seen = plan.seen(list, at.first + n * 8 + lane % 4 * 2 + e);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int position = at.first + row + lane / 4 + 8 * half;
            if (position < seen.begin || position >= seen.end) {
              s[n][2 * half + e] = dp[n][2 * half + e] = 0.0f;
            }
          }
        }
      }
    }
    Packed share, change;
    pack_left<T>(share, s);
    pack_left<T>(change, dp);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = row + lane / 4 + e % 2 * 8, c = step * 16 + e / 2 * 8 + lane % 4 * 2;
        *reinterpret_cast<uint32_t*>(v + E::score_at(r, c)) = change[step][e];
      }
    }
    E::publish();
    __syncthreads();  // both groups' scores stand where their values did
    {
      float dk[8][4] = {};
      E::settle(dk);
      E::begin();
      E::template gather<64>(dk, change, q, 0, lane);
      E::end();
      E::settle(dk);
      float dq[8][4] = {};
      if (is_sorted) {
        E::settle(dq);
        E::begin();
        E::gather_t(dq, q + 3 * E::kElements, q + 2 * E::kElements, row, lane);
        E::gather_t(dq, q + 5 * E::kElements, q + 4 * E::kElements, row, lane);
        E::end();
        E::settle(dq);
      }
      __syncthreads();  // keys, scores and queries have been read
      store_pair_rows<E>(p, k, dk, p.scale, p.grad_key, p.grad_sorted_key, is_sorted, at, row,
                         lane);
      if (is_sorted) {
        store_rows<E, 64>(q, dq, p.scale, p.scale, row, lane,
                          head_of<T>(p.grad_query, p.sequences, at.batch, at.head),
                          p.grad_query.token, at.first, p.length, p.width);
      }
    }
    float dv[8][4] = {};
    E::settle(dv);
    E::begin();
    E::template gather<64>(dv, share, g, 0, lane);
    E::end();
    E::settle(dv);
    store_pair_rows<E>(p, v, dv, 1.0f, p.grad_value, p.grad_sorted_value, is_sorted, at, row, lane);
    __syncthreads();  // before this stage is loaded again
  }
}

}  // namespace sinkhorn::cuda
