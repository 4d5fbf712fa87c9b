// Dropout from a counter: Philox 4x32-10 keyed by the seed. Each softmax weight has a number of its
// own, so a draw depends on neither threads nor tiles, and backward makes it again.
#pragma once

#include "kernels/common/params.h"
#include "kernels/cpu/simd.h"

namespace sinkhorn::cpu::SINKHORN_ISA {

template <class T>
class Dropout {
 public:
  explicit Dropout(const DropoutParams& p)
      : active_(p.probability > 0.0),
        // Drawn numbers below this are dropped: probability * 2^32, rounded.
        threshold_(static_cast<uint64_t>(p.probability * 4294967296.0 + 0.5)),
        kept_(static_cast<T>(1.0 / (1.0 - p.probability))),
        seed_(p.seed),
        offset_(p.offset) {}

  bool active() const { return active_; }

  // The factors, 0 or 1 / (1 - p), of weights number first .. first + count - 1; `first` is a
  // multiple of 4 and `to` has room for count rounded up to 4 * kGroup.
  void factors(uint64_t first, int64_t count, T* to) const {
    for (int64_t c = 0; c < count; c += 4 * kGroup) four_groups(first / 4 + c / 4, to + c);
  }

 private:
  static constexpr int kGroup = 16;

  void four_groups(uint64_t counter, T* to) const {
    uint32_t x[4][kGroup];
    for (int g = 0; g < kGroup; ++g) {
      const uint64_t n = counter + static_cast<uint64_t>(g);
      x[0][g] = static_cast<uint32_t>(n);
      x[1][g] = static_cast<uint32_t>(n >> 32);
      x[2][g] = static_cast<uint32_t>(offset_);
      x[3][g] = static_cast<uint32_t>(offset_ >> 32);
    }
    uint32_t key0 = static_cast<uint32_t>(seed_), key1 = static_cast<uint32_t>(seed_ >> 32);
    for (int round = 0; round < 10; ++round) {
      for (int g = 0; g < kGroup; ++g) {
        const uint64_t a = uint64_t{0xD2511F53u} * x[0][g], b = uint64_t{0xCD9E8D57u} * x[2][g];
        const uint32_t y0 = static_cast<uint32_t>(b >> 32) ^ x[1][g] ^ key0;
        const uint32_t y2 = static_cast<uint32_t>(a >> 32) ^ x[3][g] ^ key1;
        x[1][g] = static_cast<uint32_t>(b);
        x[3][g] = static_cast<uint32_t>(a);
        x[0][g] = y0;
        x[2][g] = y2;
      }
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    for (int g = 0; g < kGroup; ++g) {
      for (int l = 0; l < 4; ++l) to[4 * g + l] = x[l][g] < threshold_ ? T(0) : kept_;
    }
  }

  bool active_;
  uint64_t threshold_;
  T kept_;
  uint64_t seed_, offset_;
};

}  // namespace sinkhorn::cpu::SINKHORN_ISA
