// Gradients that linear layers leave aside, beside the same without: equal to the bit. On the CPU
// pieces run at once, so that what is tested is who gets which gradient when.
#include "ops/fused/side_work.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "ops/fused/fused.h"
#include "sinkhorn/models/models.h"

namespace sinkhorn::ops {
namespace {

const c10::Stream kStream(c10::Stream::DEFAULT, c10::Device(at::kCPU));

at::Tensor parameter(at::IntArrayRef sizes) { return at::randn(sizes).requires_grad_(true); }

struct Layers {
  at::Tensor table, first, first_bias, second;

  Layers() {
    at::manual_seed(7);
    table = parameter({20, 8});
    first = parameter({12, 8});
    first_bias = parameter({12});
    second = parameter({8, 12});
  }
  std::vector<at::Tensor> all() const { return {table, first, first_bias, second}; }

  // Tokens, both layers twice, and an output that reads the table's rows again.
  at::Tensor loss() const {
    const at::Tensor ids = at::arange(12).remainder(5).view({2, 6});
    const Embedded embedded = embed(table, ids, at::zeros({6, 8}), 1.0);
    at::Tensor x = embedded.tokens.to(at::kBFloat16);
    for (int i = 0; i < 2; ++i) {
      LinearOptions relu;
      relu.relu = true;
      x = linear(linear(x, first, first_bias, relu), second, std::nullopt, {});
    }
    return linear(x, embedded.table, std::nullopt, {}).to(at::kFloat).square().mean();
  }
};

void expect_equal_gradients(const Layers& a, const Layers& b) {
  for (size_t i = 0; i < a.all().size(); ++i) {
    ASSERT_TRUE(a.all()[i].grad().defined() && b.all()[i].grad().defined()) << i;
    EXPECT_TRUE(at::equal(a.all()[i].grad(), b.all()[i].grad())) << i;
  }
}

TEST(SideWork, GivesTheSameGradients) {
  const Layers plain, aside;
  torch::autograd::backward({plain.loss()}, {});
  SideScope scope(kStream);
  torch::autograd::backward({aside.loss()}, {});
  EXPECT_FALSE(aside.first.grad().defined());  // they are left until the streams have met
  EXPECT_FALSE(aside.first_bias.grad().defined());
  EXPECT_FALSE(aside.second.grad().defined());
  scope.join();
  expect_equal_gradients(plain, aside);
}

TEST(SideWork, AddsToGradientsThatAreThere) {
  const Layers plain, aside;
  for (int i = 0; i < 2; ++i) torch::autograd::backward({plain.loss()}, {});
  for (int i = 0; i < 2; ++i) {
    SideScope scope(kStream);
    torch::autograd::backward({aside.loss()}, {});
    scope.join();
  }
  for (size_t i = 0; i < plain.all().size(); ++i) {
    EXPECT_TRUE(at::allclose(plain.all()[i].grad(), aside.all()[i].grad(), 1e-6, 1e-7)) << i;
  }
}

TEST(SideWork, LeavesWeightsThatWereComputedToAutograd) {
  const at::Tensor weight = parameter({4, 8});
  SideScope scope(kStream);
  const at::Tensor x = at::randn({3, 8}).to(at::kBFloat16);
  linear(x, weight * 2, std::nullopt, {}).to(at::kFloat).sum().backward();
  EXPECT_TRUE(weight.grad().defined());
}

TEST(SideWork, LeavesLargeInputsToAutograd) {
  const at::Tensor weight = parameter({1, 1 << 11});
  SideScope scope(kStream);
  const auto loss = [&](int64_t rows) {
    const at::Tensor x = at::ones({rows, 1 << 11}, at::kBFloat16);
    return linear(x, weight, std::nullopt, {}).to(at::kFloat).sum();
  };
  loss(1 << 10).backward();
  EXPECT_FALSE(weight.grad().defined());
  loss((1 << 10) + 1).backward();
  EXPECT_TRUE(weight.grad().defined());
}

TEST(SideWork, IsForgottenWithItsScope) {
  const Layers plain, aside;
  torch::autograd::backward({plain.loss()}, {});
  {
    const SideScope scope(kStream);
    torch::autograd::backward({aside.loss()}, {});  // and something throws before join
  }
  EXPECT_FALSE(aside.first.grad().defined());
  aside.table.mutable_grad() = at::Tensor();
  torch::autograd::backward({aside.loss()}, {});
  expect_equal_gradients(plain, aside);
}

template <class M>
std::shared_ptr<M> small_model() {
  models::ModelConfig config;
  config.vocab = 50;
  config.width = 16;
  config.ff_width = 24;
  config.heads = 2;
  config.max_length = 64;
  config.dropout = config.attention_dropout = config.relu_dropout = 0.0;
  config.encoder = nn::attention_preset("prefix", /*decoder=*/false);
  config.decoder = nn::attention_preset("prefix", /*decoder=*/true);
  config.encoder.block = config.decoder.block = 8;
  at::manual_seed(3);
  return std::make_shared<M>(config);
}

template <class M>
void expect_equal_models() {
  const auto plain = small_model<M>(), aside = small_model<M>();
  const auto backward = [](M& model) {
    at::manual_seed(4);
    nn::Context context;
    context.compute = at::kBFloat16;
    const at::Tensor ids = at::randint(3, 50, {2, 24}, at::kLong);
    model.loss({ids, {}, ids.flip(1), {}}, context).backward();
  };
  backward(*plain);
  SideScope scope(kStream);
  backward(*aside);
  scope.join();
  const auto expected = plain->named_parameters(), found = aside->named_parameters();
  for (const auto& item : expected) {
    EXPECT_TRUE(at::equal(item.value().grad(), found[item.key()].grad())) << item.key();
  }
}

TEST(SideWork, ServesALanguageModel) { expect_equal_models<models::LanguageModel>(); }
TEST(SideWork, ServesTablesThatGoFromHandToHand) { expect_equal_models<models::Seq2Seq>(); }

TEST(SideWork, IsOpenOnlyWithinAScopeThatHasAStream) {
  EXPECT_FALSE(SideScope::current());
  const SideScope outer(kStream);
  EXPECT_TRUE(SideScope::current());
  {
    const SideScope inner(std::nullopt);
    EXPECT_FALSE(SideScope::current());
  }
  EXPECT_TRUE(SideScope::current());
}

}  // namespace
}  // namespace sinkhorn::ops
