// POST /v1/sorting: the sorting matrices of a text.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "report/sorting.h"
#include "tasks/task.h"

namespace sinkhorn::serve {

struct SortingContext {
  const tasks::Task& task;
  const std::string& text;
  int64_t block;  // tokens
  bool values;    // the numbers too, not the pictures alone
};

// {block, blocks: the text of each, layers: [{layer, heads: [{head, figures, png, values}]}]}.
// Throws Refusal where the numbers would be too many.
nlohmann::ordered_json sorting_object(const std::vector<report::SortMatrix>& matrices,
                                      const SortingContext& context);

}  // namespace sinkhorn::serve
