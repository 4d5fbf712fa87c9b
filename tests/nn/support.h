// What the tests of modules and models share: numbers to feed, masks, and comparisons.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <initializer_list>
#include <string>
#include <vector>

#include "sinkhorn/error.h"

namespace sinkhorn::testing {

// Standard normal draws that leave the default generator alone.
inline at::Tensor randn(at::IntArrayRef sizes, uint64_t seed, at::ScalarType type = at::kDouble) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed), at::TensorOptions(at::kDouble))
      .to(type);
}

// Parameters with nothing special about them: no zero bias, no unit weight.
inline void fill_parameters(torch::nn::Module& module, uint64_t seed, double deviation = 0.3) {
  const at::NoGradGuard no_grad;
  for (at::Tensor& parameter : module.parameters()) {
    parameter.copy_(randn(parameter.sizes(), ++seed) * deviation);
  }
}

inline at::Tensor parameter(const torch::nn::Module& module, const std::string& name) {
  return module.named_parameters()[name];
}

// [B, L] bool, the first `lengths[r]` tokens of row r real.
inline at::Tensor ragged_mask(std::vector<int64_t> lengths, int64_t length) {
  return at::arange(length).unsqueeze(0) < at::tensor(lengths).unsqueeze(1);
}

inline void expect_same_bits(const at::Tensor& actual, const at::Tensor& expected,
                             const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  EXPECT_TRUE(at::equal(actual, expected)) << what;
}

inline void expect_close(const at::Tensor& actual, const at::Tensor& expected, double tolerance,
                         const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  ASSERT_EQ(actual.scalar_type(), expected.scalar_type()) << what;
  const double error = (actual - expected).abs().max().item<double>();
  EXPECT_LE(error, tolerance * (1 + expected.abs().max().item<double>())) << what;
}

inline std::vector<at::Tensor> gradients(const torch::nn::Module& module) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& p : module.parameters()) all.push_back(p.grad());
  return all;
}

// The message of the UsageError that f throws; empty if it throws none.
template <class F>
std::string refusal(const F& f) {
  try {
    f();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

}  // namespace sinkhorn::testing
