// Backward as in attention_bwd_together.cuh for the common case on Hopper: blocks that fill tiles
// of 64, or are 128 long where D <= 64; a sort, no window, no mask, no dropout.
//
// A CTA takes kHalves * 64 tokens: one half where blocks fill tiles of 64, two for blocks of 128.
// Each group of four warps has 64 keys of one list, those sorted into the tokens' place or their
// own, and goes over the queries half by half: S' and dP', then P' and dS'. P' stays in registers
// for dv; dS' goes to shared memory, that of the last half over the group's values, which are not
// needed any more (at D <= 32 they are too small for it). When all of it is there a group adds up
// its dk and dv over both halves, and the first kHalves groups dq over all keys, each for one half
// of the queries. Gradients go from registers to memory: no tile has to be free for them.
//
// A CTA goes from tile to tile, the next one's loads under way while it works: backward is bound by
// memory, and never waits for it. At D <= 64 a thread has 128 registers, and two CTAs of one half
// or one of two share a multiprocessor; at D <= 128, whose tiles and gradients are twice as large,
// one CTA of one half has it alone. Either way 96 KB are under way on it; at D <= 32 half of that.
// Tiles come by bulk copies (bulk.cuh): of copies by threads the fence between dS' and the products
// that read it would wait for those of the next tile as well.
// At D > 128 there is no room for a second stage: the next tile's loads begin when this one has
// been read, and other CTAs have the memory in between.
#pragma once

#include "kernels/cuda/attention_bwd_pair_memory.cuh"
#include "kernels/cuda/early.cuh"

namespace sinkhorn::cuda {

// Which queries see a position of a list: Plan::seen the other way round, for blocks that are
// powers of two and see no neighbour.
struct PairSeers {
  int block, earliest, queries, limit;  // none before `earliest`; no position from `limit` on
  bool triangular;                      // none before the position itself

  __device__ __forceinline__ PairSeers(const AttentionCall& p, bool is_sorted, int block_)
      : block(block_),
        earliest(is_sorted && p.causal == Causal::kStrict ? block_ : 0),
        queries(p.length),
        limit(is_sorted ? p.rows * block_ : p.length),
        triangular(is_sorted ? p.causal == Causal::kInclusive : p.causal != Causal::kNone) {}
  __device__ __forceinline__ Interval of(int position) const {
    const int first = position & -block;
    return {max(earliest, triangular ? position : first),
            position < limit ? min(queries, first + block) : 0};
  }
};

// On entry s = raw scores and dp = dO v of 64 keys, in rows, and 64 queries; on exit s = P' and dp
// = dS' without the scale. key: the tile's first; query: the number of the first, whose log_sum and
// delta these are.
__device__ __forceinline__ void turn_pair(float (&s)[8][4], float (&dp)[8][4], const float* log_sum,
                                          const float* delta, const PairSeers& seers, int key,
                                          int query, float scale) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % kThreads / 32 * 16;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const int column = n * 8 + lane % 4 * 2;
    const float2 l = *reinterpret_cast<const float2*>(log_sum + column);
    const float2 d = *reinterpret_cast<const float2*>(delta + column);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      s[n][c] = power_of_2(s[n][c] * scale - (c % 2 == 0 ? l.x : l.y));
      dp[n][c] = s[n][c] * (dp[n][c] - (c % 2 == 0 ? d.x : d.y));
    }
  }
  // All of the queries see all of the positions if the first one sees the last.
  const Interval fewest = seers.of(key + kTile - 1);
  if (query >= fewest.begin && query < fewest.end) return;
#pragma unroll
  for (int low = 0; low < 2; ++low) {
    const Interval seen_by = seers.of(key + row + lane / 4 + low * 8);
    const int column = query + lane % 4 * 2;
    const int begin = seen_by.begin - column, end = seen_by.end - column;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        // Selected, not multiplied: dP of what is not seen may be anything.
        const bool seen = n * 8 + e >= begin && n * 8 + e < end;
        s[n][2 * low + e] = seen ? s[n][2 * low + e] : 0.0f;
        dp[n][2 * low + e] = seen ? dp[n][2 * low + e] : 0.0f;
      }
    }
  }
}

template <class E, int kHalves>
__global__ void __launch_bounds__(PairShape<E, kHalves>::kAllThreads, PairShape<E, kHalves>::kCtas)
    attention_bwd_pair_kernel(const __grid_constant__ AttentionCall p,
                              const __grid_constant__ TokenMaps maps, const int tiles) {
  using T = typename E::T;
  using Shape = PairShape<E, kHalves>;
  using Tiles = PairTiles<E, kHalves>;
  begin_early();
  extern __shared__ __align__(1024) unsigned char shared[];
  T* const all_tiles = reinterpret_cast<T*>(shared);
  PairFacts<kHalves>& facts = *reinterpret_cast<PairFacts<kHalves>*>(all_tiles + Shape::kElements);

  const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / kThreads, 0);
  const int thread = threadIdx.x % kThreads;
  const int lane = threadIdx.x % 32, row = thread / 32 * 16;
  const PairSeers seers(p, group < kHalves, kHalves == 2 ? Shape::kTokens : p.block);
  const float* const log_sum = group < kHalves ? facts.sorted_log_sum : facts.log_sum;

  PairAhead<E, kHalves> ahead;
  if (threadIdx.x == 0) {
    for (uint64_t& arrived : facts.arrived) ready_barrier(&arrived);
    E::publish();
  }
  __syncthreads();

  // Its memory has been read by all.
  const auto load = [&](int tile, int stage) {
    if (tile < tiles && threadIdx.x == 0) {
      load_pair<E, kHalves>(maps, TilePlace(p, tile, Shape::kTokens), Tiles(all_tiles, stage),
                            &facts.arrived[stage]);
    }
    __syncwarp();
  };
  const auto load_ahead = [&](int tile) {
    if (tile < tiles) {
      ahead.load(p, TilePlace(p, tile, Shape::kTokens));
    } else {
      ahead = {};
    }
  };

  int stage = 0, parity = 0;
  load(blockIdx.x, 0);
  load_ahead(blockIdx.x);
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const TilePlace at(p, tile, Shape::kTokens);
    const Tiles own(all_tiles, stage);
    T* const k = own.key(group);
    T* const v = own.value(group);
    __syncthreads();  // the last tile's memory is free
    if constexpr (Shape::kStages == 2) load(tile + gridDim.x, stage ^ 1);
    await_bytes(&facts.arrived[stage], parity);
    __syncwarp();
    Packed share[kHalves];  // P'
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
      float s[8][4], dp[8][4];
      E::begin();
      E::scores(s, k, own.query(i), row, lane);
      E::scores(dp, v, own.grad(i), row, lane);
      if (i == 0) ahead.spread(facts, own.grad(0));  // while products run
      E::end();
      E::settle(s);
      E::settle(dp);
      if (i == 0) {
        __syncthreads();  // facts are there; and the values, if of one half only, have been read
      } else {
        sync_group(group);  // the group's values have been read
      }
      turn_pair(s, dp, log_sum + i * kTile, facts.delta + i * kTile, seers,
                at.first + group % kHalves * kTile, at.first + i * kTile, p.scale * kLog2E);
      pack_left<T>(share[i], s);
      Packed change;
      pack_left<T>(change, dp);
      E::put(own.change(group, i), change, row, lane);
    }
    E::publish();
    __syncthreads();  // dS' of all groups is there
    if constexpr (Shape::kStages == 2) load_ahead(tile + gridDim.x);
    {
      float dk[E::kWidth / 8][4] = {};
      E::settle(dk);
      E::begin();
#pragma unroll
      for (int i = 0; i < kHalves; ++i) E::gather(dk, own.change(group, i), own.query(i));
      E::end();
      E::settle(dk);
      store_warp_rows<T>(dk, p.scale,
                         pair_rows<T, kHalves>(p, p.grad_key, p.grad_sorted_key, group, at),
                         p.width, row, lane);
    }
    if (group < kHalves) {
      float dq[E::kWidth / 8][4] = {};
      E::settle(dq);
      E::begin();
#pragma unroll
      for (int other = 0; other < Shape::kGroups; ++other) {
        E::gather_t(dq, own.change(other, group), own.key(other), row, lane);
      }
      E::end();
      E::settle(dq);
      const WarpRows<T> to = {head_of<T>(p.grad_query, {}, at.batch, at.head), p.grad_query.token,
                              at.first + group * kTile, p.length};
      store_warp_rows<T>(dq, p.scale, to, p.width, row, lane);
    }
    float dv[E::kWidth / 8][4] = {};
    E::settle(dv);
    E::begin();
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
      E::template gather<E::kWidth>(dv, share[i], own.grad(i), 0, lane);
    }
    E::end();
    E::settle(dv);
    if constexpr (Shape::kStages == 1) {
      __syncthreads();  // all of this tile has been read
      load(tile + gridDim.x, 0);
    }
    store_warp_rows<T>(dv, 1.0f,
                       pair_rows<T, kHalves>(p, p.grad_value, p.grad_sorted_value, group, at),
                       p.width, row, lane);
    if constexpr (Shape::kStages == 1) load_ahead(tile + gridDim.x);
    stage ^= Shape::kStages - 1;
    if (stage == 0) parity ^= 1;
  }
}

}  // namespace sinkhorn::cuda
