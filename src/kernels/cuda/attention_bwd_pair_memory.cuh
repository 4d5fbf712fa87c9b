// What a CTA of attention_bwd_pair.cuh holds in shared memory, how it is loaded, and where its
// gradients go.
#pragma once

#include <algorithm>

#include "kernels/cuda/attention_bwd.cuh"
#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/warp_rows.cuh"

namespace sinkhorn::cuda {

// Of D <= 64 and one or two halves, or of more and one.
template <class E, int kHalves>
struct PairShape {
  static_assert(kHalves == 1 || (kHalves == 2 && E::kWidth <= 64));
  static constexpr int kStages = E::kWidth <= 128 ? 2 : 1;  // a tile of 256 columns has 32 KB
  static constexpr int kTokens = kHalves * kTile;
  static constexpr int kGroups = 2 * kHalves;  // lists x halves of the keys
  static constexpr int kAllThreads = kGroups * kThreads;
  static constexpr int kCtas = (E::kWidth <= 64 ? 2 : 1) / kHalves;  // of a multiprocessor
  static constexpr int kStageTiles = 2 * kHalves + 2 * kGroups;      // q, dO; keys, values
  static constexpr int kStageElements = kStageTiles * E::kElements;
  // dS' of the last half lies over the values, if those are as large.
  static constexpr bool kOverValues = E::kElements >= E::kScoreElements;
  static constexpr int kScoreHalves = kOverValues ? kHalves - 1 : kHalves;
  static constexpr int kElements =
      kStages * kStageElements + kScoreHalves * kGroups * E::kScoreElements;
};

// What is known of a CTA's queries, as in QueryFacts.
template <int kHalves>
struct PairFacts {
  float sorted_log_sum[kHalves * kTile];  // for sorted positions: +inf where it sees none
  float log_sum[kHalves * kTile], delta[kHalves * kTile];
  uint64_t arrived[2];  // a stage's barrier
};

template <class E, int kHalves>
constexpr int attention_bwd_pair_shared() {
  return PairShape<E, kHalves>::kElements * 2 + static_cast<int>(sizeof(PairFacts<kHalves>));
}

// The tiles of a stage, and those of scores, which the stages share.
template <class E, int kHalves>
struct PairTiles {
  using T = typename E::T;
  using Shape = PairShape<E, kHalves>;
  T *stage, *scores;

  __device__ __forceinline__ PairTiles(T* tiles, int number)
      : stage(tiles + number * Shape::kStageElements),
        scores(tiles + Shape::kStages * Shape::kStageElements) {}
  __device__ __forceinline__ T* query(int half) const { return stage + half * E::kElements; }
  __device__ __forceinline__ T* grad(int half) const { return query(kHalves + half); }
  __device__ __forceinline__ T* key(int group) const { return query(2 * kHalves + 2 * group); }
  __device__ __forceinline__ T* value(int group) const { return key(group) + E::kElements; }
  // dS' of a group's keys and a half of the queries.
  __device__ __forceinline__ T* change(int group, int half) const {
    if (Shape::kOverValues && half == kHalves - 1) return value(group);
    const int number = Shape::kScoreHalves > 1 ? half * Shape::kGroups + group : group;
    return scores + number * E::kScoreElements;
  }
};

// Begins to load a tile; one thread calls this.
template <class E, int kHalves>
__device__ __forceinline__ void load_pair(const TokenMaps& maps, const TilePlace& at,
                                          const PairTiles<E, kHalves>& to, uint64_t* arrived) {
  using Shape = PairShape<E, kHalves>;
  expect_bytes(arrived, Shape::kStageElements * static_cast<int>(sizeof(typename E::T)));
  const auto copy = [&](typename E::T* tile, const CUtensorMap& map, int half) {
#pragma unroll
    for (int panel = 0; panel < E::kPanels; ++panel) {
      copy_box(tile + panel * E::kPanelElements, map, arrived, panel * E::kColumns,
               at.first + half * kTile, at.head, at.batch);
    }
  };
#pragma unroll
  for (int i = 0; i < kHalves; ++i) {
    copy(to.query(i), maps.query, i);
    copy(to.key(i), maps.sorted_key, i);
    copy(to.key(kHalves + i), maps.key, i);
    copy(to.grad(i), maps.grad, i);
    copy(to.value(i), maps.sorted_value, i);
    copy(to.value(kHalves + i), maps.value, i);
  }
}

// A thread's share of what delta and the softmax need of a tile: one piece of O where D <= 32, two
// where D <= 64, then four and eight, and one query's statistics.
template <class E, int kHalves>
struct PairAhead {
  using T = typename E::T;
  using Shape = PairShape<E, kHalves>;
  static constexpr int kPieces = E::kWidth / 8, kApart = Shape::kAllThreads / kPieces;
  static constexpr int kShare = Shape::kTokens / kApart;
  uint4 out[kShare] = {};
  float log_sum = INFINITY;

  __device__ __forceinline__ void load(const AttentionCall& p, const TilePlace& at) {
    const T* const rows = head_of<const T>(p.out, {}, at.batch, at.head);
    const int piece = threadIdx.x % kPieces * 8;
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int t = at.first + threadIdx.x / kPieces + i * kApart;
      out[i] = t < p.length && piece < p.width
                   ? *reinterpret_cast<const uint4*>(rows + t * p.out.token + piece)
                   : make_uint4(0, 0, 0, 0);
    }
    const int t = at.first + threadIdx.x;
    const bool asked = threadIdx.x < Shape::kTokens && t < p.length;
    log_sum = asked ? load_log_sum<T>(stats_of<T>(p, at.flat_head(p)), p.queries, t) : INFINITY;
  }
  // delta = dO.O, a thread a piece.
  __device__ __forceinline__ void spread(PairFacts<kHalves>& facts, const T* grad) const {
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int r = threadIdx.x / kPieces + i * kApart;  // tiles of dO lie one behind the other
      const uint4 change = *reinterpret_cast<const uint4*>(
          grad + r / kTile * E::kElements + E::at(r % kTile, threadIdx.x % kPieces * 8));
      const float total = delta_of<T, kPieces>(out[i], change);
      if (threadIdx.x % kPieces == 0) facts.delta[r] = total;
    }
    if (threadIdx.x < Shape::kTokens) {
      facts.log_sum[threadIdx.x] = log_sum;
      facts.sorted_log_sum[threadIdx.x] = sorted_log_sum(log_sum);
    }
  }
};

// Where the gradient of a group's keys or values goes.
template <class T, int kHalves>
__device__ __forceinline__ WarpRows<T> pair_rows(const AttentionCall& p, const Tokens& local,
                                                 void* sorted, int group, const TilePlace& at) {
  const int first = at.first + group % kHalves * kTile, positions = p.rows * p.block;
  if (group < kHalves) {
    return {static_cast<T*>(sorted) + at.flat_head(p) * positions * p.width, p.width, first,
            positions};
  }
  return {head_of<T>(local, {}, at.batch, at.head), local.token, first, p.length};
}

}  // namespace sinkhorn::cuda
