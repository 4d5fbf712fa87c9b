// One CTA to a head: what the kernels for up to 128 blocks share.
//
// The matrix is padded to kSize = 16, 32, 64 or 128 rows and columns, -inf outside. A row, in the
// row layout, is held by kParts neighbouring lanes, which reduce it by shuffles. Rows of the tile
// in shared memory are kStride apart, so that the lanes of a warp, 32 / kParts rows of kParts
// neighbours, hit different banks.
#pragma once

#include <type_traits>

#include "kernels/cuda/balance_common.cuh"
#include "kernels/cuda/check.cuh"

namespace sinkhorn::cuda::balance {

template <int kBlocks>
struct HeadShape {
  static constexpr int kSize = kBlocks;
  static constexpr int kParts = kSize <= 64 ? 8 : 4;
  static constexpr int kThreads = kSize * kParts;
  static constexpr int kEach = kSize / kParts;  // elements a thread holds
  static constexpr int kStride = kSize + kParts;
};

// The row layout: this thread's row and its columns kParts apart.
template <class Shape>
struct RowPlace {
  __device__ __forceinline__ RowPlace()
      : row(threadIdx.x / Shape::kParts), part(threadIdx.x % Shape::kParts) {}
  __device__ __forceinline__ int column(int e) const { return Shape::kParts * e + part; }
  __device__ __forceinline__ int tile(int e) const { return row * Shape::kStride + column(e); }
  __device__ __forceinline__ bool leads() const { return part == 0; }

  const int row, part;
};

// The dynamic shared memory of a launch.
template <class Memory>
__device__ __forceinline__ Memory& shared_memory() {
  extern __shared__ __align__(16) unsigned char balance_bytes[];
  return *reinterpret_cast<Memory*>(balance_bytes);
}

template <class Shape>
__device__ __forceinline__ LogSum row_log_sum(const float (&x)[Shape::kEach]) {
  LogSum s;
#pragma unroll
  for (int e = 0; e < Shape::kEach; ++e) s.top = fmaxf(s.top, x[e]);
  s.top = lanes_max<Shape::kParts>(s.top);
  const float base = s.base();
#pragma unroll
  for (int e = 0; e < Shape::kEach; ++e) s.sum += exp2f(x[e] - base);
  s.sum = lanes_sum<Shape::kParts>(s.sum);
  return s;
}

// Fills the tile with x; neighbouring threads take neighbouring columns.
template <class Shape, class T>
__device__ __forceinline__ void load_tile_as(const Args& a, int64_t head, const bool* live,
                                             float* tile) {
  constexpr int kAtOnce = Shape::kEach < 16 ? Shape::kEach : 16;
  const Matrix<T> logits(a.p, a.p.logits, head);
  const Matrix<float> noise(a.p, a.p.noise, head);
  const int c = threadIdx.x % Shape::kSize;
  for (int first = threadIdx.x / Shape::kSize; first < Shape::kSize;
       first += kAtOnce * Shape::kParts) {
    float x[kAtOnce];
    bool allowed[kAtOnce];
#pragma unroll
    for (int e = 0; e < kAtOnce; ++e) {
      const int r = first + e * Shape::kParts;
      allowed[e] = live[r] && live[c] && c < source_end(a.p, r);
      x[e] = allowed[e] ? logits.at(r, c) : 0.0f;
    }
    if (noise.data != nullptr) {
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e) {
        if (allowed[e]) x[e] += noise.at(first + e * Shape::kParts, c);
      }
    }
#pragma unroll
    for (int e = 0; e < kAtOnce; ++e) {
      tile[(first + e * Shape::kParts) * Shape::kStride + c] =
          allowed[e] ? scaled(a, x[e]) : kNothing;
    }
  }
}

// live: [kSize] in shared memory. All threads call this; the tile is whole when it returns.
template <class Shape>
__device__ __forceinline__ void load_tile(const Args& a, int64_t head, bool* live, float* tile) {
  const int n = static_cast<int>(a.p.blocks), i = threadIdx.x;
  if (i < Shape::kSize) live[i] = i < n && is_live(a.p, head / a.p.heads, i);
  __syncthreads();
  switch (a.p.logits.type) {
    case Type::kBFloat16: load_tile_as<Shape, __nv_bfloat16>(a, head, live, tile); break;
    case Type::kFloat16: load_tile_as<Shape, __half>(a, head, live, tile); break;
    default: load_tile_as<Shape, float>(a, head, live, tile);
  }
  __syncthreads();
}

// Copies the tile, which other threads may have written before a barrier, to float32 R.
template <class Shape>
__device__ __forceinline__ void store_tile(const Args& a, int64_t head, const float* tile) {
  const int n = static_cast<int>(a.p.blocks);
  float* result = static_cast<float*>(a.p.result) + head * n * n;
  const int c = threadIdx.x % Shape::kSize, first = threadIdx.x / Shape::kSize;
#pragma unroll
  for (int e = 0; e < Shape::kEach; ++e) {
    const int r = first + e * Shape::kParts;
    if (r < n && c < n) result[r * n + c] = tile[r * Shape::kStride + c];
  }
}

// Launches `kernel`, built for Shape, with one CTA a head and `bytes` of dynamic shared memory.
template <class Shape, class... Arguments>
void launch_heads(const char* name, void (*kernel)(Arguments...), const BalanceParams& p,
                  size_t bytes, Stream stream,
                  const std::type_identity_t<Arguments>&... arguments) {
  if (bytes > 48 * 1024) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(bytes)),
          name);
  }
  const unsigned heads = static_cast<unsigned>(p.batch * p.heads);
  kernel<<<heads, Shape::kThreads, bytes, stream>>>(arguments...);
  check_launch(name);
}

// Calls body(HeadShape<size>()) for the smallest size that holds the blocks.
template <class Body>
void with_head_shape(int64_t blocks, const Body& body) {
  if (blocks <= 16) {
    body(HeadShape<16>());
  } else if (blocks <= 32) {
    body(HeadShape<32>());
  } else if (blocks <= 64) {
    body(HeadShape<64>());
  } else {
    body(HeadShape<128>());
  }
}

}  // namespace sinkhorn::cuda::balance
