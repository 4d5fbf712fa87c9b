// A task whose data may be elsewhere: it reads and writes text as the task does, and opens the data
// when a split is asked for. What it is (vocabulary, labels, ...) was written down beforehand.
#pragma once

#include "tasks/task.h"

namespace sinkhorn::tasks {

// `info`: as the task itself gave it. Generated tasks need no data and are made at once.
std::unique_ptr<Task> make_deferred(const TaskConfig& config, const TaskInfo& info);

}  // namespace sinkhorn::tasks
