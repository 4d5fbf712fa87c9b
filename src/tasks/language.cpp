// Language models: sentences (lm), running text (text), and images as 3,072 values (pixels).
#include "sinkhorn/error.h"
#include "tasks/dataset.h"
#include "tasks/packed.h"

namespace sinkhorn::tasks {
namespace {

constexpr int64_t kImageValues = 3 * 32 * 32;

class LanguageTask : public Task {
 public:
  explicit LanguageTask(const TaskConfig& config) {
    const bool pixels = config.name == "pixels";
    const bool bytes = reads_bytes(config);
    data_.corpus = find_corpus(config);
    data_.tokenizer = open_tokenizer(config, data_.corpus, bytes, 32000);
    packing_ = {
        .length = row_length(config, pixels, bytes), .end_tokens = !pixels, .count_words = !bytes};
    asked_length_ = config.length;
    const StoreSettings settings{.cache = cache_folder(config.cache),
                                 .vocab = data_.tokenizer->size(),
                                 .key = data_.tokenizer->key(),
                                 .encode = [&](const Item& item, std::vector<int32_t>& ids) {
                                   data_.tokenizer->encode(item.text, ids);
                                 }};
    for (const Split split : kSplits) {
      data_.splits[static_cast<size_t>(split)] = open_store(data_.corpus, split, settings);
    }
    info_ = {.model = ModelKind::kLanguageModel,
             .vocab = data_.tokenizer->size(),
             .max_length = packing_.length,
             .metric = pixels                ? "bits_per_dim"
                       : !bytes              ? "perplexity"
                       : config.name == "lm" ? "bits_per_character"
                                             : "bits_per_byte",
             .higher_is_better = false,
             .labels = {},
             .data_note = data_.note(),
             .data_tokens = data_.tokens()};
  }

  const TaskInfo& info() const override { return info_; }
  std::unique_ptr<BatchSource> train(const BatchConfig& config) override {
    const int64_t tokens = data_.splits[0]->tokens() + data_.splits[0]->size();  // and their ends
    if (asked_length_ > tokens) {
      throw UsageError("task.length: " + std::to_string(asked_length_) +
                       " is more than all of the training text, " + std::to_string(tokens) +
                       " tokens");
    }
    return make_packed(data_.splits[0], packing_, config, true);
  }
  std::unique_ptr<BatchSource> eval(std::string_view split, const BatchConfig& config) override {
    return make_packed(data_.split(split), packing_, config, false);
  }
  std::string text(const std::vector<int32_t>& ids) const override {
    return decode_stream(*data_.tokenizer, ids);
  }
  std::vector<int32_t> ids(std::string_view text) const override {
    std::vector<int32_t> ids;
    data_.tokenizer->encode(text, ids);
    return ids;
  }
  std::string tokenizer_path() const override { return data_.tokenizer->path(); }

 private:
  static int64_t row_length(const TaskConfig& config, bool pixels, bool bytes) {
    if (config.length < 0 || (pixels && config.length > 0 && kImageValues % config.length != 0)) {
      throw UsageError("task.length: " + std::to_string(config.length) + "; expected " +
                       (pixels ? "a divisor of 3072, the values of an image" : "1 or more"));
    }
    if (config.length > 0) return config.length;
    return pixels ? kImageValues : config.name == "lm" && !bytes ? 256 : 1024;
  }

  Dataset data_;
  Packing packing_{};
  int64_t asked_length_ = 0;  // 0: the task's own
  TaskInfo info_{};
};

// Values are what a person reads, separated by spaces.
class PixelsTask final : public LanguageTask {
 public:
  using LanguageTask::LanguageTask;
  std::string text(const std::vector<int32_t>& ids) const override { return write_numbers(ids); }
  std::vector<int32_t> ids(std::string_view text) const override { return read_numbers(text, 256); }
};

}  // namespace

std::unique_ptr<Task> make_language(const TaskConfig& config) {
  if (config.name == "pixels") return std::make_unique<PixelsTask>(config);
  return std::make_unique<LanguageTask>(config);
}

}  // namespace sinkhorn::tasks
