#include "train/classify_run.h"

#include <ATen/ops/isfinite.h>
#include <ATen/ops/softmax.h>

#include <algorithm>

#include "sinkhorn/error.h"
#include "tasks/padded.h"
#include "tasks/tokenizer.h"
#include "train/inputs.h"
#include "train/open_run.h"
#include "train/prompt.h"

namespace sinkhorn::train {
namespace {

// Padded as in evaluation.
tasks::Batch batch_of_texts(const tasks::Task& task, const std::vector<NamedText>& texts) {
  std::vector<std::vector<int32_t>> rows;
  size_t longest = 0;
  for (const NamedText& one : texts) {
    rows.push_back(text_ids(task, one.text, one.name));
    longest = std::max(longest, rows.back().size());
  }
  tasks::Batch batch;
  batch.rows = static_cast<int64_t>(rows.size());
  batch.length = tasks::round_length(static_cast<int64_t>(longest), task.info().max_length);
  batch.labels.resize(rows.size());  // not known; that there are some makes it a classifier's
  for (const std::vector<int32_t>& row : rows) {
    batch.lengths.push_back(static_cast<int32_t>(row.size()));
    batch.input.insert(batch.input.end(), row.begin(), row.end());
    batch.input.resize(batch.lengths.size() * static_cast<size_t>(batch.length), tasks::kPad);
  }
  return batch;
}

// Of every row and label, on the CPU.
at::Tensor probabilities_of(const OpenRun& run, const tasks::Batch& batch) {
  const at::NoGradGuard no_grad;
  const models::Input input = to_device(make_input(batch, run.device.is_cuda()), run.device);
  const at::Tensor scores = run.model->logits(input, run.context).to(at::kCPU, at::kDouble);
  if (!at::isfinite(scores).all().item<bool>()) {
    throw Error(run.checkpoint.string() + ", step " + std::to_string(run.step) +
                ": the model's scores of the labels are not numbers: it cannot classify");
  }
  return at::softmax(scores, -1).contiguous();  // [B, classes]
}

}  // namespace

TextClassifier::TextClassifier(const RunConfig& config, const std::string& checkpoint) {
  const std::string& task = config.task.name;
  if (tasks::has_decoder(task)) {
    throw UsageError(config.train.run + ": a model of the task " + task +
                     " gives no labels; see generate");
  }
  run_ = std::make_unique<OpenRun>(open_run(config, checkpoint));
  const tasks::TaskInfo& info = run_->task->info();
  if (static_cast<int64_t>(info.labels.size()) != info.classes) {
    throw UsageError(config.train.run + ": " + std::to_string(info.labels.size()) +
                     " labels are written down for " + std::to_string(info.classes) +
                     " classes; there is nothing to call them by");
  }
}

TextClassifier::~TextClassifier() = default;

const std::vector<std::string>& TextClassifier::labels() const { return run_->task->info().labels; }

std::vector<Verdict> TextClassifier::classify(const std::vector<NamedText>& texts) const {
  const at::Tensor all = probabilities_of(*run_, batch_of_texts(*run_->task, texts));
  const double* row = all.data_ptr<double>();
  std::vector<Verdict> verdicts;
  for (size_t i = 0; i < texts.size(); ++i, row += all.size(1)) {
    const double* best = std::max_element(row, row + all.size(1));
    verdicts.push_back({{row, row + all.size(1)}, static_cast<size_t>(best - row)});
  }
  return verdicts;
}

}  // namespace sinkhorn::train
