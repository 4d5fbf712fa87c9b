// Two ways to do the same few products on tiles of 64 rows of kWidth numbers: `Portable` with the
// warp-wide instructions of sm_80 and later, `Hopper` with the warpgroup-wide ones of sm_90a, which
// float32 does without. The attention kernels are written once, on either.
//
//   scores     s = left right'                16 rows of a warp against 64 rows
//   gather     out += x tile                  x, 16 x 64, from registers; columns of the tile
//   gather_t   out += ds' tile                ds stored [64 rows of the tile][64], by its columns
//
// Products run between begin() and end(), which may run them in the background; s and out are to be
// read after end() and settle().
#pragma once

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/tile.cuh"

namespace sinkhorn::cuda {

// A warp's 16 x 64 numbers as the left side of a product.
template <class T>
using PackedAs = Operand<T>[4];
using Packed = PackedAs<__nv_bfloat16>;  // of either half type
template <class T>
__device__ __forceinline__ void pack_left(PackedAs<T>& a, const float (&x)[8][4]) {
#pragma unroll
  for (int step = 0; step < 4; ++step) accumulators_to_a<T>(a[step], x[2 * step], x[2 * step + 1]);
}

template <class T_, int kWidth_>
struct Portable {
  using T = T_;
  static constexpr int kWidth = kWidth_, kPitch = kWidth + kRowPad<T>;
  static constexpr int kElements = kTile * kPitch;               // of a tile
  static constexpr int kScoreElements = kTile * (kTile + kPad);  // of a tile of scores
  static constexpr bool kWarpsAlone = true;                      // a warp may leave out a product

  static __device__ __forceinline__ int at(int row, int column) { return row * kPitch + column; }
  static __device__ __forceinline__ int score_at(int row, int column) {
    return row * (kTile + kPad) + column;
  }
  static __device__ __forceinline__ void publish() {}
  static __device__ __forceinline__ void begin() {}
  static __device__ __forceinline__ void end() {}
  template <int kTiles>
  static __device__ __forceinline__ void settle(float (&)[kTiles][4]) {}

  static __device__ __forceinline__ void scores(float (&s)[8][4], const T* left, const T* right,
                                                int row, int lane) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) s[n][c] = 0.0f;
    }
#pragma unroll
    for (int d = 0; d < kWidth; d += 16) {
      Operand<T> a, b;
      load_a<kPitch>(a, left, row, d, lane);
      const auto& left_ready = ready(a);
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        load_b<kPitch>(b, right, n * 8, d, lane);
        mma_pair<T>(s[n], s[n + 1], left_ready, ready(b));
      }
    }
  }
  template <int kOut>
  static __device__ __forceinline__ void gather(float (&out)[kOut / 8][4], const PackedAs<T>& x,
                                                const T* tile, int column, int lane) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      Operand<T> b;
      const auto& left_ready = ready(x[step]);
#pragma unroll
      for (int n = 0; n < kOut / 8; n += 2) {
        load_b_gathered<kPitch>(b, tile, column + n * 8, step * 16, lane);
        mma_pair<T>(out[n], out[n + 1], left_ready, ready(b));
      }
    }
  }
  static __device__ __forceinline__ void gather_t(float (&out)[kWidth / 8][4], const T* ds,
                                                  const T* tile, int row, int lane) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      Operand<T> a, b;
      load_a_transposed<kTile + kPad>(a, ds, row, step * 16, lane);
      const auto& left_ready = ready(a);
#pragma unroll
      for (int n = 0; n < kWidth / 8; n += 2) {
        load_b_transposed<kPitch>(b, tile, n * 8, step * 16, lane);
        mma_pair<T>(out[n], out[n + 1], left_ready, ready(b));
      }
    }
  }
};

// A tile is one panel of 32 or 64 columns, or two or four of 64 side by side.
template <class T_, int kWidth_>
struct Hopper {
  using T = T_;
  static constexpr int kWidth = kWidth_;
  static_assert(kWidth == 32 || kWidth == 64 || kWidth == 128 || kWidth == 256);
  static constexpr int kColumns = kWidth == 32 ? 32 : 64;  // of a panel
  static constexpr int kPanels = kWidth / kColumns, kPanelElements = kTile * kColumns;
  static constexpr int kElements = kPanels * kPanelElements, kScoreElements = kPanel;
  static constexpr bool kWarpsAlone = false;

  static __device__ __forceinline__ int at(int row, int column) {
    return column / kColumns * kPanelElements + swizzled<kColumns>(row, column % kColumns);
  }
  static __device__ __forceinline__ int score_at(int row, int column) {
    return swizzled(row, column);
  }
  static __device__ __forceinline__ void publish() { publish_writes(); }
  static __device__ __forceinline__ void begin() { begin_products(); }
  static __device__ __forceinline__ void end() { end_products(); }
  template <int kTiles>
  static __device__ __forceinline__ void settle(float (&x)[kTiles][4]) {
    pin(x);
  }

  static __device__ __forceinline__ void scores(float (&s)[8][4], const T* left, const T* right,
                                                int, int) {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      const uint64_t a = tile_descriptor<kColumns>(left + panel * kPanelElements);
      const uint64_t b = tile_descriptor<kColumns>(right + panel * kPanelElements);
#pragma unroll
      for (int step = 0; step < kColumns / 16; ++step) {
        group_mma<T, 0, 0>(s, step_of<false>(a, step), step_of<false>(b, step), panel + step > 0);
      }
    }
  }
  // f(columns of out, the panel of the tile they belong to, step) along the sum over its 64 rows.
  template <class F>
  static __device__ __forceinline__ void for_steps(float (&out)[kWidth / 8][4], const T* tile,
                                                   F f) {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      const uint64_t b = tile_descriptor<kColumns>(tile + panel * kPanelElements);
      using Part = float[kColumns / 8][4];
      Part& to = *reinterpret_cast<Part*>(out + panel * (kColumns / 8));
#pragma unroll
      for (int step = 0; step < 4; ++step) f(to, b, step);
    }
  }
  template <int kOut>
  static __device__ __forceinline__ void gather(float (&out)[kOut / 8][4], const Packed& x,
                                                const T* tile, int, int) {
    static_assert(kOut == kWidth);
    for_steps(out, tile, [&](auto& to, uint64_t b, int step) {
      group_mma<T, 1>(to, x[step], step_of<true, kColumns>(b, step), 1);
    });
  }
  // The same with x, of all four warps, from a tile of scores.
  static __device__ __forceinline__ void gather(float (&out)[kWidth / 8][4], const T* x,
                                                const T* tile) {
    const uint64_t a = tile_descriptor(x);
    for_steps(out, tile, [&](auto& to, uint64_t b, int step) {
      group_mma<T, 0, 1>(to, step_of<false>(a, step), step_of<true, kColumns>(b, step), 1);
    });
  }
  static __device__ __forceinline__ void gather_t(float (&out)[kWidth / 8][4], const T* ds,
                                                  const T* tile, int, int) {
    const uint64_t a = tile_descriptor(ds);
    for_steps(out, tile, [&](auto& to, uint64_t b, int step) {
      group_mma<T, 1, 1>(to, step_of<true>(a, step), step_of<true, kColumns>(b, step), 1);
    });
  }
  // A warp's 16 x 64 numbers into its rows of a tile of scores.
  static __device__ __forceinline__ void put(T* tile, const Packed& x, int row, int lane) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      store_matrices(tile + swizzled(row + lane % 16, step * 16 + lane / 16 * 8), x[step]);
    }
  }
};

// Rows [first, first + 64) of D numbers into a tile, zeros beyond `limit`, past D, and where the
// row is not real. A thread's pieces lie one below the other, kApart rows apart.
template <class E, int kThreadsOfLoad = kThreads>
__device__ __forceinline__ void load_rows(typename E::T* tile, const typename E::T* rows,
                                          int64_t stride, int first, int limit, int width,
                                          const uint8_t* real, int thread = threadIdx.x) {
  using T = typename E::T;
  constexpr int kPieces = E::kWidth / kPiece<T>, kApart = kThreadsOfLoad / kPieces;
  // The swizzle repeats every eight rows; a tile too wide for that is two behind each other.
  if constexpr (kApart % 8 != 0 && !E::kWarpsAlone) {
    using Half = Hopper<T, E::kWidth / 2>;
    load_rows<Half, kThreadsOfLoad>(tile, rows, stride, first, limit, min(width, Half::kWidth),
                                    real, thread);
    load_rows<Half, kThreadsOfLoad>(tile + Half::kElements, rows + Half::kWidth, stride, first,
                                    limit, width - Half::kWidth, real, thread);
    return;
  }
  const int r = thread / kPieces, c = thread % kPieces * kPiece<T>;
  const T* from = rows + (first + r) * stride + c;
  T* const to = tile + E::at(r, c);
  if (first + kTile <= limit && width == E::kWidth && real == nullptr) {
#pragma unroll
    for (int i = 0; i < kTile / kApart; ++i, from += kApart * stride) {
      copy_async(to + E::at(i * kApart, 0), from, true);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kTile / kApart; ++i, from += kApart * stride) {
    const int at = first + r + i * kApart;
    bool valid = at < limit && c < width;
    if (valid && real != nullptr) valid = real[at] != 0;
    copy_async(to + E::at(i * kApart, 0), valid ? from : rows, valid);
  }
}

// A warp's 16 rows of kOut numbers, times a factor a row, through its own rows of a tile out to
// memory.
template <class E, int kOut>
__device__ __forceinline__ void store_rows(typename E::T* tile, const float (&x)[kOut / 8][4],
                                           float factor_low, float factor_high, int row, int lane,
                                           typename E::T* rows, int64_t stride, int first,
                                           int limit, int width) {
  using T = typename E::T;
  constexpr int kPieces = kOut / kPiece<T>, kApart = 32 / kPieces;  // rows between a lane's pieces
  __syncwarp();
#pragma unroll
  for (int n = 0; n < kOut / 8; ++n) {
    const int r = row + lane / 4, c = n * 8 + lane % 4 * 2;
    store_pair(tile + E::at(r, c), x[n][0] * factor_low, x[n][1] * factor_low);
    store_pair(tile + E::at(r + 8, c), x[n][2] * factor_high, x[n][3] * factor_high);
  }
  __syncwarp();
  const int r = row + lane / kPieces, c = lane % kPieces * kPiece<T>;
  T* to = rows + (first + r) * stride + c;
  const int left = c < width ? limit - first - r : 0;
#pragma unroll
  for (int i = 0; i < 16 / kApart; ++i, to += kApart * stride) {
    if (i * kApart < left) {
      *reinterpret_cast<uint4*>(to) =
          *reinterpret_cast<const uint4*>(tile + E::at(r + i * kApart, c));
    }
  }
}

}  // namespace sinkhorn::cuda
