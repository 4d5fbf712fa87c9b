// What the kernels of balance share: base 2, types, who may read whom, and sums of exponentials.
//
// Balancing is in base 2: x = (logits + noise) * log2(e) / temperature where allowed, -inf
// elsewhere, and every exponential is an exp2, every logarithm a log2. The scale is a sum of two
// floats, so that x is rounded once. Gradients are those of the natural logarithm: a softmax is the
// same in any base. Without iterations R is a plain exponential, and x stays natural.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/params.h"
#include "kernels/cuda/stream.h"

namespace sinkhorn::cuda::balance {

inline constexpr float kNothing = -__builtin_huge_valf();  // x where not allowed

// What every kernel is told.
struct Args {
  BalanceParams p;
  float scale, scale_rest;  // log2(e) / temperature, and what its rounding lost
  float temperature;
};

inline Args make_args(const BalanceParams& p) {
  const double scale = 1.4426950408889634074 / p.temperature;
  const float rounded = static_cast<float>(scale);
  const float rest = static_cast<float>(scale - static_cast<double>(rounded));
  return {p, rounded, rest, static_cast<float>(p.temperature)};
}

// Column steps of forward.
inline __host__ __device__ int64_t column_steps(const BalanceParams& p) {
  return p.columns == Columns::kNone ? 0 : p.iterations;
}

// Which matrices x^k a causal backward keeps while it replays: every one up to 7 iterations, then
// each stride-th one and those of the stretch at hand, stride = sqrt(K).
struct Replay {
  int iterations, stride, slots;

  explicit Replay(int64_t k) : iterations(static_cast<int>(k)), stride(1) {
    while (k > 7 && static_cast<int64_t>(stride) * stride < k) ++stride;
    slots = iterations / stride + stride;
  }
  __host__ __device__ int slot(int k) const {
    return k % stride == 0 ? k / stride : iterations / stride + k % stride;
  }
  // Whether the stretch before step k must be replayed before the step is undone.
  __host__ __device__ bool missing_below(int k) const {
    return stride > 1 && k % stride == 0 && k < iterations;
  }
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }

__device__ __forceinline__ void store_as(void* to, Type type, int64_t at, float x) {
  switch (type) {
    case Type::kBFloat16: static_cast<__nv_bfloat16*>(to)[at] = __float2bfloat16(x); break;
    case Type::kFloat16: static_cast<__half*>(to)[at] = __float2half(x); break;
    default: static_cast<float*>(to)[at] = x;
  }
}

// Sources of destination i by the causal rule alone: 0 .. source_end - 1.
__device__ __forceinline__ int source_end(const BalanceParams& p, int i) {
  const int n = static_cast<int>(p.blocks);
  if (p.causal == Causal::kNone) return n;
  if (p.causal == Causal::kInclusive) return i + 1;
  return p.window >= i ? 0 : i - static_cast<int>(p.window);
}

// The first destination that may read source j.
__device__ __forceinline__ int first_reader(const BalanceParams& p, int j) {
  const int n = static_cast<int>(p.blocks);
  if (p.causal == Causal::kNone) return 0;
  if (p.causal == Causal::kInclusive) return j;
  return p.window >= n ? n : j + 1 + static_cast<int>(p.window);
}

__device__ __forceinline__ bool is_live(const BalanceParams& p, int64_t batch, int i) {
  return p.live == nullptr || p.live[batch * p.blocks + i] != 0;
}

// One head's matrix inside a strided tensor.
template <class T>
struct Matrix {
  __device__ __forceinline__ Matrix(const BalanceParams& p, const View& v, int64_t head)
      : data(v.data == nullptr ? nullptr
                               : static_cast<const T*>(v.data) + head / p.heads * v.stride[0] +
                                     head % p.heads * v.stride[1]),
        row(v.stride[2]),
        column(v.stride[3]) {}
  __device__ __forceinline__ float at(int r, int c) const {
    return widen(data[r * row + c * column]);
  }

  const T* data;
  int64_t row, column;
};

__device__ __forceinline__ float scaled(const Args& a, float x) {
  return a.p.iterations == 0 ? x / a.temperature : fmaf(x, a.scale, x * a.scale_rest);
}

// 2^x in one instruction: 2 ulp, and 0 for what is below the normal numbers.
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, and 0 of an empty sum.
__device__ __forceinline__ float reciprocal(float x) { return x > 0.0f ? 1.0f / x : 0.0f; }

// 1 / x of a normal number to 1 ulp, and 0 of an empty sum.
__device__ __forceinline__ float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return x > 0.0f ? y : 0.0f;
}

// log2 of a sum of powers of 2, as the largest exponent and the sum beside it.
struct LogSum {
  float top = kNothing, sum = 0.0f;

  __device__ __forceinline__ bool empty() const { return top == kNothing; }
  // What exponents are taken relative to: finite also where there is nothing.
  __device__ __forceinline__ float base() const { return empty() ? 0.0f : top; }
  __device__ __forceinline__ float log() const { return empty() ? 0.0f : top + log2f(sum); }

  __device__ __forceinline__ void add(float x) {
    if (x == kNothing) return;
    const float e = exp2f(-fabsf(x - top));
    sum = x > top ? fmaf(sum, e, 1.0f) : sum + e;
    top = fmaxf(top, x);
  }
  __device__ __forceinline__ void merge(const LogSum& other) {
    const float largest = fmaxf(top, other.top), base = largest == kNothing ? 0.0f : largest;
    sum = sum * exp2f(top - base) + other.sum * exp2f(other.top - base);
    top = largest;
  }
  template <int kCount>
  __device__ __forceinline__ void add(const float (&x)[kCount]) {
    float largest = top;
#pragma unroll
    for (int i = 0; i < kCount; ++i) largest = fmaxf(largest, x[i]);
    const float base = largest == kNothing ? 0.0f : largest;
    sum *= exp2f(top - base);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += exp2f(x[i] - base);
    top = largest;
  }
};

// The backward of prefix columns, up a column: W of the row at hand, and its C (see docs/math.md).
struct Suffix {
  float weight = 0.0f, level = -kNothing;

  __device__ __forceinline__ bool empty() const { return level == -kNothing; }
  // A row, or rows, above: their own W as if nothing lay below, and the C of the uppermost.
  __device__ __forceinline__ void add(float own, float c) {
    weight = own + weight * exp2f(fminf(c - level, 0.0f));
    level = c;
  }
};

// Sum and largest over kLanes neighbouring lanes; each of them gets the same bits.
template <int kLanes>
__device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
  return x;
}
template <int kLanes>
__device__ __forceinline__ float lanes_max(float x) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, step));
  }
  return x;
}
template <int kLanes>
__device__ __forceinline__ LogSum lanes_log_sum(LogSum s) {
  LogSum all;
  all.top = lanes_max<kLanes>(s.top);
  all.sum = lanes_sum<kLanes>(s.sum * exp2f(s.top - all.base()));
  return all;
}

}  // namespace sinkhorn::cuda::balance
