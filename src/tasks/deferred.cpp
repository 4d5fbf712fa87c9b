#include "tasks/deferred.h"

#include "sinkhorn/error.h"
#include "tasks/class_codec.h"
#include "tasks/dataset.h"

namespace sinkhorn::tasks {
namespace {

class DeferredTask final : public Task {
 public:
  DeferredTask(const TaskConfig& config, const TaskInfo& info)
      : config_(config), info_(info), tokenizer_(open_written(config)) {
    config_.labels = info.labels;
    if (info.model == ModelKind::kClassifier) codec_ = make_class_codec(config, tokenizer_);
    const int64_t vocab =
        info.model == ModelKind::kClassifier ? codec_.vocab() : tokenizer_->size();
    check("vocabulary", info.vocab, vocab);
  }

  const TaskInfo& info() const override { return info_; }
  std::unique_ptr<BatchSource> train(const BatchConfig& config) override {
    return opened().train(config);
  }
  std::unique_ptr<BatchSource> eval(std::string_view split, const BatchConfig& config) override {
    return opened().eval(split, config);
  }

  std::string text(const std::vector<int32_t>& ids) const override {
    if (config_.name == "pixels") return write_numbers(ids);
    return info_.model == ModelKind::kClassifier ? codec_.text(ids)
                                                 : decode_stream(*tokenizer_, ids);
  }
  std::vector<int32_t> ids(std::string_view text) const override {
    if (config_.name == "pixels") return read_numbers(text, 256);
    if (info_.model == ModelKind::kClassifier) return codec_.ids(text);
    std::vector<int32_t> ids;
    tokenizer_->encode(text, ids);
    return ids;
  }
  std::string tokenizer_path() const override { return tokenizer_->path(); }

 private:
  static std::shared_ptr<const Tokenizer> open_written(const TaskConfig& config) {
    if (reads_bytes(config)) return make_byte_tokenizer();
    if (!config.tokenizer.empty()) return load_pieces(config.tokenizer);
    throw Error("task.tokens: pieces, but there is no tokenizer.model with the model");
  }

  void check(const std::string& what, int64_t expected, int64_t found) const {
    if (expected == found) return;
    throw Error("task." + config_.name + ": a " + what + " of " + std::to_string(found) +
                ", but the model was made for " + std::to_string(expected));
  }

  Task& opened() {
    if (task_ == nullptr) {
      auto task = make_task(config_);
      const TaskInfo& found = task->info();
      check("vocabulary", info_.vocab, found.vocab);
      if (found.labels != info_.labels) {
        throw Error("task.data: " + config_.data + " has other labels than the model learned");
      }
      info_ = found;
      task_ = std::move(task);
    }
    return *task_;
  }

  TaskConfig config_;
  TaskInfo info_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  ClassCodec codec_;
  std::unique_ptr<Task> task_;
};

}  // namespace

std::unique_ptr<Task> make_deferred(const TaskConfig& config, const TaskInfo& info) {
  if (is_generated(config.name)) return make_task(config);
  return std::make_unique<DeferredTask>(config, info);
}

}  // namespace sinkhorn::tasks
