// The products around the sort.
//
//   sort    out[i, c] = sum_j R[i, j] x[j, c]
//   undo    dx[j, c] += sum_i R[i, j] dx'[i, c]
//           dR[i, j] = sum_c dx'[i, c] x[j, c], over keys and values
//
// c = (p, d) runs over the b * D numbers of a block.
// x lies as tokens do, [L, D] with any stride between tokens, and is 0 where masked; x' is
// [rows, b * D] without gaps. R is the selected copy: 0 where not allowed.
//
// Mapping: a warp has 32 x 64 numbers of a result, a CTA kRows x 128 (sort, undo) and goes through
// the columns of its share; a CTA of the products has kRows x kRows of dR and a share of the
// columns. Tiles pass through three buffers. Under a causal rule products stop at the diagonal.
//
// A product carries NaN and inf, times 0, to rows that do not read them. Where a result is not
// finite it is added up again from the sources it reads.
#pragma once

#include "kernels/cuda/sort_head.cuh"

namespace sinkhorn::cuda {

// f.template operator()<T>() for the type T of tokens.
template <class F>
void with_type(Type type, F f) {
  switch (type) {
    case Type::kBFloat16: return f.template operator()<__nv_bfloat16>();
    case Type::kFloat16: return f.template operator()<__half>();
    default: return f.template operator()<float>();
  }
}

constexpr int kSortColumns = 128, kSortStages = 3;
template <class T>
constexpr int kSortDepth = 128 / static_cast<int>(sizeof(T));  // of a tile along the sum

// The tiles of R and of the columns, one stage.
template <class T, int kRows, bool kUndo>
constexpr int kSortPitchA = kUndo ? kRows + kPad : kSortDepth<T> + kRowPad<T>;
template <class T, int kRows, bool kUndo>
constexpr int kSortSizeA = (kUndo ? kSortDepth<T> : kRows) * kSortPitchA<T, kRows, kUndo>;
template <class T, int kRows, bool kUndo>
constexpr int sort_shared() {
  return kSortStages * (kSortSizeA<T, kRows, kUndo> + kSortDepth<T> * (kSortColumns + kPad)) *
         static_cast<int>(sizeof(T));
}
// CTAs a multiprocessor: float32 needs its registers for the halves of its numbers.
template <class T, int kRows>
constexpr int kSortCtas = (kRows == 64 ? 4 : 2) / (sizeof(T) == 4 ? 2 : 1);

// kUndo: undo. Grid: shares of the columns, row tiles, heads * 2 sides.
template <class T, int kRows, bool kUndo>
__global__ void __launch_bounds__(kRows * 2, kSortCtas<T, kRows>)
    sort_kernel(const __grid_constant__ AttentionCall p, const void* selected_matrix) {
  constexpr int kThreads = kRows * 2, kDepth = kSortDepth<T>, kPiece = cuda::kPiece<T>;
  constexpr int kPitchA = kSortPitchA<T, kRows, kUndo>, kPitchB = kSortColumns + kPad;
  constexpr int kSizeA = kSortSizeA<T, kRows, kUndo>;
  extern __shared__ __align__(16) unsigned char shared[];
  T* const a_tiles = reinterpret_cast<T*>(shared);    // [stage]
  T* const b_tiles = a_tiles + kSortStages * kSizeA;  // [stage]

  const SortHead<T> h(p, blockIdx.z / 2);
  const int side = blockIdx.z % 2, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = warp % (kRows / 32) * 32, column = warp / (kRows / 32) * 64;
  const int first_row = blockIdx.y * kRows;
  const int rows = kUndo ? p.blocks : p.rows, depth = kUndo ? p.rows : p.blocks;
  const int last_row = min(first_row + kRows, rows) - 1;
  const T* const selected = h.selected(selected_matrix);
  const int pitch = selected_pitch(p.blocks);
  const T* const sorted_grad =
      static_cast<const T*>(side == 0 ? p.grad_sorted_key : p.grad_sorted_value);

  // Sources, or destinations, that these rows meet.
  const int begin = kUndo ? min(depth, h.first_reader(first_row)) / kDepth : 0;
  const int end = ((kUndo ? depth : h.reach(last_row)) + kDepth - 1) / kDepth;
  const int deep = max(1, end - begin);  // at least one, of zeros, so that every result is written
  const int column_tiles = (h.columns() + kSortColumns - 1) / kSortColumns;
  const int share = (column_tiles + gridDim.x - 1) / gridDim.x;
  const int first_tile = blockIdx.x * share;
  const int steps = (min(column_tiles, first_tile + share) - first_tile) * deep;
  if (steps <= 0) return;

  const auto load = [&](int step) {
    if (step < steps) {
      const int stage = step % kSortStages, k = (begin + step % deep) * kDepth;
      const int c0 = (first_tile + step / deep) * kSortColumns;
      if (deep > 1 || step == 0) {
        T* const a = a_tiles + (deep > 1 ? stage : 0) * kSizeA;
        constexpr int kVectors = (kUndo ? kRows : kDepth) / kPiece;
#pragma unroll
        for (int v = threadIdx.x; v < kRows * kDepth / kPiece; v += kThreads) {
          const int r = v / kVectors, c = v % kVectors * kPiece;
          const int i = kUndo ? k + r : first_row + r, j = kUndo ? first_row + c : k + c;
          const bool valid = i < p.rows && j < pitch;
          copy_async(a + r * kPitchA + c,
                     selected + (valid ? static_cast<int64_t>(i) * pitch + j : 0), valid);
        }
      }
      T* const b = b_tiles + stage * kDepth * kPitchB;
#pragma unroll
      for (int v = threadIdx.x; v < kDepth * kSortColumns / kPiece; v += kThreads) {
        const int r = v / (kSortColumns / kPiece), c = v % (kSortColumns / kPiece) * kPiece;
        const T* from;
        if constexpr (kUndo) {
          const int64_t at = h.sorted(k + r, c0 + c);
          from = at < 0 ? nullptr : sorted_grad + at;
        } else {
          from = h.token(side, k + r, c0 + c);
        }
        copy_async(b + r * kPitchB + c, from == nullptr ? selected : from, from != nullptr);
      }
    }
    commit_copies();
  };
  load(0);
  load(1);

  float acc[2][8][4] = {};
  for (int step = 0; step < steps; ++step) {
    wait_copies<1>();
    __syncthreads();
    load(step + 2);
    const int stage = step % kSortStages;
    const T* const a_tile = a_tiles + (deep > 1 ? stage : 0) * kSizeA;
    T* const b_tile = b_tiles + stage * kDepth * kPitchB;
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      Operand<T> a[2], b;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        if constexpr (kUndo) {
          load_a_transposed<kPitchA>(a[m], a_tile, row + m * 16, k, lane);
        } else {
          load_a<kPitchA>(a[m], a_tile, row + m * 16, k, lane);
        }
      }
      const auto &low = ready(a[0]), &high = ready(a[1]);
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        load_b_transposed<kPitchB>(b, b_tile, column + n * 8, k, lane);
        const auto& right = ready(b);
        mma_pair<T>(acc[0][n], acc[0][n + 1], low, right);
        mma_pair<T>(acc[1][n], acc[1][n + 1], high, right);
      }
    }
    if (step % deep != deep - 1) continue;

    // A tile of columns is done: through the buffer it came in, out to memory, in pieces of 16
    // bytes (kRows may be a multiple of kDepth, the rows of the buffer: in parts then).
    const int c0 = (first_tile + step / deep) * kSortColumns;
#pragma unroll
    for (int part = 0; part < kRows / kDepth; ++part) {
      __syncthreads();
      if (row / kDepth == part) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
          for (int n = 0; n < 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              if (!isfinite(acc[m][n][e])) {
                const int r = first_row + row + m * 16 + lane / 4 + e / 2 * 8;
                const int c = c0 + column + n * 8 + lane % 4 * 2 + e % 2;
                if (r < rows && c < h.columns()) {
                  acc[m][n][e] = sum_exactly<T, kUndo>(h, sorted_grad, side, r, c);
                }
              }
            }
            T* const to = b_tile + (row % kDepth + m * 16 + lane / 4) * kPitchB + column + n * 8 +
                          lane % 4 * 2;
            store_pair(to, acc[m][n][0], acc[m][n][1]);
            store_pair(to + 8 * kPitchB, acc[m][n][2], acc[m][n][3]);
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[m][n][e] = 0.0f;
          }
        }
      }
      __syncthreads();
#pragma unroll
      for (int v = threadIdx.x; v < kDepth * kSortColumns / kPiece; v += kThreads) {
        const int r = v / (kSortColumns / kPiece), c = v % (kSortColumns / kPiece) * kPiece;
        const int at_row = first_row + part * kDepth + r;
        uint4 x = *reinterpret_cast<const uint4*>(b_tile + r * kPitchB + c);
        if constexpr (!kUndo) {
          const int64_t at = h.sorted(at_row, c0 + c);
          T* const out = static_cast<T*>(side == 0 ? p.sorted_key : p.sorted_value);
          if (at >= 0) *reinterpret_cast<uint4*>(out + at) = x;
        } else {
          const int t = at_row * p.block + (c0 + c) / p.width;
          if (at_row < rows && c0 + c < h.columns() && t < p.length) {
            const Tokens& g = side == 0 ? p.grad_key : p.grad_value;
            uint4* const out = reinterpret_cast<uint4*>(
                head_of<T>(g, p.sequences, h.batch, h.key_head) + t * g.token + (c0 + c) % p.width);
            if (h.real != nullptr && h.real[t] == 0) {
              x = make_uint4(0, 0, 0, 0);
            } else if (!p.sortcut) {
              float local[kPiece], sum[kPiece];
              unpack_piece<T>(local, *out);
              unpack_piece<T>(sum, x);
#pragma unroll
              for (int e = 0; e < kPiece; ++e) sum[e] += local[e];
              x = pack_piece<T>(sum);
            }
            *out = x;
          }
        }
      }
    }
  }
}

template <class T, int kRows>
constexpr int sort_products_shared() {
  return kSortStages * 2 * kRows * (kSortDepth<T> + kRowPad<T>)*static_cast<int>(sizeof(T));
}

// Grid: shares of the columns, tiles of dR, heads.
template <class T, int kRows>
__global__ void __launch_bounds__(kRows * 2, kSortCtas<T, kRows>)
    sort_products_kernel(const __grid_constant__ AttentionCall p, float* partial) {
  constexpr int kThreads = kRows * 2, kDepth = kSortDepth<T>, kPiece = cuda::kPiece<T>;
  constexpr int kPitch = kDepth + kRowPad<T>, kSize = kRows * kPitch;
  constexpr int kTiles8 = kRows / 16;  // 8-column tiles of a warp: it has 32 x kRows / 2
  extern __shared__ __align__(16) unsigned char shared[];
  T* const a_tiles = reinterpret_cast<T*>(shared);
  T* const b_tiles = a_tiles + kSortStages * kSize;

  const SortHead<T> h(p, blockIdx.z);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = warp % (kRows / 32) * 32, column = warp / (kRows / 32) * (kRows / 2);
  const int across = (p.blocks + kRows - 1) / kRows;
  const int first_row = blockIdx.y / across * kRows, first_column = blockIdx.y % across * kRows;
  // A tile that no row may read is left to the last step, which writes zeros there.
  if (first_column >= h.reach(min(first_row + kRows, p.rows) - 1)) return;
  const int column_tiles = (h.columns() + kDepth - 1) / kDepth, all = 2 * column_tiles;
  const int share = (all + gridDim.x - 1) / gridDim.x, first_step = blockIdx.x * share;
  const int steps = min(all, first_step + share) - first_step;

  const auto load = [&](int step) {
    if (step < steps) {
      const int side = (first_step + step) / column_tiles;
      const int c0 = (first_step + step) % column_tiles * kDepth;
      const T* const sorted_grad =
          static_cast<const T*>(side == 0 ? p.grad_sorted_key : p.grad_sorted_value);
      T* const a = a_tiles + step % kSortStages * kSize;
      T* const b = b_tiles + step % kSortStages * kSize;
#pragma unroll
      for (int v = threadIdx.x; v < kRows * kDepth / kPiece; v += kThreads) {
        const int r = v / (kDepth / kPiece), c = v % (kDepth / kPiece) * kPiece;
        const int64_t at = h.sorted(first_row + r, c0 + c);
        copy_async(a + r * kPitch + c, sorted_grad + (at < 0 ? 0 : at), at >= 0);
        const T* const x = h.token(side, first_column + r, c0 + c);
        copy_async(b + r * kPitch + c, x == nullptr ? sorted_grad : x, x != nullptr);
      }
    }
    commit_copies();
  };
  load(0);
  load(1);

  float acc[2][kTiles8][4] = {};
  for (int step = 0; step < steps; ++step) {
    wait_copies<1>();
    __syncthreads();
    load(step + 2);
    const T* const a_tile = a_tiles + step % kSortStages * kSize;
    const T* const b_tile = b_tiles + step % kSortStages * kSize;
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      Operand<T> a[2], b;
#pragma unroll
      for (int m = 0; m < 2; ++m) load_a<kPitch>(a[m], a_tile, row + m * 16, k, lane);
      const auto &low = ready(a[0]), &high = ready(a[1]);
#pragma unroll
      for (int n = 0; n < kTiles8; n += 2) {
        load_b<kPitch>(b, b_tile, column + n * 8, k, lane);
        const auto& right = ready(b);
        mma_pair<T>(acc[0][n], acc[0][n + 1], low, right);
        mma_pair<T>(acc[1][n], acc[1][n + 1], high, right);
      }
    }
  }
  float* const out =
      partial + (blockIdx.x * static_cast<int64_t>(gridDim.z) + h.flat_head) * p.rows * p.blocks;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < kTiles8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = first_row + row + m * 16 + lane / 4 + e / 2 * 8;
        const int j = first_column + column + n * 8 + lane % 4 * 2 + e % 2;
        if (i < p.rows && j < p.blocks) out[static_cast<int64_t>(i) * p.blocks + j] = acc[m][n][e];
      }
    }
  }
}

}  // namespace sinkhorn::cuda
