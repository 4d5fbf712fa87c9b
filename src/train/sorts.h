// The sorting matrices of one input.
#pragma once

#include <string>
#include <vector>

#include "report/sorting.h"
#include "tasks/task.h"
#include "train/open_run.h"

namespace sinkhorn::train {

// An input of the user's own, as a batch.
tasks::Batch batch_of(const tasks::Task& task, const std::string& text);

// Every sorting layer's and head's matrix of a batch's first row.
std::vector<report::SortMatrix> sorts_of(OpenRun& run, const tasks::Batch& batch);

}  // namespace sinkhorn::train
