// A run with its task and a checkpoint's parameters, ready to use; or an export, in its place.
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
  nn::Context context;  // products run in the type that train.precision names
  std::filesystem::path checkpoint;
  int64_t step = 0;
};

// checkpoint: "newest", "best" or a file; an export has one alone, whatever it is called. The
// parameters are the mapped file where that can be (see load_parameters); they may be written to.
OpenRun open_run(RunConfig config, const std::string& checkpoint);

// The file of parameters that a person means by a run's or an export's folder (its newest), or by
// the file itself, in train.init.
std::filesystem::path initial_parameters(const std::filesystem::path& place);

// The tokenizer of the run or the export that they are of; empty where it has none.
std::filesystem::path initial_tokenizer(const std::filesystem::path& place);

}  // namespace sinkhorn::train
