// The sort of attention_fwd_sorting.cuh: slices of all blocks come from memory, are multiplied by R
// in place, and go to the CTAs whose blocks they are sorted into.
#pragma once

#include "kernels/cuda/attention_fwd_sorting_memory.cuh"
#include "kernels/cuda/sort_head.cuh"

namespace sinkhorn::cuda {

// By one warp for keys, side 0, and one for values; a lane for each block of the head.
template <class F>
__device__ __forceinline__ void exchange_slices(const SortingWork<F>& work, int side, int lane) {
  SortingMemory<F>& memory = work.memory;
  const int blocks = work.p.blocks, to = lane / F::kOwn, m = lane % F::kOwn;
  constexpr int kBytes = F::kSlice * kTile * 2;  // of a block's rows in a slice
  typename F::T* const mine = memory.slices[side] + lane * F::kSliceApart;
  const CUtensorMap& map = side == 0 ? work.maps.key_slice : work.maps.value_slice;
  const int heads = work.for_heads([&](const HeadPlace& at, int n) {
    if (n > 0) await_bytes(&memory.sent[side], (n - 1) & 1);
    __syncwarp();
    if (lane == 0) expect_bytes(&memory.slice_arrived[side], blocks * kBytes);
    __syncwarp();
    if (lane < blocks) {
      copy_box(mine, map, &memory.slice_arrived[side], 0, lane * kTile + work.rank * F::kSlice,
               at.head, at.batch);
    }
    __syncwarp();
    await_bytes(&memory.slice_sorted[side], n & 1);
    __syncwarp();
    bool sends = lane < blocks && to != work.rank;
    while (__any_sync(0xFFFFFFFFu, sends)) {
      if (sends && (n == 0 || has_come(&memory.may_send[lane], (n - 1) & 1))) {
        copy_to_cluster(
            address_at(memory.sorted_block(side, m, to) + work.rank * F::kSlice * kTile, to), mine,
            kBytes, address_at(&memory.sorted_arrived[side][m], to));
        sends = false;
      }
    }
    if (lane < work.own) {
      await_bytes(&memory.sorted_arrived[side][lane], n & 1);
      for (int rank = 0; rank < F::kCtas; ++rank) arrive_at(address_at(&memory.sent[side], rank));
    }
    __syncwarp();
  });
  // What others say of the last head comes too, before this shared memory is given back.
  if (heads == 0) return;
  await_bytes(&memory.sent[side], (heads - 1) & 1);
  if (lane < blocks) await_bytes(&memory.may_send[lane], (heads - 1) & 1);
}

// R of a head, 0 where not allowed, as a lane of every warp that sorts holds it: the left side of
// products of 16 rows. Of fewer blocks than 16 it holds several copies along the diagonal, so that
// a product sorts several rows of the slice.
template <class F>
struct SortingMatrix {
  static constexpr int kParts = (F::kSources + 15) / 16;  // of rows, and of columns
  float x[kParts][kParts][8];  // rows l / 4 and 8 below; pairs of columns 2 (l % 4) and 8 beyond

  __device__ __forceinline__ void load(const AttentionCall& p, int flat, int lane) {
    const bool is_float = p.sort_type == Type::kFloat32;
    const float* const from =
        static_cast<const float*>(p.sort) + static_cast<int64_t>(flat) * p.blocks * p.blocks;
#pragma unroll
    for (int part = 0; part < kParts * kParts; ++part) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int row = part / kParts * 16 + lane / 4 + e / 2 % 2 * 8;
        const int column = part % kParts * 16 + lane % 4 * 2 + e % 2 + e / 4 * 8;
        const int i = row % F::kSources, j = column % F::kSources;
        const bool reads = row / F::kSources == column / F::kSources && i < p.rows &&
                           j < p.blocks && allowed(p, nullptr, i, j);
        float& to = x[part / kParts][part % kParts][e];
        to = 0.0f;
        if (reads && is_float) to = from[i * p.blocks + j];
        if (reads && !is_float) to = sort_at(p, flat, i, j);
      }
    }
  }
  // Whether row `part` * 16 + l / 4 + 8 * below is not all zeros; by all lanes.
  __device__ __forceinline__ bool found(int part, int below, int lane) const {
    bool any = false;
#pragma unroll
    for (int k = 0; k < kParts; ++k) {
#pragma unroll
      for (int e = 0; e < 8; ++e) any |= e / 2 % 2 == below && x[part][k][e] != 0.0f;
    }
    return (__ballot_sync(0xFFFFFFFFu, any) >> (lane & ~3) & 0xFu) != 0;
  }
};

// Writes the weights of this CTA's rows.
template <class F>
__device__ __forceinline__ void weigh_rows(const SortingWork<F>& work,
                                           const SortingMatrix<F>& matrix, int flat, int lane) {
  float* const weights = row_weights_of(work.p, flat);
  if (weights == nullptr) return;
#pragma unroll
  for (int part = 0; part < matrix.kParts; ++part) {
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      const bool found = matrix.found(part, below, lane);
      const int i = part * 16 + lane / 4 + 8 * below;
      if (i / F::kOwn != work.rank || i >= work.p.rows || lane % 4 != 0) continue;
      const float weight = row_weight(work.p, i, found);
      weights[i * 2] = weight;
      if (weight < 0.0f) work.memory.lacking = 1;
    }
  }
}

// The products of one row of a slice, or of several, in place: kPairs pairs of pieces of 8 columns.
template <class F>
struct SortingRows {
  using T = typename F::T;
  static constexpr int kParts = SortingMatrix<F>::kParts;
  static constexpr int kPairs = kParts > 1 ? 2 : 4;
  static constexpr int kTogether = F::kSources < 16 ? 16 / F::kSources : 1;  // rows of a product
  using Results = float[kParts][kPairs][2][4];

  T* slice;
  int flat, side, rank, lane;
  int row, first;  // the first pair; rows: `row` and every fourth from there

  // Number r of the rows of a product: which block, and which row of the slice.
  __device__ __forceinline__ int block_of(int r) const { return r % F::kSources; }
  __device__ __forceinline__ int row_of(int r) const {
    return row + (kTogether > 1 ? r / F::kSources * 4 : 0);
  }
  __device__ __forceinline__ T* at(int r, int piece) const {
    const int i = block_of(r), turned = row_of(r);
    return slice + i * F::kSliceApart + turned * kTile + ((piece ^ ((turned + i) & 7)) << 3);
  }
  __device__ __forceinline__ void multiply(Results& x,
                                           const uint32_t (&r)[kParts][kParts][4]) const {
#pragma unroll
    for (int k = 0; k < kParts; ++k) {
      uint32_t b[kPairs][4];
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        load_matrices_transposed(b[pair], at(k * 16 + lane % 16, (first + pair) * 2 + lane / 16));
      }
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          mma_pair<T>(x[part][pair][0], x[part][pair][1], r[part][k], b[pair]);
        }
      }
    }
  }
  // Makes one of `nothing` NaN if one is not finite.
  static __device__ __forceinline__ void look_at(const Results& x, float (&nothing)[4]) {
#pragma unroll
    for (int v = 0; v < kParts * kPairs * 8; ++v) {
      float& to = nothing[v % 4];
      to = fmaf(x[v / 8 / kPairs][v / 8 % kPairs][v / 4 % 2][v % 4], 0.0f, to);
    }
  }
  __device__ __forceinline__ void store(const Results& x) const {
#pragma unroll
    for (int v = 0; v < kParts * kPairs; ++v) {
      const int part = v / kPairs, pair = v % kPairs;
      uint32_t packed[4];
      accumulators_to_a<T>(packed, x[part][pair][0], x[part][pair][1]);
      store_matrices(at(part * 16 + lane % 16, (first + pair) * 2 + lane / 16), packed);
    }
  }
};

// What is not finite of the results stored is added up again, over the sources it reads (sort.cuh).
template <class F>
__device__ __noinline__ void repair_sorted(const AttentionCall& p, SortingRows<F> rows) {
  using T = typename F::T;
  constexpr int kColumns = rows.kPairs * 16;
  const SortHead<T> h(p, rows.flat);
  for (int v = rows.lane; v < rows.kParts * 16 * kColumns; v += 32) {
    const int r = v / kColumns, d = rows.first * 16 + v % kColumns, i = rows.block_of(r);
    T* const x = rows.at(r, d / 8) + d % 8;
    if (fabsf(to_float(*x)) < INFINITY) continue;
    const int c = (rows.rank * F::kSlice + rows.row_of(r)) * p.width + d;
    const bool there = i < p.rows && d < p.width;  // what is not stays 0 for the next heads
    *x = from_float<T>(there ? sum_exactly<T, false>(h, nullptr, rows.side, i, c) : 0.0f);
  }
}

// A warp's share of the rows of a slice: f(of which products).
template <class F, class Body>
__device__ __forceinline__ void for_rows(const SortingWork<F>& work, int flat, int side, int warp,
                                         int lane, Body f) {
  using Rows = SortingRows<F>;
#pragma unroll 2
  for (int v = warp; v < F::kSlice / Rows::kTogether; v += F::kSortWarps) {
    const int row = v / 4 * 4 * Rows::kTogether + v % 4;
#pragma unroll
    for (int first = 0; first < 4; first += Rows::kPairs) {
      f(Rows{work.memory.slices[side], flat, side, work.rank, lane, row, first});
    }
  }
}

// The rows of a slice that a warp has sorted to the sorted blocks of this CTA, when they may be
// written: copies between shared memories are slow, and left to the rows of other CTAs.
template <class F>
__device__ __forceinline__ void keep_rows(const SortingWork<F>& work, int n, int warp, int lane) {
  using Rows = SortingRows<F>;
  constexpr int kShare = F::kSlice / F::kSortWarps;  // rows of a warp
#pragma unroll 1
  for (int m = 0; m < work.own; ++m) {
    const int block = work.rank * F::kOwn + m;
    if (n > 0) await_bytes(&work.memory.may_send[block], (n - 1) & 1);
    __syncwarp();
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const auto* const from = work.memory.slices[side] + block * F::kSliceApart;
      auto* const to = work.memory.sorted_block(side, m, work.rank) + work.rank * F::kSlice * kTile;
#pragma unroll
      for (int v = lane; v < kShare * 8; v += 32) {
        // Row r of those of for_rows: together, then one after the other.
        const int r = v / 8, u = warp + r / Rows::kTogether * F::kSortWarps;
        const int row = u / 4 * 4 * Rows::kTogether + u % 4 + r % Rows::kTogether * 4;
        const int at = row * kTile + v % 8 * 8;
        *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(from + at);
      }
    }
    publish_writes();
    __syncwarp();
    if (lane < 2) arrive(&work.memory.sorted_arrived[lane][m]);
  }
}

template <class F>
__device__ __forceinline__ void sort_slices(const SortingWork<F>& work, int warp, int lane) {
  using T = typename F::T;
  using Rows = SortingRows<F>;
  constexpr int kParts = Rows::kParts;
  SortingMatrix<F> matrix;
  if (work.first < work.heads) matrix.load(work.p, work.first, lane);
  work.for_heads([&](const HeadPlace& at, int n) {
    uint32_t r[kParts][kParts][4];
#pragma unroll
    for (int part = 0; part < kParts * kParts; ++part) {
      const float(&x)[8] = matrix.x[part / kParts][part % kParts];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        r[part / kParts][part % kParts][e] = pack<T>(x[2 * e], x[2 * e + 1]);
      }
    }
    if (warp == 0) weigh_rows(work, matrix, at.flat, lane);
#pragma unroll 1
    for (int side = 0; side < 2; ++side) {
      await_bytes(&work.memory.slice_arrived[side], n & 1);
      __syncwarp();
      float nothing[4] = {};
      for_rows(work, at.flat, side, warp, lane, [&](const Rows& rows) {
        typename Rows::Results x = {};
        rows.multiply(x, r);
        __syncwarp();
        rows.store(x);
        Rows::look_at(x, nothing);
      });
      const bool finite = nothing[0] + nothing[1] + nothing[2] + nothing[3] == 0.0f;
      if (!__all_sync(0xFFFFFFFFu, finite)) {
        for_rows(work, at.flat, side, warp, lane,
                 [&](const Rows& rows) { repair_sorted<F>(work.p, rows); });
      }
      publish_writes();
      __syncwarp();
      if (lane == 0) arrive(&work.memory.slice_sorted[side]);
    }
    keep_rows(work, n, warp, lane);
    // While the next slices are on their way.
    if (work.has_next(at)) matrix.load(work.p, work.next(at).flat, lane);
  });
}

}  // namespace sinkhorn::cuda
