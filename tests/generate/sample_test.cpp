// Prompts continued by a decoder, beside the same done by full passes.
#include "generate/support.h"

namespace sinkhorn::generate {
namespace {

using namespace sinkhorn::testing;
using models::LanguageModel;
using models::Seq2Seq;
using Prompts = std::vector<std::vector<int64_t>>;

std::shared_ptr<LanguageModel> small_model() {
  return filled_model<LanguageModel>(small_config({}, {}));
}

// Logits after a sequence, [V].
at::Tensor after(LanguageModel& model, const std::vector<int64_t>& ids) {
  return full_logits(model, at::tensor(ids, at::kLong).unsqueeze(0))[0][-1];
}

double log_probability(LanguageModel& model, const std::vector<int64_t>& prompt,
                       const std::vector<int64_t>& said) {
  std::vector<int64_t> all = prompt;
  double sum = 0;
  for (const int64_t id : said) {
    sum += at::log_softmax(after(model, all), 0)[id].item<double>();
    all.push_back(id);
  }
  return sum;
}

TEST(Sample, GreedyIsArgmaxAfterArgmax) {
  const auto model = small_model();
  const Prompts prompts = {{1}, {1, 4, 5, 6}, {1, 3, 3, 7, 8, 9, 10, 4, 5}};
  Decoder decoder(model, {.batch = 4});  // a slot is left over
  const auto made = sample(decoder, prompts, {.temperature = 0}, {.max_tokens = 12});
  ASSERT_EQ(made.size(), 3u);
  for (size_t r = 0; r < 3; ++r) {
    std::vector<int64_t> all = prompts[r], said;
    for (int i = 0; i < 12; ++i) {
      said.push_back(after(*model, all).argmax().item<int64_t>());
      all.push_back(said.back());
    }
    EXPECT_EQ(made[r].ids, said) << r;
    EXPECT_EQ(made[r].ended, Ended::kLength);
    EXPECT_NEAR(made[r].log_probability, log_probability(*model, prompts[r], said), 1e-9);
  }
}

TEST(Sample, IsTheSameOfTheSameSeedWhateverElseIsInTheBatch) {
  const auto model = small_model();
  Decoder decoder(model, {.batch = 3});
  const SamplingOptions sampling{.temperature = 1.5, .seed = 5};
  const StopOptions stop{.max_tokens = 20};
  const auto first = sample(decoder, {{1}, {1, 4, 5}, {1, 6}}, sampling, stop);
  const auto again = sample(decoder, {{1}, {1, 4, 5}, {1, 6}}, sampling, stop);
  const auto others = sample(decoder, {{1, 9, 9}, {1, 4, 5}, {8}}, sampling, stop);
  for (size_t r = 0; r < 3; ++r) EXPECT_EQ(first[r].ids, again[r].ids);
  EXPECT_EQ(first[1].ids, others[1].ids);
  EXPECT_NEAR(first[1].log_probability, log_probability(*model, {1, 4, 5}, first[1].ids), 1e-9);
  // Rows of one prompt differ, and so do seeds.
  const auto rows = sample(decoder, {{1}, {1}, {1}}, sampling, stop);
  EXPECT_EQ(rows[0].ids, first[0].ids);
  EXPECT_NE(rows[0].ids, rows[1].ids);
  EXPECT_NE(sample(decoder, {{1}}, {.temperature = 1.5, .seed = 6}, stop)[0].ids, first[0].ids);
}

// Row by row the same tokens. Their probabilities are those of products of other sizes, which round
// otherwise.
void expect_equal(const std::vector<Generated>& a, const std::vector<Generated>& b,
                  const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (size_t r = 0; r < a.size(); ++r) {
    EXPECT_EQ(a[r].ids, b[r].ids) << what << ", row " << r;
    EXPECT_NEAR(a[r].log_probability, b[r].log_probability, 1e-3) << what << ", row " << r;
    EXPECT_EQ(a[r].ended, b[r].ended) << what << ", row " << r;
  }
}

TEST(SamplePrompt, EqualsSamplesOfAsManyEqualPrompts) {
  const std::vector<NamedAttention> kinds = {{"default", {}},
                                             {"windowed", nn::attention_preset("windowed", true)},
                                             {"paper", nn::attention_preset("paper", true)},
                                             {"tied mixture", {.kind = "mixture", .tie_kv = true}},
                                             {"full", {.kind = "full"}},
                                             {"sparse", {.kind = "sparse"}}};
  const SamplingOptions sampling{.temperature = 1.3, .repetition_penalty = 1.1, .seed = 3};
  const StopOptions stop{.max_tokens = 20, .stop_tokens = {2}};
  for (const auto& [name, attention] : kinds) {
    for (const auto type : {at::kFloat, at::kDouble}) {
      models::ModelConfig config = small_config({}, attention);
      config.width = config.ff_width = 96;  // products of more than one tile
      const auto model = filled_model<LanguageModel>(config, type);
      Decoder decoder(model, {.batch = 6});
      for (const int64_t length : {1, 7, 8, 33}) {
        const at::Tensor ids = random_ids(1, length, 9);
        const std::vector<int64_t> prompt(ids.data_ptr<int64_t>(),
                                          ids.data_ptr<int64_t>() + length);
        const auto expected = sample(decoder, Prompts(5, prompt), sampling, stop);
        expect_equal(sample_prompt(decoder, prompt, 5, sampling, stop), expected,
                     name + ", prompt of " + std::to_string(length));
        EXPECT_NE(expected[0].ids, expected[1].ids);
      }
    }
  }
}

TEST(SamplePrompt, RefusesWhatSampleDoes) {
  Decoder decoder(small_model(), {.batch = 2});
  EXPECT_NE(refusal([&] { sample_prompt(decoder, {1}, 3, {}, {}); }), "");
  EXPECT_NE(refusal([&] { sample_prompt(decoder, {}, 2, {}, {}); }), "");
  EXPECT_NE(refusal([&] { sample_prompt(decoder, {1}, 2, {.top_p = 2}, {}); }), "");
  EXPECT_TRUE(sample_prompt(decoder, {1}, 0, {}, {}).empty());
}

TEST(SamplePrompt, OfASeq2SeqReadsItsSourceOnce) {
  const auto model = filled_model<Seq2Seq>(small_config({}, {}));
  const at::Tensor source = random_ids(1, 9, 2);
  const SamplingOptions sampling{.temperature = 1.3, .seed = 3};
  const StopOptions stop{.max_tokens = 15, .stop_tokens = {2}};
  Decoder each(model, {.batch = 3}), once(model, {.batch = 3});
  each.read(source.repeat({3, 1}));
  once.read(random_ids(3, 12, 4));  // of sequences before
  once.read(source, {}, {0});
  expect_equal(sample_prompt(once, {1, 4}, 3, sampling, stop),
               sample(each, Prompts(3, {1, 4}), sampling, stop), "Seq2Seq");
}

TEST(Sample, EndsBehindAStopToken) {
  const auto model = small_model();
  Decoder decoder(model, {.batch = 8});
  const Prompts prompts(8, {1});
  const SamplingOptions hot{.temperature = 3};
  const auto free = sample(decoder, prompts, hot, {.max_tokens = 30});
  const auto made = sample(decoder, prompts, hot, {.max_tokens = 30, .stop_tokens = {2, 7}});
  int64_t stopped = 0;
  for (size_t r = 0; r < 8; ++r) {
    const auto& ids = free[r].ids;
    auto end = std::find_if(ids.begin(), ids.end(), [](int64_t id) { return id == 2 || id == 7; });
    const bool found = end != ids.end();
    stopped += found;
    EXPECT_EQ(made[r].ids, std::vector<int64_t>(ids.begin(), found ? end + 1 : end));
    EXPECT_EQ(made[r].ended, found ? Ended::kStopToken : Ended::kLength);
  }
  EXPECT_GT(stopped, 0);
}

TEST(Sample, GoesOnAsFarAsTheCapacityReaches) {
  const auto model = small_model();
  Decoder decoder(model, {.batch = 2, .capacity = 10});
  const auto made = sample(decoder, {{1, 4, 5}, {1}}, {}, {.max_tokens = 100});
  // The last token is said, and need not be held.
  EXPECT_EQ(made[0].ids.size(), 8u);
  EXPECT_EQ(made[1].ids.size(), 10u);
  EXPECT_EQ(made[0].ended, Ended::kLength);
}

TEST(Sample, IsEndedByTheCallerAndByAnInterruption) {
  const auto model = small_model();
  Decoder decoder(model, {.batch = 2});
  std::vector<int64_t> seen;
  const auto made =
      sample(decoder, {{1}, {1}}, {}, {.max_tokens = 9}, [&](int64_t row, int64_t id) {
        if (row == 0) seen.push_back(id);
        return row == 1 || seen.size() < 4;
      });
  EXPECT_EQ(made[0].ids, seen);
  EXPECT_EQ(made[0].ids.size(), 4u);
  EXPECT_EQ(made[0].ended, Ended::kCaller);
  EXPECT_EQ(made[1].ids.size(), 9u);
  EXPECT_EQ(made[1].ended, Ended::kLength);
  int64_t asked = 0;
  const auto cut =
      sample(decoder, {{1}}, {}, {.max_tokens = 9, .interrupted = [&] { return ++asked == 3; }});
  EXPECT_EQ(cut[0].ids.size(), 3u);
  EXPECT_EQ(cut[0].ended, Ended::kCaller);
}

TEST(Sample, RefusesTooManyPromptsAndEmptyOnes) {
  const auto model = small_model();
  Decoder decoder(model, {.batch = 1});
  EXPECT_NE(refusal([&] { sample(decoder, {{1}, {1}}, {}, {}); }), "");
  EXPECT_NE(refusal([&] { sample(decoder, {{}}, {}, {}); }), "");
  EXPECT_NE(refusal([&] { sample(decoder, {{1}}, {.top_p = 2}, {}); }), "");
}

TEST(Sample, OfASeq2SeqReadsItsSource) {
  const at::NoGradGuard no_grad;
  const auto model = filled_model<Seq2Seq>(small_config({}, {}));
  const at::Tensor sources = random_ids(3, 9, 2), mask = ragged_mask({9, 4, 1}, 9);
  Decoder decoder(model, {.batch = 3});
  decoder.read(sources, mask);
  const auto made =
      sample(decoder, Prompts(3, {1}), {.temperature = 0}, {.max_tokens = 15, .stop_tokens = {2}});
  for (int64_t r = 0; r < 3; ++r) {
    const int64_t length = mask[r].sum().item<int64_t>();
    const nn::Memory memory =
        model->encode(sources.slice(0, r, r + 1).slice(1, 0, length), std::nullopt, {});
    std::vector<int64_t> all = {1};
    while (all.size() <= 15 && all.back() != 2) {
      const at::Tensor ids = at::tensor(all, at::kLong).unsqueeze(0);
      all.push_back(model->decode(ids, {}, memory, {})[0][-1].argmax().item<int64_t>());
    }
    EXPECT_EQ(made[static_cast<size_t>(r)].ids, std::vector<int64_t>(all.begin() + 1, all.end()));
  }
}

}  // namespace
}  // namespace sinkhorn::generate
