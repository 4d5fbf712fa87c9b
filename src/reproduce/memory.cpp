#include "reproduce/memory.h"

#include <algorithm>
#include <charconv>
#include <optional>

#include "reproduce/children.h"
#include "sinkhorn/error.h"
#include "train/attention_memory.h"
#include "train/environment.h"

namespace sinkhorn::reproduce {

namespace fs = std::filesystem;

namespace {

const std::string kMeasured = "memory_";
constexpr double kMebi = 1 << 20;
constexpr double kMostOnCpu = 4e9;  // bytes that a machine without a GPU is asked for

// About what full attention with its scores in memory asks for, in float32.
double bytes_of_scores(const Shape& shape) {
  const double length = static_cast<double>(shape.length);
  return 3 * 4 * static_cast<double>(train::AttentionProbe{}.heads) * length * length;
}

struct Place {
  size_t row, column;
};

class Measurement final : public Watcher {
 public:
  Measurement(const Table& table, const Options& options, Screen& screen,
              const std::atomic<int>& stop)
      : table_(table), options_(options), screen_(screen), stop_(stop) {}

  Outcome run() {
    const bool cpu = options_.device == "cpu" || train::environment_fact("cuda devices") == "0";
    const bool numbered = options_.device.starts_with("cuda:");
    device_ = cpu ? "cpu" : train::environment_fact(numbered ? options_.device : "cuda:0");
    fill(cpu);
    make_out(options_.out);
    const std::vector<Ending> endings = run_children(children_, 1, *this, stop_);
    for (size_t i = 0; i < endings.size(); ++i) read(places_[i], endings[i], children_[i]);
    outcome_.results.device = device_;
    outcome_.results.commit = train::environment_fact("commit");
    if (!outcome_.stopped) {
      write_results(results_path(options_.out, table_.name, options_.scale), outcome_.results);
    }
    return std::move(outcome_);
  }

 private:
  void fill(bool cpu) {
    outcome_.results = {table_.name, table_.title, table_.note,    options_.scale,
                        "",          "",           table_.columns, {}};
    for (const Row& row : table_.rows) {
      if (std::find(row.shape->scales.begin(), row.shape->scales.end(), options_.scale) ==
          row.shape->scales.end()) {
        continue;
      }
      ResultRow made{row.id, row.name, row.role, {}};
      for (size_t i = 0; i < table_.columns.size(); ++i) {
        const std::string& figure = table_.columns[i].figure;
        Cell cell;
        cell.paper = row.paper[i];
        if (!figure.starts_with(kMeasured)) {
          set(cell, memory_formula(figure, *row.shape), "computed");
        } else if (!cpu || figure != kMeasured + "scores" ||
                   bytes_of_scores(*row.shape) < kMostOnCpu) {
          measure(row, figure, i);
        }
        made.cells.push_back(cell);
      }
      outcome_.results.rows.push_back(made);
    }
  }

  void set(Cell& cell, double value, const std::string& how) {
    cell.value = value;
    cell.seeds = {value};
    cell.scale = options_.scale;
    cell.data = how;
  }

  void measure(const Row& row, const std::string& figure, size_t column) {
    const std::string kind = figure.substr(kMeasured.size());
    const std::string probe =
        kind + ":" + std::to_string(row.shape->length) + ":" + std::to_string(row.shape->block);
    places_.push_back({outcome_.results.rows.size(), column});
    children_.push_back(
        {kind + ", " + row.name,
         {"reproduce", table_.name, "--probe", probe, "--device", options_.device},
         options_.out / table_.name / options_.scale / (kind + "-" + row.id + ".log"),
         ""});
  }

  void read(const Place& place, const Ending& ending, const Child& child) {
    outcome_.stopped |= ending.stopped;
    if (ending.stopped) return;
    int64_t bytes = 0;
    const char* end = ending.last.data() + ending.last.size();
    const bool is_number = std::from_chars(ending.last.data(), end, bytes).ptr == end;
    if (ending.code != 0 || !is_number || ending.last.empty()) {
      outcome_.failures.push_back(child.name + ": " + ending.last + "; see " + child.log.string());
      return;
    }
    set(outcome_.results.rows[place.row].cells[place.column], static_cast<double>(bytes) / kMebi,
        "measured on " + device_);
  }

  // Of Watcher.
  void watched(const std::vector<std::pair<size_t, std::string>>& running) override {
    std::vector<std::string> lines;
    for (const auto& [child, line] : running) lines.push_back("measuring " + children_[child].name);
    screen_.running(lines);
  }

  const Table& table_;
  const Options& options_;
  Screen& screen_;
  const std::atomic<int>& stop_;
  std::string device_;
  std::vector<Place> places_;  // those of children_
  std::vector<Child> children_;
  Outcome outcome_;
};

}  // namespace

double memory_formula(const std::string& figure, const Shape& shape) {
  const double length = static_cast<double>(shape.length), block = static_cast<double>(shape.block);
  const double blocks = static_cast<double>((shape.length + shape.block - 1) / shape.block);
  const double budget = static_cast<double>(train::AttentionProbe{}.budget);
  const double scores = length * length, sort = blocks * blocks;
  if (figure == "one_block") return scores / (block * block + sort);
  if (figure == "all_blocks") return scores / (length * block + sort);
  if (figure == "sortcut") return scores / (length * budget * block + sort);
  throw Error("\"" + figure + "\" is no figure of memory");
}

Outcome measure_memory(const Table& table, const Options& options, Screen& screen,
                       const std::atomic<int>& stop) {
  return Measurement(table, options, screen, stop).run();
}

}  // namespace sinkhorn::reproduce
