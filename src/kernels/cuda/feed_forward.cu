// The feed-forward part between its two products: dropout after ReLU, and backward through both.
//
//   h = dropout(relu(a)), a = x W + b: the library's product adds b and takes the ReLU
//   da = dh / (1 - p) where h > 0, else 0: what was dropped or cut has h = 0, so h tells
//   db = sum over rows of da, or of any gradient [rows, F]: the second product has a bias, too
//   h, dh, da [rows, F] T; db [F] float32
//
// Dropout: four elements a thread, a function of their number (lanes.cuh). Backward: blocks of 32 x
// 8 threads take 32 packs of 16 bytes of a row, eight rows at a time, down a strip of rows. A
// thread asks for kAhead rows at once and keeps its columns' sums; a block adds its eight in order
// and leaves them in partial [strips, F], which column_sum.cuh sums. Strips are as short as it
// takes to fill a card: in a small model one round of loads brings all there is.
#include <algorithm>

#include "kernels/cuda/check.cuh"
#include "kernels/cuda/column_sum.cuh"
#include "kernels/cuda/feed_forward.h"
#include "kernels/cuda/lanes.cuh"

namespace sinkhorn::cuda {
namespace {

constexpr int kRowThreads = 8, kAhead = 4;
constexpr int64_t kShortStrip = kRowThreads * kAhead, kLongStrip = 256, kMostStrips = 512;
constexpr int64_t kEnoughBlocks = 512;  // four for each of 128 multiprocessors

template <class T>
__global__ void __launch_bounds__(256)
    feed_forward_dropout_kernel(const __grid_constant__ FeedForwardParams p) {
  const int64_t at = 4 * (int64_t{blockIdx.x} * 256 + threadIdx.x);
  if (at >= p.rows * p.width) return;
  T* inner = static_cast<T*>(p.inner) + at;
  float h[4];
  load_own_pack<4>(inner, h);
  ElementDropout(p.dropout, p.rng).apply(at, h);
  store_pack<4>(inner, h);
}

// kRelu: through ReLU and dropout; else the sums of grad_inner as it is, and nothing else.
template <class T, bool kRelu>
__global__ void __launch_bounds__(32 * kRowThreads, 4)
    feed_forward_bwd_kernel(const __grid_constant__ FeedForwardParams p, int64_t strip) {
  constexpr int kPack = 16 / sizeof(T), kColumns = 32 * kPack;
  __shared__ float shared[kRowThreads][kColumns];
  const int64_t begin = blockIdx.y * strip, end = min(begin + strip, p.rows);
  const int64_t column = int64_t{blockIdx.x} * kColumns + threadIdx.x * kPack;
  const float kept = 1.0f / (1.0f - p.dropout);
  const T* inner = static_cast<const T*>(p.inner) + column;
  const T* grad_inner = static_cast<const T*>(p.grad_inner) + column;
  T* to_grad = static_cast<T*>(p.grad) + column;
  float sums[kPack] = {};
  if (column < p.width) {  // whole packs: F is a multiple of kPack
    for (int64_t row = begin + threadIdx.y; row < end; row += kRowThreads * kAhead) {
      // All loads at once: no branch (behind the strip its last row again) and no store between.
      uint4 packs[kAhead], grad_packs[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int64_t at = min(row + i * kRowThreads, end - 1) * p.width;
        if constexpr (kRelu) packs[i] = __ldg(reinterpret_cast<const uint4*>(inner + at));
        grad_packs[i] = __ldg(reinterpret_cast<const uint4*>(grad_inner + at));
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int64_t mine = row + i * kRowThreads;
        if (mine >= end) break;
        float h[kPack], grad[kPack];
        widen<kPack, T>(grad_packs[i], grad);
        if constexpr (kRelu) widen<kPack, T>(packs[i], h);
#pragma unroll
        for (int k = 0; k < kPack; ++k) {
          if constexpr (kRelu) grad[k] = h[k] <= 0.0f ? 0.0f : grad[k] * kept;
          sums[k] += grad[k];
        }
        if constexpr (kRelu) store_pack<kPack>(to_grad + mine * p.width, grad);
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kPack; ++k) shared[threadIdx.y][threadIdx.x * kPack + k] = sums[k];
  __syncthreads();
  const int mine = static_cast<int>(threadIdx.y * 32 + threadIdx.x);
  const int64_t to = int64_t{blockIdx.x} * kColumns + mine;
  if (mine >= kColumns || to >= p.width) return;
  float total = 0.0f;
#pragma unroll
  for (int y = 0; y < kRowThreads; ++y) total += shared[y][mine];
  p.partial[blockIdx.y * p.width + to] = total;
}

template <class F>
void by_type(Type type, const F& f) {
  if (type == Type::kBFloat16) return f.template operator()<__nv_bfloat16>();
  if (type == Type::kFloat16) return f.template operator()<__half>();
  return f.template operator()<float>();
}

int64_t parts_of(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

int64_t pack_blocks(const FeedForwardParams& p) {
  const int64_t columns = p.type == Type::kFloat32 ? 128 : 256;
  return parts_of(p.width, columns);
}

int64_t strip_rows(const FeedForwardParams& p) {
  const int64_t rows = parts_of(p.rows * pack_blocks(p), kEnoughBlocks);
  const int64_t even = std::min(parts_of(rows, kShortStrip) * kShortStrip, kLongStrip);
  return std::max(even, parts_of(p.rows, kMostStrips));
}

template <bool kRelu>
void start_bwd(const FeedForwardParams& p, Stream stream) {
  const dim3 grid(static_cast<unsigned>(pack_blocks(p)),
                  static_cast<unsigned>(feed_forward_partials(p)));
  by_type(p.type, [&]<class T>() {
    feed_forward_bwd_kernel<T, kRelu><<<grid, dim3(32, kRowThreads), 0, stream>>>(p, strip_rows(p));
  });
  check_launch("feed_forward_bwd");
}

}  // namespace

bool covers_feed_forward(int64_t rows, int64_t width) {
  return rows > 0 && width > 0 && width % 8 == 0 && rows * (width / 8) / 128 < 0x7FFFFFFF;
}

int64_t feed_forward_partials(const FeedForwardParams& p) {
  return parts_of(p.rows, strip_rows(p));
}

void launch_feed_forward_dropout(const FeedForwardParams& p, Stream stream) {
  const auto blocks = static_cast<unsigned>((p.rows * p.width / 4 + 255) / 256);
  by_type(p.type,
          [&]<class T>() { feed_forward_dropout_kernel<T><<<blocks, 256, 0, stream>>>(p); });
  check_launch("feed_forward_fwd");
}

void launch_feed_forward_bwd(const FeedForwardParams& p, Stream stream) {
  start_bwd<true>(p, stream);
}

void launch_bias_partials(const FeedForwardParams& p, Stream stream) {
  start_bwd<false>(p, stream);
}

void launch_bias_sum(const FeedForwardParams& p, Stream stream) {
  start_column_sum({feed_forward_partials(p), p.width, p.partial, {p.grad_bias, nullptr}}, 1,
                   stream);
  check_launch("feed_forward_bwd sums");
}

}  // namespace sinkhorn::cuda
