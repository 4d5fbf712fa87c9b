// A run of two steps on the sorting task, and its exports.
#pragma once

#include <atomic>
#include <filesystem>
#include <string>

#include "train/export_folder.h"
#include "train/trainer.h"

namespace sinkhorn::test {

inline train::RunConfig small_config(const std::filesystem::path& run) {
  train::RunConfig config;
  config.task.sort_symbols = 16;
  config.task.sort_train_max = config.task.sort_test_max = 15;
  config.task.sort_test_size = 16;
  config.model.layers = 1;
  config.model.width = 64;
  config.model.max_length = 0;
  config.model.encoder.block = config.model.decoder.block = 4;
  config.train.run = run.string();
  config.train.device = "cpu";
  config.train.threads = 1;
  config.train.steps = 2;
  config.train.batch = 4;
  return config;
}

inline train::RunConfig trained(const std::filesystem::path& run) {
  const train::RunConfig config = small_config(run);
  train::Observer silent;
  train::train(config, "", /*resume=*/false, silent, std::atomic<int>{0});
  return config;
}

// The configuration that the export describes itself with.
inline train::RunConfig exported(const train::RunConfig& config, const std::filesystem::path& out,
                                 const std::string& type) {
  train::RunConfig described;
  train::export_run({config, "newest", out, type, false, [&](const train::RunConfig& resolved) {
                       described = resolved;
                       return "{}";
                     }});
  described.train.run = out.string();
  return described;
}

}  // namespace sinkhorn::test
