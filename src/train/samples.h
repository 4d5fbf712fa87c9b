// Examples of the test split beside what a model says to them.
#pragma once

#include <vector>

#include "report/run.h"
#include "train/open_run.h"

namespace sinkhorn::train {

// `count` batches of one row, spread evenly over the test split, which may go from short to long.
std::vector<tasks::Batch> spread_examples(tasks::Task& task, int64_t count, uint64_t seed);

// Whether a batch of one row is an image, or whole lines of one.
bool is_image(const tasks::Task& task, const tasks::Batch& batch);
report::Image image_of(const tasks::Batch& batch);

// Seq2Seq: the input, the target and the greedy decoding. Classifiers: text, label and prediction.
// Pixels: the image, and what the model expects of each value when it knows those before. Other
// language models: a beginning, how it goes on and how the model goes on greedily; where only some
// tokens are asked for, those and what the model says in their places.
report::Sample sample_of(OpenRun& run, const tasks::Batch& batch);

}  // namespace sinkhorn::train
