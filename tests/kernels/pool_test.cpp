// pool against loops, and its gradient against the transposed loops.
#include <gtest/gtest.h>

#include "support.h"

namespace sinkhorn::test {
namespace {

struct Case {
  int64_t length, block;
  PoolMode mode;
  bool causal, masked;
};

// Whether token t counts in pool i, and how much of it.
double share(const Case& c, const uint8_t* real, int64_t i, int64_t t) {
  const auto holds = [&](int64_t token) {
    if (real != nullptr && !real[token]) return false;
    if (!c.causal) return token / c.block == i;
    if (token > i * c.block) return false;
    return c.mode != PoolMode::kRecent || token > i * c.block - c.block;
  };
  if (!holds(t)) return 0.0;
  if (c.mode == PoolMode::kSum) return 1.0;
  int64_t count = 0;
  for (int64_t token = 0; token < c.length; ++token) count += holds(token);
  return 1.0 / static_cast<double>(count);
}

template <class T>
void check(const Case& c, double tolerance) {
  const int64_t batch = 2, width = 67, blocks = (c.length - 1) / c.block + 1;
  Random random(static_cast<uint64_t>(c.length * 31 + c.block));
  auto x = random.normal<T>(batch * c.length * width);
  const auto real = random.bits(batch * c.length, 0.6);
  for (int64_t t = 0; c.masked && t < batch * c.length; ++t) {
    if (!real[static_cast<size_t>(t)]) x[static_cast<size_t>(t * width)] = static_cast<T>(kNan);
  }
  auto pooled = poisoned<T>(batch * blocks * width);
  PoolParams p{};
  p.batch = batch;
  p.length = c.length;
  p.width = width;
  p.block = c.block;
  p.blocks = blocks;
  p.mode = c.mode;
  p.causal = c.causal;
  p.compute64 = sizeof(T) == 8;
  p.real = c.masked ? real.data() : nullptr;
  p.x = view(x, 1, c.length, width);
  p.pooled = view(pooled, 1, blocks, width);
  cpu::kernels().pool_fwd(p, threads(3));
  const auto incoming = random.normal<T>(batch * blocks * width);
  auto grad = poisoned<T>(batch * c.length * width);
  p.x = view(grad, 1, c.length, width);
  p.pooled = view(incoming, 1, blocks, width);
  cpu::kernels().pool_bwd(p, threads(3));
  for (int64_t n = 0; n < batch; ++n) {
    const uint8_t* mask = c.masked ? real.data() + n * c.length : nullptr;
    for (int64_t e = 0; e < width; e += 13) {
      for (int64_t i = 0; i < blocks; ++i) {
        double want = 0;
        for (int64_t t = 0; t < c.length; ++t) {
          const double s = share(c, mask, i, t);
          if (s != 0) want += s * x[static_cast<size_t>((n * c.length + t) * width + e)];
        }
        ASSERT_NEAR(pooled[static_cast<size_t>((n * blocks + i) * width + e)], want, tolerance);
      }
      for (int64_t t = 0; t < c.length; ++t) {
        double want = 0;
        for (int64_t i = 0; i < blocks; ++i) {
          want +=
              share(c, mask, i, t) * incoming[static_cast<size_t>((n * blocks + i) * width + e)];
        }
        ASSERT_NEAR(grad[static_cast<size_t>((n * c.length + t) * width + e)], want, tolerance);
      }
    }
  }
}

TEST(Pool, AgreesWithLoops) {
  for (PoolMode mode : {PoolMode::kSum, PoolMode::kMean, PoolMode::kRecent}) {
    for (bool causal : {false, true}) {
      if (mode == PoolMode::kRecent && !causal) continue;
      for (bool masked : {false, true}) {
        for (auto [length, block] :
             {std::pair<int64_t, int64_t>{1, 1}, {7, 3}, {12, 4}, {40, 16}}) {
          check<double>({length, block, mode, causal, masked}, 1e-12);
          check<float>({length, block, mode, causal, masked}, 2e-5);
        }
      }
    }
  }
}

}  // namespace
}  // namespace sinkhorn::test
