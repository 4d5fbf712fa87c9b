// Sequences of their own, a row each, padded to a common length: classification and sorting.
#pragma once

#include <memory>

#include "tasks/task.h"

namespace sinkhorn::tasks {

class Examples {
 public:
  virtual ~Examples() = default;
  virtual int64_t size() const = 0;
  virtual int64_t length(int64_t example) const = 0;
  // What a batch is padded to whose longest row is `longest`.
  virtual int64_t padded_length(int64_t longest) const = 0;
  // Writes an example into a row of a batch whose rows, length and pads stand already.
  virtual void fill(int64_t example, Batch& batch, int64_t row) const = 0;
};

// Rounded up to a multiple of 16, so that shapes repeat, but not beyond `most`.
int64_t round_length(int64_t length, int64_t most);

// By config.rows: training takes examples in a seeded order. By config.tokens: rows of like length
// share a batch of at most so many tokens, pads included (a longer row is a batch of its own).
// Evaluation runs from the shortest example to the longest, each once.
std::unique_ptr<BatchSource> make_padded(std::shared_ptr<const Examples> examples,
                                         const BatchConfig& config, bool training);

}  // namespace sinkhorn::tasks
