// Backward as in attention_bwd_pair.cuh for blocks of 256 tokens: D <= 64, a sort, no window, no
// mask, no dropout, so that every block is full.
//
// A CTA takes a block of one head. Its 256 queries and their dO stay in shared memory, and the keys
// they see, those sorted into the block and its own, pass by in tiles of 64. Queries are in rows:
// of their four tiles each group of four warps has two, and their dq in registers. For a tile of
// keys a group gives S and dP of its queries, then P and dS, both to shared memory, and adds dS k
// to dq. When P and dS of all queries are there, one group has dv = P' dO, the other dk = dS' q:
// nobody else adds to those. Tiles of queries before all of the keys are left out. The group has
// every other tile of queries, so that both have the same to leave out.
//
// A CTA goes from block to block; the next keys, and while it works on the first four tiles of keys
// the next block's queries and dO, are on their way meanwhile, by bulk copies (bulk.cuh). It has
// the multiprocessor to itself: 226 KB, and 255 registers a thread.
#pragma once

#include "kernels/cuda/attention_bwd.cuh"
#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/warp_rows.cuh"

namespace sinkhorn::cuda {

constexpr int kLongGroups = 2, kLongTiles = 4;  // tiles of a block
constexpr int kLongThreads = kLongGroups * kThreads, kLongTokens = kLongTiles * kTile;
static_assert(kLongThreads == kLongTokens);  // a thread has one query's log-sum

template <class E>
struct LongMemory {
  using Tile = typename E::T[E::kElements];
  Tile query[2][kLongTiles], grad[2][kLongTiles];  // of this block and the next
  Tile share[kLongTiles], change[kLongTiles];      // P and dS of a tile of keys, queries in rows
  Tile key[2], value[2];                           // of this tile of keys and the next
  float log_sum[kLongTokens], delta[kLongTokens];
  uint64_t arrived[2];  // barriers: the keys and values of a slot, and the queries that came along
};

// The tiles of keys of a block: those sorted into it, then its own.
struct LongKeys {
  int first, sorted, count;
  bool causal, inclusive;

  __device__ __forceinline__ LongKeys(const AttentionCall& p, int first_)
      : first(first_),
        sorted(p.causal == Causal::kStrict && first_ == 0 ? 0 : kLongTiles),
        count(sorted + kLongTiles),
        causal(p.causal != Causal::kNone),
        inclusive(p.causal == Causal::kInclusive) {}
  __device__ __forceinline__ bool is_sorted(int j) const { return j < sorted; }
  __device__ __forceinline__ int start(int j) const { return first + j % kLongTiles * kTile; }
  // Whether a query sees no key behind its own place.
  __device__ __forceinline__ bool is_triangular(int j) const {
    return is_sorted(j) ? inclusive : causal;
  }
  // The first tile of queries that sees keys of tile j.
  __device__ __forceinline__ int seen_from(int j) const {
    return is_triangular(j) ? j % kLongTiles : 0;
  }
};

// What one thread asks for. All that comes along with a slot's keys and values arrives with them.
template <class E>
struct LongLoads {
  const AttentionCall& p;
  const TokenMaps& maps;
  LongMemory<E>& to;

  // Before it asks for so many pairs of tiles.
  __device__ __forceinline__ void expect(int slot, int pairs) const {
    constexpr int kPair = 2 * static_cast<int>(sizeof(typename LongMemory<E>::Tile));
    expect_bytes(&to.arrived[slot], pairs * kPair);
  }
  // Tile i of a block's queries, and its dO.
  __device__ __forceinline__ void queries(const TilePlace& at, int i, int stage, int slot) const {
    const int first = at.first + i * kTile;
    copy(to.query[stage][i], maps.query, at, first, slot);
    copy(to.grad[stage][i], maps.grad, at, first, slot);
  }
  // Tile j of the keys and values that a block sees.
  __device__ __forceinline__ void keys(const TilePlace& at, int j, int slot) const {
    const LongKeys seen(p, at.first);
    const bool is_sorted = seen.is_sorted(j);
    copy(to.key[slot], is_sorted ? maps.sorted_key : maps.key, at, seen.start(j), slot);
    copy(to.value[slot], is_sorted ? maps.sorted_value : maps.value, at, seen.start(j), slot);
  }
  __device__ __forceinline__ void copy(typename E::T* tile, const CUtensorMap& map,
                                       const TilePlace& at, int first, int slot) const {
    copy_box(tile, map, &to.arrived[slot], 0, first, at.head, at.batch);
  }
};

// A thread's share of what delta and the softmax need of a block: eight pieces of O, one query's
// statistics.
template <class E>
struct LongAhead {
  using T = typename E::T;
  static constexpr int kPieces = E::kWidth / 8, kApart = kLongThreads / kPieces;
  static constexpr int kShare = kLongTokens / kApart;
  uint4 out[kShare];
  float log_sum;

  // O into the cache, long before it is loaded: there are no registers to keep it in. Four threads
  // a row, 32 bytes each.
  static __device__ __forceinline__ void fetch(const AttentionCall& p, const TilePlace& at) {
    const T* const rows = head_of<const T>(p.out, {}, at.batch, at.head);
    const int column = threadIdx.x % 4 * 16;
    if (column >= p.width) return;
#pragma unroll
    for (int r = threadIdx.x / 4; r < kLongTokens; r += kLongThreads / 4) {
      const T* const from = rows + (at.first + r) * p.out.token + column;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(from)));
    }
  }
  __device__ __forceinline__ void load(const AttentionCall& p, const TilePlace& at) {
    const T* const rows = head_of<const T>(p.out, {}, at.batch, at.head);
    const int piece = threadIdx.x % kPieces * 8;
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int t = at.first + threadIdx.x / kPieces + i * kApart;
      out[i] = piece < p.width ? *reinterpret_cast<const uint4*>(rows + t * p.out.token + piece)
                               : make_uint4(0, 0, 0, 0);
    }
    log_sum = load_log_sum<T>(stats_of<T>(p, at.flat_head(p)), p.queries, at.first + threadIdx.x);
  }
  // delta = dO.O, eight threads a row.
  __device__ __forceinline__ void spread(LongMemory<E>& to, int stage) const {
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int r = threadIdx.x / kPieces + i * kApart;
      const uint4 grad = *reinterpret_cast<const uint4*>(
          to.grad[stage][r / kTile] + E::at(r % kTile, threadIdx.x % kPieces * 8));
      const float total = delta_of<T>(out[i], grad);
      if (threadIdx.x % kPieces == 0) to.delta[r] = total;
    }
    to.log_sum[threadIdx.x] = log_sum;
  }
};

// On entry s = raw scores and dp = dO v of 64 queries, in rows, and 64 keys; on exit s = P and dp =
// dS without the scale. is_sorted: those are the keys. is_diagonal: query r sees keys 0 .. r only.
// scale: in powers of 2.
__device__ __forceinline__ void turn_long(float (&s)[8][4], float (&dp)[8][4], const float* log_sum,
                                          const float* delta, bool is_sorted, bool is_diagonal,
                                          float scale) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % kThreads / 32 * 16 + lane / 4;
  const float own[2] = {log_sum[row], log_sum[row + 8]}, d[2] = {delta[row], delta[row + 8]};
  const float l[2] = {is_sorted ? sorted_log_sum(own[0]) : own[0],
                      is_sorted ? sorted_log_sum(own[1]) : own[1]};
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      s[n][c] = power_of_2(s[n][c] * scale - l[c / 2]);
      dp[n][c] = s[n][c] * (dp[n][c] - d[c / 2]);
    }
  }
  if (!is_diagonal) return;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      // Selected, not multiplied: dP of what is not seen may be anything.
      const bool seen = n * 8 + lane % 4 * 2 + c % 2 <= row + c / 2 * 8;
      s[n][c] = seen ? s[n][c] : 0.0f;
      dp[n][c] = seen ? dp[n][c] : 0.0f;
    }
  }
}

// Where the gradient of tile j of the keys or values goes.
template <class T>
__device__ __forceinline__ WarpRows<T> long_rows(const AttentionCall& p, const TilePlace& at,
                                                 const LongKeys& keys, int j, bool is_key) {
  const Tokens& local = is_key ? p.grad_key : p.grad_value;
  if (keys.is_sorted(j)) {
    void* const sorted = is_key ? p.grad_sorted_key : p.grad_sorted_value;
    return {static_cast<T*>(sorted) + at.flat_head(p) * p.length * p.width, p.width, keys.start(j),
            p.length};
  }
  return {head_of<T>(local, {}, at.batch, at.head), local.token, keys.start(j), p.length};
}

// Zeros for what was sorted into a first block, whose queries do not see it under the strict rule.
template <class T>
__device__ __forceinline__ void clear_sorted(const AttentionCall& p, const TilePlace& at) {
  const int64_t first = (at.flat_head(p) * p.length + at.first) * p.width;
  for (int i = threadIdx.x * 8; i < kLongTokens * p.width; i += kLongThreads * 8) {
    constexpr uint32_t kZeros[4] = {};
    store_piece(static_cast<T*>(p.grad_sorted_key) + first + i, kZeros);
    store_piece(static_cast<T*>(p.grad_sorted_value) + first + i, kZeros);
  }
}

template <class E>
__global__ void __launch_bounds__(kLongThreads, 1)
    attention_bwd_long_kernel(const __grid_constant__ AttentionCall p,
                              const __grid_constant__ TokenMaps maps, const int blocks) {
  using T = typename E::T;
  extern __shared__ __align__(1024) unsigned char shared[];
  LongMemory<E>& memory = *reinterpret_cast<LongMemory<E>*>(shared);
  const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / kThreads, 0);
  const int lane = threadIdx.x % 32, row = threadIdx.x % kThreads / 32 * 16;

  if (threadIdx.x == 0) {
    for (uint64_t& arrived : memory.arrived) ready_barrier(&arrived);
    E::publish();
  }
  __syncthreads();
  unsigned parities = 0;  // of the slots, a bit each
  const auto await_slot = [&](int slot) {
    await_bytes(&memory.arrived[slot], parities >> slot & 1u);
    parities ^= 1u << slot;
    __syncwarp();
  };

  const LongLoads<E> loads{p, maps, memory};
  LongAhead<E> ahead;
  {
    const TilePlace at(p, blockIdx.x, kLongTokens);
    if (threadIdx.x == 0) {
      loads.expect(0, kLongTiles + 1);
      for (int i = 0; i < kLongTiles; ++i) loads.queries(at, i, 0, 0);
      loads.keys(at, 0, 0);
    }
    __syncwarp();
    ahead.load(p, at);
  }
  int stage = 0, slot = 0;
  for (int block = blockIdx.x; block < blocks; block += gridDim.x, stage ^= 1) {
    const TilePlace at(p, block, kLongTokens);
    const LongKeys keys(p, at.first);
    const bool goes_on = block + gridDim.x < blocks;
    const TilePlace then(p, goes_on ? block + gridDim.x : block, kLongTokens);
    await_slot(slot);  // dO, and the first keys
    __syncthreads();   // nobody reads what is known of the block before
    ahead.spread(memory, stage);
    if (goes_on) LongAhead<E>::fetch(p, then);
    if (keys.sorted == 0) clear_sorted<T>(p, at);

    float dq[2][8][4] = {};  // of tiles `group` and group + 2 of the queries
#pragma unroll 1
    for (int j = 0; j < keys.count; ++j, slot ^= 1) {
      if (j > 0) await_slot(slot);
      __syncthreads();  // the memory of the last tile of keys is free
      const bool is_last = j + 1 == keys.count;
      if (threadIdx.x == 0 && (goes_on || !is_last)) {
        const bool brings_queries = goes_on && j < kLongTiles;
        loads.expect(slot ^ 1, brings_queries ? 2 : 1);
        if (brings_queries) loads.queries(then, j, stage ^ 1, slot ^ 1);
        loads.keys(is_last ? then : at, is_last ? 0 : j + 1, slot ^ 1);
      }
      __syncwarp();

      const int seen_from = keys.seen_from(j);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = half * kLongGroups + group;
        if (i < seen_from) continue;
        float s[8][4], dp[8][4];
        E::begin();
        E::scores(s, memory.query[stage][i], memory.key[slot], row, lane);
        E::scores(dp, memory.grad[stage][i], memory.value[slot], row, lane);
        E::end();
        E::settle(s);
        E::settle(dp);
        turn_long(s, dp, memory.log_sum + i * kTile, memory.delta + i * kTile, keys.is_sorted(j),
                  keys.is_triangular(j) && i == seen_from, p.scale * kLog2E);
        Packed share, change;
        pack_left<T>(share, s);
        pack_left<T>(change, dp);
        E::settle(dq[half]);
        E::begin();
        E::template gather<64>(dq[half], change, memory.key[slot], 0, lane);
        E::put(memory.share[i], share, row, lane);  // while products run
        E::put(memory.change[i], change, row, lane);
        E::end();
        E::settle(dq[half]);
      }
      E::publish();
      __syncthreads();  // P and dS of all queries are there
      const bool is_key = group == 1;
      const T* const left = is_key ? memory.change[0] : memory.share[0];
      const T* const right = is_key ? memory.query[stage][0] : memory.grad[stage][0];
      float sum[8][4] = {};  // dk or dv
      E::settle(sum);
      E::begin();
#pragma unroll 1
      for (int i = seen_from; i < kLongTiles; ++i) {
        E::gather_t(sum, left + i * E::kElements, right + i * E::kElements, row, lane);
      }
      E::end();
      E::settle(sum);
      store_warp_rows<T>(sum, is_key ? p.scale : 1.0f, long_rows<T>(p, at, keys, j, is_key),
                         p.width, row, lane);
    }
    if (goes_on) ahead.load(p, then);
    T* const to = head_of<T>(p.grad_query, {}, at.batch, at.head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int first = at.first + (half * kLongGroups + group) * kTile;
      store_warp_rows<T>(dq[half], p.scale, WarpRows<T>{to, p.grad_query.token, first, p.length},
                         p.width, row, lane);
    }
  }
}

}  // namespace sinkhorn::cuda
