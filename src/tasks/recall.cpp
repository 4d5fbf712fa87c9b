// Recall: what value stood behind this key, many blocks back? Generated, for language models.
//
//   k7 v3 .. k2 v9 .. .. k5 v1 | .. .. .. .. .. .. .. .. | .. k2 .. .. k7 .. .. k5 .. ..
//   pairs                        at least `distance`           v9       v3       v1
//
// A sequence of L tokens has an early and a late part of (L - distance) / 2 tokens each. Pairs of a
// key and a value lie in the early part, queries (the key of a pair) in the late one; every way to
// place them is equally likely, and all else is filler. The keys of a sequence differ, and none is
// asked twice. The target behind a query is its value; all other targets are 0. Answers are not
// shown: filler stands in their place, since whoever knows which values were told could strike out
// those already given and be right far more often without looking up a single key.
#include <algorithm>
#include <charconv>
#include <sstream>

#include "sinkhorn/error.h"
#include "tasks/dataset.h"
#include "tasks/padded.h"
#include "tasks/random.h"

namespace sinkhorn::tasks {
namespace {

constexpr int64_t kDefaultLength = 1024;
constexpr int64_t kTrainSize = int64_t{1} << 40;  // more than is ever taken: none comes twice

struct Shape {
  int64_t length;
  int64_t part;  // tokens that pairs, or queries, are placed in
  int64_t pairs, queries;
  int64_t fillers, keys, values;  // different tokens; ids in this order

  int64_t first_key() const { return kFirstByte + fillers; }
  int64_t first_value() const { return first_key() + keys; }
  int64_t vocab() const { return first_value() + values; }
};

// Example i is a function of the split and i alone; the seed decides which i training takes when.
class RecallExamples final : public Examples {
 public:
  RecallExamples(const Shape& shape, Split split, int64_t size)
      : shape_(shape), split_(split), size_(size) {}

  int64_t size() const override { return size_; }
  int64_t length(int64_t) const override { return shape_.length; }
  int64_t padded_length(int64_t) const override { return shape_.length; }

  void fill(int64_t example, Batch& batch, int64_t row) const override {
    batch.target_length = batch.length;
    batch.target.resize(batch.input.size(), kPad);
    batch.target_lengths.resize(batch.rows);
    std::vector<int32_t> tokens;
    std::vector<Answer> answers;
    generate(example, tokens, answers);
    int32_t* input = batch.input.data() + row * batch.length;
    int32_t* target = batch.target.data() + row * batch.length;
    input[0] = kBegin;
    std::copy(tokens.begin(), tokens.end() - 1, input + 1);
    for (const Answer& answer : answers) target[answer.place] = answer.value;
    batch.lengths[row] = batch.target_lengths[row] = static_cast<int32_t>(shape_.length);
    batch.tokens += shape_.length;
    batch.units = batch.rows * shape_.queries;
  }

 private:
  struct Answer {
    int64_t place;
    int32_t value;
  };

  void generate(int64_t example, std::vector<int32_t>& tokens, std::vector<Answer>& answers) const {
    Random random(mix64(0x4eca11 + static_cast<uint64_t>(split_)) + static_cast<uint64_t>(example));
    tokens.resize(shape_.length);
    for (int32_t& token : tokens) token = draw(random, kFirstByte, shape_.fillers);
    const std::vector<int64_t> pairs = place(random, 0, shape_.pairs);
    const std::vector<int64_t> queries = place(random, shape_.length - shape_.part, shape_.queries);
    const Permutation keys(shape_.keys, random()), asked(shape_.pairs, random());
    for (int64_t i = 0; i < shape_.pairs; ++i) {
      tokens[pairs[i]] = static_cast<int32_t>(shape_.first_key() + keys(i));
      tokens[pairs[i] + 1] = draw(random, shape_.first_value(), shape_.values);
    }
    for (int64_t i = 0; i < shape_.queries; ++i) {
      const int64_t pair = pairs[asked(i)];
      tokens[queries[i]] = tokens[pair];
      answers.push_back({queries[i] + 1, tokens[pair + 1]});
    }
  }

  static int32_t draw(Random& random, int64_t first, int64_t count) {
    return static_cast<int32_t>(first + random.below(count));
  }

  // Where `count` things of two tokens lie in a part, in order. Thought of as one token each, they
  // are a choice among part - count places, every choice equally likely.
  std::vector<int64_t> place(Random& random, int64_t begin, int64_t count) const {
    std::vector<int64_t> places;
    const int64_t slots = shape_.part - count;
    for (int64_t slot = 0; slot < slots; ++slot) {
      const int64_t placed = static_cast<int64_t>(places.size());
      const int64_t drawn = static_cast<int64_t>(random.below(slots - slot));
      if (drawn < count - placed) places.push_back(begin + slot + placed);
    }
    return places;
  }

  Shape shape_;
  Split split_;
  int64_t size_;
};

Shape shape_of(const TaskConfig& config) {
  constexpr int64_t kMost = int64_t{1} << 24;
  const int64_t length = config.length == 0 ? kDefaultLength : config.length;
  check_count("length", length, kMost);
  check_count("recall_pairs", config.recall_pairs, kMost);
  check_count("recall_keys", config.recall_keys, kMost);
  check_count("recall_values", config.recall_values, kMost);
  check_count("recall_fillers", config.recall_fillers, kMost);
  check_count("recall_test_size", config.recall_test_size, int64_t{1} << 40);
  const int64_t distance = config.recall_distance == 0 ? length / 2 : config.recall_distance;
  const int64_t pairs = config.recall_pairs;
  const int64_t queries = config.recall_queries == 0 ? pairs : config.recall_queries;
  const auto refuse = [](const std::string& key, int64_t value, const std::string& expected) {
    throw UsageError("task." + key + ": " + std::to_string(value) + "; expected " + expected);
  };
  if (queries < 1 || queries > pairs) {
    refuse(
        "recall_queries", queries,
        "1 to " + std::to_string(pairs) + ", for task.recall_pairs, none of which is asked twice");
  }
  if (config.recall_keys < pairs) {
    refuse("recall_keys", config.recall_keys,
           std::to_string(pairs) + " or more: one for each of task.recall_pairs");
  }
  const int64_t most = length - 4 * pairs;
  if (distance < 1 || distance > most) {
    const std::string fix =
        most < 1 ? "fewer task.recall_pairs: " : "1 to " + std::to_string(most) + ": ";
    refuse("recall_distance", distance,
           fix + std::to_string(pairs) + " pairs and their queries take " +
               std::to_string(4 * pairs) + " of the " + std::to_string(length) + " tokens");
  }
  return {length,
          (length - distance) / 2,
          pairs,
          queries,
          config.recall_fillers,
          config.recall_keys,
          config.recall_values};
}

class RecallTask final : public Task {
 public:
  explicit RecallTask(const TaskConfig& config)
      : shape_(shape_of(config)), test_size_(config.recall_test_size) {
    const std::string size = std::to_string(test_size_);
    info_ = {.model = ModelKind::kLanguageModel,
             .vocab = shape_.vocab(),
             .max_length = shape_.length,
             .metric = "accuracy",
             .higher_is_better = true,
             .labels = {},
             .data_note = "generated: " + std::to_string(shape_.pairs) + " pairs, " +
                          std::to_string(shape_.queries) + " of them asked at least " +
                          std::to_string(shape_.length - 2 * shape_.part) +
                          " tokens later; fresh train, " + size + " valid and " + size +
                          " test sequences of " + std::to_string(shape_.length)};
  }

  const TaskInfo& info() const override { return info_; }
  std::unique_ptr<BatchSource> train(const BatchConfig& config) override {
    return open(Split::kTrain, config);
  }
  std::unique_ptr<BatchSource> eval(std::string_view split, const BatchConfig& config) override {
    return open(eval_split(split), config);
  }

  // f, k or v for filler, key or value, and which.
  std::string text(const std::vector<int32_t>& ids) const override {
    std::string text;
    for (const int32_t id : ids) {
      if (id < kFirstByte) continue;
      const auto [letter, first, count] = kind_of(id);
      if (!text.empty()) text += ' ';
      text += letter + std::to_string(id - first);
    }
    return text;
  }

  std::vector<int32_t> ids(std::string_view text) const override {
    std::vector<int32_t> ids;
    std::istringstream words{std::string(text)};
    for (std::string word; words >> word;) ids.push_back(id_of(word));
    return ids;
  }
  std::string tokenizer_path() const override { return ""; }

 private:
  struct Kind {
    char letter;
    int64_t first, count;
  };
  std::vector<Kind> kinds() const {
    return {{'f', kFirstByte, shape_.fillers},
            {'k', shape_.first_key(), shape_.keys},
            {'v', shape_.first_value(), shape_.values}};
  }
  Kind kind_of(int32_t id) const {
    return kinds()[(id >= shape_.first_key()) + (id >= shape_.first_value())];
  }

  int32_t id_of(const std::string& word) const {
    std::string expected;
    for (const Kind& kind : kinds()) {
      int64_t value = -1;
      const char* end = word.data() + word.size();
      const auto [stop, error] = std::from_chars(word.data() + 1, end, value);
      const bool number = error == std::errc() && stop == end;
      if (word[0] == kind.letter && number && value >= 0 && value < kind.count) {
        return static_cast<int32_t>(kind.first + value);
      }
      expected += (expected.empty() ? "" : ", ") + (kind.letter + std::string("0 to ")) +
                  kind.letter + std::to_string(kind.count - 1);
    }
    throw Error("input: '" + word + "'; expected " + expected);
  }

  std::unique_ptr<BatchSource> open(Split split, const BatchConfig& config) const {
    const bool training = split == Split::kTrain;
    const int64_t size = training ? kTrainSize : test_size_;
    return make_padded(std::make_shared<RecallExamples>(shape_, split, size), config, training);
  }

  Shape shape_;
  int64_t test_size_;
  TaskInfo info_{};
};

}  // namespace

std::unique_ptr<Task> make_recall(const TaskConfig& config) {
  return std::make_unique<RecallTask>(config);
}

}  // namespace sinkhorn::tasks
