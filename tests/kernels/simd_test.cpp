// The vector functions, and the choice of a form.
#include <gtest/gtest.h>

#include <cstdlib>

#include "kernels/cpu/dropout.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/tiles.h"
#include "support.h"

namespace sinkhorn::test {
namespace {

namespace k = cpu::SINKHORN_ISA;

TEST(Simd, ExpIsWithinTwoUlp) {
  for (double x = -86.0; x < 88.0; x += 0.00371) {
    const float at = static_cast<float>(x);
    const double want = std::exp(static_cast<double>(at));
    EXPECT_NEAR(k::vexp(k::splat(at))[0] / want, 1.0, 2.4e-7) << at;
  }
}

TEST(Simd, ExpAtTheEnds) {
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(k::vexp(k::splat(-inf))[0], 0.0f);
  EXPECT_EQ(k::vexp(k::splat(-1000.0f))[0], 0.0f);
  EXPECT_EQ(k::vexp(k::splat(0.0f))[0], 1.0f);
  EXPECT_EQ(k::vexp(k::splat(inf))[0], inf);
  EXPECT_EQ(k::vexp(k::splat(90.0f))[0], inf);
  EXPECT_GT(k::vexp(k::splat(-100.0f))[0], 0.0f);
  EXPECT_TRUE(std::isnan(k::vexp(k::splat(std::nanf("")))[0]));
}

TEST(Simd, Log1pIsWithinTwoUlp) {
  EXPECT_EQ(k::vlog1p(k::splat(0.0f))[0], 0.0f);
  for (double y = 1e-7; y < 1e6; y *= 1.0037) {
    const float at = static_cast<float>(y);
    EXPECT_NEAR(k::vlog1p(k::splat(at))[0] / std::log1p(static_cast<double>(at)), 1.0, 2.4e-7);
  }
}

TEST(Simd, HalfTypesRoundTripAndRoundToEven) {
  for (uint32_t h = 0; h < 65536; ++h) {
    const uint16_t bits = static_cast<uint16_t>(h);
    const float half = k::from_float16(bits), brain = k::from_bfloat16(bits);
    if (half == half) {
      EXPECT_EQ(k::to_float16(half), bits);
    }
    if (brain == brain) {
      EXPECT_EQ(k::to_bfloat16(brain), bits);
    }
  }
  EXPECT_EQ(k::to_float16(1.0f + 0x1p-11f), k::to_float16(1.0f));          // tie to even
  EXPECT_EQ(k::to_float16(1.0f + 3 * 0x1p-11f), k::to_float16(1.0f) + 2);  // tie to even
  EXPECT_EQ(k::to_float16(65520.0f), 0x7c00);                              // overflows to inf
  EXPECT_EQ(k::to_bfloat16(1.0f + 0x1p-8f), k::to_bfloat16(1.0f));
  EXPECT_TRUE(std::isnan(k::from_bfloat16(k::to_bfloat16(std::nanf("")))));
  EXPECT_TRUE(std::isnan(k::from_float16(k::to_float16(std::nanf("")))));
}

TEST(Gemm, AgreesWithLoopsForEveryShape) {
  Random random(1);
  for (int64_t m = 1; m <= 19; ++m) {
    for (int64_t n : {1, 3, 15, 16, 17, 31, 33, 64, 70}) {
      const int64_t depth = 1 + (m * n) % 37, ldb = k::round_up(n, 64);
      const auto a = random.normal<float>(m * depth);
      const auto b = random.normal<float>(depth * ldb);
      std::vector<float> c(static_cast<size_t>(m * n), 1.0f);
      k::gemm<float>(m, n, depth, {a.data(), 1, m, b.data(), ldb, c.data(), n, true});
      for (int64_t r = 0; r < m; ++r) {
        for (int64_t col = 0; col < n; ++col) {
          double want = 1.0;
          for (int64_t d = 0; d < depth; ++d) {
            want +=
                double{a[static_cast<size_t>(d * m + r)]} * b[static_cast<size_t>(d * ldb + col)];
          }
          ASSERT_NEAR(c[static_cast<size_t>(r * n + col)], want, 1e-4);
        }
      }
    }
  }
}

TEST(Dropout, DependsOnTheNumberAloneAndDropsItsShare) {
  const k::Dropout<float> dropout({0.25, 7, 0});
  std::vector<float> whole(64 * 1024), part(64);
  dropout.factors(0, static_cast<int64_t>(whole.size()), whole.data());
  double dropped = 0;
  for (float z : whole) {
    EXPECT_TRUE(z == 0.0f || z == 1.0f / 0.75f);
    dropped += z == 0.0f;
  }
  EXPECT_NEAR(dropped / static_cast<double>(whole.size()), 0.25, 0.01);
  dropout.factors(4096, 64, part.data());
  EXPECT_EQ(part, std::vector<float>(whole.begin() + 4096, whole.begin() + 4160));
}

TEST(Dispatch, RunsTheFormThatIsAskedFor) {
  const char* wanted = std::getenv("SINKHORN_CPU");
  if (wanted != nullptr && *wanted != '\0') {
    EXPECT_STREQ(cpu::form(), wanted);
  } else {
    EXPECT_NE(std::string(cpu::form()), "");
  }
}

}  // namespace
}  // namespace sinkhorn::test
