// Choosing tokens: each rule against distributions worked out by hand, draws by their frequencies.
#include "generate/sampling.h"

#include <cmath>

#include "generate/support.h"

namespace sinkhorn::generate {
namespace {

using namespace sinkhorn::testing;

// Scores of these probabilities, [1, V].
at::Tensor scores_of(const std::vector<double>& probabilities, double temperature = 1.0) {
  return at::tensor(probabilities, at::kDouble).log().mul(temperature).unsqueeze(0);
}

at::Tensor column(const std::vector<double>& values) {
  return at::tensor(values, at::kDouble).unsqueeze(1);
}

Filters filters(double temperature, double top_k, double top_p) {
  return {column({temperature}), column({top_k}), column({top_p}), top_k > 0 || top_p < 1};
}

// The shares of all tokens in what a draw chooses from, [R, V].
at::Tensor shares(const Candidates& c) {
  at::Tensor weights = c.weights.to(at::kDouble);
  weights = weights / weights.sum(-1, true);
  return c.ids.defined() ? at::zeros_like(weights).scatter(1, c.ids, weights) : weights;
}

void expect_shares(const Candidates& c, const std::vector<double>& expected) {
  expect_close(shares(c)[0], at::tensor(expected, at::kDouble), 1e-14, "shares");
  for (size_t i = 0; i < expected.size(); ++i) {
    if (expected[i] == 0) {
      EXPECT_EQ(shares(c)[0][static_cast<int64_t>(i)].item<double>(), 0) << i;
    }
  }
}

TEST(Penalty, DividesWhatIsPositiveAndMultipliesTheRest) {
  const at::Tensor scores = at::tensor({2.0, -2.0, 3.0, -3.0, 0.0}, at::kDouble).unsqueeze(0);
  const at::Tensor seen = at::tensor({1, 1, 0, 0, 1}).to(at::kBool).unsqueeze(0);
  const at::Tensor two = at::cat({scores, scores}), both = at::cat({seen, seen});
  const at::Tensor found = penalised(two, both, column({2.0, 1.0}));
  expect_same_bits(found[0], at::tensor({1.0, -4.0, 3.0, -3.0, 0.0}, at::kDouble), "2");
  expect_same_bits(found[1], scores[0], "1 is none");
}

TEST(Penalty, KeepsTheOrderOfWhatItPenalisesHoweverStrong) {
  for (const at::ScalarType type : {at::kDouble, at::kFloat}) {
    const at::Tensor scores = at::tensor({20.0, -2.0, 30.0, -3.0, 10.0}, at::kDouble).to(type);
    const at::Tensor seen = at::tensor({1, 1, 1, 1, 0}).to(at::kBool);
    for (const double penalty : {1e-300, 1e300}) {
      const at::Tensor found =
          penalised(scores.unsqueeze(0), seen.unsqueeze(0), column({penalty}))[0];
      EXPECT_TRUE(found.isfinite().all().item<bool>()) << found;
      // Less than 1 favours what was seen, above what was not.
      const std::vector<int64_t> order =
          penalty < 1 ? std::vector<int64_t>{2, 0, 4, 1, 3} : std::vector<int64_t>{4, 2, 0, 1, 3};
      expect_same_bits(found.argsort(-1, /*descending=*/true), at::tensor(order, at::kLong),
                       "order");
    }
  }
}

TEST(Candidates, KeepTheDistributionWhereNothingIsFiltered) {
  expect_shares(candidates(scores_of({.1, .4, .2, .3}), filters(1, 0, 1)), {.1, .4, .2, .3});
}

TEST(Candidates, AreRaisedToTheInverseTemperature) {
  // Squared: .01, .16, .04, .09 of .30; a root: the scores were doubled before.
  expect_shares(candidates(scores_of({.1, .4, .2, .3}), filters(.5, 0, 1)),
                {1 / 30., 16 / 30., 4 / 30., 9 / 30.});
  expect_shares(candidates(scores_of({.1, .4, .2, .3}, 2.0), filters(2, 0, 1)), {.1, .4, .2, .3});
}

TEST(Candidates, OfANearlyZeroTemperatureAreTheLikeliest) {
  for (const double temperature : {1e-9, 1e-300}) {
    for (const at::ScalarType type : {at::kDouble, at::kFloat}) {
      const at::Tensor scores = scores_of({.1, .4, .2, .3}).to(type);
      expect_shares(candidates(scores, filters(temperature, 0, 1)), {0, 1, 0, 0});
      expect_shares(candidates(scores, filters(temperature, 3, .9)), {0, 1, 0, 0});
    }
  }
}

TEST(Candidates, OfAnEndlessTemperatureAreAllAlikeButWhatIsStruckOut) {
  for (const at::ScalarType type : {at::kDouble, at::kFloat}) {
    expect_shares(candidates(scores_of({.1, 0, .6, .3}).to(type), filters(1e300, 0, 1)),
                  {1 / 3., 0, 1 / 3., 1 / 3.});
  }
}

TEST(Candidates, TopKKeepsExactlyK) {
  const at::Tensor scores = scores_of({.1, .4, .2, .3});
  expect_shares(candidates(scores, filters(1, 1, 1)), {0, 1, 0, 0});
  expect_shares(candidates(scores, filters(1, 2, 1)), {0, 4 / 7., 0, 3 / 7.});
  expect_shares(candidates(scores, filters(1, 3, 1)), {0, 4 / 9., 2 / 9., 3 / 9.});
  expect_shares(candidates(scores, filters(1, 9, 1)), {.1, .4, .2, .3});
  // Among equals the lower id comes first.
  expect_shares(candidates(scores_of({.25, .25, .25, .25}), filters(1, 2, 1)), {.5, .5, 0, 0});
}

TEST(Candidates, TopPKeepsTheFewestThatReachP) {
  const at::Tensor scores = scores_of({.1, .4, .2, .3});
  expect_shares(candidates(scores, filters(1, 0, .01)), {0, 1, 0, 0});
  expect_shares(candidates(scores, filters(1, 0, .39)), {0, 1, 0, 0});
  expect_shares(candidates(scores, filters(1, 0, .41)), {0, 4 / 7., 0, 3 / 7.});
  expect_shares(candidates(scores, filters(1, 0, .69)), {0, 4 / 7., 0, 3 / 7.});
  expect_shares(candidates(scores, filters(1, 0, .71)), {0, 4 / 9., 2 / 9., 3 / 9.});
  expect_shares(candidates(scores, filters(1, 0, .91)), {.1, .4, .2, .3});
  // Exact: two halves of a half.
  expect_shares(candidates(scores_of({.5, .25, .125, .125}), filters(1, 0, .75)),
                {2 / 3., 1 / 3., 0, 0});
}

TEST(Candidates, TopPIsTakenOfWhatTopKAndTemperatureLeave) {
  // Of the best two, .4 / .7 and .3 / .7, the first reaches half alone; of all it does not.
  const at::Tensor scores = scores_of({.1, .4, .2, .3});
  expect_shares(candidates(scores, filters(1, 2, .5)), {0, 1, 0, 0});
  expect_shares(candidates(scores, filters(1, 0, .5)), {0, 4 / 7., 0, 3 / 7.});
  // Squared, .16 / .30 reaches half alone.
  expect_shares(candidates(scores, filters(.5, 0, .5)), {0, 1, 0, 0});
}

TEST(Candidates, OfRowsAreTheirOwn) {
  const at::Tensor row = scores_of({.1, .4, .2, .3});
  const Filters all{column({1, .5, 1, 1}), column({0, 0, 2, 0}), column({1, 1, 1, .3}), true};
  const at::Tensor found = shares(candidates(row.expand({4, -1}), all));
  const std::vector<Filters> alone = {filters(1, 0, 1), filters(.5, 0, 1), filters(1, 2, 1),
                                      filters(1, 0, .3)};
  for (int64_t r = 0; r < 4; ++r) {
    expect_close(found[r], shares(candidates(row, alone[static_cast<size_t>(r)]))[0], 1e-14, "row");
  }
}

TEST(Draw, FallsWhereThePointLies) {
  const std::vector<double> points = {0, .0999, .1001, .4999, .5001, .6999, .7001, 1 - 0x1p-53};
  const std::vector<int64_t> expected = {0, 0, 1, 1, 2, 2, 3, 3};
  const at::Tensor scores = scores_of({.1, .4, .2, .3}).expand({8, -1});
  const Filters none{column({1}), column({0}), column({1}), false};
  expect_same_bits(draw(candidates(scores, none), column(points)), at::tensor(expected, at::kLong),
                   "tokens");
  // What has no weight is not drawn, first and last included.
  const at::Tensor some = scores_of({0, .5, 0, .5, 0}).expand({8, -1});
  const at::Tensor ids = draw(candidates(some, none), column(points));
  expect_same_bits(ids, at::tensor({1, 1, 1, 1, 3, 3, 3, 3}, at::kLong), "gaps");
}

double chi_square(const std::vector<int64_t>& counts, const std::vector<double>& shares) {
  double total = 0, sum = 0;
  for (const int64_t count : counts) total += static_cast<double>(count);
  for (size_t i = 0; i < counts.size(); ++i) {
    const double expected = total * shares[i], off = static_cast<double>(counts[i]) - expected;
    sum += off * off / expected;
  }
  return sum;
}

TEST(UniformNumbers, AreEvenlySpreadOverSeedsStreamsAndPositions) {
  constexpr double kCritical = 27.9;  // 9 degrees of freedom, one in a thousand
  for (int axis = 0; axis < 3; ++axis) {
    std::vector<int64_t> counts(10, 0), pairs(10, 0);
    double before = 0;
    for (uint64_t i = 0; i < 20000; ++i) {
      const uint64_t at[3] = {axis == 0 ? i : 5, axis == 1 ? i : 6, axis == 2 ? i : 7};
      const double u = uniform_number(at[0], at[1], at[2]);
      ASSERT_TRUE(u >= 0 && u < 1);
      ++counts[static_cast<size_t>(10 * u)];
      ++pairs[static_cast<size_t>(10 * std::fmod(u + before, 1.0))];
      before = u;
    }
    EXPECT_LT(chi_square(counts, std::vector<double>(10, .1)), kCritical) << axis;
    EXPECT_LT(chi_square(pairs, std::vector<double>(10, .1)), kCritical) << axis;
  }
}

std::vector<int64_t> ids_of(const std::vector<Choice>& choices) {
  std::vector<int64_t> ids;
  for (const Choice& choice : choices) ids.push_back(choice.id);
  return ids;
}

TEST(Sampler, DrawsAsOftenAsTheDistributionSays) {
  const std::vector<double> probabilities = {.05, .4, .2, .25, .1};
  constexpr int64_t kRows = 500, kRounds = 40;
  Sampler sampler(kRows, 5, at::kCPU);
  for (int64_t r = 0; r < kRows; ++r) {
    sampler.begin(r, {.seed = 9}, static_cast<uint64_t>(r), {});
  }
  std::vector<int64_t> slots(kRows);
  for (int64_t r = 0; r < kRows; ++r) slots[static_cast<size_t>(r)] = r;
  std::vector<int64_t> counts(5, 0);
  for (int64_t i = 0; i < kRounds; ++i) {
    const auto choices = sampler.choose(scores_of(probabilities).expand({kRows, -1}), slots);
    for (const Choice& choice : choices) {
      const size_t id = static_cast<size_t>(choice.id);
      ++counts[id];
      ASSERT_NEAR(choice.log_probability, std::log(probabilities[id]), 1e-12);
    }
  }
  EXPECT_LT(chi_square(counts, probabilities), 18.5);  // 4 degrees of freedom, one in a thousand
}

TEST(Sampler, DrawsTheSameWhateverElseIsInTheBatch) {
  const SamplingOptions mine{.temperature = .8, .top_k = 7, .top_p = .9, .seed = 3};
  const auto logits = [](int64_t i) { return randn({1, kVocab}, 50 + static_cast<uint64_t>(i)); };
  Sampler alone(1, kVocab, at::kCPU), among(4, kVocab, at::kCPU), other(1, kVocab, at::kCPU);
  Sampler untruncated(1, kVocab, at::kCPU);
  untruncated.begin(0, {.repetition_penalty = 3.0, .seed = 8}, 1, {1, 2});
  alone.begin(0, mine, 6, {1});
  other.begin(0, {.temperature = .8, .top_k = 7, .top_p = .9, .seed = 4}, 6, {1});
  among.begin(0, {.temperature = 0}, 0, {1});
  among.begin(1, {.repetition_penalty = 3.0, .seed = 8}, 1, {1, 2});
  among.begin(3, mine, 6, {1});
  int64_t differ = 0;
  for (int64_t i = 0; i < 60; ++i) {
    const at::Tensor batch = at::cat({randn({2, kVocab}, 200 + static_cast<uint64_t>(i)),
                                      at::full({1, kVocab}, NAN, at::kDouble), logits(i)});
    const auto expected = alone.choose(logits(i), {0});
    const auto found = among.choose(batch, {0, 1, -1, 3});
    EXPECT_EQ(found[3].id, expected[0].id);
    EXPECT_EQ(found[3].log_probability, expected[0].log_probability);
    EXPECT_EQ(found[0].id, batch[0].argmax().item<int64_t>());
    EXPECT_EQ(found[1].id, untruncated.choose(batch.slice(0, 1, 2), {0})[0].id);
    EXPECT_EQ(found[2].id, -1);
    differ += other.choose(logits(i), {0})[0].id != expected[0].id;
  }
  EXPECT_GT(differ, 10);  // another seed is another text
}

TEST(Sampler, PenalisesThePromptAndWhatWasSaid) {
  Sampler sampler(2, 4, at::kCPU);
  sampler.begin(0, {.temperature = 0, .repetition_penalty = 4.0}, 0, {0, 0});
  sampler.begin(1, {.temperature = 0}, 0, {0});
  const at::Tensor logits = at::tensor({4.0, 3.0, 2.0, -1.0}, at::kFloat).expand({2, -1});
  std::vector<int64_t> said;
  for (int i = 0; i < 4; ++i) {
    const auto ids = ids_of(sampler.choose(logits, {0, 1}));
    said.push_back(ids[0]);
    EXPECT_EQ(ids[1], 0);
  }
  // 0 counts 1 from the start; then 1 counts 3/4 and 2 counts 1/2; 0 is best again.
  EXPECT_EQ(said, (std::vector<int64_t>{1, 2, 0, 0}));
  sampler.begin(0, {.temperature = 0, .repetition_penalty = 4.0}, 0, {});
  EXPECT_EQ(sampler.choose(logits, {0, -1})[0].id, 0);  // a new sequence has said nothing
}

TEST(Sampler, OfTinyOptionsIsGreedy) {
  const at::Tensor logits = randn({3, kVocab}, 77).to(at::kFloat);
  Sampler sampler(3, kVocab, at::kCPU, {0});
  sampler.begin(0, {.temperature = 0}, 0, {});
  sampler.begin(1, {.temperature = 1e-300}, 1, {});
  sampler.begin(2, {.temperature = 1e-300, .top_k = 5, .top_p = .5}, 2, {});
  const at::Tensor best = logits.slice(1, 1).argmax(-1) + 1;
  const auto ids = ids_of(sampler.choose(logits, {0, 1, 2}));
  expect_same_bits(at::tensor(ids, at::kLong), best, "tokens");
}

TEST(Sampler, NeverChoosesWhatItMustNot) {
  Sampler sampler(2, 4, at::kCPU, {0, 2});
  sampler.begin(0, {.temperature = 0}, 0, {});
  sampler.begin(1, {.temperature = 5}, 1, {});
  const at::Tensor logits = at::tensor({9.0, 1.0, 8.0, 2.0}, at::kDouble).expand({2, -1});
  for (int i = 0; i < 50; ++i) {
    const auto choices = sampler.choose(logits, {0, 1});
    EXPECT_EQ(choices[0].id, 3);
    EXPECT_EQ(choices[1].id % 2, 1);
    EXPECT_NEAR(choices[0].log_probability, at::log_softmax(logits[0], 0)[3].item<double>(), 1e-12);
  }
  EXPECT_NE(refusal([] { Sampler(1, 4, at::kCPU, {4}); }).find("token 4"), std::string::npos);
}

TEST(Sampler, MarksTheRowsThatAreNoNumbers) {
  const std::vector<double> bad[] = {
      {NAN, NAN, NAN, NAN}, {1.0, NAN, 0.0, 2.0}, {1.0, INFINITY, 0.0, 2.0}};
  for (const auto& row : bad) {
    Sampler alone(1, 4, at::kCPU), beside(3, 4, at::kCPU);
    alone.begin(0, {.seed = 3}, 0, {});
    for (int64_t slot = 0; slot < 3; ++slot) beside.begin(slot, {.seed = 3}, 0, {});
    const at::Tensor good = at::tensor({1.0, 3.0, 2.0, 2.5}, at::kDouble);
    const at::Tensor batch = at::stack({good, at::tensor(row, at::kDouble), good});
    for (int i = 0; i < 20; ++i) {
      const int64_t expected = alone.choose(good.unsqueeze(0), {0})[0].id;
      const auto found = beside.choose(batch, {0, 1, 2});
      EXPECT_THROW(check_score(found[1].log_probability), Error);
      for (const size_t r : {size_t{0}, size_t{2}}) {
        EXPECT_EQ(found[r].id, expected);
        EXPECT_NO_THROW(check_score(found[r].log_probability));
      }
    }
  }
  Sampler sampler(1, 4, at::kCPU);
  EXPECT_THROW(sampler.choose(at::zeros({2, 4}), {0}), c10::ValueError);
}

TEST(SamplingOptions, ThatMakeNoSenseAreRefused) {
  const auto message = [](const SamplingOptions& o) { return refusal([&] { check_sampling(o); }); };
  EXPECT_EQ(message({}), "");
  EXPECT_EQ(message({.temperature = -1}), "temperature is -1; it must be 0 (greedy) or more");
  EXPECT_EQ(message({.temperature = NAN}), "temperature is nan; it must be 0 (greedy) or more");
  EXPECT_EQ(message({.top_k = -1}), "top_k is -1; it must be 0 (all) or more");
  EXPECT_EQ(message({.top_p = 0}), "top_p is 0; it must be above 0 and at most 1");
  EXPECT_EQ(message({.top_p = 1.5}), "top_p is 1.5; it must be above 0 and at most 1");
  EXPECT_EQ(message({.repetition_penalty = 0}),
            "repetition_penalty is 0; it must be above 0; 1 is none");
}

}  // namespace
}  // namespace sinkhorn::generate
