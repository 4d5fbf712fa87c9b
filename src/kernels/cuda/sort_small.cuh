// The sort for heads of 9 to 64 blocks, and what undoing it (undo_small.cuh) shares: R stays on the
// chip, blocks pass by once.
//
//   x'[i, c] = sum_j R[i, j] x[j, c]                            reads x, writes x'
//
// Columns c = (p, d) run over the b * D numbers of a block. A CTA takes a share of a head's columns
// in tiles of 128 (sort) or 64 (undo) bytes a thread, kN rows, kN = 16, 32 or 64 the next size to
// N: in half types 256 or 128 columns of 64 rows. The tiles of the CTAs of a head take turns, so
// that what is read and written at about the same time lies side by side. Of 64 rows a warp has 32
// and a share of the columns of a result; of fewer rows it has all of them and a quarter of the
// columns, and its sum over those columns is added to the others' at the end.
// sort.cuh says why results that are not finite are added up again.
#pragma once

#include "kernels/cuda/sort_parts.cuh"

namespace sinkhorn::cuda {

// The column of a thread's pieces of a tile, and the steps between them: a thread's pieces lie one
// below the other, so that a column is divided into (p, d) once a tile.
template <class T, int kColumns, int kCtaThreads>
struct PieceWalk {
  static constexpr int kPieces = kColumns / kPiece<T>, kRowsApart = kCtaThreads / kPieces;
  int row, column;
  __device__ __forceinline__ PieceWalk()
      : row(threadIdx.x / kPieces), column(threadIdx.x % kPieces * kPiece<T>) {}
};

// R into a tile [kN][kN + kPad], 0 where not allowed. Four numbers a piece, all of a thread's
// pieces read before the first is used. weights: of the head's rows, to be made, or null.
template <class T, int kN, int kCtaThreads>
__device__ __forceinline__ void load_relaxed(T* tile, const AttentionCall& p, int64_t flat_head,
                                             float* weights = nullptr) {
  constexpr int kPieces = (kN * kN / 4 + kCtaThreads - 1) / kCtaThreads;
  const bool fast = p.sort_type == Type::kFloat32 && p.blocks % 4 == 0;
  const uint8_t* const live = live_of(p, flat_head);
  float4 x[kPieces];
#pragma unroll
  for (int n = 0; n < kPieces; ++n) {
    const int v = (n * kCtaThreads + threadIdx.x) * 4, i = v / kN, j = v % kN;
    x[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (i >= p.rows || j >= p.blocks) continue;
    if (fast) {
      const float* const from = static_cast<const float*>(p.sort);
      x[n] = *reinterpret_cast<const float4*>(from + (flat_head * p.blocks + i) * p.blocks + j);
    } else {
      x[n].x = sort_at(p, flat_head, i, j);
      if (j + 1 < p.blocks) x[n].y = sort_at(p, flat_head, i, j + 1);
      if (j + 2 < p.blocks) x[n].z = sort_at(p, flat_head, i, j + 2);
      if (j + 3 < p.blocks) x[n].w = sort_at(p, flat_head, i, j + 3);
    }
  }
#pragma unroll
  for (int n = 0; n < kPieces; ++n) {
    const int v = (n * kCtaThreads + threadIdx.x) * 4, i = v / kN, j = v % kN;
    if (i >= kN) continue;  // whole warps
    const float numbers[4] = {x[n].x, x[n].y, x[n].z, x[n].w};
    float kept[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool reads = i < p.rows && j + e < p.blocks && allowed(p, live, i, j + e);
      kept[e] = reads ? numbers[e] : 0.0f;
    }
    store_four(tile + i * (kN + kPad) + j, kept);
    if (weights == nullptr) continue;
    const bool found = kept[0] != 0.0f || kept[1] != 0.0f || kept[2] != 0.0f || kept[3] != 0.0f;
    weigh_row<kN / 4>(p, weights, i, found);
  }
}

// CTAs that a multiprocessor's registers and shared memory hold. Those of 256 threads are Hopper's:
// of 64 rows in half types their tiles have rows that are long enough for the memory, and take more
// shared memory than some other cards give a CTA.
template <class T, int kN, int kCtaThreads>
constexpr int kSmallSortCtas = sizeof(T) == 4 || kCtaThreads == 256 ? 2 : 3;
template <class T, int kN, int kCtaThreads>
constexpr int kSmallUndoCtas = sizeof(T) == 4 || kCtaThreads == 256 ? 2
                               : kN == 64                           ? 3
                                                                    : 4;

// Columns of a tile.
template <class T, int kN, int kCtaThreads>
constexpr int kSmallSortColumns = kCtaThreads * 128 / static_cast<int>(sizeof(T)) / kN;
template <class T, int kN, int kCtaThreads>
constexpr int kSmallUndoColumns = kSmallSortColumns<T, kN, kCtaThreads> / 2;

// The tiles of a CTA: of keys, then of values, every gridDim.x-th.
struct TileWalk {
  int of_side, apart, first, count;  // of_side: tiles of the keys
  __device__ __forceinline__ TileWalk(int columns, int tile)
      : of_side((columns + tile - 1) / tile),
        apart(gridDim.x),
        first(blockIdx.x),
        count((2 * of_side - first + apart - 1) / apart) {}
  // Of step 0 .. count - 1: 0 keys, 1 values; and which of theirs.
  __device__ __forceinline__ int side(int step) const { return first + step * apart >= of_side; }
  __device__ __forceinline__ int index(int step) const {
    return first + step * apart - side(step) * of_side;
  }
};

template <class T, int kN, int kCtaThreads>
constexpr int sort_small_shared() {
  return kN * (kSortStages * (kSmallSortColumns<T, kN, kCtaThreads> + kPad) + kN + kPad) *
         static_cast<int>(sizeof(T));
}

// acc += R tile, or R' tile: kM tiles of 16 rows from `row` on, by the columns from `column` on.
template <class T, int kN, int kPitch, bool kTransposed, int kM, int kTiles8>
__device__ __forceinline__ void multiply_tile(float (&acc)[kM][kTiles8][4], const T* a_tile,
                                              const T* tile, int row, int column, int lane) {
  constexpr int kPitchA = kN + kPad;
#pragma unroll
  for (int k = 0; k < kN / 16; ++k) {
    Operand<T> a[kM];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      if constexpr (kTransposed) {
        load_a_transposed<kPitchA>(a[m], a_tile, row + m * 16, k * 16, lane);
      } else {
        load_a<kPitchA>(a[m], a_tile, row + m * 16, k * 16, lane);
      }
    }
    const auto &low = ready(a[0]), &high = ready(a[kM - 1]);
#pragma unroll
    for (int n = 0; n < kTiles8; n += 2) {
      Operand<T> b;
      load_b_transposed<kPitch>(b, tile, column + n * 8, k * 16, lane);
      const auto& right = ready(b);
      mma_pair<T>(acc[0][n], acc[0][n + 1], low, right);
      if constexpr (kM == 2) mma_pair<T>(acc[1][n], acc[1][n + 1], high, right);
    }
  }
}

// One CTA's share of a head's sort. Of 16-row and 8-column tiles a warp has kM by kTiles8.
template <class T, int kN, int kCtaThreads>
struct SmallSort {
  static constexpr int kColumns = kSmallSortColumns<T, kN, kCtaThreads>;
  static constexpr int kPitch = kColumns + kPad;
  static constexpr int kM = kN >= 32 ? 2 : 1;
  static constexpr int kTiles8 = kN * kColumns / (4 * kCtaThreads) / kM;
  using Results = float[kM][kTiles8][4];

  const AttentionCall& p;
  const SortHead<T>& h;
  T* const tiles;  // [stage][kN][kPitch]
  T* const a_tile = tiles + kSortStages * kN * kPitch;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = kN == 64 ? warp % 2 * 32 : 0;
  const int column = (kN == 64 ? warp / 2 : warp) * kTiles8 * 8;
  const int columns = h.columns();
  const PieceWalk<T, kColumns, kCtaThreads> walk{};
  const TileWalk turns{columns, kColumns};

  __device__ __forceinline__ T* tile_of(int step) const {
    return tiles + step % kSortStages * kN * kPitch;
  }
  // Asks for the tile of a step, if there is one.
  __device__ __forceinline__ void load(int step) const {
    if (step < turns.count) {
      const ColumnPlace place(p, turns.index(step) * kColumns + walk.column);
      const Tokens& view = turns.side(step) == 0 ? p.key : p.value;
      const T* const x = head_of<const T>(view, p.sequences, h.batch, h.key_head);
      T* const tile = tile_of(step) + walk.column;
      const T* const from = x + place.offset * view.token + place.d;
      const int64_t block_stride = p.block * view.token;
#pragma unroll
      for (int r = 0; r < kN; r += walk.kRowsApart) {
        const int j = walk.row + r;
        const bool valid = token_there(p, h.real, j, place);
        copy_async(tile + j * kPitch, valid ? from + j * block_stride : x, valid);
      }
    }
    commit_copies();
  }
  __device__ __forceinline__ void multiply(Results& acc, const T* tile) const {
    multiply_tile<T, kN, kPitch, false>(acc, a_tile, tile, row, column, lane);
  }
  // Results into the tile that they were made from; what is not finite is added up again.
  __device__ __forceinline__ void put(Results& acc, T* tile, int side, int c0) const {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kTiles8; ++n) {
        const int r = row + m * 16 + lane / 4, c = column + n * 8 + lane % 4 * 2;
        bool finite = true;
#pragma unroll
        for (int e = 0; e < 4; ++e) finite &= isfinite(acc[m][n][e]);
        if (!finite) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (r + e / 2 * 8 < p.rows && c0 + c + e % 2 < columns) {
              acc[m][n][e] = sum_exactly<T, false>(h, nullptr, side, r + e / 2 * 8, c0 + c + e % 2);
            }
          }
        }
        store_pair(tile + r * kPitch + c, acc[m][n][0], acc[m][n][1]);
        store_pair(tile + (r + 8) * kPitch + c, acc[m][n][2], acc[m][n][3]);
      }
    }
  }
  __device__ __forceinline__ void store(const T* tile, int side, int c0) const {
    if (c0 + walk.column < columns) {
      T* const out = static_cast<T*>(side == 0 ? p.sorted_key : p.sorted_value) +
                     h.flat_head * p.rows * columns + c0 + walk.column;
#pragma unroll
      for (int r = 0; r < kN; r += walk.kRowsApart) {
        const int i = walk.row + r;
        if (i < p.rows) {
          *reinterpret_cast<uint4*>(out + static_cast<int64_t>(i) * columns) =
              *reinterpret_cast<const uint4*>(tile + i * kPitch + walk.column);
        }
      }
    }
  }
};

// Grid: shares of the columns of keys and values, heads: R is read once for both.
template <class T, int kN, int kCtaThreads>
__global__ void __launch_bounds__(kCtaThreads, kSmallSortCtas<T, kN, kCtaThreads>)
    sort_small_kernel(const __grid_constant__ AttentionCall p) {
  extern __shared__ __align__(16) unsigned char shared[];
  using Work = SmallSort<T, kN, kCtaThreads>;
  const SortHead<T> h(p, blockIdx.y);
  const Work work{p, h, reinterpret_cast<T*>(shared)};
  const bool last_share = blockIdx.x + 1 == gridDim.x;  // it may have a tile less: it weighs rows
  work.load(0);
  work.load(1);
  load_relaxed<T, kN, kCtaThreads>(work.a_tile, p, h.flat_head,
                                   last_share ? row_weights_of(p, h.flat_head) : nullptr);

  for (int step = 0; step < work.turns.count; ++step) {
    wait_copies<1>();
    __syncthreads();
    work.load(step + 2);
    T* const tile = work.tile_of(step);
    typename Work::Results acc = {};
    work.multiply(acc, tile);
    __syncthreads();
    const int side = work.turns.side(step), c0 = work.turns.index(step) * Work::kColumns;
    work.put(acc, tile, side, c0);
    __syncthreads();
    work.store(tile, side, c0);
  }
}

}  // namespace sinkhorn::cuda
