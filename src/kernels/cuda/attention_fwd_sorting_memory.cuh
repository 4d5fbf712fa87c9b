// What the kernel of attention_fwd_sorting.cuh is made of: its sizes, its shared memory with the
// barriers, and which heads and blocks a CTA works on.
#pragma once

#include "kernels/cuda/attention_launch.cuh"
#include "kernels/cuda/cluster.cuh"

namespace sinkhorn::cuda {

// kPrevious: the block of tokens before is seen, too.
template <class E_, int kCtas_, bool kPrevious_>
struct SortingForward {
  using E = E_;
  using T = typename E::T;
  static_assert(E::kWidth == kTile && sizeof(T) == 2);
  static constexpr int kCtas = kCtas_;           // of a cluster
  static constexpr int kOwn = 4;                 // blocks of a CTA at most; an even number
  static constexpr int kSources = kOwn * kCtas;  // blocks of a head at most
  static constexpr int kSlice = kTile / kCtas;   // offsets that a CTA sorts
  static constexpr int kSliceApart = (kSlice + 1) * kTile;  // numbers from source to source
  static constexpr int kSortedApart = (kTile + 1) * kTile;  // from sorted block to sorted block
  static constexpr int kSentBytes = (kTile - kSlice) * kTile * 2;  // of a block, by other CTAs
  static constexpr int kKeyTiles = kPrevious_ ? 2 : 1;             // of tokens: own, before
  static constexpr int kRing = kPrevious_ ? 2 : 3;
  static constexpr int kAttendGroups = 2, kSortWarps = 4;
  static constexpr int kSortAt = kAttendGroups * 4, kExchangeAt = kSortAt + kSortWarps;  // warps
  static constexpr int kLoadAt = kExchangeAt + 2, kAllThreads = (kLoadAt + 1) * 32;
};

struct SortingMaps {
  TokenMaps tokens;
  CUtensorMap key_slice, value_slice;
  CUtensorMap out;  // by 16 rows
};

template <class F>
struct SortingMemory {
  using T = typename F::T;
  struct Tokens {
    T query[kPanel], key[F::kKeyTiles][kPanel], value[F::kKeyTiles][kPanel];
  };
  alignas(1024) T slices[2][(F::kSources * F::kSliceApart + 511) / 512 * 512];  // keys, values
  alignas(1024) T sorted[2][F::kOwn * F::kSortedApart + 4 * kTile];
  alignas(1024) Tokens ring[F::kRing];
  uint64_t slice_arrived[2], slice_sorted[2];
  uint64_t sent[2];  // of all blocks: their rows of this CTA's slices have come
  uint64_t sorted_arrived[2][F::kOwn];
  uint64_t may_send[F::kSources];  // the block has been read
  uint64_t tokens_arrived[F::kRing], tokens_read[F::kRing];
  int lacking;  // whether a row of zeros was sorted here

  // Sorted block m of the CTA of that rank, here: its turn is that of block 4 rank + m of a slice.
  __device__ __forceinline__ T* sorted_block(int side, int m, int rank) {
    return sorted[side] + m * F::kSortedApart + rank % 2 * 4 * kTile;
  }
};

struct HeadPlace {
  int flat, head, batch;
};

// The heads of a cluster, one after the other, and the blocks of one of its CTAs.
template <class F>
struct SortingWork {
  const AttentionCall& p;
  const SortingMaps& maps;
  SortingMemory<F>& memory;
  int heads, rank, own, clusters, first;

  __device__ __forceinline__ SortingWork(const AttentionCall& p_, const SortingMaps& maps_,
                                         SortingMemory<F>& memory_)
      : p(p_),
        maps(maps_),
        memory(memory_),
        heads(p_.batch * p_.heads),
        rank(static_cast<int>(cluster_rank())),
        own(min(F::kOwn, max(0, p_.blocks - rank * F::kOwn))),
        clusters(gridDim.x / F::kCtas),
        first(blockIdx.x / F::kCtas) {}

  // f(head, how many were before); returns how many there are.
  template <class Body>
  __device__ __forceinline__ int for_heads(Body f) const {
    int n = 0;
#pragma unroll 1
    for (int flat = first; flat < heads; flat += clusters, ++n) f(place(flat), n);
    return n;
  }
  __device__ __forceinline__ HeadPlace place(int flat) const {
    return {flat, flat % p.heads, flat / p.heads};
  }
  __device__ __forceinline__ bool has_next(const HeadPlace& at) const {
    return at.flat + clusters < heads;
  }
  __device__ __forceinline__ HeadPlace next(const HeadPlace& at) const {
    return place(at.flat + clusters);
  }
};

}  // namespace sinkhorn::cuda
