#include "train/use_run.h"

#include <algorithm>
#include <sstream>

#include "sinkhorn/error.h"
#include "train/evaluate.h"
#include "train/inputs.h"
#include "train/open_run.h"
#include "train/samples.h"

namespace sinkhorn::train {
namespace {

// An input of the user's own, as a batch.
tasks::Batch batch_of(const tasks::Task& task, const std::string& text) {
  const std::vector<int32_t> ids = task.ids(text);
  if (ids.empty()) throw UsageError("--text is empty");
  tasks::Batch batch;
  const int64_t length = static_cast<int64_t>(ids.size());
  batch.rows = 1;
  batch.length = length;
  batch.input = ids;
  batch.lengths = {static_cast<int32_t>(length)};
  batch.target_length = length;
  batch.target = ids;
  if (task.info().model == tasks::ModelKind::kClassifier) batch.labels = {0};
  if (task.info().model == tasks::ModelKind::kSeq2Seq) {  // sorting: all but the end token
    std::sort(batch.target.begin(), batch.target.end() - 1);
    batch.target_lengths = batch.lengths;
  }
  return batch;
}

tasks::Batch test_example(tasks::Task& task, int64_t example, uint64_t seed) {
  tasks::BatchConfig one;
  one.rows = 1;
  one.seed = seed;
  tasks::Batch batch;
  const auto source = task.eval("test", one);
  for (int64_t i = 0; i <= example; ++i) {
    if (!source->next(batch)) {
      throw UsageError("--example is " + std::to_string(example) + "; the test split has " +
                       std::to_string(i));
    }
  }
  return batch;
}

report::SortMatrix matrix_of(const at::Tensor& r, int64_t window) {  // [N, N]
  report::SortMatrix matrix;
  matrix.blocks = r.size(0);
  const at::Tensor plain = r.to(at::kCPU, at::kFloat).contiguous();
  const float* values = plain.data_ptr<float>();
  matrix.r.assign(values, values + plain.numel());
  matrix.figures = report::sort_figures(matrix.r, matrix.blocks, window);
  return matrix;
}

// Every sorting layer's and head's matrix of one input.
std::vector<report::SortMatrix> sorts_of(OpenRun& run, const tasks::Batch& batch) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> sorts;
  nn::Context context = run.context;
  context.sorts = &sorts;
  run.model->logits(to_device(make_input(batch, false), run.device), context);
  std::vector<report::SortMatrix> matrices;
  size_t next = 0;
  const auto attentions = run.model->attentions();
  const int64_t layers = run.model->config().layers;
  const bool decoder_only = run.task->info().model == tasks::ModelKind::kLanguageModel;
  for (size_t i = 0; i < attentions.size(); ++i) {
    if (!attentions[i]->sorts()) continue;
    const at::Tensor& r = sorts.at(next++);
    const int64_t place = static_cast<int64_t>(i);
    const bool in_decoder = decoder_only || place >= layers;
    const nn::AttentionConfig& config =
        in_decoder ? run.model->config().decoder : run.model->config().encoder;
    const bool strict = in_decoder && config.causal == "strict";
    for (int64_t head = 0; head < r.size(1); ++head) {
      report::SortMatrix matrix = matrix_of(r[0][head], strict ? config.window : 0);
      matrix.head = head;
      matrix.stack = in_decoder ? "decoder" : "encoder";
      matrix.layer = place % layers;
      matrices.push_back(std::move(matrix));
    }
  }
  return matrices;
}

Inspection inspect_open(OpenRun& run, const tasks::Batch& batch) {
  Inspection result;
  result.checkpoint = run.checkpoint.string();
  result.step = run.step;
  result.parameter_count = run.model->parameter_count();
  for (const auto& item : run.model->named_parameters()) {
    std::ostringstream shape;
    shape << item.value().sizes();
    result.parameters.emplace_back(item.key(), shape.str());
  }
  result.input = run.task->text({batch.input.begin(), batch.input.begin() + batch.lengths[0]});
  if (is_image(*run.task, batch)) result.input_image = image_of(batch);
  result.sorts = sorts_of(run, batch);
  return result;
}

}  // namespace

EvalResult evaluate_run(const RunConfig& config, const std::string& checkpoint,
                        const std::string& split) {
  OpenRun run = open_run(config, checkpoint);
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
  OpenRun run = open_run(config, checkpoint);
  return inspect_open(run, text.empty() ? test_example(*run.task, example, config.train.seed)
                                        : batch_of(*run.task, text));
}

Look look_at_run(const RunConfig& config, const std::string& checkpoint, int64_t samples) {
  OpenRun run = open_run(config, checkpoint);
  const std::vector<tasks::Batch> examples = spread_examples(*run.task, samples, config.train.seed);
  if (examples.empty()) throw Error(config.train.run + ": the test split is empty");
  Look look{inspect_open(run, examples.back()), run.task->info().data_note, {}};
  for (const tasks::Batch& batch : examples) look.samples.push_back(sample_of(run, batch));
  return look;
}

}  // namespace sinkhorn::train
