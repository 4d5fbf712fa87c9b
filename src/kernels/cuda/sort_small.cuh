// The sort and its backward for heads of 9 to 64 blocks: R stays on the chip, blocks pass by once.
//
//   sort    x'[i, c] = sum_j R[i, j] x[j, c]                    reads x, writes x'
//   undo    dR[i, j] = sum_c dx'[i, c] x[j, c]                  reads dx', x and the local part of
//           dx[j, c] = local + sum_i R[i, j] dx'[i, c]          dx, writes dx
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

// Grid: shares of the columns of keys and values, heads: R is read once for both.
template <class T, int kN, int kCtaThreads>
__global__ void __launch_bounds__(kCtaThreads, kSmallSortCtas<T, kN, kCtaThreads>)
    sort_small_kernel(const __grid_constant__ AttentionCall p) {
  constexpr int kColumns = kSmallSortColumns<T, kN, kCtaThreads>;
  constexpr int kPitch = kColumns + kPad, kPitchA = kN + kPad;
  constexpr int kM = kN >= 32 ? 2 : 1;  // 16-row and 8-column tiles of a warp
  constexpr int kTiles8 = kN * kColumns / (4 * kCtaThreads) / kM;
  extern __shared__ __align__(16) unsigned char shared[];
  T* const tiles = reinterpret_cast<T*>(shared);  // [stage]
  T* const a_tile = tiles + kSortStages * kN * kPitch;

  const SortHead<T> h(p, blockIdx.y);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = kN == 64 ? warp % 2 * 32 : 0;
  const int column = (kN == 64 ? warp / 2 : warp) * kTiles8 * 8;
  const int columns = h.columns();
  const PieceWalk<T, kColumns, kCtaThreads> walk;
  const TileWalk turns(columns, kColumns);
  const bool last_share = blockIdx.x + 1 == gridDim.x;  // it may have a tile less: it weighs rows
  const auto load = [&](int step) {
    if (step < turns.count) {
      const ColumnPlace place(p, turns.index(step) * kColumns + walk.column);
      const Tokens& view = turns.side(step) == 0 ? p.key : p.value;
      const T* const x = head_of<const T>(view, p.sequences, h.batch, h.key_head);
      T* const tile = tiles + step % kSortStages * kN * kPitch + walk.column;
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
  };
  load(0);
  load(1);
  load_relaxed<T, kN, kCtaThreads>(a_tile, p, h.flat_head,
                                   last_share ? row_weights_of(p, h.flat_head) : nullptr);

  for (int step = 0; step < turns.count; ++step) {
    wait_copies<1>();
    __syncthreads();
    load(step + 2);
    T* const tile = tiles + step % kSortStages * kN * kPitch;
    float acc[kM][kTiles8][4] = {};
#pragma unroll
    for (int k = 0; k < kN / 16; ++k) {
      Operand<T> a[kM];
#pragma unroll
      for (int m = 0; m < kM; ++m) load_a<kPitchA>(a[m], a_tile, row + m * 16, k * 16, lane);
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
    __syncthreads();
    const int side = turns.side(step), c0 = turns.index(step) * kColumns;
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
    __syncthreads();
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
}

constexpr int kUndoStages = 2;
template <class T, int kN, int kCtaThreads>
constexpr int undo_small_shared() {
  return kN * (kUndoStages * 3 * (kSmallUndoColumns<T, kN, kCtaThreads> + kPad) + kN + kPad) *
         static_cast<int>(sizeof(T));
}

// Grid: shares of the columns, heads, from the last to the first: what attention wrote last is
// still in the second-level cache. partial [shares, B, H, rows, N].
template <class T, int kN, int kCtaThreads>
__global__ void __launch_bounds__(kCtaThreads, kSmallUndoCtas<T, kN, kCtaThreads>)
    undo_small_kernel(const __grid_constant__ AttentionCall p, float* partial) {
  constexpr int kColumns = kSmallUndoColumns<T, kN, kCtaThreads>;
  constexpr int kPitch = kColumns + kPad, kPitchA = kN + kPad, kSize = kN * kPitch;
  constexpr bool kApart = kN < 64;  // warps take columns apart
  static_assert(!kApart || kCtaThreads == 128);
  constexpr int kM = kN >= 32 ? 2 : 1;  // of a warp's dx, kM by kTiles8; of its dR, by kTilesR
  constexpr int kTiles8 = kN * kColumns / (4 * kCtaThreads) / kM;
  constexpr int kTilesR = kApart ? kN / 8 : kN * kN / (4 * kCtaThreads) / kM;
  extern __shared__ __align__(16) unsigned char shared[];
  T* const tiles = reinterpret_cast<T*>(shared);  // [stage][dx', x, dx]
  T* const a_tile = tiles + kUndoStages * 3 * kSize;

  const SortHead<T> h(p, gridDim.y - 1 - blockIdx.y);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = kApart ? 0 : warp % 2 * 32;  // of both results
  const int column = (kApart ? warp : warp / 2) * kTiles8 * 8,
            column_r = kApart ? 0 : warp / 2 * kTilesR * 8;
  const int columns = h.columns();
  const PieceWalk<T, kColumns, kCtaThreads> walk;
  const TileWalk turns(columns, kColumns);

  const auto load = [&](int step) {
    if (step < turns.count) {
      const int side = turns.side(step);
      const int c = turns.index(step) * kColumns + walk.column;
      const ColumnPlace place(p, c);
      T* const tile = tiles + step % kUndoStages * 3 * kSize + walk.column;
      const T* const change =
          static_cast<const T*>(side == 0 ? p.grad_sorted_key : p.grad_sorted_value) +
          h.flat_head * p.rows * columns;
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
  };
  load(0);
  load_relaxed<T, kN, kCtaThreads>(a_tile, p, h.flat_head);

  float dr[kM][kTilesR][4] = {};
  for (int step = 0; step < turns.count; ++step) {
    load(step + 1);
    wait_copies<1>();
    __syncthreads();
    T* const change = tiles + step % kUndoStages * 3 * kSize;
    const T* const x = change + kSize;
    T* const local = change + 2 * kSize;
    // dR += dx' x': over the tile's columns, or a warp's own.
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
    // dx = local + R' dx', each lane's numbers in place of the local ones it reads.
    float acc[kM][kTiles8][4] = {};
#pragma unroll
    for (int k = 0; k < kN / 16; ++k) {
      Operand<T> a[kM];  // R', rows j
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        load_a_transposed<kPitchA>(a[m], a_tile, row + m * 16, k * 16, lane);
      }
      const auto &low = ready(a[0]), &high = ready(a[kM - 1]);
#pragma unroll
      for (int n = 0; n < kTiles8; n += 2) {
        Operand<T> b;
        load_b_transposed<kPitch>(b, change, column + n * 8, k * 16, lane);
        const auto& right = ready(b);
        mma_pair<T>(acc[0][n], acc[0][n + 1], low, right);
        if constexpr (kM == 2) mma_pair<T>(acc[1][n], acc[1][n + 1], high, right);
      }
    }
    const int side = turns.side(step), c0 = turns.index(step) * kColumns;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kTiles8; ++n) {
        const int r = row + m * 16 + lane / 4, c = column + n * 8 + lane % 4 * 2;
        bool finite = true;
#pragma unroll
        for (int e = 0; e < 4; ++e) finite &= isfinite(acc[m][n][e]);
        if (!finite) {
          const T* const from =
              static_cast<const T*>(side == 0 ? p.grad_sorted_key : p.grad_sorted_value);
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
    __syncthreads();
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
    __syncthreads();  // before the tile is loaded again
  }

  float* const out =
      partial + (blockIdx.x * static_cast<int64_t>(gridDim.y) + h.flat_head) * p.rows * p.blocks;
  if constexpr (kApart) {
    // The warps' sums, added in order through shared memory.
    float* const sums = reinterpret_cast<float*>(shared);  // [warp][kN][kN]
    wait_copies<0>();
    __syncthreads();
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kTilesR; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int i = m * 16 + lane / 4 + e / 2 * 8, j = n * 8 + lane % 4 * 2 + e % 2;
          sums[(warp * kN + i) * kN + j] = dr[m][n][e];
        }
      }
    }
    __syncthreads();
    for (int v = threadIdx.x; v < kN * kN; v += 128) {
      const int i = v / kN, j = v % kN;
      if (i < p.rows && j < p.blocks) {
        out[i * p.blocks + j] =
            sums[v] + sums[kN * kN + v] + sums[2 * kN * kN + v] + sums[3 * kN * kN + v];
      }
    }
  } else {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kTilesR; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int i = row + m * 16 + lane / 4 + e / 2 * 8,
                    j = column_r + n * 8 + lane % 4 * 2 + e % 2;
          if (i < p.rows && j < p.blocks) out[i * p.blocks + j] = dr[m][n][e];
        }
      }
    }
  }
}

}  // namespace sinkhorn::cuda
