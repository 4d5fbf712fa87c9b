// The C++ interface: option structs reach the operators, and gradients flow.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <reference.h>
#include <sinkhorn/ops.h>

namespace {

at::Tensor leaf(at::IntArrayRef sizes) {
  return at::randn(sizes, at::kDouble).set_requires_grad(true);
}

// Both results and the gradients of both agree.
void expect_same(const at::Tensor& ours, const at::Tensor& reference,
                 const std::vector<at::Tensor>& leaves) {
  ASSERT_TRUE(at::allclose(ours, reference, 1e-10, 1e-12));
  const at::Tensor incoming = at::randn_like(reference);
  std::vector<at::Tensor> grads[2];
  for (int side = 0; side < 2; ++side) {
    (side == 0 ? ours : reference).backward(incoming);
    for (const at::Tensor& x : leaves) {
      grads[side].push_back(x.grad().clone());
      x.mutable_grad().reset();
    }
  }
  for (size_t i = 0; i < leaves.size(); ++i) {
    EXPECT_TRUE(at::allclose(grads[0][i], grads[1][i], 1e-9, 1e-11)) << "gradient " << i;
  }
}

at::Tensor random_mask(int64_t batch, int64_t length) { return at::rand({batch, length}) > 0.3; }

TEST(Ops, Pool) {
  at::manual_seed(1);
  const at::Tensor x = leaf({2, 11, 5}), mask = random_mask(2, 11);
  expect_same(sinkhorn::pool(x, {.block = 4, .mode = "recent", .causal = true, .mask = mask}),
              sinkhorn::reference::pool(x, 4, "recent", true, mask), {x});
}

TEST(Ops, Balance) {
  at::manual_seed(2);
  const at::Tensor x = leaf({2, 3, 6, 6}), noise = at::randn({2, 3, 6, 6}, at::kDouble);
  const at::Tensor mask = random_mask(2, 6);
  const sinkhorn::BalanceOptions options{.iterations = 3,
                                         .temperature = 0.5,
                                         .causal = "strict",
                                         .columns = "prior",
                                         .window = 1,
                                         .noise = noise,
                                         .block_mask = mask};
  expect_same(sinkhorn::balance(x, options),
              sinkhorn::reference::balance(x, 3, 0.5, "strict", "prior", 1, noise, mask), {x});
}

TEST(Ops, Attention) {
  at::manual_seed(3);
  const at::Tensor q = leaf({2, 2, 11, 3}), k = leaf({2, 2, 11, 3}), v = leaf({2, 2, 11, 3});
  const at::Tensor sort = at::rand({2, 2, 3, 3}, at::kDouble).set_requires_grad(true);
  const at::Tensor mask = random_mask(2, 11);
  const sinkhorn::AttentionOptions options{.block = 4,
                                           .causal = "strict",
                                           .combine = "outputs",
                                           .window = 1,
                                           .mask = mask,
                                           .scale = 0.7};
  expect_same(sinkhorn::attention(q, k, v, sort, options),
              sinkhorn::reference::attention(q, k, v, sort, 4, "strict", "outputs", 1, mask, 0.7),
              {q, k, v, sort});
}

TEST(Ops, Sortcut) {
  at::manual_seed(4);
  const at::Tensor q = leaf({2, 2, 9, 3}), k = leaf({2, 2, 11, 3}), v = leaf({2, 2, 11, 3});
  const at::Tensor sort = at::rand({2, 2, 3, 3}, at::kDouble).set_requires_grad(true);
  const at::Tensor mask = random_mask(2, 11);
  expect_same(sinkhorn::sortcut(q, k, v, sort, {.block = 4, .budget = 2, .mask = mask}),
              sinkhorn::reference::sortcut(q, k, v, sort, 4, 2, mask, std::nullopt),
              {q, k, v, sort});
}

TEST(Ops, MisuseThrowsWithTheValue) {
  try {
    sinkhorn::pool(at::zeros({1, 4, 2}), {.block = -3});
    FAIL() << "block -3 was accepted";
  } catch (const c10::ValueError& error) {
    EXPECT_NE(std::string(error.what()).find("-3"), std::string::npos);
  }
}

}  // namespace
