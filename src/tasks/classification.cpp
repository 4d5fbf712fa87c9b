// Classifiers: sentiment, natural language inference, and classes of one's own.
#include "tasks/class_codec.h"
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

class ClassificationTask final : public Task {
 public:
  explicit ClassificationTask(const TaskConfig& config) {
    data_.corpus = find_corpus(config);
    settle_labels(data_.corpus);
    data_.tokenizer = open_tokenizer(config, data_.corpus, reads_bytes(config), 8000);
    codec_ = make_class_codec(config, data_.tokenizer);
    open_splits(config);
    info_ = {.model = ModelKind::kClassifier,
             .vocab = codec_.vocab(),
             .classes = static_cast<int64_t>(data_.corpus.labels.size()),
             .max_length = codec_.longest(),
             .metric = "accuracy",
             .higher_is_better = true,
             .labels = data_.corpus.labels,
             .data_note = data_.note(),
             .data_tokens = data_.tokens()};
  }

  const TaskInfo& info() const override { return info_; }
  std::unique_ptr<BatchSource> train(const BatchConfig& config) override {
    return make_padded(std::make_shared<StoredExamples>(data_.splits[0], codec_.longest()), config,
                       true);
  }
  std::unique_ptr<BatchSource> eval(std::string_view split, const BatchConfig& config) override {
    return make_padded(std::make_shared<StoredExamples>(data_.split(split), codec_.longest()),
                       config, false);
  }

  std::string text(const std::vector<int32_t>& ids) const override { return codec_.text(ids); }
  std::vector<int32_t> ids(std::string_view text) const override { return codec_.ids(text); }
  std::string tokenizer_path() const override { return data_.tokenizer->path(); }

 private:
  void open_splits(const TaskConfig& config) {
    const StoreSettings settings{
        .cache = cache_folder(config.cache),
        .vocab = data_.tokenizer->size() + 1,
        .key = data_.tokenizer->key() + " cut at " + std::to_string(codec_.longest()),
        .encode = [this](const Item& item, std::vector<int32_t>& ids) {
          codec_.encode(item.text, item.pair, ids);
        }};
    for (const Split split : kSplits) {
      data_.splits[static_cast<size_t>(split)] = open_store(data_.corpus, split, settings);
    }
  }

  Dataset data_;
  ClassCodec codec_;
  TaskInfo info_{};
};

}  // namespace

std::unique_ptr<Task> make_classification(const TaskConfig& config) {
  return std::make_unique<ClassificationTask>(config);
}

}  // namespace sinkhorn::tasks
