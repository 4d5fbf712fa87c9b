// SinkhornAttention: how it puts the operators together, what masks hide, and where chance enters.
#include "sinkhorn/nn/attention.h"

#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <limits>

#include "nn/support.h"
#include "sinkhorn/ops.h"

namespace sinkhorn::nn {
namespace {

using testing::expect_close;
using testing::expect_same_bits;
using testing::fill_parameters;
using testing::parameter;
using testing::ragged_mask;
using testing::randn;

constexpr int64_t kWidth = 12, kHeads = 3, kLength = 21, kBlock = 4;

std::shared_ptr<SinkhornAttention> make(const AttentionConfig& config, bool decoder,
                                        double dropout = 0.0, at::ScalarType type = at::kDouble) {
  auto attention = std::make_shared<SinkhornAttention>(
      config, AttentionPlace{kWidth, kHeads, 2 * kLength, decoder, dropout});
  attention->to(type);
  fill_parameters(*attention, 17);
  return attention;
}

AttentionConfig words(AttentionConfig config) {
  config.block = kBlock;
  config.stride = kBlock;
  config.summary = 2;
  return config;
}

struct Named {
  std::string name;
  bool decoder;
  AttentionConfig config;
};

// Every kind, on each side it may stand.
std::vector<Named> every_kind() {
  std::vector<Named> all;
  for (const char* kind : {"sinkhorn", "mixture", "sortcut", "full", "local", "window", "sparse"}) {
    for (const bool decoder : {false, true}) {
      if (decoder && std::string(kind) == "sortcut") continue;
      all.push_back(
          {std::string(kind) + (decoder ? " decoder" : ""), decoder, words({.kind = kind})});
    }
  }
  all.push_back({"inclusive", true, words({.causal = "inclusive"})});
  all.push_back({"paper", true, words(attention_preset("paper", true))});
  all.push_back({"windowed", true, words(attention_preset("windowed", true))});
  all.push_back({"merged", true, words({.kind = "sparse", .merged = true})});
  return all;
}

at::Tensor heads_of(const at::Tensor& x) {  // [B, L, E] -> [B, H, L, D]
  return x.reshape({x.size(0), x.size(1), kHeads, kWidth / kHeads}).transpose(1, 2);
}

// The module from its weights and the operators: pool, sort network, balance, attention.
at::Tensor composed(const SinkhornAttention& attention, const AttentionConfig& c, bool decoder,
                    const at::Tensor& x, const at::Tensor& mask) {
  const std::string causal = decoder ? c.causal : "none";
  const at::Tensor pooled = pool(x, {c.block, c.pooling, decoder, mask});
  const int64_t blocks = pooled.size(1);
  at::Tensor logits;
  if (c.sort_net == "bilinear") {
    const at::Tensor sources =
        causal == "strict" ? pool(x, {c.block, "mean", /*causal=*/false, mask}) : pooled;
    const auto project = [&](const at::Tensor& y, const std::string& name) {
      return heads_of(at::linear(y, parameter(attention, "sort_net." + name + ".weight")));
    };
    logits =
        at::matmul(project(pooled, "destination"), project(sources, "source").transpose(2, 3)) /
        std::sqrt(static_cast<double>(kWidth / kHeads));
  } else {
    logits = at::linear(pooled, parameter(attention, "sort_net.first.weight"),
                        parameter(attention, "sort_net.first.bias"))
                 .reshape({x.size(0), blocks, kHeads, -1})
                 .slice(3, 0, blocks)
                 .transpose(1, 2);
  }
  BalanceOptions balancing{c.iterations, c.temperature, causal,
                           c.columns != "auto" ? c.columns
                           : decoder           ? "prefix"
                                               : "full"};
  balancing.window = causal == "strict" ? c.window : 0;
  balancing.block_mask = at::constant_pad_nd(mask, {0, blocks * c.block - x.size(1)})
                             .view({-1, blocks, c.block})
                             .any(2);
  const at::Tensor r = balance(logits, balancing);
  const auto qkv = at::linear(x, parameter(attention, "qkv.weight")).chunk(c.tie_kv ? 2 : 3, 2);
  const at::Tensor q = heads_of(qkv[0]), k = heads_of(qkv[1]), v = heads_of(qkv.back());
  at::Tensor y;
  if (c.kind == "sortcut") {
    y = sortcut(q, k, v, r, {c.block, std::min(c.budget, blocks), mask});
  } else {
    y = sinkhorn::attention(q, k, v, r, {c.block, causal, c.combine, c.window, mask});
  }
  if (c.kind == "mixture") {
    at::Tensor seen = mask.unsqueeze(1).unsqueeze(1).expand({-1, 1, x.size(1), -1});
    if (decoder) seen = seen.logical_and(at::ones({x.size(1), x.size(1)}, at::kBool).tril());
    y = y + at::scaled_dot_product_attention(q, k, v, seen);
  }
  return at::linear(y.transpose(1, 2).reshape({x.size(0), x.size(1), kWidth}),
                    parameter(attention, "out.weight"));
}

TEST(SinkhornAttention, PutsTheOperatorsTogether) {
  const std::vector<Named> cases = {
      {"encoder", false, words({})},
      {"encoder, rows only, both sides of a window", false,
       words({.window = 1, .columns = "none"})},
      {"encoder, sums and outputs", false, words({.pooling = "sum", .combine = "outputs"})},
      {"strict", true, words({})},
      {"strict prior behind a window", true, words({.window = 2, .columns = "prior"})},
      {"inclusive", true, words({.causal = "inclusive", .columns = "none"})},
      {"paper", true, words(attention_preset("paper", true))},
      {"other numbers", true, words({.pooling = "recent", .iterations = 2, .temperature = 0.3})},
      {"mixture encoder", false, words({.kind = "mixture"})},
      {"mixture decoder", true, words({.kind = "mixture", .window = 1})},
      {"sortcut", false, words({.kind = "sortcut", .budget = 3})},
      {"sortcut of more blocks than there are", false, words({.kind = "sortcut", .budget = 99})},
      {"bilinear encoder", false, words({.sort_net = "bilinear"})},
      {"windowed: two pools", true, words(attention_preset("windowed", true))},
      {"tied keys and values", true, words({.tie_kv = true})},
  };
  for (const Named& c : cases) {
    const auto attention = make(c.config, c.decoder);
    attention->eval();
    const at::Tensor mask = ragged_mask({kLength, 9}, kLength);
    const at::Tensor real = mask.unsqueeze(2);
    std::vector<at::Tensor> inputs = attention->parameters();
    inputs.push_back(at::where(real, randn({2, kLength, kWidth}, 5), 0).requires_grad_());
    const at::Tensor y = attention->forward(inputs.back(), {mask}) * real;
    const at::Tensor z = composed(*attention, c.config, c.decoder, inputs.back(), mask) * real;
    expect_close(y, z, 1e-12, c.name);
    const at::Tensor weigh = randn(y.sizes(), 23);
    const auto ours = torch::autograd::grad({y}, inputs, {weigh});
    const auto plain = torch::autograd::grad({z}, inputs, {weigh});
    for (size_t i = 0; i < inputs.size(); ++i) {
      expect_close(ours[i], plain[i], 1e-12, c.name + ": gradient " + std::to_string(i));
    }
  }
}

TEST(SinkhornAttention, HandsOutWhatItSorted) {
  const auto attention = make(words({}), false);
  attention->eval();
  std::vector<at::Tensor> sorts;
  Context context;
  context.sorts = &sorts;
  const at::Tensor x = randn({2, kLength, kWidth}, 5);
  attention->forward(x, context);
  ASSERT_EQ(sorts.size(), 1U);
  expect_same_bits(sorts[0], attention->sort(x, std::nullopt), "R");
  expect_close(sorts[0].sum(3), at::ones({2, kHeads, 6}, at::kDouble), 1e-12, "rows of R");
  EXPECT_FALSE(make(words({.kind = "full"}), false)->sorts());
}

struct Result {
  at::Tensor output, gradient;
  std::vector<at::Tensor> weights;
};

Result run(SinkhornAttention& attention, const at::Tensor& input,
           const std::optional<at::Tensor>& mask) {
  attention.zero_grad();
  const at::Tensor x = input.detach().clone().requires_grad_();
  const at::Tensor y = attention.forward(x, {mask});
  const at::Tensor weigh = randn(y.sizes(), 23, y.scalar_type());
  (y * weigh).sum().backward();
  Result result{y.detach(), x.grad(), {}};
  for (const at::Tensor& g : testing::gradients(attention)) result.weights.push_back(g.clone());
  return result;
}

void expect_same_result(const Result& a, const Result& b) {
  expect_same_bits(a.output, b.output, "output");
  expect_same_bits(a.gradient, b.gradient, "gradient of x");
  for (size_t i = 0; i < a.weights.size(); ++i) {
    expect_same_bits(a.weights[i], b.weights[i], "gradient of parameter " + std::to_string(i));
  }
}

TEST(SinkhornAttention, WhatIsMaskedIsNotRead) {
  const at::Tensor mask = ragged_mask({kLength, 9, 0}, kLength);
  for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
    for (const Named& c : every_kind()) {
      SCOPED_TRACE(c.name);
      const auto attention = make(c.config, c.decoder, 0.0, type);
      attention->eval();
      const at::Tensor x = randn({3, kLength, kWidth}, 5, type);
      const at::Tensor poisoned =
          at::where(mask.unsqueeze(2), x, std::numeric_limits<double>::quiet_NaN());
      const Result clean = run(*attention, x, mask), dirty = run(*attention, poisoned, mask);
      expect_same_result(dirty, clean);
      EXPECT_TRUE(at::isfinite(dirty.output).all().item<bool>());
      EXPECT_EQ(at::where(mask.unsqueeze(2), 0, dirty.gradient).count_nonzero().item<int64_t>(), 0);
    }
  }
}

TEST(SinkhornAttention, ARowWithNothingRealGivesZero) {
  const at::Tensor mask = ragged_mask({kLength, 0}, kLength);
  for (const Named& c : every_kind()) {
    SCOPED_TRACE(c.name);
    const auto attention = make(c.config, c.decoder);
    const Result result = run(*attention, randn({2, kLength, kWidth}, 5), mask);
    EXPECT_EQ(result.output[1].count_nonzero().item<int64_t>(), 0);
    EXPECT_EQ(result.gradient[1].count_nonzero().item<int64_t>(), 0);
    EXPECT_TRUE(at::isfinite(result.gradient).all().item<bool>());
    for (const at::Tensor& g : result.weights) EXPECT_TRUE(at::isfinite(g).all().item<bool>());
  }
}

// The first queries of causal summary heads see nothing: 0, and gradients stay finite.
TEST(SinkhornAttention, SummaryHeadsBeforeTheFirstSummary) {
  const auto attention = make(words({.kind = "sparse"}), true);
  {
    const at::NoGradGuard no_grad;  // hand on the last head alone
    parameter(*attention, "out.weight").slice(1, 0, 2 * kWidth / kHeads).zero_();
  }
  const Result result = run(*attention, randn({1, kLength, kWidth}, 5), std::nullopt);
  EXPECT_EQ(result.output[0].slice(0, 0, 2).count_nonzero().item<int64_t>(), 0);
  EXPECT_EQ(result.output[0].slice(0, 2).count_nonzero().item<int64_t>(), (kLength - 2) * kWidth);
  EXPECT_TRUE(at::isfinite(result.gradient).all().item<bool>());
}

TEST(SinkhornAttention, EvaluationIsDeterministicAndDrawsNothing) {
  const at::Tensor x = randn({2, kLength, kWidth}, 5, at::kFloat);
  for (const Named& c : every_kind()) {
    SCOPED_TRACE(c.name);
    const auto attention = make(c.config, c.decoder, 0.5, at::kFloat);
    attention->eval();
    at::manual_seed(1);
    const at::Tensor before = at::detail::getDefaultCPUGenerator().get_state();
    const Result first = run(*attention, x, std::nullopt);
    expect_same_result(run(*attention, x, std::nullopt), first);
    EXPECT_TRUE(at::equal(at::detail::getDefaultCPUGenerator().get_state(), before));
  }
}

TEST(SinkhornAttention, GumbelNoiseComesInTrainingOnly) {
  const at::Tensor x = randn({2, kLength, kWidth}, 5);
  for (const Named& c : every_kind()) {
    SCOPED_TRACE(c.name);
    const auto attention = make(c.config, c.decoder);
    attention->eval();
    const Result still = run(*attention, x, std::nullopt);
    attention->train();
    at::manual_seed(1);
    const Result noisy = run(*attention, x, std::nullopt);
    at::manual_seed(1);
    expect_same_result(run(*attention, x, std::nullopt), noisy);
    EXPECT_EQ(at::equal(noisy.output, still.output), !attention->sorts());
    EXPECT_TRUE(at::isfinite(noisy.gradient).all().item<bool>());

    AttentionConfig quiet = c.config;
    quiet.gumbel = false;
    const auto without = make(quiet, c.decoder);
    expect_same_result(run(*without, x, std::nullopt), still);
  }
}

TEST(SinkhornAttention, DropoutComesInTrainingOnly) {
  const at::Tensor x = randn({2, kLength, kWidth}, 5);
  for (const Named& c : every_kind()) {
    SCOPED_TRACE(c.name);
    AttentionConfig quiet = c.config;
    quiet.gumbel = false;
    const auto attention = make(quiet, c.decoder, 0.5);
    at::manual_seed(1);
    const Result dropped = run(*attention, x, std::nullopt);
    at::manual_seed(1);
    expect_same_result(run(*attention, x, std::nullopt), dropped);
    attention->eval();
    const Result whole = run(*attention, x, std::nullopt);
    EXPECT_FALSE(at::equal(dropped.output, whole.output));
    expect_same_result(run(*make(quiet, c.decoder), x, std::nullopt), whole);
  }
}

TEST(SinkhornAttention, TiedKeysAndValuesShareAProjection) {
  const at::Tensor x = randn({2, kLength, kWidth}, 5);
  for (Named c : every_kind()) {
    SCOPED_TRACE(c.name);
    const auto plain = make(c.config, c.decoder);
    EXPECT_EQ(parameter(*plain, "qkv.weight").size(0), 3 * kWidth);
    c.config.tie_kv = true;
    const auto tied = make(c.config, c.decoder);
    EXPECT_EQ(parameter(*tied, "qkv.weight").size(0), 2 * kWidth);
    {
      const at::NoGradGuard no_grad;
      for (const auto& p : tied->named_parameters()) {
        if (p.key() != "qkv.weight") parameter(*plain, p.key()).copy_(p.value());
      }
      const auto maps = parameter(*tied, "qkv.weight").chunk(2);
      parameter(*plain, "qkv.weight").copy_(at::cat({maps[0], maps[1], maps[1]}));
    }
    tied->eval();
    plain->eval();
    expect_close(tied->forward(x, {}), plain->forward(x, {}), 1e-12, "output");
  }
}

TEST(SinkhornAttention, HalfInputsComputeInHalf) {
  const at::Tensor x = randn({2, kLength, kWidth}, 5, at::kFloat);
  for (const Named& c : every_kind()) {
    SCOPED_TRACE(c.name);
    const auto attention = make(c.config, c.decoder, 0.0, at::kFloat);
    attention->eval();
    const at::Tensor half = attention->forward(x.to(at::kBFloat16), {});
    EXPECT_EQ(half.scalar_type(), at::kBFloat16);
    expect_close(half.to(at::kFloat), attention->forward(x, {}), 0.05, "output");
  }
}

}  // namespace
}  // namespace sinkhorn::nn
