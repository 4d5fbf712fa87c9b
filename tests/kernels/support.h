// Torch-free helpers for the kernels' tests: threads, random numbers, poisoned buffers.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "kernels/common/executor.h"
#include "kernels/common/params.h"
#include "kernels/cpu/dispatch.h"

namespace sinkhorn::test {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Real threads, so that ThreadSanitizer sees every access.
inline Executor threads(int count) {
  return {count, [](int workers, void (*body)(void*, int), void* context) {
            std::vector<std::thread> pool;
            for (int w = 0; w < workers; ++w) pool.emplace_back(body, context, w);
            for (std::thread& t : pool) t.join();
          }};
}

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  template <class T>
  std::vector<T> normal(int64_t count) {
    std::normal_distribution<double> draw;
    std::vector<T> x(static_cast<size_t>(count));
    for (T& v : x) v = static_cast<T>(draw(engine_));
    return x;
  }
  template <class T>
  std::vector<T> uniform(int64_t count) {
    std::uniform_real_distribution<double> draw(0.05, 1.0);
    std::vector<T> x(static_cast<size_t>(count));
    for (T& v : x) v = static_cast<T>(draw(engine_));
    return x;
  }
  std::vector<uint8_t> bits(int64_t count, double share) {
    std::bernoulli_distribution draw(share);
    std::vector<uint8_t> x(static_cast<size_t>(count));
    for (uint8_t& v : x) v = draw(engine_);
    return x;
  }

 private:
  std::mt19937_64 engine_;
};

// A buffer full of NaN: what a kernel fails to write shows.
template <class T>
std::vector<T> poisoned(int64_t count) {
  return std::vector<T>(static_cast<size_t>(count), static_cast<T>(kNan));
}

template <class T>
View view(const std::vector<T>& x, int64_t heads, int64_t rows, int64_t cols) {
  View v;
  v.data = const_cast<T*>(x.data());
  v.type = sizeof(T) == 8 ? Type::kFloat64 : Type::kFloat32;
  const int64_t strides[4] = {heads * rows * cols, rows * cols, cols, 1};
  for (int d = 0; d < 4; ++d) v.stride[d] = strides[d];
  return v;
}

template <class T>
double dot(const std::vector<T>& a, const std::vector<T>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i)
    sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

template <class T>
std::vector<T> moved(const std::vector<T>& x, const std::vector<T>& direction, double step) {
  std::vector<T> y(x);
  for (size_t i = 0; i < x.size(); ++i) y[i] += static_cast<T>(step) * direction[i];
  return y;
}

template <class T>
double largest_difference(const std::vector<T>& a, const std::vector<T>& b) {
  double most = a.size() == b.size() ? 0.0 : kNan;
  for (size_t i = 0; i < a.size() && i < b.size(); ++i) {
    const double d = std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    if (!(d <= most)) most = d;
    if (d != d) return kNan;
  }
  return most;
}

}  // namespace sinkhorn::test
