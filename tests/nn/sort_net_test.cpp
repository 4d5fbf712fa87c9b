// The sort networks against their equations, entry by entry, from the weights they hold.
#include <cmath>
#include <optional>

#include "nn/support.h"
#include "sinkhorn/nn/attention.h"
#include "sinkhorn/ops.h"

namespace sinkhorn::nn {
namespace {

using testing::expect_close;
using testing::fill_parameters;
using testing::parameter;
using testing::ragged_mask;
using testing::randn;
using testing::refusal;

constexpr int64_t kWidth = 6, kHeads = 3, kBlock = 4, kMaxBlocks = 5;

struct Case {
  std::string sort_net, pooling, causal;
  bool decoder;
  bool masked;
};

AttentionConfig config_of(const Case& c) {
  AttentionConfig config;
  config.block = kBlock;
  config.max_blocks = kMaxBlocks;
  config.sort_net = c.sort_net;
  config.pooling = c.pooling;
  config.causal = c.causal;
  return config;
}

// sum over i of weight[row][i] * x[i], plus the bias.
double dot(const at::Tensor& weight, const at::Tensor& bias, int64_t row, const at::Tensor& x) {
  double sum = bias.defined() ? bias[row].item<double>() : 0.0;
  for (int64_t i = 0; i < x.size(0); ++i) sum += (weight[row][i] * x[i]).item<double>();
  return sum;
}

// One logit of the linear and mlp networks; d [E] is the pooled destination.
double by_column(const SortNet& net, const std::string& word, const at::Tensor& d, int64_t head,
                 int64_t source) {
  const int64_t column = head * kMaxBlocks + source;
  at::Tensor inner = d;
  std::string last = "first";
  if (word.starts_with("mlp")) {
    inner = at::zeros({kWidth}, at::kDouble);
    for (int64_t i = 0; i < kWidth; ++i) {
      const double y = dot(parameter(net, "first.weight"), parameter(net, "first.bias"), i, d);
      inner[i] = std::max(0.0, y);
    }
    last = "second";
  }
  const double y =
      dot(parameter(net, last + ".weight"), parameter(net, last + ".bias"), column, inner);
  return word.ends_with("_relu") ? std::max(0.0, y) : y;
}

// (A_h d) . (C_h s) / sqrt(D).
double by_product(const SortNet& net, const at::Tensor& d, const at::Tensor& s, int64_t head) {
  const int64_t head_width = kWidth / kHeads;
  double sum = 0;
  for (int64_t i = head * head_width; i < (head + 1) * head_width; ++i) {
    sum += dot(parameter(net, "destination.weight"), {}, i, d) *
           dot(parameter(net, "source.weight"), {}, i, s);
  }
  return sum / std::sqrt(static_cast<double>(head_width));
}

void check(const Case& c) {
  SCOPED_TRACE(c.sort_net + " " + c.pooling + " " + c.causal + (c.decoder ? " decoder" : "") +
               (c.masked ? " masked" : ""));
  constexpr int64_t kLength = 14, kBlocks = 4;
  SortNet net(config_of(c), {kWidth, kHeads, 1000, c.decoder, 0.0});
  net.to(at::kDouble);
  fill_parameters(net, 7);
  const at::NoGradGuard no_grad;
  const at::Tensor x = randn({2, kLength, kWidth}, 3);
  std::optional<at::Tensor> mask;
  if (c.masked) mask = ragged_mask({14, 9}, kLength);
  const at::Tensor d = pool(x, {kBlock, c.pooling, c.decoder, mask});
  at::Tensor s = d;
  if (c.decoder && c.causal == "strict") {
    s = pool(x, {kBlock, c.pooling == "sum" ? "sum" : "mean", false, mask});
  }
  at::Tensor expected = at::zeros({2, kHeads, kBlocks, kBlocks}, at::kDouble);
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t h = 0; h < kHeads; ++h) {
      for (int64_t i = 0; i < kBlocks; ++i) {
        for (int64_t j = 0; j < kBlocks; ++j) {
          expected[b][h][i][j] = c.sort_net == "bilinear"
                                     ? by_product(net, d[b][i], s[b][j], h)
                                     : by_column(net, c.sort_net, d[b][i], h, j);
        }
      }
    }
  }
  expect_close(net.forward(x, mask), expected, 1e-12, "logits");
}

TEST(SortNet, EncoderLogitsByHand) {
  for (const char* net : {"linear", "linear_relu", "mlp", "mlp_relu", "bilinear"}) {
    check({net, "mean", "strict", false, false});
    check({net, "sum", "strict", false, true});
  }
}

TEST(SortNet, DecoderLogitsByHand) {
  for (const char* net : {"linear", "linear_relu", "mlp", "mlp_relu", "bilinear"}) {
    check({net, "mean", "strict", true, true});
    check({net, "recent", "strict", true, false});
    check({net, "sum", "inclusive", true, false});
  }
}

TEST(SortNet, BilinearSourcesFollowTheRule) {
  for (const char* pooling : {"mean", "sum", "recent"}) {
    check({"bilinear", pooling, "strict", true, true});
    check({"bilinear", pooling, "inclusive", true, true});
  }
}

TEST(SortNet, NoiseIsStandardGumbel) {
  const at::Tensor x = at::zeros({100, kMaxBlocks * kBlock, 64});
  for (const char* word : {"linear", "mlp", "bilinear"}) {  // without input: zeros and the noise
    SortNet net(config_of({word, "mean", "strict", false, false}), {64, 64, 20, false});
    at::manual_seed(7);
    const at::Tensor noise = net.forward(x, std::nullopt, /*noisy=*/true);
    ASSERT_EQ(noise.numel(), 160'000) << word;
    EXPECT_NEAR(noise.mean().item<double>(), 0.5772, 0.015) << word;  // Euler's constant
    EXPECT_NEAR(noise.var().item<double>(), 1.6449, 0.04) << word;    // pi^2 / 6
    const double below = (noise <= 0).to(at::kFloat).mean().item<double>();
    EXPECT_NEAR(below, std::exp(-1.0), 0.006) << word;
    EXPECT_TRUE(at::isfinite(noise).all().item<bool>()) << word;
  }
}

TEST(SortNet, LogitsAreFloat32WhateverTheInput) {
  for (const char* net : {"linear", "bilinear"}) {
    SortNet sort_net(config_of({net, "mean", "strict", false, false}), {kWidth, kHeads, 20, false});
    const at::Tensor x = randn({1, 10, kWidth}, 5, at::kBFloat16);
    EXPECT_EQ(sort_net.forward(x, std::nullopt).scalar_type(), at::kFloat) << net;
  }
}

TEST(SortNet, ColumnsComeFromTheLongestLength) {
  AttentionConfig config;
  config.block = kBlock;
  const SortNet net(config, {kWidth, kHeads, 18, false, 0.0});
  EXPECT_EQ(parameter(net, "first.weight").size(0), kHeads * 5);
}

TEST(SortNet, ALongerInputNamesMaxBlocks) {
  for (const char* word : {"linear", "linear_relu", "mlp", "mlp_relu"}) {
    SortNet net(config_of({word, "mean", "strict", true, false}), {kWidth, kHeads, 20, true, 0.0});
    net.to(at::kDouble);
    net.forward(randn({1, kMaxBlocks * kBlock, kWidth}, 1), std::nullopt);
    const at::Tensor longer = randn({1, kMaxBlocks * kBlock + 1, kWidth}, 1);
    EXPECT_EQ(refusal([&] { net.forward(longer, std::nullopt); }),
              "attention: 21 tokens make 6 blocks, and the sort network '" + std::string(word) +
                  "' has columns for 5; set max_blocks (or the model's max_length) higher, or "
                  "sort_net bilinear");
  }
}

TEST(SortNet, BilinearHasNoLimit) {
  SortNet net(config_of({"bilinear", "mean", "strict", true, false}), {kWidth, kHeads, 20, true});
  net.to(at::kDouble);
  EXPECT_EQ(net.forward(randn({1, 101, kWidth}, 1), std::nullopt).size(3), 26);
}

}  // namespace
}  // namespace sinkhorn::nn
