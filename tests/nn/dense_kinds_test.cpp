// The baselines full, local, window and sparse against plain attention under a dense mask, in
// double, forward and backward.
#include <cmath>
#include <optional>

#include "nn/support.h"
#include "sinkhorn/nn/attention.h"

namespace sinkhorn::nn {
namespace {

using testing::expect_close;
using testing::fill_parameters;
using testing::parameter;
using testing::ragged_mask;
using testing::randn;

constexpr int64_t kWidth = 12, kLength = 21;

// What query i of head h may see, written from the definitions.
bool sees(const AttentionConfig& c, const AttentionPlace& place, int64_t h, int64_t i, int64_t j) {
  if (place.decoder && j > i) return false;
  if (c.kind == "full") return true;
  if (c.kind == "sparse") {
    const bool own = i / c.stride == j / c.stride;
    const bool summary = j % c.stride >= c.stride - c.summary;
    if (c.merged) return own || summary;
    return h < (place.heads + 1) / 2 ? own : summary;
  }
  const int64_t window = c.kind == "local" ? 0 : std::max<int64_t>(1, c.window);
  return std::abs(i / c.block - j / c.block) <= window;
}

at::Tensor visible(const AttentionConfig& c, const AttentionPlace& place, const at::Tensor& mask) {
  at::Tensor v = at::zeros({mask.size(0), place.heads, kLength, kLength}, at::kBool);
  auto out = v.accessor<bool, 4>();
  const auto real = mask.accessor<bool, 2>();
  for (int64_t b = 0; b < v.size(0); ++b) {
    for (int64_t h = 0; h < place.heads; ++h) {
      for (int64_t i = 0; i < kLength; ++i) {
        for (int64_t j = 0; j < kLength; ++j) {
          out[b][h][i][j] = real[b][j] && sees(c, place, h, i, j);
        }
      }
    }
  }
  return v;
}

at::Tensor naive(const SinkhornAttention& attention, const AttentionPlace& place,
                 const at::Tensor& x, const at::Tensor& seen) {
  const int64_t heads = place.heads, width = place.width / heads;
  const auto qkv = at::matmul(x, parameter(attention, "qkv.weight").t()).chunk(3, 2);
  const auto split = [&](const at::Tensor& t) {
    return t.reshape({t.size(0), t.size(1), heads, width}).transpose(1, 2);
  };
  const at::Tensor q = split(qkv[0]), k = split(qkv[1]), v = split(qkv[2]);
  const at::Tensor scores =
      at::matmul(q, k.transpose(2, 3)) / std::sqrt(static_cast<double>(width));
  // Written with exp, so that a row without anything visible has the weights 0 / 1.
  const at::Tensor terms = at::where(seen, scores, 0).exp() * seen;
  const at::Tensor sums = terms.sum(-1, true);
  const at::Tensor y = at::matmul(terms / at::where(sums == 0, 1, sums), v);
  const at::Tensor joined = y.transpose(1, 2).reshape({x.size(0), x.size(1), place.width});
  return at::matmul(joined, parameter(attention, "out.weight").t());
}

void compare(const AttentionConfig& config, bool decoder, int64_t heads, bool masked) {
  SCOPED_TRACE(config.kind + (decoder ? " decoder" : " encoder") + (masked ? " masked" : "") +
               (config.merged ? " merged" : "") + " heads " + std::to_string(heads));
  const AttentionPlace place{kWidth, heads, kLength, decoder, 0.0};
  SinkhornAttention attention(config, place);
  attention.to(at::kDouble);
  fill_parameters(attention, 11);
  // Row 1 ends early, row 2 has nothing real.
  const at::Tensor mask =
      ragged_mask({kLength, masked ? 10 : kLength, masked ? 0 : kLength}, kLength);
  Context context;
  if (masked) context.mask = mask;
  // A masked query is nobody's: only real ones are compared.
  const at::Tensor weigh = randn({3, kLength, kWidth}, 2) * mask.unsqueeze(2);
  const auto run = [&](bool module) {
    attention.zero_grad();
    const at::Tensor x = randn({3, kLength, kWidth}, 1).requires_grad_();
    const at::Tensor y = module ? attention.forward(x, context)
                                : naive(attention, place, x, visible(config, place, mask));
    (y * weigh).sum().backward();
    std::vector<at::Tensor> all{y.detach() * mask.unsqueeze(2), x.grad()};
    for (const at::Tensor& g : testing::gradients(attention)) all.push_back(g.clone());
    return all;
  };
  const auto actual = run(true), expected = run(false);
  const char* const names[] = {"output", "gradient of x", "gradient of qkv", "gradient of out"};
  for (size_t i = 0; i < actual.size(); ++i) {
    expect_close(actual[i], expected[i], 1e-12, names[i]);
  }
}

void compare_everywhere(const AttentionConfig& config) {
  for (const bool decoder : {false, true}) {
    for (const bool masked : {false, true}) {
      for (const int64_t heads : {1, 3, 4}) compare(config, decoder, heads, masked);
    }
  }
}

TEST(DenseKinds, Full) { compare_everywhere({.kind = "full"}); }

TEST(DenseKinds, Local) { compare_everywhere({.kind = "local", .block = 4}); }

TEST(DenseKinds, LocalIgnoresWindow) {
  compare_everywhere({.kind = "local", .block = 4, .window = 2});
}

TEST(DenseKinds, Window) { compare_everywhere({.kind = "window", .block = 4, .window = 2}); }

TEST(DenseKinds, WindowIsAtLeastOne) { compare_everywhere({.kind = "window", .block = 5}); }

// Heads of both patterns: strides that do and do not divide the length, one short of a summary.
TEST(DenseKinds, Sparse) {
  for (const int64_t stride : {7, 8, 6, 30}) {
    compare_everywhere({.kind = "sparse", .stride = stride, .summary = 2});
  }
}

TEST(DenseKinds, SparseOfOneTokenStrides) {
  compare_everywhere({.kind = "sparse", .stride = 1, .summary = 1});
}

TEST(DenseKinds, SparseMerged) {
  for (const int64_t stride : {7, 8, 30}) {
    compare_everywhere({.kind = "sparse", .stride = stride, .summary = 3, .merged = true});
  }
}

}  // namespace
}  // namespace sinkhorn::nn
