// Beam search beside all sequences there are, on a model with few tokens.
#include <algorithm>
#include <cmath>

#include "generate/support.h"

namespace sinkhorn::generate {
namespace {

using namespace sinkhorn::testing;
using models::LanguageModel;
using models::Seq2Seq;

constexpr int64_t kTokens = 5, kEnd = 2, kLongest = 4;

models::ModelConfig tiny_config() {
  models::ModelConfig c = small_config({}, {});
  c.vocab = kTokens;
  return c;
}

double score(const Generated& g, double penalty) {
  return g.log_probability / std::pow((5.0 + static_cast<double>(g.ids.size())) / 6.0, penalty);
}

using Next = std::function<at::Tensor(const std::vector<int64_t>&)>;  // log-probabilities [V]

// Every sequence that ends with kEnd, where `ends` says so, or at kLongest; best first.
std::vector<Generated> enumerate(const Next& next, double penalty, const OnExtension& ends = {}) {
  std::vector<Generated> open(1), all;
  for (int64_t length = 1; length <= kLongest; ++length) {
    std::vector<Generated> longer;
    for (const Generated& g : open) {
      const at::Tensor said = next(g.ids);
      for (int64_t id = 0; id < kTokens; ++id) {
        Generated more = g;
        more.ids.push_back(id);
        more.log_probability += said[id].item<double>();
        const bool cut = id != kEnd && ends && ends(more.ids);
        more.ended = id == kEnd ? Ended::kStopToken : cut ? Ended::kCaller : Ended::kLength;
        (id == kEnd || cut || length == kLongest ? all : longer).push_back(more);
      }
    }
    open = std::move(longer);
  }
  std::sort(all.begin(), all.end(), [&](const Generated& a, const Generated& b) {
    return score(a, penalty) > score(b, penalty);
  });
  return all;
}

Next next_of(LanguageModel& model, const std::vector<int64_t>& prompt) {
  return [&model, prompt](const std::vector<int64_t>& said) {
    std::vector<int64_t> ids = prompt;
    ids.insert(ids.end(), said.begin(), said.end());
    return at::log_softmax(full_logits(model, at::tensor(ids, at::kLong).unsqueeze(0))[0][-1], 0);
  };
}

void expect_best(const std::vector<Generated>& found, const std::vector<Generated>& all) {
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].ids, all[i].ids) << i;
    EXPECT_NEAR(found[i].log_probability, all[i].log_probability, 1e-9) << i;
    EXPECT_EQ(found[i].ended, all[i].ended) << i;
  }
}

const StopOptions kStop{.max_tokens = kLongest, .stop_tokens = {kEnd}};

TEST(BeamSearch, WideEnoughFindsTheBestOfAllSequences) {
  const auto model = filled_model<LanguageModel>(tiny_config());
  const std::vector<int64_t> prompt = {1, 3, 4};
  constexpr int64_t kAll = 64;  // open prefixes of length 3
  Decoder decoder(model, {.batch = kAll});
  size_t ended = 0;
  for (const double penalty : {0.0, 0.6, 2.0, -1.0}) {
    const auto all = enumerate(next_of(*model, prompt), penalty);
    ASSERT_EQ(all.size(), 1u + 4 + 16 + 64 * 5);
    const auto found = beam_search(decoder, prompt, {kAll, penalty}, kStop);
    ASSERT_EQ(found.size(), static_cast<size_t>(kAll));
    expect_best(found, all);
    ended += static_cast<size_t>(std::count_if(found.begin(), found.end(), [](const Generated& g) {
      return g.ended == Ended::kStopToken;
    }));
  }
  EXPECT_GT(ended, 0u);
}

TEST(BeamSearch, NarrowReturnsSequencesWithTheirOwnScores) {
  const auto model = filled_model<LanguageModel>(tiny_config());
  const auto all = enumerate(next_of(*model, {1}), 0.6);
  Decoder decoder(model, {.batch = 3});
  const auto found = beam_search(decoder, {1}, {3, 0.6}, kStop);
  ASSERT_EQ(found.size(), 3u);
  for (const Generated& g : found) {
    const auto same = std::find_if(all.begin(), all.end(),
                                   [&](const Generated& other) { return other.ids == g.ids; });
    ASSERT_NE(same, all.end());
    EXPECT_NEAR(g.log_probability, same->log_probability, 1e-9);
    EXPECT_EQ(g.ended, same->ended);
  }
  EXPECT_GE(score(found[0], 0.6), score(found[1], 0.6));
  EXPECT_GE(score(found[1], 0.6), score(found[2], 0.6));
  EXPECT_NE(found[0].ids, found[1].ids);
  EXPECT_LE(score(found[0], 0.6), score(all[0], 0.6) + 1e-9);
}

TEST(BeamSearch, OfOneBeamIsGreedy) {
  for (const uint64_t seed : {1, 2, 3}) {
    const auto model = filled_model<LanguageModel>(tiny_config());
    fill_parameters(*model, 1000 * seed);
    Decoder decoder(model, {.batch = 1});
    const StopOptions stop{.max_tokens = 25, .stop_tokens = {kEnd}};
    const auto greedy = sample(decoder, {{1, 3}}, {.temperature = 0}, stop);
    const auto found = beam_search(decoder, {1, 3}, {1, 0.0}, stop);
    ASSERT_EQ(found.size(), 1u);
    EXPECT_EQ(found[0].ids, greedy[0].ids);
    EXPECT_NEAR(found[0].log_probability, greedy[0].log_probability, 1e-9);
  }
}

TEST(BeamSearch, OfASeq2SeqSearchesFromItsSource) {
  const at::NoGradGuard no_grad;
  const auto model = filled_model<Seq2Seq>(tiny_config());
  const at::Tensor source = at::tensor({3, 4, 4, 3, 2}, at::kLong).unsqueeze(0);
  const nn::Memory memory = model->encode(source, std::nullopt, {});
  const Next next = [&](const std::vector<int64_t>& said) {
    std::vector<int64_t> ids = {1};
    ids.insert(ids.end(), said.begin(), said.end());
    const at::Tensor row = at::tensor(ids, at::kLong).unsqueeze(0);
    return at::log_softmax(model->decode(row, {}, memory, {})[0][-1], 0);
  };
  Decoder decoder(model, {.batch = 64});
  decoder.read(source, {}, {0});
  expect_best(beam_search(decoder, {1}, {64, 0.6}, kStop), enumerate(next, 0.6));
}

TEST(BeamSearch, LeavesOutWhatIsNeverChosen) {
  const auto model = filled_model<LanguageModel>(tiny_config());
  Decoder decoder(model, {.batch = 64});
  StopOptions stop = kStop;
  stop.never_tokens = {0, 1};
  const auto found = beam_search(decoder, {1}, {64, 0.6}, stop);
  ASSERT_EQ(found.size(), 1u + 2 + 4 + 8 * 3);  // all there are
  auto all = enumerate(next_of(*model, {1}), 0.6);
  std::erase_if(all, [](const Generated& g) {
    return std::any_of(g.ids.begin(), g.ids.end(), [](int64_t id) { return id < 2; });
  });
  expect_best(found, all);
}

TEST(BeamSearch, EndsWhereTheCallerSays) {
  const auto model = filled_model<LanguageModel>(tiny_config());
  Decoder decoder(model, {.batch = 64});
  const OnExtension repeats = [](const std::vector<int64_t>& ids) {
    return ids.size() >= 2 && ids.back() == ids[ids.size() - 2];
  };
  const auto found = beam_search(decoder, {1}, {64, 0.6}, kStop, repeats);
  ASSERT_EQ(found.size(), 64u);
  expect_best(found, enumerate(next_of(*model, {1}), 0.6, repeats));
  EXPECT_TRUE(std::any_of(found.begin(), found.end(),
                          [](const Generated& g) { return g.ended == Ended::kCaller; }));
}

TEST(BeamSearch, EndsAtTheCapacityAndWhenInterrupted) {
  const auto model = filled_model<LanguageModel>(tiny_config());
  Decoder decoder(model, {.batch = 2, .capacity = 6});
  for (const Generated& g : beam_search(decoder, {1, 3}, {2, 0.6}, {.max_tokens = 50})) {
    EXPECT_EQ(g.ids.size(), 5u);
    EXPECT_EQ(g.ended, Ended::kLength);
  }
  const StopOptions cut{.max_tokens = 50, .interrupted = [] { return true; }};
  const auto found = beam_search(decoder, {1, 3}, {2, 0.6}, cut);
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].ids.size(), 1u);
  EXPECT_EQ(found[0].ended, Ended::kCaller);
}

TEST(BeamSearch, RefusesADecoderOfAnotherWidth) {
  const auto model = filled_model<LanguageModel>(tiny_config());
  Decoder decoder(model, {.batch = 2});
  EXPECT_NE(refusal([&] { beam_search(decoder, {1}, {3, 0.6}, kStop); }), "");
  EXPECT_NE(refusal([&] { beam_search(decoder, {1}, {0, 0.6}, kStop); }), "");
  EXPECT_NE(refusal([&] { beam_search(decoder, {1}, {2, NAN}, kStop); }), "");
  EXPECT_NE(refusal([&] { beam_search(decoder, {}, {2, 0.6}, kStop); }), "");
}

}  // namespace
}  // namespace sinkhorn::generate
