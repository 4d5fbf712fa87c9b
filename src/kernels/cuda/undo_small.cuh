// Undoing the sort for heads of 9 to 64 blocks, as sort_small.cuh sorts them:
//
//   dR[i, j] = sum_c dx'[i, c] x[j, c]                  reads dx', x and the local part of dx,
//   dx[j, c] = local + sum_i R[i, j] dx'[i, c]          writes dx
#pragma once

#include "kernels/cuda/sort_small.cuh"

namespace sinkhorn::cuda {

constexpr int kUndoStages = 2;
template <class T, int kN, int kCtaThreads>
constexpr int undo_small_shared() {
  return kN * (kUndoStages * 3 * (kSmallUndoColumns<T, kN, kCtaThreads> + kPad) + kN + kPad) *
         static_cast<int>(sizeof(T));
}

// One CTA's share of a head. Of 16-row and 8-column tiles a warp has of dx kM by kTiles8, of dR kM
// by kTilesR.
template <class T, int kN, int kCtaThreads>
struct SmallUndo {
  static constexpr int kColumns = kSmallUndoColumns<T, kN, kCtaThreads>;
  static constexpr int kPitch = kColumns + kPad, kSize = kN * kPitch;
  static constexpr bool kApart = kN < 64;  // warps take columns apart
  static_assert(!kApart || kCtaThreads == 128);
  static constexpr int kM = kN >= 32 ? 2 : 1;
  static constexpr int kTiles8 = kN * kColumns / (4 * kCtaThreads) / kM;
  static constexpr int kTilesR = kApart ? kN / 8 : kN * kN / (4 * kCtaThreads) / kM;
  using Sums = float[kM][kTilesR][4];
  using Results = float[kM][kTiles8][4];

  const AttentionCall& p;
  const SortHead<T>& h;
  T* const tiles;  // [stage][dx', x, dx]
  T* const a_tile = tiles + kUndoStages * 3 * kSize;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = kApart ? 0 : warp % 2 * 32;  // of both results
  const int column = (kApart ? warp : warp / 2) * kTiles8 * 8,
            column_r = kApart ? 0 : warp / 2 * kTilesR * 8;
  const int columns = h.columns();
  const PieceWalk<T, kColumns, kCtaThreads> walk{};
  const TileWalk turns{columns, kColumns};

  __device__ __forceinline__ T* change_of(int step) const {
    return tiles + step % kUndoStages * 3 * kSize;
  }
  __device__ __forceinline__ const T* all_changes(int side) const {
    return static_cast<const T*>(side == 0 ? p.grad_sorted_key : p.grad_sorted_value);
  }
  // Asks for the three tiles of a step, if there is one.
  __device__ __forceinline__ void load(int step) const {
    if (step < turns.count) {
      const int side = turns.side(step);
      const int c = turns.index(step) * kColumns + walk.column;
      const ColumnPlace place(p, c);
      T* const tile = change_of(step) + walk.column;
      const T* const change = all_changes(side) + h.flat_head * p.rows * columns;
      const Tokens& view = side == 0 ? p.key : p.value;
      const Tokens& gradient = side == 0 ? p.grad_key : p.grad_value;
      const T* const x = head_of<const T>(view, p.sequences, h.batch, h.key_head);
      const T* const local = head_of<const T>(gradient, p.sequences, h.batch, h.key_head);
      const T* const from_x = x + place.offset * view.token + place.d;
      const T* const from_local = local + place.offset * gradient.token + place.d;
#pragma unroll
      for (int r = 0; r < kN; r += walk.kRowsApart) {
        const int at = walk.row + r;
        const bool sorted_there = place.exists && at < p.rows;
        const bool there = token_there(p, h.real, at, place), adds = there && !p.sortcut;
        copy_async(tile + at * kPitch,
                   change + (sorted_there ? static_cast<int64_t>(at) * columns + c : 0),
                   sorted_there);
        copy_async(tile + kSize + at * kPitch, there ? from_x + at * (p.block * view.token) : x,
                   there);
        copy_async(tile + 2 * kSize + at * kPitch,
                   adds ? from_local + at * (p.block * gradient.token) : x, adds);
      }
    }
    commit_copies();
  }
  // dR += dx' x': over the tile's columns, or a warp's own.
  __device__ __forceinline__ void add_matrix(Sums& dr, const T* change, const T* x) const {
#pragma unroll
    for (int k = 0; k < (kApart ? kTiles8 * 8 : kColumns); k += 16) {
      const int at = (kApart ? column : 0) + k;
      Operand<T> left[kM], b;
#pragma unroll
      for (int m = 0; m < kM; ++m) load_a<kPitch>(left[m], change, row + m * 16, at, lane);
      const auto &low = ready(left[0]), &high = ready(left[kM - 1]);
#pragma unroll
      for (int n = 0; n < kTilesR; n += 2) {
        load_b<kPitch>(b, x, column_r + n * 8, at, lane);
        const auto& right = ready(b);
        mma_pair<T>(dr[0][n], dr[0][n + 1], low, right);
        if constexpr (kM == 2) mma_pair<T>(dr[1][n], dr[1][n + 1], high, right);
      }
    }
  }
  // R' dx'.
  __device__ __forceinline__ void multiply(Results& acc, const T* change) const {
    multiply_tile<T, kN, kPitch, true>(acc, a_tile, change, row, column, lane);
  }
  // Results onto the local part, each lane's numbers in place of those that it reads; what is not
  // finite is added up again.
  __device__ __forceinline__ void put(Results& acc, T* local, int side, int c0) const {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kTiles8; ++n) {
        const int r = row + m * 16 + lane / 4, c = column + n * 8 + lane % 4 * 2;
        bool finite = true;
#pragma unroll
        for (int e = 0; e < 4; ++e) finite &= isfinite(acc[m][n][e]);
        if (!finite) {
          const T* const from = all_changes(side);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (r + e / 2 * 8 < p.blocks && c0 + c + e % 2 < columns) {
              acc[m][n][e] = sum_exactly<T, true>(h, from, side, r + e / 2 * 8, c0 + c + e % 2);
            }
          }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          T* const at = local + (r + 8 * half) * kPitch + c;
          const float2 old = load_pair(at);
          store_pair(at, old.x + acc[m][n][2 * half], old.y + acc[m][n][2 * half + 1]);
        }
      }
    }
  }
  __device__ __forceinline__ void store(const T* local, int side, int c0) const {
    const ColumnPlace place(p, c0 + walk.column);
    if (place.exists) {
      const Tokens& gradient = side == 0 ? p.grad_key : p.grad_value;
      T* const out = head_of<T>(gradient, p.sequences, h.batch, h.key_head) +
                     place.offset * gradient.token + place.d;
#pragma unroll
      for (int r = 0; r < kN; r += walk.kRowsApart) {
        const int j = walk.row + r, t = j * p.block + place.offset;
        if (j < p.blocks && t < p.length) {
          const bool is_real = h.real == nullptr || h.real[t] != 0;
          *reinterpret_cast<uint4*>(out + j * (p.block * gradient.token)) =
              is_real ? *reinterpret_cast<const uint4*>(local + j * kPitch + walk.column)
                      : make_uint4(0, 0, 0, 0);
        }
      }
    }
  }
  // The warps' sums of all columns, added in order through shared memory.
  __device__ __forceinline__ void store_added(const Sums& dr, float* out) const {
    float* const sums = reinterpret_cast<float*>(tiles);  // [warp][kN][kN]
    wait_copies<0>();
    __syncthreads();
    for_sums(
        [&](int m, int n, int e, int i, int j) { sums[(warp * kN + i) * kN + j] = dr[m][n][e]; });
    __syncthreads();
    for (int v = threadIdx.x; v < kN * kN; v += 128) {
      const int i = v / kN, j = v % kN;
      if (i < p.rows && j < p.blocks) {
        out[i * p.blocks + j] =
            sums[v] + sums[kN * kN + v] + sums[2 * kN * kN + v] + sums[3 * kN * kN + v];
      }
    }
  }
  __device__ __forceinline__ void store_matrix(const Sums& dr, float* out) const {
    if constexpr (kApart) return store_added(dr, out);
    for_sums([&](int m, int n, int e, int i, int j) {
      if (i < p.rows && j < p.blocks) out[i * p.blocks + j] = dr[m][n][e];
    });
  }
  // f(which of a thread's sums, row and column of dR that it is).
  template <class F>
  __device__ __forceinline__ void for_sums(F f) const {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kTilesR; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          f(m, n, e, row + m * 16 + lane / 4 + e / 2 * 8, column_r + n * 8 + lane % 4 * 2 + e % 2);
        }
      }
    }
  }
};

// Grid: shares of the columns, heads, from the last to the first: what attention wrote last is
// still in the second-level cache. partial [shares, B, H, rows, N].
template <class T, int kN, int kCtaThreads>
__global__ void __launch_bounds__(kCtaThreads, kSmallUndoCtas<T, kN, kCtaThreads>)
    undo_small_kernel(const __grid_constant__ AttentionCall p, float* partial) {
  extern __shared__ __align__(16) unsigned char shared[];
  using Work = SmallUndo<T, kN, kCtaThreads>;
  const SortHead<T> h(p, gridDim.y - 1 - blockIdx.y);
  const Work work{p, h, reinterpret_cast<T*>(shared)};
  work.load(0);
  load_relaxed<T, kN, kCtaThreads>(work.a_tile, p, h.flat_head);

  typename Work::Sums dr = {};
  for (int step = 0; step < work.turns.count; ++step) {
    work.load(step + 1);
    wait_copies<1>();
    __syncthreads();
    T* const change = work.change_of(step);
    T* const local = change + 2 * Work::kSize;
    work.add_matrix(dr, change, change + Work::kSize);
    typename Work::Results acc = {};
    work.multiply(acc, change);
    const int side = work.turns.side(step), c0 = work.turns.index(step) * Work::kColumns;
    work.put(acc, local, side, c0);
    __syncthreads();
    work.store(local, side, c0);
    __syncthreads();  // before the tile is loaded again
  }
  work.store_matrix(dr, partial + (blockIdx.x * static_cast<int64_t>(gridDim.y) + h.flat_head) *
                                      p.rows * p.blocks);
}

}  // namespace sinkhorn::cuda
