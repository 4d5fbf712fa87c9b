// Parts of a projection and pools of an input: their gradients are those of the plain composition,
// whoever else reads them, and attention's are handed on without a copy.
#include "nn/heads.h"

#include <torch/csrc/autograd/autograd.h>

#include "nn/support.h"
#include "ops/pool/pooled.h"
#include "sinkhorn/ops.h"

namespace sinkhorn::nn {
namespace {

using testing::expect_close;
using testing::expect_same_bits;
using testing::ragged_mask;
using testing::randn;

constexpr int64_t kBatch = 2, kLength = 11, kHeads = 3, kWidth = 12, kBlock = 4;

using Parts = std::vector<at::Tensor>;
using Use = std::function<at::Tensor(const Parts&)>;

Parts plain_parts(const at::Tensor& x, int64_t parts) {
  Parts split;
  for (const at::Tensor& part : x.chunk(parts, 2)) split.push_back(split_heads(part, kHeads));
  return split;
}

at::Tensor attend(const Parts& parts) {
  const at::Tensor r = randn({kBatch, kHeads, 3, 3}, 3).softmax(-1);
  return sinkhorn::attention(parts[0], parts[1], parts.back(), r, {kBlock}).square().sum();
}

at::Tensor gradient(const at::Tensor& loss, const at::Tensor& of) {
  return torch::autograd::grad({loss}, {of})[0];
}

TEST(SplitParts, GradientsAreThoseOfThePlainComposition) {
  const std::vector<std::tuple<std::string, int64_t, Use>> uses = {
      {"attention", 3, attend},
      {"tied", 2, attend},
      {"attention and another use of one part", 3,
       [](const Parts& p) { return attend(p) + (p[1] * randn(p[1].sizes(), 7)).sum(); }},
      {"twice", 3, [](const Parts& p) { return attend(p) + 2 * attend(p); }},
      {"one part alone", 3, [](const Parts& p) { return p[1].square().sum(); }},
      {"full attention", 3,
       [](const Parts& p) {
         return at::scaled_dot_product_attention(p[0], p[1], p[2]).square().sum();
       }},
      {"parts out of order", 3, [](const Parts& p) { return attend({p[2], p[1], p[0]}); }},
  };
  for (const auto& [name, count, use] : uses) {
    const at::Tensor x = randn({kBatch, kLength, count * kWidth}, 5).requires_grad_();
    const at::Tensor ours = use(split_parts(x, count, kHeads)), plain = use(plain_parts(x, count));
    expect_same_bits(ours, plain, name);
    expect_close(gradient(ours, x), gradient(plain, x), 1e-12, name);
  }
}

// What hooks saw on the way back through a projection.
struct Seen {
  at::Tensor whole;
  Parts parts;
};

TEST(SplitParts, AttentionsGradientsAreNotCopied) {
  for (const int64_t batch : {kBatch, int64_t{1}}) {
    const at::Tensor leaf = randn({batch, kLength, 3 * kWidth}, 5).requires_grad_();
    const at::Tensor x = leaf * 1;
    Seen seen{{}, Parts(3)};
    x.register_hook([&](const at::Tensor& g) { seen.whole = g; });
    const Parts parts = split_parts(x, 3, kHeads);
    for (size_t i = 0; i < 3; ++i) {
      parts[i].register_hook([&seen, i](const at::Tensor& g) { seen.parts[i] = g; });
    }
    sinkhorn::attention(parts[0], parts[1], parts[2], std::nullopt, {kBlock}).sum().backward();
    for (size_t i = 0; i < 3; ++i) {
      ASSERT_TRUE(seen.parts[i].defined());
      EXPECT_TRUE(seen.whole.is_alias_of(seen.parts[i])) << "part " << i;
      expect_same_bits(plain_parts(seen.whole, 3)[i], seen.parts[i], "part");
    }
    EXPECT_TRUE(seen.whole.is_contiguous());
  }
}

// Autograd adds in place where it thinks itself alone: not while somebody holds a part.
TEST(SplitParts, AGradientThatIsHeldDoesNotChange) {
  const at::Tensor leaf = randn({kBatch, kLength, 3 * kWidth}, 5).requires_grad_();
  const at::Tensor weigh = randn(leaf.sizes(), 7);
  at::Tensor held, copy;
  const auto loss = [&](const at::Tensor& x, const Parts& parts, bool holds) {
    if (holds) {
      parts[0].register_hook([&](const at::Tensor& g) {
        held = g;
        copy = g.clone();
      });
    }
    return attend(parts) + (x * weigh).sum();
  };
  const at::Tensor x = leaf * 1, again = leaf * 1;
  loss(x, split_parts(x, 3, kHeads), true).backward();
  expect_same_bits(held, copy, "held");
  const at::Tensor found = leaf.grad().clone();
  leaf.mutable_grad() = at::Tensor();
  loss(again, plain_parts(again, 3), false).backward();
  expect_close(found, leaf.grad(), 1e-12, "gradient");
}

TEST(SplitParts, HooksMayChangeAGradient) {
  const auto run = [](bool ours) {
    const at::Tensor x = randn({kBatch, kLength, 3 * kWidth}, 5).requires_grad_();
    const Parts parts = ours ? split_parts(x, 3, kHeads) : plain_parts(x, 3);
    parts[1].register_hook([](const at::Tensor& g) { return g * 2; });
    const at::Tensor loss = attend(parts);
    const at::Tensor first = torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true)[0];
    expect_same_bits(gradient(loss, x), first, "a second time");
    return first;
  };
  expect_close(run(true), run(false), 1e-12, "gradient");
}

TEST(SplitParts, WhatIsSavedOfAPartCannotBeOverwritten) {
  const at::Tensor leaf = randn({kBatch, kLength, 3 * kWidth}, 5).requires_grad_();
  at::Tensor x = leaf * 1;
  const at::Tensor loss = attend(split_parts(x, 3, kHeads));
  x.detach().zero_();
  EXPECT_THROW(gradient(loss, leaf), c10::Error);
}

TEST(Pooled, GradientsAreThoseOfThePlainComposition) {
  const at::Tensor mask = ragged_mask({kLength, 5}, kLength);
  const std::vector<std::vector<ops::PoolKind>> all = {{{"mean", false}},
                                                       {{"sum", true}},
                                                       {{"mean", true}, {"mean", false}},
                                                       {{"recent", true}, {"sum", false}}};
  for (const auto& kinds : all) {
    for (const bool masked : {false, true}) {
      // Which of x and its pools are read.
      for (const int64_t read : {0b111, 0b001, 0b110, 0b010, 0b101}) {
        SCOPED_TRACE(kinds[0].mode + " reads " + std::to_string(read));
        const auto loss = [&](const at::Tensor& x, const std::vector<at::Tensor>& pools) {
          at::Tensor sum = at::zeros({}, at::kDouble);
          if (read & 1) sum = sum + (x.square() * randn(x.sizes(), 7)).sum();
          for (size_t i = 0; i < pools.size(); ++i) {
            if (read >> (i + 1) & 1)
              sum = sum + (pools[i].pow(3) * randn(pools[i].sizes(), 8)).sum();
          }
          return sum;
        };
        const at::Tensor x = randn({kBatch, kLength, kWidth}, 5).requires_grad_();
        const auto real = masked ? std::optional<at::Tensor>(mask) : std::nullopt;
        const ops::Pooled ours = ops::pooled(x, kBlock, kinds, real);
        std::vector<at::Tensor> plain;
        for (const auto& k : kinds) plain.push_back(pool(x, {kBlock, k.mode, k.causal, real}));
        expect_same_bits(ours.x, x, "x");
        const at::Tensor a = loss(ours.x, ours.pools), b = loss(x, plain);
        expect_same_bits(a, b, "loss");
        if (!b.requires_grad()) continue;
        expect_close(gradient(a, x), gradient(b, x), 1e-12, "gradient");
      }
    }
  }
  const at::NoGradGuard no_grad;
  const at::Tensor x = randn({kBatch, kLength, kWidth}, 5).requires_grad_();
  EXPECT_FALSE(ops::pooled(x, kBlock, all[2], mask).pools[1].requires_grad());
}

}  // namespace
}  // namespace sinkhorn::nn
