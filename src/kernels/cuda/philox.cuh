// Dropout from a counter: Philox 4x32 with 7 rounds, keyed by a seed in device memory. Backward
// makes a draw again from its position alone.
//
// One draw of 128 bits serves eight softmax weights, 16 bits each: queries t and t + 8 of a group
// of 16, keys s, s + 1, s + 8 and s + 9 of a group of 16. That is what a lane holds of two adjacent
// products whether queries or keys run along its rows.
#pragma once

#include <cstdint>

namespace sinkhorn::cuda {

struct Dropout {
  uint32_t threshold = 0;  // draws below are dropped: probability * 2^16, rounded; 0 = no dropout
  float kept = 1.0f;       // 1 / (1 - probability)
  const int64_t* rng = nullptr;  // seed, offset
};

// Philox 4x32: the counter x, mixed kRounds times under a key.
template <int kRounds>
__device__ __forceinline__ uint4 philox(uint4 x, uint64_t key) {
  uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const uint32_t high0 = __umulhi(0xD2511F53u, x.x), low0 = 0xD2511F53u * x.x;
    const uint32_t high1 = __umulhi(0xCD9E8D57u, x.z), low1 = 0xCD9E8D57u * x.z;
    x = make_uint4(high1 ^ x.y ^ key0, low1, high0 ^ x.w ^ key1, low0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return x;
}

struct DropoutState {
  uint64_t seed, offset;

  __device__ __forceinline__ explicit DropoutState(const int64_t* rng)
      : seed(static_cast<uint64_t>(rng[0])), offset(static_cast<uint64_t>(rng[1])) {}

  // head: number of head and softmax among all; query and key: any that share the draw.
  __device__ __forceinline__ uint4 draw(uint32_t head, uint32_t query, uint32_t key) const {
    return philox<7>(
        make_uint4((query >> 4) * 8 + (query & 7), (key >> 4) * 4 + ((key & 7) >> 1),
                   head ^ static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32)),
        seed);
  }
};

// The 16 bits of one weight of a draw: the second query is the one 8 further, the second keys are
// those 8 further.
__device__ __forceinline__ uint32_t dropout_bits(const uint4& x, bool second_query,
                                                 bool second_keys, bool odd_key) {
  const uint32_t word = second_query ? (second_keys ? x.w : x.z) : (second_keys ? x.y : x.x);
  return odd_key ? word >> 16 : word & 0xFFFFu;
}

}  // namespace sinkhorn::cuda
