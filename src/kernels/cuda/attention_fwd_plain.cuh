// Forward as in attention_fwd.cuh for the common cases on Hopper: D <= 64, blocks that fill tiles of
// 64 or of 128 tokens, no mask, no dropout; a sort, the block before under a causal rule, or both.
//
// A group of four warps takes 64 queries and has every score they ask for at once, so that one
// softmax does without a running one. A CTA goes from tile to tile, the next one's loads under way
// while it works: what is left to wait for is memory.
#pragma once

#include "kernels/cuda/attention_fwd.cuh"

namespace sinkhorn::cuda {

// kSorted: the positions sorted into the block are seen; kPrevious: the tile of tokens before.
// kHalves: tiles of 64 in a CTA's, 2 for blocks of 128.
template <class E_, bool kSorted_, bool kPrevious_, int kHalves_>
struct PlainForward {
  using E = E_;
  static constexpr bool kSorted = kSorted_, kPrevious = kPrevious_;
  static constexpr int kHalves = kHalves_, kThreadsOfAll = kThreads * kHalves;
  static constexpr int kLists = kSorted + kPrevious + 1;  // sorted, previous, own
  static constexpr int kKeyTiles = kLists * kHalves;
  static constexpr int kStage = (kHalves + 2 * kKeyTiles) * E::kElements;  // q, k of all, v of all
  static constexpr int kShared = 2 * kStage * 2;                           // bytes
  static constexpr int kCtas = kHalves == 1 ? 2 : 1;                       // on a multiprocessor
};

template <class F>
__global__ void __launch_bounds__(F::kThreadsOfAll, F::kCtas)
    attention_fwd_plain_kernel(const __grid_constant__ AttentionCall p, const int tiles) {
  using E = typename F::E;
  using T = typename E::T;
  constexpr int kSize = kTile * F::kHalves;  // tokens of a CTA's tile
  extern __shared__ __align__(1024) unsigned char shared[];
  T* const stages = reinterpret_cast<T*>(shared);

  const int group = threadIdx.x / kThreads, lane = threadIdx.x % 32;
  const int row = threadIdx.x % kThreads / 32 * 16;
  const Plan plan(p, 0);
  const float scale = fabsf(p.scale) * 1.4426950408889634f;
  // Where key tile j of a CTA's tile begins in its list.
  const auto start = [&](int j, int first) {
    const bool before = F::kPrevious && j / F::kHalves == (F::kSorted ? 1 : 0);
    return first + j % F::kHalves * kTile - (before ? kSize : 0);
  };
  const auto is_sorted = [](int j) { return F::kSorted && j < F::kHalves; };

  const auto load = [&](int tile, int stage) {
    if (tile < tiles) {
      const TilePlace at(p, tile, kSize);
      T* const q = stages + stage * F::kStage;
      T* const keys = q + F::kHalves * E::kElements;
      const T* const query = head_of<const T>(p.query, p.sequences, at.batch, at.head);
#pragma unroll
      for (int half = 0; half < F::kHalves; ++half) {
        load_rows<E, F::kThreadsOfAll>(q + half * E::kElements, query, p.query.token,
                                       at.first + half * kTile, p.length, p.width, nullptr);
      }
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const Tokens& view = side == 0 ? p.key : p.value;
        const T* const local = head_of<const T>(view, p.sequences, at.batch, at.head);
        const int positions = p.rows * p.block;
        const T* const sorted = static_cast<const T*>(side == 0 ? p.sorted_key : p.sorted_value) +
                                at.flat_head(p) * positions * p.width;
#pragma unroll
        for (int j = 0; j < F::kKeyTiles; ++j) {
          T* const to = keys + (side * F::kKeyTiles + j) * E::kElements;
          const int first = start(j, at.first);
          if (is_sorted(j)) {
            load_rows<E, F::kThreadsOfAll>(to, sorted, p.width, first, positions, p.width, nullptr);
          } else {  // before the first tile there are zeros
            load_rows<E, F::kThreadsOfAll>(to, local, view.token, max(first, 0),
                                           first < 0 ? 0 : p.length, p.width, nullptr);
          }
        }
      }
    }
    commit_copies();
  };

  int stage = 0;
  load(blockIdx.x, 0);
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, stage ^= 1) {
    const TilePlace at(p, tile, kSize);
    T* const q = stages + stage * F::kStage + group * E::kElements;
    const T* const keys = stages + stage * F::kStage + F::kHalves * E::kElements;
    const T* const values = keys + F::kKeyTiles * E::kElements;
    wait_copies<0>();
    E::publish();
    __syncthreads();  // this stage is loaded, and the other one has been read
    load(tile + gridDim.x, stage ^ 1);

    float s[F::kKeyTiles][8][4];
    E::begin();
#pragma unroll
    for (int j = 0; j < F::kKeyTiles; ++j) E::scores(s[j], q, keys + j * E::kElements, row, lane);
    E::end();
    const int low = at.first + group * kTile + row + lane / 4;  // this lane's queries: low, low + 8
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < F::kKeyTiles; ++j) {
      E::settle(s[j]);
      if (p.scale < 0.0f) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
#pragma unroll
          for (int c = 0; c < 4; ++c) s[j][n][c] = -s[j][n][c];
        }
      }
      const List list = is_sorted(j) ? List::kSorted : List::kLocal;
      const Interval seen[2] = {plan.seen(list, low), plan.seen(list, low + 8)};
      const int first = start(j, at.first);
      const auto all = [&](const Interval& x) { return x.begin <= first && x.end >= first + kTile; };
      if (!__all_sync(0xFFFFFFFFu, all(seen[0]) && all(seen[1]))) {
        hide(s[j], seen, first, nullptr, lane);
      }
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) top[c / 2] = fmaxf(top[c / 2], s[j][n][c]);
      }
    }

    float base[2], sum[2] = {0.0f, 0.0f}, factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[half] = quad_max(top[half]);
      if (top[half] != -INFINITY) top[half] *= scale;
      base[half] = top[half] == -INFINITY ? 0.0f : top[half];
    }
    Packed share[F::kKeyTiles];
#pragma unroll
    for (int j = 0; j < F::kKeyTiles; ++j) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          s[j][n][c] = power_of_2(s[j][n][c] * scale - base[c / 2]);
          sum[c / 2] += s[j][n][c];
        }
      }
      pack_left<T>(share[j], s[j]);
    }
    float out[8][4] = {};
    E::settle(out);
    E::begin();
#pragma unroll
    for (int j = 0; j < F::kKeyTiles; ++j) {
      E::template gather<64>(out, share[j], values + j * E::kElements, 0, lane);
    }
    float* const stats = p.stats + at.flat_head(p) * 2 * p.queries;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] = quad_sum(sum[half]);
      factor[half] = sum[half] == 0.0f ? 0.0f : 1.0f / sum[half];
      const int t = low + 8 * half;
      if (lane % 4 == 0 && t < p.queries) {
        stats[t] = top[half];
        stats[p.queries + t] = sum[half];
      }
    }
    E::end();
    E::settle(out);
    sync_group(group);  // the group's queries have been read
    store_rows<E, 64>(q, out, factor[0], factor[1], row, lane,
                      head_of<T>(p.out, p.sequences, at.batch, at.head), p.out.token,
                      at.first + group * kTile, p.queries, p.width);
    const bool asks[2] = {low < p.queries, low + 8 < p.queries};
    redo_rows<T, 8>(p, Dropout{}, out, at.batch, at.head, low - lane / 4, asks, lane);
  }
}

}  // namespace sinkhorn::cuda
