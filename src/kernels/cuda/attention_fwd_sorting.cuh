// Forward with the sort inside, for heads of few blocks of 64 tokens on Hopper: sorted blocks are
// made in shared memory and read there, and reach memory only if backward is to read them.
//
//   x'[i, p] = sum_j R[i, j] x[j, p]      of keys and values, then attention as attention_fwd_plain
//
// A cluster of CTAs takes a head at a time, a CTA four blocks of it. The sum runs over blocks, and
// is the same for every offset p: a CTA sorts a slice of the offsets, 64 / kCtas of them, of all
// blocks, and sends each destination its rows, by copies from shared memory to shared memory. So a
// key is read from memory once, by the slices, and once more from the second-level cache, as the
// token it is: 3 tensors read and one written, where a sort of its own moves 4 more and reading
// what it made 2.
//
// The warps of a CTA have four tasks, which wait for one another through barriers only:
//   attend     two groups of four warps, a block of queries each, in turns
//   sort       four warps: R times a slice, in place
//   exchange   two warps, keys and values: ask for slices, send what is sorted, say what has come
//   load       one warp: asks for the queries, keys and values of the blocks
//
// A row of 128 bytes lies with its pieces of 16 turned by its place in memory (hopper.cuh). A
// slice's sources begin a row more than their length apart, so that the same piece of eight sources
// lies in eight banks; sorted blocks begin where the rows sent to them have the same turn.
//
// docs/performance.md says what bounds it: the round of the slices, sending above all.
#pragma once

#include "kernels/cuda/attention_fwd.cuh"
#include "kernels/cuda/attention_fwd_sorting_slices.cuh"

namespace sinkhorn::cuda {

template <class F>
__device__ __forceinline__ void load_tokens(const SortingWork<F>& work, int lane) {
  SortingMemory<F>& memory = work.memory;
  work.for_heads([&](const HeadPlace& place, int n) {
#pragma unroll 1
    for (int m = 0; m < work.own; ++m) {
      const int tile = n * work.own + m, slot = tile % F::kRing, turn = tile / F::kRing;
      if (turn > 0) await_bytes(&memory.tokens_read[slot], (turn - 1) & 1);
      __syncwarp();
      if (lane == 0) {
        auto& to = memory.ring[slot];
        uint64_t* const arrived = &memory.tokens_arrived[slot];
        const int at = (work.rank * F::kOwn + m) * kTile;
        expect_bytes(arrived, static_cast<int>(sizeof(to)));
        copy_box(to.query, work.maps.tokens.query, arrived, 0, at, place.head, place.batch);
#pragma unroll
        for (int before = 0; before < F::kKeyTiles; ++before) {
          copy_box(to.key[before], work.maps.tokens.key, arrived, 0, at - before * kTile,
                   place.head, place.batch);
          copy_box(to.value[before], work.maps.tokens.value, arrived, 0, at - before * kTile,
                   place.head, place.batch);
        }
      }
      __syncwarp();
    }
  });
}

// A tile of keys and values into the running softmax; a lane's two queries see the first positions
// of it, as many as `seen`.
template <class E>
__device__ __forceinline__ void attend_tile(RunningSoftmax<E::kWidth>& softmax,
                                            const typename E::T* query, const typename E::T* key,
                                            const typename E::T* value, const int (&seen)[2],
                                            bool negative, float scale, int lane) {
  float s[8][4];
  score_tile<E>(s, query, key, 0, negative, lane);
  if (!__all_sync(0xFFFFFFFFu, seen[0] == kTile && seen[1] == kTile)) {
    const Interval intervals[2] = {{0, seen[0]}, {0, seen[1]}};
    hide(s, intervals, 0, nullptr, lane);
  }
  softmax.merge(s, scale, nullptr, lane);
  gather_tile<E>(softmax.out, s, value, lane);
}

// Writes the statistics of 16 queries of a warp, from `first` on, and their results to `tile`, from
// where they go to memory by themselves. Returns whether they are finite.
template <class F>
__device__ __forceinline__ bool store_attended(const SortingWork<F>& work, const HeadPlace& place,
                                               RunningSoftmax<F::E::kWidth>& softmax,
                                               typename F::T* tile, int first, int lane) {
  using T = typename F::T;
  softmax.finish();
  float nothing[2] = {0.0f, 0.0f};  // NaN if one is not
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float factor = softmax.inverse(half);
#pragma unroll
    for (int n = 0; n < F::E::kWidth / 8; ++n) {
#pragma unroll
      for (int c = 2 * half; c < 2 * half + 2; ++c) {
        softmax.out[n][c] *= factor;
        nothing[half] = fmaf(softmax.out[n][c], 0.0f, nothing[half]);
      }
    }
  }
  Packed packed;
  pack_left<T>(packed, softmax.out);
  F::E::put(tile, packed, 0, lane);
  publish_writes();  // before the statistics are stored, which it would wait for
  __syncwarp();
  if (lane == 0) {
    store_box(work.maps.out, tile, 0, first, place.head, place.batch);
    commit_stores();
  }
  if (lane % 4 == 0) {
    float* const stats = stats_of<T>(work.p, place.flat);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      store_log_sum<T>(stats, work.p.queries, first + lane / 4 + 8 * half, softmax.largest[half],
                       softmax.sum[half]);
    }
  }
  __syncwarp();
  return nothing[0] + nothing[1] == 0.0f;
}

// Returns whether all results of this warp are finite.
template <class F>
__device__ __forceinline__ bool attend_blocks(const SortingWork<F>& work, int group, int warp,
                                              int lane) {
  using E = typename F::E;
  using T = typename F::T;
  const AttentionCall& p = work.p;
  SortingMemory<F>& memory = work.memory;
  const float scale = fabsf(p.scale) * 1.4426950408889634f;
  const bool negative = p.scale < 0.0f;
  const int upto[2] = {warp * 16 + lane / 4 + 1, warp * 16 + lane / 4 + 9};  // and this query
  const bool causal = p.causal != Causal::kNone, inclusive = p.causal == Causal::kInclusive;
  const int own_seen[2] = {causal ? upto[0] : kTile, causal ? upto[1] : kTile};
  bool right = true;
  int to_release = -1;  // slot whose queries' results are on their way
  const auto release = [&] {
    if (lane == 0 && to_release >= 0) {
      await_stores_read();
      arrive(&memory.tokens_read[to_release]);
    }
    __syncwarp();
  };
  work.for_heads([&](const HeadPlace& place, int n) {
#pragma unroll 1
    for (int m = group; m < work.own; m += F::kAttendGroups) {
      const int tile = n * work.own + m, slot = tile % F::kRing, turn = tile / F::kRing;
      const int block = work.rank * F::kOwn + m;
      auto& own = memory.ring[slot];
      RunningSoftmax<E::kWidth> softmax;
      release();
      // The other group may have had this slot last. A barrier tells its phases apart by parity
      // alone, so that what came for it must be over before this group waits for what comes next.
      // (The turn before that was this group's own: so it is while CTAs have an even number.)
      if (turn > 0) await_bytes(&memory.tokens_read[slot], (turn - 1) & 1);
      await_bytes(&memory.tokens_arrived[slot], turn & 1);
      __syncwarp();
      attend_tile<E>(softmax, own.query, own.key[0], own.value[0], own_seen, negative, scale, lane);
      if constexpr (F::kKeyTiles > 1) {
        const int all = block > 0 ? kTile : 0, seen[2] = {all, all};
        attend_tile<E>(softmax, own.query, own.key[1], own.value[1], seen, negative, scale, lane);
      }
      await_bytes(&memory.sorted_arrived[0][m], n & 1);
      await_bytes(&memory.sorted_arrived[1][m], n & 1);
      __syncwarp();
      const T* const key = memory.sorted_block(0, m, work.rank);
      const T* const value = memory.sorted_block(1, m, work.rank);
      const bool stores = p.keeps_sorted && warp == 0 && lane == 0;
      if (stores) {
        store_box(work.maps.tokens.sorted_key, key, 0, block * kTile, place.head, place.batch);
        store_box(work.maps.tokens.sorted_value, value, 0, block * kTile, place.head, place.batch);
        commit_stores();
      }
      __syncwarp();
      const int some = p.causal == Causal::kStrict && block <= p.window ? 0 : kTile;
      const int sorted_seen[2] = {inclusive ? upto[0] : some, inclusive ? upto[1] : some};
      attend_tile<E>(softmax, own.query, key, value, sorted_seen, negative, scale, lane);
      if (stores) await_stores_read();
      __syncwarp();
      sync_group(group);
      if (warp == 0) {
        if (lane < 2) expect_bytes(&memory.sorted_arrived[lane][m], F::kSentBytes);
        __syncwarp();
        if (lane < F::kCtas) arrive_at(address_at(&memory.may_send[block], lane));
      }
      __syncwarp();
      right &= store_attended<F>(work, place, softmax, own.query + warp * 16 * kTile,
                                 block * kTile + warp * 16, lane);
      to_release = slot;
    }
  });
  if (lane == 0) await_stores();
  return __all_sync(0xFFFFFFFFu, right);
}

// Whether 16 queries that have been stored, from `first` on, are finite. By one warp.
template <class T>
__device__ __forceinline__ bool stored_finite(const AttentionCall& p, const HeadPlace& at,
                                              int first, int lane) {
  const T* const out = head_of<const T>(p.out, {}, at.batch, at.head);
  bool finite = true;
  for (int v = lane; v < 16 * p.width; v += 32) {
    finite &= fabsf(to_float(out[(first + v / p.width) * p.out.token + v % p.width])) < INFINITY;
  }
  return __all_sync(0xFFFFFFFFu, finite);
}

// Blocks that were sorted and not kept, again, for queries to be done again. By one warp.
template <class T>
__device__ __noinline__ void sort_again(const AttentionCall& p, int flat, int block, int lane) {
  const SortHead<T> h(p, flat);
  for (int side = 0; side < 2; ++side) {
    T* const to = static_cast<T*>(side == 0 ? p.sorted_key : p.sorted_value);
    for (int c = lane; c < h.columns(); c += 32) {
      to[h.sorted(block, c)] = from_float<T>(sum_exactly<T, false>(h, nullptr, side, block, c));
    }
  }
  __syncwarp();
}

template <class F>
__global__ void __launch_bounds__(F::kAllThreads, 1)
    attention_fwd_sorting_kernel(const __grid_constant__ AttentionCall p,
                                 const __grid_constant__ SortingMaps maps) {
  using T = typename F::T;
  extern __shared__ __align__(1024) unsigned char shared[];
  SortingMemory<F>& memory = *reinterpret_cast<SortingMemory<F>*>(shared);
  const SortingWork<F> work(p, maps, memory);
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);

  // Sources that a head does not have are zeros.
  for (int v = threadIdx.x; v < static_cast<int>(sizeof(memory.slices)) / 16; v += F::kAllThreads) {
    reinterpret_cast<uint4*>(memory.slices)[v] = make_uint4(0, 0, 0, 0);
  }
  if (threadIdx.x == 0) {
    for (int side = 0; side < 2; ++side) {
      ready_barrier(&memory.slice_arrived[side]);
      ready_barrier(&memory.slice_sorted[side], F::kSortWarps);
      ready_barrier(&memory.sent[side], p.blocks);
      for (auto& barrier : memory.sorted_arrived[side]) {
        ready_barrier(&barrier, 1 + F::kSortWarps);  // its bytes are expected; this CTA's own rows
        expect_bytes(&barrier, F::kSentBytes);
      }
    }
    for (auto& barrier : memory.may_send) ready_barrier(&barrier);
    for (int slot = 0; slot < F::kRing; ++slot) {
      ready_barrier(&memory.tokens_arrived[slot]);
      ready_barrier(&memory.tokens_read[slot], 4);
    }
    memory.lacking = 0;
  }
  publish_writes();
  sync_cluster();

  bool right = true;
  if (warp < F::kSortAt) {
    right = attend_blocks(work, warp / 4, warp % 4, lane);
  } else if (warp < F::kExchangeAt) {
    sort_slices(work, warp - F::kSortAt, lane);
  } else if (warp < F::kLoadAt) {
    exchange_slices(work, warp - F::kExchangeAt, lane);
  } else {
    load_tokens(work, lane);
  }
  __syncwarp();
  sync_cluster();  // others write to this shared memory until they are done

  if (warp >= F::kSortAt || (right && memory.lacking == 0)) return;
  work.for_heads([&](const HeadPlace& at, int) {
    for (int m = warp / 4; m < work.own; m += F::kAttendGroups) {
      const int block = work.rank * F::kOwn + m, first_row = block * kTile + warp % 4 * 16;
      if (!p.keeps_sorted && !stored_finite<T>(p, at, first_row, lane)) {
        sort_again<T>(p, at.flat, block, lane);
      }
      redo_stored_rows<T>(p, at.batch, at.head, first_row, lane);
    }
  });
}

}  // namespace sinkhorn::cuda
