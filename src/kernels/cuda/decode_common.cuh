// What the kernels of decoding share: where a slot stands, which sources its block has, and which
// slots begin one.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "kernels/cuda/decode.h"
#include "kernels/cuda/lanes.cuh"

namespace sinkhorn::cuda {

// A slot's token: which block it lies in, and whether it begins it.
struct DecodePlace {
  int64_t token, block;
  bool active, begins;
  __device__ __forceinline__ DecodePlace(const DecodeState& s, int slot)
      : token(s.places[slot]),
        block(token / s.block),
        active(s.active[slot]),
        begins(active & (block * s.block == token)) {}  // no branch: both are loaded at once
};

// Blocks that row `block` of R may read: 0 .. n - 1; under inclusive the last is the block itself.
__device__ __forceinline__ int64_t decode_sources(const DecodeState& s, int64_t block) {
  return s.inclusive ? block + 1 : max(block - s.window, int64_t{0});
}

template <class T>
__device__ __forceinline__ T* vector_of(const HeadVectors& v, int slot, int head) {
  return static_cast<T*>(v.data) + slot * v.slot + head * v.head;
}

// The slots that begin a block, as bits in shared memory. In a large batch they are few, and known
// on the device alone: kernels whose work is theirs find them and share it among the CTAs they
// have. Its loops seldom go round, and stay short: unrolled they would be code to wait for.
class BegunSlots {
 public:
  // Called by a whole CTA, once. Every thread gets the same.
  __device__ __forceinline__ explicit BegunSlots(const DecodeState& s) {
    __shared__ uint32_t masks[kMostDecodeSlots / 32];
    masks_ = masks;
    const int lane = static_cast<int>(threadIdx.x) % 32, words = (s.batch + 31) / 32;
#pragma unroll 1
    for (int w = static_cast<int>(threadIdx.x) / 32; w < words;
         w += static_cast<int>(blockDim.x) / 32) {
      const int slot = 32 * w + lane;
      const uint32_t mask =
          __ballot_sync(0xFFFFFFFFu, slot < s.batch && DecodePlace(s, slot).begins);
      if (lane == 0) masks[w] = mask;
    }
    __syncthreads();
#pragma unroll 1
    for (int w = 0; w < words; ++w) count_ += __popc(masks[w]);
  }

  __device__ __forceinline__ int count() const { return count_; }

  // The slot at `index` < count among them.
  __device__ __forceinline__ int slot(int index) const {
    int w = 0;
#pragma unroll 1
    for (int ones = __popc(masks_[0]); index >= ones; ones = __popc(masks_[++w])) index -= ones;
    uint32_t mask = masks_[w];
#pragma unroll 1
    for (; index > 0; --index) mask &= mask - 1;
    return 32 * w + __ffs(static_cast<int>(mask)) - 1;
  }

 private:
  const uint32_t* masks_;
  int count_ = 0;
};

// CTAs for so many pieces of work at most, each of which takes every gridDim.x-th: what a large GPU
// holds at a time, since more would only find that nothing is left for them.
inline unsigned decode_ctas(int64_t pieces) {
  constexpr int64_t kCtas = 512;
  return static_cast<unsigned>(std::clamp<int64_t>(pieces, 1, kCtas));
}

// Whether packs of `wide` numbers, 16 bytes, are aligned wherever rows of keys and values begin, if
// they are so within a row.
inline bool is_aligned(const DecodeState& s, int64_t wide) {
  bool aligned = true;
  for (const HeadVectors* v : {&s.key, &s.value}) {
    aligned = aligned && v->slot % wide == 0 && v->head % wide == 0 &&
              reinterpret_cast<uintptr_t>(v->data) % 16 == 0;
  }
  for (const void* sorted : {s.sorted_key, s.sorted_value}) {
    aligned = aligned && reinterpret_cast<uintptr_t>(sorted) % 16 == 0;
  }
  return aligned;
}

// Calls f<T> for the type of the caches.
template <class F>
void by_decode_type(Type type, const F& f) {
  if (type == Type::kBFloat16) return f.template operator()<__nv_bfloat16>();
  if (type == Type::kFloat16) return f.template operator()<__half>();
  return f.template operator()<float>();
}

}  // namespace sinkhorn::cuda
