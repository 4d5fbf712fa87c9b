#include "train/samples.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/softmax.h>

#include <algorithm>
#include <cstdio>

#include "tasks/tokenizer.h"
#include "train/decode.h"
#include "train/inputs.h"

namespace sinkhorn::train {
namespace {

constexpr int64_t kMostCounted = 20000;  // rows looked at to spread the examples
constexpr int64_t kLongestBeginning = 128, kLongestContinuation = 48;  // tokens

constexpr int64_t kImageWidth = 32;  // pixels of three values

using Ids = std::vector<int32_t>;

Ids first_row(const at::Tensor& ids) {  // [1, T]
  const at::Tensor plain = ids.cpu().contiguous();
  const int64_t* from = plain.data_ptr<int64_t>();
  return {from, from + plain.numel()};
}

Ids before_end(Ids ids) {
  ids.erase(std::find(ids.begin(), ids.end(), tasks::kEnd), ids.end());
  return ids;
}

report::Sample decoded(OpenRun& run, const tasks::Batch& batch) {
  const auto model = std::dynamic_pointer_cast<models::Seq2Seq>(run.model);
  const models::Input input = to_device(make_input(batch, false), run.device);
  const int64_t limit = std::min(batch.target_length + 8, model->config().max_length);
  const Ids said =
      before_end(greedy_answers(model, input.ids, input.mask, limit, run.context).at(0));
  const Ids wanted =
      before_end({batch.target.begin(), batch.target.begin() + batch.target_lengths[0]});
  const Ids read(batch.input.begin(), batch.input.begin() + batch.lengths[0]);
  return {{{"input", run.task->text(read)},
           {"wanted", run.task->text(wanted)},
           {"model, decoding greedily", run.task->text(said)}},
          true,
          said == wanted,
          true};
}

report::Sample classified(OpenRun& run, const tasks::Batch& batch) {
  const at::Tensor scores =
      run.model->logits(to_device(make_input(batch, false), run.device), run.context);
  const at::Tensor shares = at::softmax(scores.to(at::kCPU, at::kDouble), -1);
  const int64_t best = at::argmax(shares, -1).item<int64_t>();
  const auto& names = run.task->info().labels;
  const auto name = [&](int64_t label) {
    const bool named = label < static_cast<int64_t>(names.size());
    return named ? names[static_cast<size_t>(label)] : std::to_string(label);
  };
  char certainty[32];
  std::snprintf(certainty, sizeof certainty, "model, %.1f%% sure",
                100 * shares[0][best].item<double>());
  const Ids read(batch.input.begin(), batch.input.begin() + batch.lengths[0]);
  return {
      {{"text", run.task->text(read)}, {"label", name(batch.labels[0])}, {certainty, name(best)}},
      true,
      best == batch.labels[0],
      false};
}

// What the model says where something is asked for.
report::Sample answered(OpenRun& run, const tasks::Batch& batch) {
  const at::Tensor scores =
      run.model->logits(to_device(make_input(batch, false), run.device), run.context);
  const Ids all = first_row(at::argmax(scores, -1));
  Ids wanted, said;
  for (size_t t = 0; t < static_cast<size_t>(batch.target_length); ++t) {
    if (batch.target[t] == tasks::kPad) continue;
    wanted.push_back(batch.target[t]);
    said.push_back(all[t]);
  }
  const Ids read(batch.input.begin(), batch.input.begin() + batch.lengths[0]);
  return {{{"input", run.task->text(read)},
           {"answers wanted", run.task->text(wanted)},
           {"model", run.task->text(said)}},
          true,
          said == wanted,
          true};
}

report::Sample continued(OpenRun& run, const tasks::Batch& batch) {
  const int64_t length = batch.lengths[0];
  const int64_t begun = std::clamp<int64_t>(length / 2, 1, kLongestBeginning);
  const int64_t more = std::min(length - begun, kLongestContinuation);
  const at::Tensor ids = make_input(batch, false).ids.slice(1, 0, begun).to(run.device);
  const auto model = std::dynamic_pointer_cast<models::LanguageModel>(run.model);
  const Ids said = greedy_continuations(model, ids, more, run.context).at(0);
  const auto first = batch.input.begin();
  return {{{"beginning", run.task->text({first, first + begun})},
           {"goes on, in the data", run.task->text({first + begun, first + begun + more})},
           {"goes on, says the model", run.task->text(said)}}};
}

report::Image raster(const std::vector<uint8_t>& values) {
  return {kImageWidth, static_cast<int64_t>(values.size()) / (3 * kImageWidth), values};
}

// The mean of each value as the model sees it coming: one pass, where continuing an image would
// take as many as it has values.
report::Sample foreseen(OpenRun& run, const tasks::Batch& batch) {
  const at::Tensor scores =
      run.model->logits(to_device(make_input(batch, false), run.device), run.context);
  const at::Tensor shares =
      at::softmax(scores[0].slice(1, tasks::kFirstByte).to(at::kCPU, at::kDouble), -1);
  const at::Tensor means =
      at::matmul(shares, at::arange(shares.size(1), shares.options())).round().to(at::kByte);
  const uint8_t* first = means.data_ptr<uint8_t>();
  return {{{"image", "", image_of(batch)},
           {"each value as the model expects it from those before", "",
            raster({first, first + batch.target_length})}}};
}

}  // namespace

bool is_image(const tasks::Task& task, const tasks::Batch& batch) {
  return task.info().metric == "bits_per_dim" && batch.target_length % (3 * kImageWidth) == 0;
}

report::Image image_of(const tasks::Batch& batch) {
  std::vector<uint8_t> values;
  for (int64_t t = 0; t < batch.target_length; ++t) {
    const int32_t id = batch.target[static_cast<size_t>(t)];
    values.push_back(static_cast<uint8_t>(std::max(0, id - tasks::kFirstByte)));
  }
  return raster(values);
}

std::vector<tasks::Batch> spread_examples(tasks::Task& task, int64_t count, uint64_t seed) {
  tasks::BatchConfig one;
  one.rows = 1;
  one.seed = seed;
  tasks::Batch batch;
  int64_t rows = 0;
  for (const auto source = task.eval("test", one); rows < kMostCounted && source->next(batch);) {
    ++rows;
  }
  const int64_t taken = std::min(count, rows);
  std::vector<tasks::Batch> examples;
  const auto source = task.eval("test", one);
  for (int64_t n = 0; static_cast<int64_t>(examples.size()) < taken && source->next(batch); ++n) {
    const int64_t next = static_cast<int64_t>(examples.size());
    if (n == (2 * next + 1) * rows / (2 * taken)) examples.push_back(batch);
  }
  return examples;
}

report::Sample sample_of(OpenRun& run, const tasks::Batch& batch) {
  const at::NoGradGuard no_grad;
  switch (run.task->info().model) {
    case tasks::ModelKind::kSeq2Seq: return decoded(run, batch);
    case tasks::ModelKind::kClassifier: return classified(run, batch);
    case tasks::ModelKind::kLanguageModel: break;
  }
  if (is_image(*run.task, batch)) return foreseen(run, batch);
  const auto end = batch.target.begin() + batch.lengths[0];
  const bool all_asked = std::find(batch.target.begin(), end, tasks::kPad) == end;
  return all_asked ? continued(run, batch) : answered(run, batch);
}

}  // namespace sinkhorn::train
