// Recall: every answer follows from a pair far back and from nothing else.
#include <algorithm>
#include <map>
#include <set>

#include "support.h"

namespace sinkhorn::tasks {
namespace {

class RecallTest : public TaskTest {
 protected:
  RecallTest() : config_(config("recall")) {
    config_.length = 60;
    config_.recall_pairs = 5;
    config_.recall_queries = 3;
    config_.recall_distance = 21;
    config_.recall_keys = 8;
    config_.recall_values = 7;
    config_.recall_fillers = 2;
    config_.recall_test_size = 70;
  }

  bool is_key(int32_t id) const { return id >= 5 && id < 13; }
  bool is_value(int32_t id) const { return id >= 13 && id < 20; }

  std::string error() const {
    return message_of([&] { make_task(config_); });
  }

  TaskConfig config_;
};

struct Sequence {
  std::vector<int32_t> tokens;         // what is read behind the begin token
  std::map<int64_t, int32_t> answers;  // by their places
};

Sequence sequence_of(const Batch& batch, int64_t row) {
  const std::vector<int32_t> input = input_row(batch, row), target = target_row(batch, row);
  Sequence sequence{{input.begin() + 1, input.end()}, {}};
  for (size_t t = 0; t < target.size(); ++t) {
    if (target[t] != 0) sequence.answers[static_cast<int64_t>(t)] = target[t];
  }
  EXPECT_EQ(input[0], 1);
  return sequence;
}

std::vector<Sequence> take(BatchSource& source, int count) {
  std::vector<Sequence> all;
  for (Batch batch; count-- > 0 && source.next(batch);) {
    for (int64_t row = 0; row < batch.rows; ++row) all.push_back(sequence_of(batch, row));
  }
  return all;
}

TEST_F(RecallTest, AnswersFollowFromPairsFarBack) {
  const auto task = make_task(config_);
  std::set<int64_t> pair_places, query_places;
  for (const Sequence& s : take(*task->train({.rows = 16}), 60)) {
    std::map<int32_t, int64_t> pairs;  // by key
    std::set<int32_t> asked;
    ASSERT_EQ(s.answers.size(), 3u);
    for (int64_t t = 0; t < 59; ++t) {
      if (!is_key(s.tokens[t])) continue;
      if (t < 30) {
        EXPECT_TRUE(pairs.emplace(s.tokens[t], t).second) << "a key twice";
        EXPECT_TRUE(is_value(s.tokens[t + 1]));
        pair_places.insert(t);
        continue;
      }
      ASSERT_TRUE(pairs.count(s.tokens[t])) << "a key that was not told";
      const int64_t pair = pairs[s.tokens[t]];
      EXPECT_TRUE(asked.insert(s.tokens[t]).second) << "a key asked twice";
      EXPECT_GE(t - (pair + 2), 21);
      ASSERT_TRUE(s.answers.count(t + 1));
      EXPECT_EQ(s.answers.at(t + 1), s.tokens[pair + 1]);
      query_places.insert(t);
    }
    EXPECT_EQ(pairs.size(), 5u);
    EXPECT_EQ(asked.size(), 3u);
    EXPECT_EQ(std::count_if(s.tokens.begin(), s.tokens.end(),
                            [&](int32_t id) { return !is_key(id) && !is_value(id); }),
              59 - 2 * 5 - 3);  // no answer is shown
  }
  // Of (60 - 21) / 2 = 19 tokens each, all but the last begin a pair.
  EXPECT_EQ(pair_places.size(), 18u);
  EXPECT_EQ(query_places.size(), 18u);
  EXPECT_EQ(*pair_places.begin(), 0);
  EXPECT_EQ(*query_places.begin(), 41);
}

TEST_F(RecallTest, TokensAreDrawnEvenly) {
  const auto task = make_task(config_);
  EXPECT_EQ(task->info().vocab, 3 + 2 + 8 + 7);
  EXPECT_EQ(task->info().max_length, 60);
  EXPECT_EQ(task->info().model, ModelKind::kLanguageModel);
  EXPECT_EQ(task->info().metric, "accuracy");
  std::map<int32_t, int> answers, keys;
  const std::vector<Sequence> all = take(*task->train({.rows = 100}), 20);
  for (const Sequence& s : all) {
    for (const auto& [t, value] : s.answers) {
      ++answers[value];
      ++keys[s.tokens[t - 1]];
    }
  }
  for (const auto& [id, count] : answers) EXPECT_NEAR(count, 6000 / 7, 120) << id;
  for (const auto& [id, count] : keys) EXPECT_NEAR(count, 6000 / 8, 120) << id;
  EXPECT_EQ(answers.size(), 7u);
  EXPECT_EQ(keys.size(), 8u);
}

TEST_F(RecallTest, OnlyAnswersCount) {
  const auto task = make_task(config_);
  const auto source = task->eval("test", {.rows = 32});
  int64_t units = 0, tokens = 0;
  for (const Batch& batch : all_batches(*source)) {
    EXPECT_EQ(batch.length, 60);
    EXPECT_EQ(batch.target_length, 60);
    EXPECT_EQ(batch.target_lengths, batch.lengths);
    EXPECT_EQ(batch.units, batch.rows * 3);
    EXPECT_EQ(std::count(batch.target.begin(), batch.target.end(), 0), batch.rows * 57);
    units += batch.units;
    tokens += batch.tokens;
  }
  EXPECT_EQ(units, 70 * 3);
  EXPECT_EQ(tokens, 70 * 60);
}

TEST_F(RecallTest, SplitsAndSeedsDiffer) {
  const auto task = make_task(config_);
  std::set<std::vector<int32_t>> seen;
  size_t count = 0;
  const auto add = [&](BatchSource& source) {
    for (const Sequence& s : take(source, 5)) {
      seen.insert(s.tokens);
      ++count;
    }
  };
  for (const uint64_t seed : {1, 2}) add(*task->train({.rows = 14, .seed = seed}));
  add(*task->train({.rows = 14, .rank = 1, .world = 2}));
  add(*task->eval("valid", {.rows = 14}));
  add(*task->eval("test", {.rows = 14}));
  EXPECT_EQ(count, 350u);
  // Half of what the second of two readers takes, the one reader takes as well.
  EXPECT_EQ(seen.size(), 350u - 35u);
  const auto one = take(*task->eval("test", {.rows = 70, .seed = 1}), 1),
             two = take(*task->eval("test", {.rows = 70, .seed = 2}), 1);
  for (size_t i = 0; i < one.size(); ++i) EXPECT_EQ(one[i].tokens, two[i].tokens);
}

TEST_F(RecallTest, DefaultsReachHalfBack) {
  const auto task = make_task(config("recall"));
  EXPECT_EQ(task->info().max_length, 1024);
  for (const Sequence& s : take(*task->train({.rows = 4}), 10)) {
    EXPECT_EQ(s.answers.size(), 16u);
    for (const auto& [t, value] : s.answers) {
      const auto first = std::find(s.tokens.begin(), s.tokens.end(), s.tokens[t - 1]);
      EXPECT_GT(t - 1 - (first - s.tokens.begin()), 512);
      EXPECT_EQ(*(first + 1), value);
    }
  }
  EXPECT_HAS(task->info().data_note, "generated: 16 pairs, 16 of them asked at least 512 tokens");
}

TEST_F(RecallTest, RoomForNothingElseIsEnough) {
  config_.length = 41;
  config_.recall_queries = 0;
  const auto task = make_task(config_);  // 21 and twice 5 pairs
  for (const Sequence& s : take(*task->train({.rows = 4}), 3)) {
    std::vector<int64_t> places;
    for (const auto& answer : s.answers) places.push_back(answer.first);
    EXPECT_EQ(places, (std::vector<int64_t>{32, 34, 36, 38, 40}));
  }
}

TEST_F(RecallTest, TextIsReadBack) {
  const auto task = make_task(config_);
  EXPECT_EQ(task->ids("f1 k0 v6"), (std::vector<int32_t>{4, 5, 19}));
  EXPECT_EQ(task->text({1, 4, 5, 19, 0}), "f1 k0 v6");
  for (const char* word : {"k8", "x1", "k", "v-1", "k1v", "7"}) {
    EXPECT_HAS(message_of([&] { task->ids(word); }),
               "'" + std::string(word) + "'; expected f0 to f1, k0 to k7, v0 to v6");
  }
}

TEST_F(RecallTest, NonsenseIsRefused) {
  const TaskConfig good = config_;
  const auto with = [&](int64_t TaskConfig::* key, int64_t value) {
    config_ = good;
    config_.*key = value;
    EXPECT_THROW(make_task(config_), UsageError);
    return error();
  };
  EXPECT_HAS(with(&TaskConfig::recall_pairs, 0), "task.recall_pairs: 0; expected 1 to");
  EXPECT_HAS(with(&TaskConfig::recall_values, -1), "task.recall_values: -1; expected 1 to");
  EXPECT_HAS(with(&TaskConfig::recall_fillers, 0), "task.recall_fillers: 0; expected 1 to");
  EXPECT_HAS(with(&TaskConfig::recall_test_size, 0), "task.recall_test_size: 0; expected 1 to");
  EXPECT_HAS(with(&TaskConfig::length, -1), "task.length: -1; expected 1 to");
  EXPECT_HAS(with(&TaskConfig::recall_queries, 6),
             "task.recall_queries: 6; expected 1 to 5, for task.recall_pairs");
  EXPECT_HAS(with(&TaskConfig::recall_keys, 4),
             "task.recall_keys: 4; expected 5 or more: one for each of task.recall_pairs");
  EXPECT_HAS(with(&TaskConfig::recall_distance, 41),
             "task.recall_distance: 41; expected 1 to 40: 5 pairs and their queries take 20 of the "
             "60 tokens");
  EXPECT_HAS(with(&TaskConfig::length, 20), "expected fewer task.recall_pairs: 5 pairs");
  EXPECT_HAS(check_data(good).lines[0], "recall needs no data: its sequences are generated");
  EXPECT_TRUE(check_data(good).complete);
}

}  // namespace
}  // namespace sinkhorn::tasks
