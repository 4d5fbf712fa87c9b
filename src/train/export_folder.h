// A model to carry away, in a folder:
//   config.json        what it is: format, version, step, figures reached; "crc32": of the files
//                      beside it; "info": the task's part that a reader needs; "task", "model",
//                      "encoder", "decoder", "train": the keys of a run's configuration, resolved
//   model.safetensors  the parameters by name, matrices in the type asked for, vectors in float32
//   tokenizer.model    where the task has one
// config.json comes last: a folder without it is no export.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

#include "tasks/task.h"
#include "train/config.h"

namespace sinkhorn::train {

// What the metadata of model.safetensors, and config.json, say of their format.
inline constexpr char kExportFormat[] = "sinkhorn export 1";
inline constexpr char kExportModel[] = "model.safetensors", kExportConfig[] = "config.json",
                      kExportTokenizer[] = "tokenizer.model";

struct ExportOptions {
  RunConfig config;                   // of the run; its folder is config.train.run
  std::string checkpoint = "newest";  // or "best"
  std::filesystem::path out;
  std::string type = "float32";  // of the matrices: float32, bf16, fp16
  bool force = false;            // into a folder that holds other things, too
  // The configuration as config.json keeps it: a JSON object of sections.
  std::function<std::string(const RunConfig&)> describe;
};

struct Exported {
  std::string checkpoint;
  int64_t step = 0, parameters = 0, bytes = 0;  // bytes: of model.safetensors
};

// Writes aside, syncs, and moves into place: a failure leaves what was there.
Exported export_run(const ExportOptions& options);

// Whether a folder is an export rather than a run.
bool is_export(const std::filesystem::path& folder);

}  // namespace sinkhorn::train
