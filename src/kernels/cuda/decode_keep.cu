// Keeping a token: its key and value go to their place in the cache, and it joins the pools.
//
//   s = pooled + x,  d = s / count where the token begins a block (its pooled destination)
//   pooled' = s, or 0 behind a block's first token with `recent`
//   own' = own + x, or x at a block's first token, which leaves the mean of the block before
//
// Sums are float64, as the pool of a long sequence loses nothing so; d and the mean are rounded to
// the type of x, as the operator `pool` does. A thread has one of the E = H * D numbers of a slot.
#include "kernels/cuda/check.cuh"
#include "kernels/cuda/decode_common.cuh"

namespace sinkhorn::cuda {
namespace {

constexpr int kKeepThreads = 128;

template <class T>
__device__ __forceinline__ float rounded(double x) {
  return static_cast<float>(static_cast<T>(static_cast<float>(x)));
}

template <class T>
__device__ __forceinline__ void pool_token(const DecodeKeepParams& p, const DecodePlace& place,
                                           int64_t at) {
  const int block = p.state.block;
  const bool first = place.begins;
  const double x = static_cast<double>(static_cast<float>(static_cast<const T*>(p.x)[at]));
  const double sum = p.pooled[at] + x;
  p.pooled[at] = first && p.mode == PoolMode::kRecent ? 0.0 : sum;
  if (p.destination != nullptr && first) {
    int64_t count = place.token + 1;
    if (p.mode == PoolMode::kRecent) count = min(count, int64_t{block});
    p.destination[at] =
        rounded<T>(p.mode == PoolMode::kSum ? sum : sum / static_cast<double>(count));
  }
  if (p.own == nullptr) return;
  const double own = p.own[at];
  p.own[at] = first ? x : own + x;
  if (p.source != nullptr && first) {
    p.source[at] = rounded<T>(p.mode == PoolMode::kSum ? own : own / static_cast<double>(block));
  }
}

// Grid: numbers of a slot by kKeepThreads, slots.
template <class T>
__global__ void __launch_bounds__(kKeepThreads)
    decode_keep_kernel(const __grid_constant__ DecodeKeepParams p) {
  const DecodeState& s = p.state;
  const int slot = static_cast<int>(blockIdx.y);
  const int e = static_cast<int>(blockIdx.x) * kKeepThreads + static_cast<int>(threadIdx.x);
  const int numbers = s.heads * s.width;
  if (e >= numbers) return;
  const int64_t at = int64_t{slot} * numbers + e;
  const DecodePlace place(s, slot);
  // What no slot asks for is read by the products behind all the same: let it be finite.
  if (p.destination != nullptr && !place.begins) p.destination[at] = 0.0f;
  if (p.source != nullptr && !place.begins) p.source[at] = 0.0f;
  if (!place.active) return;
  const int head = e / s.width, d = e % s.width;
  const int64_t to = place.token * s.width + d;
  vector_of<T>(s.key, slot, head)[to] = vector_of<const T>(p.key, slot, head)[d];
  if (s.value.data != s.key.data) {
    vector_of<T>(s.value, slot, head)[to] = vector_of<const T>(p.value, slot, head)[d];
  }
  if (p.x != nullptr) pool_token<T>(p, place, at);
}

}  // namespace

void launch_decode_keep(const DecodeKeepParams& p, Stream stream) {
  const DecodeState& s = p.state;
  const int tiles = (s.heads * s.width + kKeepThreads - 1) / kKeepThreads;
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(s.batch));
  by_decode_type(s.type,
                 [&]<class T>() { decode_keep_kernel<T><<<grid, kKeepThreads, 0, stream>>>(p); });
  check_launch("decode_keep");
}

}  // namespace sinkhorn::cuda
