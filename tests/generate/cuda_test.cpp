// Decoding on a GPU, by kernels and captured graphs, beside the full pass on the CPU in float64.
// Without a GPU every test is skipped.
#include <ATen/Context.h>

#include <random>

#include "generate/support.h"

namespace sinkhorn::generate {
namespace {

using namespace sinkhorn::testing;
using models::LanguageModel;
using models::Seq2Seq;

constexpr int64_t kLength = 40;  // so that steps at a block's start are replayed too

struct Precision {
  at::ScalarType parameters = at::kFloat;
  std::optional<at::ScalarType> compute{};
  double ratio = 3.0, floor = 2e-6;  // of the full pass's error, of the largest logit
  bool half_matrices = false;        // as a bf16 export keeps them
};
const Precision kDouble{at::kDouble, {}, 0.0, 1e-11};
const Precision kSingle{};
const Precision kHalf{at::kFloat, at::kBFloat16, 2.0, 2e-3};

template <class M>
std::shared_ptr<M> in_precision(M& exact, const Precision& precision) {
  const auto model = in_type(exact, precision.parameters);
  for (at::Tensor& p : model->parameters()) {
    if (precision.half_matrices && p.dim() >= 2) p.set_data(p.to(at::kBFloat16));
  }
  return model;
}

template <class M>
std::shared_ptr<M> on_gpu(M& exact, const Precision& precision) {
  const auto model = in_precision(exact, precision);
  model->to(at::kCUDA);
  return model;
}

// How far the same precision's full pass, on the CPU, is from `truth`.
double full_error(LanguageModel& exact, const Precision& precision, const at::Tensor& ids,
                  const at::Tensor& truth) {
  if (precision.ratio == 0.0) return 0.0;
  nn::Context context;
  context.compute = precision.compute;
  return rms(full_logits(*in_precision(exact, precision), ids, context) - truth);
}

// Logits of tokens prompt - 1 .. L - 1, copied: a replay overwrites the last ones.
at::Tensor decoded(Decoder& decoder, const at::Tensor& ids, int64_t prompt) {
  std::vector<at::Tensor> all{decoder.prefill(ids.slice(1, 0, prompt)).cpu()};
  for (int64_t t = prompt; t < ids.size(1); ++t) {
    all.push_back(decoder.step(ids.select(1, t)).cpu());
  }
  return at::stack(all, 1);
}

void expect_decoding(const models::ModelConfig& config, const Precision& precision,
                     int64_t length = kLength, const std::vector<int64_t>& prompts = {1, 6}) {
  auto exact = filled_model<LanguageModel>(config);
  if (precision.half_matrices) exact = in_type(*in_precision(*exact, precision), at::kDouble);
  const at::Tensor ids = random_ids(2, length, 3), truth = full_logits(*exact, ids);
  const double allowed = precision.ratio * full_error(*exact, precision, ids, truth) +
                         precision.floor * truth.abs().max().item<double>();
  for (const bool graph : {false, true}) {
    Decoder decoder(on_gpu(*exact, precision),
                    {.batch = 2, .capacity = length, .compute = precision.compute, .graph = graph});
    for (const int64_t prompt : graph ? prompts : std::vector<int64_t>{prompts.back()}) {
      const at::Tensor error = decoded(decoder, ids, prompt) - truth.slice(1, prompt - 1);
      EXPECT_LE(rms(error), allowed) << (graph ? "graph" : "no graph") << ", prompt " << prompt;
    }
  }
}

class OnCuda : public ::testing::TestWithParam<NamedAttention> {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  }
};

TEST_P(OnCuda, Float32) { expect_decoding(small_config({}, GetParam().second), kSingle); }
TEST_P(OnCuda, Bfloat16) { expect_decoding(small_config({}, GetParam().second), kHalf); }

INSTANTIATE_TEST_SUITE_P(Every, OnCuda, ::testing::ValuesIn(causal_kinds()), test_name);

class OddSizesOnCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  }
};

// Head widths that no pack divides, that fill some lanes, all of them, or more than a kernel has.
TEST_F(OddSizesOnCuda, HeadWidths) {
  for (const int64_t width : {3, 9, 20, 64, 72, 128, 200, 256, 264}) {
    for (const char* causal : {"strict", "inclusive"}) {
      models::ModelConfig config = small_config({}, {.sort_net = "bilinear", .causal = causal});
      config.heads = 2;
      config.width = 2 * width;
      SCOPED_TRACE(std::string(causal) + ", width " + std::to_string(width));
      expect_decoding(config, kSingle);
      expect_decoding(config, kHalf);
    }
  }
}

TEST_F(OddSizesOnCuda, Blocks) {
  for (const int64_t block : {1, 5, 100}) {
    for (const bool tied : {false, true}) {
      models::ModelConfig config = small_config({}, nn::attention_preset("windowed", true));
      config.decoder.block = block;
      config.decoder.tie_kv = tied;
      config.heads = 1;
      SCOPED_TRACE("block " + std::to_string(block));
      expect_decoding(config, kSingle, 30);
    }
  }
}

// Many sources, so that several parts of the past are summed: 75 blocks of 16 numbers, and more
// positions than a CTA takes at once.
TEST_F(OddSizesOnCuda, LongPast) {
  for (const int64_t block : {4, 96}) {
    models::ModelConfig config = small_config({}, nn::attention_preset("windowed", true));
    config.decoder.block = block;
    config.decoder.window = 2;
    config.max_length = 400;
    SCOPED_TRACE("block " + std::to_string(block));
    expect_decoding(config, kSingle, 300);
    expect_decoding(config, kHalf, 300);
  }
}

// A past that several CTAs share, and one so short that most of them have none of it.
TEST_F(OddSizesOnCuda, FullPast) {
  constexpr int64_t kPast = 530;
  for (const int64_t width : {3, 20, 64, 128, 200}) {
    models::ModelConfig config = small_config({}, {.kind = "full"});
    config.heads = 2;
    config.width = 2 * width;
    config.max_length = kPast;
    SCOPED_TRACE("width " + std::to_string(width));
    expect_decoding(config, kSingle, kPast, {1, 500});
    expect_decoding(config, kHalf, kPast, {1, 500});
  }
}

// Slots that wait, start anew and change places, by chance, beside what each has been told.
class SlotsOnCuda : public OnCuda {
 protected:
  static constexpr int64_t kSlots = 4;

  void SetUp() override {
    OnCuda::SetUp();
    if (IsSkipped()) return;
    exact_ = filled_model<LanguageModel>(small_config({}, GetParam().second));
    told_.resize(kSlots);
  }
  int64_t below(int64_t limit) { return static_cast<int64_t>(random_() % limit); }

  at::Tensor truth(const std::vector<int64_t>& told) {
    return full_logits(*exact_, at::tensor(told).unsqueeze(0))[0][-1];
  }
  void expect_truth(const at::Tensor& logits, int64_t slot) {
    const at::Tensor expected = truth(told_[static_cast<size_t>(slot)]);
    const double error = rms(logits.cpu() - expected);
    EXPECT_LE(error, tolerance_ * (1 + expected.abs().max().item<double>())) << "slot " << slot;
  }
  void prefill(Decoder& decoder) {
    const int64_t slot = below(kSlots), length = 1 + below(9);
    const at::Tensor ids = random_ids(1, length, random_());
    told_[static_cast<size_t>(slot)].assign(ids.data_ptr<int64_t>(),
                                            ids.data_ptr<int64_t>() + length);
    expect_truth(decoder.prefill(ids, {}, {slot})[0], slot);
  }
  void reorder(Decoder& decoder) {
    std::vector<int64_t> sources(kSlots);
    const auto before = told_;
    for (size_t s = 0; s < told_.size(); ++s) {
      sources[s] = below(kSlots);
      told_[s] = before[static_cast<size_t>(sources[s])];
    }
    decoder.reorder(at::tensor(sources));
  }
  void copy(Decoder& decoder) {
    const int64_t from = below(kSlots), to = below(kSlots);
    told_[static_cast<size_t>(to)] = told_[static_cast<size_t>(from)];
    decoder.copy(from, {to});
  }
  void step(Decoder& decoder) {
    std::vector<int64_t> ids(kSlots, -1);
    for (size_t s = 0; s < ids.size(); ++s) {
      if (below(5) == 0 || told_[s].size() >= static_cast<size_t>(kLength)) continue;
      ids[s] = 3 + below(kVocab - 3);
      told_[s].push_back(ids[s]);
    }
    const at::Tensor logits = decoder.step(at::tensor(ids));
    for (int64_t s = 0; s < kSlots; ++s) {
      if (ids[static_cast<size_t>(s)] >= 0) expect_truth(logits[s], s);
    }
  }
  void expect_slots(const Precision& precision, double tolerance) {
    tolerance_ = tolerance;
    Decoder decoder(on_gpu(*exact_, precision), {.batch = kSlots, .capacity = kLength});
    for (int64_t t = 0; t < 120; ++t) {
      const int64_t chance = below(20);
      chance == 0   ? prefill(decoder)
      : chance == 1 ? reorder(decoder)
      : chance == 2 ? copy(decoder)
                    : step(decoder);
      if (HasFailure()) FAIL() << "after " << t << " calls";
    }
  }

  std::shared_ptr<LanguageModel> exact_;
  std::vector<std::vector<int64_t>> told_;
  std::mt19937_64 random_{11};
  double tolerance_ = 0.0;
};

TEST_P(SlotsOnCuda, Float64) { expect_slots(kDouble, 1e-11); }
TEST_P(SlotsOnCuda, Float32) { expect_slots(kSingle, 1e-4); }

std::vector<NamedAttention> some_kinds() {
  return {{"prefix", {}},
          {"windowed", nn::attention_preset("windowed", true)},
          {"inclusive",
           {.sort_net = "bilinear", .pooling = "sum", .causal = "inclusive", .columns = "prior"}},
          {"paper", nn::attention_preset("paper", true)},
          {"mixture_tied", {.kind = "mixture", .window = 1, .tie_kv = true}},
          {"sparse", {.kind = "sparse"}},
          {"full", {.kind = "full"}},
          {"window", {.kind = "window"}}};
}

INSTANTIATE_TEST_SUITE_P(Some, SlotsOnCuda, ::testing::ValuesIn(some_kinds()), test_name);

class WeightsOnCuda : public OnCuda {};

// As an export keeps them: matrices in bfloat16, norms and biases in float32.
TEST_P(WeightsOnCuda, Bfloat16) {
  Precision weights = kHalf;
  weights.half_matrices = true;
  expect_decoding(small_config({}, GetParam().second), weights);
  weights = kSingle;
  weights.compute = at::kFloat;
  weights.half_matrices = true;
  expect_decoding(small_config({}, GetParam().second), weights);
}

INSTANTIATE_TEST_SUITE_P(Some, WeightsOnCuda, ::testing::ValuesIn(some_kinds()), test_name);

// A longer source moves what the graphs read.
TEST_F(OddSizesOnCuda, SourcesOfOtherLengths) {
  const auto exact = filled_model<Seq2Seq>(small_config({}, {}));
  const auto model = on_gpu(*exact, kSingle);
  const at::Tensor ids = at::cat({at::ones({2, 1}, at::kLong), random_ids(2, 19, 4)}, 1);
  Decoder decoder(model, {.batch = 2});
  for (const int64_t length : {5, 12, 7}) {
    const at::Tensor sources = random_ids(2, length, 5);
    decoder.read(sources);
    const at::NoGradGuard no_grad;
    const at::Tensor truth =
        exact->decode(ids, std::nullopt, exact->encode(sources, std::nullopt, {}), {});
    EXPECT_LE(rms(decoded(decoder, ids, 2) - truth.slice(1, 1)),
              1e-4 * truth.abs().max().item<double>())
        << "source of " << length;
  }
}

}  // namespace
}  // namespace sinkhorn::generate
