// What a run ran on, in words: for `sinkhorn info` and a run folder's environment.json.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace sinkhorn::train {

std::vector<std::pair<std::string, std::string>> environment();

}  // namespace sinkhorn::train
