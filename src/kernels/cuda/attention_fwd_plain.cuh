// Forward as in attention_fwd.cuh for the common cases on Hopper: D <= 64, blocks that fill tiles
// of 64 or that are multiples of 128 tokens, no mask, no dropout; a sort, the tile before under a
// causal rule, or both.
//
// A CTA goes from one group of 64 or 128 queries to the next, four warps for each 64, and through a
// ring of key tiles: the loads of the next ones, of this group of queries and then of the next, are
// always under way, so that what is left to wait for is memory itself.
#pragma once

#include "kernels/cuda/attention_fwd.cuh"

namespace sinkhorn::cuda {

// kSorted: the positions sorted into the block are seen; kPrevious: the tile of tokens before.
// kHalves: 64s of queries of a CTA, 2 for blocks of 128.
template <class E_, bool kSorted_, bool kPrevious_, int kHalves_, int kRing_, int kCtas_>
struct PlainForward {
  using E = E_;
  static constexpr bool kSorted = kSorted_, kPrevious = kPrevious_;
  static constexpr int kHalves = kHalves_, kRing = kRing_, kCtas = kCtas_;
  static constexpr int kAllThreads = kThreads * kHalves, kTokens = kTile * kHalves;
  static constexpr int kKeyTiles = (kSorted + kPrevious + 1) * kHalves;  // sorted, before, own
  static constexpr int kUnroll = kHalves == 1 ? kKeyTiles : 1;  // two CTAs have 128 registers
  static_assert(kRing - 1 <= kKeyTiles);  // queries are at most one group ahead

  // The key tiles of the group of queries that begins at `first`.
  struct Keys {
    static constexpr int count = kKeyTiles;
    int first;
    __device__ __forceinline__ Keys(const AttentionCall&, int first_) : first(first_) {}
    __device__ __forceinline__ bool is_sorted(int j) const { return kSorted && j < kHalves; }
    // Where key tile j begins in its list.
    __device__ __forceinline__ int start(int j) const {
      const bool before = kPrevious && j / kHalves == (kSorted ? 1 : 0);
      return first + j % kHalves * kTile - (before ? kTokens : 0);
    }
  };
};

// The same for blocks that are longer than a group of 128 queries, with a sort: key tiles are those
// of the whole block, sorted and own, that some query of the group sees.
template <class E_>
struct LongForward {
  using E = E_;
  static constexpr int kHalves = 2, kRing = 3, kCtas = 2, kUnroll = 1;
  static constexpr int kAllThreads = kThreads * kHalves, kTokens = kTile * kHalves;
  static_assert(kRing - 1 <= kHalves);  // a group's own tiles: the fewest that there may be

  struct Keys {
    int first, sorted, count;  // of the block: its first token, tiles

    __device__ __forceinline__ Keys(const AttentionCall& p, int first_) {
      const int offset = first_ % p.block, all = p.block / kTile, seen = offset / kTile + kHalves;
      const bool has_source = p.causal != Causal::kStrict || first_ >= p.block;
      first = first_ - offset;
      sorted = p.causal == Causal::kInclusive ? seen : has_source ? all : 0;
      count = sorted + (p.causal == Causal::kNone ? all : seen);
    }
    __device__ __forceinline__ bool is_sorted(int j) const { return j < sorted; }
    __device__ __forceinline__ int start(int j) const {
      return first + (j < sorted ? j : j - sorted) * kTile;
    }
  };
};

// Queries of this group and the next, and the ring of keys and values; bytes.
template <class F>
constexpr int attention_fwd_plain_shared() {
  return (2 * F::kHalves + 2 * F::kRing) * F::E::kElements * 2;
}

// Begins to load key tile j of a group of queries, and with the first one the queries.
template <class F, class T>
__device__ __forceinline__ void load_plain(const AttentionCall& p, const TilePlace& at,
                                           const typename F::Keys& list, int j, T* queries,
                                           T* keys) {
  using E = typename F::E;
  if (j == 0) {
    const T* const query = head_of<const T>(p.query, {}, at.batch, at.head);
#pragma unroll
    for (int half = 0; half < F::kHalves; ++half) {
      load_rows<E, F::kAllThreads>(queries + half * E::kElements, query, p.query.token,
                                   at.first + half * kTile, p.length, p.width, nullptr);
    }
  }
  const int first = list.start(j), positions = p.rows * p.block;
  const bool is_sorted = list.is_sorted(j);
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const Tokens& view = side == 0 ? p.key : p.value;
    const T* const sorted = static_cast<const T*>(side == 0 ? p.sorted_key : p.sorted_value) +
                            at.flat_head(p) * positions * p.width;
    const T* const from = is_sorted ? sorted : head_of<const T>(view, {}, at.batch, at.head);
    // Before the first tile there are zeros.
    load_rows<E, F::kAllThreads>(keys + side * E::kElements, from, is_sorted ? p.width : view.token,
                                 max(first, 0),
                                 first < 0   ? 0
                                 : is_sorted ? positions
                                             : p.length,
                                 p.width, nullptr);
  }
}

template <class F>
__global__ void __launch_bounds__(F::kAllThreads, F::kCtas)
    attention_fwd_plain_kernel(const __grid_constant__ AttentionCall p, const int groups) {
  using E = typename F::E;
  using T = typename E::T;
  extern __shared__ __align__(1024) unsigned char shared[];
  T* const queries = reinterpret_cast<T*>(shared);          // [2][half]
  T* const ring = queries + 2 * F::kHalves * E::kElements;  // [slot][key, value]

  const int group = threadIdx.x / kThreads, lane = threadIdx.x % 32;
  const int row = threadIdx.x % kThreads / 32 * 16;
  const Plan plan(p, 0);
  const float scale = fabsf(p.scale) * 1.4426950408889634f;

  // What is loaded next: key tile next_j of group `next`, the number next_turn of this CTA's. Where
  // that is takes a few divisions, too many for every tile.
  int next = blockIdx.x, next_j = 0, next_turn = 0, next_slot = 0;
  TilePlace next_at(p, next, F::kTokens);
  typename F::Keys next_keys(p, next_at.first);
  const auto load_next = [&] {
    if (next < groups) {
      load_plain<F>(p, next_at, next_keys, next_j,
                    queries + next_turn % 2 * F::kHalves * E::kElements,
                    ring + next_slot * 2 * E::kElements);
      if (++next_j == next_keys.count) {
        next_j = 0;
        next += gridDim.x;
        ++next_turn;
        next_at = TilePlace(p, next, F::kTokens);
        next_keys = typename F::Keys(p, next_at.first);
      }
    }
    commit_copies();
    next_slot = next_slot + 1 == F::kRing ? 0 : next_slot + 1;
  };
#pragma unroll
  for (int i = 0; i + 1 < F::kRing; ++i) load_next();

  int slot = 0, turn = 0;
  bool finite = true;
  for (int tile = blockIdx.x; tile < groups; tile += gridDim.x, ++turn) {
    const TilePlace at(p, tile, F::kTokens);
    T* const q = queries + (turn % 2 * F::kHalves + group) * E::kElements;
    const int low = at.first + group * kTile + row + lane / 4;  // this lane's queries: low, low + 8
    const Interval sorted[2] = {plan.seen(List::kSorted, low), plan.seen(List::kSorted, low + 8)};
    const Interval local[2] = {plan.seen(List::kLocal, low), plan.seen(List::kLocal, low + 8)};
    const typename F::Keys keys(p, at.first);
    RunningSoftmax<64> softmax;
#pragma unroll F::kUnroll
    for (int j = 0; j < keys.count; ++j) {
      const T* const k = ring + slot * 2 * E::kElements;
      slot = slot + 1 == F::kRing ? 0 : slot + 1;
      wait_copies<F::kRing - 2>();
      E::publish();
      __syncthreads();  // this tile is there, and the one before has been read
      load_next();
      const bool is_sorted = keys.is_sorted(j);
      const int first = keys.start(j), last = at.first + group * kTile + kTile - 1;
      // The first half of the queries may see nothing of a tile that the second half sees.
      if (F::kHalves > 1 && first > last && (is_sorted ? plan.inclusive : plan.causal)) continue;
      float s[8][4];
      E::begin();
      E::scores(s, q, k, row, lane);
      E::end();
      E::settle(s);
      if (p.scale < 0.0f) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
#pragma unroll
          for (int c = 0; c < 4; ++c) s[n][c] = -s[n][c];
        }
      }
      const Interval seen[2] = {is_sorted ? sorted[0] : local[0], is_sorted ? sorted[1] : local[1]};
      const auto all = [&](const Interval& x) {
        return x.begin <= first && x.end >= first + kTile;
      };
      if (!__all_sync(0xFFFFFFFFu, all(seen[0]) && all(seen[1])))
        hide(s, seen, first, nullptr, lane);
      softmax.merge(s, scale, nullptr, lane);
      Packed share;
      pack_left<T>(share, s);
      E::settle(softmax.out);
      E::begin();
      E::template gather<64>(softmax.out, share, k + E::kElements, 0, lane);
      E::end();
      E::settle(softmax.out);
    }

    softmax.finish();
    float* const stats = stats_of<T>(p, at.flat_head(p));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int t = low + 8 * half;
      if (lane % 4 == 0 && t < p.queries) {
        store_log_sum<T>(stats, p.queries, t, softmax.largest[half], softmax.sum[half]);
      }
    }
    sync_group(group);  // the group's queries have been read
    store_rows<E, 64>(q, softmax.out, softmax.inverse(0), softmax.inverse(1), row, lane,
                      head_of<T>(p.out, {}, at.batch, at.head), p.out.token,
                      at.first + group * kTile, p.queries, p.width);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) finite &= fabsf(softmax.out[n][c]) < INFINITY;
    }
  }

  if (__all_sync(0xFFFFFFFFu, finite)) return;
  __syncwarp();  // what other lanes stored is read here
  for (int tile = blockIdx.x; tile < groups; tile += gridDim.x) {
    const TilePlace at(p, tile, F::kTokens);
    redo_stored_rows<T>(p, at.batch, at.head, at.first + group * kTile + row, lane);
  }
}

}  // namespace sinkhorn::cuda
