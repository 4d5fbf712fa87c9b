// Tokens and the table that they come from: gradients are those of the plain composition, whoever
// else reads the table, and are added in place only where nobody else sees it.
#include <torch/csrc/autograd/autograd.h>

#include "nn/support.h"
#include "ops/fused/fused.h"

namespace sinkhorn::nn {
namespace {

using testing::expect_close;
using testing::expect_same_bits;
using testing::randn;

constexpr int64_t kVocab = 7, kWidth = 8, kLength = 5;
constexpr double kScale = 2.75;

using Use = std::function<at::Tensor(const at::Tensor& tokens, const at::Tensor& table)>;

at::Tensor table_of(at::ScalarType type) {
  return randn({kVocab, kWidth}, 1, type).requires_grad_();
}

at::Tensor positions_of(const at::Tensor& table) {
  return randn({kLength, kWidth}, 2, table.scalar_type());
}

at::Tensor some_ids() {
  return at::tensor({3, 0, 6, 3, 3, 1, 3, 0, 5, 6}, at::kLong).view({2, kLength});
}

at::Tensor ours(const at::Tensor& table, const Use& use) {
  const ops::Embedded e = ops::embed(table, some_ids(), positions_of(table), kScale);
  return use(e.tokens, e.table);
}

at::Tensor plain(const at::Tensor& table, const Use& use) {
  return use(at::add(positions_of(table), at::embedding(table, some_ids()), kScale), table);
}

at::Tensor gradient(const at::Tensor& loss, const at::Tensor& of) {
  return torch::autograd::grad({loss}, {of})[0];
}

at::Tensor tied(const at::Tensor& tokens, const at::Tensor& table) {
  return at::log_softmax(at::matmul(tokens.tanh(), table.t()), -1).square().sum();
}

TEST(Embed, GradientsAreThoseOfThePlainComposition) {
  const std::vector<std::pair<std::string, Use>> uses = {
      {"tied", tied},
      {"untied", [](const at::Tensor& t, const at::Tensor&) { return t.tanh().sum(); }},
      {"table alone", [](const at::Tensor&, const at::Tensor& w) { return w.tanh().sum(); }},
      {"an expanded gradient of the table",
       [](const at::Tensor& t, const at::Tensor& w) { return t.tanh().sum() + w.sum(); }},
      {"a transposed one",
       [](const at::Tensor& t, const at::Tensor& w) {
         return t.tanh().sum() + (w.t() * randn({kWidth, kVocab}, 4, w.scalar_type())).sum();
       }},
      {"the table twice",
       [](const at::Tensor& t, const at::Tensor& w) { return tied(t, w) + w.square().sum(); }},
  };
  for (const auto& [name, use] : uses) {
    for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
      const at::Tensor table = table_of(type);
      const at::Tensor found = ours(table, use), expected = plain(table, use);
      expect_same_bits(found, expected, name);
      const double near = type == at::kDouble ? 1e-12 : 1e-4;
      expect_close(gradient(found, table), gradient(expected, table), near, name);
    }
  }
}

TEST(Embed, OneTableServesTwoInputs) {
  const at::Tensor table = table_of(at::kDouble), places = positions_of(table);
  const at::Tensor first = some_ids(), second = some_ids().flip({1});
  const ops::Embedded a = ops::embed(table, first, places, kScale);
  const ops::Embedded b = ops::embed(a.table, second, places, kScale);
  const at::Tensor found = tied(a.tokens * b.tokens, b.table);
  const at::Tensor tokens = at::add(places, at::embedding(table, first), kScale) *
                            at::add(places, at::embedding(table, second), kScale);
  const at::Tensor expected = tied(tokens, table);
  expect_same_bits(found, expected, "forward");
  expect_close(gradient(found, table), gradient(expected, table), 1e-12, "gradient");
}

TEST(Embed, AddsInPlaceUnlessSomebodyHoldsTheGradient) {
  using Product = std::function<at::Tensor(const at::Tensor&)>;
  const at::Tensor x = randn({3, kWidth}, 3, at::kFloat);
  const std::vector<std::pair<bool, Product>> cases = {
      {false, [&](const at::Tensor& w) { return w * randn({kVocab, kWidth}, 3, at::kFloat); }},
      {true, [&](const at::Tensor& w) { return w * randn({kVocab, kWidth}, 3, at::kFloat); }},
      // As in a model that computes in bf16.
      {false,
       [&](const at::Tensor& w) {
         return ops::linear(x.to(at::kBFloat16), w, std::nullopt, {}).square();
       }},
  };
  for (const auto& [held, product] : cases) {
    const at::Tensor table = table_of(at::kFloat);
    const ops::Embedded e = ops::embed(table, some_ids(), positions_of(table), kScale);
    const void* arrived = nullptr;
    at::Tensor kept, before;
    const bool hold = held;
    e.table.register_hook([&](const at::Tensor& grad) {
      arrived = grad.const_data_ptr();
      before = grad.clone();
      if (hold) kept = grad;
    });
    (product(e.table).sum() + e.tokens.tanh().sum()).backward();
    ASSERT_NE(arrived, nullptr);
    EXPECT_EQ(table.grad().const_data_ptr() == arrived, !held);
    EXPECT_FALSE(at::equal(table.grad(), before));
    if (held) expect_same_bits(kept, before, "the gradient that was kept");
  }
}

TEST(Embed, LeavesAGradientAloneThatAnotherParameterGets) {
  const at::Tensor table = table_of(at::kFloat), other = table_of(at::kFloat);
  const ops::Embedded e = ops::embed(table, some_ids(), positions_of(table), kScale);
  const at::Tensor weights = randn({kVocab, kWidth}, 3, at::kFloat);
  // A sum hands one tensor on to both.
  (((e.table + other) * weights).sum() + e.tokens.tanh().sum()).backward();
  expect_same_bits(other.grad(), weights, "other");
  EXPECT_FALSE(at::equal(table.grad(), weights));
}

TEST(Embed, GradientsOfSeveralBatchesAddUp) {
  const at::Tensor table = table_of(at::kDouble);
  ours(table, tied).backward();
  const at::Tensor once = table.grad().clone();
  ours(table, tied).backward();
  expect_close(table.grad(), 2 * once, 1e-12, "twice");
}

TEST(Embed, BackwardOfAKeptGraphIsTheSameAgain) {
  const at::Tensor table = table_of(at::kDouble);
  const at::Tensor loss = ours(table, tied);
  const auto again = [&] { return torch::autograd::grad({loss}, {table}, {}, true)[0]; };
  expect_same_bits(again(), again(), "gradient");
}

}  // namespace
}  // namespace sinkhorn::nn
