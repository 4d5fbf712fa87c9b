// Training with the weights' gradients on a stream of their own and without: the same bits, by
// plain steps and by captured ones. Without a GPU every test is skipped.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "ops/fused/fused.h"
#include "ops/fused/side_work.h"
#include "train/step.h"

namespace sinkhorn::train {
namespace {

constexpr int64_t kSteps = 8;  // of which the fourth is captured

struct Case {
  bool tied = true, seq2seq = false, graph = true;
  int64_t rows = 8, batches = 1, vocab = 2000;
};

RunConfig config_of(const Case& run) {
  RunConfig config;
  config.model = models::model_size("tiny");
  config.model.tied = run.tied;
  config.model.vocab = run.vocab;
  config.model.max_length = 512;
  config.model.decoder = nn::resolve_attention(nn::attention_preset("prefix", true), true);
  config.model.encoder = nn::resolve_attention(nn::attention_preset("prefix", false), false);
  config.train.precision = "bf16";
  config.train.graph = run.graph;
  return config;
}

std::vector<Prepared> batches_of(const Case& run, int64_t step) {
  std::vector<Prepared> all;
  for (int64_t i = 0; i < run.batches; ++i) {
    const auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(100 * step + i));
    const auto ids = [&] {
      return at::randint(3, run.vocab, {run.rows, 512}, generator, at::kLong);
    };
    Prepared prepared;
    prepared.input.ids = ids();
    prepared.input.targets = ids();
    all.push_back(prepared);
  }
  return all;
}

// The parameters after some steps, and the mean loss.
struct Trained {
  std::vector<at::Tensor> parameters;
  double loss;
};

Trained trained(const Case& run, bool aside) {
  const RunConfig config = config_of(run);
  seed_everything(5, at::kCUDA);
  std::shared_ptr<models::Model> model;
  if (run.seq2seq) {
    model = std::make_shared<models::Seq2Seq>(config.model);
  } else {
    model = std::make_shared<models::LanguageModel>(config.model);
  }
  Stepper stepper(*model, config, at::Device(at::kCUDA, 0), aside);
  for (int64_t step = 0; step < kSteps; ++step) stepper.step(batches_of(run, step), 1e-3);
  Trained result{{}, stepper.report().loss};
  for (const auto& [name, parameter] : stepper.parameters()) {
    result.parameters.push_back(parameter.detach().cpu());
  }
  return result;
}

class SideStream : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA() || cuda_devices().empty()) GTEST_SKIP() << "no GPU";
    be_deterministic();
  }
  static void expect_same(const Case& run) {
    const Trained plain = trained(run, false);
    for (int repeat = 0; repeat < 2; ++repeat) {  // a race need not show at once
      const Trained aside = trained(run, true);
      EXPECT_EQ(plain.loss, aside.loss);
      ASSERT_EQ(plain.parameters.size(), aside.parameters.size());
      for (size_t i = 0; i < plain.parameters.size(); ++i) {
        EXPECT_TRUE(at::equal(plain.parameters[i], aside.parameters[i])) << "parameter " << i;
      }
    }
  }
};

TEST_F(SideStream, GivesTheSameBitsByPlainSteps) { expect_same({.graph = false}); }
TEST_F(SideStream, GivesTheSameBitsByCapturedSteps) { expect_same({}); }
TEST_F(SideStream, GivesTheSameBitsWithAnOutputOfItsOwn) { expect_same({.tied = false}); }
TEST_F(SideStream, GivesTheSameBitsWithEncoderAndDecoder) { expect_same({.seq2seq = true}); }
TEST_F(SideStream, GivesTheSameBitsWhereBatchesAccumulate) { expect_same({.batches = 2}); }
// Two layers' inputs are too large to go aside, the others are not.
TEST_F(SideStream, GivesTheSameBitsWherePartOfItIsTooLarge) { expect_same({.rows = 16}); }
// The logits' gradient is 262 MB: more than is kept before the streams meet.
TEST_F(SideStream, GivesTheSameBitsWhereTheLabelsAreMany) { expect_same({.vocab = 32000}); }

TEST_F(SideStream, LeavesGradientsUntilTheStreamsHaveMet) {
  const auto halves = at::TensorOptions(at::kBFloat16).device(at::kCUDA);
  const at::Tensor x = at::randn({4096, 128}, halves);
  const at::Tensor weight = at::randn({512, 128}, halves.dtype(at::kFloat)).requires_grad_(true);
  const auto backward = [&] {
    ops::linear(x, weight, std::nullopt, {}).to(at::kFloat).square().sum().backward();
  };
  backward();
  const at::Tensor plain = weight.grad();
  weight.mutable_grad() = at::Tensor();
  ops::SideScope scope(ops::make_side_stream(weight.device()));
  backward();
  EXPECT_FALSE(weight.grad().defined());
  scope.join();
  EXPECT_TRUE(at::equal(plain, weight.grad()));
}

}  // namespace
}  // namespace sinkhorn::train
