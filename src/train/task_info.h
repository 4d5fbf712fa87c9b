// What a task said of itself when a model was made for it, written down: a run and an export are
// used where its data is not, and know other data when they see it.
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "tasks/task.h"

namespace sinkhorn::train {

// Files have it under "info".
nlohmann::ordered_json task_info_json(const tasks::TaskInfo& info);

// Throws Error, with the file, the key and the remedy, where that cannot be read.
tasks::TaskInfo read_task_info(const std::filesystem::path& path, const std::string& remedy);

// Of a run, by its task.json; nothing where an earlier version made it.
std::optional<tasks::TaskInfo> read_run_task(const std::filesystem::path& run);

}  // namespace sinkhorn::train
