#include "train/evaluate.h"

#include <ATen/Context.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/cross_entropy_loss.h>

#include <algorithm>

#include "sinkhorn/error.h"
#include "train/decode.h"
#include "train/inputs.h"

namespace sinkhorn::train {
namespace {

at::Device device_of(const models::Model& model) { return model.parameters().front().device(); }

// Row r of ids [B, T], up to `length`.
std::vector<int32_t> row_ids(const at::Tensor& ids, int64_t r, int64_t length) {
  std::vector<int32_t> row;
  const int64_t* from = ids.data_ptr<int64_t>() + r * ids.size(1);
  for (int64_t t = 0; t < length; ++t) row.push_back(static_cast<int32_t>(from[t]));
  return row;
}

// Counts of one batch; sums stay on the device until the split is through.
class Counter {
 public:
  Counter(models::Model& model, const nn::Context& context, const EvalConfig& config)
      : model_(model), context_(context), config_(config) {}

  void add(const tasks::Batch& batch) {
    const models::Input input =
        to_device(make_input(batch, device_of(model_).is_cuda()), device_of(model_));
    at::Tensor scores = model_.logits(input, context_);
    if (scores.scalar_type() != at::kDouble) scores = scores.to(at::kFloat);
    const bool labels = input.targets.dim() == 1;
    const at::Tensor nats = at::cross_entropy_loss(scores.flatten(0, -2), input.targets.flatten(),
                                                   {}, at::Reduction::Sum, labels ? -100 : 0, 0.0)
                                .to(at::kDouble);
    const at::Tensor said = at::argmax(scores, -1), right = said == input.targets;
    at::Tensor real = labels ? right.new_ones(right.sizes()) : input.targets != 0;
    const at::Tensor correct = right.logical_and(real).sum();
    const at::Tensor exact = labels ? correct : right.logical_or(real.logical_not()).all(1).sum();
    sums_ = sums_.defined() ? sums_ : at::zeros({3}, nats.options());
    sums_.add_(at::stack({nats, correct.to(at::kDouble), exact.to(at::kDouble)}));
    counts_.rows += batch.rows;
    counts_.units += batch.units;
    counts_.tokens += labels ? batch.rows : batch.tokens;
    const auto seq2seq = std::dynamic_pointer_cast<models::Seq2Seq>(model_.shared_from_this());
    if (seq2seq != nullptr) add_edits(seq2seq, batch, input, said);
  }

  tasks::Counts finish() {
    if (!sums_.defined()) return counts_;
    const at::Tensor sums = sums_.cpu();
    counts_.nats = sums[0].item<double>();
    counts_.correct = static_cast<int64_t>(sums[1].item<double>());
    counts_.exact = static_cast<int64_t>(sums[2].item<double>());
    return counts_;
  }

 private:
  void add_edits(const std::shared_ptr<models::Seq2Seq>& model, const tasks::Batch& batch,
                 const models::Input& input, const at::Tensor& forced) {
    const at::Tensor said = forced.cpu().contiguous();
    // Room for a decoding that misses its end, as far as the model reaches. A row's is its own,
    // whatever rows stand beside it.
    constexpr int64_t kRoom = 8;
    const int64_t limit = std::min(batch.target_length + kRoom, model->config().max_length);
    const Sequences greedy = config_.greedy
                                 ? greedy_answers(model, input.ids, input.mask, limit, context_)
                                 : Sequences();
    for (int64_t r = 0; r < batch.rows; ++r) {
      const int64_t length = batch.target_lengths[static_cast<size_t>(r)];
      const auto first = batch.target.begin() + r * batch.target_length;
      const std::vector<int32_t> target(first, first + length);
      counts_.edit_tokens += length;
      counts_.edits_forced +=
          static_cast<double>(tasks::edit_distance(row_ids(said, r, length), target));
      if (!config_.greedy) continue;
      counts_.greedy_tokens += length;
      std::vector<int32_t> answer = greedy[static_cast<size_t>(r)];
      answer.resize(std::min(answer.size(), static_cast<size_t>(length + kRoom)));
      counts_.edits_greedy += static_cast<double>(tasks::edit_distance(answer, target));
    }
  }

  models::Model& model_;
  const nn::Context& context_;
  const EvalConfig& config_;
  tasks::Counts counts_;
  at::Tensor sums_;  // nats, correct, exact
};

}  // namespace

std::optional<tasks::Counts> evaluate(models::Model& model, tasks::Task& task,
                                      const nn::Context& context, const EvalConfig& config) {
  const at::NoGradGuard no_grad;
  const bool was_training = model.is_training();
  model.eval();
  Counter counter(model, context, config);
  const auto stopped = [&] { return config.stop != nullptr && *config.stop != 0; };
  tasks::Batch batch;
  int64_t batches = 0;
  if (config.limit > 0) {
    const auto counted = task.eval(config.split, config.batches);
    while (!stopped() && counted->next(batch)) ++batches;
  }
  // Spread evenly: a split may be ordered, from short to long for one.
  const auto source = task.eval(config.split, config.batches);
  const bool all = config.limit == 0 || batches <= config.limit;
  bool whole = true;
  for (int64_t n = 0, taken = 0; source->next(batch); ++n) {
    whole = !stopped();
    if (!whole) break;
    if (!all && n != (2 * taken + 1) * batches / (2 * config.limit)) continue;
    counter.add(batch);
    if (++taken == config.limit && !all) break;
  }
  model.train(was_training);
  if (!whole) return std::nullopt;
  return counter.finish();
}

tasks::BatchConfig batch_config(const TrainConfig& t) {
  tasks::BatchConfig config;
  config.rows = t.batch_tokens > 0 ? 0 : t.batch;
  config.tokens = t.batch_tokens;
  config.seed = t.seed;
  return config;
}

std::optional<at::ScalarType> compute_type(const std::string& precision) {
  if (precision == "float32" || precision == "float64") return std::nullopt;
  if (precision == "bf16") return at::kBFloat16;
  if (precision == "fp16") return at::kHalf;
  throw UsageError("train.precision is '" + precision +
                   "'; it must be one of float32, bf16, fp16, float64");
}

std::optional<at::ScalarType> set_precision(const std::string& precision, at::Device device) {
  const auto type = compute_type(precision);
  // What they start from has been rounded to bf16's 8 bits: TF32's 11 lose little beside that.
  if (device.is_cuda()) at::globalContext().setAllowTF32CuBLAS(precision == "bf16");
  return type;
}

models::ModelConfig fit_to_task(models::ModelConfig config, const tasks::TaskInfo& info) {
  config.vocab = info.vocab;
  config.classes = info.classes;
  if (config.max_length == 0) config.max_length = info.max_length;
  return config;
}

std::shared_ptr<models::Model> make_model(const models::ModelConfig& config,
                                          const tasks::TaskInfo& info) {
  const models::ModelConfig fitted = fit_to_task(config, info);
  switch (info.model) {
    case tasks::ModelKind::kLanguageModel: return std::make_shared<models::LanguageModel>(fitted);
    case tasks::ModelKind::kSeq2Seq: return std::make_shared<models::Seq2Seq>(fitted);
    case tasks::ModelKind::kClassifier: return std::make_shared<models::Classifier>(fitted);
  }
  return nullptr;
}

}  // namespace sinkhorn::train
