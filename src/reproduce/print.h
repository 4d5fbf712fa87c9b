// A table of results as aligned text, beside the paper's numbers.
#pragma once

#include <string>

#include "reproduce/results.h"

namespace sinkhorn::reproduce {

// Every figure carries a letter; the lines below say its scale, steps, seeds and data.
std::string print_table(const Results& results);

}  // namespace sinkhorn::reproduce
