// Forward as in attention_fwd.cuh for the common cases on Hopper: blocks that fill tiles of 64 or
// that are multiples of 128 tokens, no mask, no dropout; a sort, the tile before under a causal
// rule, or both; D <= 64, or any with a sort alone and blocks that fill tiles.
//
// A CTA goes from one group of 64 or 128 queries to the next, four warps for each 64, and through a
// ring of key tiles: the loads of the next ones, of this group of queries and then of the next, are
// always under way, so that what is left to wait for is memory itself. Tiles come by bulk copies
// (bulk.cuh) and are read by products only, and the output goes from registers to memory. Groups
// go from the last to the first: what the sort wrote last is still in the second-level cache.
#pragma once

#include "kernels/cuda/attention_fwd.cuh"
#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/early.cuh"
#include "kernels/cuda/warp_rows.cuh"

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
  static constexpr bool kSorted = true;
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

// Where the n-th of the groups of queries lies.
template <class F>
__device__ __forceinline__ TilePlace place_of(const AttentionCall& p, int n, int groups) {
  return TilePlace(p, groups - 1 - n, F::kTokens);
}

template <class F>
struct PlainMemory {
  using Tile = typename F::E::T[F::E::kElements];
  struct Keys {
    Tile key, value;
  };
  Tile query[2][F::kHalves];  // of this group of queries and the next
  Keys ring[F::kRing];
  uint64_t arrived[F::kRing];  // barriers: the keys of a slot, and with the first ones the queries
};

// What a CTA loads: key tile after key tile of one group of queries after the other.
template <class F>
struct PlainLoads {
  using E = typename F::E;
  const AttentionCall& p;
  const TokenMaps& maps;
  PlainMemory<F>& memory;
  int groups;
  int group = blockIdx.x, j = 0, turn = 0, slot = 0;  // next is key tile j of this group
  // Where that is takes a few divisions, too many for every tile.
  TilePlace at = place_of<F>(p, group, groups);
  typename F::Keys keys{p, at.first};

  __device__ __forceinline__ PlainLoads(const AttentionCall& p_, const TokenMaps& maps_,
                                        PlainMemory<F>& memory_, int groups_)
      : p(p_), maps(maps_), memory(memory_), groups(groups_) {}

  __device__ __forceinline__ void copy(typename E::T* tile, const CUtensorMap& map,
                                       int first) const {
#pragma unroll
    for (int panel = 0; panel < E::kPanels; ++panel) {
      copy_box(tile + panel * E::kPanelElements, map, &memory.arrived[slot], panel * E::kColumns,
               first, at.head, at.batch);
    }
  }
  // Begins the next load, if there is one; its slot has been read by all.
  __device__ __forceinline__ void next() {
    if (group >= groups) return;
    if (threadIdx.x == 0) {
      const bool is_sorted = keys.is_sorted(j);
      constexpr int kBytes = sizeof(typename PlainMemory<F>::Tile);
      expect_bytes(&memory.arrived[slot], (2 + (j == 0 ? F::kHalves : 0)) * kBytes);
      if (j == 0) {
#pragma unroll
        for (int half = 0; half < F::kHalves; ++half) {
          copy(memory.query[turn][half], maps.query, at.first + half * kTile);
        }
      }
      copy(memory.ring[slot].key, is_sorted ? maps.sorted_key : maps.key, keys.start(j));
      copy(memory.ring[slot].value, is_sorted ? maps.sorted_value : maps.value, keys.start(j));
    }
    __syncwarp();
    slot = slot + 1 == F::kRing ? 0 : slot + 1;
    if (++j < keys.count) return;
    j = 0;
    turn ^= 1;
    group += gridDim.x;
    at = place_of<F>(p, group, groups);
    keys = typename F::Keys(p, at.first);
  }
};

// The weight of the row sorted into the block of one of a warp's queries, a lane each of the 16,
// twice.
template <class F>
__device__ __forceinline__ float load_row_weight(const AttentionCall& p, const TilePlace& at) {
  if (!F::kSorted || p.row_weight == nullptr) return 1.0f;
  const int t = at.first + threadIdx.x / 32 * 16 + threadIdx.x % 16;
  return t < p.queries ? p.row_weight[(at.flat_head(p) * p.rows + t / p.block) * 2] : 1.0f;
}

// Writes what 16 queries of a warp, from `row` of those from `first` on, have gathered.
template <class T, int kWidth>
__device__ __forceinline__ void store_plain(const AttentionCall& p, const TilePlace& at,
                                            RunningSoftmax<kWidth>& softmax, int first, int row,
                                            int lane) {
  softmax.finish();
  float* const stats = stats_of<T>(p, at.flat_head(p));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int t = first + row + lane / 4 + 8 * half;
    if (lane % 4 == 0 && t < p.queries) {
      store_log_sum<T>(stats, p.queries, t, softmax.largest[half], softmax.sum[half]);
    }
    const float factor = softmax.inverse(half);
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
      softmax.out[n][2 * half] *= factor;
      softmax.out[n][2 * half + 1] *= factor;
    }
  }
  const WarpRows<T> to = {head_of<T>(p.out, {}, at.batch, at.head), p.out.token, first, p.queries};
  store_warp_rows<T>(softmax.out, 1.0f, to, p.width, row, lane);
}

template <class F>
__global__ void __launch_bounds__(F::kAllThreads, F::kCtas)
    attention_fwd_plain_kernel(const __grid_constant__ AttentionCall p,
                               const __grid_constant__ TokenMaps maps, const int groups) {
  using E = typename F::E;
  using T = typename E::T;
  begin_early();
  extern __shared__ __align__(1024) unsigned char shared[];
  PlainMemory<F>& memory = *reinterpret_cast<PlainMemory<F>*>(shared);

  const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / kThreads, 0);
  const int lane = threadIdx.x % 32, row = threadIdx.x % kThreads / 32 * 16;
  const Plan plan(p, 0);
  const float scale = fabsf(p.scale) * 1.4426950408889634f;

  if (threadIdx.x == 0) {
    for (int i = 0; i < F::kRing; ++i) ready_barrier(&memory.arrived[i]);
    E::publish();
  }
  __syncthreads();
  PlainLoads<F> loads(p, maps, memory, groups);
#pragma unroll 1
  for (int i = 0; i + 1 < F::kRing; ++i) loads.next();

  int slot = 0, parity = 0, turn = 0;
  bool right = true;        // all results are finite, and no row sorted here is of zeros
  float row_weight = 1.0f;  // looked at a group later, when nothing waits for it
  for (int tile = blockIdx.x; tile < groups; tile += gridDim.x, turn ^= 1) {
    const TilePlace at = place_of<F>(p, tile, groups);
    right &= row_weight > 0.0f;
    row_weight = load_row_weight<F>(p, at);
    const int begin = at.first + group * kTile;  // of the group's queries
    const int low = begin + row + lane / 4;      // this lane's queries: low, low + 8
    const Interval sorted[2] = {plan.seen(List::kSorted, low), plan.seen(List::kSorted, low + 8)};
    const Interval local[2] = {plan.seen(List::kLocal, low), plan.seen(List::kLocal, low + 8)};
    const typename F::Keys keys(p, at.first);
    RunningSoftmax<E::kWidth> softmax;
#pragma unroll F::kUnroll
    for (int j = 0; j < keys.count; ++j) {
      const auto& own = memory.ring[slot];
      __syncthreads();  // the tile before has been read
      loads.next();
      await_bytes(&memory.arrived[slot], parity);
      __syncwarp();
      if (++slot == F::kRing) {
        slot = 0;
        parity ^= 1;
      }
      const bool is_sorted = keys.is_sorted(j);
      const int first = keys.start(j), last = begin + kTile - 1;
      // The first half of the queries may see nothing of a tile that the second half sees.
      if (F::kHalves > 1 && first > last && (is_sorted ? plan.inclusive : plan.causal)) continue;
      float s[8][4];
      score_tile<E>(s, memory.query[turn][group], own.key, row, p.scale < 0.0f, lane);
      const Interval seen[2] = {is_sorted ? sorted[0] : local[0], is_sorted ? sorted[1] : local[1]};
      const auto all = [&](const Interval& x) {
        return x.begin <= first && x.end >= first + kTile;
      };
      if (!__all_sync(0xFFFFFFFFu, all(seen[0]) && all(seen[1])))
        hide(s, seen, first, nullptr, lane);
      softmax.merge(s, scale, nullptr, lane);
      gather_tile<E>(softmax.out, s, own.value, lane);
    }
#pragma unroll
    for (int n = 0; n < E::kWidth / 8; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) right &= fabsf(softmax.out[n][c]) < INFINITY;
    }
    store_plain<T>(p, at, softmax, begin, row, lane);
  }

  if (__all_sync(0xFFFFFFFFu, right && row_weight > 0.0f)) return;
  __syncwarp();  // what other lanes stored is read here
  for (int tile = blockIdx.x; tile < groups; tile += gridDim.x) {
    const TilePlace at = place_of<F>(p, tile, groups);
    redo_stored_rows<T>(p, at.batch, at.head, at.first + group * kTile + row, lane);
  }
}

}  // namespace sinkhorn::cuda
