// The plain parts: positions, initial weights, the pre-norm layer, and recomputation.
#include "sinkhorn/nn/layers.h"

#include <cmath>

#include "nn/support.h"
#include "sinkhorn/nn/transformer_layer.h"

namespace sinkhorn::nn {
namespace {

using testing::expect_close;
using testing::expect_same_bits;
using testing::fill_parameters;
using testing::parameter;
using testing::ragged_mask;
using testing::randn;

TEST(Embedding, PositionsAreSinesThenCosines) {
  constexpr int64_t kLength = 50;
  for (const int64_t width : {2, 8, 9}) {
    Embedding embedding(3, width);
    embedding.to(at::kDouble);
    const at::NoGradGuard no_grad;
    embedding.weight.zero_();
    const at::Tensor found = embedding.forward(at::zeros({1, kLength}, at::kLong))[0];
    const int64_t half = width / 2;
    at::Tensor expected = at::zeros({kLength, width}, at::kDouble);
    for (int64_t t = 0; t < kLength; ++t) {
      for (int64_t i = 0; i < half; ++i) {
        // From 2 pi at i = 0 to 10,000 * 2 pi at the last.
        const double share = half > 1 ? static_cast<double>(i) / static_cast<double>(half - 1) : 0;
        const double angle = static_cast<double>(t) / std::pow(10000.0, share);
        expected[t][i] = std::sin(angle);
        expected[t][half + i] = std::cos(angle);
      }
    }
    expect_close(found, expected, 1e-12, "width " + std::to_string(width));
  }
}

TEST(Embedding, ScalesTokensAndKnowsAnyLength) {
  Embedding embedding(7, 16);
  const at::NoGradGuard no_grad;
  const at::Tensor ids = at::tensor({3, 0, 6, 1, 1, 5}, at::kLong).view({2, 3});
  const at::Tensor plain = at::embedding(embedding.weight, ids) * 4.0;
  const at::Tensor placed = embedding.forward(ids);
  embedding.forward(at::zeros({1, 100}, at::kLong));  // a longer table serves the same
  expect_same_bits(embedding.forward(ids), placed, "after a longer input");
  expect_close((placed - plain)[0], (placed - plain)[1], 1e-6, "positions are every row's");
}

TEST(Layers, WeightsStartAsDocumented) {
  at::manual_seed(3);
  const Linear linear(300, 3 * 200, true, 3);
  const double limit = std::sqrt(6.0 / (300 + 200));
  EXPECT_LE(linear.weight.abs().max().item<double>(), limit);
  EXPECT_NEAR(linear.weight.std().item<double>(), limit / std::sqrt(3.0), 0.01 * limit);
  EXPECT_EQ(linear.bias.count_nonzero().item<int64_t>(), 0);
  const Embedding embedding(2000, 64);
  EXPECT_NEAR(embedding.weight.std().item<double>(), 0.125, 0.002);
  EXPECT_NEAR(embedding.weight.mean().item<double>(), 0.0, 0.002);
}

TEST(Layers, FeedForwardByHand) {
  FeedForward ff(4, 6, 0.0);
  ff.to(at::kDouble);
  fill_parameters(ff, 3);
  const at::Tensor x = randn({2, 3, 4}, 1);
  const at::Tensor inner =
      (at::matmul(x, parameter(ff, "in.weight").t()) + parameter(ff, "in.bias")).clamp_min(0);
  expect_close(ff.forward(x),
               at::matmul(inner, parameter(ff, "out.weight").t()) + parameter(ff, "out.bias"),
               1e-12, "W2 relu(W1 x)");
}

LayerConfig layer_config(double dropout, bool cross) {
  LayerConfig c;
  c.attention.block = 4;
  c.place = {12, 3, 24, /*decoder=*/true, dropout};
  c.ff_width = 16;
  c.dropout = dropout;
  c.relu_dropout = dropout;
  c.cross = cross;
  return c;
}

TEST(Layers, DropoutInEachOfItsThreePlaces) {
  const at::Tensor x = randn({2, 10, 12}, 1, at::kFloat);
  for (const int place : {0, 1, 2}) {
    LayerConfig c = layer_config(0.0, false);
    c.attention.gumbel = false;
    if (place == 0) c.dropout = 0.5;
    if (place == 1) c.relu_dropout = 0.5;
    if (place == 2) c.place.dropout = 0.5;
    TransformerLayer layer(c);
    at::manual_seed(1);
    const at::Tensor first = layer.forward(x, {}), second = layer.forward(x, {});
    EXPECT_FALSE(at::equal(first, second)) << place;
    layer.eval();
    expect_same_bits(layer.forward(x, {}), layer.forward(x, {}), std::to_string(place));
  }
}

TEST(Layers, ComputeTypeLeavesParametersAlone) {
  Stack stack(layer_config(0.0, false), 2, false);
  stack.eval();
  const at::Tensor x = randn({2, 10, 12}, 1, at::kFloat);
  Context half;
  half.compute = at::kBFloat16;
  const at::Tensor y = stack.forward(x, half);
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  expect_close(y.to(at::kFloat), stack.forward(x, {}), 0.1, "bf16");
  y.sum().backward();
  for (const at::Tensor& p : stack.parameters()) {
    EXPECT_EQ(p.scalar_type(), at::kFloat);
    EXPECT_EQ(p.grad().scalar_type(), at::kFloat);
  }
}

TEST(Layers, AStreamThatGoesOnIsSettledByTheNextNorm) {
  TransformerLayer layer(layer_config(0.3, false));
  LayerNorm norm(12);
  fill_parameters(norm, 2);
  const at::Tensor x = randn({2, 10, 12}, 1, at::kFloat);
  at::manual_seed(4);
  const at::Tensor whole = layer.forward(x, {});
  at::manual_seed(4);
  Residual stream = layer.advance({x}, {});
  EXPECT_TRUE(stream.part.defined());
  const at::Tensor normed = norm.forward(stream, {});
  EXPECT_FALSE(stream.part.defined());
  expect_same_bits(stream.sum, whole, "sum");
  expect_same_bits(normed, norm.forward(whole, {}), "norm");
}

TEST(CopyScope, ChangesNoBitAndServesNothingStale) {
  Stack stack(layer_config(0.0, false), 2, false);
  stack.eval();
  const at::Tensor x = randn({2, 10, 12}, 1, at::kFloat);
  Context half;
  half.compute = at::kBFloat16;
  const auto pass = [&] {
    stack.zero_grad();
    const at::Tensor y = stack.forward(x, half);
    (y.to(at::kFloat) * randn(y.sizes(), 9, at::kFloat)).sum().backward();
    std::vector<at::Tensor> found{y.detach()};
    for (const at::Tensor& g : testing::gradients(stack)) found.push_back(g.clone());
    return found;
  };
  const auto scoped_pass = [&] {
    const CopyScope scope(stack);
    return pass();
  };
  const auto expect_same = [](const auto& a, const auto& b) {
    for (size_t i = 0; i < a.size(); ++i) expect_same_bits(a[i], b[i], std::to_string(i));
  };
  const auto plain = pass();
  expect_same(scoped_pass(), plain);
  fill_parameters(stack, 3);
  const auto changed = pass();
  EXPECT_FALSE(at::equal(changed[0], plain[0]));
  expect_same(scoped_pass(), changed);
}

struct Pass {
  at::Tensor loss, x, memory;
  std::vector<at::Tensor> weights;
};

Pass pass(bool checkpoint, double dropout, bool cross, bool masked) {
  at::manual_seed(5);
  Stack stack(layer_config(dropout, cross), 3, checkpoint);
  const at::Tensor x = randn({2, 19, 12}, 1, at::kFloat).requires_grad_();
  Memory memory{randn({2, 7, 12}, 2, at::kFloat).requires_grad_(), ragged_mask({7, 4}, 7)};
  Context context;
  if (masked) context.mask = ragged_mask({19, 11}, 19);
  const at::Tensor y = stack.forward(x, context, cross ? &memory : nullptr);
  const at::Tensor loss = (y * randn(y.sizes(), 9, at::kFloat)).sum();
  loss.backward();
  return {loss.detach(), x.grad(), memory.states.grad(), testing::gradients(stack)};
}

TEST(Checkpoint, EqualToTheBit) {
  for (const double dropout : {0.0, 0.3}) {
    for (const bool cross : {false, true}) {
      for (const bool masked : {false, true}) {
        SCOPED_TRACE((cross ? "cross " : "") + std::to_string(dropout));
        const Pass kept = pass(false, dropout, cross, masked);
        const Pass again = pass(true, dropout, cross, masked);
        expect_same_bits(again.loss, kept.loss, "loss");
        expect_same_bits(again.x, kept.x, "gradient of x");
        if (cross) expect_same_bits(again.memory, kept.memory, "gradient of the memory");
        ASSERT_EQ(again.weights.size(), kept.weights.size());
        for (size_t i = 0; i < kept.weights.size(); ++i) {
          expect_same_bits(again.weights[i], kept.weights[i], "parameter " + std::to_string(i));
        }
      }
    }
  }
}

TEST(Checkpoint, LeavesTheGeneratorWhereAPlainPassWould) {
  const auto next_draw = [](bool checkpoint) {
    pass(checkpoint, 0.3, false, false);
    return at::rand({4});
  };
  expect_same_bits(next_draw(true), next_draw(false), "what is drawn next");
}

TEST(Checkpoint, KeepsNoIntermediates) {
  int64_t calls = 0;
  const at::Tensor x = randn({3}, 1).requires_grad_();
  const auto f = [&](const std::vector<at::Tensor>& in) {
    ++calls;
    return in[0].exp() * in[0];
  };
  const at::Tensor y = checkpoint(f, {x});
  EXPECT_EQ(calls, 1);
  y.sum().backward();
  EXPECT_EQ(calls, 2);
  expect_close(x.grad(), (x.exp() * (1 + x)).detach(), 1e-12, "gradient");
  const at::NoGradGuard no_grad;
  checkpoint(f, {x});
  EXPECT_EQ(calls, 3);
}

}  // namespace
}  // namespace sinkhorn::nn
