// The paper's memory saving, computed by its formulas and measured on this machine.
#pragma once

#include <atomic>

#include "reproduce/reproduce.h"

namespace sinkhorn::reproduce {

// L*L scores of full attention against what sorting keeps, with N = ceil(L / b) blocks: one block's
// scores and R as the paper counts, every block's, and SortCut's. Throws for another figure.
double memory_formula(const std::string& figure, const Shape& shape);

// A table whose rows are shapes. Measurements run one by one, each in a process of its own.
Outcome measure_memory(const Table& table, const Options& options, Screen& screen,
                       const std::atomic<int>& stop);

}  // namespace sinkhorn::reproduce
