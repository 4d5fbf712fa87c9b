// Backward of sortcut in one kernel, its keys and values at rest (attention_cut.cuh has the case).
//
//   P = e^(score - m) / sum,  dP = dO v',  delta = dO.O,  dS = P (dP - delta)
//   dq = scale dS k',  dk' = scale dS' q,  dv' = P' dO            s < rows * b <= 128
//
// Mapping: a CTA has a head and every splits-th tile of 64 of its queries. A group of four warps
// for each 64 positions holds its dk' and dv' in registers all along the walk; scores are the
// transpose S' = K Q', as in attention_bwd.cuh. One more group feeds them: it loads q, dO and O
// tiles ahead by bulk copies (bulk.cuh), makes delta, and turns the dS that the others leave in
// shared memory into dq. So loads, products and the softmax's arithmetic of neighbouring tiles run
// side by side. At the end a CTA leaves partial sums [split, 2, head, position, D], added in their
// order later.
//
// Barriers, each by the parity of the tile j it is about; the feeder is one tile ahead in `full`
// and one behind in `ready`:
//   full(j)   feeder arrives, workers wait: tile j and its facts stand, and dq(j - 2) has read its
//             dS, whose place dS(j) takes.
//   ready(j)  workers arrive, feeder waits: dS(j) stands, and tile j - 1 has been read for the last
//             time, so that its stage may be loaded again.
// Neither meets itself again early: full(j + 2) comes after ready(j) for the feeder, and that after
// full(j) for every worker; ready(j + 2) comes after full(j + 2), and that after ready(j).
#pragma once

#include "kernels/cuda/attention_bwd.cuh"
#include "kernels/cuda/bulk.cuh"

namespace sinkhorn::cuda {

constexpr int kCutStages = 5;

// Where what is loaded all along the walk comes from.
struct CutMaps {
  CUtensorMap query, grad, out;
};

// What workers know of a tile of 64 queries.
struct CutFacts {
  float log_sum[kTile];  // log2 of the softmax's denominator; +inf behind the last query
  float delta[kTile];
  int counted[2];  // of each 32 queries: every one counts
};

template <class E, int kGroups>
constexpr int attention_bwd_cut_shared() {  // keys, values, two dS, dq, and stages of q, dO, O
  return (4 * kGroups + 1 + 3 * kCutStages) * E::kElements * 2 +
         kCutStages * static_cast<int>(sizeof(CutFacts) + sizeof(uint64_t));
}

// A CTA's part of the work, and its shared memory.
template <class E, int kGroups>
struct CutWalk {
  using T = typename E::T;
  const AttentionCall& p;
  T *keys, *values, *changes, *dq_tile, *stages;
  CutFacts* facts;
  uint64_t* arrived;  // barriers of the stages
  int head, batch, split, tiles, positions;
  int64_t flat_head;

  __device__ __forceinline__ CutWalk(const AttentionCall& call, unsigned char* shared)
      : p(call),
        keys(reinterpret_cast<T*>(shared)),        // [group]
        values(keys + kGroups * E::kElements),     // [group]
        changes(values + kGroups * E::kElements),  // [parity][group], dS as [position][query]
        dq_tile(changes + 2 * kGroups * E::kElements),
        stages(dq_tile + E::kElements),  // [stage][q, dO, O]
        facts(reinterpret_cast<CutFacts*>(stages + 3 * kCutStages * E::kElements)),
        arrived(reinterpret_cast<uint64_t*>(facts + kCutStages)),
        head(blockIdx.y),
        batch(blockIdx.z),
        split(blockIdx.x) {
    const int all = (p.queries + kTile - 1) / kTile;
    tiles = split < all ? (all - split + p.splits - 1) / p.splits : 0;
    positions = p.rows * p.block;
    flat_head = static_cast<int64_t>(batch) * p.heads + head;
  }
  __device__ __forceinline__ int first_query(int j) const { return (split + j * p.splits) * kTile; }
  __device__ __forceinline__ T* stage(int j) const {
    return stages + j % kCutStages * 3 * E::kElements;
  }
  __device__ __forceinline__ T* change(int j, int group) const {
    return changes + (j % 2 * kGroups + group) * E::kElements;
  }

  // Numbers of barriers.
  static constexpr int kEverybody = (kGroups + 1) * kThreads, kBegun = 5;
  static __device__ __forceinline__ int full(int j) { return 1 + j % 2; }
  static __device__ __forceinline__ int ready(int j) { return 3 + j % 2; }
  static __device__ __forceinline__ void wait_at(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kEverybody) : "memory");
  }
  static __device__ __forceinline__ void arrive_at(int barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kEverybody) : "memory");
  }
};

// The feeder: dq.
template <class E, int kGroups>
__device__ __forceinline__ void feed_cut(const CutWalk<E, kGroups>& walk, const CutMaps& maps) {
  using T = typename E::T;
  using Walk = CutWalk<E, kGroups>;
  const AttentionCall& p = walk.p;
  const int thread = threadIdx.x % kThreads, lane = threadIdx.x % 32, row = thread / 32 * 16;
  T* const grad_query = head_of<T>(p.grad_query, p.sequences, walk.batch, walk.head);
  const float* const stats = stats_of<T>(p, walk.flat_head);

  const auto load = [&](int j) {
    if (j < walk.tiles && thread == 0) {
      uint64_t* const arrived = &walk.arrived[j % kCutStages];
      T* to = walk.stage(j);
      expect_bytes(arrived, 3 * E::kElements * static_cast<int>(sizeof(T)));
      for (const CUtensorMap* map : {&maps.query, &maps.grad, &maps.out}) {
        copy_box(to, *map, arrived, 0, walk.first_query(j), walk.head, walk.batch);
        to += E::kElements;
      }
    }
    __syncwarp();
  };
  float log_sum = INFINITY;  // of this thread's query of the next tile
  const auto load_log_sum_of = [&](int j) {
    const int t = walk.first_query(j) + thread;
    const bool valid = j < walk.tiles && thread < kTile && t < p.queries;
    log_sum = valid ? load_log_sum<T>(stats, p.queries, t) : INFINITY;
  };
  const auto set_facts = [&](int j) {
    CutFacts& known = walk.facts[j % kCutStages];
    if (thread < kTile) {
      known.log_sum[thread] = log_sum;
      const int counted = __all_sync(0xFFFFFFFFu, log_sum != INFINITY);
      if (lane == 0) known.counted[thread / 32] = counted;
    }
    const T* const g = walk.stage(j) + E::kElements;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = thread / 8 + 16 * i, at = E::at(r, thread % 8 * 8);
      const uint4 change = *reinterpret_cast<const uint4*>(g + at);
      const uint4 result = *reinterpret_cast<const uint4*>(g + E::kElements + at);
      const float total = delta_of<T>(result, change);
      if (thread % 8 == 0) known.delta[r] = total;
    }
  };

  load_log_sum_of(0);
  for (int j = 0; j < kCutStages - 2; ++j) load(j);
  Walk::wait_at(Walk::kBegun);  // keys and values stand, for good
  for (int j = 0; j <= walk.tiles; ++j) {
    if (j < walk.tiles) {
      await_bytes(&walk.arrived[j % kCutStages], j / kCutStages % 2);
      __syncwarp();
      set_facts(j);
      E::publish();  // what was read here is not overtaken by what is loaded there later
      Walk::arrive_at(Walk::full(j));
      load_log_sum_of(j + 1);
    }
    if (j > 0) Walk::wait_at(Walk::ready(j - 1));
    load(j + kCutStages - 2);  // where tile j - 2 stood
    if (j == 0) continue;
    float dq[8][4] = {};
    E::settle(dq);
    E::begin();
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      E::gather_t(dq, walk.change(j - 1, group), walk.keys + group * E::kElements, row, lane);
    }
    E::end();
    E::settle(dq);
    store_rows<E, 64>(walk.dq_tile, dq, p.scale, p.scale, row, lane, grad_query, p.grad_query.token,
                      walk.first_query(j - 1), p.queries, p.width);
  }
}

// A lane's P' and dS' from scores and dP: two positions, 16 queries.
template <bool kWhole>
__device__ __forceinline__ void turn_cut_scores(float (&s)[8][4], float (&dp)[8][4],
                                                const CutFacts& known, float scale,
                                                const bool (&counts)[2], int lane) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const int column = n * 8 + lane % 4 * 2;
    const float2 log_sum = *reinterpret_cast<const float2*>(known.log_sum + column);
    const float2 delta = *reinterpret_cast<const float2*>(known.delta + column);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float denominator = c % 2 == 0 ? log_sum.x : log_sum.y;
      s[n][c] = power_of_2(s[n][c] * scale - denominator);
      dp[n][c] = s[n][c] * (dp[n][c] - (c % 2 == 0 ? delta.x : delta.y));
      if (!kWhole && (denominator == INFINITY || !counts[c / 2])) s[n][c] = dp[n][c] = 0.0f;
    }
  }
}

// A group of workers: dk' and dv' of its 64 positions.
template <class E, int kGroups>
__device__ __forceinline__ void work_cut(const CutWalk<E, kGroups>& walk, int group) {
  using T = typename E::T;
  using Walk = CutWalk<E, kGroups>;
  const AttentionCall& p = walk.p;
  const int thread = threadIdx.x % kThreads, lane = threadIdx.x % 32, row = thread / 32 * 16;
  const int first = group * kTile, position = first + row + lane / 4;
  const int64_t at = walk.flat_head * walk.positions * p.width;
  T* const k = walk.keys + group * E::kElements;
  T* const v = walk.values + group * E::kElements;
  load_rows<E>(k, static_cast<const T*>(p.sorted_key) + at, p.width, first, walk.positions, p.width,
               nullptr, thread);
  load_rows<E>(v, static_cast<const T*>(p.sorted_value) + at, p.width, first, walk.positions,
               p.width, nullptr, thread);
  commit_copies();
  const Weights weighing(p, walk.batch, walk.head);
  bool counts[2];  // there, and not of a row of zeros
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int s = position + 8 * half;
    counts[half] = s < walk.positions && (!weighing.needed(List::kSorted) ||
                                          weighing.at(List::kSorted, s, walk.positions) > 0.0f);
  }
  const bool all_count = __all_sync(0xFFFFFFFFu, counts[0] && counts[1]);
  wait_copies<0>();
  E::publish();
  Walk::wait_at(Walk::kBegun);  // keys and values stand, for good

  const float scale = p.scale * kLog2E;
  const bool there[2] = {position < walk.positions, position + 8 < walk.positions};
  float dk[8][4] = {}, dv[8][4] = {};
  for (int j = 0; j < walk.tiles; ++j) {
    const T* const q = walk.stage(j);
    const T* const g = q + E::kElements;
    const CutFacts& known = walk.facts[j % kCutStages];
    Walk::wait_at(Walk::full(j));
    float s[8][4], dp[8][4];
    E::begin();
    E::scores(s, k, q, row, lane);
    E::scores(dp, v, g, row, lane);
    E::end();
    E::settle(s);
    E::settle(dp);
    if (all_count && known.counted[0] != 0 && known.counted[1] != 0) {
      turn_cut_scores<true>(s, dp, known, scale, counts, lane);
    } else {
      turn_cut_scores<false>(s, dp, known, scale, counts, lane);
    }
    Packed share, change;
    pack_left<T>(share, s);
    pack_left<T>(change, dp);
    T* const left = walk.change(j, group);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = row + lane / 4 + e % 2 * 8, c = step * 16 + e / 2 * 8 + lane % 4 * 2;
        *reinterpret_cast<uint32_t*>(left + E::score_at(r, c)) = change[step][e];
      }
    }
    E::publish();
    Walk::arrive_at(Walk::ready(j));
    E::settle(dv);
    E::settle(dk);
    E::begin();
    E::template gather<64>(dv, share, g, 0, lane);
    E::template gather<64>(dk, change, q, 0, lane);
    E::end();
    E::settle(dv);
    E::settle(dk);
  }

  if (p.splits == 1) {
    // Through the values, which nobody else reads and this group no longer does.
    sync_group(Walk::kBegun + group);
    store_rows<E, 64>(v, dk, p.scale, p.scale, row, lane, static_cast<T*>(p.grad_sorted_key) + at,
                      p.width, first, walk.positions, p.width);
    store_rows<E, 64>(v, dv, 1.0f, 1.0f, row, lane, static_cast<T*>(p.grad_sorted_value) + at,
                      p.width, first, walk.positions, p.width);
    return;
  }
  const int64_t size = static_cast<int64_t>(p.batch) * p.heads * walk.positions * p.width;
  float* const to = p.partial + walk.split * 2 * size + at;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int d = n * 8 + lane % 4 * 2;
      if (there[half] && d < p.width) {
        float* const pair = to + (position + 8 * half) * p.width + d;
        *reinterpret_cast<float2*>(pair) =
            make_float2(dk[n][2 * half] * p.scale, dk[n][2 * half + 1] * p.scale);
        *reinterpret_cast<float2*>(pair + size) = make_float2(dv[n][2 * half], dv[n][2 * half + 1]);
      }
    }
  }
}

// Grid: splits, heads, sequences.
template <class E, int kGroups>
__global__ void __launch_bounds__((kGroups + 1) * kThreads, 1)
    attention_bwd_cut_kernel(const __grid_constant__ AttentionCall p,
                             const __grid_constant__ CutMaps maps) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const CutWalk<E, kGroups> walk(p, shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kCutStages; ++i) ready_barrier(&walk.arrived[i]);
    E::publish();
  }
  __syncthreads();
  const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / kThreads, 0);
  if (group == kGroups) {
    feed_cut<E, kGroups>(walk, maps);
  } else {
    work_cut<E, kGroups>(walk, group);
  }
}

}  // namespace sinkhorn::cuda
