// Backward in one kernel for causal attention whose window reaches into the tile before, on Hopper:
// D in (32, 64], 64 % b == 0 and window * b <= 64, with a sort or without, no mask, no weights, no
// dropout. attention_bwd.cuh has the equations.
//
// A CTA is one group of four warps that walks up a run of consecutive tiles of 64 tokens of one
// head. At step i it has the queries of tile i, and meets with them, one after the other,
//
//   the keys of tile i - 1              : dk, dv, begun a step ago, are complete and stored
//   the positions sorted into tile i    : dk', dv', stored                        (kSorted)
//   the keys of tile i                  : dk, dv begin, and stay in registers till the next step
//
// while dq adds up over them in registers. So each tile of q, dO, O, K and V is read once, save at
// the ends of a run: its first step reads the keys before it, for dq alone, and one more step, with
// the queries behind the run, completes the run's last dk and dv. Each sum has one order, whatever
// the runs: where a head is cut changes no bit.
//
// Shared memory: two stages of q and dO; slots of K and V, as many as a step meets; dS' of the tile
// in work, where dq finds it. What a slot held is stored through it, and then it takes a tile of
// the next step, so that every copy has a whole step to arrive. They are bulk copies (bulk.cuh): of
// copies by threads the fences between dS' and the products that read it would wait for those under
// way as well. dk, dv, dq, scores and dP are 160 registers: two CTAs share a multiprocessor, each
// at work while the other waits.
#pragma once

#include "kernels/cuda/attention_bwd.cuh"
#include "kernels/cuda/bulk.cuh"

namespace sinkhorn::cuda {

constexpr int kWalkCtas = 2;  // a multiprocessor
template <bool kSorted>
constexpr int kWalkSlots = kSorted ? 3 : 2;
template <bool kSorted>
constexpr int kWalkLists = kSorted ? 2 : 1;

template <class E, bool kSorted>
struct WalkMemory {
  using Tile = typename E::T[E::kElements];
  struct Pair {
    Tile first, second;
  };
  Pair queries[2];                        // and dO, of this step and the next
  Pair keys[kWalkSlots<kSorted>];         // and values
  Tile changes;                           // dS'
  QueryFacts facts[kWalkLists<kSorted>];  // local, sorted
  // Barriers of what comes by bulk copies.
  uint64_t queries_arrived[2], keys_arrived[kWalkSlots<kSorted>];
};

// Tiles [begin, end) of a head's, which are cut into runs of about the same length.
struct WalkRun {
  int tiles, begin, end, head, batch;

  __device__ __forceinline__ WalkRun(const AttentionCall& p, int runs) {
    tiles = (p.length + kTile - 1) / kTile;
    const int64_t run = blockIdx.x % runs, flat_head = blockIdx.x / runs;
    begin = static_cast<int>(tiles * run / runs);
    end = static_cast<int>(tiles * (run + 1) / runs);
    head = static_cast<int>(flat_head % p.heads);
    batch = static_cast<int>(flat_head / p.heads);
  }
  // Rows of the head; sequences all begin at 0 and have the same length here.
  template <class T>
  __device__ __forceinline__ T* rows_of(const Tokens& x) const {
    return head_of<T>(x, Sequences{}, batch, head);
  }
  __device__ __forceinline__ int64_t flat_head(const AttentionCall& p) const {
    return static_cast<int64_t>(batch) * p.heads + head;
  }
};

// A thread's share of what delta and the softmax need of 64 queries, loaded a step ahead: O at the
// four pieces of dO, and the statistics of one query.
template <class E>
struct QueryPieces {
  using T = typename E::T;
  static constexpr int kApart = kThreads / 8;  // rows between a thread's pieces
  uint4 out[kTile / kApart];
  float log_sum;

  __device__ __forceinline__ void load(const AttentionCall& p, const T* rows, const float* stats,
                                       int first) {
    const int c = threadIdx.x % 8 * 8;
#pragma unroll
    for (int i = 0; i < kTile / kApart; ++i) {
      const int t = first + threadIdx.x / 8 + i * kApart;
      out[i] = t < p.queries && c < p.width
                   ? *reinterpret_cast<const uint4*>(rows + t * p.out.token + c)
                   : make_uint4(0, 0, 0, 0);
    }
    const int t = first + threadIdx.x;
    const bool asked = threadIdx.x < kTile && t < p.queries;
    log_sum = asked ? load_log_sum<T>(stats, p.queries, t) : INFINITY;
  }

  // Sets log_sum and delta, eight threads a row; dO has arrived.
  template <int kLists>
  __device__ __forceinline__ void turn_into(QueryFacts* facts, const T* grad) const {
    const int r = threadIdx.x / 8, c = threadIdx.x % 8 * 8;
#pragma unroll
    for (int i = 0; i < kTile / kApart; ++i) {
      const uint4 change = *reinterpret_cast<const uint4*>(grad + E::at(r + i * kApart, c));
      const float total = delta_of<T>(out[i], change);
#pragma unroll
      for (int list = 0; list < kLists; ++list) {
        if (threadIdx.x % 8 == 0) facts[list].delta[r + i * kApart] = total;
      }
    }
#pragma unroll
    for (int list = 0; list < kLists; ++list) {
      if (threadIdx.x < kTile) {
        facts[list].log_sum[threadIdx.x] = log_sum;
      }
    }
  }
};

// The queries of a step, and the sums a tile of keys adds to.
template <class E>
struct WalkStep {
  using T = typename E::T;
  const T *q, *g;  // g: dO
  T* ds;           // [key][query]
  float scale;
  int row, lane;

  // P' and dS' of 64 keys, from position `first` of their list on, as left sides of products; dS'
  // also in shared memory, where the tensor cores see all of it on return.
  __device__ __forceinline__ void turn(Packed& share, Packed& change, const T* keys,
                                       const QueryFacts& facts, bool all_seen, int first) const {
    float s[8][4], dp[8][4];
    E::begin();
    E::scores(s, keys, q, row, lane);
    E::scores(dp, keys + E::kElements, g, row, lane);
    E::end();
    E::settle(s);
    E::settle(dp);
    turn_plain(s, dp, facts, all_seen, first + row + lane / 4, scale, lane);
    pack_left<T>(share, s);
    pack_left<T>(change, dp);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = row + lane / 4 + e % 2 * 8, c = step * 16 + e / 2 * 8 + lane % 4 * 2;
        *reinterpret_cast<uint32_t*>(ds + E::score_at(r, c)) = change[step][e];
      }
    }
    E::publish();
    __syncthreads();  // dS' is there; values and facts of the tile have been read
  }
  // dv += P' dO, dk += dS' q, dq += dS k.
  __device__ __forceinline__ void add(float (&dk)[8][4], float (&dv)[8][4], float (&dq)[8][4],
                                      const Packed& share, const Packed& change,
                                      const T* keys) const {
    E::settle(dk);
    E::settle(dv);
    E::settle(dq);
    E::begin();
    E::template gather<64>(dv, share, g, 0, lane);
    E::template gather<64>(dk, change, q, 0, lane);
    E::gather_t(dq, ds, keys, row, lane);
    E::end();
    E::settle(dk);
    E::settle(dv);
    E::settle(dq);
  }
};

__device__ __forceinline__ void clear(float (&x)[8][4]) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[n][e] = 0.0f;
  }
}

template <class E, bool kSorted>
__global__ void __launch_bounds__(kThreads, kWalkCtas)
    attention_bwd_walk_kernel(const __grid_constant__ AttentionCall p,
                              const __grid_constant__ TokenMaps maps, const int runs) {
  using T = typename E::T;
  using Memory = WalkMemory<E, kSorted>;
  constexpr int kSlots = kWalkSlots<kSorted>, kLists = kWalkLists<kSorted>;
  extern __shared__ __align__(1024) unsigned char shared[];
  Memory& memory = *reinterpret_cast<Memory*>(shared);
  QueryFacts* const facts = memory.facts;

  const WalkRun run(p, runs);
  const Plan plan(p, run.batch);
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16;
  const int sorted_limit = p.rows * p.block;

  if (threadIdx.x == 0) {
    for (uint64_t& arrived : memory.queries_arrived) ready_barrier(&arrived);
    for (uint64_t& arrived : memory.keys_arrived) ready_barrier(&arrived);
    E::publish();
  }
  __syncthreads();
  const auto copy = [&](typename Memory::Pair& to, uint64_t* arrived, const CUtensorMap& first,
                        const CUtensorMap& second, int i) {
    if (threadIdx.x == 0) {
      expect_bytes(arrived, sizeof(typename Memory::Pair));
      copy_box(to.first, first, arrived, 0, i * kTile, run.head, run.batch);
      copy_box(to.second, second, arrived, 0, i * kTile, run.head, run.batch);
    }
    __syncwarp();
  };
  // Each of these is awaited once if it began, before the next one into the same place.
  QueryPieces<E> pieces;
  const auto has_queries = [&](int i) { return i <= run.end && i < run.tiles; };
  const auto load_queries = [&](int i) {
    if (!has_queries(i)) return;
    copy(memory.queries[i % 2], &memory.queries_arrived[i % 2], maps.query, maps.grad, i);
    pieces.load(p, run.rows_of<const T>(p.out), stats_of<T>(p, run.flat_head(p)), i * kTile);
  };
  const auto load_keys = [&](int i, int slot) {
    if (i < 0 || i >= run.end) return;
    copy(memory.keys[slot], &memory.keys_arrived[slot], maps.key, maps.value, i);
  };
  const auto load_sorted = [&](int i, int slot) {
    if (i >= run.end) return;
    copy(memory.keys[slot], &memory.keys_arrived[slot], maps.sorted_key, maps.sorted_value, i);
  };
  unsigned parities = 0;  // of the slots, a bit each
  const auto await_slot = [&](int slot) {
    await_bytes(&memory.keys_arrived[slot], parities >> slot & 1u);
    parities ^= 1u << slot;
    __syncwarp();
  };
  // 16 rows a warp, through a tile that no product reads any more.
  const auto store = [&](T* tile, const float(&x)[8][4], float factor, const Tokens& to, int i) {
    store_rows<E, 64>(tile, x, factor, factor, row, lane, run.rows_of<T>(to), to.token, i * kTile,
                      p.length, p.width);
  };

  int previous = 0, own = 1, sorted = kSlots - 1;
  load_keys(run.begin - 1, previous);
  load_queries(run.begin);
  if constexpr (kSorted) load_sorted(run.begin, sorted);
  load_keys(run.begin, own);

  float dk[8][4] = {}, dv[8][4] = {};  // of tile i - 1, without the queries of tile i
#pragma unroll 1
  for (int i = run.begin; i <= run.end; ++i) {
    const int first = i * kTile;
    auto& queries = memory.queries[i % 2];
    const WalkStep<E> step{queries.first, queries.second, memory.changes, p.scale * kLog2E, row,
                           lane};
    Packed share, change;
    float dq[8][4];

    if (has_queries(i)) {
      await_bytes(&memory.queries_arrived[i % 2], (i - run.begin) / 2 % 2);
      __syncwarp();
    }
    if (i == run.begin && i > 0) await_slot(previous);
    pieces.template turn_into<kLists>(facts, step.g);
    const bool sees_previous = set_seen(facts[0], plan, List::kLocal, first, first - kTile);
    const bool sees_sorted =
        !kSorted || set_seen(facts[kLists - 1], plan, List::kSorted, first, first);
    E::publish();  // what was stored through the queries' place a step ago
    const bool all_previous = __syncthreads_and(sees_previous) != 0;  // facts are there
    load_queries(i + 1);

    if (i > 0 && i < run.tiles) {
      step.turn(share, change, memory.keys[previous].first, facts[0], all_previous, first - kTile);
      clear(dq);
      step.add(dk, dv, dq, share, change, memory.keys[previous].first);
    } else {
      clear(dq);
    }
    if (i < run.end) await_slot(kSorted ? sorted : own);
    [[maybe_unused]] const bool all_sorted =
        __syncthreads_and(sees_sorted) != 0;  // keys and dS' have been read
    if (i > run.begin) {
      store(memory.keys[previous].first, dk, p.scale, p.grad_key, i - 1);
      store(memory.keys[previous].second, dv, 1.0f, p.grad_value, i - 1);
    }
    if (i == run.end) break;

    if constexpr (kSorted) {
      auto& keys = memory.keys[sorted];
      step.turn(share, change, keys.first, facts[1], all_sorted, first);
      load_sorted(i + 1, previous);  // all threads had stored from it when dS' was there
      clear(dk);
      clear(dv);
      step.add(dk, dv, dq, share, change, keys.first);
      await_slot(own);
      __syncthreads();  // keys and dS' have been read
      const int64_t at = run.flat_head(p) * sorted_limit * p.width;
      store_rows<E, 64>(keys.first, dk, p.scale, p.scale, row, lane,
                        static_cast<T*>(p.grad_sorted_key) + at, p.width, first, sorted_limit,
                        p.width);
      store_rows<E, 64>(keys.second, dv, 1.0f, 1.0f, row, lane,
                        static_cast<T*>(p.grad_sorted_value) + at, p.width, first, sorted_limit,
                        p.width);
    }

    const int freed = kSorted ? sorted : previous;
    step.turn(share, change, memory.keys[own].first, facts[0], false, first);
    load_keys(i + 1, freed);  // all threads had stored from it when dS' was there
    clear(dk);
    clear(dv);
    step.add(dk, dv, dq, share, change, memory.keys[own].first);
    __syncthreads();  // queries and dS' have been read
    store(queries.first, dq, p.scale, p.grad_query, i);

    if constexpr (kSorted) sorted = previous;
    previous = own;
    own = freed;
  }
}

}  // namespace sinkhorn::cuda
