// One training run, whole: what `sinkhorn train` reads from a file and the command line, and what a
// run folder keeps.
#pragma once

#include <cstdint>
#include <string>

#include "sinkhorn/models/config.h"
#include "tasks/task.h"

namespace sinkhorn::train {

struct OptimizerConfig {
  std::string name = "adamw";  // adamw, adam, adafactor
  double rate = 1e-3;          // peak learning rate; noam and rsqrt: a factor
  double beta1 = 0.9;
  double beta2 = 0.98;
  double epsilon = 1e-9;
  double weight_decay = 0.01;  // adamw; not on biases, norms and embeddings
  std::string schedule =
      "cosine";  // constant, linear, cosine, noam, rsqrt; all but rsqrt after a linear warm-up
  int64_t warmup = 500;     // steps
  double final_rate = 0.1;  // cosine, linear: the last step's share of the peak
  double clip = 1.0;        // largest gradient norm; 0: no clipping
};

struct TrainConfig {
  std::string run;                    // folder of the run
  std::string init;                   // a run, an export or a checkpoint to begin with; "": chance
  std::string device = "auto";        // cpu, cuda, cuda:N; auto: a GPU where there is one
  std::string precision = "float32";  // float32, bf16 (float32 master weights), float64, fp16
  int64_t threads = 0;                // 0: all cores
  int64_t steps = 1000;
  int64_t batch = 32;        // sequences a step; or
  int64_t batch_tokens = 0;  // tokens a step
  int64_t accumulate = 1;    // batches a step
  uint64_t seed = 1;
  int64_t log_every = 20;
  int64_t eval_every = 500;  // 0: only at the end
  int64_t eval_batches = 0;  // 0: the whole split
  int64_t test_batches = 0;  // the same for the test at the end
  int64_t save_every = 500;
  int64_t keep = 2;     // newest checkpoints kept, beside the best
  bool graph = true;    // capture steps of fixed shape in a CUDA graph where that is legal
  bool greedy = false;  // seq2seq: decode greedily in the final evaluation
};

struct RunConfig {
  tasks::TaskConfig task;
  models::ModelConfig model;
  OptimizerConfig optimizer;
  TrainConfig train;
};

}  // namespace sinkhorn::train
