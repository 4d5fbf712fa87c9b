// A block that begins, by the CUDA kernels alone, beside the same in float64 by Torch's operations:
// pasts and batches that are too long for a whole model on the CPU. Without a GPU every test is
// skipped.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "generate/attend.h"
#include "generate/balance_row.h"
#include "ops/decode/decode.h"

namespace sinkhorn::generate {
namespace {

struct Size {
  int64_t batch, heads, width, block, blocks;
  int64_t window = 1;
  bool inclusive = false, tied = false, bilinear = true;
  std::string columns = "prior";
  int64_t iterations = 3;
  at::ScalarType type = at::kFloat;
};

nn::AttentionConfig config_of(const Size& size) {
  nn::AttentionConfig config;
  config.columns = size.columns;
  config.iterations = size.iterations;
  config.temperature = 0.75;
  return config;
}

// All a step reads and writes where blocks begin. Slots differ in what they hold.
struct State {
  ops::DecodeLayer layer;
  ops::DecodeRows rows;

  // places [B]: blocks, or -1 for a slot that waits.
  State(const Size& size, const std::vector<int64_t>& places, at::Device device) {
    const int64_t batch = size.batch, heads = size.heads, n = size.blocks;
    const auto numbers = [&](at::IntArrayRef sizes) {
      return at::randn(sizes, at::kDouble).to(at::kFloat).to(device);
    };
    at::manual_seed(3);
    const at::Tensor at_blocks = at::tensor(places);
    layer.active = (at_blocks >= 0).to(device);
    layer.places = (at_blocks.clamp_min(0) * size.block).to(device);
    layer.block = size.block;
    layer.window = size.inclusive ? 0 : size.window;
    layer.inclusive = size.inclusive;
    layer.key = numbers({batch, heads, n * size.block, size.width}).to(size.type);
    layer.value = size.tied ? layer.key : numbers(layer.key.sizes()).to(size.type);
    layer.sorted_key = at::ones({batch, heads, size.block, size.width}, layer.key.options());
    layer.sorted_value = size.tied ? layer.sorted_key : layer.sorted_key.clone();
    layer.live = at::zeros({batch, heads}, layer.active.options());
    const auto floats = layer.key.options().dtype(at::kFloat);
    if (size.inclusive) layer.own_share = at::zeros({batch, heads}, floats);
    if (size.bilinear) {
      rows.destination = numbers({batch, heads, size.width});
      rows.source = numbers({batch, heads, size.width});
      rows.sources = numbers({batch, heads, n, size.width});
      rows.own_sources = !size.inclusive;
    } else {
      rows.logits = numbers({batch, heads, n + 5});
    }
    const nn::AttentionConfig config = config_of(size);
    rows.sums = numbers({batch, heads, kept_sums(config), n}).abs();
    rows.iterations = config.iterations;
    rows.columns = ops::parse_columns("test", config.columns);
    rows.temperature = config.temperature;
  }

  // The state of one slot alone.
  State alone(int64_t slot) const {
    State one = *this;
    for (at::Tensor* t : {&one.layer.places, &one.layer.active, &one.layer.key, &one.layer.value,
                          &one.layer.sorted_key, &one.layer.sorted_value, &one.layer.live,
                          &one.layer.own_share, &one.rows.logits, &one.rows.destination,
                          &one.rows.source, &one.rows.sources, &one.rows.sums}) {
      if (t->defined()) *t = t->narrow(0, slot, 1).clone();
    }
    if (layer.value.is_same(layer.key)) {
      one.layer.value = one.layer.key;
      one.layer.sorted_value = one.layer.sorted_key;
    }
    return one;
  }
};

at::Tensor exact(const at::Tensor& x) { return x.cpu().to(at::kDouble); }

void expect_near(const at::Tensor& found, const at::Tensor& expected, double tolerance,
                 const char* what) {
  if (expected.numel() == 0) return;
  const double error = (exact(found) - expected).abs().max().item<double>();
  EXPECT_LE(error, tolerance * (1 + expected.abs().max().item<double>())) << what;
}

// The one slot of `before` after the step, in float64.
void expect_begun(const State& before, const State& after, const Size& size) {
  const int64_t block = before.layer.places.item<int64_t>() / size.block, n = size.blocks;
  const int64_t allowed = size.inclusive ? block + 1 : std::max<int64_t>(block - size.window, 0);
  const double tolerance = size.type == at::kFloat ? 2e-5 : 1e-2;
  at::Tensor logits;
  if (size.bilinear) {
    at::Tensor sources = exact(before.rows.sources);
    const int64_t newest = size.inclusive ? block : block - 1;
    if (newest >= 0) sources.select(2, newest).copy_(exact(before.rows.source));
    EXPECT_TRUE(exact(after.rows.sources).equal(sources)) << "sources";
    logits = at::matmul(sources, exact(before.rows.destination).unsqueeze(3)).squeeze(3) /
             std::sqrt(static_cast<double>(size.width));
  } else {
    logits = exact(before.rows.logits).narrow(2, 0, n);
  }
  at::Tensor sums = exact(before.rows.sums);
  const at::Tensor row =
      balance_row(logits, (at::arange(n) < allowed).view({1, 1, n}), config_of(size), sums);
  const at::Tensor kept = exact(after.rows.sums);
  expect_near(kept.narrow(3, 0, allowed), sums.narrow(3, 0, allowed), 1e-5, "sums");
  EXPECT_TRUE(kept.narrow(3, allowed, n - allowed)
                  .equal(exact(before.rows.sums).narrow(3, allowed, n - allowed)))
      << "sums of blocks that are no sources";
  EXPECT_EQ(after.layer.live.all().item<bool>(), allowed > 0);
  at::Tensor others = row;
  if (size.inclusive) {
    expect_near(after.layer.own_share, row.select(2, block), 1e-5, "own share");
    others = at::where(at::arange(n) < block, row, 0.0);
  }
  expect_near(after.layer.sorted_key, sort_blocks(others, exact(before.layer.key), size.block),
              tolerance, "keys");
  expect_near(after.layer.sorted_value, sort_blocks(others, exact(before.layer.value), size.block),
              tolerance, "values");
}

bool same_bits(const State& a, const State& b) {
  return a.layer.sorted_key.equal(b.layer.sorted_key) &&
         a.layer.sorted_value.equal(b.layer.sorted_value) && a.rows.sums.equal(b.rows.sums) &&
         a.layer.live.equal(b.layer.live);
}

// Every slot is what it should be, and what it is alone, to the bit.
void expect_step(const Size& size, const std::vector<int64_t>& places) {
  State state(size, places, at::kCUDA);
  std::vector<State> before;
  for (int64_t slot = 0; slot < size.batch; ++slot) before.push_back(state.alone(slot));
  ops::decode_sort(state.layer, state.rows);
  for (int64_t slot = 0; slot < size.batch && !::testing::Test::HasFailure(); ++slot) {
    SCOPED_TRACE("slot " + std::to_string(slot));
    const State after = state.alone(slot), old = before[static_cast<size_t>(slot)];
    if (places[static_cast<size_t>(slot)] < 0) {
      EXPECT_TRUE(same_bits(after, old)) << "a slot that waits";
      continue;
    }
    State one = old.alone(0);
    ops::decode_sort(one.layer, one.rows);
    EXPECT_TRUE(same_bits(after, one)) << "depends on the slots beside it";
    expect_begun(old, after, size);
  }
}

class BeginOnCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  }
};

// From every slot at once, whose shares of the past are summed one after the other, to a single
// one.
TEST_F(BeginOnCuda, ManySlotsAtOnce) {
  for (const int64_t begun : {48, 32, 3}) {
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
      std::vector<int64_t> places(48, -1);
      for (int64_t s = 0; s < begun; ++s) places[static_cast<size_t>(47 - s)] = s * 37 % 300;
      expect_step({.batch = 48, .heads = 2, .width = 8, .block = 4, .blocks = 300, .type = type},
                  places);
    }
  }
}

// More sources than threads hold in registers.
TEST_F(BeginOnCuda, ManySources) {
  for (const char* columns : {"prefix", "prior", "none"}) {
    expect_step(
        {.batch = 2, .heads = 1, .width = 8, .block = 2, .blocks = 2600, .columns = columns},
        {2599, 2049});
  }
}

TEST_F(BeginOnCuda, Rules) {
  const std::vector<int64_t> places{0, 1, 2, 17, -1, 89};
  for (const bool inclusive : {false, true}) {
    for (const bool bilinear : {false, true}) {
      for (const int64_t width : {9, 64, 256}) {
        for (const int64_t iterations : {0, 3}) {
          expect_step({.batch = 6,
                       .heads = 3,
                       .width = width,
                       .block = 5,
                       .blocks = 90,
                       .window = 2,
                       .inclusive = inclusive,
                       .tied = width == 64,
                       .bilinear = bilinear,
                       .iterations = iterations,
                       .type = width == 64 ? at::kHalf : at::kFloat},
                      places);
        }
      }
    }
  }
}

}  // namespace
}  // namespace sinkhorn::generate
