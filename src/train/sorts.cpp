#include "train/sorts.h"

#include <algorithm>

#include "tasks/tokenizer.h"
#include "train/inputs.h"

namespace sinkhorn::train {
namespace {

report::SortMatrix matrix_of(const at::Tensor& r, int64_t window) {  // [N, N]
  report::SortMatrix matrix;
  matrix.blocks = r.size(0);
  const at::Tensor plain = r.to(at::kCPU, at::kFloat).contiguous();
  const float* values = plain.data_ptr<float>();
  matrix.r.assign(values, values + plain.numel());
  matrix.figures = report::sort_figures(matrix.r, matrix.blocks, window);
  return matrix;
}

}  // namespace

tasks::Batch batch_of(const OpenRun& run, const std::string& name, std::vector<int32_t> ids) {
  const tasks::ModelKind model = run.task->info().model;
  tasks::Batch batch;
  batch.target = ids;
  if (model == tasks::ModelKind::kLanguageModel) {
    const bool full = static_cast<int64_t>(ids.size()) == run.model->config().max_length;
    ids.insert(ids.begin(), tasks::framing(name).begin);
    full ? ids.pop_back() : batch.target.push_back(tasks::kPad);
  }
  const int64_t length = static_cast<int64_t>(ids.size());
  batch.rows = 1;
  batch.length = batch.target_length = length;
  batch.input = std::move(ids);
  batch.lengths = {static_cast<int32_t>(length)};
  if (model == tasks::ModelKind::kClassifier) batch.labels = {0};
  if (model == tasks::ModelKind::kSeq2Seq) {  // sorting: all but the end token
    std::sort(batch.target.begin(), batch.target.end() - 1);
    batch.target_lengths = batch.lengths;
  }
  return batch;
}

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

}  // namespace sinkhorn::train
