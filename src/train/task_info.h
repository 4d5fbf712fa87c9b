// What a task said of itself when a model was made for it, written down: a run and an export are
// used where its data is not, and know other data when they see it.
#pragma once

#include <filesystem>
#include <string>

#include "tasks/task.h"

namespace sinkhorn::train {

// A JSON object, which files have under "info".
std::string task_info_json(const tasks::TaskInfo& info);

// Throws Error, with the file and key, where that cannot be read.
tasks::TaskInfo read_task_info(const std::filesystem::path& path);

}  // namespace sinkhorn::train
