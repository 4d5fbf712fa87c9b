// Cached decoding equals the full pass at every position, whatever the prompt's length.
#include <map>

#include "generate/support.h"

namespace sinkhorn::generate {
namespace {

using namespace sinkhorn::testing;
using models::LanguageModel;

constexpr int64_t kLength = 23;

// causal_kinds, and what they leave out: few iterations, one projection for keys and values.
std::vector<NamedAttention> kinds() {
  std::vector<NamedAttention> all = causal_kinds();
  const auto add = [&](const std::string& name, nn::AttentionConfig c) {
    for (const int64_t iterations : {0, 1, 2}) {
      c.iterations = iterations;
      all.push_back({name + " " + std::to_string(iterations) + " iterations", c});
    }
  };
  for (const char* columns : {"prefix", "prior", "none"}) {
    for (const bool tied : {false, true}) {
      const std::string name = std::string(columns) + (tied ? " tied" : "");
      const auto with = [&](nn::AttentionConfig c) {
        c.columns = columns;
        c.tie_kv = tied;
        return c;
      };
      add(name + " strict", with({}));
      add(name + " window", with({.window = 1, .sort_net = "bilinear", .pooling = "recent"}));
      add(name + " inclusive", with({.sort_net = "bilinear", .causal = "inclusive"}));
      add(name + " logits", with({.causal = "inclusive", .combine = "logits"}));
      add(name + " mixture", with({.kind = "mixture", .combine = "outputs"}));
    }
  }
  add("full columns unused", {.columns = "full"});
  all.resize(all.size() - 2);  // with iterations they leak
  for (const char* kind : {"full", "local", "window", "sparse"}) {
    all.push_back({std::string("tied ") + kind, {.kind = kind, .tie_kv = true}});
  }
  all.push_back({"window 3", {.kind = "window", .window = 3}});
  return all;
}

class CachedEqualsFull : public ::testing::TestWithParam<NamedAttention> {};

TEST_P(CachedEqualsFull, Float64) {
  const auto model = filled_model<LanguageModel>(small_config({}, GetParam().second));
  const at::Tensor ids = random_ids(2, kLength, 3);
  const at::Tensor full = full_logits(*model, ids);
  Decoder decoder(model, {.batch = 2});
  // Blocks have 4 tokens: shorter than one, at its end, at the next one's start, inside.
  for (const int64_t prompt : {1, 3, 4, 5, 14}) {
    expect_close(cached_logits(decoder, ids, prompt), full.slice(1, prompt - 1), 1e-12,
                 "prompt of " + std::to_string(prompt));
  }
}

INSTANTIATE_TEST_SUITE_P(Every, CachedEqualsFull, ::testing::ValuesIn(kinds()), test_name);

// One for each rule, sum, network and way to combine; the types change nothing of which is which.
std::vector<NamedAttention> typed_kinds() {
  return {{"default", {}},
          {"windowed", nn::attention_preset("windowed", true)},
          {"paper", nn::attention_preset("paper", true)},
          {"inclusive bilinear", {.sort_net = "bilinear", .causal = "inclusive"}},
          {"outputs mlp", {.sort_net = "mlp", .pooling = "recent", .combine = "outputs"}},
          {"rows only", {.window = 1, .sort_net = "linear_relu", .columns = "none"}},
          {"tied mixture", {.kind = "mixture", .tie_kv = true}},
          {"full", {.kind = "full"}},
          {"local", {.kind = "local"}},
          {"sparse", {.kind = "sparse"}}};
}

class Rounding : public ::testing::TestWithParam<NamedAttention> {
 protected:
  // Errors of the cached and of the full pass against float64, over the positions behind prompts
  // that end inside, at the end and at the start of a block.
  void expect_rounding(const nn::Context& context, double ratio, double floor) {
    const auto exact = in_type(*model_, at::kDouble);
    std::map<int64_t, double> cached_errors, full_errors;  // by the prompt's length
    double largest = 0;
    Decoder decoder(model_, {.batch = 3, .compute = context.compute});
    for (const uint64_t seed : {1, 2, 3}) {
      const at::Tensor ids = random_ids(3, kLength, seed), truth = full_logits(*exact, ids);
      const at::Tensor full_error = full_logits(*model_, ids, context) - truth;
      largest = std::max(largest, truth.abs().max().item<double>());
      for (const int64_t prompt : {6, 8, 9}) {
        const at::Tensor cached = cached_logits(decoder, ids, prompt);
        cached_errors[prompt] += rms(cached - truth.slice(1, prompt - 1));
        full_errors[prompt] += rms(full_error.slice(1, prompt - 1));
      }
    }
    for (const auto& [prompt, error] : cached_errors) {
      EXPECT_GT(full_errors[prompt], 0);
      EXPECT_LE(error, ratio * full_errors[prompt] + floor * largest) << "prompt of " << prompt;
    }
  }

  std::shared_ptr<LanguageModel> model_ =
      filled_model<LanguageModel>(small_config({}, GetParam().second), at::kFloat);
};

class RoundingOfEvery : public Rounding {};

TEST_P(RoundingOfEvery, Float32) { expect_rounding({}, 1.5, 3e-8); }

INSTANTIATE_TEST_SUITE_P(Every, RoundingOfEvery, ::testing::ValuesIn(kinds()), test_name);

TEST_P(Rounding, Bfloat16Products) {
  nn::Context context;
  context.compute = at::kBFloat16;
  expect_rounding(context, 2.0, 0.0);
}

// As an export keeps them: matrices in bfloat16, norms and biases in float32.
TEST_P(Rounding, Bfloat16Weights) {
  for (at::Tensor& p : model_->parameters()) {
    if (p.dim() >= 2) p.set_data(p.to(at::kBFloat16));
  }
  nn::Context context;
  for (const auto type : {at::kBFloat16, at::kFloat}) {
    context.compute = type;
    expect_rounding(context, type == at::kFloat ? 1.5 : 2.0, 3e-8);
  }
}

INSTANTIATE_TEST_SUITE_P(Some, Rounding, ::testing::ValuesIn(typed_kinds()), test_name);

// One block longer than everything, blocks of one token, and a single head.
TEST(Decoder, OddSizes) {
  for (const int64_t block : {1, 5, 100}) {
    for (const char* causal : {"strict", "inclusive"}) {
      for (const char* net : {"linear", "bilinear"}) {
        models::ModelConfig config = small_config({}, {.sort_net = net, .causal = causal});
        config.decoder.block = block;
        config.heads = 1;
        config.tied = false;
        const auto model = filled_model<LanguageModel>(config);
        const at::Tensor ids = random_ids(2, 13, 3);
        Decoder decoder(model, {.batch = 2, .capacity = 13});
        expect_close(cached_logits(decoder, ids, 2), full_logits(*model, ids).slice(1, 1), 1e-12,
                     std::string(causal) + " " + net + ", block " + std::to_string(block));
      }
    }
  }
}

TEST(Decoder, LongerThanTheModelWasMadeFor) {
  const auto model =
      filled_model<LanguageModel>(small_config({}, nn::attention_preset("windowed", true)));
  const at::Tensor ids = random_ids(1, 150, 3);
  Decoder decoder(model, {.capacity = 150});
  expect_close(cached_logits(decoder, ids, 70), full_logits(*model, ids).slice(1, 69), 1e-12,
               "150 tokens");
}

TEST(Decoder, CountsItsBytes) {
  const auto bytes = [](const nn::AttentionConfig& attention, const DecoderOptions& options) {
    return Decoder(make_model<LanguageModel>(small_config({}, attention)), options).state_bytes();
  };
  // 2 layers, keys and values of width 16 for 3 * 40 tokens, float32; and the 3 lengths.
  EXPECT_EQ(bytes({.kind = "full"}, {.batch = 3, .capacity = 40}), 2 * 2 * 16 * 120 * 4 + 3 * 8);
  EXPECT_EQ(bytes({.kind = "full", .tie_kv = true}, {.batch = 3, .capacity = 40}),
            2 * 16 * 120 * 4 + 3 * 8);
  EXPECT_EQ(bytes({.kind = "full"}, {.capacity = 40, .compute = at::kBFloat16}),
            2 * 2 * 16 * 40 * 2 + 8);
  // A sorting layer adds, a slot: the pooled sum, 5 sums for 2 heads and 10 columns, the sorted
  // block and whether it is there.
  EXPECT_EQ(bytes({}, {.capacity = 40}),
            2 * (2 * 16 * 40 * 4 + 16 * 8 + 5 * 2 * 10 * 4 + 2 * 4 * 16 * 4 + 2) + 8);
}

}  // namespace
}  // namespace sinkhorn::generate
