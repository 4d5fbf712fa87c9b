#include "train/open_run.h"

#include <ATen/Parallel.h>

#include "sinkhorn/error.h"
#include "tasks/deferred.h"
#include "train/device.h"
#include "train/evaluate.h"
#include "train/export_check.h"
#include "train/export_folder.h"
#include "train/run_files.h"
#include "train/run_folder.h"
#include "train/state.h"
#include "train/task_info.h"

namespace sinkhorn::train {
namespace {

namespace fs = std::filesystem;

constexpr const char* kExportAgain = "export the run again";

fs::path find_checkpoint(const fs::path& run, const std::string& name) {
  if (name != "newest" && name != "best") {
    for (const fs::path& path : {fs::path(name), run / kCheckpoints / name}) {
      std::error_code unknown;
      if (fs::exists(path, unknown)) return path;
    }
    throw Error("--checkpoint: " + name + ": no such file; expected newest, best, or a file");
  }
  if (is_export(run)) return run / kExportModel;
  const RunFolder folder(run, /*resume=*/true);
  const auto found = name == "newest" ? folder.newest() : folder.best();
  if (!found) {
    if (name == "newest" && has_checkpoint(run)) {
      throw Error(run.string() + ": none of its checkpoints reads back");
    }
    const bool has_newest = name == "best" && folder.newest().has_value();
    throw Error(run.string() + ": has no " + name + " checkpoint yet" +
                (has_newest ? "; --checkpoint newest takes the last one" : ""));
  }
  return *found;
}

// Runs and exports go where their data is not: that is looked for when a split is asked for.
std::unique_ptr<tasks::Task> open_task(const fs::path& run, tasks::TaskConfig config) {
  const fs::path tokenizer = run / kExportTokenizer;  // a run's is called the same
  if (fs::exists(tokenizer)) config.tokenizer = tokenizer.string();
  if (is_export(run)) {
    const tasks::TaskInfo info = read_task_info(run / kExportConfig, kExportAgain);
    check_export(run, info);
    return tasks::make_deferred(config, info);
  }
  const auto info = read_run_task(run);
  return info ? tasks::make_deferred(config, *info) : tasks::make_task(config);
}

// The path; empty where nothing is there.
fs::path existing(const fs::path& path) {
  std::error_code unknown;
  return fs::exists(path, unknown) ? path : fs::path();
}

void check_initial(const fs::path& place) {
  std::error_code unknown;
  const auto fail = [&](const std::string& what) {
    throw Error("train.init: " + place.string() + ": " + what +
                "; expected a run, an export or a checkpoint");
  };
  if (!fs::exists(place, unknown)) fail("is not there");
  if (fs::is_directory(place, unknown) && !is_export(place) &&
      !fs::exists(place / kRunConfig, unknown)) {
    fail("is another folder");
  }
}

std::shared_ptr<models::Model> empty_model(const models::ModelConfig& config,
                                           const tasks::TaskInfo& info) {
  const nn::WithoutInitialization about_to_be_loaded;
  return make_model(config, info);
}

}  // namespace

fs::path initial_parameters(const fs::path& place) {
  check_initial(place);
  if (!fs::is_directory(place)) return place;
  if (is_export(place)) {
    check_export(place, read_task_info(place / kExportConfig, kExportAgain));
  }
  return find_checkpoint(place, "newest");
}

fs::path initial_tokenizer(const fs::path& place) {
  check_initial(place);
  if (fs::is_directory(place)) return existing(place / kExportTokenizer);
  // An export's file lies in its folder, a run's checkpoint one further down.
  const fs::path folder = fs::absolute(place).lexically_normal().parent_path();
  const fs::path beside = existing(folder / kExportTokenizer);
  if (!beside.empty() || folder.filename() != kCheckpoints) return beside;
  return existing(folder.parent_path() / kExportTokenizer);
}

OpenRun open_run(RunConfig config, const std::string& checkpoint) {
  be_deterministic();
  if (config.train.threads > 0) at::set_num_threads(static_cast<int>(config.train.threads));
  const fs::path run = config.train.run, path = find_checkpoint(run, checkpoint);
  OpenRun opened{open_task(run, config.task), nullptr, pick_device(config.train.device), {}, path};
  if (config.model.max_length == 0) config.model.max_length = checkpoint_max_length(path);
  opened.model = empty_model(config.model, opened.task->info());
  const bool wide = config.train.precision == "float64";
  opened.step =
      load_parameters(path, *opened.model, opened.device, wide ? at::kDouble : at::kFloat);
  opened.context.compute = set_precision(config.train.precision, opened.device);
  opened.model->eval();
  return opened;
}

}  // namespace sinkhorn::train
