// The training loop.
#pragma once

#include <atomic>
#include <string>

#include "tasks/metrics.h"
#include "train/config.h"

namespace sinkhorn::train {

struct Outcome {
  int64_t steps = 0;                   // done in all
  bool finished = false;               // or stopped by the stop flag; the state is saved
  std::vector<tasks::Figure> figures;  // of the test split, when finished
  int64_t peak_memory = 0;             // bytes held at once by training, on its device
  int64_t replayed_steps = 0;          // of these, from a captured graph
};

// Told what happens, so that a program can show it; the loop itself prints nothing.
class Observer {
 public:
  virtual ~Observer() = default;
  struct Start {
    std::string device, run, metric, data_note;
    int64_t parameters, first_step, steps;
    bool resumed;
  };
  struct Step {
    int64_t step, steps;
    double loss, gradient_norm, rate, tokens_per_second, seconds_left;
  };
  virtual void started(const Start&) {}
  virtual void stepped(const Step&) {}  // every log_every steps
  virtual void evaluated(int64_t step, const std::string& split,
                         const std::vector<tasks::Figure>& figures) {
    (void)step, (void)split, (void)figures;
  }
  // A checkpoint, or the last of a run.
  virtual void saved(const Outcome& so_far) { (void)so_far; }
};

// Trains as configured, into config.train.run. config_text is the same configuration as a file.
// Stops after the step in progress when `stop` becomes non-zero.
Outcome train(const RunConfig& config, const std::string& config_text, bool resume,
              Observer& observer, const std::atomic<int>& stop);

}  // namespace sinkhorn::train
