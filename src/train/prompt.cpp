#include "train/prompt.h"

#include "sinkhorn/error.h"
#include "tasks/files.h"
#include "tasks/tokenizer.h"

namespace sinkhorn::train {

void refuse_prompt(const std::string& why) { throw UsageError("the prompt " + why); }

std::vector<int32_t> text_ids(const tasks::Task& task, const std::string& text,
                              const std::string& what) {
  const auto bad = tasks::first_bad_byte(text);
  if (bad) throw UsageError(what + " is not UTF-8 text from byte " + std::to_string(*bad) + " on");
  std::vector<int32_t> ids;
  try {
    ids = task.ids(text);
  } catch (const Error& error) {
    throw UsageError(what + " cannot be read: " + error.what());
  }
  if (ids.empty() || ids.front() == tasks::kEnd) throw UsageError(what + " holds nothing to read");
  return ids;
}

std::vector<int32_t> prompt_ids(const tasks::Task& task, const std::string& text) {
  if (text.empty()) refuse_prompt("is empty; leave it out to begin as the training data does");
  return text_ids(task, text, "the prompt");
}

void check_prompt_fits(size_t tokens, int64_t most, const char* what) {
  if (static_cast<int64_t>(tokens) <= most) return;
  refuse_prompt("has " + std::to_string(tokens) + " " + what + "; this model reads at most " +
                std::to_string(most));
}

generate::StopOptions task_stops(const std::string& task, bool ignore_end) {
  const tasks::Framing frame = tasks::framing(task);
  generate::StopOptions stop;
  stop.never_tokens = {tasks::kPad, tasks::kBegin};
  if (!frame.ends) stop.never_tokens.push_back(tasks::kEnd);
  if (frame.ends && !ignore_end) stop.stop_tokens = {tasks::kEnd};
  return stop;
}

}  // namespace sinkhorn::train
