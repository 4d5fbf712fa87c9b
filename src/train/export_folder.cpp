#include "train/export_folder.h"

#include <ATen/ops/isfinite.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "models/files.h"
#include "sinkhorn/error.h"
#include "tasks/deferred.h"
#include "train/environment.h"
#include "train/export_check.h"
#include "train/history.h"
#include "train/open_run.h"
#include "train/run_files.h"
#include "train/state.h"
#include "train/task_info.h"

namespace sinkhorn::train {
namespace {

namespace fs = std::filesystem;
using json = nlohmann::ordered_json;

constexpr char kStaging[] = ".export.tmp";

// Whether there is more than what an export consists of and what `inspect` and `generate` add to
// it.
bool holds_other_things(const fs::path& folder) {
  for (const fs::path& path : models::list_folder(folder)) {
    const std::string name = path.filename().string();
    if (name == kExportConfig) {
      const json value = json::parse(models::read_text(path), nullptr, false);
      if (!value.is_object() || value.value("format", json()) != kExportFormat) return true;
    } else if (name != kExportModel && name != kExportTokenizer && name != kStaging &&
               name != "inspect" && name != "generate.png") {
      return true;
    }
  }
  return false;
}

void check_target(const fs::path& out, bool force) {
  std::error_code failed;
  const auto status = fs::status(out, failed);
  if (!fs::exists(status)) return;
  if (!fs::is_directory(status)) {
    throw UsageError(out.string() + ": is a file; name a folder for the export");
  }
  if (fs::exists(out / kRunConfig, failed)) {
    throw UsageError(out.string() + ": holds a run; name another folder for the export");
  }
  if (!force && holds_other_things(out)) {
    throw UsageError(out.string() +
                     ": holds something that is no export; name another folder, or add --force to "
                     "write into it");
  }
}

// Where the export is written before it takes its place; goes with what is left in it, and with the
// folder it stands in if that was made for it.
class Staging {
 public:
  explicit Staging(const fs::path& out) : out_(out), made_(!fs::exists(out)) {
    std::error_code failed;
    fs::remove_all(folder(), failed);
    fs::create_directories(folder(), failed);
    if (failed) throw Error(out.string() + ": cannot make the folder: " + failed.message());
  }
  ~Staging() {
    std::error_code ignored;
    fs::remove_all(folder(), ignored);
    if (made_ && !done_) fs::remove(out_, ignored);
  }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  fs::path folder() const { return out_ / kStaging; }

  // Without its config.json the old export is none; with the new one, the new one is whole. Between
  // the two nothing is written that a full disk could refuse.
  void commit() {
    std::error_code failed;
    for (const char* name : {kExportConfig, kExportTokenizer}) {
      fs::remove(out_ / name, failed);
      if (failed) throw Error((out_ / name).string() + ": cannot remove: " + failed.message());
    }
    for (const char* name : {kExportModel, kExportTokenizer, kExportConfig}) {
      if (fs::exists(folder() / name)) models::replace(folder() / name, out_ / name);
    }
    done_ = true;
  }

 private:
  fs::path out_;
  bool made_, done_ = false;
};

at::ScalarType type_of(const std::string& word) {
  if (const auto type = export_type(word)) return *type;
  throw UsageError("--dtype: \"" + word + "\" is not one of float32, bf16, fp16");
}

// Matrices in the type asked for. Norms and biases are vectors: they are small, and norms are
// computed in float32.
models::NamedTensors tensors_of(const OpenRun& run, at::ScalarType type) {
  models::NamedTensors tensors;
  for (const auto& item : run.model->named_parameters()) {
    const at::Tensor own = item.value().detach();
    const at::Tensor stored = own.to(own.dim() >= 2 ? type : at::kFloat);
    if (type == at::kHalf && !at::isfinite(stored).all().item<bool>()) {
      throw Error(run.checkpoint.string() + ": " + item.key() +
                  " has numbers beyond the range of fp16; export it as bf16");
    }
    tensors.emplace_back(item.key(), stored);
  }
  return tensors;
}

// The configuration with nothing left to be found out.
RunConfig resolved(RunConfig config, const OpenRun& run, const std::string& type) {
  const models::ModelConfig& model = run.model->config();
  config.model.max_length = model.max_length;
  const tasks::ModelKind kind = run.task->info().model;
  const auto attentions = run.model->attentions();  // encoder first
  if (kind != tasks::ModelKind::kLanguageModel) config.model.encoder = attentions.front()->config();
  if (kind != tasks::ModelKind::kClassifier) config.model.decoder = attentions.back()->config();
  for (nn::AttentionConfig* stack : {&config.model.encoder, &config.model.decoder}) {
    if (stack->max_blocks == 0) {
      stack->max_blocks = (model.max_length + stack->block - 1) / stack->block;
    }
  }
  if (!tasks::is_generated(config.task.name)) {
    config.task.length = run.task->info().max_length;
    config.task.tokens = run.task->tokenizer_path().empty() ? "bytes" : "pieces";
  }
  config.task.tokenizer.clear();  // it lies beside
  // Products run as in training; where weights are half, or come from an export in which they were,
  // in the type they have now.
  const auto is_half = [](const at::Tensor& t) {
    return at::isReducedFloatingType(t.scalar_type());
  };
  const auto parameters = run.model->parameters();
  if (type != "float32" || std::any_of(parameters.begin(), parameters.end(), is_half)) {
    config.train.precision = type;
  }
  return config;
}

// What was measured at the step, by split; an export that is exported again has it written down.
json figures_of(const fs::path& run, int64_t step) {
  if (is_export(run)) {
    return json::parse(models::read_text(run / kExportConfig)).value("figures", json::object());
  }
  json figures = json::object();
  for (const report::Curve& curve : read_history(run).curves) {
    for (const report::Point& point : curve.points) {
      if (curve.split == "train" || static_cast<int64_t>(point.step) != step) continue;
      figures[curve.split][curve.name] = point.value;  // NaN becomes null
    }
  }
  return figures;
}

// `folder`: where the other files lie.
json config_of(const ExportOptions& options, const OpenRun& run, const fs::path& folder) {
  json config = {{"format", kExportFormat}};
  for (const char* name : {"version", "commit"}) config[name] = environment_fact(name);
  config["dtype"] = options.type;
  config["step"] = run.step;
  config["parameters"] = run.model->parameter_count();
  config[kExportChecksums] = export_checksums(folder);
  config["figures"] = figures_of(options.config.train.run, run.step);
  config["info"] = task_info_json(run.task->info());
  config.update(json::parse(options.describe(resolved(options.config, run, options.type))));
  return config;
}

}  // namespace

bool is_export(const fs::path& folder) {
  std::error_code ignored;
  return fs::exists(folder / kExportConfig, ignored) && !fs::exists(folder / kRunConfig, ignored);
}

Exported export_run(const ExportOptions& options) {
  const at::ScalarType type = type_of(options.type);
  check_target(options.out, options.force);
  RunConfig config = options.config;
  config.train.device = "cpu";
  if (config.train.precision == "float64") config.train.precision = "float32";
  const OpenRun run = open_run(config, options.checkpoint);

  Staging staging(options.out);
  const fs::path model = staging.folder() / kExportModel;
  models::save_safetensors(model, tensors_of(run, type),
                           {{"format", kExportFormat}, {"step", std::to_string(run.step)}});
  const std::string tokenizer = run.task->tokenizer_path();
  if (!tokenizer.empty()) {
    models::write_atomically(staging.folder() / kExportTokenizer, models::read_text(tokenizer));
  }
  ExportOptions described = options;
  described.config = config;
  models::write_atomically(staging.folder() / kExportConfig,
                           config_of(described, run, staging.folder())
                                   .dump(2, ' ', false, json::error_handler_t::replace) +
                               "\n");
  const auto bytes = static_cast<int64_t>(fs::file_size(model));
  staging.commit();
  return {run.checkpoint.string(), run.step, run.model->parameter_count(), bytes};
}

}  // namespace sinkhorn::train
