// Classifiers: sentiment, natural language inference, and classes of one's own.
#include <algorithm>
#include <set>

#include "sinkhorn/error.h"
#include "tasks/dataset.h"
#include "tasks/padded.h"

namespace sinkhorn::tasks {
namespace {

class StoredExamples final : public Examples {
 public:
  StoredExamples(std::shared_ptr<const TokenStore> store, int64_t longest)
      : store_(std::move(store)), longest_(longest) {}
  int64_t size() const override { return store_->size(); }
  int64_t length(int64_t example) const override { return store_->length(example); }
  int64_t padded_length(int64_t longest) const override { return round_length(longest, longest_); }
  void fill(int64_t example, Batch& batch, int64_t row) const override {
    store_->copy(example, batch.input.data() + row * batch.length);
    batch.lengths[row] = static_cast<int32_t>(length(example));
    batch.labels.push_back(store_->label(example));
    batch.tokens += length(example);
  }

 private:
  std::shared_ptr<const TokenStore> store_;
  int64_t longest_;
};

std::vector<std::string> training_labels(const Corpus& corpus) {
  std::set<std::string, std::less<>> labels;
  corpus.read(Split::kTrain, [&](const Item& item) {
    if (!labels.contains(item.label)) labels.emplace(item.label);
  });
  return {labels.begin(), labels.end()};
}

class ClassificationTask final : public Task {
 public:
  explicit ClassificationTask(const TaskConfig& config) : pairs_(config.name == "nli") {
    const bool bytes = use_bytes(config, false);
    if (config.length < 0 || config.length == 1) {
      throw UsageError("task.length: " + std::to_string(config.length) +
                       "; expected 2 or more (the end token counts)");
    }
    longest_ = config.length > 0 ? config.length : bytes ? 2048 : 512;
    data_.corpus = find_corpus(config.name, config.data);
    if (data_.corpus.labels.empty()) data_.corpus.labels = training_labels(data_.corpus);
    data_.tokenizer = open_tokenizer(config, data_.corpus, bytes, 8000);
    separator_ = static_cast<int32_t>(data_.tokenizer->size());
    open_splits(config);
    info_ = {.model = ModelKind::kClassifier,
             .vocab = data_.tokenizer->size() + (pairs_ ? 1 : 0),
             .classes = static_cast<int64_t>(data_.corpus.labels.size()),
             .max_length = longest_,
             .metric = "accuracy",
             .higher_is_better = true,
             .labels = data_.corpus.labels,
             .data_note = data_.note()};
  }

  const TaskInfo& info() const override { return info_; }
  std::unique_ptr<BatchSource> train(const BatchConfig& config) override {
    return make_padded(std::make_shared<StoredExamples>(data_.splits[0], longest_), config, true);
  }
  std::unique_ptr<BatchSource> eval(std::string_view split, const BatchConfig& config) override {
    return make_padded(std::make_shared<StoredExamples>(data_.split(split), longest_), config,
                       false);
  }

  std::string text(const std::vector<int32_t>& ids) const override {
    const auto middle = std::find(ids.begin(), ids.end(), separator_);
    std::string text = decode_stream(*data_.tokenizer, {ids.begin(), middle});
    if (middle != ids.end()) {
      text += '\t' + decode_stream(*data_.tokenizer, {middle + 1, ids.end()});
    }
    return text;
  }

  std::vector<int32_t> ids(std::string_view text) const override {
    const size_t tab = pairs_ ? std::min(text.find('\t'), text.size()) : text.size();
    std::vector<int32_t> ids;
    encode(text.substr(0, tab), text.substr(std::min(tab + 1, text.size())), ids);
    return ids;
  }

  std::string tokenizer_path() const override { return data_.tokenizer->path(); }

 private:
  void open_splits(const TaskConfig& config) {
    const StoreSettings settings{
        .cache = cache_folder(config.cache),
        .vocab = data_.tokenizer->size() + 1,
        .key = data_.tokenizer->key() + " cut at " + std::to_string(longest_),
        .encode = [this](const Item& item, std::vector<int32_t>& ids) {
          encode(item.text, item.pair, ids);
        }};
    for (const Split split : kSplits) {
      data_.splits[static_cast<size_t>(split)] = open_store(data_.corpus, split, settings);
    }
  }

  // text, end; or text, separator, pair, end. What is too long is cut, the longer of two first.
  void encode(std::string_view text, std::string_view pair, std::vector<int32_t>& ids) const {
    const size_t room = static_cast<size_t>(longest_) - (pairs_ ? 2 : 1);
    data_.tokenizer->encode(text, ids);
    if (pairs_) {
      std::vector<int32_t> second;
      data_.tokenizer->encode(pair, second);
      while (ids.size() + second.size() > room) {
        (ids.size() > second.size() ? ids : second).pop_back();
      }
      ids.push_back(separator_);
      ids.insert(ids.end(), second.begin(), second.end());
    } else if (ids.size() > room) {
      ids.resize(room);
    }
    ids.push_back(kEnd);
  }

  bool pairs_;
  int64_t longest_ = 0;
  int32_t separator_ = 0;
  Dataset data_;
  TaskInfo info_{};
};

}  // namespace

std::unique_ptr<Task> make_classification(const TaskConfig& config) {
  return std::make_unique<ClassificationTask>(config);
}

}  // namespace sinkhorn::tasks
