// balance against a plain transcription of its definition, and its gradient by differences.
#include <gtest/gtest.h>

#include "support.h"

namespace sinkhorn::test {
namespace {

struct Case {
  int64_t blocks, iterations, window;
  Causal causal;
  Columns columns;
  bool masked, noisy;
};

constexpr int64_t kBatch = 2, kHeads = 2;
constexpr double kTemperature = 0.7;

struct Inputs {
  std::vector<uint8_t> live;
  std::vector<double> logits, noise;
};

bool allowed(const Case& c, const uint8_t* live, int64_t i, int64_t j) {
  if (c.masked && (!live[i] || !live[j])) return false;
  if (c.causal == Causal::kStrict) return j < i - c.window;
  return c.causal == Causal::kNone || j <= i;
}

// log(sum(exp)) over the entries that `counts`; 0 where there are none.
template <class Counts, class At>
double lse(int64_t n, const Counts& counts, const At& at) {
  double most = -1e300, sum = 0;
  for (int64_t j = 0; j < n; ++j) most = counts(j) ? std::max(most, at(j)) : most;
  for (int64_t j = 0; j < n; ++j) sum += counts(j) ? std::exp(at(j) - most) : 0.0;
  return sum == 0 ? 0.0 : most + std::log(sum);
}

void column_step(const Case& c, const uint8_t* live, std::vector<double>& x) {
  const int64_t n = c.blocks;
  const std::vector<double> old = x;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      if (!allowed(c, live, i, j)) continue;
      const auto at = [&](int64_t r) { return old[static_cast<size_t>(r * n + j)]; };
      double term = 0;
      if (c.columns == Columns::kFull) {
        term = lse(n, [&](int64_t r) { return allowed(c, live, r, j); }, at);
      } else if (c.columns == Columns::kPrefix) {
        term = lse(n, [&](int64_t r) { return r <= i && allowed(c, live, r, j); }, at);
      } else if (c.columns == Columns::kPrior) {
        double sum = 1;
        for (int64_t r = 0; r < i; ++r) sum += allowed(c, live, r, j) ? std::exp(at(r)) : 0.0;
        term = std::log(sum);
      }
      x[static_cast<size_t>(i * n + j)] -= term;
    }
  }
}

std::vector<double> naive(const Case& c, const Inputs& in) {
  const int64_t n = c.blocks;
  std::vector<double> result;
  for (int64_t head = 0; head < kBatch * kHeads; ++head) {
    const uint8_t* live = in.live.data() + head / kHeads * n;
    std::vector<double> x(static_cast<size_t>(n * n));
    for (size_t e = 0; e < x.size(); ++e) {
      const size_t at = static_cast<size_t>(head * n * n) + e;
      x[e] = (in.logits[at] + (c.noisy ? in.noise[at] : 0.0)) / kTemperature;
    }
    for (int64_t k = 0; k <= c.iterations && c.iterations > 0; ++k) {
      if (k > 0) column_step(c, live, x);
      for (int64_t i = 0; i < n; ++i) {
        double* row = x.data() + i * n;
        const double u = lse(
            n, [&](int64_t j) { return allowed(c, live, i, j); },
            [&](int64_t j) { return row[j]; });
        for (int64_t j = 0; j < n; ++j) row[j] -= u;
      }
    }
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        const double value = std::exp(x[static_cast<size_t>(i * n + j)]);
        result.push_back(allowed(c, live, i, j) ? value : 0.0);
      }
    }
  }
  return result;
}

// Forward, and backward where a gradient comes in.
template <class T>
std::vector<T> run(const Case& c, const Inputs& in, const std::vector<T>* incoming, int workers) {
  const int64_t n = c.blocks, numbers = kBatch * kHeads * n * n;
  std::vector<T> logits(in.logits.begin(), in.logits.end());
  std::vector<T> noise(in.noise.begin(), in.noise.end());
  auto terms = poisoned<T>(kBatch * kHeads * balance_terms(c.columns, c.iterations) * n);
  auto result = poisoned<T>(numbers);
  BalanceParams p{};
  p.batch = kBatch;
  p.heads = kHeads;
  p.blocks = n;
  p.iterations = c.iterations;
  p.window = c.window;
  p.temperature = kTemperature;
  p.causal = c.causal;
  p.columns = c.columns;
  p.compute64 = sizeof(T) == 8;
  p.live = c.masked ? in.live.data() : nullptr;
  p.logits = view(logits, kHeads, n, n);
  if (c.noisy) p.noise = view(noise, kHeads, n, n);
  p.terms = terms.data();
  p.result = result.data();
  cpu::kernels().balance_fwd(p, threads(workers));
  if (incoming == nullptr) return result;
  auto grad = poisoned<T>(numbers);
  p.result = grad.data();
  p.grad = view(*incoming, kHeads, n, n);
  cpu::kernels().balance_bwd(p, threads(workers));
  return grad;
}

void check(const Case& c) {
  SCOPED_TRACE(testing::Message() << "N " << c.blocks << " iterations " << c.iterations
                                  << " window " << c.window << " causal "
                                  << static_cast<int>(c.causal) << " columns "
                                  << static_cast<int>(c.columns) << " masked " << c.masked);
  const int64_t numbers = kBatch * kHeads * c.blocks * c.blocks;
  Random random(static_cast<uint64_t>(numbers + c.iterations));
  const Inputs in{random.bits(kBatch * c.blocks, 0.7), random.normal<double>(numbers),
                  random.normal<double>(numbers)};
  const std::vector<double> want = naive(c, in);
  EXPECT_LT(largest_difference(run<double>(c, in, nullptr, 3), want), 1e-12);
  const std::vector<float> single(want.begin(), want.end());
  EXPECT_LT(largest_difference(run<float>(c, in, nullptr, 3), single),
            c.iterations == 0 ? 1e-3 : 1e-5);

  const auto incoming = random.normal<double>(numbers), direction = random.normal<double>(numbers);
  const auto grad = run<double>(c, in, &incoming, 3);
  const double step = 1e-5;
  const Inputs up{in.live, moved(in.logits, direction, step), in.noise};
  const Inputs down{in.live, moved(in.logits, direction, -step), in.noise};
  const double slope = (dot(naive(c, up), incoming) - dot(naive(c, down), incoming)) / (2 * step);
  EXPECT_NEAR(dot(grad, direction), slope, 1e-6 * (1 + std::abs(slope)));
  EXPECT_EQ(grad, run<double>(c, in, &incoming, 1)) << "threads must not change a bit";
}

TEST(Balance, AgreesWithItsDefinition) {
  for (Causal causal : {Causal::kNone, Causal::kStrict, Causal::kInclusive}) {
    for (Columns columns : {Columns::kFull, Columns::kPrefix, Columns::kPrior, Columns::kNone}) {
      const bool looks_up = columns == Columns::kPrefix || columns == Columns::kPrior;
      if (causal == Causal::kNone && looks_up) continue;
      for (int64_t iterations : {0, 1, 4}) {
        for (int64_t window : {0, 1}) {
          if (window > 0 && causal != Causal::kStrict) continue;
          for (bool masked : {false, true}) {
            for (int64_t blocks : {1, 6, 21}) {
              check({blocks, iterations, window, causal, columns, masked, blocks == 6});
            }
          }
        }
      }
    }
  }
}

TEST(Balance, SurvivesExtremes) {
  for (Causal causal : {Causal::kNone, Causal::kStrict, Causal::kInclusive}) {
    for (Columns columns : {Columns::kFull, Columns::kPrefix, Columns::kPrior, Columns::kNone}) {
      if (causal == Causal::kNone && columns != Columns::kFull && columns != Columns::kNone)
        continue;
      const Case c{33, 5, 0, causal, columns, false, false};
      const int64_t numbers = kBatch * kHeads * 33 * 33;
      Random random(3);
      Inputs in{random.bits(kBatch * 33, 1.0), random.normal<double>(numbers), {}};
      for (double& x : in.logits) x = (x > 0 ? 1e6 : -1e6) * kTemperature;
      in.noise.assign(in.logits.size(), 0.0);
      const auto incoming = random.normal<float>(numbers);
      for (float r : run<float>(c, in, nullptr, 2)) ASSERT_TRUE(r >= 0.0f && r <= 1.0001f);
      for (float g : run<float>(c, in, &incoming, 2)) ASSERT_TRUE(std::isfinite(g));
    }
  }
}

}  // namespace
}  // namespace sinkhorn::test
