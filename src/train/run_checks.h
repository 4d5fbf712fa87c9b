// What a training is refused for before its first step, when data, configuration and run folder are
// known.
#pragma once

#include <filesystem>
#include <string>

#include "sinkhorn/models/models.h"
#include "tasks/task.h"

namespace sinkhorn::train {

// All throw UsageError or Error.

// A resumed run may not change but where things lie, how the optimizer goes on, and [train].
// before: the configuration in its folder, or the one that its checkpoint was made with.
void check_same_run(const std::filesystem::path& root, const std::string& before,
                    const std::string& config_text);

// Data that has changed in between may mean other things by the same numbers.
void check_same_task(const std::filesystem::path& root, const std::string& data,
                     const tasks::TaskInfo& now);

// The task's sequences fit into the model, and their blocks into sort networks with a column for
// each.
void check_length(const models::ModelConfig& model, const tasks::TaskInfo& info);
void check_columns(const models::Model& model, const tasks::TaskInfo& info);

}  // namespace sinkhorn::train
