// What people ask a model to go on from, as it reads it. No Torch in this header.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "sinkhorn/sampling.h"
#include "tasks/task.h"

namespace sinkhorn::train {

// Throws UsageError "the prompt ...".
[[noreturn]] void refuse_prompt(const std::string& why);

// Throws UsageError for a text that is not UTF-8, or that the task finds nothing to read in;
// what: how the person who wrote it calls it.
std::vector<int32_t> text_ids(const tasks::Task& task, const std::string& text,
                              const std::string& what);
// The same for one to go on from, which is not empty.
std::vector<int32_t> prompt_ids(const tasks::Task& task, const std::string& text);

// Throws UsageError where there are more than `most`; what: "tokens", and which.
void check_prompt_fits(size_t tokens, int64_t most, const char* what = "tokens");

// What ends a sequence of the task, and what must not be said in one.
generate::StopOptions task_stops(const std::string& task, bool ignore_end);

}  // namespace sinkhorn::train
