#include "reproduce/tune.h"

#include <array>
#include <charconv>
#include <cmath>

#include "reproduce/results.h"
#include "sinkhorn/error.h"

namespace sinkhorn::reproduce {
namespace {

constexpr std::array<double, 4> kTemperatures = {0.25, 0.5, 0.75, 1.0};
constexpr std::array<int64_t, 4> kIterations = {2, 5, 10, 20};

std::string words(const Picks& picks) {
  char temperature[32];
  const auto end =
      std::to_chars(temperature, temperature + sizeof temperature, picks.temperature).ptr;
  return "temperature " + std::string(temperature, end) + ", iterations " +
         std::to_string(picks.iterations);
}

std::string folder_name(const Picks& picks) {
  std::string name = words(picks);
  for (char& c : name) {
    if (c == ' ' || c == ',') c = '-';
  }
  return name;
}

// What a trial reached on the validation split: the first of its columns that is counted there.
std::optional<double> score(const Table& table, const Run& trial, bool& higher_is_better) {
  const auto result = read_run(trial);
  if (!result || !result->figures.contains("valid")) return std::nullopt;
  const auto& figures = result->figures.at("valid");
  for (const Column& column : table.columns) {
    if (column.variant != table.variants[trial.variant].name) continue;
    if (!figures.contains(column.figure)) continue;
    higher_is_better = column.higher_is_better;
    return figures.at(column.figure);
  }
  return std::nullopt;
}

const nn::AttentionConfig& stack_of(const train::RunConfig& config) {
  const bool encoder_only = config.model.encoder.kind == "sortcut";
  return encoder_only ? config.model.encoder : config.model.decoder;
}

}  // namespace

bool is_tunable(const train::RunConfig& config) {
  return sorts(config) && stack_of(config).iterations > 0;
}

void Tuner::add(size_t row, size_t variant) {
  const train::RunConfig config = planner_.run(row, variant, 1, std::nullopt).config;
  if (!is_tunable(config)) return;
  const nn::AttentionConfig& stack = stack_of(config);
  const Picks own = {stack.temperature, stack.iterations};
  for (const Choice& other : choices_) {
    if (other.variant != variant ||
        (other.picks.temperature == own.temperature && other.picks.iterations == own.iterations)) {
      continue;
    }
    throw UsageError("--tune: the rows of " + table_.name +
                     " differ by temperature or iterations, which tuning would make one");
  }
  choices_.push_back({row, variant, own, "", false});
}

bool Tuner::next_grid() {
  for (Choice& choice : choices_) {
    if (grid_ != Grid::kNone) choose(choice);
  }
  grid_ = grid_ == Grid::kNone          ? Grid::kTemperature
          : grid_ == Grid::kTemperature ? Grid::kIterations
                                        : Grid::kDone;
  return grid_ != Grid::kDone && !choices_.empty();
}

std::vector<Run> Tuner::trials_of(const Choice& choice) const {
  std::vector<Picks> grid;
  if (grid_ == Grid::kTemperature) {
    for (const double t : kTemperatures) grid.push_back({t, choice.picks.iterations});
  } else {
    for (const int64_t n : kIterations) grid.push_back({choice.picks.temperature, n});
  }
  std::vector<Run> runs;
  for (const Picks& picks : grid) {
    runs.push_back(planner_.trial(choice.row, choice.variant, folder_name(picks), picks));
  }
  return runs;
}

std::vector<Run> Tuner::trials() const {
  std::vector<Run> runs;
  for (const Choice& choice : choices_) {
    for (Run& run : trials_of(choice)) runs.push_back(std::move(run));
  }
  return runs;
}

void Tuner::choose(Choice& choice) const {
  std::optional<double> best;
  Picks picks = choice.picks;
  for (const Run& trial : trials_of(choice)) {
    bool high = false;
    const auto reached = score(table_, trial, high);
    if (!reached || !std::isfinite(*reached)) continue;
    if (best && (high ? *reached <= *best : *reached >= *best)) continue;
    best = reached;
    picks = *trial.picks;
  }
  choice.picks = picks;
  choice.made |= best.has_value();
}

std::vector<Tuner::Choice> Tuner::choices() const {
  std::vector<Choice> chosen = choices_;
  for (Choice& choice : chosen) {
    const std::string& variant = table_.variants[choice.variant].name;
    choice.line = table_.rows[choice.row].name + (variant.empty() ? "" : ", " + variant) +
                  (choice.made ? ": picked " + words(choice.picks)
                               : ": no trial gave a figure to pick by; it is not trained");
  }
  return chosen;
}

}  // namespace sinkhorn::reproduce
