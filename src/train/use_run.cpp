#include "train/use_run.h"

#include "sinkhorn/error.h"
#include "train/evaluate.h"
#include "train/open_run.h"
#include "train/prompt.h"
#include "train/samples.h"
#include "train/sorts.h"

namespace sinkhorn::train {
namespace {

std::unique_ptr<tasks::BatchSource> test_examples(tasks::Task& task, uint64_t seed) {
  tasks::BatchConfig one;
  one.rows = 1;
  one.seed = seed;
  return task.eval("test", one);
}

tasks::Batch test_example(tasks::Task& task, int64_t example, uint64_t seed) {
  tasks::Batch batch;
  const auto source = test_examples(task, seed);
  for (int64_t i = 0; i <= example; ++i) {
    if (!source->next(batch)) {
      throw UsageError("--example is " + std::to_string(example) + "; the test split has " +
                       std::to_string(i));
    }
  }
  return batch;
}

tasks::Batch longest_example(tasks::Task& task, uint64_t seed) {
  tasks::Batch longest, batch;
  const auto source = test_examples(task, seed);
  while (source->next(batch)) {
    if (longest.rows == 0 || batch.lengths[0] > longest.lengths[0]) longest = batch;
    if (longest.lengths[0] >= task.info().max_length) break;
  }
  if (longest.rows == 0) throw Error("the test split is empty; name an input with --text");
  return longest;
}

Inspection inspect_open(OpenRun& run, const tasks::Batch& batch) {
  Inspection result;
  result.checkpoint = run.checkpoint.string();
  result.step = run.step;
  result.parameter_count = run.model->parameter_count();
  for (const auto& item : run.model->named_parameters()) {
    result.parameters.emplace_back(item.key(), item.value().sizes().vec());
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
  const tasks::Counts counts =
      evaluate(*run.model, *run.task, run.context,
               {split, batch_config(config.train), config.train.eval_batches, config.train.greedy})
          .value();
  return {run.checkpoint.string(),
          run.step,
          split,
          run.task->info().data_note,
          tasks::figures(run.task->info().metric, counts),
          counts};
}

Inspection inspect_run(const RunConfig& config, const std::string& checkpoint,
                       const std::string& text, std::optional<int64_t> example) {
  OpenRun run = open_run(config, checkpoint);
  if (text.empty()) {
    const uint64_t seed = config.train.seed;
    return inspect_open(
        run, example ? test_example(*run.task, *example, seed) : longest_example(*run.task, seed));
  }
  const std::vector<int32_t> ids = text_ids(*run.task, text, "--text");
  const int64_t tokens = static_cast<int64_t>(ids.size()), most = run.model->config().max_length;
  if (run.task->info().model == tasks::ModelKind::kLanguageModel && tokens > most) {
    throw UsageError("--text has " + std::to_string(tokens) + " tokens; this model reads at most " +
                     std::to_string(most));
  }
  Inspection result = inspect_open(run, batch_of(run, config.task.name, ids));
  result.input = run.task->text(ids);  // without the token before it
  return result;
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
