// What a classifier reads of a text, or of two: text, end; or text, separator, pair, end. What is
// too long is cut, the longer of two first.
#pragma once

#include <memory>

#include "tasks/task.h"
#include "tasks/tokenizer.h"

namespace sinkhorn::tasks {

class ClassCodec {
 public:
  ClassCodec() = default;
  ClassCodec(std::shared_ptr<const Tokenizer> tokenizer, bool pairs, int64_t longest);

  void encode(std::string_view text, std::string_view pair, std::vector<int32_t>& ids) const;
  // As Task has them: a pair is separated by a tab.
  std::string text(const std::vector<int32_t>& ids) const;
  std::vector<int32_t> ids(std::string_view text) const;

  int64_t vocab() const { return tokenizer_->size() + (pairs_ ? 1 : 0); }
  int64_t longest() const { return longest_; }

 private:
  std::shared_ptr<const Tokenizer> tokenizer_;
  bool pairs_ = false;
  int64_t longest_ = 0;
  int32_t separator_ = 0;
};

// As the task's configuration says; throws UsageError for a length that holds no text.
ClassCodec make_class_codec(const TaskConfig& config, std::shared_ptr<const Tokenizer> tokenizer);

}  // namespace sinkhorn::tasks
