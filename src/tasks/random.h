// Numbers that depend on their arguments alone: hashes, and shuffles that need no memory.
#pragma once

#include <bit>
#include <cstdint>

namespace sinkhorn::tasks {

// The finaliser of SplitMix64: every input bit reaches every output bit.
inline uint64_t mix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// SplitMix64.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(mix64(seed)) {}
  uint64_t operator()() {
    state_ += 0x9e3779b97f4a7c15u;
    return mix64(state_);
  }
  // Uniform in 0 .. bound - 1, for bounds far below 2^32.
  uint64_t below(uint64_t bound) { return ((*this)() >> 32) * bound >> 32; }

 private:
  uint64_t state_;
};

// A permutation of 0 .. size - 1: a Feistel network on the next even power of two, walked until it
// falls below size (four steps on average at worst).
class Permutation {
 public:
  Permutation(uint64_t size, uint64_t key)
      : size_(size), key_(key), half_bits_((std::bit_width(size > 1 ? size - 1 : 1) + 1) / 2) {}

  uint64_t operator()(uint64_t index) const {
    do index = encrypt(index);
    while (index >= size_);
    return index;
  }

 private:
  uint64_t encrypt(uint64_t x) const {
    const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
    uint64_t left = x >> half_bits_, right = x & mask;
    for (uint64_t round = 0; round < 6; ++round) {
      const uint64_t next = left ^ (mix64(right ^ mix64(key_ + round)) & mask);
      left = right;
      right = next;
    }
    return left << half_bits_ | right;
  }

  uint64_t size_, key_;
  int half_bits_;
};

}  // namespace sinkhorn::tasks
