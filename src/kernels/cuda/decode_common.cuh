// What the kernels of decoding share: where a slot stands, and which sources its block has.
#pragma once

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
        begins(active && token % s.block == 0) {}
};

// Blocks that row `block` of R may read: 0 .. n - 1; under inclusive the last is the block itself.
__device__ __forceinline__ int64_t decode_sources(const DecodeState& s, int64_t block) {
  return s.inclusive ? block + 1 : max(block - s.window, int64_t{0});
}

template <class T>
__device__ __forceinline__ T* vector_of(const HeadVectors& v, int slot, int head) {
  return static_cast<T*>(v.data) + slot * v.slot + head * v.head;
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
