// Sorting: lists of symbols, generated; the target is the list in order and an end token that
// counts.
#include <algorithm>

#include "tasks/dataset.h"
#include "tasks/padded.h"
#include "tasks/random.h"

namespace sinkhorn::tasks {
namespace {

struct Lists {
  Split split;
  int64_t size, symbols;
  int64_t longest;  // symbols, the end token not counted
};

// Example i is a function of the split and i alone: every seed, rank and batch size sees the same.
class SortExamples final : public Examples {
 public:
  SortExamples(const Lists& lists, bool fixed) : lists_(lists), fixed_(fixed) {}

  int64_t size() const override { return lists_.size; }
  int64_t length(int64_t example) const override {
    Random random = generator(example);
    return draw_length(random);
  }
  int64_t padded_length(int64_t longest) const override {
    return fixed_ ? lists_.longest + 1 : round_length(longest, lists_.longest + 1);
  }

  void fill(int64_t example, Batch& batch, int64_t row) const override {
    batch.target_length = batch.length;
    batch.target.resize(batch.input.size(), kPad);
    batch.target_lengths.resize(batch.rows);
    Random random = generator(example);
    const int64_t length = draw_length(random);
    int32_t* input = batch.input.data() + row * batch.length;
    int32_t* target = batch.target.data() + row * batch.length;
    for (int64_t i = 0; i + 1 < length; ++i) {
      input[i] = static_cast<int32_t>(random.below(lists_.symbols)) + kFirstByte;
    }
    input[length - 1] = kEnd;
    std::copy(input, input + length, target);
    std::sort(target, target + length - 1);
    batch.lengths[row] = batch.target_lengths[row] = static_cast<int32_t>(length);
    batch.tokens += length;
  }

 private:
  Random generator(int64_t example) const {
    return Random(mix64(0x50727 + static_cast<uint64_t>(lists_.split)) +
                  static_cast<uint64_t>(example));
  }
  int64_t draw_length(Random& random) const {
    return static_cast<int64_t>(random.below(lists_.longest)) + 2;  // 1 to longest, and the end
  }

  Lists lists_;
  bool fixed_;
};

class SortTask final : public Task {
 public:
  explicit SortTask(const TaskConfig& config) : config_(config) {
    constexpr int64_t kMost = int64_t{1} << 24;
    check_count("sort_symbols", config.sort_symbols, kMost);
    check_count("sort_train_max", config.sort_train_max, kMost);
    check_count("sort_test_max", config.sort_test_max, kMost);
    check_count("sort_train_size", config.sort_train_size, int64_t{1} << 40);
    check_count("sort_test_size", config.sort_test_size, int64_t{1} << 40);
    info_ = {.model = ModelKind::kSeq2Seq,
             .vocab = config.sort_symbols + kFirstByte,
             .max_length = std::max(config.sort_train_max, config.sort_test_max) + 1,
             .metric = "exact_match",
             .higher_is_better = true,
             .labels = {},
             .data_note = "generated: " + std::to_string(config.sort_train_size) + " train and " +
                          std::to_string(config.sort_test_size) + " valid lists of 1 to " +
                          std::to_string(config.sort_train_max) + ", " +
                          std::to_string(config.sort_test_size) + " test lists of 1 to " +
                          std::to_string(config.sort_test_max)};
  }

  const TaskInfo& info() const override { return info_; }
  std::unique_ptr<BatchSource> train(const BatchConfig& config) override {
    return open(Split::kTrain, config);
  }
  std::unique_ptr<BatchSource> eval(std::string_view split, const BatchConfig& config) override {
    return open(eval_split(split), config);
  }
  std::string text(const std::vector<int32_t>& ids) const override { return write_numbers(ids); }
  std::vector<int32_t> ids(std::string_view text) const override {
    std::vector<int32_t> ids = read_numbers(text, config_.sort_symbols);
    ids.push_back(kEnd);
    return ids;
  }
  std::string tokenizer_path() const override { return ""; }

 private:
  std::unique_ptr<BatchSource> open(Split split, const BatchConfig& config) const {
    const bool training = split == Split::kTrain;
    const Lists lists{split, training ? config_.sort_train_size : config_.sort_test_size,
                      config_.sort_symbols,
                      split == Split::kTest ? config_.sort_test_max : config_.sort_train_max};
    // By rows, shapes are fixed in training, so that a step can be captured whole.
    const bool fixed = training && config.rows > 0;
    return make_padded(std::make_shared<SortExamples>(lists, fixed), config, training);
  }

  TaskConfig config_;
  TaskInfo info_{};
};

}  // namespace

std::unique_ptr<Task> make_sort(const TaskConfig& config) {
  return std::make_unique<SortTask>(config);
}

}  // namespace sinkhorn::tasks
