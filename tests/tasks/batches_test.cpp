// Streams of batches: complete, deterministic, divided among readers, resumed to the bit.
#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "support.h"
#include "tasks/random.h"

namespace sinkhorn::tasks {
namespace {

TEST(Permutation, IsOne) {
  for (const uint64_t size : {1, 2, 3, 5, 16, 17, 1000, 4097}) {
    const Permutation permutation(size, 7), other(size, 8);
    std::vector<bool> seen(size);
    uint64_t same = 0;
    for (uint64_t i = 0; i < size; ++i) {
      ASSERT_LT(permutation(i), size);
      EXPECT_FALSE(seen[permutation(i)]);
      seen[permutation(i)] = true;
      same += permutation(i) == other(i);
    }
    if (size >= 1000) {
      EXPECT_LT(same, size / 50);
    }
  }
}

bool same(const Batch& a, const Batch& b) {
  return a.rows == b.rows && a.length == b.length && a.input == b.input && a.lengths == b.lengths &&
         a.target_length == b.target_length && a.target == b.target &&
         a.target_lengths == b.target_lengths && a.labels == b.labels && a.tokens == b.tokens &&
         a.units == b.units;
}

std::vector<Batch> take(BatchSource& source, int count) {
  std::vector<Batch> batches(count);
  for (Batch& batch : batches) EXPECT_TRUE(source.next(batch));
  return batches;
}

class BatchesTest : public TaskTest {
 protected:
  // Every kind of source: packed, generated and stored; by rows and by tokens.
  struct Kind {
    std::string name;
    std::shared_ptr<Task> task;
    BatchConfig batch;
  };
  std::vector<Kind> kinds() {
    write_own(200);
    write_lm(100);
    TaskConfig lm = config("lm");
    lm.length = 50;
    TaskConfig sort = config("sort");
    sort.sort_train_size = 150;
    sort.sort_test_size = 70;
    sort.sort_train_max = 20;
    sort.sort_test_max = 40;
    TaskConfig recall = config("recall");
    recall.length = 40;
    recall.recall_pairs = 4;
    recall.recall_test_size = 70;
    const std::shared_ptr<Task> language = make_task(lm), own = make_task(config("classify")),
                                sorting = make_task(sort), recalling = make_task(recall);
    return {
        {"lm rows", language, {.rows = 4}},       {"lm tokens", language, {.tokens = 120}},
        {"classify rows", own, {.rows = 8}},      {"classify tokens", own, {.tokens = 200}},
        {"sort rows", sorting, {.rows = 16}},     {"sort tokens", sorting, {.tokens = 100}},
        {"recall rows", recalling, {.rows = 16}}, {"recall tokens", recalling, {.tokens = 100}}};
  }
};

TEST_F(BatchesTest, SeedsDecide) {
  for (Kind& kind : kinds()) {
    BatchConfig other = kind.batch;
    other.seed = 2;
    const auto a = take(*kind.task->train(kind.batch), 40),
               b = take(*kind.task->train(kind.batch), 40), c = take(*kind.task->train(other), 40);
    int differing = 0;
    for (int i = 0; i < 40; ++i) {
      EXPECT_TRUE(same(a[i], b[i])) << kind.name << " batch " << i;
      differing += !same(a[i], c[i]);
    }
    EXPECT_GT(differing, 30) << kind.name;
  }
}

TEST_F(BatchesTest, SeekContinuesToTheBit) {
  for (Kind& kind : kinds()) {
    for (const bool training : {true, false}) {
      const auto open = [&] {
        return training ? kind.task->train(kind.batch) : kind.task->eval("test", kind.batch);
      };
      const auto source = open();
      Batch batch, resumed;
      for (int i = 0; i < 60; ++i) {
        const std::string position = source->position();
        const bool more = source->next(batch);
        const auto again = open();
        again->seek(position);
        ASSERT_EQ(again->next(resumed), more) << kind.name << " at " << position;
        if (!more) break;
        ASSERT_TRUE(same(batch, resumed)) << kind.name << " at " << position;
        ASSERT_EQ(again->position(), source->position());
      }
    }
  }
}

TEST_F(BatchesTest, ShapesAreBounded) {
  for (Kind& kind : kinds()) {
    for (const Batch& batch : take(*kind.task->train(kind.batch), 50)) {
      EXPECT_LE(batch.length, kind.task->info().max_length) << kind.name;
      if (kind.batch.rows > 0) {
        EXPECT_EQ(batch.rows, kind.batch.rows) << kind.name;
      }
      if (kind.batch.tokens > 0) {
        EXPECT_LE(batch.rows * batch.length, kind.batch.tokens) << kind.name;
      }
      ASSERT_EQ(batch.input.size(), static_cast<size_t>(batch.rows * batch.length));
      for (int64_t row = 0; row < batch.rows; ++row) {
        for (int64_t i = batch.lengths[row]; i < batch.length; ++i) {
          ASSERT_EQ(batch.input[row * batch.length + i], 0) << kind.name;
        }
      }
    }
  }
}

// Rows of training or evaluation, sorted, as the readers of `world` see them together.
std::multiset<std::vector<int32_t>> rows_of(Task& task, BatchConfig batch, int64_t world,
                                            int count) {
  std::multiset<std::vector<int32_t>> rows;
  batch.world = world;
  for (batch.rank = 0; batch.rank < world; ++batch.rank) {
    const auto source = count > 0 ? task.train(batch) : task.eval("test", batch);
    for (const Batch& b : count > 0 ? take(*source, count) : all_batches(*source)) {
      for (int64_t row = 0; row < b.rows; ++row) rows.insert(input_row(b, row));
    }
  }
  return rows;
}

TEST_F(BatchesTest, ReadersDivideTheExamples) {
  for (Kind& kind : kinds()) {
    if (kind.name.starts_with("lm")) continue;  // packed: below
    EXPECT_EQ(rows_of(*kind.task, kind.batch, 1, 0), rows_of(*kind.task, kind.batch, 3, 0))
        << kind.name;
  }
}

// Training by rows: what five readers see in so many batches each is what one sees in five times as
// many; by tokens batches differ in size, and no two readers see the same.
TEST_F(BatchesTest, ReadersDivideTraining) {
  for (Kind& kind : kinds()) {
    if (kind.name.starts_with("lm")) continue;
    if (kind.batch.rows > 0) {
      // One epoch of 200 examples is 25 batches of 8, of 150 lists some nine of 16.
      const int each = kind.name == "classify rows" ? 5 : 1;
      const auto whole = rows_of(*kind.task, kind.batch, 1, 5 * each);
      EXPECT_EQ(whole, rows_of(*kind.task, kind.batch, 5, each)) << kind.name;
      EXPECT_EQ(std::set(whole.begin(), whole.end()).size(), whole.size()) << kind.name;
    } else {
      const auto both = rows_of(*kind.task, kind.batch, 2, 3);
      std::multiset<std::vector<int32_t>> longer;
      for (const auto& row : both) {
        if (row.size() > 4) longer.insert(row);  // short lists may be equal by chance
      }
      EXPECT_GT(longer.size(), 2u) << kind.name;
      EXPECT_EQ(std::set(longer.begin(), longer.end()).size(), longer.size()) << kind.name;
    }
  }
}

// The sentences of a stream of targets.
std::vector<std::string> sentences(const Task& task, const std::vector<int32_t>& stream) {
  std::vector<std::string> found;
  std::vector<int32_t> one;
  for (const int32_t id : stream) {
    if (id != 2) {
      one.push_back(id);
      continue;
    }
    found.push_back(task.text(one));
    one.clear();
  }
  return found;
}

TEST_F(BatchesTest, PackingCoversAnEpochAndShiftsRight) {
  write_lm(100);
  TaskConfig c = config("lm");
  c.length = 37;
  const auto task = make_task(c);
  for (const int64_t world : {1, 3}) {
    std::map<std::string, int> seen;
    for (int64_t rank = 0; rank < world; ++rank) {
      const auto source = task->train({.rows = 3, .rank = rank, .world = world});
      std::vector<int32_t> inputs, targets;
      const size_t share = (100 - rank + world - 1) / world;
      while (sentences(*task, targets).size() < share) {
        Batch batch;
        ASSERT_TRUE(source->next(batch));
        EXPECT_EQ(batch.tokens, 3 * 37);
        EXPECT_EQ(batch.units, 3 * 37);
        inputs.insert(inputs.end(), batch.input.begin(), batch.input.end());
        targets.insert(targets.end(), batch.target.begin(), batch.target.end());
      }
      EXPECT_EQ(inputs[0], 1);
      EXPECT_TRUE(std::equal(inputs.begin() + 1, inputs.end(), targets.begin()));
      const std::vector<std::string> epoch = sentences(*task, targets);
      for (size_t i = 0; i < share; ++i) ++seen[epoch[i]];
    }
    EXPECT_EQ(seen.size(), 100u);  // each once: the counts add up to 100 as well
    EXPECT_EQ(seen.count("sentence number 99 is here ."), 1u);
  }
}

// Each of several readers packs items of its own; together they read every item once.
TEST_F(BatchesTest, ReadersDivideEvaluationOfText) {
  write_lm(60);
  std::string lines;
  for (int i = 0; i < 60; ++i) lines += "test line " + std::to_string(i) + "\n";
  write("heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050", lines);
  TaskConfig c = config("lm");
  c.length = 13;
  const auto task = make_task(c);
  std::multiset<std::string> whole, parts;
  int64_t tokens = 0;
  for (const std::string& one : sentences(*task, target_stream(*task->eval("test", {.rows = 2})))) {
    whole.insert(one);
  }
  for (int64_t rank = 0; rank < 3; ++rank) {
    const BatchConfig batch{.rows = 2, .rank = rank, .world = 3};
    for (const Batch& b : all_batches(*task->eval("test", batch))) tokens += b.tokens;
    const auto own = sentences(*task, target_stream(*task->eval("test", batch)));
    EXPECT_EQ(own.size(), 20u);
    parts.insert(own.begin(), own.end());
  }
  EXPECT_EQ(whole.size(), 60u);
  EXPECT_EQ(parts, whole);
  EXPECT_EQ(tokens, static_cast<int64_t>(lines.size()));
}

TEST_F(BatchesTest, EvaluationCoversEveryTokenOnce) {
  write_lm(5);
  TaskConfig c = config("lm");
  c.length = 7;
  const auto task = make_task(c);
  const std::string expected = "a test .\nof two lines .\n";
  const auto batches = all_batches(*task->eval("test", {.rows = 2}));
  int64_t tokens = 0, units = 0, previous = 1;
  std::string text;
  for (const Batch& batch : batches) {
    tokens += batch.tokens;
    units += batch.units;
    for (int64_t row = 0; row < batch.rows; ++row) {
      const auto input = input_row(batch, row), target = target_row(batch, row);
      for (size_t i = 0; i < target.size(); ++i) {
        EXPECT_EQ(input[i], previous);
        previous = target[i];
        text += target[i] == 2 ? '\n' : static_cast<char>(target[i] - 3);
      }
    }
  }
  EXPECT_EQ(text, expected);
  EXPECT_EQ(tokens, static_cast<int64_t>(expected.size()));
  EXPECT_EQ(units, tokens);
  EXPECT_EQ(batches.back().lengths.back(), static_cast<int32_t>(expected.size() % 7));
}

TEST_F(BatchesTest, SortedListsAreSorted) {
  TaskConfig c = config("sort");
  c.sort_symbols = 9;
  c.sort_train_max = 12;
  c.sort_test_max = 30;
  const auto task = make_task(c);
  EXPECT_EQ(task->info().vocab, 12);
  EXPECT_EQ(task->info().max_length, 31);
  std::set<int32_t> symbols, lengths;
  for (const Batch& batch : take(*task->train({.rows = 32}), 30)) {
    EXPECT_EQ(batch.length, 13);
    for (int64_t row = 0; row < batch.rows; ++row) {
      std::vector<int32_t> input = input_row(batch, row);
      lengths.insert(static_cast<int32_t>(input.size()));
      EXPECT_EQ(input.back(), 2);
      symbols.insert(input.begin(), input.end() - 1);
      std::sort(input.begin(), input.end() - 1);
      EXPECT_EQ(target_row(batch, row), input);
    }
  }
  EXPECT_EQ(symbols.size(), 9u);  // 3 to 11
  EXPECT_EQ(*symbols.begin(), 3);
  EXPECT_EQ(lengths.size(), 12u);  // 1 to 12, and the end
  EXPECT_EQ(*lengths.rbegin(), 13);
  int32_t longest = 0;
  for (const Batch& batch : all_batches(*task->eval("test", {.rows = 100}))) {
    longest = std::max(longest, *std::max_element(batch.lengths.begin(), batch.lengths.end()));
  }
  EXPECT_EQ(longest, 31);
  EXPECT_EQ(task->text(task->ids("4 0 8")), "4 0 8");
}

}  // namespace
}  // namespace sinkhorn::tasks
