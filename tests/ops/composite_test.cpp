// The operators made of Torch's operations, which serve on CUDA where there is no kernel.
#include "ops/composite/composite.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <reference.h>
#include <torch/csrc/autograd/autograd.h>

#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace {

constexpr int64_t kBatch = 2, kHeads = 2, kLength = 22, kBlock = 4, kBlocks = 6, kWidth = 5;

struct Rule {
  std::string causal, combine;
  int64_t window = 0;
};

const std::vector<Rule> kRules = {{"none", "concat", 1},     {"none", "outputs", 0},
                                  {"strict", "concat", 0},   {"strict", "concat", 1},
                                  {"strict", "outputs", 1},  {"inclusive", "logits", 0},
                                  {"inclusive", "concat", 0}};

std::vector<at::Tensor> leaves() {
  std::vector<at::Tensor> all;
  for (int i = 0; i < 3; ++i) {
    all.push_back(at::randn({kBatch, kHeads, kLength, kWidth}, at::kDouble));
  }
  all.push_back(at::randn({kBatch, kHeads, kBlocks, kBlocks}, at::kDouble).softmax(-1));
  for (at::Tensor& x : all) x.set_requires_grad(true);
  return all;
}

at::Tensor attention(const std::vector<at::Tensor>& x, const Rule& rule,
                     const std::optional<at::Tensor>& mask) {
  return sinkhorn::composite::attention(x[0], x[1], x[2], x[3], kBlock, rule.causal, rule.combine,
                                        rule.window, mask, std::nullopt, 0.0, {});
}

TEST(Composite, AttentionAndItsGradientsAreTheReferences) {
  for (const Rule& rule : kRules) {
    at::manual_seed(1);
    const std::vector<at::Tensor> x = leaves();
    for (const auto& mask :
         {std::optional<at::Tensor>(), std::optional(at::rand({kBatch, kLength}) > 0.3)}) {
      const at::Tensor ours = attention(x, rule, mask);
      const at::Tensor theirs = sinkhorn::reference::attention(
          x[0], x[1], x[2], x[3], kBlock, rule.causal, rule.combine, rule.window, mask);
      ASSERT_TRUE(at::allclose(ours, theirs, 1e-10, 1e-12)) << rule.causal << rule.combine;
      const at::Tensor incoming = at::randn_like(ours);
      const auto found = torch::autograd::grad({ours}, x, {incoming});
      const auto expected = torch::autograd::grad({theirs}, x, {incoming});
      for (size_t i = 0; i < x.size(); ++i) {
        EXPECT_TRUE(at::allclose(found[i], expected[i], 1e-9, 1e-11))
            << rule.causal << " " << rule.combine << ", gradient " << i;
      }
    }
  }
}

// What is not finite in the gradient of one block reaches what the block reads, and neither the
// tokens behind it nor the other rows of the sort.
TEST(Composite, ABrokenGradientStaysBeforeItsBlock) {
  constexpr int64_t kBroken = 3, kEnd = (kBroken + 1) * kBlock;
  for (const Rule& rule : kRules) {
    if (rule.causal == "none") continue;
    at::manual_seed(1);
    const std::vector<at::Tensor> x = leaves();
    const at::Tensor out = attention(x, rule, std::nullopt);
    const at::Tensor incoming = at::randn_like(out);
    const auto clean = torch::autograd::grad({out}, x, {incoming}, /*retain_graph=*/true);
    for (const double value :
         {std::numeric_limits<double>::quiet_NaN(), -std::numeric_limits<double>::infinity()}) {
      const at::Tensor broken = incoming.clone();
      broken.narrow(2, kBroken * kBlock, kBlock).fill_(value);
      const auto found = torch::autograd::grad({out}, x, {broken}, /*retain_graph=*/true);
      for (size_t i = 0; i < 3; ++i) {
        EXPECT_TRUE(found[i]
                        .narrow(2, kEnd, kLength - kEnd)
                        .equal(clean[i].narrow(2, kEnd, kLength - kEnd)))
            << rule.causal << " " << rule.combine << ", gradient " << i;
      }
      for (int64_t row = 0; row < kBlocks; ++row) {
        if (row == kBroken) continue;
        EXPECT_TRUE(found[3].select(2, row).equal(clean[3].select(2, row))) << "row " << row;
      }
      const int64_t sources = rule.causal == "strict" ? kBroken - rule.window : kBroken + 1;
      EXPECT_TRUE(
          found[2].narrow(2, 0, sources * kBlock).isfinite().logical_not().all().item<bool>())
          << rule.causal << " " << rule.combine;
    }
  }
}

}  // namespace
