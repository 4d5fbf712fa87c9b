#include "train/use_run.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <filesystem>
#include <sstream>

#include "sinkhorn/error.h"
#include "train/device.h"
#include "train/evaluate.h"
#include "train/inputs.h"
#include "train/run_folder.h"
#include "train/state.h"

namespace sinkhorn::train {
namespace {

namespace fs = std::filesystem;

fs::path find_checkpoint(const fs::path& run, const std::string& name) {
  if (name != "newest" && name != "best") return name;
  const RunFolder folder(run, /*resume=*/true);
  const auto found = name == "newest" ? folder.newest() : folder.best();
  if (!found) throw Error(run.string() + ": has no " + name + " checkpoint yet");
  return *found;
}

// A run with its task and a checkpoint's parameters, ready to use.
struct Opened {
  std::unique_ptr<tasks::Task> task;
  std::shared_ptr<models::Model> model;
  at::Device device;
  nn::Context context;
  fs::path checkpoint;
  int64_t step;
};

Opened open_run(RunConfig config, const std::string& checkpoint) {
  be_deterministic();
  if (config.train.threads > 0) at::set_num_threads(static_cast<int>(config.train.threads));
  const fs::path run = config.train.run, path = find_checkpoint(run, checkpoint);
  const fs::path tokenizer = run / "tokenizer.model";
  if (fs::exists(tokenizer)) config.task.tokenizer = tokenizer.string();
  Opened opened{
      tasks::make_task(config.task), nullptr, pick_device(config.train.device), {}, path, 0};
  if (config.model.max_length == 0) config.model.max_length = checkpoint_max_length(path);
  opened.model = make_model(config.model, opened.task->info());
  opened.step = load_parameters(path, *opened.model);
  opened.context.compute = compute_type(config.train.precision);
  opened.model->to(opened.device, config.train.precision == "float64" ? at::kDouble : at::kFloat);
  opened.model->eval();
  return opened;
}

models::Input input_of(const Opened& run, const RunConfig& config, const std::string& text,
                       int64_t example, std::string* shown) {
  tasks::Batch batch;
  if (!text.empty()) {
    const std::vector<int32_t> ids = run.task->ids(text);
    if (ids.empty()) throw UsageError("--text is empty");
    const int64_t length = static_cast<int64_t>(ids.size());
    batch.rows = 1;
    batch.length = length;
    batch.input = ids;
    batch.lengths = {static_cast<int32_t>(length)};
    batch.target_length = length;
    batch.target = ids;
    if (run.task->info().model == tasks::ModelKind::kClassifier) batch.labels = {0};
    if (run.task->info().model == tasks::ModelKind::kSeq2Seq) {  // sorting: all but the end token
      std::sort(batch.target.begin(), batch.target.end() - 1);
      batch.target_lengths = batch.lengths;
    }
  } else {
    tasks::BatchConfig one;
    one.rows = 1;
    one.seed = config.train.seed;
    const auto source = run.task->eval("test", one);
    for (int64_t i = 0; i <= example; ++i) {
      if (!source->next(batch)) {
        throw UsageError("--example is " + std::to_string(example) + "; the test split has " +
                         std::to_string(i));
      }
    }
  }
  *shown = run.task->text({batch.input.begin(), batch.input.begin() + batch.lengths[0]});
  return to_device(make_input(batch, false), run.device);
}

SortPicture picture_of(const at::Tensor& r, int64_t head) {  // r [N, N]
  SortPicture picture;
  picture.head = head;
  picture.blocks = r.size(0);
  const at::Tensor plain = r.to(at::kCPU, at::kFloat).contiguous();
  const float* values = plain.data_ptr<float>();
  picture.r.assign(values, values + plain.numel());
  int64_t rows = 0;
  for (int64_t i = 0; i < picture.blocks; ++i) {
    const float* row = values + i * picture.blocks;
    double sum = 0, largest = 0;
    for (int64_t j = 0; j < picture.blocks; ++j) {
      sum += row[j];
      largest = std::max<double>(largest, row[j]);
    }
    if (sum == 0) continue;
    ++rows;
    picture.own += row[i] / sum;
    picture.previous += i > 0 ? row[i - 1] / sum : 0;
    picture.largest += largest / sum;
  }
  for (double* share : {&picture.own, &picture.previous, &picture.largest}) {
    *share /= static_cast<double>(std::max<int64_t>(rows, 1));
  }
  return picture;
}

}  // namespace

EvalResult evaluate_run(const RunConfig& config, const std::string& checkpoint,
                        const std::string& split) {
  Opened run = open_run(config, checkpoint);
  const auto counts =
      evaluate(*run.model, *run.task, run.context,
               {split, batch_config(config.train), config.train.eval_batches, config.train.greedy});
  return {run.checkpoint.string(),
          run.step,
          split,
          run.task->info().data_note,
          tasks::figures(run.task->info().metric, counts),
          counts};
}

Inspection inspect_run(const RunConfig& config, const std::string& checkpoint,
                       const std::string& text, int64_t example) {
  Opened run = open_run(config, checkpoint);
  Inspection result;
  result.checkpoint = run.checkpoint.string();
  result.step = run.step;
  result.parameter_count = run.model->parameter_count();
  for (const auto& item : run.model->named_parameters()) {
    std::ostringstream shape;
    shape << item.value().sizes();
    result.parameters.emplace_back(item.key(), shape.str());
  }
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> sorts;
  run.context.sorts = &sorts;
  run.model->logits(input_of(run, config, text, example, &result.input), run.context);
  size_t next = 0;
  const auto attentions = run.model->attentions();
  const int64_t layers = run.model->config().layers;
  const bool decoder_only = run.task->info().model == tasks::ModelKind::kLanguageModel;
  for (size_t i = 0; i < attentions.size(); ++i) {
    if (!attentions[i]->sorts()) continue;
    const at::Tensor& r = sorts.at(next++);
    const int64_t place = static_cast<int64_t>(i);
    for (int64_t head = 0; head < r.size(1); ++head) {
      SortPicture picture = picture_of(r[0][head], head);
      picture.stack = decoder_only || place >= layers ? "decoder" : "encoder";
      picture.layer = place % layers;
      result.sorts.push_back(std::move(picture));
    }
  }
  return result;
}

}  // namespace sinkhorn::train
