// What the kernels of training steps and decoding share: packs of neighbours loaded at once, sums
// over a warp, and dropout from a counter.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "kernels/cuda/philox.cuh"

namespace sinkhorn::cuda {

// One access to memory of so many bytes.
template <int kBytes>
struct Word;
template <>
struct Word<2> {
  using Type = unsigned short;
};
template <>
struct Word<4> {
  using Type = unsigned int;
};
template <>
struct Word<8> {
  using Type = uint2;
};
template <>
struct Word<16> {
  using Type = uint4;
};

template <int kCount, class T, class W>
__device__ __forceinline__ void widen(const W& word, float (&to)[kCount]) {
  T values[kCount];
  static_assert(sizeof(values) == sizeof(word));
  memcpy(values, &word, sizeof(word));
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = static_cast<float>(values[i]);
}

// kCount neighbours, at an address that is a multiple of their size, that nobody writes while the
// kernel runs.
template <int kCount, class T>
__device__ __forceinline__ void load_pack(const T* from, float (&to)[kCount]) {
  using W = typename Word<sizeof(T) * kCount>::Type;
  widen<kCount, T>(__ldg(reinterpret_cast<const W*>(from)), to);
}

// The same where this thread will overwrite them.
template <int kCount, class T>
__device__ __forceinline__ void load_own_pack(const T* from, float (&to)[kCount]) {
  using W = typename Word<sizeof(T) * kCount>::Type;
  widen<kCount, T>(__ldcg(reinterpret_cast<const W*>(from)), to);
}

template <int kCount, class T>
__device__ __forceinline__ void store_pack(T* to, const float (&from)[kCount]) {
  using W = typename Word<sizeof(T) * kCount>::Type;
  T values[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = static_cast<T>(from[i]);
  W word;
  static_assert(sizeof(values) == sizeof(word));
  memcpy(&word, values, sizeof(word));
  __stcg(reinterpret_cast<W*>(to), word);  // one store, where a plain one may be split
}

// Every lane gets the sum, and the same bits: a + b is b + a.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(0xFFFFFFFFu, x, distance);
  }
  return x;
}

// Which elements of a tensor are dropped: Philox 4x32-10 keyed by the seed; one draw serves
// elements 4 n .. 4 n + 3. Backward makes it again from their number.
class ElementDropout {
 public:
  // rng: seed and offset, in device memory; not read without dropout.
  __device__ __forceinline__ ElementDropout(float probability, const int64_t* rng)
      : active_(probability > 0.0f),
        threshold_(static_cast<uint32_t>(probability * 4294967296.0f)),
        kept_(1.0f / (1.0f - probability)) {
    if (!active_) return;
    seed_ = static_cast<uint64_t>(rng[0]);
    offset_ = static_cast<uint64_t>(rng[1]);
  }

  __device__ __forceinline__ void apply(int64_t first, float (&values)[4]) const {
    if (!active_) return;
    const uint4 x = draw(static_cast<uint64_t>(first) / 4);
    values[0] = x.x < threshold_ ? 0.0f : values[0] * kept_;
    values[1] = x.y < threshold_ ? 0.0f : values[1] * kept_;
    values[2] = x.z < threshold_ ? 0.0f : values[2] * kept_;
    values[3] = x.w < threshold_ ? 0.0f : values[3] * kept_;
  }

 private:
  __device__ __forceinline__ uint4 draw(uint64_t counter) const {
    const uint4 x =
        make_uint4(static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32),
                   static_cast<uint32_t>(offset_), static_cast<uint32_t>(offset_ >> 32));
    return philox<10>(x, seed_);
  }

  bool active_;
  uint32_t threshold_;
  float kept_;
  uint64_t seed_ = 0, offset_ = 0;
};

}  // namespace sinkhorn::cuda
