// Figures against cases worked by hand.
#include "tasks/metrics.h"

#include <gtest/gtest.h>

#include <cmath>

#include "sinkhorn/error.h"

namespace sinkhorn::tasks {
namespace {

double figure(const std::string& metric, const Counts& counts, const std::string& name) {
  for (const Figure& f : figures(metric, counts)) {
    if (f.name == name) return f.value;
  }
  return std::nan("");
}

TEST(Metrics, PerplexityIsPerWord) {
  // Three pieces of probability 1/2 each make two words: (2^3)^(1/2).
  const Counts counts{.nats = 3 * std::log(2.0), .tokens = 3, .units = 2};
  EXPECT_NEAR(figures("perplexity", counts)[0].value, std::sqrt(8.0), 1e-12);
  EXPECT_EQ(figures("perplexity", counts)[0].name, "perplexity");
  EXPECT_NEAR(figure("perplexity", counts, "loss"), std::log(2.0), 1e-12);
  EXPECT_NEAR(figure("perplexity", counts, "token_perplexity"), 2.0, 1e-12);
}

TEST(Metrics, PerplexityOfNoWholeWordIsInfinite) {
  const Counts counts{.nats = 3 * std::log(2.0), .tokens = 3, .units = 0};
  EXPECT_TRUE(std::isinf(figures("perplexity", counts)[0].value));
  EXPECT_NEAR(figure("perplexity", counts, "token_perplexity"), 2.0, 1e-12);
  EXPECT_THROW(figures("perplexity", Counts{}), Error);
}

TEST(Metrics, BitsPerUnit) {
  const Counts counts{.nats = 4 * std::log(8.0), .tokens = 4, .units = 4, .correct = 1};
  for (const char* name : {"bits_per_byte", "bits_per_character", "bits_per_dim"}) {
    EXPECT_NEAR(figure(name, counts, name), 3.0, 1e-12);
  }
  EXPECT_DOUBLE_EQ(figure("bits_per_dim", counts, "token_accuracy"), 25.0);
}

TEST(Metrics, SharesOfRows) {
  const Counts classified{.nats = 2, .tokens = 100, .units = 8, .correct = 6, .rows = 8};
  EXPECT_DOUBLE_EQ(figure("accuracy", classified, "accuracy"), 75.0);
  EXPECT_DOUBLE_EQ(figure("accuracy", classified, "loss"), 0.25);
  const Counts sorted{.nats = 1,
                      .tokens = 20,
                      .units = 4,
                      .correct = 19,
                      .rows = 4,
                      .exact = 3,
                      .edits_forced = 1,
                      .edits_greedy = 5,
                      .edit_tokens = 20,
                      .greedy_tokens = 10};
  EXPECT_DOUBLE_EQ(figure("exact_match", sorted, "exact_match"), 75.0);
  EXPECT_DOUBLE_EQ(figure("exact_match", sorted, "token_accuracy"), 95.0);
  EXPECT_DOUBLE_EQ(figure("exact_match", sorted, "edit_distance_forced"), 0.05);
  EXPECT_DOUBLE_EQ(figure("exact_match", sorted, "edit_distance_greedy"), 0.5);
  EXPECT_TRUE(std::isnan(figure("accuracy", classified, "edit_distance_greedy")));
}

TEST(Metrics, RefusesWhatCannotBe) {
  EXPECT_THROW(figures("accuracy", {}), Error);
  EXPECT_THROW(figures("beauty", {.units = 1}), Error);
}

TEST(Metrics, EditDistance) {
  const auto distance = [](const std::string& a, const std::string& b) {
    return edit_distance({a.begin(), a.end()}, {b.begin(), b.end()});
  };
  EXPECT_EQ(distance("kitten", "sitting"), 3);
  EXPECT_EQ(distance("sitting", "kitten"), 3);
  EXPECT_EQ(distance("", "abc"), 3);
  EXPECT_EQ(distance("abc", ""), 3);
  EXPECT_EQ(distance("abc", "abc"), 0);
  EXPECT_EQ(distance("flaw", "lawn"), 2);
}

}  // namespace
}  // namespace sinkhorn::tasks
