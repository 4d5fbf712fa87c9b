// The sorting matrices of one input.
#pragma once

#include <string>
#include <vector>

#include "report/sorting.h"
#include "tasks/task.h"
#include "train/open_run.h"

namespace sinkhorn::train {

// An input of the user's own, as a batch. A language model reads it behind the token that begins a
// sequence of the task called `name`, as where it goes on from the text; of one that fills the
// model it does not read the last token, as in training.
tasks::Batch batch_of(const OpenRun& run, const std::string& name, std::vector<int32_t> ids);

// Every sorting layer's and head's matrix of a batch's first row.
std::vector<report::SortMatrix> sorts_of(OpenRun& run, const tasks::Batch& batch);

}  // namespace sinkhorn::train
