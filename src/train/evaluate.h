// Evaluation of a model on a split of a task.
#pragma once

#include <atomic>
#include <optional>
#include <string>

#include "sinkhorn/models/models.h"
#include "tasks/metrics.h"
#include "tasks/task.h"
#include "train/config.h"

namespace sinkhorn::train {

struct EvalConfig {
  std::string split = "valid";
  tasks::BatchConfig batches;
  int64_t limit = 0;                       // batches, spread evenly over the split; 0: all
  bool greedy = false;                     // Seq2Seq: decode greedily too
  const std::atomic<int>* stop = nullptr;  // given up when it becomes non-zero
};

// Deterministic; leaves the model in the mode it was in and draws no random number. Nothing where
// it was given up.
std::optional<tasks::Counts> evaluate(models::Model& model, tasks::Task& task,
                                      const nn::Context& context, const EvalConfig& config);

// How a run batches, in training and evaluation alike.
tasks::BatchConfig batch_config(const TrainConfig& config);

// The type products run in by train.precision; none: the parameters' own.
std::optional<at::ScalarType> compute_type(const std::string& precision);

// The same, with the process set up for it: in bf16 on CUDA the products that stay in float32, a
// sort network's, run in TF32; in every other precision they do not.
std::optional<at::ScalarType> set_precision(const std::string& precision, at::Device device);

// The model that a task and a configuration ask for, on the CPU, initialised from the generator.
std::shared_ptr<models::Model> make_model(const models::ModelConfig& config,
                                          const tasks::TaskInfo& info);

// Sizes the task decides: vocabulary, classes, and the longest sequence unless it was given.
models::ModelConfig fit_to_task(models::ModelConfig config, const tasks::TaskInfo& info);

}  // namespace sinkhorn::train
