// A run with its task and a checkpoint's parameters, ready to use.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "sinkhorn/models/models.h"
#include "tasks/task.h"
#include "train/config.h"

namespace sinkhorn::train {

struct OpenRun {
  std::unique_ptr<tasks::Task> task;
  std::shared_ptr<models::Model> model;  // in evaluation mode, on its device
  at::Device device;
  nn::Context context;
  std::filesystem::path checkpoint;
  int64_t step = 0;
};

// checkpoint: "newest", "best" or a file.
OpenRun open_run(RunConfig config, const std::string& checkpoint);

}  // namespace sinkhorn::train
