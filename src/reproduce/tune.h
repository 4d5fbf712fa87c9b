// Choosing temperature and iterations from the paper's grids, by short runs and held-out
// data that no result is reported on (task.valid = train): first the temperature at the row's own
// iterations, then the iterations at that temperature.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "reproduce/plan.h"

namespace sinkhorn::reproduce {

// Whether there is something to tune: scores are balanced.
bool is_tunable(const train::RunConfig& config);

class Tuner {
 public:
  Tuner(const Table& table, const Planner& planner) : table_(table), planner_(planner) {}

  // Left out where nothing is balanced.
  void add(size_t row, size_t variant);
  // Moves on to the next grid, with what the last one's trials gave; false after the last.
  bool next_grid();
  std::vector<Run> trials() const;

  struct Choice {
    size_t row, variant;
    Picks picks;
    std::string line;   // in words
    bool made = false;  // some trial gave a figure to pick by
  };
  std::vector<Choice> choices() const;

 private:
  enum class Grid { kNone, kTemperature, kIterations, kDone };
  std::vector<Run> trials_of(const Choice& choice) const;
  void choose(Choice& choice) const;

  const Table& table_;
  const Planner& planner_;
  Grid grid_ = Grid::kNone;
  std::vector<Choice> choices_;
};

}  // namespace sinkhorn::reproduce
